# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The items at the leaves of a trie, which never change; and which of them are alive.

A rule, a removal and an exclusion all say which items are alive; a node is alive while an item below it is.

Axes: I items, by position (in the order of their leaves) or by number (in the order in which they were given); N nodes
    of a level; Q things asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .bits import BITS_SET, Bits, clear, count, pack, test, unpack
from .fanout import Array, Bools, Fanout, Longs, smallest_dtype
from .item_ids import ItemIds, drop_repeated
from .pieces import take
from .trie import Trie, build_trie, take_rows


@dataclass(frozen=True, eq=False)
class Items:
    """The items of a trie: what is compiled, and saved."""

    trie: Trie  # their sequences
    numbers: Array  # `[I]`, by position: the item's number
    positions: Array  # `[I]`, by number: the item's position
    at_leaf: Fanout  # the positions of every leaf
    ids: ItemIds | None  # by number: the item's id; None where it is the number itself

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    @cached_property
    def all_alive(self) -> Liveness:
        """The rule under which nothing is dead."""
        sizes = [*(fanout.num_children for fanout in self.trie.fanouts), len(self)]
        *nodes, items = (pack(np.ones(size, dtype=bool)) for size in sizes)
        return Liveness(self, tuple(nodes), items)

    @property
    def are_strings(self) -> bool:
        """Whether ids are strings."""
        return self.ids is not None and self.ids.are_strings

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Everything that is stored, by its name in the file; no item ids where they are the row numbers."""
        fanouts = {f"children.{level}": fanout for level, fanout in enumerate(self.trie.fanouts)}
        arrays: dict[str, npt.NDArray[np.generic]] = {"tokens": self.trie.tokens}
        for name, fanout in (*fanouts.items(), ("items", self.at_leaf)):
            arrays[f"{name}.offsets"] = fanout.offsets
            if fanout.exceptions is not None:
                arrays[f"{name}.exceptions"] = fanout.exceptions
        arrays |= {"items.numbers": self.numbers, "items.positions": self.positions}
        if self.ids is not None:
            ids = {"values": self.ids.values, "bounds": self.ids.bounds, "order": self.ids.order}
            arrays |= {f"item_ids.{name}": array for name, array in ids.items() if array is not None}
        return arrays

    def ids_of(self, numbers: Array) -> Array | list[str]:
        """The ids of items, as `build_items` takes them."""
        return numbers if self.ids is None else self.ids.take(numbers)

    def find(self, ids: Array | list[str]) -> tuple[Longs, Longs]:
        """The items that have these ids, id by id: of each the number of its id among the Q, and its position."""
        if self.are_strings == isinstance(ids, np.ndarray):
            of = numbers = np.zeros(0, dtype=np.int64)
        elif self.ids is not None:
            of, numbers = self.ids.find(ids)
        else:
            numbers = np.asarray(ids)
            of = np.flatnonzero((numbers >= 0) & (numbers < len(self)))
            numbers = numbers[of]
        return of, self.positions[numbers].astype(np.int64)

    def rows(self, flags: Bools) -> tuple[Array, Longs]:
        """The sequences and the numbers of items flagged by position, in the order in which they were given."""
        numbers = np.flatnonzero(take(flags, self.positions))
        rows = self.trie.sequences(self.at_leaf.parents(np.flatnonzero(flags)))  # neighbours share reads
        places = np.cumsum(flags, dtype=self.positions.dtype) - 1
        return take_rows(rows, places[self.positions[numbers]]), numbers


def build_items(rows: Array, ids: Array | list[str] | None) -> Items:
    """Compile checked rows of tokens and their item ids (the row numbers for None); repeated items count once."""
    if isinstance(ids, np.ndarray) and (ids == np.arange(len(rows))).all():
        ids = None  # the row numbers
    trie, order, is_first = build_trie(rows)
    kept = np.ones(len(order), dtype=bool) if ids is None else drop_repeated(ids, order, is_first)
    numbers = order
    if ids is not None and not kept.all():
        order, is_first = order[kept], is_first[kept]
        given = np.sort(order)
        numbers = np.searchsorted(given, order).astype(smallest_dtype(len(given)))
        ids = ids[given] if isinstance(ids, np.ndarray) else [ids[int(row)] for row in given]
    positions = np.empty(len(numbers), dtype=numbers.dtype)
    positions[numbers] = np.arange(len(numbers), dtype=numbers.dtype)
    at_leaf = Fanout.from_starts(is_first, np.ones(len(is_first), dtype=bool))
    return Items(trie, numbers, positions, at_leaf, None if ids is None else ItemIds.pack(ids))


@dataclass(frozen=True, eq=False)
class Liveness:
    """Which items and nodes are alive."""

    of: Items  # the items
    nodes: tuple[Bits, ...]  # by level from 1: one bit for each of its nodes
    items: Bits  # one bit for each item, by position

    @classmethod
    def from_items(cls, of: Items, alive: Bools) -> Liveness:
        """Mark items, `[I]` flags by position, and every node above one of them."""
        trie = of.trie
        leaves = of.at_leaf.any_child(alive)
        flags = leaves[_leaves_of(trie, trie.max_length)]
        nodes: list[Bits] = []
        packed: tuple[Bools, Bits] | None = None
        for level in range(trie.max_length, 0, -1):
            if level < trie.max_length:
                flags = trie.fanouts[level].any_child(flags)
                if trie.has_leaves[level - 1]:
                    flags[trie.fanouts[level].childless()] = leaves[_leaves_of(trie, level)]
            if packed is None or packed[0] is not flags:  # levels without branches share one array
                packed = (flags, pack(flags))
            nodes.insert(0, packed[1])
        return cls(of, tuple(nodes), pack(alive))

    def without(self, positions: Longs) -> Liveness:
        """The same with these items, by position, also dead; takes time in proportion to their number."""
        positions = np.unique(positions)
        positions = positions[test(self.items, positions)]
        dead = dead_nodes(self.of, self, np.zeros(len(positions), dtype=np.int64), positions)
        nodes = tuple(clear(bits, places) for bits, (_, places) in zip(self.nodes, dead, strict=True))
        return Liveness(self.of, nodes, clear(self.items, positions))

    @cached_property
    def num_items(self) -> int:
        """Items that are alive."""
        return int(BITS_SET[self.items].sum())

    def item_flags(self) -> Bools:
        """`[I]`, by position: whether an item is alive."""
        return unpack(self.items, len(self.of))

    def leaf_flags(self) -> Bools:
        """By leaf number: whether a sequence is alive."""
        starts, leaf_nodes = self.of.trie.leaf_starts, self.of.trie.leaf_nodes
        levels = enumerate(zip(starts, starts[1:], self.nodes, strict=False), start=1)
        flags = [test(bits, leaf_nodes(level, np.arange(start, end))) for level, (start, end, bits) in levels]
        return np.concatenate(flags)

    @property
    def nbytes(self) -> int:
        """Bytes of the bits; arrays that several levels share count once."""
        return sum({id(bits): bits.nbytes for bits in (*self.nodes, self.items)}.values())


def dead_nodes(of: Items, alive: Liveness | None, rows: Longs, positions: Longs) -> tuple[tuple[Longs, Longs], ...]:
    """The nodes left without a living item when some items, by position, are dead for some rows of a batch.

    Pairs of a row and a position are distinct, and the items alive otherwise. By level from 1: rows, and nodes within
    the level.
    """
    trie, at_leaf = of.trie, of.at_leaf
    leaf_rows, leaves = _without_living_children(rows, at_leaf.parents(positions), at_leaf, alive and alive.items)
    levels: list[tuple[Longs, Longs]] = []
    rows, nodes = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for level in range(trie.max_length, 0, -1):
        ends = (leaves >= trie.leaf_starts[level - 1]) & (leaves < trie.leaf_starts[level])
        rows, nodes = np.append(rows, leaf_rows[ends]), np.append(nodes, trie.leaf_nodes(level, leaves[ends]))
        levels.insert(0, (rows, nodes))
        fanout = trie.fanouts[level - 1]
        bits = None if alive is None else alive.nodes[level - 1]
        rows, nodes = _without_living_children(rows, fanout.parents(nodes), fanout, bits)
    return tuple(levels)


def _leaves_of(trie: Trie, level: int) -> slice:
    """The leaf numbers of a level, from 1."""
    return slice(trie.leaf_starts[level - 1], trie.leaf_starts[level])


def _without_living_children(rows: Longs, parents: Longs, fanout: Fanout, bits: Bits | None) -> tuple[Longs, Longs]:
    """The pairs of a row and a parent that occur as often as the parent has living children."""
    pairs, times = np.unique(rows * fanout.num_parents + parents, return_counts=True)
    of, which = np.unique(pairs % fanout.num_parents, return_inverse=True)
    first, last = fanout.ranges(of)
    living = last - first if bits is None else count(bits, first, last)
    dead = pairs[times == living[which]]
    return dead // fanout.num_parents, dead % fanout.num_parents
