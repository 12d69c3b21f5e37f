# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The children of the states of a level.

States are not stored: `take` computes those of the few children that are kept. Nor is legality stored beside tokens: a
program with fewer arrays compiles faster.

Axes: B batch, K beams, C children: the largest branching of the level, a static shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import along


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Children:
    """The children of every state, padded to C."""

    # the token that leads to each child; -1 where there is no such child, or it is not alive
    tokens: Int[Array, "batch beams children"]
    first: Int[Array, "batch beams"]  # the state of each beam's first child

    @property
    def legal(self) -> Bool[Array, "batch beams children"]:
        """Whether there is such a child, and it is alive."""
        return self.tokens >= 0

    def take(
        self, places: Int[Array, "batch chosen"]
    ) -> tuple[Int[Array, "batch chosen"], Int[Array, "batch chosen"]]:
        """Tokens and states at places among all children of a row; meaningless states where there is no such child."""
        tokens = along(self.tokens.reshape(len(self.tokens), -1), places)
        beams = places // self.tokens.shape[-1]
        return tokens, along(self.first, beams) + places - beams * self.tokens.shape[-1]

    def scores(self, log_probs: Float[Array, "batch beams vocab"]) -> Float[Array, "batch beams children"]:
        """The scores at the tokens of every beam; the score at token 0, where there is none."""
        return along(log_probs, jnp.maximum(self.tokens, 0), axis=-1)
