# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The recurrent cells of a draft head, by the name of its `transition`. Know neither codes nor levels.

Source: NEZHA, equation 3 (the tanh cell of its code), section 4 (the addition of NEZHA-3). Axes: H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Add(nn.Module):
    """The state plus the token's embedding."""

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:  # noqa: D102
        return state + embedded


class Residual(nn.Module):
    """Two layers; their output is added to the state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * size, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:  # noqa: D102
        return state + self.layers(torch.cat([embedded, state], dim=-1))


# From H to a module that maps embeddings and states `[rows, H]` to new states. "none" has no cell.
CELLS: dict[str, Callable[[int], nn.Module]] = {
    "rnn": lambda size: nn.RNNCell(size, size),
    "gru": lambda size: nn.GRUCell(size, size),
    "mlp": Residual,
    "add": lambda size: Add(),
}
