# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences to a compiled trie: flat arrays, built once. Knows no items and no framework.

Source: STATIC ("Vectorizing the Trie"), section 4. Here nodes are numbered level by level in lexicographic order: a
child's number is its position, which STATIC stores. Where nearly all have one child, offsets are short (`fanout`).

Axes: N rows, S distinct sequences, L levels; level 0 is the root (node 0), level l holds the distinct prefixes of l
    tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from .fanout import Array, Bools, Fanout, Longs, bisect, smallest_dtype
from .pieces import in_pieces, range_of_columns, select, sort, take

PADDING = -1  # fills the tail of a ragged row; a token is never negative
KEY_BITS = 63  # a sort key is one non-negative int64
SHORT = 2**15  # 16 bits hold the numbers from -SHORT to SHORT - 1


@dataclass(frozen=True, eq=False)
class Trie:
    """A compiled trie."""

    # `[nodes + padding]`, the token on the edge into each node, less its level's base; the root's has no meaning. As
    # many entries as the largest branching follow the last, so that so many can be read from any node on.
    tokens: Array
    # `L` numbers: what to add to the tokens of level `l + 1`; it makes most catalogues fit 16 bits
    token_bases: tuple[int, ...]
    fanouts: tuple[Fanout, ...]  # `L` of them: the children of level `l`, both numbered from 0 within their levels

    @cached_property
    def level_starts(self) -> tuple[int, ...]:
        """`L + 2` numbers: the first node of every level, then the number of nodes."""
        return tuple(accumulate((1, *(fanout.num_children for fanout in self.fanouts)), initial=0))

    @cached_property
    def leaf_starts(self) -> tuple[int, ...]:
        """`L + 1` numbers: the leaves above level `l + 1`, then all; leaves are numbered level by level, too."""
        childless = [fanout.num_childless for fanout in self.fanouts[1:]]
        return tuple(accumulate((*childless, self.fanouts[-1].num_children), initial=0))

    @cached_property
    def branching(self) -> tuple[int, ...]:
        """`L` numbers: the most children that one node of level `l` has: the static shape of a step."""
        return tuple(fanout.largest for fanout in self.fanouts)

    @cached_property
    def has_leaves(self) -> tuple[bool, ...]:
        """`L` flags: whether a sequence can end with its token number `l + 1`."""
        return tuple(end > start for start, end in zip(self.leaf_starts, self.leaf_starts[1:], strict=False))

    @cached_property
    def max_length(self) -> int:
        """The number of levels, which is the longest sequence."""
        return len(self.fanouts)

    @property
    def num_sequences(self) -> int:
        """The number of leaves."""
        return self.leaf_starts[-1]

    @cached_property
    def max_token_id(self) -> int:
        """The largest token."""
        levels = zip(self.level_starts[1:], self.level_starts[2:], self.token_bases, strict=False)
        return max(int(self.tokens[start:end].max()) + base for start, end, base in levels)

    @cached_property
    def codebooks(self) -> tuple[Longs, ...]:
        """By level the distinct tokens on the edges into its nodes, ascending."""
        codes: list[Longs] = []
        for start, end, base in zip(self.level_starts[1:], self.level_starts[2:], self.token_bases, strict=False):
            tokens = self.tokens[start:end]
            least = min(int(tokens.min()), 0)  # bases lie in the middle of a level that spans more than 32,768 tokens
            used = np.zeros(int(tokens.max()) - least + 1, dtype=bool)
            used[tokens] = True  # negative ones count from the end
            codes.append(np.flatnonzero(np.roll(used, -least)) + least + base)
        return tuple(codes)

    def token(self, nodes: Array, level: int) -> Longs:
        """The tokens on the edges into nodes of one level."""
        return self.tokens[nodes].astype(np.int64) + self.token_bases[level - 1]

    def children(self, nodes: Array, level: int) -> tuple[Longs, Longs]:
        """First and one past the last child of every node of a level; equal for what is not a node of this level."""
        start, end = self.level_starts[level : level + 2]
        is_here = (nodes >= start) & (nodes < end)
        first, last = self.fanouts[level].ranges(np.where(is_here, nodes - start, 0))
        return first + end, np.where(is_here, last, first) + end

    def advance(self, nodes: Array, tokens: Array, level: int) -> Longs:
        """Follow one token from every node of a level by binary search; -1 where there is no such child."""
        first, end = self.children(nodes, level)
        size = len(self.tokens) - 1
        low = bisect(first, end, lambda places: self.token(np.minimum(places, size), level + 1) < tokens)
        found = low < end
        found &= self.token(np.where(found, low, 0), level + 1) == tokens
        return np.where(found, low, -1)

    def find(self, prefix: Iterable[int]) -> int:
        """The node of one prefix, -1 if there is none."""
        nodes = np.zeros(1, dtype=np.int64)
        for level, token in enumerate(prefix):
            if level == self.max_length:
                return -1
            nodes = self.advance(nodes, np.array([token]), level)
        return int(nodes[0])

    def walk(self, rows: Longs, eos_token_id: int | None) -> tuple[Longs, Longs]:
        """Follow `[R, T]` tokens, with or without their end token: to `[R]` leaf numbers, -1 for none; by how many.

        Tokens after that are ignored.
        """
        nodes = np.zeros(len(rows), dtype=np.int64)
        lengths = np.zeros(len(rows), dtype=np.int64)
        for level, column in enumerate(rows.T[: self.max_length]):
            first, last = self.children(nodes, level)
            walking = (first < last) & (column != PADDING)  # a row may have ended without its end token
            nodes = np.where(walking, self.advance(nodes, column, level), nodes)
            lengths += walking & (nodes >= 0)
        if eos_token_id is not None:
            for level in range(min(int(lengths.max(initial=0)), self.max_length - 1) + 1):
                ended = self.advance(np.where(lengths == level, nodes, -1), np.array(eos_token_id), level)
                nodes = np.where(ended >= 0, ended, nodes)
        return self.leaves(nodes), lengths

    def leaves(self, nodes: Longs) -> Longs:
        """The leaf numbers of nodes that are leaves, of any level; -1 for all others."""
        numbers = np.full(nodes.shape, -1, dtype=np.int64)
        for level in range(1, self.max_length + 1):
            if not self.has_leaves[level - 1]:
                continue
            start, end = self.level_starts[level : level + 2]
            here = np.flatnonzero((nodes >= start) & (nodes < end))
            local = nodes.flat[here] - start
            if level < self.max_length:
                childless = self._childless[level]
                rank = np.searchsorted(childless, local.astype(childless.dtype))
                is_leaf = childless[np.minimum(rank, len(childless) - 1)] == local
                here, local = here[is_leaf], rank[is_leaf]
            numbers.flat[here] = self.leaf_starts[level - 1] + local
        return numbers

    def leaf_nodes(self, level: int, leaves: Array) -> Longs:
        """The numbers within a level, from 1, of leaves of that level."""
        ranks = leaves - self.leaf_starts[level - 1]
        return ranks.astype(np.int64) if level == self.max_length else self._childless[level][ranks].astype(np.int64)

    def sequences(self, leaves: Array) -> Array:
        """`[len(leaves), L]` tokens of the sequences that end in these leaves, padded: what was compiled."""
        largest = max(base + int(np.iinfo(self.tokens.dtype).max) for base in self.token_bases)
        rows = np.full((len(leaves), self.max_length), PADDING, dtype=smallest_dtype(largest))
        levels = np.searchsorted(self.leaf_starts, leaves, side="right")
        nodes = np.zeros(len(leaves), dtype=np.int64)
        for level in range(self.max_length, 0, -1):
            if self.has_leaves[level - 1]:
                ends = slice(None) if level == self.max_length == levels.min(initial=level) else levels == level
                nodes[ends] = self.leaf_nodes(level, leaves[ends])
            on = slice(None) if level <= levels.min(initial=level) else levels >= level
            rows[on, level - 1] = self.token(nodes[on] + self.level_starts[level], level)
            nodes[on] = self.fanouts[level - 1].parents(nodes[on])
        return rows

    @cached_property
    def _childless(self) -> tuple[Array, ...]:
        """By level: its leaves, numbered within the level; the last level, where all are, is omitted."""
        return tuple(
            fanout.childless().astype(smallest_dtype(fanout.num_parents))
            if fanout.num_childless
            else np.zeros(0, np.int16)
            for fanout in self.fanouts
        )


