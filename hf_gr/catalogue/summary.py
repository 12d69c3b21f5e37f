# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a catalogue looks like, in numbers. Knows nobody who prints them.

Axes: P parents of a level, C children of all of them; S sequences, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .fanout import Bools, Fanout
from .segment import Segment
from .snapshot import Snapshot


@dataclass(frozen=True)
class LevelSummary:
    """One level of the trie: the tokens at one place of the sequences.

    Attributes:
        level: its number, from 1.
        nodes: distinct prefixes of this many tokens.
        mean_children: nodes for each node of the level above that goes on: what a step chooses from, on average.
        largest_branching: the most nodes that one node of the level above has.
        forced_share: of the nodes above that go on, the share that leaves no choice, having one child.
        decided_share: the share of all sequences that this many of their tokens tell from all others.
        num_ended: sequences whose last token this is.
        token_bytes: memory of the nodes' tokens.
        offset_bytes: memory of which nodes belong to which of the level above.
    """

    level: int
    nodes: int
    mean_children: float
    largest_branching: int
    forced_share: float
    decided_share: float
    num_ended: int
    token_bytes: int
    offset_bytes: int


@dataclass(frozen=True)
class Summary:
    """A catalogue.

    Attributes:
        num_sequences: S.
        num_items: I.
        num_shared_sequences: sequences with several items.
        num_sharing_items: items on them.
        most_items_of_a_sequence: items on the sequence that has the most.
        max_length: tokens of the longest sequence, its end token included.
        eos_token_id: the end token, or None.
        max_token_id: the largest token; a model needs a vocabulary beyond it.
        item_id_type: `"string"`, `"integer"`, or `"row number"` where no ids were given.
        item_bytes: memory of which items belong to which sequence, and of the order in which they were given.
        item_id_bytes: memory of the item ids.
        nbytes: memory of everything.
        bytes_per_item: the same for each item.
        levels: one a token of the longest sequence.
    """

    num_sequences: int
    num_items: int
    num_shared_sequences: int
    num_sharing_items: int
    most_items_of_a_sequence: int
    max_length: int
    eos_token_id: int | None
    max_token_id: int
    item_id_type: str
    item_bytes: int
    item_id_bytes: int
    nbytes: int
    bytes_per_item: float
    levels: tuple[LevelSummary, ...]


def summarise(snapshot: Snapshot) -> Summary:
    """Count what a catalogue holds, by reading its arrays once.

    A catalogue that was updated or filtered is compiled anew first, which takes as long as building it: the numbers
    are those of the file that it would be saved to. What was just loaded or built needs no such thing.

    Raises:
        ValueError: no item is left.

    Example:
        >>> from hf_gr import ConstraintIndex
        >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7], [6, 7]])
        >>> summary = summarise(index.snapshot)
        >>> summary.num_items, summary.num_sequences, summary.num_shared_sequences
        (4, 3, 1)
        >>> [(level.nodes, level.mean_children, level.forced_share) for level in summary.levels]
        [(2, 2.0, 0.0), (3, 1.5, 0.5)]
    """
    compact = snapshot.compact()
    segment = compact.base.segment
    num_sequences, num_items = segment.trie.num_sequences, len(segment.items)
    num_alone = int(np.count_nonzero(_only_children(segment.items.at_leaf)))
    arrays = {name: array.nbytes for name, array in segment.arrays().items()}
    return Summary(
        num_sequences=num_sequences,
        num_items=num_items,
        num_shared_sequences=num_sequences - num_alone,
        num_sharing_items=num_items - num_alone,
        most_items_of_a_sequence=segment.items.at_leaf.largest,
        max_length=segment.trie.max_length,
        eos_token_id=compact.eos_token_id,
        max_token_id=segment.trie.max_token_id,
        item_id_type=_item_id_type(segment),
        item_bytes=sum(size for name, size in arrays.items() if name.startswith("items.")),
        item_id_bytes=sum(size for name, size in arrays.items() if name.startswith("item_ids.")),
        nbytes=segment.nbytes,
        bytes_per_item=segment.nbytes / num_items,
        levels=_levels(segment),
    )


def _levels(segment: Segment) -> tuple[LevelSummary, ...]:
    """The levels, counted from the last one up, since it is what lies below a node that decides it."""
    trie = segment.trie
    levels: list[LevelSummary] = []
    one_leaf = np.ones(trie.fanouts[-1].num_children, dtype=bool)  # whether a node leads to a single sequence
    for level in range(trie.max_length, 0, -1):
        fanout = trie.fanouts[level - 1]
        going_on = fanout.num_parents - fanout.num_childless
        only = _only_children(fanout)
        decided = int(np.count_nonzero(one_leaf)) + trie.leaf_starts[level - 1]  # those that ended above, too
        levels.append(
            LevelSummary(
                level=level,
                nodes=fanout.num_children,
                mean_children=fanout.num_children / going_on,
                largest_branching=fanout.largest,
                forced_share=int(np.count_nonzero(only)) / going_on,
                decided_share=decided / trie.num_sequences,
                num_ended=trie.leaf_starts[level] - trie.leaf_starts[level - 1],
                token_bytes=fanout.num_children * trie.tokens.itemsize,
                offset_bytes=fanout.nbytes,
            )
        )
        one_leaf = _lead_to_one(fanout, only & one_leaf)
    return tuple(reversed(levels))


def _only_children(fanout: Fanout) -> Bools:
    """`[C]`: whether a child is the only one of its parent."""
    is_first = fanout.first_children()
    return is_first & np.append(is_first[1:], True)


def _lead_to_one(fanout: Fanout, below: Bools) -> Bools:
    """`[P]`: whether a parent is a leaf, or its child flagged, which is then its only one."""
    flags = below[fanout.first_children()]
    if not fanout.num_childless:
        return flags
    found = np.ones(fanout.num_parents, dtype=bool)
    going_on = found.copy()
    going_on[fanout.childless()] = False
    found[going_on] = flags
    return found


def _item_id_type(segment: Segment) -> str:
    if segment.items.ids is None:
        return "row number"
    return "string" if segment.items.ids.are_strings else "integer"
