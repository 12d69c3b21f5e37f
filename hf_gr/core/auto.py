# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: which draft is expected to be the fastest, by two timed forwards and the catalogue's widths.

A forward of n nodes takes `forward + n * token` seconds. K beams need one per level; a forward that also scores m more
levels saves m forwards and costs the subtree's nodes. In the prompt's own forward, nodes cost nothing else.

Axes: K beams, L levels.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from .widths import nodes_below

LEAST_GAIN = 0.05  # of the time after the prefill: a draft that gains less is not used
ROOM = 2.0  # beams favour large subtrees: how many times the average number of nodes is below them
HEAD = 0.02  # the cost of one level of a draft head's search, as a share of a forward of the model
ACCEPTED = 0.5  # the share of a draft model's or head's levels that is expected to be accepted
WIDER_BY = 128  # nodes between the two forwards that are timed, at most
NUM_TIMES = 3


@dataclass(frozen=True)
class Costs:
    """Seconds of any forward after a prompt, and of each of its nodes, for the whole batch."""

    forward: float
    token: float


@dataclass(frozen=True)
class Search:
    """A draft model or a draft head."""

    name: str
    share: float  # the cost of a level of its search, as a share of a forward of the model
    num_beams: int  # nodes that it drafts a level
    num_steps: int  # levels of a draft
    first_level: int  # where it can begin


_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], Costs]] = WeakKeyDictionary()
_LOCK = threading.Lock()  # held while forwards are timed, so that no two calls time at once


def costs_of(
    model: Any, kind: tuple[Any, ...], timed_forward: Callable[[int], Callable[[], Any]], num_beams: int, budget: int
) -> Costs:
    """The costs of a kind of call, timed once: a forward of K nodes, and one of K and the budget's.

    `timed_forward` prepares a forward of so many nodes, which returns when it is done.
    """
    wider_by = max(min(budget, WIDER_BY), num_beams)

    def timed(num_nodes: int) -> float:
        forward = timed_forward(num_nodes)
        start = time.perf_counter()
        forward()
        return time.perf_counter() - start

    with _LOCK:
        known = _KNOWN.setdefault(model, {})
        if kind not in known:
            sizes = (num_beams, num_beams + wider_by)
            # The first forward of a shape compiles or allocates; disturbances only make a time longer.
            _, *times = [tuple(map(timed, sizes)) for _ in range(1 + NUM_TIMES)]
            narrow, wide = map(min, zip(*times, strict=True))
            token = max(wide - narrow, 0.0) / wider_by
            known[kind] = Costs(forward=max(narrow - token * num_beams, 0.0), token=token)
        return known[kind]


def choose_draft(
    widths: Sequence[int],
    num_beams: int,
    costs: Costs,
    *,
    budget: int,  # the most nodes in addition to the live beams
    below_prompt: bool = True,  # whether the prompt's own forward may score nodes
    searches: Sequence[Search] = (),
) -> tuple[str, int]:
    """The draft that is expected to be the fastest: "none", "trie" or a search's name; and its node budget.

    The budget says what levels are scored together. `widths` are the nodes of the catalogue with 0 to L tokens.

    Example:
        >>> beauty = (1, 91, 6539, 11172, 12023)
        >>> choose_draft(beauty, 20, Costs(forward=8e-3, token=2e-5), budget=512)  # 91 with the prompt, then 69
        ('trie', 91)
        >>> choose_draft(beauty, 20, Costs(forward=8e-3, token=1e-3), budget=512)
        ('none', 1)
    """
    expected, size = expected_seconds(
        widths, num_beams, costs, budget=budget, below_prompt=below_prompt, searches=searches
    )
    name = "none"
    for other, seconds in expected.items():
        if seconds < (1.0 - LEAST_GAIN) * expected[name]:
            name = other
    return name, size


def expected_seconds(
    widths: Sequence[int],
    num_beams: int,
    costs: Costs,
    *,
    budget: int,
    below_prompt: bool = True,
    searches: Sequence[Search] = (),
) -> tuple[dict[str, float], int]:
    """The seconds after the prompt's forward, by draft, and the node budget of "trie"; arguments as above."""
    last, plain = len(widths) - 1, costs.forward + costs.token * num_beams
    below = [_nodes_below_beams(widths, num_beams, level) for level in range(last)]

    def with_trie(size: int) -> float:
        """The seconds after the prompt's forward, if whole levels are scored as far as they fit."""
        level, seconds = 0, 0.0
        while level < last:
            seconds += plain if level else 0.0
            used, depth = 0, level + 1
            for number in below[level] if level or below_prompt else ():
                if number > max(size - used, num_beams):  # as many nodes as beams are always allowed
                    break
                used, depth = used + number, depth + 1
            seconds, level = seconds + costs.token * used, depth
        return seconds

    def with_search(search: Search) -> float:
        level, seconds = max(search.first_level, int(not below_prompt)), 0.0
        while level < last:
            steps = min(search.num_steps, last - 1 - level)
            seconds += (plain if level else 0.0) + steps * (search.share * plain + costs.token * search.num_beams)
            level += 1 + int(ACCEPTED * steps)
        return seconds

    sizes = {1, *(size for numbers in below for size in accumulate(numbers) if size <= budget)}
    size = min(sorted(sizes), key=with_trie)  # of equally fast ones the smallest
    expected = {"none": plain * (last - 1), "trie": with_trie(size)}
    return expected | {search.name: with_search(search) for search in searches}, size


def _nodes_below_beams(widths: Sequence[int], num_beams: int, level: int) -> list[int]:
    """Nodes of each level below the beams of one; the last needs no logits."""
    own = min(num_beams, widths[level])
    averages = zip(nodes_below(widths, num_beams, level), widths[level + 1 :], strict=False)
    return [math.ceil(min(own + ROOM * (average - own), number)) for average, number in averages]
