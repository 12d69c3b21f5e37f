# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"` in Flax: it changes no answer, and only the first call of a kind times forwards."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

from transformers import Qwen3Config

from hf_gr import ConstraintIndex, enable
from hf_gr.core import auto
from hf_gr.core.auto import Costs
from hf_gr.flax.decode import decode_program
from hf_gr.flax.model import FlaxModel

SCORE_TOL = 1e-5  # fp32: the same sums in another order


@cache
def full() -> ConstraintIndex:
    """All sequences: no level is forced."""
    return ConstraintIndex.from_sequences(list(itertools.product((3, 4, 5), repeat=3)))


@cache
def sparse() -> ConstraintIndex:
    return ConstraintIndex.from_sequences([[3, 4, 5], [3, 5, 5], [4, 4, 4]])


@cache
def model() -> Any:
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        eos_token_id=None,
        pad_token_id=1,
    )
    return enable(FlaxModel(config))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any model."""
    monkeypatch.setattr(auto, "_KNOWN", type(auto._KNOWN)())


def ask(num_rows: int = 1, length: int = 8, **options: Any) -> Any:
    inputs = np.random.default_rng(length).integers(3, 16, size=(num_rows, length))
    given = {"constraint_index": full(), "num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True}
    return model().generate(inputs, **(given | {"output_scores": True} | options))


def assert_same(found: Any, expected: Any) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    np.testing.assert_allclose(found.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=0)


@pytest.mark.parametrize(("token", "expected"), [(1e-6, "trie"), (1.0, "none")])
def test_what_is_cheap_decides_and_changes_no_answer(
    token: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ask()
    assert plain.speculation.chosen is None
    monkeypatch.setattr(auto, "costs_of", lambda *given: Costs(1e-2, token))
    out = ask(drafting="auto")
    assert_same(out, plain)
    assert out.speculation.chosen == expected
    assert out.speculation.target_forwards == {"trie": 0, "none": 2}[expected]
    programs = decode_program._cache_size()
    assert ask(length=9, drafting="auto").speculation.chosen == expected  # of the same bucket
    assert decode_program._cache_size() == programs


def test_only_the_first_call_of_a_kind_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, kind in enumerate(({}, {"num_rows": 2}, {"num_beams": 4}), start=1):
        assert_same(ask(drafting="auto", **kind), ask(**kind))
        assert len(auto._KNOWN[model()]) == number
    monkeypatch.setattr(auto, "time", None)  # no clock is read again
    for kind in ({}, {"length": 30, "num_rows": 2}, {"draft_token_budget": 40}):
        assert ask(drafting="auto", **kind).speculation.chosen in ("none", "trie")
    with pytest.raises(AttributeError):
        ask(num_rows=5, drafting="auto")


def test_without_a_level_to_draft_there_is_nothing_to_choose() -> None:
    index = ConstraintIndex.from_sequences([[3], [4], [5]])
    assert ask(drafting="auto", constraint_index=index).speculation.chosen == "none"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "catalogue"}, "verification='catalogue' with drafting='auto'"),
        ({"num_draft_beams": 4}, "num_draft_beams=4"),
    ],
)
def test_what_no_candidate_can_use_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(drafting="auto", **options)
