# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What cards and reports tell of a catalogue and of a draft head: numbers and names. Knows neither who counts them.

Axes: S sequences, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

from .draft_head_config import DraftHeadConfig


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


@dataclass(frozen=True)
class HeadFacts:
    """A draft head.

    Attributes:
        config: its shape.
        num_parameters: numbers that were trained.
        dtype: their type, such as `"float32"`.
    """

    config: DraftHeadConfig
    num_parameters: int
    dtype: str
