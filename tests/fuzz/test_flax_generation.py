# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls of `generate` in Flax against brute force by the same checkpoint in PyTorch.

Options that make another program are few, since a program compiles for seconds; catalogues, rules and prompts are not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import check_rows
from draws import Batch, Catalogue, pick
from families import PAD, build

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

from hf_gr import AutoModelForGenerativeRetrieval, enable  # noqa: E402

pytestmark = pytest.mark.slow

LAYERS = {"llama": "num_hidden_layers", "t5": "num_layers"}
NUM_BEAMS = 16


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flax")


@cache
def pair(family: str, folder: Path) -> tuple[Any, Any]:
    """One checkpoint on both sides."""
    model = enable(build(family, config={LAYERS[family]: 1}))
    model.save_pretrained(folder / family)
    return model, AutoModelForGenerativeRetrieval.from_pretrained(folder / family, backend="flax")


@pytest.mark.usefixtures("one_shape")
def test_flax_calls_equal_brute_force(fuzz: Any, folder: Path) -> None:
    for case in fuzz:
        rng = case.rng
        model, flax = pair(pick(rng, *LAYERS), folder)
        catalogue = Catalogue(rng, length=3, most=250)
        batch = Batch.draw(rng, catalogue, sizes=(1, 2, 4))
        options = {
            "num_beams": NUM_BEAMS,
            "num_return_sequences": NUM_BEAMS,
            "early_stopping": "never",
            "length_penalty": pick(rng, 1.0, 0.0, 2.0, -1.0, 30.0),
            "renormalize_logits": False,
            "drafting": pick(rng, None, None, None, "trie"),
            "exact": pick(rng, False, False, True),
            "pad_token_id": PAD,
            "return_dict_in_generate": True,
            "output_scores": True,
        }
        inputs = {name: value.numpy() for name, value in batch.inputs.items()}
        try:
            with jax.default_matmul_precision("highest"):
                out = flax.generate(**inputs, constraint_index=batch.index, exclude_items=batch.excluded, **options)
            prompt_length = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
            check_rows(
                model,
                batch,
                np.asarray(out.sequences)[:, prompt_length:].tolist(),
                np.asarray(out.sequences_scores).tolist(),
                processor=None,
                is_exact=not options["exact"],  # which does not find what so many beams would: its proof is judged
                num_beams=NUM_BEAMS,
                length_penalty=options["length_penalty"],
                proven=None if out.num_proven is None else out.num_proven.tolist(),
            )
        except Exception as error:
            error.add_note(f"{model.config.model_type} in Flax: {options}")
            raise
        fuzz.count(calls=1, prompts=len(batch.legal), rows=len(out.sequences))
