# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences to a compiled trie: flat arrays, built once. Knows no items and no framework.

Source: STATIC ("Vectorizing the Trie"), section 4, with one change: nodes are numbered level by level in
lexicographic order, so the children of a node are contiguous and a child's number is its position. STATIC's "next
state" column is not stored.

Axes: N rows, S distinct sequences, L levels; level 0 is the root (node 0), level l holds the distinct prefixes of l
    tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.integer]

PADDING = -1  # fills the tail of a ragged row; a token is never negative
KEY_BITS = 63  # a sort key is one non-negative int64


@dataclass(frozen=True, eq=False)
class Trie:
    """A compiled trie; `from_arrays` makes one, and everything that follows from its two arrays.

    Attributes:
        tokens: `[nodes]`, the token on the edge into each node; the root's entry is 0 and means nothing.
        child_offsets: `[internal + 2]`, where `internal` counts the nodes above the last level. The children of node
            `v` are `child_offsets[v] .. child_offsets[v + 1]`; the last two entries are equal, so that `internal`
            itself is a state without children, to which every node of the last level may be clamped.
        level_starts: `L + 2` numbers: the first node of every level, then the number of nodes.
        branching: `L` numbers: the most children that one node of level `l` has: the static shape of a step.
        has_leaves: `L` flags: whether a sequence can end with its token number `l + 1`.
    """

    tokens: Array
    child_offsets: Array
    level_starts: tuple[int, ...]
    branching: tuple[int, ...]
    has_leaves: tuple[bool, ...]

    @classmethod
    def from_arrays(cls, tokens: Array, child_offsets: Array) -> Trie:
        """Wrap the two arrays.

        Raises:
            ValueError: the arrays are no trie: a child out of range or out of order, a level without nodes.
        """
        num_nodes, num_internal = len(tokens), len(child_offsets) - 2
        num_children = np.diff(child_offsets.astype(np.int64))
        _require(num_internal >= 1 and child_offsets[0] == 1, "the root's children follow the root")
        _require((num_children >= 0).all(), "children are in the order of their parents")
        _require(num_children[-1] == 0 and child_offsets[-1] == num_nodes, "the last child is the last node")
        is_first = np.zeros(num_nodes + 1, dtype=bool)
        is_first[child_offsets] = True
        rising = is_first[2:-1] | (tokens[2:] > tokens[1:-1])
        _require((tokens >= 0).all() and rising.all(), "the tokens of a node's children rise")

        starts = [0, 1]
        while starts[-1] < num_internal:
            starts.append(int(child_offsets[starts[-1]]))
            _require(starts[-1] > starts[-2], "every level has nodes")
        _require(starts[-1] == num_internal < num_nodes, "the nodes of the last level have no children")
        levels = [num_children[start:end] for start, end in zip(starts, starts[1:], strict=False)]
        return cls(
            tokens=tokens,
            child_offsets=child_offsets,
            level_starts=(*starts, num_nodes),
            branching=tuple(int(level.max()) for level in levels),
            has_leaves=(*(not level.all() for level in levels[1:]), True),
        )

    @property
    def max_length(self) -> int:
        """The number of levels, which is the longest sequence."""
        return len(self.branching)

    @property
    def dead_state(self) -> int:
        """A state without children that stands for "no prefix of the catalogue"."""
        return len(self.child_offsets) - 2

    @property
    def num_sequences(self) -> int:
        """The number of leaves: the last level's nodes, and those above it that have no children."""
        internal = self.child_offsets[:-1]
        return self.level_starts[-1] - self.level_starts[-2] + int((internal[1:] == internal[:-1]).sum())

    def children(self, states: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First and one past the last child of every state, both shaped like `states`."""
        states = np.minimum(states, self.dead_state)
        # 64 bits, because sums of two of them are taken: 16-bit ones overflow beyond 16,383 nodes.
        return self.child_offsets[states].astype(np.int64), self.child_offsets[states + 1].astype(np.int64)

    def advance(self, states: Array, tokens: Array) -> npt.NDArray[np.int64]:
        """Follow one token from every state by binary search; -1 where there is no such child or the state is -1."""
        low, end = self.children(np.where(states < 0, self.dead_state, states))
        high = end
        for _ in range(max(self.branching).bit_length()):
            middle = (low + high) // 2
            before = (low < high) & (self.tokens[np.minimum(middle, len(self.tokens) - 1)] < tokens)
            low, high = np.where(before, middle + 1, low), np.where(before | (low >= high), high, middle)
        found = (low < end) & (self.tokens[np.minimum(low, len(self.tokens) - 1)] == tokens)
        return np.where(found, low, -1)

    def find(self, prefix: Iterable[int]) -> int:
        """The node of one prefix, -1 if there is none; `advance` for a single row, without its set-up costs."""
        state = 0
        for token in prefix:
            first, end = self.child_range(state)
            state = bisect_left(self.tokens, token, first, end)  # type: ignore[type-var]
            if state == end or self.tokens[state] != token:
                return -1
        return state

    def child_range(self, state: int) -> tuple[int, int]:
        """First and one past the last child of one state."""
        state = min(state, self.dead_state)
        return int(self.child_offsets[state]), int(self.child_offsets[state + 1])

    def first_sequences(self) -> npt.NDArray[np.int64]:
        """`[nodes]`: the number, in lexicographic order, of the first sequence below every node."""
        number, _ = self._sequence_ranges()
        return number

    def sequences(self) -> Array:
        """`[S, L]` distinct sequences in lexicographic order, shorter ones filled up: what was compiled."""
        number, num_leaves = self._sequence_ranges()
        rows = np.full((self.num_sequences, self.max_length), PADDING, dtype=self.tokens.dtype)
        for level, (start, end) in enumerate(zip(self.level_starts[1:], self.level_starts[2:], strict=False)):
            repeats = num_leaves[start:end]
            offsets = number[start:end] - (np.cumsum(repeats) - repeats)
            rows[np.repeat(offsets, repeats) + np.arange(repeats.sum()), level] = np.repeat(
                self.tokens[start:end], repeats
            )
        return rows

    def _sequence_ranges(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`[nodes]` first sequence below every node and how many there are: counted upwards, handed out downwards."""
        starts = self.level_starts
        num_leaves = np.ones(starts[-1], dtype=np.int64)
        number = np.zeros(starts[-1], dtype=np.int64)
        levels = [np.arange(start, end) for start, end in zip(starts[:-2], starts[1:-1], strict=True)]
        for nodes in reversed(levels):
            first, last = self.children(nodes)
            running = np.concatenate(([0], np.cumsum(num_leaves[first[0] : last[-1]])))
            below = running[last - first[0]] - running[first - first[0]]
            num_leaves[nodes] = np.where(first == last, 1, below)
        for nodes in levels:
            first, last = self.children(nodes)
            counts = num_leaves[first[0] : last[-1]]
            before = np.cumsum(counts) - counts
            parents = np.repeat(np.arange(len(nodes)), last - first)
            number[first[0] : last[-1]] = number[nodes][parents] + before - before[(first - first[0])[parents]]
        return number, num_leaves


def build_trie(rows: Array) -> tuple[Trie, Array, npt.NDArray[np.bool_]]:
    """Compile rows of tokens into a trie.

    Args:
        rows: `[N, L]` tokens in any order, duplicates allowed; `PADDING` fills the tail of shorter rows. No row is a
            proper prefix of another (an end token sees to that).

    Returns:
        The trie; the `[N]` permutation that sorts the rows (equal rows keep their order); and `[N]` flags, in sorted
        order, of the first row of every distinct sequence.
    """
    order = lexicographic_order(rows)
    is_new = np.zeros(len(rows), dtype=bool)  # the prefix up to this level differs from that of the previous row
    is_new[0] = True
    tokens: list[Array] = [np.zeros(1, dtype=np.int64)]
    offsets: list[Array] = []
    parents = np.zeros(len(rows), dtype=np.int64)  # of every row: its node within the level above
    num_parents = num_nodes = 1
    for column in rows.T:
        column = column[order]
        is_new[1:] |= column[1:] != column[:-1]
        starts = is_new & (column != PADDING)
        num_children = np.bincount(parents[starts], minlength=num_parents)
        offsets.append(num_nodes + np.cumsum(num_children) - num_children)
        tokens.append(column[starts])
        parents = np.cumsum(starts) - 1
        num_parents = len(tokens[-1])
        num_nodes += num_parents
    trie = Trie.from_arrays(
        np.concatenate(tokens).astype(smallest_dtype(int(rows.max()))),
        np.concatenate([*offsets, [num_nodes, num_nodes]]).astype(smallest_dtype(num_nodes)),
    )
    return trie, order, is_new


def smallest_dtype(largest: int) -> np.dtype[np.signedinteger]:
    """The smallest signed integer type, of 16 bits or more, that holds `largest`."""
    return next(np.dtype(t) for t in (np.int16, np.int32, np.int64) if largest <= np.iinfo(t).max)


def lexicographic_order(rows: Array) -> Array:
    """Stable permutation that sorts rows, by packing as many levels as fit into each 63-bit key."""
    keys: list[npt.NDArray[np.int64]] = []
    room = 0
    for column in rows.T:
        column = column.astype(np.int64) - PADDING
        bits = int(column.max()).bit_length()
        if bits > room:
            keys.append(np.zeros(len(rows), dtype=np.int64))
            room = KEY_BITS
        keys[-1] = (keys[-1] << bits) | column
        room -= bits
    order = np.argsort(keys[0], kind="stable")
    if len(keys) == 1:
        return order
    # The first key tells most rows apart: only those that tie in it are sorted again, by all keys.
    first = keys[0][order]
    ties = first[1:] == first[:-1]
    tied = np.flatnonzero(np.append(ties, False) | np.append(False, ties))
    rows_of_ties = order[tied]
    order[tied] = rows_of_ties[np.lexsort([key[rows_of_ties] for key in reversed(keys)])]
    return order


def _require(condition: bool | np.bool_, fact: str) -> None:
    if not condition:
        raise ValueError(f"tokens and child_offsets are no trie, expected that {fact}: build the index again")
