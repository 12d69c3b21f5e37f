# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""How a model is told what the nodes of a tree see: by masks, or by an argument. Knows no model and no trie.

Both mean the same: a node sees the prompt's real tokens, its ancestors and itself. Masks work with any model that
takes them; the argument needs a model whose attention functions are ours (`hf_gr.torch.tree_attention`).

Axes: B batch, N nodes scored together, P prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .tree import Tree, to_additive
from .tree_attention import TreeAttention

# By kind of layer: how far back it sees, and how many of the prompt's keys its cache holds (`Prefilled.windows`).
Windows = Mapping[str | None, tuple[int | None, int]]


@dataclass(frozen=True)
class Visibility:
    """How."""

    dtype: torch.dtype | None  # the model's if masks are added to scores (eager), None if they are boolean (sdpa)
    argument: str | None = None  # its name; None for a mask `[B, 1, N, keys]` for every kind of layer

    def arguments(
        self,
        tree: Tree,
        prompt_mask: Bool[Tensor, "batch prompt"],
        windows: Windows,
        *,
        depths: Int[Tensor, "#batch nodes"],
    ) -> dict[str, Any]:
        """The arguments of a forward of nodes; depths are tokens from the prompt to each."""
        if self.argument is None:
            masks = {
                kind: tree.attention_mask(prompt_mask[:, prompt_mask.shape[-1] - width :], window, depths=depths)
                for kind, (window, width) in windows.items()
            }
            return {"attention_mask": self.of_model(masks)}
        mask = prompt_mask[:1, :1, None, None]  # stands for one that is prepared, and nobody reads it
        how = TreeAttention(tree, prompt_mask, tree.depth if tree.is_level else depths)
        return {"attention_mask": mask if None in windows else dict.fromkeys(windows, mask), self.argument: how}

    def of_model(self, masks: Mapping[str | None, Tensor]) -> Any:
        """Masks as the model takes them."""
        if self.dtype is not None:
            masks = {kind: to_additive(seen, self.dtype) for kind, seen in masks.items()}
        return masks[None] if None in masks else masks
