# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The sizes of a search that a call does not say. Checks nothing."""

from typing import Any

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.core.widths import bucket

DRAFT_BUDGET = 512  # nodes that may be scored ahead for a row, in addition to its beams
NODES_AT_ONCE, NODES_PER_BEAM = 64, 16  # prefixes of a forward of `exact=True`; and at most, for each of those
LOGITS_AT_ONCE = 2**26  # of all nodes scored together: 256 MB in fp32


def draft_budget(config: Any, *, batch_size: int, vocab_size: int) -> int:
    """How many nodes may be scored ahead per row, in addition to its live beams."""
    if config.draft_token_budget is not None:
        return max(config.draft_token_budget, 1)
    return max(min(DRAFT_BUDGET, LOGITS_AT_ONCE // (batch_size * vocab_size)), 1)


def exact_sizes(
    num_beams: int | None,
    max_nodes: int | None,
    *,
    batch_size: int,
    vocab_size: int,
    max_length: int,
    num_results: int,
) -> tuple[int, int]:
    """How many prefixes of a row `exact=True` scores in a forward, and at most."""
    num_beams = num_beams or max(min(NODES_AT_ONCE, LOGITS_AT_ONCE // (batch_size * vocab_size)), 2)
    # At least twice the prefixes of so many items.
    return num_beams, max_nodes or max(NODES_PER_BEAM * num_beams, 2 * (max_length - 1) * max(num_beams, num_results))


def limit_to_nodes(config: Any, catalogue: Snapshot) -> None:
    """Lower the sizes of a prepared config's search to those of a catalogue: larger ones find no more."""
    nodes = bucket(catalogue.trie.level_starts[-1])  # Flax compiles a program for a number of beams
    most = max(nodes, config.num_return_sequences)
    config.num_beams = min(config.num_beams, most)
    config.widths = config.widths and tuple(min(width, most) for width in config.widths)
    config.max_nodes = config.max_nodes and min(config.max_nodes, (catalogue.max_length + 1) * nodes)
