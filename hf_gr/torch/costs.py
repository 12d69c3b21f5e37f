# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a forward costs, and which levels of a catalogue are worth deciding together. Knows no beams' scores.

A forward of n nodes takes `forward + n * token` seconds. K beams need one a level; also scoring the whole subtree
of the next m levels saves m forwards and costs its nodes. Below the prompt, whose forward is needed in any case, that
costs the nodes alone. The cheapest way down the levels is a shortest path.

Axes: B batch, K beams, L levels, P prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .scorers import Scorer
from .tree import Nodes

LEAST_GAIN = 0.02  # of the time after the prefill; a plan that gains less is not used
WIDER_BY = 256  # nodes between the two forwards that are timed
NUM_TIMES = 5


@dataclass(frozen=True)
class ForwardCosts:
    """The time of a forward over a prefilled prompt.

    Attributes:
        forward: seconds of any forward.
        token: seconds of each node, for the whole batch.
        num_rows: B of the forwards that were timed.
    """

    forward: float
    token: float
    num_rows: int = 1

    @property
    def worth(self) -> float:
        """Nodes that take as long as an empty forward."""
        return self.forward / self.token if self.token > 0.0 else math.inf

    def plain(self, num_rows: int, num_tokens: int, *, num_beams: int, num_levels: int) -> float:
        """Seconds of plain search for a batch, its prefill included.

        Args:
            num_rows: B.
            num_tokens: P.
            num_beams: K.
            num_levels: L.
        """
        num_nodes = num_tokens + (num_levels - 1) * num_beams
        return num_levels * self.forward + num_nodes * self.token * num_rows / self.num_rows


def measure_costs(new_scorer: Callable[[], Scorer], num_beams: int, *, wider_by: int = WIDER_BY) -> ForwardCosts:
    """Time forwards of few and of many nodes after a prompt.

    Args:
        new_scorer: makes a scorer over the prompt; called for every forward.
        num_beams: nodes of the smaller forward.
        wider_by: additional nodes of the larger one.
    """

    def timed(num_nodes: int) -> float:
        nonlocal num_rows
        scorer = new_scorer()
        (logits,) = scorer.begin()
        device, num_rows = logits.device, len(logits)
        zeros = torch.zeros((num_rows, num_nodes), dtype=torch.long, device=device)
        one = zeros[:, :1]
        scorer.score([Nodes(one, one, one)], depth=1)  # the second scorer over a prompt first copies its keys
        Stopwatch(device).read()  # what is in the queue is none of this forward's time
        watch = Stopwatch(device)
        scorer.score([Nodes(zeros, zeros, zeros)], depth=2)
        return watch.read()

    num_rows = 1
    sizes = (num_beams, num_beams + wider_by)
    for size in sizes:
        timed(size)  # the first forward of a shape allocates and chooses kernels
    # Disturbances only make a measurement longer.
    few, many = (min(times) for times in zip(*(map(timed, sizes) for _ in range(NUM_TIMES)), strict=True))
    token = max(many - few, 0.0) / wider_by
    return ForwardCosts(forward=max(few - token * num_beams, 0.0), token=token, num_rows=num_rows)


def plan_merges(
    nodes_per_level: Sequence[int], num_beams: int, costs: ForwardCosts, *, budget: int, below_prompt: bool = True
) -> tuple[int, ...]:
    """By level of the live beams, how many levels below to score together with them.

    Assumes that subtrees branch as the catalogue does on average.

    Args:
        nodes_per_level: nodes of the catalogue with 0 to L tokens.
        num_beams: K.
        costs: the time of a forward.
        budget: nodes besides the live beams that a forward may score.
        below_prompt: whether the prompt's own forward may score nodes.

    Returns:
        For each level 0 (below the prompt) to L - 1 the number of levels; 0 everywhere if the plan gains less than
        `LEAST_GAIN`.

    Example:
        >>> beauty = [1, 91, 6539, 11172, 12023]
        >>> plan_merges(beauty, 20, ForwardCosts(forward=8e-3, token=2e-4), budget=512)
        (0, 0, 1, 0)
        >>> plan_merges(beauty, 20, ForwardCosts(forward=8e-3, token=1e-4), budget=512)
        (1, 0, 1, 0)
    """
    last = len(nodes_per_level) - 1
    merges = [0] * last
    best = [0.0] * (last + 1)  # seconds from live beams of a level to the end, less the prefill's own
    plain = [0.0] * (last + 1)
    for level in range(last - 1, -1, -1):
        live = min(num_beams, nodes_per_level[level])
        own = costs.forward + costs.token * num_beams if level else 0.0
        plain[level] = own + plain[level + 1]
        best[level], width, drafted = math.inf, float(live), 0.0
        for merged in range(last - level if level or below_prompt else 1):
            # Of two equally fast plans, the one with fewer nodes.
            seconds = own + costs.token * drafted + best[level + merged + 1]
            if drafted <= max(budget, num_beams * merged) and seconds < best[level]:
                best[level], merges[level] = seconds, merged
            width *= nodes_per_level[level + merged + 1] / nodes_per_level[level + merged]
            drafted += width
    return (0,) * last if best[0] > (1.0 - LEAST_GAIN) * plain[0] else tuple(merges)


class Stopwatch:
    """The time from now on, by the device's own clock: only who reads it waits, and for this stream alone.

    Args:
        device: what is timed; for a CPU by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = self._mark()

    def read(self) -> float:
        """Seconds until what the device has been given is done."""
        end: Any = self._mark()
        if self.device.type != "cuda":
            return end - self.start
        end.synchronize()
        return self.start.elapsed_time(end) / 1e3

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark
