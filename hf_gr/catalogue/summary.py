# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts what a catalogue holds. Knows no output."""

import numpy as np

from hf_gr.files.cards import LevelSummary, Summary

from .items import Items
from .snapshot import Snapshot


def summarise(snapshot: Snapshot) -> Summary:
    """Count what a catalogue holds, compacted if it was updated or filtered: the numbers that its saved file has."""
    compact = snapshot.compact()
    items = compact.items
    num_sequences, num_items = items.trie.num_sequences, len(items)
    num_alone = int(np.count_nonzero(items.at_leaf.counts() == 1))
    return Summary(
        num_sequences=num_sequences,
        num_items=num_items,
        num_shared_sequences=num_sequences - num_alone,
        num_sharing_items=num_items - num_alone,
        most_items_of_a_sequence=items.at_leaf.largest,
        max_length=items.trie.max_length,
        eos_token_id=compact.eos_token_id,
        max_token_id=items.trie.max_token_id,
        item_id_type="row number" if items.ids is None else "string" if items.are_strings else "integer",
        nbytes=items.nbytes,
        bytes_per_item=items.nbytes / num_items,
        levels=_levels(items),
    )


def _levels(items: Items) -> tuple[LevelSummary, ...]:
    """The levels, counted from the last one up."""
    trie = items.trie
    levels: list[LevelSummary] = []
    one_leaf = np.ones(trie.fanouts[-1].num_children, dtype=bool)  # whether a node leads to a single sequence
    for level in range(trie.max_length, 0, -1):
        fanout = trie.fanouts[level - 1]
        going_on = fanout.num_parents - fanout.num_childless
        counts = fanout.counts()
        only = np.repeat(counts == 1, counts)  # children without siblings
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
            )
        )
        one_leaf = fanout.any_child(only & one_leaf)
        one_leaf[fanout.childless()] = True
    return tuple(reversed(levels))
