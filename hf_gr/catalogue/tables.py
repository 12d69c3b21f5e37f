# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a level have rows in a table on the device (PyTorch), one entry for every token of the level's span.

Near the root of a large catalogue nearly every token is legal: there, reading every token is cheaper than gathering
legal ones. Of a level where few nodes have many children and many have few, only those few have rows.

Source: STATIC, section 4 (dense layers near the root), over a level's span of tokens instead of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .fanout import Longs
from .trie import Trie

WIDE_FROM = 32  # children of one node; below, a step costs no more than its calls
WIDE_SHARE = 5  # a level is wide if a node may have every fifth token of its span
LARGEST_TABLE = 2**24  # nodes times tokens: 64 MB of penalties, 32 MB of numbers; bytes of the bits of all rules
LARGEST_PART = 2**22  # the same of a table for some nodes
# What such a table must save: so many gathered children; and one for so many tokens, among which all are selected.
TABLE_CALLS, TOKENS_A_CHILD = 64, 3


@dataclass(frozen=True, eq=False)
class TableShape:
    """The table of one level.

    Attributes:
        num_rows: nodes that have a row.
        first_token: the token of the first column.
        span: columns.
        parents: the nodes that have a row, ascending, numbered within their level; None if all have.
        rest: the most children of a node without a row; 0 if all have one.
    """

    num_rows: int
    first_token: int
    span: int
    parents: Longs | None = None
    rest: int = 0

    @property
    def living_bytes(self) -> int:
        """Bytes of the bits of one rule."""
        return (self.num_rows + 2) * -(-self.span // 8)


def table_shape(trie: Trie, level: int) -> TableShape | None:
    """The table of a level; None for a level without one.

    Example:
        >>> from hf_gr import ConstraintIndex
        >>> rows = [[first, 100 + second] for first in range(2) for second in range(40)]
        >>> table = table_shape(ConstraintIndex.from_sequences(rows).snapshot.trie, 1)
        >>> (table.num_rows, table.first_token, table.span)
        (2, 100, 40)
    """
    fanout = trie.fanouts[level]
    if fanout.largest < WIDE_FROM:
        return None
    tokens = trie.tokens[trie.level_starts[level + 1] : trie.level_starts[level + 2]]
    lowest, highest = int(tokens.min()), int(tokens.max())
    first_token, span = lowest + trie.token_bases[level], highest - lowest + 1
    if is_wide(fanout.num_parents, fanout.largest, span):
        return TableShape(fanout.num_parents, first_token, span)
    if TOKENS_A_CHILD * fanout.largest < span:
        return None
    counts, rest = fanout.branches(), WIDE_FROM
    while np.count_nonzero(counts > rest) * span > LARGEST_PART:
        rest *= 2
    if fanout.largest <= rest + TABLE_CALLS:
        return None
    places = np.flatnonzero(counts > rest)
    if len(places) == fanout.num_parents:
        return TableShape(fanout.num_parents, first_token, span)
    parents = places if fanout.exceptions is None else fanout.exceptions[places].astype(np.int64)
    rest = int(counts[counts <= rest].max(initial=1))
    return TableShape(len(places), first_token, span, parents, rest)


def is_wide(num_parents: int, largest: int, span: int) -> bool:
    """Whether all nodes of a level have a row."""
    return largest >= WIDE_FROM and span <= WIDE_SHARE * largest and num_parents * span <= LARGEST_TABLE
