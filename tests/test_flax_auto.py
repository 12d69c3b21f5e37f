# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"` in Flax, on machines whose times are known: it finds the fastest draft and changes no answer."""

from __future__ import annotations

import itertools
import logging
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

from transformers import Qwen3Config

from hf_gr import ConstraintIndex, enable
from hf_gr.flax.decode import decode_program
from hf_gr.flax.model import FlaxModel
from hf_gr.generation import trials
from hf_gr.generation.flax import auto, drafts

SCORE_TOL = 1e-5  # fp32: the same sums in another order
CALLS = 60  # more than any trial takes
COMPILING = 100.0  # seconds


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


class Machine:
    """A clock that only programs move.

    Args:
        seconds: of a call, by the class of its draft.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.now, self.known, self.served = 0.0, set(), []
        monkeypatch.setattr(auto, "time", SimpleNamespace(perf_counter=lambda: self.now))
        right = drafts.Draft.scorer

        def scorer(draft: Any, plan: Any, mesh: Any) -> Any:
            name = type(draft).__name__
            self.now += seconds[name] + COMPILING * (name not in self.known)
            self.known.add(name)
            self.served.append(name)
            return right(draft, plan, mesh)

        monkeypatch.setattr(drafts.Draft, "scorer", scorer)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any model, and ties are settled sooner."""
    monkeypatch.setattr(auto, "_KNOWN", type(auto._KNOWN)())
    monkeypatch.setattr(trials, "MOST_ROUNDS", 6)


def ask(num_rows: int = 1, length: int = 8, **options: Any) -> Any:
    inputs = np.random.default_rng(length).integers(3, 16, size=(num_rows, length))
    given = {"constraint_index": full(), "num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True}
    return model().generate(inputs, **(given | {"output_scores": True} | options))


def settle(**options: Any) -> list[Any]:
    """Calls until the kind has a choice; their answers."""
    outs = [ask(drafting="auto", **options)]
    while outs[-1].speculation.chosen is None and len(outs) < CALLS:
        outs.append(ask(drafting="auto", **options))
    return outs


def assert_same(found: Any, expected: Any) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    np.testing.assert_allclose(found.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [({"Draft": 1.0, "TrieDraft": 0.5}, "trie"), ({"Draft": 1.0, "TrieDraft": 1.5}, "none")],
    ids=["trie", "none"],
)
def test_auto_keeps_the_fastest_and_changes_no_answer(
    seconds: dict[str, float], expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(monkeypatch, seconds)
    plain = ask()
    assert plain.speculation.chosen is None
    with caplog.at_level(logging.INFO, logger="hf_gr.generation"):
        outs = settle()
    assert {out.speculation.target_forwards for out in outs} == {0, 2}  # all of them served
    for out in outs:
        assert_same(out, plain)
    assert outs[-1].speculation.chosen == expected
    assert [record.message for record in caplog.records] == [
        f"drafting='auto' chose {expected!r} among ['none', 'trie']"
    ]
    machine.served.clear()
    programs = decode_program._cache_size()
    assert ask(length=9, drafting="auto").speculation.chosen == expected  # of the same bucket
    assert machine.served == [{"none": "Draft", "trie": "TrieDraft"}[expected]]
    assert decode_program._cache_size() == programs


def test_a_call_that_compiles_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it comes late: with 20 more items at one node, additions have grown out of their program."""
    machine = Machine(monkeypatch, {"Draft": 1.0, "TrieDraft": 0.5})
    rows = list(itertools.product((3, 4, 5), (3, 4, 5, 6), (3, 4, 5)))
    index = ConstraintIndex.from_sequences(rows, item_ids=range(36))
    for _ in range(4):  # two rounds
        ask(drafting="auto", constraint_index=index)
    (known,) = auto._KNOWN[model()].values()
    assert sorted(known.trials._rounds[1].values()) == [0.5, 1.0]
    index.add([[3, 8, token] for token in range(3, 23)], range(100, 120))
    machine.known.clear()  # all of it compiles again
    for _ in range(4):
        ask(drafting="auto", constraint_index=index)
    assert [known] == list(auto._KNOWN[model()].values())
    times = [list(times.values()) for times in known.trials._rounds]
    assert np.isnan(times[2]).all()
    assert sorted(times[3]) == [0.5, 1.0]
    assert settle(constraint_index=index)[-1].speculation.chosen == "trie"


def test_every_kind_of_call_has_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, {"Draft": 1.0, "TrieDraft": 0.5})
    for number, kind in enumerate(({}, {"num_rows": 2}, {"draft_token_budget": 40}), start=1):
        ask(drafting="auto", **kind)
        assert len(auto._KNOWN[model()]) == number
    ask(length=30, num_rows=2, drafting="auto")  # one bucket, one kind
    assert len(auto._KNOWN[model()]) == 3


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
