# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole loop traces into one graph: the host decides nothing by a value.

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
from table_scorers import catalogue_of, make_plan

from hf_gr import ConstraintIndex
from hf_gr.torch.decode import Decoded, decode
from hf_gr.torch.noise import Noise
from hf_gr.torch.tree import Nodes

VOCABULARY = 24
SCORE_TOL = 1e-5  # fp32, at most 5 additions: a compiler may add in another order
ROWS = np.random.default_rng(0).integers(3, VOCABULARY, size=(200, 4))


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


SAMPLES: dict[str, Any] = {"do_sample": True, "noise": Noise(torch.tensor([5, 6])), "output_scores": True}
STOPS: dict[str, Any] = {"length_penalty": 0.5, "early_stopping": True}


def tensors_of(decoded: Decoded) -> list[torch.Tensor]:
    steps = [*(decoded.step_scores or ()), *(decoded.step_logits or ())]
    return [decoded.sequences, decoded.beam_indices, decoded.scores, *steps]


@pytest.mark.parametrize(
    ("ragged", "options"),
    [(False, SAMPLES), pytest.param(True, STOPS, marks=pytest.mark.slow)],
    ids=["fixed", "ragged"],
)
def test_the_loop_is_one_graph(ragged: bool, options: dict[str, Any]) -> None:
    torch._dynamo.reset()  # no program of another test
    rows = sorted({(*row[: 1 + number % 4].tolist(), EOS) for number, row in enumerate(ROWS)}) if ragged else ROWS
    index = ConstraintIndex.from_sequences(rows, eos_token_id=EOS if ragged else None)
    index.remove(range(3, 9))
    views = [index.where(np.arange(index.num_items) % step == 0) for step in (2, 3)]
    catalogue = catalogue_of(*views, excluded=[range(12), [40]])
    plan, weights = make_plan(2, 5, num_kept=10, exit_early=False, **options), torch.linspace(0.1, 9.7, VOCABULARY)

    def run(weights: torch.Tensor) -> list[torch.Tensor]:
        return tensors_of(decode(Mixed(weights, 2), catalogue, plan))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)(weights)
    for ours, theirs in zip(compiled, run(weights), strict=True):
        torch.testing.assert_close(ours, theirs, atol=SCORE_TOL, rtol=SCORE_TOL)
