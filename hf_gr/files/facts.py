# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What cards and reports say of a catalogue, in numbers. Does not know who counts them.

Axes: S sequences, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

from .text import shown_share


@dataclass(frozen=True)
class LevelSummary:
    """One level of the trie: the tokens at one position of the sequences."""

    level: int  # from 1
    nodes: int  # distinct prefixes of this many tokens
    mean_children: float  # nodes per inner node of the level above: the average number of choices in a step
    largest_branching: int  # the most children of one node above
    forced_share: float  # the share of the inner nodes above that have a single child, so no choice
    decided_share: float  # the share of all sequences that this many tokens tell from all others
    num_ended: int  # sequences that end here

    def cells(self) -> list[str]:
        """The fields as text, for a row of a table."""
        numbers = f"{self.nodes:,}", f"{self.mean_children:,.2f}", f"{self.largest_branching:,}"
        shares = shown_share(self.forced_share), shown_share(self.decided_share)
        return [str(self.level), *numbers, *shares, f"{self.num_ended:,}"]


@dataclass(frozen=True)
class Summary:
    """A catalogue."""

    num_sequences: int  # S
    num_items: int  # I
    num_shared_sequences: int  # sequences with several items
    num_sharing_items: int  # items on them
    most_items_of_a_sequence: int
    max_length: int  # tokens of the longest sequence, including its end token
    eos_token_id: int | None
    max_token_id: int  # a model needs a larger vocabulary
    item_id_type: str  # "string", "integer", or "row number" if no ids were given
    nbytes: int  # in total
    bytes_per_item: float
    levels: tuple[LevelSummary, ...]
