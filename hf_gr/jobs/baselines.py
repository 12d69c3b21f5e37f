# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Recommendations without a model, to compare one with: popular items, and items that go with those of a history.

Both learn from the histories that are prompts, never from a target. Knows no model and no file. Source of the second:
Sarwar et al., Item-based collaborative filtering recommendation algorithms, 2001.

Axes: I items that histories have, numbered by first sight; H histories; P the items of all histories, one by one.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_gr.answering.requests import Request, latest_distinct
from hf_gr.catalogue import ConstraintIndex

POPULARITY, ITEM_TO_ITEM = "popularity", "item-to-item"
NUM_SIMILAR, NUM_POPULAR = 20, 100  # items of the lists of a fallback
# Below this share of repeats among the items of histories, lists omit what their user has had: users hardly take an
# item again, which a model learns, so a list of the user's own items would be too weak a baseline.
FEW_REPEATS = 0.05
DIGITS = 9  # scores that differ by less tie: their sums were added in another order


class Histories:
    """The histories that baselines learn from.

    Example:
        >>> histories = Histories()
        >>> histories.add([["ham", "jam"], ["ham", "jam", "tea"], ["ham", "rye"]])
        >>> index = ConstraintIndex.from_sequences([[1], [2], [3], [4]], item_ids=["ham", "jam", "rye", "tea"])
        >>> Baselines(histories, index).answer(Request([]), ["tea"], top_k=2)
        {'popularity': ['ham', 'jam'], 'item-to-item': ['jam', 'ham']}
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.items, self.ends = array("i"), array("q", [0])  # of the histories, one after the other
        self.num_items = self.num_repeats = 0

    def add(self, histories: Iterable[Sequence[Any]]) -> None:
        """Add some histories, oldest items first."""
        for history in histories:
            numbers = [self.numbers.setdefault(item, len(self.numbers)) for item in history]
            self.num_items += len(numbers)
            self.num_repeats += len(numbers) - len(set(numbers))
            self.items.extend(latest_distinct(numbers))
            self.ends.append(len(self.items))


class Baselines:
    """Lists of the catalogue's items, best first; by default without the user's own if histories hardly repeat any."""

    def __init__(self, histories: Histories, index: ConstraintIndex, *, omit_history: bool | None = None) -> None:
        if omit_history is None:
            omit_history = histories.num_repeats < FEW_REPEATS * histories.num_items
        self.omits_history, self._index, self._numbers = omit_history, index, histories.numbers
        self._names = list(histories.numbers)
        self._items, self._ends = np.array(histories.items, np.int64), np.array(histories.ends)  # [P], [H + 1]
        self._counts = np.bincount(self._items, minlength=len(self._names))  # [I] histories that have an item
        users = np.repeat(np.arange(len(self._ends) - 1), np.diff(self._ends))
        self._users = users[np.argsort(self._items, kind="stable")]  # [P] the histories of item 0, of item 1, ...
        self._starts = np.cumsum(self._counts) - self._counts
        self._is_known = np.array(index.has_items(self._names) if self._names else [], dtype=bool)
        ranked = np.argsort(-self._counts, kind="stable")  # of equally popular ones the one that was seen first
        ranked = ranked[self._is_known[ranked]]
        self._ranks = np.full(len(self._names), len(self._names))
        self._ranks[ranked] = np.arange(len(ranked))
        self.popular = [self._names[number] for number in ranked]
        self._cosines: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}

    def answer(self, request: Request, history: Sequence[Any], *, top_k: int) -> dict[str, list[Any]]:
        """`top_k` items, or as many as there are, by each baseline, under the request's own exclusions and filter.

        Popularity is the number of histories with an item. Item-to-item sums the cosines of an item to the history's
        items; popular items follow where these are too few.
        """
        omitted = {*request.exclude, *(history if self.omits_history else ())}
        lists: dict[str, list[Any]] = {}
        for name, best in ((POPULARITY, ()), (ITEM_TO_ITEM, self._similar(history))):
            if request.allowed is None:
                offered: Iterable[Any] = chain(best, self.popular, self._never_seen())
            else:
                only = set(request.allowed)
                by_popularity = sorted(request.allowed, key=self._rank)
                offered = chain((item for item in best if item in only), by_popularity)
            lists[name] = _first_distinct((item for item in offered if item not in omitted), top_k)
        return lists

    def fallback(self) -> dict[Any, list[Any]]:
        """By item of the histories, the catalogue's items that go with it, best first; by None, popular ones."""
        found: dict[Any, list[Any]] = {None: self.popular[:NUM_POPULAR]}
        for item, number in self._numbers.items():
            if similar := list(islice(self._similar([item]), NUM_SIMILAR)):
                found[item] = similar
            self._cosines.pop(number)  # of all items they may not fit into memory
        return found

    def _similar(self, history: Sequence[Any]) -> Iterator[Any]:
        """Items that go with those of a history, best first; of equal ones the more popular."""
        pairs = [self._pairs_of(self._numbers[item]) for item in latest_distinct(history) if item in self._numbers]
        if not pairs:
            return iter(())
        others, cosines = (np.concatenate(both) for both in zip(*pairs, strict=True))
        found, of_pair = np.unique(others, return_inverse=True)
        scores = np.bincount(of_pair, weights=cosines, minlength=len(found)).round(DIGITS)
        return (self._names[number] for number in found[np.lexsort((self._ranks[found], -scores))])

    def _pairs_of(self, item: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The items that histories have together with one, and their cosines.

        A cosine is the number of histories with both, divided by the geometric mean of the histories with either.
        """
        if item not in self._cosines:
            start = self._starts[item]
            users = self._users[start : start + self._counts[item]]
            of_users = [self._items[self._ends[user] : self._ends[user + 1]] for user in users]
            others, together = np.unique(np.concatenate([self._items[:0], *of_users]), return_counts=True)
            is_offered = self._is_known[others] & (others != item)
            others, together = others[is_offered], together[is_offered]
            self._cosines[item] = others, together / np.sqrt(self._counts[others] * self._counts[item])
        return self._cosines[item]

    def _rank(self, item: Any) -> int:
        return self._ranks[self._numbers[item]] if item in self._numbers else len(self._names)

    def _never_seen(self) -> Iterator[Any]:
        """The catalogue's items; a list gets this far if histories have fewer than it needs."""
        yield from np.asarray(self._index.item_ids).tolist()


def _first_distinct(items: Iterable[Any], number: int) -> list[Any]:
    found: dict[Any, None] = {}
    for item in items if number else ():
        found.setdefault(item)
        if len(found) == number:
            break
    return list(found)
