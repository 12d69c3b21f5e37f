# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: which draft is expected to be the fastest, by two timed forwards and the catalogue's widths.

A forward of n nodes takes `forward + n * token` seconds. K beams need one a level; one that scores a subtree of m more
levels, too, saves m forwards and costs the subtree's nodes. In the prompt's own forward nodes cost nothing else.

Axes: K beams, L levels.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hf_gr.catalogue.snapshot import Snapshot

LEAST_GAIN = 0.05  # of the time after the prefill: what gains less is not used
ROOM = 2.0  # how much more than on average a catalogue branches below the beams, which favour large subtrees
HEAD = 0.02  # of a forward of the model: a level of a draft head's search
ACCEPTED = 0.5  # of the levels that a draft model or a head drafts
WIDER_BY = 128  # nodes between the two forwards that are timed, at most
NUM_TIMES = 3


@dataclass(frozen=True)
class Costs:
    """Seconds of any forward after a prompt, and of each of its nodes, for the whole batch."""

    forward: float
    token: float


@dataclass(frozen=True)
class Search:
    """A draft model or a draft head.

    Attributes:
        name: of the draft.
        share: what a level of its search takes, of a forward of the model.
        num_beams: nodes that it drafts a level.
        num_steps: levels of a draft.
        first_level: where it can begin.
    """

    name: str
    share: float
    num_beams: int
    num_steps: int
    first_level: int


_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], Costs]] = WeakKeyDictionary()
_LOCK = threading.Lock()  # held while forwards are timed, so that no two calls time at once


def costs_of(
    model: Any, kind: tuple[Any, ...], new_forward: Callable[[int], Callable[[], None]], num_beams: int, budget: int
) -> Costs:
    """The costs of a kind of call, timed once: a forward of K nodes, and one of K and the budget's.

    Args:
        model: the model.
        kind: what the costs depend on.
        new_forward: prepares a forward of so many nodes, which returns when it is done.
        num_beams: K.
        budget: nodes that may be scored ahead.
    """
    wider_by = max(min(budget, WIDER_BY), num_beams)

    def timed(num_nodes: int) -> float:
        forward = new_forward(num_nodes)
        start = time.perf_counter()
        forward()
        return time.perf_counter() - start

    with _LOCK:
        known = _KNOWN.setdefault(model, {})
        if kind not in known:
            sizes = (num_beams, num_beams + wider_by)
            for size in sizes:
                timed(size)  # the first forward of a shape compiles or allocates
            # Disturbances only make a time longer.
            narrow, wide = (min(times) for times in zip(*(map(timed, sizes) for _ in range(NUM_TIMES)), strict=True))
            token = max(wide - narrow, 0.0) / wider_by
            known[kind] = Costs(forward=max(narrow - token * num_beams, 0.0), token=token)
        return known[kind]


@lru_cache(maxsize=1024)
def choose_draft(
    widths: tuple[int, ...],
    num_beams: int,
    costs: Costs,
    *,
    budget: int,
    below_prompt: bool = True,
    searches: tuple[Search, ...] = (),
) -> tuple[str, int]:
    """The draft that is expected to be the fastest, and the nodes besides the live beams that it may score.

    Args:
        widths: nodes of the catalogue with 0 to L tokens.
        num_beams: K.
        costs: of a forward.
        budget: the most nodes besides the live beams.
        below_prompt: whether the prompt's own forward may score nodes.
        searches: what may search ahead.

    Returns:
        "none", "trie" or the name of a search; and the node budget, which says what levels are scored together.

    Example:
        >>> beauty = (1, 91, 6539, 11172, 12023)
        >>> choose_draft(beauty, 20, Costs(forward=8e-3, token=2e-5), budget=512)  # 91 with the prompt, then 69
        ('trie', 91)
        >>> choose_draft(beauty, 20, Costs(forward=8e-3, token=1e-3), budget=512)
        ('none', 1)
    """
    plain = narrow = costs.forward + costs.token * num_beams
    plain *= len(widths) - 2
    best, name = plain, "none"
    sizes = {1, *(size for level in range(len(widths)) for size in accumulate(_below(widths, num_beams, level)))}
    ways = [(_tree_seconds(widths, num_beams, costs, size, below_prompt), size) for size in sizes if size <= budget]
    seconds, chosen = min(ways)  # of equally fast ones the smallest
    if seconds < (1.0 - LEAST_GAIN) * best:
        best, name = seconds, "trie"
    for search in searches:
        seconds, level = 0.0, max(search.first_level, int(not below_prompt))
        while level < len(widths) - 1:
            steps = min(search.num_steps, len(widths) - 2 - level)
            seconds += (narrow if level else 0.0) + steps * (search.share * narrow + costs.token * search.num_beams)
            level += 1 + int(ACCEPTED * steps)
        if seconds < (1.0 - LEAST_GAIN) * best:
            best, name = seconds, search.name
    return name, chosen


