# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls of `generate` in Flax against brute force by the same checkpoint in PyTorch.

A program compiles for seconds: so many cases share one, drawn first, with catalogues, rules, prompts, weights and
penalties of their own.
"""

from copy import deepcopy
from typing import Any

import jax
import numpy as np
import pytest
from brute_force import check_rows, requests_of
from draws import Batch, Catalogue, pick
from families import FAMILIES as KNOWN
from families import LLAMA, PAD
from flax_pairs import pair

from hf_gr.flax import device_trie, transition
from hf_gr.flax.families import FAMILIES

CASES_A_PROGRAM = 100
EVERY_NODE = 700  # of the largest catalogue here


@pytest.fixture(autouse=True)
def _one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that all catalogues fit."""
    monkeypatch.setattr(device_trie, "SMALLEST", 1024)
    monkeypatch.setattr(device_trie, "CHILDREN", 64)
    monkeypatch.setattr(transition, "HIDDEN_NODES", 256)


def draw_program(rng: np.random.Generator) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What one program serves: a family, kinds of catalogues and of batches, and options."""
    exact, samples = bool(rng.random() < 0.6), bool(rng.random() < 0.2)
    beams = pick(rng, 2, 8, 16) if exact else pick(rng, 1, 2, 5, 16)
    most = 30 if exact else beams if beams > 1 or not samples else 8
    options = {
        "num_beams": beams,
        "num_return_sequences": most if rng.random() < 0.5 else int(rng.integers(1, most + 1)),
        "renormalize_logits": bool(rng.random() < 0.25),
        "drafting": pick(rng, None, "trie"),
        **({"exact": True, "max_nodes": pick(rng, None, EVERY_NODE, 20)} if exact else {"do_sample": samples}),
    }
    catalogue: dict[str, Any] = {"length": int(rng.integers(1, 6)), "numbers": (30, 100)}
    catalogue["is_ragged"] = bool(rng.random() < 0.5)
    if options["drafting"]:  # whose shapes are the catalogue's
        catalogue["rng"] = np.random.default_rng(rng.integers(2**31))
    batch = {"sizes": (pick(rng, 1, 4),), "views": bool(rng.random() < 0.5), "excludes": bool(rng.random() < 0.4)}
    return pick(rng, *FAMILIES), catalogue, batch, options


def check_case(rng: np.random.Generator, program: Any) -> tuple[int, int]:
    """One call; returns the number of rows, and how many are proven."""
    family, of_catalogue, of_batch, options = program
    layers = 2 if family.startswith("gemma") else 1
    model, flax, _ = pair(family, seed=int(rng.integers(2)), layers=layers, **({} if family in KNOWN else LLAMA))
    catalogue = Catalogue(**{"rng": rng, **deepcopy(of_catalogue)})
    batch = Batch.draw(rng, catalogue, **of_batch)
    competes, samples = options["num_beams"] > 1, options.get("do_sample", False)
    warmth = float(rng.uniform(0.5, 2.0)) if samples else 1.0
    given = {
        **options,
        **({"length_penalty": pick(rng, 1.0, 0.0, 2.0, -1.0, 30.0), "early_stopping": "never"} if competes else {}),
        **({"temperature": warmth, "seed": int(rng.integers(2**31))} if samples else {}),
        "pad_token_id": PAD,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    inputs, start = batch.given(model)
    inputs = {name: value.numpy() for name, value in inputs.items()}
    try:
        with jax.default_matmul_precision("highest"):
            out = flax.generate(**inputs, constraint_index=batch.index, exclude_items=batch.excluded, **given)
        requests = requests_of(model, batch, (lambda last, scores: scores / warmth) if samples else None)
        proven = None if out.num_proven is None else out.num_proven.tolist()
        check_rows(
            batch,
            requests,
            np.asarray(out.sequences)[:, start:].tolist(),
            np.asarray(out.sequences_scores).tolist() if competes else None,
            is_exact=not (samples or options.get("exact")),  # whose proof is judged: it finds what beams do not
            num_beams=options["num_beams"],
            renormalize=options["renormalize_logits"],
            length_penalty=given.get("length_penalty", 1.0),
            proven=proven,
        )
        if options.get("max_nodes") == EVERY_NODE:
            assert proven == [min(options["num_return_sequences"], len(request.sequences)) for request in requests]
    except Exception as error:
        error.add_note(f"{family} in Flax: {given}")
        raise
    return len(out.sequences), sum(proven or ())


@pytest.mark.slow
def test_flax_calls_equal_brute_force(fuzz: Any) -> None:
    for case in fuzz:
        program = draw_program(np.random.default_rng([fuzz.seed, case.number // CASES_A_PROGRAM]))
        rows, proven = check_case(case.rng, program)
        fuzz.count(calls=1, exact_calls=int("exact" in program[3]), rows=rows, proven=proven)
