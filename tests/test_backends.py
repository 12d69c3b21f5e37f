# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One table of calls, each on both backends, against transformers' own search, or, of samples, against PyTorch's
without drafts (with relaxed ones, as `test_verifiers.py` holds them to the oracle)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from families import EOS, PAD, build, prompts
from test_parity import allowed_by, assert_same
from transformers import GenerationMixin

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex

BACKENDS = ("torch", "flax")
LENGTH = 9  # of the prompts
SEEDS = [7, -1, 2**63 - 1]


@dataclass(frozen=True)
class Case:
    """A call of three padded prompts."""

    family: str
    ragged: bool  # whether items have 1 to 3 tokens and an end token, or 3
    options: dict[str, Any] = field(default_factory=dict)  # that transformers has, too
    drafting: dict[str, Any] = field(default_factory=dict)  # ours
    has_assistant: bool = False
    slow: tuple[str, ...] = ()  # backends whose programs take their time, where others compile the like


TRIE: dict[str, Any] = {"drafting": "trie"}
PATHS: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 10}
CASES: dict[str, Case] = {
    "beams": Case("llama", False),
    "beams of t5": Case("t5", False, slow=("flax",)),
    "lengths": Case("qwen3", True, {"length_penalty": 0.5, "early_stopping": True, "forced_eos_token_id": EOS}),
    "lengths of t5": Case("t5", True, {"length_penalty": 2.0, "early_stopping": "never"}, slow=("flax",)),
    "greedy": Case("qwen3", True, PATHS, slow=("flax",)),
    "renormalised": Case("qwen3", False, {"renormalize_logits": True}, slow=("flax",)),
    "processed": Case("qwen3", False, {"suppress_tokens": [5, 7, 9], "begin_suppress_tokens": [11]}),
    "trie": Case("qwen3", False, drafting=TRIE),
    "trie, little room": Case("llama", True, drafting=TRIE | {"draft_token_budget": 24}, slow=("flax",)),
    "trie of t5": Case("t5", False, drafting=TRIE | {"draft_token_budget": 64}, slow=("flax",)),
    "sampled beams": Case("qwen3", True, DRAWN | {"top_p": 0.9}, slow=("flax",)),
    "sampled beams, trie": Case("qwen3", False, DRAWN, TRIE, slow=("flax",)),
    "sampled paths of t5, trie": Case("t5", False, DRAWN | PATHS | {"num_return_sequences": 4}, TRIE),
    "draft model": Case("qwen3", False, has_assistant=True, slow=("flax",)),
    "draft model of t5": Case("t5", True, {"length_penalty": 0.5}, has_assistant=True, slow=("flax",)),
    "draft model, sampled": Case("qwen3", True, DRAWN, has_assistant=True, slow=("flax",)),
    "draft model, relaxed": Case("qwen3", False, DRAWN, {"verification": "relaxed"}, True, slow=("flax",)),
}
# Deeper models are held to each other in test_flax_model.py.
ONE_LAYER = {"t5": {"num_layers": 1}, "llama": {"num_hidden_layers": 1}, "qwen3": {"num_hidden_layers": 1}}


@cache
def catalogue(*, ragged: bool) -> ConstraintIndex:
    """Some hundred items, of which beams find enough: where transformers finds too few, it goes on with others."""
    rng = np.random.default_rng(0)
    rows = rng.integers(3, 24, size=(300, 3)).tolist()
    rows = [row[: 1 + number % 3] for number, row in enumerate(rows)] if ragged else rows
    return ConstraintIndex.from_sequences(rows, eos_token_id=EOS if ragged else None)


@cache
def model_of(family: str, backend: str, folder: Path, *, seed: int = 0) -> Any:
    """The same checkpoint on either side; another seed has other weights."""
    path = folder / f"{family}-{seed}"
    if not path.is_dir():
        build(family, config=ONE_LAYER[family], seed=seed).save_pretrained(path)
    return AutoModelForGenerativeRetrieval.from_pretrained(path, backend=backend)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backends")


@pytest.fixture(autouse=True)
def _highest_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def options_of(case: Case) -> dict[str, Any]:
    several = {"num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True, "output_scores": True}
    return {"pad_token_id": PAD, **several, **case.options}


def answer(case: Case, backend: str, folder: Path, *, drafts: bool = True) -> Any:
    """Ours, as PyTorch's tensors."""
    model, inputs = model_of(case.family, backend, folder), prompts(3, LENGTH, padded=True)
    options = options_of(case) | {"constraint_index": catalogue(ragged=case.ragged)}
    options |= (case.drafting if drafts else {}) | ({"seed": SEEDS} if case.options.get("do_sample") else {})
    if case.has_assistant and drafts:
        options["assistant_model"] = model_of(case.family, backend, folder, seed=1)
    if backend == "torch":
        return model.generate(**inputs, **options)
    found = model.generate(**{name: values.numpy() for name, values in inputs.items()}, **options)
    fields = ("sequences", "sequences_scores", "beam_indices")
    arrays = {name: getattr(found, name, None) for name in fields}
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items() if array is not None}
    tensors["sequences"] = tensors["sequences"].long()  # JAX's integers have 32 bits
    return SimpleNamespace(**tensors, speculation=found.speculation, seeds=found.seeds)


def expected(case: Case, folder: Path) -> Any:
    """The oracle's."""
    if case.options.get("do_sample"):
        return answer(case, "torch", folder, drafts="verification" in case.drafting)
    model, index = model_of(case.family, "torch", folder), catalogue(ragged=case.ragged)
    allowed = allowed_by(index, 1 if model.config.is_encoder_decoder else LENGTH)
    options = options_of(case) | {"eos_token_id": index.eos_token_id, "max_new_tokens": index.max_length}
    inputs = prompts(3, LENGTH, padded=True)
    return GenerationMixin.generate(model, **inputs, prefix_allowed_tokens_fn=allowed, **options)


CALLS = [
    pytest.param(name, backend, marks=pytest.mark.slow if backend in case.slow else [])
    for name, case in CASES.items()
    for backend in BACKENDS
]


@pytest.mark.parametrize(("name", "backend"), CALLS)
def test_a_call_equals_the_oracle_on_either_backend(name: str, backend: str, folder: Path) -> None:
    case = CASES[name]
    ours, theirs = answer(case, backend, folder), expected(case, folder)
    if hasattr(theirs, "sequences_scores"):
        assert assert_same(theirs, ours, options_of(case)["num_return_sequences"]) >= 2  # of 3 prompts
    else:
        assert ours.sequences.tolist() == theirs.sequences.tolist()
    if case.options.get("do_sample"):
        assert ours.seeds == SEEDS
    if case.drafting or case.has_assistant:
        assert (ours.speculation.accepted_nodes > 0).any()  # else the case would be another one's
