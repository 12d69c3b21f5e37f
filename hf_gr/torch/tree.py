# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beams as a tree of tokens over one shared prompt: ancestry and attention masks. Knows no trie and no model.

Every scored token gets a fixed *slot* after the prompt's keys: selecting beams moves no keys, only the small table of
ancestors. Source: xGR, section 5 (separated shared and unshared cache), with an ancestry table instead of its in-place
reordering, which needs sorted parents.

Axes: B batch, N nodes scored together, D depth (tokens from the prompt to a node, itself included), P prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Nodes:
    """Nodes of one level, scored together: those of the live beams, or drafted ones below them.

    Attributes:
        tokens: the last token of each.
        parents: places among the nodes scored one level above; anything on the first level.
        states: trie nodes, by which beams are found among the drafted nodes; the dead state for padding.
        is_complete: whether every legal child of the nodes above is here, so that nothing needs verifying.
        log_probs: for samples, which are in drawing order: the log-probabilities they were drawn with (AtSpeed's q),
            of all children of the nodes above.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    states: Int[Tensor, "batch nodes"]
    is_complete: bool = False
    log_probs: Float[Tensor, "batch above children"] | None = None


def to_additive(mask: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """A mask that attention adds to its scores: 0 where `mask` is true, the lowest number elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Tree:
    """The nodes scored last, by the slots of their ancestors and their own.

    Attributes:
        ancestry: slots from the first token to the node itself.
        num_slots: slots in use, those of other nodes included.
    """

    ancestry: Int[Tensor, "batch nodes depth"]
    num_slots: int

    @classmethod
    def over_prompt(cls, batch_size: int, num_nodes: int, device: torch.device) -> Tree:
        """The tree of a prompt alone: `num_nodes` nodes of depth 0, all of them the prompt."""
        return cls(torch.zeros((batch_size, num_nodes, 0), dtype=torch.long, device=device), 0)

    @property
    def depth(self) -> int:
        """Tokens from the prompt to a node."""
        return self.ancestry.shape[-1]

    def grow(self, parents: Int[Tensor, "batch nodes"]) -> Tree:
        """One new node below each of `parents` (positions among the nodes of this tree)."""
        batch_size, num_nodes = parents.shape
        inherited = self.ancestry.gather(1, parents[..., None].expand(-1, -1, self.depth))
        slots = torch.arange(self.num_slots, self.num_slots + num_nodes, device=parents.device)
        own = slots.expand(batch_size, -1)[..., None]
        return Tree(torch.cat([inherited, own], dim=-1), self.num_slots + num_nodes)

    def attention_mask(
        self, prompt_mask: Bool[Tensor, "batch prompt"], window: int | None = None
    ) -> Bool[Tensor, "batch 1 nodes keys"]:
        """Who sees whom: a node sees the prompt's real tokens, its ancestors and itself.

        Args:
            prompt_mask: real tokens of the prompt whose keys are in the cache: only the last ones if a layer dropped
                others.
            window: how far back a sliding layer sees, the node itself included; None for everything.
        """
        seen = self.ancestry if window is None else self.ancestry[..., -window:]
        batch_size, num_nodes, _ = seen.shape
        own = torch.zeros((batch_size, num_nodes, self.num_slots), dtype=torch.bool, device=seen.device)
        own = own.scatter(-1, seen, True)
        if window is not None:
            width = prompt_mask.shape[-1]
            # The nearest prompt token is `depth` steps behind a node, and `window - 1` steps behind are still seen.
            nearest = torch.arange(width, device=seen.device) >= width - max(window - self.depth, 0)
            prompt_mask = prompt_mask & nearest
        shared = prompt_mask[:, None].expand(-1, num_nodes, -1)
        return torch.cat([shared, own], dim=-1)[:, None]
