# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What cards and reports state about a catalogue and a draft head: numbers and names. Does not know who counts them.

Axes: S sequences, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

from .draft_head_config import DraftHeadConfig


@dataclass(frozen=True)
class LevelSummary:
    """One level of the trie: the tokens at one position of the sequences.

    Attributes:
        level: its number, from 1.
        nodes: distinct prefixes of this many tokens.
        mean_children: nodes per inner node of the level above: the average number of choices in a step.
        largest_branching: the most children of one node of the level above.
        forced_share: the share of the inner nodes above that have a single child, so no choice.
        decided_share: the share of all sequences that this many tokens tell from all others.
        num_ended: sequences that end at this level.
        token_bytes: memory of the nodes' tokens.
        offset_bytes: memory of the map from nodes of the level above to their children.
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
        max_length: tokens of the longest sequence, including its end token.
        eos_token_id: the end token, or None.
        max_token_id: the largest token; a model needs a larger vocabulary.
        item_id_type: `"string"`, `"integer"`, or `"row number"` if no ids were given.
        item_bytes: memory of the map from sequences to items, and of the items' original order.
        item_id_bytes: memory of the item ids.
        nbytes: memory in total.
        bytes_per_item: `nbytes` per item.
        levels: one per token of the longest sequence.
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


@dataclass(frozen=True)
class HeadFacts:
    """A draft head.

    Attributes:
        config: its shape.
        num_parameters: trained parameters.
        dtype: their dtype, such as `"float32"`.
    """

    config: DraftHeadConfig
    num_parameters: int
    dtype: str
