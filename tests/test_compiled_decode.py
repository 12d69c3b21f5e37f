# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole loop traces into one graph, feature by feature: the host decides nothing by a value.

`torch.compile(fullgraph=True)` is the judge, which knows nothing of our own lists of operations; it lets pass sizes
that depend on values, which `test_pretend_cuda` does not. Programs are compared with the eager loop. Nothing decodes
that way: see `hf_gr.torch.graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from families import EOS, build, prompts
from table_scorers import CPU, make_plan

from hf_gr import ConstraintIndex, enable
from hf_gr.catalogue.rules import combine_rules
from hf_gr.generation.torch import mixin
from hf_gr.torch import decode as decoding
from hf_gr.torch.decode import Decoded, decode
from hf_gr.torch.noise import Noise
from hf_gr.torch.speculation import Speculation
from hf_gr.torch.transition import DeviceCatalogue, device_catalogue
from hf_gr.torch.tree import Nodes

VOCABULARY = 24
BREAKS = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)
SCORE_TOL = 1e-5  # fp32, at most 5 additions: a compiler may add in another order
ROWS = np.random.default_rng(0).integers(3, VOCABULARY, size=(200, 4))
IDS = [f"item {number}" for number in range(len(ROWS))]


class Mixed:
    """A scorer that mixes a node's token, its parent's state and its depth: cheap to trace, and no two paths agree."""

    def __init__(self, weights: torch.Tensor, num_rows: int) -> None:
        self.num_forwards, self.takes_prompt, self.columns = 0, False, None
        self.weights = weights
        self.states = torch.arange(num_rows)[:, None] * 1.0

    def begin(self, levels: Sequence[Nodes] = ()) -> list[torch.Tensor]:
        return [self._logits()]

    def score(self, levels: Sequence[Nodes], *, depth: Any) -> list[torch.Tensor]:
        (nodes,) = levels
        self.num_forwards += 1
        self.states = self.states.gather(1, nodes.parents) * 0.7 + nodes.tokens * (0.3 + depth)
        return [self._logits()]

    def _logits(self) -> torch.Tensor:
        return torch.sin(self.states[..., None] * self.weights) * 3


def index_of(*, ragged: bool = False) -> ConstraintIndex:
    if not ragged:
        return ConstraintIndex.from_sequences(ROWS, item_ids=IDS)
    rows = {(*row[: 1 + number % 4].tolist(), EOS) for number, row in enumerate(ROWS)}
    return ConstraintIndex.from_sequences(sorted(rows), eos_token_id=EOS)


def plain(**kwargs: Any) -> DeviceCatalogue:
    return device_catalogue(combine_rules([index_of(**kwargs).snapshot]), CPU)


def with_rules() -> DeviceCatalogue:
    index = index_of()
    views = [index.where(np.arange(len(ROWS)) % step == 0) for step in (2, 3)]
    return device_catalogue(combine_rules([view.snapshot for view in views], [IDS[:12], IDS[40:41]]), CPU)


def with_updates() -> DeviceCatalogue:
    index = index_of()
    index.add(ROWS[:20, ::-1].copy(), item_ids=[f"new {number}" for number in range(20)])
    index.remove(IDS[3:9])
    return device_catalogue(combine_rules([index.snapshot]), CPU)


def noise() -> Noise:
    return Noise(torch.tensor([5, 6]))


FEATURES: dict[str, tuple[Callable[[], DeviceCatalogue], Callable[[], dict[str, Any]]]] = {
    "beams": (plain, lambda: {"num_beams": 5}),
    "greedy": (plain, lambda: {"num_beams": 1}),
    "samples": (plain, lambda: {"num_beams": 1, "num_return_sequences": 3, "do_sample": True, "noise": noise()}),
    "beam samples": (plain, lambda: {"num_beams": 5, "do_sample": True, "noise": noise()}),
    "rules and exclusions": (with_rules, lambda: {"num_beams": 5}),
    "additions and removals": (with_updates, lambda: {"num_beams": 5}),
    "ragged": (lambda: plain(ragged=True), lambda: {"num_beams": 5, "exit_early": False}),
    "ragged, greedy": (lambda: plain(ragged=True), lambda: {"num_beams": 1, "exit_early": False}),
    "ragged, a penalty": (
        lambda: plain(ragged=True),
        lambda: {"num_beams": 5, "exit_early": False, "length_penalty": 0.5, "early_stopping": True},
    ),
    "scores of steps": (plain, lambda: {"num_beams": 5, "output_scores": True, "output_logits": True}),
    "processors": (
        plain,
        lambda: {"num_beams": 5, "processors": (lambda ids, scores: scores / 2, lambda ids, scores: scores)},
    ),
}

FAST = ("beam samples", "rules and exclusions", "ragged")


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No program of another test."""
    torch._dynamo.reset()


def tensors_of(decoded: Decoded) -> list[torch.Tensor]:
    steps = [*(decoded.step_scores or ()), *(decoded.step_logits or ())]
    return [decoded.sequences, decoded.beam_indices, decoded.scores, *steps]


def check(catalogue: DeviceCatalogue, options: dict[str, Any]) -> None:
    plan = make_plan(
        2, **{"num_kept": 2 * options["num_beams"], "num_return_sequences": options["num_beams"]} | options
    )
    weights = torch.linspace(0.1, 9.7, VOCABULARY)

    def run(weights: torch.Tensor) -> list[torch.Tensor]:
        return tensors_of(decode(Mixed(weights, 2), catalogue, plan))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)(weights)
    for ours, theirs in zip(compiled, run(weights), strict=True):
        torch.testing.assert_close(ours, theirs, atol=SCORE_TOL, rtol=SCORE_TOL)


@pytest.mark.parametrize(
    "feature", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES]
)
def test_the_loop_is_one_graph(feature: str) -> None:
    catalogue, options = FEATURES[feature]
    check(catalogue(), options())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_models_forwards_are_in_the_same_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, decode = [], mixin.decode

    def in_one_graph(scorer: Any, catalogue: Any, plan: Any, drafter: None) -> Decoded:
        prefilled = scorer.begin()
        scorer.begin = lambda levels=(): prefilled

        def run() -> list[torch.Tensor]:
            return tensors_of(decode(scorer, catalogue, plan, drafter))

        sequences, beam_indices, scores = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)()
        compiled.append(scores)
        nothing = Speculation(0, 0, *[torch.zeros(2, dtype=torch.long)] * 4)
        return Decoded(sequences, scores, beam_indices, None, None, nothing)

    model, inputs = enable(build(family)), prompts(2, 9, padded=True)
    how = {"constraint_index": index_of(), "num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True}
    how |= {"output_scores": True, "_step_scores": False}
    expected = model.generate(**inputs, **how)
    monkeypatch.setattr(mixin, "decode", in_one_graph)
    found = model.generate(**inputs, **how)
    assert compiled
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=SCORE_TOL)


def read_a_value(scores: torch.Tensor) -> torch.Tensor:
    return scores if scores.max().item() < torch.inf else -scores


def test_a_planted_decision_breaks_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = decoding.child_scores
    monkeypatch.setattr(decoding, "child_scores", lambda *args, **kwargs: read_a_value(scores(*args, **kwargs)))
    with pytest.raises(BREAKS):
        check(plain(), {"num_beams": 5})


def test_leaving_early_breaks_the_graph() -> None:
    with pytest.raises(BREAKS):
        check(plain(ragged=True), {"num_beams": 5})
