# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Recommendations without a model, to compare one with: popular items, and items that go with those of a history.

Both learn from the histories that are prompts, never from a target. Memory is that of the distinct pairs of items,
about 100 bytes each at the peak. Knows no model and no file. Source of the second: Sarwar et al., Item-based
collaborative filtering recommendation algorithms, 2001.

Axes: I items that histories have, numbered by first sight; P pairs of them, each in both directions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_gr.answering.requests import Request
from hf_gr.catalogue import ConstraintIndex

POPULARITY, ITEM_TO_ITEM = "popularity", "item-to-item"
LATEST = 100  # distinct items of a history that count: its pairs grow with the square
# Below this share of repeats among the items of histories, lists omit what their user has had: users hardly take an
# item again, which a model learns, and a list of the user's own items would be no rival.
FEW_REPEATS = 0.05
FEW_PAIRS = 2**20  # that are not merged yet
DIGITS = 9  # scores that differ by less tie: their sums were added in another order

Longs = NDArray[np.int64]


class Histories:
    """Counts items and pairs of items in histories.

    Example:
        >>> histories = Histories()
        >>> histories.add([["ham", "jam"], ["ham", "jam", "tea"], ["ham", "rye"]])
        >>> index = ConstraintIndex.from_sequences([[1], [2], [3], [4]], item_ids=["ham", "jam", "rye", "tea"])
        >>> histories.baselines(index).answer(Request(0, []), ["tea"], top_k=2)
        {'popularity': ['ham', 'jam'], 'item-to-item': ['jam', 'ham']}
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._counts: Longs = np.zeros(0, dtype=np.int64)
        self._pairs = PairCounts()
        self._num_positions = self._num_repeats = 0

    def add(self, histories: Iterable[Sequence[Any]]) -> None:
        """Add some histories, oldest items first."""
        items: list[Longs] = [np.zeros(0, dtype=np.int64)]
        pairs: list[Longs] = []
        for history in histories:
            numbers = [self._numbers.setdefault(item, len(self._numbers)) for item in history]
            self._num_positions += len(numbers)
            self._num_repeats += len(numbers) - len(set(numbers))
            latest = np.sort(np.array(_latest(numbers), dtype=np.int64))
            smaller, larger = _places_of_pairs(len(latest))
            items.append(latest)
            pairs.append(latest[smaller] << 32 | latest[larger])
        counts = np.bincount(np.concatenate(items), minlength=len(self._numbers))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        if pairs:
            self._pairs.add(np.concatenate(pairs))

    def baselines(self, index: ConstraintIndex, *, omit_history: bool | None = None) -> Baselines:
        """What was learned, for the items of a catalogue.

        Args:
            index: the catalogue.
            omit_history: whether lists omit the user's history; by default if histories hardly repeat an item.
        """
        if omit_history is None:
            omit_history = self._num_repeats < FEW_REPEATS * self._num_positions
        items = list(self._numbers)
        alive = np.asarray(index.has_items(items)) if items else np.zeros(0, dtype=bool)
        keys, together = self._pairs.merged()
        smaller, larger = keys >> 32, keys & (2**32 - 1)
        cosines = together / np.sqrt(self._counts[smaller] * self._counts[larger])
        of, others = np.concatenate([smaller, larger]), np.concatenate([larger, smaller])
        order = np.argsort(of, kind="stable")
        order = order[alive[others[order]]]
        ranked = np.argsort(-self._counts, kind="stable")  # of equally popular ones the one that was seen first
        return Baselines(
            index=index,
            items=items,
            popular=[items[number] for number in ranked[alive[ranked]]],
            starts=np.searchsorted(of[order], np.arange(len(items) + 1)),
            others=others[order].astype(np.int32),
            cosines=np.tile(cosines, 2)[order],
            omits_history=omit_history,
        )


@dataclass(frozen=True, eq=False)
class Baselines:
    """Lists for users, best first: items of the catalogue, as many as there are up to `top_k`.

    Attributes:
        index: the catalogue.
        items: `[I]` the items of histories.
        popular: those in the catalogue; the item that most histories have comes first.
        starts: `[I + 1]` where the pairs of an item begin.
        others: `[P]` the other item of a pair.
        cosines: `[P]` histories with both items, divided by the geometric mean of the histories with either.
        omits_history: whether lists omit the user's history, whatever the request excludes.
    """

    index: ConstraintIndex
    items: list[Any]
    popular: list[Any]
    starts: Longs
    others: NDArray[np.int32]
    cosines: NDArray[np.float64]
    omits_history: bool

    def answer(
        self, request: Request, history: Sequence[Any], targets: Collection[Any] = (), *, top_k: int
    ) -> dict[str, list[Any]]:
        """A list by each baseline, under the request's own exclusions and filter.

        Popularity is the number of histories with an item. Item-to-item sums the cosines of an item to the history's
        items; popular items follow where these are too few.

        Args:
            request: the user's.
            history: the items before the targets, oldest first.
            targets: what came next. Lists are not made from them: they tell whether the exclusions are those of the
                history, which then hold as they are, without what evaluation never excludes.
            top_k: items per list.
        """
        omitted = set(request.exclude)
        if self.omits_history and not omitted.issuperset(set(history).difference(targets)):
            omitted.update(history)
        lists: dict[str, list[Any]] = {}
        for name, best in ((POPULARITY, ()), (ITEM_TO_ITEM, self._similar(history))):
            if request.allowed is None:
                offered: Iterable[Any] = chain(best, self.popular, self._never_seen())
            else:
                only = set(request.allowed)
                by_popularity = sorted(request.allowed, key=lambda item: self._ranks.get(item, len(self.items)))
                offered = chain((item for item in best if item in only), by_popularity)
            lists[name] = _first_distinct((item for item in offered if item not in omitted), top_k)
        return lists

    def _similar(self, history: Sequence[Any]) -> Iterator[Any]:
        """Items that go with those of a history, best first; of equal ones the more popular."""
        numbers = [self._numbers[item] for item in _latest(history) if item in self._numbers]
        places = [np.arange(self.starts[number], self.starts[number + 1]) for number in numbers]
        if not places:
            return iter(())
        pairs = np.concatenate(places)
        found, of_pair = np.unique(self.others[pairs], return_inverse=True)
        scores = np.bincount(of_pair, weights=self.cosines[pairs], minlength=len(found)).round(DIGITS)
        best = found[np.lexsort((self._ranks_by_number[found], -scores))]
        return (self.items[number] for number in best)

    @cached_property
    def _numbers(self) -> dict[Any, int]:
        return {item: number for number, item in enumerate(self.items)}

    @cached_property
    def _ranks(self) -> dict[Any, int]:
        return {item: rank for rank, item in enumerate(self.popular)}

    @cached_property
    def _ranks_by_number(self) -> Longs:
        return np.array([self._ranks.get(item, len(self.items)) for item in self.items])

    def _never_seen(self) -> Iterator[Any]:
        """The catalogue's items; a list gets this far if histories have fewer than it needs."""
        yield from np.asarray(self.index.item_ids).tolist()


