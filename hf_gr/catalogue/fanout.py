# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which children belong to which parent, where both are numbered in one order. Knows no tokens.

Deep in a catalogue nearly every node has one child: the first child of node `v` is then `v` plus a shift that changes
at few parents, and only those are stored.

Axes: P parents, C children, E exceptions: the parents with no child or several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .pieces import in_pieces, select

Array = npt.NDArray[np.integer]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Fanout:
    """The children of P parents.

    Parent `p` has the children `offsets[p] .. offsets[p + 1]` where `exceptions` is None, else `p + offsets[k] .. p +
    1 + offsets[m]`, with `k` exceptions before `p` and `m` up to and including it.
    """

    num_parents: int  # P
    num_children: int  # C
    largest: int  # the most children that one parent has
    num_childless: int  # parents that have none
    offsets: Array  # `[P + 1]` first children, or `[E + 1]` shifts: children beyond one each, up to an exception
    exceptions: Array | None = None  # `[E]` ascending parents, or None where they are too many to list

    @classmethod
    def from_starts(cls, parents: Bools, children: Bools) -> Fanout:
        """Derive from sorted rows: `[rows]`, whether a parent's, and a child's, rows start here.

        A parent's first child starts where it does, the others before the next parent.
        """
        num_parents, num_children = int(np.count_nonzero(parents)), int(np.count_nonzero(children))
        is_event = parents != children  # a further child, or a parent without one
        num_events = int(np.count_nonzero(is_event))
        if not num_events:
            return cls(
                num_parents, num_children, 1, 0, np.zeros(1, np.int16), np.zeros(0, smallest_dtype(num_parents))
            )
        starts = children if num_events == num_children - num_parents else parents | children
        if 2 * num_events >= num_parents:
            offsets = np.flatnonzero(select(parents, starts))
            if starts is not children:
                is_childless = select(is_event, parents)
                offsets -= np.cumsum(is_childless) - is_childless
            return cls.from_offsets(np.append(offsets, num_children))
        is_further = select(children, is_event)
        of = np.flatnonzero(select(is_event, starts)) - np.cumsum(is_further)
        first = np.flatnonzero(np.append(True, of[1:] != of[:-1]))
        surplus = np.add.reduceat(np.where(is_further, 1, -1), first)
        shifts = np.append(0, np.cumsum(surplus))
        return cls(
            num_parents,
            num_children,
            largest=max(int(surplus.max()) + 1, 1),
            num_childless=int(np.count_nonzero(surplus < 0)),
            offsets=shifts.astype(smallest_dtype(int(np.abs(shifts).max()))),
            exceptions=of[first].astype(smallest_dtype(num_parents)),
        )

    @classmethod
    def from_offsets(cls, offsets: Array) -> Fanout:
        """Wrap `[P + 1]` first children."""
        counts = np.diff(offsets)
        num_children = int(offsets[-1])
        return cls(
            num_parents=len(counts),
            num_children=num_children,
            largest=int(counts.max()),
            num_childless=int(np.count_nonzero(counts == 0)),
            offsets=offsets.astype(smallest_dtype(num_children)),
        )

    def ranges(self, parents: Array) -> tuple[Longs, Longs]:
        """First and one past the last child of every parent, both shaped like `parents`."""
        if self.exceptions is None:
            return self.offsets[parents].astype(np.int64), self.offsets[parents + 1].astype(np.int64)
        # Same dtype as what is searched: otherwise NumPy copies the exceptions.
        sought = np.asarray(parents, dtype=self.exceptions.dtype)
        before = np.searchsorted(self.exceptions, sought)
        through = np.searchsorted(self.exceptions, sought, side="right")
        return parents + self.offsets[before].astype(np.int64), parents + 1 + self.offsets[through].astype(np.int64)

    def parents(self, children: Array) -> Longs:
        """The parent of every child, shaped like `children`."""
        if children.size > self.num_children // 8:  # a table of all parents is cheaper than so many searches
            return np.repeat(np.arange(self.num_parents), self.counts())[children]
        if self.exceptions is None:
            sought = np.asarray(children, dtype=self.offsets.dtype)
            return np.searchsorted(self.offsets, sought, side="right").astype(np.int64) - 1
        if not len(self.exceptions):
            return children.astype(np.int64)
        sought = np.asarray(children, dtype=self._first_of_exceptions.dtype)
        through = np.searchsorted(self._first_of_exceptions, sought, side="right")
        before = np.maximum(through - 1, 0)
        regular = children - self.offsets[through].astype(np.int64)
        # A child belongs to the last exception that begins before it, if that one's children reach so far.
        return np.where((through > 0) & (regular <= self.exceptions[before]), self.exceptions[before], regular)

    def childless(self) -> Array:
        """The parents without children, ascending."""
        if self.exceptions is None:
            return np.flatnonzero(self.offsets[1:] == self.offsets[:-1])
        return self.exceptions[self.offsets[1:] < self.offsets[:-1]]

    def any_child(self, flags: Bools) -> Bools:
        """`[P]`: whether any child's flag is set; `flags` itself where every parent has one child."""
        if self.exceptions is not None and not len(self.exceptions):
            return flags
        found = np.empty(self.num_parents, dtype=bool)

        def find(piece: slice) -> None:
            bounds = self._bounds(piece)
            below = np.cumsum(flags[bounds[0] : bounds[-1]], dtype=np.int32)
            set_before = np.append(np.int32(0), below)[bounds - bounds[0]]
            found[piece] = set_before[1:] != set_before[:-1]  # three times faster than `np.logical_or.reduceat`

        in_pieces(find, self.num_parents)
        return found

    def _bounds(self, piece: slice) -> Longs:
        """The first child of each of some consecutive parents, then one past the last child."""
        if self.exceptions is None:
            return self.offsets[piece.start : piece.stop + 1].astype(np.int64)
        # Numbers of the exceptions' own type: otherwise NumPy copies all of them.
        ends = np.array([piece.start, piece.stop], dtype=np.int64).astype(self.exceptions.dtype)
        start, stop = np.searchsorted(self.exceptions, ends).tolist()
        exceptions = self.exceptions[start:stop].astype(np.int64)
        runs = np.diff(exceptions, prepend=piece.start - 1, append=piece.stop)  # after one exception, up to the next
        shifts = self.offsets[start : stop + 1].astype(np.int64)
        return np.arange(piece.start, piece.stop + 1, dtype=np.int64) + np.repeat(shifts, runs)

    def counts(self) -> Longs:
        """`[P]` numbers of children."""
        counts = np.diff(self.offsets.astype(np.int64))
        if self.exceptions is None:
            return counts
        every = np.ones(self.num_parents, dtype=np.int64)
        every[self.exceptions] += counts
        return every

    @cached_property
    def _first_of_exceptions(self) -> Array:
        """The first child of each exception, without a search."""
        assert self.exceptions is not None
        first = self.exceptions + self.offsets[:-1].astype(np.int64)
        return first.astype(smallest_dtype(self.num_children))


def spans(first: Array, last: Array) -> Longs:
    """The numbers `first[i] .. last[i]` of all ranges, concatenated."""
    counts = (last - first).astype(np.int64)
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def bisect(low: Longs, high: Longs, is_before: Callable[[Longs], Bools]) -> Longs:
    """The first place of each range `[low, high)` that is not before what is sought there, by binary search.

    Places that are asked for may be those of empty ranges: out of bounds.
    """
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        middle = (low + high) // 2
        is_right = (low < high) & is_before(middle)
        low, high = np.where(is_right, middle + 1, low), np.where(is_right | (low >= high), high, middle)
    return low


def smallest_dtype(largest: int) -> np.dtype[np.signedinteger]:
    """The smallest signed integer type, of 16 bits or more, that holds `largest`."""
    return next(np.dtype(t) for t in (np.int16, np.int32, np.int64) if largest <= np.iinfo(t).max)
