# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The children of the states of a level: one kind for each form that `transition.children` reads them from.

All kinds have the same methods. States are not stored: `take` computes those of the few children that are kept. Nor is
legality stored beside tokens: a program with fewer arrays compiles faster.

Axes: B batch, K beams, C children: the largest branching of the level, a static shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import along, static


@dataclass(frozen=True)
class Children(ABC):
    """The children of every state, padded to C.

    Attributes:
        tokens: the token that leads to each child; -1 where there is no such child, or it is not alive.
    """

    tokens: Int[Array, "batch beams children"]

    @property
    def legal(self) -> Bool[Array, "batch beams children"]:
        """Whether there is such a child, and it is alive."""
        return self.tokens >= 0

    @abstractmethod
    def take(
        self, beams: Int[Array, "batch chosen"], children: Int[Array, "batch chosen"]
    ) -> tuple[Int[Array, "batch chosen"], Int[Array, "batch chosen"]]:
        """Tokens and states of chosen children of chosen beams; meaningless states where there is no such child."""

    def scores(self, log_probs: Float[Array, "batch beams vocab"]) -> Float[Array, "batch beams children"]:
        """The scores at the tokens of every beam; the score at token 0, where there is none."""
        return along(log_probs, jnp.maximum(self.tokens, 0), axis=-1)

    def _take_tokens(
        self, beams: Int[Array, "batch chosen"], children: Int[Array, "batch chosen"]
    ) -> Int[Array, "batch chosen"]:
        return along(self.tokens.reshape(len(self.tokens), -1), beams * self.tokens.shape[-1] + children)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainChildren(Children):
    """The children in one segment.

    Attributes:
        first: the state of each beam's first child.
    """

    first: Int[Array, "batch beams"]

    def take(
        self, beams: Int[Array, "batch chosen"], children: Int[Array, "batch chosen"]
    ) -> tuple[Int[Array, "batch chosen"], Int[Array, "batch chosen"]]:
        """See `Children.take`."""
        return self._take_tokens(beams, children), along(self.first, beams) + children


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MergedChildren(Children):
    """The children in what was compiled, then those in what was added since.

    Attributes:
        first: the state of each beam's first child.
        first_added: the state of its first child among those that were added.
        num_old: children before those (static).
    """

    first: Int[Array, "batch beams"]
    first_added: Int[Array, "batch beams"]
    num_old: int = static()

    def take(
        self, beams: Int[Array, "batch chosen"], children: Int[Array, "batch chosen"]
    ) -> tuple[Int[Array, "batch chosen"], Int[Array, "batch chosen"]]:
        """See `Children.take`."""
        first = jnp.concatenate([self.first, self.first_added - self.num_old], axis=1)
        is_added = children >= self.num_old
        return self._take_tokens(beams, children), along(first, beams + self.tokens.shape[1] * is_added) + children
