# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""How a model is told what the nodes of a tree see: by masks, or in two parts. Knows no model and no trie.

Both mean the same: a node sees the prompt's real tokens, its ancestors and itself. Masks work with any model that
takes them; two parts need a model whose attention functions get our argument, and never read a key that nobody sees.

Axes: B batch, N nodes scored together, P prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .tree import Tree, to_additive
from .tree_attention import TreeAttention

# By kind of layer: how far back it sees, and how many of the prompt's keys its cache holds (`Prefilled.windows`).
Windows = Mapping[str | None, tuple[int | None, int]]


@dataclass(frozen=True)
class ByMask:
    """A mask `[B, 1, N, keys]` for every kind of layer.

    Attributes:
        dtype: the model's dtype if masks are added to attention scores (eager), None if they are boolean (sdpa).
    """

    dtype: torch.dtype | None

    def arguments(
        self,
        tree: Tree,
        prompt_mask: Bool[Tensor, "batch prompt"],
        windows: Windows,
        *,
        depths: Int[Tensor, "#batch nodes"],
    ) -> dict[str, Any]:
        """The arguments of a forward of nodes.

        Args:
            tree: the nodes.
            prompt_mask: real tokens of the prompt.
            windows: by kind of layer.
            depths: tokens from the prompt to each node.
        """
        masks = {
            kind: tree.attention_mask(prompt_mask[:, prompt_mask.shape[-1] - width :], window, depths=depths)
            for kind, (window, width) in windows.items()
        }
        return {"attention_mask": self.of_model(masks)}

    def padded(self) -> ByMask:
        """The same over prompts with padding."""
        return self

    def of_model(self, masks: Mapping[str | None, Tensor]) -> Any:
        """Masks as the model takes them."""
        if self.dtype is not None:
            masks = {kind: to_additive(seen, self.dtype) for kind, seen in masks.items()}
        return masks[None] if None in masks else masks


@dataclass(frozen=True)
class InParts:
    """Our own attention (`hf_gr.torch.tree_attention`), which the model's attention functions find by an argument.

    Attributes:
        argument: its name.
        is_padded: whether the prompt has tokens that are not real.
    """

    argument: str
    is_padded: bool

    def arguments(
        self,
        tree: Tree,
        prompt_mask: Bool[Tensor, "batch prompt"],
        windows: Windows,
        *,
        depths: Int[Tensor, "#batch nodes"],
    ) -> dict[str, Any]:
        """See `ByMask.arguments`; the mask stands for one that is prepared, and nobody reads it."""
        mask = prompt_mask[:1, :1, None, None]
        how = TreeAttention(
            ancestry=tree.ancestry,
            is_level=tree.is_level,
            num_slots=tree.num_slots,
            prompt_mask=prompt_mask if self.is_padded else None,
            depths=tree.depth if tree.is_level else depths,
        )
        return {"attention_mask": mask if None in windows else dict.fromkeys(windows, mask), self.argument: how}

    def padded(self) -> InParts:
        """See `ByMask.padded`."""
        return replace(self, is_padded=True)


Visibility = ByMask | InParts
