# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which levels are scored together, against every other way down the catalogue; and the timing that it stands on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from table_scorers import TableModel, tables

from hf_gr.torch import costs
from hf_gr.torch.costs import LEAST_GAIN, WIDER_BY, ForwardCosts, measure_costs, plan_merges
from hf_gr.torch.tree import Nodes

pytestmark = pytest.mark.shapes

BEAUTY = (1, 91, 6539, 11172, 12023)  # nodes of the Beauty catalogue by level
REL_TOL = 1e-9  # sums of a few doubles


def nodes_below(nodes_per_level: Sequence[int], num_beams: int, level: int, merged: int) -> float:
    """Nodes of the next levels below the live beams, if they branch as the catalogue does on average."""
    width, total = float(min(num_beams, nodes_per_level[level])), 0.0
    for depth in range(level + 1, level + 1 + merged):
        width *= nodes_per_level[depth] / nodes_per_level[depth - 1]
        total += width
    return total


def ways_down(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to decide the levels from `first` on: pairs of a level with a forward, and the levels below it."""
    places = range(first + 1, last)
    for number in range(len(places) + 1):
        for stops in itertools.combinations(places, number):
            starts = (first, *stops)
            yield tuple((start, end - start - 1) for start, end in zip(starts, (*stops, last), strict=True))


def seconds_of(
    way: Sequence[tuple[int, int]], nodes: Sequence[int], num_beams: int, measured: ForwardCosts, budget: int
) -> float:
    """What a way costs besides the prefill; infinitely much where a forward is over the budget."""
    total = 0.0
    for level, merged in way:
        drafted = nodes_below(nodes, num_beams, level, merged)
        if drafted > max(budget, num_beams * merged):
            return float("inf")
        total += measured.token * drafted
        if level:  # the prompt's own forward is needed in any case
            total += measured.forward + measured.token * num_beams
    return total


def way_of(merges: Sequence[int]) -> list[tuple[int, int]]:
    """The forwards of a plan, from the prompt's on."""
    way, level = [], 0
    while level < len(merges):
        way.append((level, merges[level]))
        level += merges[level] + 1
    return way


def check_plan(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [1]
    for _ in range(rng.randint(2, 7)):
        nodes.append(int(nodes[-1] * rng.choice((1, 1, 1.1, 2, 5, 60))) + 1)
    num_beams, budget = rng.choice((1, 5, 20, 200)), rng.choice((1, 50, 512, 10**5))
    measured = ForwardCosts(forward=rng.choice((0.0, 1e-3, 1e-2)), token=rng.choice((0.0, 1e-6, 1e-5, 1e-3)))
    below_prompt = rng.random() < 0.7
    merges = plan_merges(nodes, num_beams, measured, budget=budget, below_prompt=below_prompt)
    last = len(nodes) - 1
    assert len(merges) == last

    def best_from(level: int) -> float:
        ways = [way for way in ways_down(level, last) if below_prompt or level or way[0] == (0, 0)]
        return min(seconds_of(way, nodes, num_beams, measured, budget) for way in ways)

    plain = seconds_of([(level, 0) for level in range(last)], nodes, num_beams, measured, budget)
    found = seconds_of(way_of(merges), nodes, num_beams, measured, budget)
    if best_from(0) > (1 - LEAST_GAIN) * plain:
        assert not any(merges)
        return
    assert found == pytest.approx(best_from(0), rel=REL_TOL)
    # Also from levels that the plan passes by: the beams' own subtree may turn out larger than the average.
    for level in range(last):
        here = (level, merges[level])
        rest = level + merges[level] + 1
        seconds = seconds_of([here], nodes, num_beams, measured, budget) + (best_from(rest) if rest < last else 0.0)
        assert seconds == pytest.approx(best_from(level), rel=REL_TOL)


def test_a_plan_is_the_cheapest_of_all() -> None:
    for seed in range(400):
        check_plan(seed)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda merges: (0, *merges[2:], 0),
        lambda merges: tuple(max(merge - 1, 0) for merge in merges),
        lambda merges: tuple(len(merges) - 1 - level for level in range(len(merges))),
        lambda merges: (0, *merges[1:]),
        lambda merges: (0,) * len(merges),
    ],
    ids=["a level early", "one too few", "everything at once", "nothing below the prompt", "nothing"],
)
def test_a_worse_plan_is_seen(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan_merges
    monkeypatch.setitem(globals(), "plan_merges", lambda *args, **kwargs: spoil(right(*args, **kwargs)))
    with pytest.raises(AssertionError):
        test_a_plan_is_the_cheapest_of_all()


@pytest.mark.parametrize(
    ("forward", "token", "num_beams", "budget", "merges"),
    [
        (8e-3, 2e-4, 20, 512, (0, 0, 1, 0)),  # the last two levels in one forward: 2 instead of 3
        (8e-3, 1e-4, 20, 512, (1, 0, 1, 0)),  # 91 nodes in the prompt's forward cost less than 20 in one more: 1
        (8e-3, 1e-4, 20, 10**6, (1, 0, 1, 0)),  # a thousand nodes cost more than a forward
        (8e-3, 1e-6, 20, 10**6, (1, 2, 1, 0)),  # on a device that is idle anyway a thousand do not
        (8e-3, 1e-3, 20, 512, (0, 0, 0, 0)),  # a node as dear as an eighth of a forward
        (8e-3, 1e-4, 20, 1, (0, 0, 0, 0)),
        (0.0, 1e-4, 20, 512, (0, 0, 0, 0)),
    ],
)
def test_plans_for_beauty(forward: float, token: float, num_beams: int, budget: int, merges: tuple[int, ...]) -> None:
    assert plan_merges(BEAUTY, num_beams, ForwardCosts(forward, token), budget=budget) == merges


def test_forced_levels_are_free() -> None:
    # One way on from every node of the second level: all levels below ride along, whatever the budget.
    plan = plan_merges([1, 100, 5000, 5000, 5000, 5000], 20, ForwardCosts(1e-2, 1e-5), budget=1)
    assert plan == (0, 0, 2, 1, 0)
    # So does the only first token, below the prompt.
    assert plan_merges([1, 1, 100, 100, 100], 20, ForwardCosts(1e-2, 1e-5), budget=1) == (1, 0, 1, 0)


def test_catalogues_of_one_and_two_levels() -> None:
    assert plan_merges([1, 5], 4, ForwardCosts(1e-2, 1e-5), budget=100) == (0,)
    assert plan_merges([1, 5, 9], 4, ForwardCosts(1e-2, 1e-5), budget=100) == (1, 0)


def test_what_a_forward_is_worth() -> None:
    assert ForwardCosts(forward=1e-2, token=1e-5).worth == pytest.approx(1000)
    assert ForwardCosts(forward=1e-2, token=0.0).worth == float("inf")


def test_gains_are_of_the_time_after_the_prefill() -> None:
    assert plan_merges([1, 5, 9], 4, ForwardCosts(1.15, 1.0), budget=100) == (1, 0)  # 5 of 5.15 s: 3% less
    assert plan_merges([1, 5, 9], 4, ForwardCosts(1.05, 1.0), budget=100) == (0, 0)  # 5 of 5.05 s: 1% less


def test_plain_search_takes_a_prefill_and_a_forward_a_level() -> None:
    measured = ForwardCosts(forward=1e-2, token=1e-3, num_rows=2)
    prefill, level = 1e-2 + 2 * 64e-3, 1e-2 + 2 * 20e-3  # four rows: a node costs twice as much as measured
    assert measured.plain(4, 64, num_beams=20, num_levels=4) == pytest.approx(prefill + 3 * level)


class _Clock:
    """A clock that only forwards move: 2 ms each and 10 us a node, the first of a size half a second more."""

    def __init__(self) -> None:
        self.now, self.seen = 0.0, set()

    def forward(self, num_nodes: int) -> None:
        self.now += 2e-3 + 1e-5 * num_nodes + (0.5 if num_nodes not in self.seen else 0.0)
        self.seen.add(num_nodes)


def test_costs_are_read_off_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = _Clock(), []
    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock.now)

    def new_scorer() -> Any:
        scorer = TableModel(tables(0, 2), 2)()
        score = scorer.score

        def timed(levels: Sequence[Nodes], *, depth: Any) -> list[torch.Tensor]:
            clock.forward(levels[0].tokens.shape[1])
            return score(levels, depth=depth)

        scorer.score = timed
        made.append(scorer)
        return scorer

    measured = measure_costs(new_scorer, 20)
    assert measured.token == pytest.approx(1e-5)
    assert measured.forward == pytest.approx(2e-3)
    assert measured.worth == pytest.approx(200)
    assert measured.num_rows == 2
    assert clock.seen == {1, 20, 20 + WIDER_BY}
    assert all(scorer.num_forwards == 2 for scorer in made)  # after a node of the prompt's, not after each other


def test_a_wider_forward_that_seems_cheaper_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(0.0, -1e-3)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: next(times))
    new_scorer: Any = TableModel(tables(0, 1), 1)
    measured = measure_costs(new_scorer, 4)
    assert measured.token == 0.0
    assert measured.forward >= 0.0
