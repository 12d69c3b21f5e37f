# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The children of the states of a level.

Axes: B batch, K beams, C children: those of the level's largest node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Children:
    """The children of every state, padded to C; tokens and states mean nothing where `legal` is false."""

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]
    states: Int[Tensor, "batch beams children"]

    @property
    def shape(self) -> torch.Size:
        """B, K and C."""
        return self.tokens.shape

    def take(
        self, places: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """Tokens and states at places among all children of a row."""
        return self.tokens.flatten(1).gather(1, places), self.states.flatten(1).gather(1, places)
