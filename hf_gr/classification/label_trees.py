# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A small catalogue as trees of inner nodes, to be scored as a whole or in pieces. Knows no model and no framework.

Axes: S sequences; of a level: C children, I of them inner, E of them ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_gr.catalogue.fanout import Bools, Longs
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import Trie, build_trie

NODES_AT_ONCE = 1024  # of one request in a forward: attention is quadratic in them
LOGITS_AT_ONCE = 2**26  # of one forward: 256 MB in fp32


def num_inner_nodes(trie: Trie) -> int:
    """Distinct proper prefixes of all sequences, the empty one not counted."""
    return trie.level_starts[-1] - 1 - trie.num_sequences


@dataclass(frozen=True)
class Level:
    """The children of the inner nodes of one level, the first of which has the prompt alone.

    Attributes:
        parents: `[C]` the place of each child's parent among those nodes.
        tokens: `[C]` the token of each child.
        inner: `[I]` the children that continue: the nodes of the next level.
        ends: `[E]` the children that end a sequence.
        sequences: `[E]` the sequence that each of those ends.
    """

    parents: Longs
    tokens: Longs
    inner: Longs
    ends: Longs
    sequences: Longs


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a trie in lexicographic order, and which of them are below each node.

    Attributes:
        trie: the trie.
        first: by level, the root's first: the first sequence below each node.
        last: by level: one past the last.
        goes_on: by level: whether a node has children; if not, it ends a sequence.
    """

    trie: Trie
    first: tuple[Longs, ...]
    last: tuple[Longs, ...]
    goes_on: tuple[Bools, ...]

    @classmethod
    def of(cls, trie: Trie) -> Sequences:
        """Count the sequences below every node from the last level up, and number them from the root down."""
        ranges = [fanout.ranges(np.arange(fanout.num_parents)) for fanout in trie.fanouts]
        below = [np.ones(trie.fanouts[-1].num_children, dtype=np.int64)]
        for start, end in reversed(ranges):
            before = np.append(0, np.cumsum(below[0]))
            below.insert(0, np.maximum(before[end] - before[start], 1))
        first = [np.zeros(1, dtype=np.int64)]
        for fanout, (start, _), counts in zip(trie.fanouts, ranges, below[1:], strict=True):
            parents, before = fanout.parents(np.arange(fanout.num_children)), np.cumsum(counts) - counts
            first.append(first[-1][parents] + before - before[start[parents]])
        last = tuple(start + counts for start, counts in zip(first, below, strict=True))
        goes_on = [end > start for start, end in ranges]
        return cls(trie, tuple(first), last, (*goes_on, np.zeros(len(below[-1]), dtype=bool)))

    def __len__(self) -> int:
        return self.trie.num_sequences

    @property
    def num_inner_nodes(self) -> int:
        """Distinct proper prefixes of all sequences, the empty one not counted."""
        return num_inner_nodes(self.trie)

    def leaves(self) -> Longs:
        """The leaf of every sequence."""
        leaves = np.empty(len(self), dtype=np.int64)
        for level, start in enumerate(self.trie.leaf_starts[:-1], start=1):
            ended = self.first[level][~self.goes_on[level]]
            leaves[ended] = start + np.arange(len(ended))
        return leaves

    def pieces(self, num_nodes: int) -> list[slice]:
        """Runs of consecutive sequences with at most so many inner nodes, or a single one with more."""
        added, alone = np.zeros(len(self), dtype=np.int64), np.zeros(len(self), dtype=np.int64)
        for level, (first, goes_on) in enumerate(zip(self.first[1:], self.goes_on[1:], strict=True)):
            added[first[goes_on]] += 1  # nodes of one level begin at different sequences
            alone[first[~goes_on]] = level
        starts, used = [0], 0
        for number, (more, own) in enumerate(zip(added.tolist(), alone.tolist(), strict=True)):
            if used + more > num_nodes and number > starts[-1]:
                starts.append(number)
                used = own
            else:
                used += more
        return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(self)], strict=True)]

    def levels(self, piece: slice) -> list[Level]:
        """The nodes above some consecutive sequences, renumbered from 0."""
        levels: list[Level] = []
        inner: Longs = np.zeros(1, dtype=np.int64)
        for level, fanout in enumerate(self.trie.fanouts, start=1):
            first, last = self.first[level], self.last[level]
            # Those with a sequence of the piece below them are consecutive.
            nodes = np.arange(np.searchsorted(last, piece.start, "right"), np.searchsorted(first, piece.stop))
            if not len(nodes):
                break
            goes_on = self.goes_on[level][nodes]
            made = (
                np.searchsorted(inner, fanout.parents(nodes)),
                self.trie.token(nodes + self.trie.level_starts[level], level),
                np.flatnonzero(goes_on),
                np.flatnonzero(~goes_on),
                first[nodes[~goes_on]] - piece.start,
            )
            levels.append(Level(*(array.astype(np.int64) for array in made)))
            inner = nodes[goes_on]
        return levels


def all_sequences(snapshot: Snapshot) -> Sequences:
    """All sequences of a label set."""
    return Sequences.of(snapshot.trie if snapshot.is_compact else build_trie(snapshot.rows())[0])


def token_rows(sequences: Sequences) -> Longs:
    """The tokens of all sequences."""
    return sequences.trie.sequences(sequences.leaves()).astype(np.int64)


def labels_of(snapshot: Snapshot, sequences: Sequences) -> Any:
    """The labels of all sequences."""
    return snapshot.items_of(token_rows(sequences))