class PairCounts:
    """How often each of many pairs was seen: sorted keys, merged with what was added since, once that is as long."""

    def __init__(self) -> None:
        self._parts = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]

    def add(self, keys: Longs) -> None:
        """Count some keys."""
        self._parts.append(np.unique(keys, return_counts=True))
        if sum(len(part) for part, _ in self._parts[1:]) > max(FEW_PAIRS, len(self._parts[0][0])):
            self.merged()

    def merged(self) -> tuple[Longs, Longs]:
        """All keys, ascending, and how often each was seen."""
        keys, counts = (np.concatenate(both) for both in zip(*self._parts, strict=True))
        distinct, places = np.unique(keys, return_inverse=True)
        seen = np.bincount(places, weights=counts, minlength=len(distinct)).astype(np.int64)
        self._parts = [(distinct, seen)]
        return distinct, seen


def _latest(history: Sequence[Any]) -> list[Any]:
    """The latest distinct items of a history, the last one first."""
    return _first_distinct(reversed(history), LATEST)


def _first_distinct(items: Iterable[Any], number: int) -> list[Any]:
    found: dict[Any, None] = {}
    for item in items if number else ():
        found.setdefault(item)
        if len(found) == number:
            break
    return list(found)


@lru_cache(maxsize=LATEST + 1)
def _places_of_pairs(length: int) -> tuple[Longs, Longs]:
    """Every pair of places, the smaller one first."""
    return np.triu_indices(length, 1)
