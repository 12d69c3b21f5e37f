# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees as decoding grows them, with random queries, keys and values; what they attend to, by a dense mask.

Axes: B batch, H query heads, h key heads, N nodes, P prompt, S slots, W width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_gr.torch.tree import Tree
from hf_gr.torch.tree_attention import TreeAttention, tree_attention

SPREAD = 2.0  # standard deviation of queries: scores that differ by several units, as in a trained model
UNUSED = float("nan")  # what memory holds that nobody may read


@dataclass(frozen=True)
class Shape:
    """Of a layer and its prompt.

    Attributes:
        batch: prompts.
        heads: query heads.
        key_heads: key heads.
        width: of a query and a key.
        value_width: of a value.
        prompt: the prompt's tokens, the padding's included.
        kept: those whose keys the layer still has.
        room: keys after the used ones in the same memory.
    """

    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    width: int = 8
    value_width: int = 8
    prompt: int = 7
    kept: int = 7
    room: int = 5


@dataclass(frozen=True)
class Case:
    """One forward of tree nodes through one layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    tree: Tree
    prompt_mask: Tensor  # [B, P]
    depths: Tensor  # [B, N]
    scale: float
    window: int | None = None
    softcap: float | None = None

    def how(self) -> TreeAttention:
        """The tree as forwards hand it on."""
        return TreeAttention(
            self.tree,
            self.prompt_mask,
            self.tree.depth if self.tree.is_level else self.depths,
        )

    def ours(self, how: TreeAttention | None = None, **changed: Any) -> Tensor:
        """`[B, N, H, W]`, by the function that is tested."""
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap} | changed
        return tree_attention(self.query, self.key, self.value, how or self.how(), **options)

    def mask(self) -> Tensor:
        """`[B, 1, N, P + S]`, by the slow twin."""
        kept = self.key.shape[2] - self.tree.num_slots
        prompt_mask = self.prompt_mask[:, self.prompt_mask.shape[1] - kept :]
        return self.tree.attention_mask(prompt_mask, self.window, depths=self.depths)

    def repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head."""
        groups = self.query.shape[1] // self.key.shape[1]
        return self.key.repeat_interleave(groups, dim=1), self.value.repeat_interleave(groups, dim=1)

    def dense(self) -> Tensor:
        """`[B, N, H, W]` by the mask, in float64."""
        key, value = (states.double() for states in self.repeated())
        scores = self.query.double() @ key.mT * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        weights = scores.masked_fill(~self.mask(), -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2)

    def by_mask(self) -> Tensor:
        """`[B, N, H, W]` as transformers computes it with the mask, in the dtype of the queries.

        That is `sdpa_attention_forward`; with a softcap, `eager_attention_forward` of Gemma 2.
        """
        key, value = self.repeated()
        if self.softcap is None:
            found = torch.nn.functional.scaled_dot_product_attention(
                self.query, key, value, attn_mask=self.mask(), scale=self.scale
            )
            return found.transpose(1, 2)
        scores = self.query @ key.mT * self.scale
        scores = torch.tanh(scores / self.softcap) * self.softcap
        hidden = torch.zeros(self.mask().shape, dtype=scores.dtype)
        scores = scores + hidden.masked_fill(~self.mask(), torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        return (weights @ value).transpose(1, 2)


KINDS = ("first level", "levels", "dead beams", "drafts", "rows of different depth")


def grow(kind: str, batch: int, nodes: int, generator: torch.Generator) -> tuple[Tree, Tensor]:
    """A tree as decoding grows it, and the depths of its nodes."""

    def parents(above: int, width: int) -> Tensor:
        return torch.randint(0, above, (batch, width), generator=generator)

    tree = Tree.over_prompt(batch, torch.device("cpu")).grow(parents(1, nodes), depth=1)
    depth, above = 1, nodes
    if kind in ("levels", "dead beams"):
        for depth in (2, 3):
            # Dead beams go on as copies of the first one.
            below = parents(above, nodes) if kind == "levels" else parents(1, nodes)
            tree, above = tree.grow(below, depth=depth), nodes
    if kind not in ("drafts", "rows of different depth"):
        return tree, torch.full((batch, nodes), depth)
    widths = (nodes, nodes + 2, 1)  # three levels in one forward, each below the one before
    first = torch.full((batch, 1), 2)
    if kind == "rows of different depth":
        # The first forward scored two levels, and some rows go on from the first of them.
        both = Tree.joined([tree, tree.grow(parents(nodes, nodes), depth=2)])
        ahead = torch.arange(batch)[:, None] % 2
        tree, first = both, 2 + ahead
        start = parents(nodes, widths[0]) + nodes * ahead
    else:
        start = parents(nodes, widths[0])
    deepest, grown, below = int(first.max()), [tree], start
    for number, width in enumerate(widths):
        grown.append(grown[-1].grow(below, depth=deepest + number, is_level=False))
        below = parents(width, widths[min(number + 1, 2)])
    depths = torch.cat([(first + number).expand(-1, width) for number, width in enumerate(widths)], dim=1)
    return Tree.joined(grown[1:]), depths


def make(
    kind: str,
    shape: Shape = Shape(),  # noqa: B008
    *,
    nodes: int = 4,
    seed: int = 0,
    padded: bool = False,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
) -> Case:
    """A case. Keys are views of larger memory, as those of our caches; the rest of the memory is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    tree, depths = grow(kind, shape.batch, nodes, generator)
    num_keys = shape.kept + tree.num_slots

    def states(width: int) -> Tensor:
        memory = torch.full((shape.batch, shape.key_heads, num_keys + shape.room, width), UNUSED, dtype=dtype)
        memory[:, :, :num_keys] = torch.randn((*memory.shape[:2], num_keys, width), generator=generator).to(dtype)
        return memory[:, :, :num_keys]

    query = SPREAD * torch.randn((shape.batch, depths.shape[1], shape.heads, shape.width), generator=generator)
    prompt_mask = torch.ones((shape.batch, shape.prompt), dtype=torch.bool)
    if padded:  # a row of padding alone but for its last token, and rows in between
        for row in range(shape.batch):
            prompt_mask[row, : (shape.prompt - 1) * (shape.batch - row) // shape.batch] = False
    return Case(
        query=query.to(dtype).transpose(1, 2),
        key=states(shape.width),
        value=states(shape.value_width),
        tree=tree,
        prompt_mask=prompt_mask,
        depths=depths,
        scale=shape.width**-0.5,
        window=window,
        softcap=softcap,
    )
