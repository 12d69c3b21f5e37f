# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The recurrent cells of a draft head, by the name of its `transition`. Know neither codes nor levels.

A cell has the parameters of `hf_gr.torch.head_cells`'s module, under the same names.

Source: NEZHA, equation 3 (the tanh cell of its code), section 4 (the addition of NEZHA-3). Axes: H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .layers import linear

States = Float[Array, "batch nodes hidden"]


class Cell(Protocol):
    """From embeddings and states to new states."""

    def shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        ...

    def __call__(self, embedded: States, state: States, params: Mapping[str, Any], name: str) -> States:
        """The new states; parameters are found under `name`."""
        ...


class Add:
    """The state plus the token's embedding."""

    def shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        """None."""
        return {}

    def __call__(self, embedded: States, state: States, params: Mapping[str, Any], name: str) -> States:
        """See `Cell`."""
        return state + embedded


class Residual:
    """Two layers; their output is added to the state."""

    def shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        """See `Cell.shapes`."""
        first = {"layers.0.weight": (size, 2 * size), "layers.0.bias": (size,)}
        return first | {"layers.2.weight": (size, size), "layers.2.bias": (size,)}

    def __call__(self, embedded: States, state: States, params: Mapping[str, Any], name: str) -> States:
        """See `Cell`."""
        inner = jax.nn.silu(linear(jnp.concatenate([embedded, state], axis=-1), params, f"{name}.layers.0"))
        return state + linear(inner, params, f"{name}.layers.2")


@dataclass(frozen=True)
class Gated:
    """torch's cells: one linear map of the embedding and one of the state, for each of some gates.

    Attributes:
        num_gates: 1 for the tanh cell, 3 for a gated recurrent unit.
    """

    num_gates: int

    def shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        """See `Cell.shapes`."""
        wide = self.num_gates * size
        weights: dict[str, tuple[int, ...]] = {f"weight_{side}": (wide, size) for side in ("ih", "hh")}
        return weights | {f"bias_{side}": (wide,) for side in ("ih", "hh")}

    def __call__(self, embedded: States, state: States, params: Mapping[str, Any], name: str) -> States:
        """See `Cell`."""
        of_token, of_state = (
            x @ params[f"{name}.weight_{side}"].T + params[f"{name}.bias_{side}"]
            for x, side in ((embedded, "ih"), (state, "hh"))
        )
        if self.num_gates == 1:
            return jnp.tanh(of_token + of_state)
        (reset, update, new), (old_reset, old_update, old) = (jnp.split(g, 3, axis=-1) for g in (of_token, of_state))
        reset, update = jax.nn.sigmoid(reset + old_reset), jax.nn.sigmoid(update + old_update)
        return (1 - update) * jnp.tanh(new + reset * old) + update * state


CELLS: dict[str, Cell] = {"rnn": Gated(1), "gru": Gated(3), "mlp": Residual(), "add": Add()}  # "none" has no cell
