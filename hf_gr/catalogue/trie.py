# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences to a compiled trie: flat arrays, built once. Knows no items and no framework.

Source: STATIC ("Vectorizing the Trie"), section 4, with one change: nodes are numbered level by level in lexicographic order, so the
children of a node are contiguous and a child's number is its position. STATIC's "next state" column is not stored.

Axes: N rows, L levels; level 0 is the root (node 0), level l holds the distinct prefixes of l tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.integer]

PADDING = -1  # fills the tail of a ragged row; a token is never negative
KEY_BITS = 63  # a sort key is one non-negative int64


@dataclass(frozen=True)
class Trie:
    """A compiled trie.

    Attributes:
        tokens: `[nodes]`, the token on the edge into each node; the root's entry is 0 and means nothing.
        child_offsets: `[internal + 2]`, where `internal` counts the nodes above the last level. The children of node `v`
            are `child_offsets[v] .. child_offsets[v + 1]`; the last two entries are equal, so that `internal` itself is a
            state without children, to which every node of the last level may be clamped.
        level_starts: `L + 2` numbers: the first node of every level, then the number of nodes.
        branching: `L` numbers: the most children that one node of level `l` has: the static shape of a step.
        has_leaves: `L` flags: whether a sequence can end with its token number `l + 1`.
    """

    tokens: Array
    child_offsets: Array
    level_starts: tuple[int, ...]
    branching: tuple[int, ...]
    has_leaves: tuple[bool, ...]

    @property
    def max_length(self) -> int:
        """The number of levels, which is the longest sequence."""
        return len(self.branching)

    @property
    def dead_state(self) -> int:
        """A state without children that stands for "no prefix of the catalogue"."""
        return len(self.child_offsets) - 2

    def children(self, states: Array) -> tuple[Array, Array]:
        """First and one past the last child of every state, both shaped like `states`."""
        states = np.minimum(states, self.dead_state)
        return self.child_offsets[states], self.child_offsets[states + 1]

    def advance(self, states: Array, tokens: Array) -> Array:
        """Follow one token from every state by binary search; -1 where there is no such child or the state is -1."""
        low, end = self.children(np.where(states < 0, self.dead_state, states))
        high = end
        for _ in range(max(self.branching).bit_length()):
            middle = (low + high) // 2
            before = (low < high) & (self.tokens[np.minimum(middle, len(self.tokens) - 1)] < tokens)
            low, high = np.where(before, middle + 1, low), np.where(before | (low >= high), high, middle)
        found = (low < end) & (self.tokens[np.minimum(low, len(self.tokens) - 1)] == tokens)
        return np.where(found, low, -1)


def build_trie(rows: Array) -> tuple[Trie, Array, npt.NDArray[np.bool_]]:
    """Compile rows of tokens into a trie.

    Args:
        rows: `[N, L]` tokens in any order, duplicates allowed; `PADDING` fills the tail of shorter rows. No row is a proper
            prefix of another (an end token sees to that).

    Returns:
        The trie; the `[N]` permutation that sorts the rows (equal rows keep their order); and `[N]` flags, in sorted order,
        of the first row of every distinct sequence.
    """
    order = _lexicographic_order(rows)
    rows = rows[order]
    is_new = np.ones(rows.shape, dtype=bool)  # is_new[n, l]: the prefix of l + 1 tokens differs from the previous row's
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=is_new[1:])

    tokens = [np.zeros(1, dtype=rows.dtype)]
    offsets = [np.zeros(0, dtype=np.int64)]
    level_starts, branching, has_leaves = [0, 1], [], []
    parents = np.zeros(len(rows), dtype=np.int64)  # of every row: its node within the level above
    num_parents = 1
    for level in range(rows.shape[1]):
        starts = is_new[:, level] & (rows[:, level] != PADDING)
        num_children = np.bincount(parents[starts], minlength=num_parents)
        offsets.append(level_starts[-1] + np.concatenate(([0], np.cumsum(num_children)[:-1])))
        tokens.append(rows[starts, level])
        if level:
            has_leaves.append(bool((num_children == 0).any()))
        branching.append(int(num_children.max()))
        parents = np.cumsum(starts) - 1
        num_parents = int(starts.sum())
        level_starts.append(level_starts[-1] + num_parents)
    has_leaves.append(True)

    num_nodes = level_starts[-1]
    trie = Trie(
        tokens=np.concatenate(tokens).astype(smallest_dtype(int(rows.max()))),
        child_offsets=np.concatenate([*offsets, [num_nodes, num_nodes]]).astype(smallest_dtype(num_nodes)),
        level_starts=tuple(level_starts),
        branching=tuple(branching),
        has_leaves=tuple(has_leaves),
    )
    return trie, order, is_new[:, -1]


def smallest_dtype(largest: int) -> np.dtype[np.integer]:
    """The smallest signed integer type, of 16 bits or more, that holds `largest`."""
    return next(np.dtype(t) for t in (np.int16, np.int32, np.int64) if largest <= np.iinfo(t).max)


def _lexicographic_order(rows: Array) -> Array:
    """Stable permutation that sorts rows, by packing as many levels as fit into each 63-bit key."""
    keys: list[Array] = []
    room = 0
    for column in (rows - PADDING).T:
        bits = int(column.max()).bit_length()
        if bits > room:
            keys.append(np.zeros(len(rows), dtype=np.int64))
            room = KEY_BITS
        keys[-1] = (keys[-1] << bits) | column
        room -= bits
    if len(keys) == 1:
        return np.argsort(keys[0], kind="stable")
    return np.lexsort(keys[::-1])
