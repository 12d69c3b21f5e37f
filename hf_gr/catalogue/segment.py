# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A segment: a compiled trie and the items at its leaves, which never change; and which of them are alive.

The two words are those of search engines, which keep large immutable indexes and small sets of "live documents". A
rule, a removal and an exclusion all say which items are alive; a node is alive while an item below it is. `Liveness`
holds one bit for each node: a step reads the bits of the children that it scores, and nothing else.

Axes: I items, by position (in the order of their leaves) or by number (in the order in which they were given); N nodes
    of a level; Q things asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .fanout import Array, Bools, Fanout, Longs, require, smallest_dtype, spans
from .item_ids import ItemId, ItemIds, drop_repeated
from .sequences import LARGEST_TOKEN
from .trie import Trie, build_trie

Bits = npt.NDArray[np.uint8]

BITS_SET = np.array([number.bit_count() for number in range(256)], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Items:
    """The items of a segment.

    Attributes:
        numbers: `[I]`, by position: the item's number.
        positions: `[I]`, by number: the item's position.
        at_leaf: the positions of every leaf.
        ids: by number: the item's id; None where it is the number itself.
    """

    numbers: Array
    positions: Array
    at_leaf: Fanout
    ids: ItemIds | None

    def __len__(self) -> int:
        return len(self.numbers)

    def ids_of(self, numbers: Array) -> list[ItemId]:
        """The ids of items."""
        return numbers.tolist() if self.ids is None else self.ids.take(numbers)

    def find(self, ids: Array | list[str]) -> tuple[Longs, Longs]:
        """`[Q]` counts of the items that have these ids, and the numbers of all of them, concatenated."""
        if self.ids is not None:
            if self.ids.are_strings == isinstance(ids, np.ndarray):
                return np.zeros(len(ids), dtype=np.int64), np.zeros(0, dtype=np.int64)
            return self.ids.find(ids)
        numbers = ids if isinstance(ids, np.ndarray) else np.full(len(ids), -1)
        is_item = (numbers >= 0) & (numbers < len(self))
        return is_item.astype(np.int64), numbers[is_item].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Segment:
    """A compiled trie and its items."""

    trie: Trie
    items: Items

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Everything that is stored, by its name in the file; no item ids where they are the row numbers."""
        fanouts = {f"children.{level}": fanout for level, fanout in enumerate(self.trie.fanouts)}
        arrays: dict[str, npt.NDArray[np.generic]] = {"tokens": self.trie.tokens}
        for name, fanout in (*fanouts.items(), ("items", self.items.at_leaf)):
            arrays[f"{name}.offsets"] = fanout.offsets
            if fanout.exceptions is not None:
                arrays[f"{name}.exceptions"] = fanout.exceptions
        arrays |= {"items.numbers": self.items.numbers, "items.positions": self.items.positions}
        if self.items.ids is not None:
            ids = {"values": self.items.ids.values, "bounds": self.items.ids.bounds, "order": self.items.ids.order}
            arrays |= {f"item_ids.{name}": array for name, array in ids.items() if array is not None}
        return arrays

    def check(self, eos_token_id: int | None) -> None:
        """Check, by reading all of it, that the arrays form a segment of a catalogue with this end token.

        Raises:
            ValueError: names what does not hold.
        """
        trie, items = self.trie, self.items
        for level, fanout in enumerate(trie.fanouts, start=1):
            fanout.check()
            tokens = trie.tokens[trie.level_starts[level] : trie.level_starts[level + 1]]
            least, largest = (int(token) + trie.token_bases[level - 1] for token in (tokens.min(), tokens.max()))
            require(0 <= least <= largest <= LARGEST_TOKEN, f"tokens are from 0 to {LARGEST_TOKEN}")
            require((fanout.first_children()[1:] | (tokens[1:] > tokens[:-1])).all(), "the tokens of siblings rise")
        require(not trie.tokens[trie.level_starts[-1] :].any(), "zeros follow the tokens")
        items.at_leaf.check()
        require(items.at_leaf.num_childless == 0, "every sequence has an item")
        require(_is_order(items.numbers) and _is_order(items.positions), "items are numbered from 0 on")
        in_order = np.arange(len(items), dtype=items.numbers.dtype)
        require((items.positions[items.numbers] == in_order).all(), "items are where their positions say")
        if items.ids is not None:
            items.ids.check()
        self._check_ends(eos_token_id)

    def _check_ends(self, eos_token_id: int | None) -> None:
        """Check of a sound trie that sequences end with their end token, or are of one length without any."""
        trie = self.trie
        for level in range(1, trie.max_length + 1):
            tokens = trie.tokens[trie.level_starts[level] : trie.level_starts[level + 1]]
            is_leaf = np.full(len(tokens), level == trie.max_length)
            if level < trie.max_length:
                is_leaf[trie.fanouts[level].childless()] = True
            if eos_token_id is not None:
                is_end = tokens == eos_token_id - trie.token_bases[level - 1]
                require((is_end == is_leaf).all(), f"sequences end with {eos_token_id}, and have no other")
            elif level < trie.max_length:
                require(not is_leaf.any(), "without an end token, all sequences have one length")

    @cached_property
    def all_alive(self) -> Liveness:
        """The rule under which nothing is dead."""
        return Liveness.everything(self)

    def level_of_leaves(self, level: int) -> slice:
        """The leaf numbers of a level, from 1."""
        return slice(self.trie.leaf_starts[level - 1], self.trie.leaf_starts[level])


def build_segment(rows: Array, ids: Array | list[str] | None) -> Segment:
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
    return Segment(trie, Items(numbers, positions, at_leaf, None if ids is None else ItemIds.pack(ids)))


@dataclass(frozen=True, eq=False)
class Liveness:
    """Which items and nodes of a segment are alive.

    Attributes:
        segment: the segment.
        nodes: by level from 1: one bit for each of its nodes, the least significant bit of a byte first.
        items: one bit for each item, by position.
    """

    segment: Segment
    nodes: tuple[Bits, ...]
    items: Bits

    @classmethod
    def from_items(cls, segment: Segment, alive: Bools) -> Liveness:
        """Mark items, `[I]` flags by position, and every node above one of them."""
        trie = segment.trie
        leaves = segment.items.at_leaf.any_child(alive)
        flags = leaves[segment.level_of_leaves(trie.max_length)]
        nodes: list[Bits] = []
        packed: tuple[Bools, Bits] | None = None
        for level in range(trie.max_length, 0, -1):
            if level < trie.max_length:
                flags = trie.fanouts[level].any_child(flags)
                if trie.has_leaves[level - 1]:
                    flags[trie.fanouts[level].childless()] = leaves[segment.level_of_leaves(level)]
            if packed is None or packed[0] is not flags:  # levels without branches share one array
                packed = (flags, pack(flags))
            nodes.insert(0, packed[1])
        return cls(segment, tuple(nodes), pack(alive))

    @classmethod
    def everything(cls, segment: Segment) -> Liveness:
        """Nothing is dead."""
        sizes = [fanout.num_children for fanout in segment.trie.fanouts]
        return cls(segment, tuple(_ones(size) for size in sizes), _ones(len(segment.items)))

    def without(self, positions: Longs) -> Liveness:
        """The same with these items, by position, also dead; takes time in proportion to their number."""
        trie = self.segment.trie
        items = clear(self.items, positions)
        nodes = list(self.nodes)
        leaves = np.unique(self.segment.items.at_leaf.parents(positions))
        leaves = leaves[count(items, *self.segment.items.at_leaf.ranges(leaves)) == 0]
        dead = np.zeros(0, dtype=np.int64)
        for level in range(trie.max_length, 0, -1):
            ended = leaves[(leaves >= trie.leaf_starts[level - 1]) & (leaves < trie.leaf_starts[level])]
            dead = np.append(dead, trie.leaf_nodes(level, ended))
            nodes[level - 1] = clear(nodes[level - 1], dead)
            parents = np.unique(trie.fanouts[level - 1].parents(dead))
            dead = parents[count(nodes[level - 1], *trie.fanouts[level - 1].ranges(parents)) == 0]
        return Liveness(self.segment, tuple(nodes), items)

    @cached_property
    def num_items(self) -> int:
        """Items that are alive."""
        return int(BITS_SET[self.items].sum())

    def item_flags(self) -> Bools:
        """`[I]`, by position: whether an item is alive."""
        return unpack(self.items, len(self.segment.items))

    def leaf_flags(self) -> Bools:
        """By leaf number: whether a sequence is alive."""
        trie = self.segment.trie
        levels = [
            test(
                self.nodes[level - 1], trie.leaf_nodes(level, np.arange(*_bounds(self.segment.level_of_leaves(level))))
            )
            for level in range(1, trie.max_length + 1)
        ]
        return np.concatenate(levels)

    @property
    def nbytes(self) -> int:
        """Bytes of the bits; arrays that several levels share count once."""
        return sum({id(bits): bits.nbytes for bits in (*self.nodes, self.items)}.values())


def dead_nodes(
    segment: Segment, alive: Liveness | None, rows: Longs, positions: Longs
) -> tuple[tuple[Longs, Longs], ...]:
    """The nodes left without a living item when some items are dead for some rows of a batch.

    Args:
        segment: the segment.
        alive: what is otherwise alive for these rows.
        rows: `[Q]` row numbers.
        positions: `[Q]` positions of living items that are dead for the row at the same place; pairs are distinct.

    Returns:
        By level from 1: rows and nodes, numbered within the level, that are otherwise alive.
    """
    trie, at_leaf = segment.trie, segment.items.at_leaf
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


def _without_living_children(rows: Longs, parents: Longs, fanout: Fanout, bits: Bits | None) -> tuple[Longs, Longs]:
    """The pairs of a row and a parent that occur as often as the parent has living children."""
    pairs, times = np.unique(rows * fanout.num_parents + parents, return_counts=True)
    of, which = np.unique(pairs % fanout.num_parents, return_inverse=True)
    first, last = fanout.ranges(of)
    living = last - first if bits is None else count(bits, first, last)
    dead = pairs[times == living[which]]
    return dead // fanout.num_parents, dead % fanout.num_parents


def _is_order(numbers: Array) -> bool:
    """Whether these are the numbers from 0 on, in some order; sorting them would take most of the time of a check."""
    if not ((numbers >= 0) & (numbers < len(numbers))).all():
        return False
    is_there = np.zeros(len(numbers), dtype=bool)
    is_there[numbers] = True
    return bool(is_there.all())


def pack(flags: Bools) -> Bits:
    """One bit for each flag."""
    return np.packbits(flags, bitorder="little")


def unpack(bits: Bits, size: int) -> Bools:
    """The first flags that were packed."""
    return np.unpackbits(bits, count=size, bitorder="little").view(bool)


def test(bits: Bits, places: Array) -> Bools:
    """The flags at some places."""
    return (bits[places >> 3] >> (places & 7).astype(np.uint8) & 1).astype(bool)


def clear(bits: Bits, places: Longs) -> Bits:
    """A copy with the flags at some places cleared."""
    if not len(places):
        return bits
    bits = bits.copy()
    np.bitwise_and.at(bits, places >> 3, ~(np.uint8(1) << (places & 7).astype(np.uint8)))
    return bits


def count(bits: Bits, first: Longs, last: Longs) -> Longs:
    """How many flags are set in `[first, last)`, for every pair of them."""
    filled = np.flatnonzero(last > first)
    counts = np.zeros(len(first), dtype=np.int64)
    if len(filled):
        first, last = first[filled], last[filled] - 1  # the last one itself
        start, end = first >> 3, last >> 3
        head = (255 << (first & 7) & 255).astype(np.uint8)
        tail = (255 >> (7 - (last & 7))).astype(np.uint8)
        of = np.cumsum(end - start + 1)
        found = bits[spans(start, end + 1)]
        found[np.append(0, of[:-1])] &= head
        found[of - 1] &= tail
        counts[filled] = np.add.reduceat(BITS_SET[found], np.append(0, of[:-1]))
    return counts


def _ones(size: int) -> Bits:
    bits = np.full(-(-size // 8), 255, dtype=np.uint8)
    if size % 8:
        bits[-1] = (1 << size % 8) - 1
    return bits


def _bounds(part: slice) -> tuple[int, int]:
    return part.start, part.stop
