# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A trie without nodes that have one child: an edge is a chain of tokens, read in one forward. Knows no text.

Among the tokens that are allowed, one without an alternative has probability 1: its logits are of no use, only its
keys are, to what comes below it. The same as the jump-forward decoding of SGLang, here in a tree.

Axes: S sequences, T tokens of one, E edges, C tokens of the longest chain; B batch, N nodes, D depth, R tokens read.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.catalogue.fanout import Longs
from hf_gr.catalogue.trie import PADDING
from hf_gr.torch.drafters import first_places
from hf_gr.torch.scorers import TreeScorer
from hf_gr.torch.tree import NO_SLOT, Nodes, Tree


def edges_of(rows: Longs) -> tuple[Longs, Longs]:
    """The shortest beginning of each row that no other has, as edges from 1, padded; and their tokens, `[1 + E, C]`.

    Example:
        >>> edges, chains = edges_of(np.array([[5, 6, 7, 8], [5, 6, 9, -1]]))
        >>> edges.tolist(), chains.tolist()
        ([[1, 2], [1, 3]], [[-1, -1], [5, 6], [7, -1], [9, -1]])
    """
    order, columns = np.lexsort(rows.T[::-1]), np.arange(rows.shape[1])
    rows = rows[order]
    is_same = np.logical_and.accumulate(rows[1:] == rows[:-1], axis=1)
    shared = np.pad(is_same.sum(axis=1), 1)  # tokens that a row shares with the one before
    is_there = columns < 1 + np.maximum(shared[1:], shared[:-1])[:, None]
    is_new = is_there & ~np.pad(is_same, ((1, 0), (0, 0)))  # a node begins here
    nodes, begins = is_new.cumsum(axis=0), is_there & (columns == 0)  # edges do at the first token, and
    for column in columns[1:]:  # where one has an alternative
        parents, is_child = nodes[:, column - 1], is_new[:, column]
        begins[:, column] = (
            is_there[:, column] & (np.bincount(parents[is_child], minlength=len(rows) + 1) > 1)[parents]
        )
    is_first = begins & is_new
    numbers = np.maximum.accumulate(np.where(is_first, is_first.cumsum().reshape(rows.shape), 0), axis=0)
    places, starts = begins.cumsum(axis=1) - 1, np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    edges = np.full((len(rows), places.max() + 1), PADDING)
    chains = np.full((1 + is_first.sum(), (columns - starts)[is_there].max() + 1), PADDING)
    edges[np.nonzero(begins)[0], places[begins]] = numbers[begins]
    chains[edges[np.nonzero(is_there)[0], places[is_there]], (columns - starts)[is_there]] = rows[is_there]
    return edges[np.argsort(order)], chains


class ChainScorer:
    """A `TreeScorer` of nodes of such a trie, whose tokens are numbers of edges; edge 0 has no tokens."""

    takes_prompt = False

    def __init__(self, scorer: TreeScorer, chains: Int[Tensor, "edges longest"]) -> None:
        self.scorer, self.chains = scorer, chains
        self.tree: Any = None  # the nodes scored last, of edges
        self.slots: Any = None  # `[B, slots, C]`, the scorer's slots of an edge's tokens

    def columns(self, tokens: Int[Tensor, "*shape"], *, level: int) -> Int[Tensor, "*shape"]:
        """Where the first tokens of edges are among the logits. See `Scorer.columns`."""
        first = self.chains[tokens, 0].clamp(min=0)
        return first if self.scorer.columns is None else self.scorer.columns(first, level=level)

    def begin(self, levels: list[Nodes]) -> list[Float[Tensor, "batch 1 vocab"]]:
        """See `Scorer.begin`; takes no levels."""
        (logits,) = self.scorer.begin()
        self.tree = self.scorer.tree
        self.slots = self.chains.new_empty((len(logits), 0, self.chains.shape[1]))
        return [logits]

    def read(
        self, tokens: Int[Tensor, "batch nodes"], tree: Tree, depths: Int[Tensor, "#batch nodes"]
    ) -> Float[Tensor, "batch nodes vocab"]:
        """See `TreeScorer.read`: logits after the last token of each edge."""
        chains = self.chains[tokens]
        wanted, start = (chains >= 0).flatten(1), self.scorer.tree.num_slots
        own = torch.where(wanted, start + wanted.cumsum(-1) - 1, NO_SLOT).view(chains.shape)
        self.tree, self.slots = tree, torch.cat([self.slots, own], dim=1)
        above = tree.ancestry.clamp(min=0).flatten(1)[..., None].expand(-1, -1, chains.shape[-1])
        seen = self.slots.gather(1, above).view(*tree.ancestry.shape, -1)
        seen = seen.masked_fill(tree.ancestry[..., None] < 0, NO_SLOT).flatten(2)
        most = torch.stack([wanted.sum(-1).max(), (seen >= 0).sum(-1).max()])
        width, depth = most.tolist()  # synchronises: the shape of the forward depends on it
        places, _ = first_places(wanted, width)
        seen = seen.gather(1, (places // chains.shape[-1])[..., None].expand(-1, -1, seen.shape[-1]))
        slots = torch.arange(start, start + width, device=seen.device)[:, None]
        # Slots ascend from the prompt down; later ones of the same edge are no ancestors.
        seen = seen.masked_fill(seen > slots, NO_SLOT).sort(-1).values[..., seen.shape[-1] - depth :]
        read = chains.flatten(1).gather(1, places).clamp(min=0)
        logits = self.scorer.read(read, Tree(seen, start + width, is_level=False), (seen >= 0).sum(-1))
        ends = (own.amax(-1) - start).clamp(min=0)
        return logits.gather(1, ends[..., None].expand(-1, -1, logits.shape[-1]))