def candidates(
    new_draft: Callable[[str], Any],
    check: Callable[[Any], None],
    config: Any,
    *,
    has_head: bool,
    has_assistant: bool,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The drafts that may serve a call, checked, the simplest first: no draft, the catalogue, a head, a draft model.

    Args:
        new_draft: makes one by its name.
        check: of a draft, with the call's arguments; raises a `ValueError`.
        config: the prepared config; where answers depend on the draft, a draft model always drafts, and a head never.
        has_head: whether the model has a draft head.
        has_assistant: whether the call has a draft model.
        given: our fields as given in the call.
    """
    is_relaxed = config.verification == "relaxed"
    found = {} if is_relaxed and has_assistant else {name: new_draft(name) for name in ("none", "trie")}
    if has_head and not is_relaxed:
        head = new_draft("head")
        try:
            check(head)
            found["head"] = head
        except ValueError:  # it does not fit the catalogue, say
            if not has_assistant and given.get("num_draft_beams") is not None:
                raise  # only the head could have used them
    if has_assistant:
        found["assistant"] = new_draft("assistant")
    if "head" not in found or has_assistant:
        check(found["assistant" if has_assistant else "trie"])
    return found


def decide(
    model: Any,
    assistant: Any,
    config: Any,
    names: Collection[str],
    catalogue: Snapshot,
    new_forward: Callable[[int], Callable[[], None]],
    *,
    kind: tuple[Any, ...],
    num_beams: int,
    budget: int,
    below_prompt: bool,
) -> tuple[str, int]:
    """The draft of a call, and its node budget; the first call of a kind times two forwards.

    Args:
        model: the model.
        assistant: the draft model, or None.
        config: the prepared config.
        names: of the drafts that may serve it.
        catalogue: the catalogue of any row.
        new_forward: see `costs_of`.
        kind: see `costs_of`.
        num_beams: K.
        budget: the most nodes besides the live beams.
        below_prompt: whether the prompt's own forward may score nodes.
    """
    if "trie" not in names:  # a single one: there is nothing to choose
        return next(iter(names)), budget
    widths = tuple(np.diff(catalogue.trie.level_starts).tolist())
    if len(widths) < 3 - below_prompt:
        return "none", budget
    costs = costs_of(model, (*kind, num_beams), new_forward, num_beams, budget)
    shares = {"head": HEAD} | ({} if assistant is None else {"assistant": _size(assistant) / _size(model)})
    width, steps = config.num_draft_beams or 2 * num_beams, config.num_assistant_tokens
    searches = [Search(name, shares[name], width, steps, int(name == "head")) for name in shares if name in names]
    return choose_draft(widths, num_beams, costs, budget=budget, below_prompt=below_prompt, searches=tuple(searches))


def _size(model: Any) -> int:
    """What weights grow with."""
    config = model.config.get_text_config(decoder=True)
    return config.num_hidden_layers * config.hidden_size**2


def _below(widths: Sequence[int], num_beams: int, level: int) -> Iterator[int]:
    """Nodes of each level below the beams of one, if they branch as the catalogue does; the last needs no logits."""
    number = min(num_beams, widths[level])
    for depth in range(level + 1, len(widths) - 1):
        growth = widths[depth] / max(widths[level], 1) - 1.0
        yield math.ceil(min(number * (1.0 + ROOM * growth), widths[depth]))


def _tree_seconds(widths: Sequence[int], num_beams: int, costs: Costs, budget: int, below_prompt: bool) -> float:
    """What follows the prompt's forward, if whole levels are scored as far as they fit the budget."""
    level, seconds = 0, 0.0
    while level < len(widths) - 1:
        seconds += costs.forward + costs.token * num_beams if level else 0.0
        used, merged = 0, 0
        for number in _below(widths, num_beams, level) if level or below_prompt else ():
            if number > max(budget - used, num_beams):  # as many nodes as beams are always allowed
                break
            used, merged = used + number, merged + 1
        seconds, level = seconds + costs.token * used, level + merged + 1
    return seconds