def build_trie(rows: Array) -> tuple[Trie, Array, Bools]:
    """Compile `[N, L]` rows of tokens, `PADDING` in the tails, into a trie; none is a proper prefix of another.

    With it come the stable `[N]` permutation that brings the rows into the order of their leaves, and `[N]` flags, in
    that order, of the first row of every distinct sequence.
    """
    while (rows[:, -1] == PADDING).all():  # the longest rows were removed
        rows = rows[:, :-1]
    order, columns = _sorted_columns(rows)
    is_ragged = bool((columns[-1] == PADDING).any())
    bases = [_token_base(column) for column in columns]
    largest = max(int(column.max()) - base for column, base in zip(columns, bases, strict=True))
    dtype = smallest_dtype(largest)

    is_new = np.zeros(len(rows), dtype=bool)  # the prefix up to this level differs from that of the previous row
    is_new[0] = True
    parents = is_new.copy()  # a node of the level above begins here
    tokens: list[Array] = [np.zeros(1, dtype=dtype)]
    fanouts: list[Fanout] = []
    lengths = np.zeros(len(rows), dtype=np.int16)  # whose stable sort only counts
    for column, base in zip(columns, bases, strict=True):
        is_new[1:] |= column[1:] != column[:-1]
        children = is_new
        if is_ragged:
            is_there = column != PADDING
            lengths += is_there
            children = is_new & is_there
        fanouts.append(Fanout.from_starts(parents, children))
        edges = select(column, children)
        tokens.append((edges - base if base else edges).astype(dtype, copy=False))
        parents = children if is_ragged else children.copy()
    tokens.append(np.zeros(max(fanout.largest for fanout in fanouts), dtype=dtype))
    trie = Trie(np.concatenate(tokens), tuple(bases), tuple(fanouts))
    if is_ragged:
        by_length = np.argsort(lengths, kind="stable")
        order, is_new = take(order, by_length), take(is_new, by_length)
    return trie, order, is_new


