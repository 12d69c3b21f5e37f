# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole loop traces into one graph, feature by feature: the host decides nothing by a value.

`torch.compile(fullgraph=True)` is the judge, which knows no list of operations; it lets pass sizes that depend on
values, which `test_pretend_cuda` does not. Programs are compared with the eager loop. Nothing decodes that way: see
`hf_gr.torch.graphs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from families import EOS
from table_scorers import CPU, make_plan

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch import decode as decoding
from hf_gr.torch.decode import Decoded, decode
from hf_gr.torch.noise import Noise
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


def catalogue_of(kind: str) -> DeviceCatalogue:
    index, excluded = ConstraintIndex.from_sequences(ROWS, item_ids=IDS), None
    views = [index]
    if kind == "ragged":
        rows = {(*row[: 1 + number % 4].tolist(), EOS) for number, row in enumerate(ROWS)}
        views = [ConstraintIndex.from_sequences(sorted(rows), eos_token_id=EOS)]
    elif kind == "rules":
        index.remove(IDS[3:9])
        views = [index.where(np.arange(index.num_items) % step == 0) for step in (2, 3)]
        excluded = [IDS[:12], IDS[40:41]]
    return device_catalogue(combine_rules([view.snapshot for view in views], excluded), CPU)


BEAMS: dict[str, Any] = {"num_beams": 5}
SAMPLES = {"do_sample": True, "noise": Noise(torch.tensor([5, 6]))}
WITHOUT_EXIT = BEAMS | {"exit_early": False}
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "rules and beam samples": ("rules", BEAMS | SAMPLES),
    "ragged": ("ragged", WITHOUT_EXIT),
    "greedy": ("fixed", {"num_beams": 1}),
    "samples": ("fixed", {"num_beams": 1, "num_return_sequences": 3, **SAMPLES}),
    "rules": ("rules", BEAMS),
    "ragged, greedy": ("ragged", {"num_beams": 1, "exit_early": False}),
    "ragged, a penalty": ("ragged", WITHOUT_EXIT | {"length_penalty": 0.5, "early_stopping": True}),
    "scores of steps": ("fixed", BEAMS | {"output_scores": True, "output_logits": True}),
    "processors": ("fixed", BEAMS | {"processors": (lambda ids, scores: scores / 2, lambda ids, scores: scores)}),
}
FAST = ("rules and beam samples", "ragged")


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No program of another test."""
    torch._dynamo.reset()


def tensors_of(decoded: Decoded) -> list[torch.Tensor]:
    steps = [*(decoded.step_scores or ()), *(decoded.step_logits or ())]
    return [decoded.sequences, decoded.beam_indices, decoded.scores, *steps]


def check(kind: str, options: dict[str, Any]) -> None:
    catalogue, num_beams = catalogue_of(kind), options["num_beams"]
    plan = make_plan(2, **{"num_kept": 2 * num_beams, "num_return_sequences": num_beams} | options)
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
    check(*FEATURES[feature])


def read_a_value(scores: torch.Tensor) -> torch.Tensor:
    return scores if scores.max().item() < torch.inf else -scores


def test_a_planted_decision_and_leaving_early_break_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BREAKS):
        check("ragged", BEAMS)
    scores = decoding.child_scores
    monkeypatch.setattr(decoding, "child_scores", lambda *args, **kwargs: read_a_value(scores(*args, **kwargs)))
    with pytest.raises(BREAKS):
        check("fixed", BEAMS)
