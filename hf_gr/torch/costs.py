# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a forward costs, and which levels of a catalogue are worth deciding together. Knows no beams' scores.

A forward of n nodes takes `forward + n * token` seconds. K beams need one a level; also scoring the whole subtree
of the next m levels saves m forwards and costs its nodes. The cheapest way down the levels is a shortest path.

Axes: L levels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .scorers import Scorer
from .tree import Nodes

LEAST_GAIN = 0.05  # of the time after the prefill; a plan that gains less is not used
WIDER_BY = 256  # nodes between the two forwards that are timed
NUM_TIMES = 5


@dataclass(frozen=True)
class ForwardCosts:
    """The time of a forward over a prefilled prompt.

    Attributes:
        forward: seconds of any forward.
        token: seconds of each node, for the whole batch.
    """

    forward: float
    token: float

    @property
    def worth(self) -> float:
        """Nodes that take as long as an empty forward."""
        return self.forward / self.token if self.token > 0.0 else math.inf


def measure_costs(new_scorer: Callable[[], Scorer], num_beams: int, *, wider_by: int = WIDER_BY) -> ForwardCosts:
    """Time forwards of few and of many nodes after a prompt.

    Args:
        new_scorer: makes a scorer over the prompt; called for every forward.
        num_beams: nodes of the smaller forward.
        wider_by: additional nodes of the larger one.
    """

    def timed(num_nodes: int) -> float:
        scorer = new_scorer()
        device = scorer.prompt_logits.device
        zeros = torch.zeros((len(scorer.prompt_logits), num_nodes), dtype=torch.long, device=device)
        _wait(device)
        start = time.perf_counter()
        scorer.score([Nodes(zeros, zeros, zeros)], depth=1)
        _wait(device)
        return time.perf_counter() - start

    sizes = (num_beams, num_beams + wider_by)
    for size in sizes:
        timed(size)  # the first forward of a shape allocates and chooses kernels
    # Disturbances only make a measurement longer.
    few, many = (min(times) for times in zip(*(map(timed, sizes) for _ in range(NUM_TIMES)), strict=True))
    token = max(many - few, 0.0) / wider_by
    return ForwardCosts(forward=max(few - token * num_beams, 0.0), token=token)


def plan_merges(
    nodes_per_level: Sequence[int], num_beams: int, costs: ForwardCosts, *, budget: int
) -> tuple[int, ...]:
    """By level of the live beams, how many levels below to score together with them.

    Assumes that subtrees branch as the catalogue does on average.

    Args:
        nodes_per_level: nodes of the catalogue with 0 to L tokens.
        num_beams: K.
        costs: the time of a forward.
        budget: nodes besides the live beams that a forward may score.

    Returns:
        For each level 0 to L - 1 the number of levels; 0 everywhere if the plan gains less than `LEAST_GAIN`.

    Example:
        >>> beauty = [1, 91, 6539, 11172, 12023]  # the prefill decides level 1
        >>> plan_merges(beauty, 20, ForwardCosts(forward=8e-3, token=1e-4), budget=512)
        (0, 0, 1, 0)
    """
    last = len(nodes_per_level) - 1
    merges = [0] * last
    best = [0.0] * (last + 1)  # seconds from live beams of a level to the end
    plain = [0.0] * (last + 1)
    for level in range(last - 1, 0, -1):
        live = min(num_beams, nodes_per_level[level])
        plain[level] = costs.forward + costs.token * num_beams + plain[level + 1]
        best[level], width, drafted = math.inf, float(live), 0.0
        for merged in range(last - level):
            # Of two equally fast plans, the one with fewer nodes.
            seconds = costs.forward + costs.token * (num_beams + drafted) + best[level + merged + 1]
            if drafted <= max(budget, num_beams * merged) and seconds < best[level]:
                best[level], merges[level] = seconds, merged
            width *= nodes_per_level[level + merged + 1] / nodes_per_level[level + merged]
            drafted += width
    if best[1 if last > 1 else 0] > (1.0 - LEAST_GAIN) * plain[1 if last > 1 else 0]:
        return (0,) * last
    return tuple(merges)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