def _sorted_columns(rows: Array) -> tuple[Array, Array]:
    """The permutation that sorts rows, and the columns of the sorted rows, each of which is read several times."""
    order, rows = sort_rows(rows)
    columns = np.empty(rows.shape[::-1], dtype=rows.dtype)

    def turn(piece: slice) -> None:
        columns[:, piece] = rows[piece].T

    in_pieces(turn, len(rows))
    return order, columns


def _token_base(column: Array) -> int:
    """What to subtract from a level's tokens: 0 where they fit 16 bits already, or would not fit even then."""
    largest = int(column.max())
    if largest < SHORT:
        return 0
    least = int(np.min(column, where=column != PADDING, initial=largest))
    # At most a token, so that the rows' dtype holds it.
    return min(least + SHORT, largest) if largest - least < 2 * SHORT else 0


def take_rows(rows: Array, order: Array) -> Array:
    """`rows[order]`, one whole row at a time, which reads memory once and not once per column."""
    return take(_whole(rows), order).view(rows.dtype).reshape(len(order), rows.shape[1])


def _whole(rows: Array) -> npt.NDArray[Any]:
    """Rows as single entries."""
    rows = np.ascontiguousarray(rows)
    return rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]


def sort_rows(rows: Array) -> tuple[Array, Array]:
    """The stable permutation that sorts rows, and the sorted rows.

    A key is one integer (its sort is seven times faster than an argsort): as many leading columns as there is room
    for, and the row's number. Rows that tie are sorted by the other columns.
    """
    rows = np.ascontiguousarray(rows)
    least, largest = range_of_columns(rows)
    widths = [(high - low).bit_length() for low, high in zip(least, largest, strict=True)]
    number_bits = (len(rows) - 1).bit_length()
    num_keyed = sum(bits <= KEY_BITS - number_bits for bits in accumulate(widths))
    keys = np.zeros(len(rows), dtype=np.int64)
    order = np.empty(len(rows), dtype=smallest_dtype(len(rows)))

    def fill(piece: slice) -> None:
        own: Longs = keys[piece]
        for column in range(num_keyed):
            own <<= widths[column]
            own |= rows[piece, column].astype(np.int64) - least[column]
        own <<= number_bits
        own |= np.arange(piece.start, piece.stop, dtype=np.int64)

    def read_order(piece: slice) -> None:
        np.bitwise_and(keys[piece], (1 << number_bits) - 1, out=order[piece], casting="unsafe")
        keys[piece] >>= number_bits

    in_pieces(fill, len(rows))
    sort(keys)
    in_pieces(read_order, len(rows))
    rows = take_rows(rows, order)
    is_same = keys[1:] == keys[:-1]
    if num_keyed < len(widths) and is_same.any():
        places = np.flatnonzero(np.append(is_same, False) | np.append(False, is_same))
        tied = _whole(rows)[places]
        others = tied.view(rows.dtype).reshape(len(places), -1)[:, num_keyed:]
        moved = np.lexsort([*others.T[::-1], keys[places]])
        order[places], _whole(rows)[places] = order[places][moved], tied[moved]
    return order, rows
