# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beams as a tree of tokens over one shared prompt: ancestry and attention masks. Knows no trie and no model.

Every scored token gets a fixed *slot* after the prompt's keys: selecting beams moves no keys, only the small table of
ancestors. Source: xGR, section 5 (separated shared and unshared cache), with an ancestry table instead of its in-place
reordering, which needs sorted parents.

Axes: B batch, N nodes scored together, D depth (tokens from the prompt to a node, itself included), P prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NO_SLOT = -1


@dataclass(frozen=True)
class Nodes:
    """Nodes of one level, scored together: those of the live beams, or drafted ones below them.

    Parents are places among the nodes of the level above; on the first level scored, among all nodes of the
    forward before, level after level, where the prompt alone is place 0. Samples, in drawing order, have the
    log-probabilities they were drawn with (AtSpeed's q), of all children of the nodes above.
    """

    tokens: Int[Tensor, "batch nodes"]  # the last one of each
    parents: Int[Tensor, "batch nodes"]
    states: Int[Tensor, "batch nodes"]  # trie nodes, by which beams are found; the dead state for padding
    is_complete: bool = False  # with every legal child of the nodes above, so that nothing needs verifying
    log_probs: Float[Tensor, "batch above children"] | None = None


def to_additive(mask: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """A mask that attention adds to its scores: 0 where `mask` is true, the lowest number elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Tree:
    """The nodes scored last, by the slots of their ancestors and their own."""

    ancestry: Int[Tensor, "batch nodes depth"]  # to the node itself; NO_SLOT on the left of less deep ones
    num_slots: int  # in use, those of other nodes included
    is_level: bool = True  # whether all nodes have one depth, so that nothing is NO_SLOT

    @classmethod
    def over_prompt(cls, batch_size: int, device: torch.device) -> Tree:
        """The tree of a prompt alone: one node of depth 0."""
        return cls(torch.zeros((batch_size, 1, 0), dtype=torch.long, device=device), 0)

    @property
    def depth(self) -> int:
        """Tokens from the prompt to the deepest nodes."""
        return self.ancestry.shape[-1]

    def grow(self, parents: Int[Tensor, "batch nodes"], *, depth: int, is_level: bool = True) -> Tree:
        """One new node below each of `parents` (positions among the nodes of this tree); `depth` is of the deepest."""
        batch_size, num_nodes = parents.shape
        ancestry = self.ancestry[..., self.ancestry.shape[-1] + 1 - depth :]
        inherited = ancestry.gather(1, parents[..., None].expand(-1, -1, depth - 1))
        slots = torch.arange(self.num_slots, self.num_slots + num_nodes, device=parents.device)
        own = slots.expand(batch_size, -1)[..., None]
        return Tree(torch.cat([inherited, own], dim=-1), self.num_slots + num_nodes, is_level)

    @classmethod
    def joined(cls, trees: Sequence[Tree]) -> Tree:
        """The nodes of trees that grew one after the other, as one tree."""
        if len(trees) == 1:
            return trees[0]
        depth = max(tree.depth for tree in trees)
        wide = [torch.nn.functional.pad(tree.ancestry, (depth - tree.depth, 0), value=NO_SLOT) for tree in trees]
        return cls(torch.cat(wide, dim=1), trees[-1].num_slots, is_level=False)

    def attention_mask(
        self,
        prompt_mask: Bool[Tensor, "batch prompt"],  # of the keys in the cache: the last ones if a layer dropped others
        window: int | None = None,  # how far back a sliding layer sees, the node itself included; None for everything
        *,
        depths: Int[Tensor, "#batch nodes"] | None = None,  # from the prompt to each; None: as deep as the tree
    ) -> Bool[Tensor, "batch 1 nodes keys"]:
        """Who sees whom: a node sees the prompt's real tokens, its ancestors and itself."""
        seen = self.ancestry if window is None else self.ancestry[..., -window:]
        batch_size, num_nodes, _ = seen.shape
        # Places that are no slot are written to an extra column, which is dropped.
        own = torch.zeros(
            (batch_size, num_nodes, self.num_slots + (not self.is_level)), dtype=torch.bool, device=seen.device
        )
        own = own.scatter(-1, seen if self.is_level else torch.where(seen < 0, self.num_slots, seen), True)
        shared = prompt_mask[:, None].expand(-1, num_nodes, -1)
        if window is not None:
            width = prompt_mask.shape[-1]
            depth = self.depth if depths is None else depths[..., None]
            # The nearest prompt token is `depth` steps before a node, which sees up to `window - 1` steps back.
            shared = shared & (torch.arange(width, device=seen.device) >= width + depth - window)
        return torch.cat([shared, own[..., : self.num_slots]], dim=-1)[:, None]


def prompt_attention(
    prompt_mask: Bool[Tensor, "batch prompt"], num_slots: int, window: int | None = None
) -> Bool[Tensor, "batch 1 prompt keys"]:
    """Who sees whom in a prompt with slots after it: real tokens before, and the token itself, in a window."""
    length = prompt_mask.shape[-1]
    places = torch.arange(length, device=prompt_mask.device)
    behind = places[:, None] - places
    near = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    seen = (near & prompt_mask[:, None]) | (behind == 0)  # padding, too, needs something to see
    return torch.nn.functional.pad(seen, (0, num_slots))[:, None]
