# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of tree nodes in one piece: the plain form, until the one in two parts is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TreeAttention:
    """Stand-in."""

    ancestry: Tensor
    is_level: bool
    num_slots: int
    prompt_mask: Tensor | None
    depths: Any

    def to(self, device: Any) -> TreeAttention:
        """Stand-in."""
        return self


def tree_attention(query, key, value, tree, *, scale, window=None, softcap=None):  # type: ignore
    """Stand-in."""
    b, h, n, d = query.shape
    width = key.shape[2] - tree.num_slots
    anc = tree.ancestry if window is None else tree.ancestry[..., -window:]
    own = torch.zeros((b, n, tree.num_slots + 1), dtype=torch.bool).scatter(
        -1, torch.where(anc < 0, tree.num_slots, anc), True
    )
    shared = torch.ones((b, n, width), dtype=torch.bool)
    if tree.prompt_mask is not None:
        shared = shared & tree.prompt_mask[:, None, tree.prompt_mask.shape[1] - width :]
    if window is not None:
        depth = tree.depths if isinstance(tree.depths, int) else tree.depths[..., None]
        shared = shared & (torch.arange(width) >= width + depth - window)
    mask = torch.cat([shared, own[..., :-1]], -1)[:, None]
    g = h // key.shape[1]
    s = query @ key.repeat_interleave(g, 1).transpose(-1, -2) * scale
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    s = s.masked_fill(~mask, -torch.inf).softmax(-1)
    return (s @ value.repeat_interleave(g, 1)).transpose(1, 2).contiguous()
