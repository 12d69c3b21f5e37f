# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Levels whose nodes have so many children that looking at every token is cheaper than gathering the legal ones.

Near the root of a large catalogue nearly every token is legal. There a table says for each node and each token of the
level's span whether it leads to a child, and to which: a step copies whole rows of the table, and reads whole
stretches of the scores.

Source: STATIC, section 4 (dense layers near the root), over a level's span of tokens instead of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hf_gr.catalogue.fanout import smallest_dtype
from hf_gr.catalogue.trie import Trie

WIDE_FROM = 32  # children of one node; below, a step costs no more than its calls
WIDE_SHARE = 4  # a level is wide if a node may have every fourth token of its span
LARGEST_TABLE = 2**24  # nodes times tokens: 16 MB of flags, 32 MB of numbers


@dataclass(frozen=True)
class WideLevel:
    """The children of a level by node and token; the row behind the last stands for what is no node of the level.

    Attributes:
        first_token: the token of the first column.
        legal: whether a token leads to a child.
        ranks: how many children come before that one.
        first: the first child of every node, by its number in the trie.
    """

    first_token: int
    legal: Bool[Tensor, "nodes span"]
    ranks: Int[Tensor, "nodes span"]
    first: Int[Tensor, " nodes"]

    @property
    def num_nodes(self) -> int:
        """Nodes of the level."""
        return len(self.first) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the span."""
        return self.legal.shape[1]


def wide_levels(trie: Trie, device: torch.device) -> tuple[WideLevel | None, ...]:
    """The tables of a trie on a device; None for a level that is not wide."""
    return tuple(_wide_level(trie, level, device) for level in range(trie.max_length))


def _wide_level(trie: Trie, level: int, device: torch.device) -> WideLevel | None:
    num_nodes, largest = trie.fanouts[level].num_parents, trie.branching[level]
    if largest < WIDE_FROM or num_nodes * largest > LARGEST_TABLE:
        return None
    start, end = trie.level_starts[level + 1], trie.level_starts[level + 2]
    tokens = trie.token(np.arange(start, end), level + 1)
    first_token = int(tokens.min())
    span = int(tokens.max()) - first_token + 1
    if span > WIDE_SHARE * largest or num_nodes * span > LARGEST_TABLE:
        return None
    children = np.arange(end - start)
    parents = trie.fanouts[level].parents(children)
    first, _ = trie.fanouts[level].ranges(np.arange(num_nodes))
    legal = np.zeros((num_nodes + 1, span), dtype=bool)
    ranks = np.zeros((num_nodes + 1, span), dtype=smallest_dtype(largest))
    legal[parents, tokens - first_token] = True
    ranks[parents, tokens - first_token] = children - first[parents]
    return WideLevel(
        first_token=first_token,
        legal=torch.from_numpy(legal).to(device),
        ranks=torch.from_numpy(ranks).to(device),
        first=torch.from_numpy(np.append(first + start, 0)).to(device),
    )
