# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""All edges of a trie in one ascending array: a step from any node, of any level, is one search. Knows no rules.

Eight bytes a node that a catalogue of millions of items had better not spend: it asks for children level by level.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from hf_gr.catalogue.trie import Trie

from .transition import kept

MOST_NODES = 2**22  # of tries that are walked by their edges: 32 MB
TOKEN_BITS = 32
_EDGES: WeakKeyDictionary[Trie, dict[torch.device, Tensor]] = WeakKeyDictionary()


def edges_of(trie: Trie, device: torch.device) -> Int[Tensor, " edges"]:
    """By node from 1: its parent and its token in one number; made once, as long as the trie lives."""
    return kept(_EDGES, trie, device, _make_edges)


def _make_edges(trie: Trie, device: torch.device) -> Int[Tensor, " edges"]:
    starts = trie.level_starts
    edges = np.empty(trie.level_starts[-1] - 1, dtype=np.int64)
    for level, fanout in enumerate(trie.fanouts):
        nodes = np.arange(starts[level + 1], starts[level + 2])
        parents = fanout.parents(np.arange(fanout.num_children)).astype(np.int64) + starts[level]
        edges[nodes - 1] = parents << TOKEN_BITS | trie.token(nodes, level + 1)
    return torch.from_numpy(edges).to(device)


def follow(
    nodes: Int[Tensor, "*rows"], tokens: Int[Tensor, "*rows"], edges: Int[Tensor, " edges"]
) -> Int[Tensor, "*rows"]:
    """Follow one token from every node; the number behind the last node stands for what is no prefix."""
    wanted = nodes << TOKEN_BITS | tokens.clamp(min=0)
    at = torch.searchsorted(edges, wanted).clamp(max=len(edges) - 1)
    return torch.where((edges[at] == wanted) & (tokens >= 0), at + 1, len(edges) + 1)
