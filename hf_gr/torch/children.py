# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The children of the states of a level: one kind for each form that `transition.children` reads them from.

All kinds have the same methods. States are not stored: `take` computes those of the few children that are kept.

Axes: B batch, K beams, C children: those of the level's largest node; of a wide level, its span of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .device_trie import WideLevel


@dataclass(frozen=True)
class Children(ABC):
    """The children of every state, padded to C.

    Attributes:
        tokens: the token that leads to each child; some other node's, or 0, where `legal` is false.
        legal: whether there is such a child, and it is alive.
    """

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]

    @abstractmethod
    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """Tokens and states of chosen children of chosen beams; meaningless states where there is no such child."""

    def take_at(
        self, places: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """Beams, tokens and states of chosen children, by their places among all children of a row."""
        beams = places // self.tokens.shape[-1]
        return beams, *self.take(beams, places % self.tokens.shape[-1])

    def scores(
        self, log_probs: Float[Tensor, "rows vocab"], rows: slice = slice(None)
    ) -> Float[Tensor, "rows children"]:
        """The scores at the tokens of some rows: the beams of all requests, concatenated."""
        return log_probs.gather(-1, self.tokens.flatten(0, 1)[rows])

    def _take_tokens(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> Int[Tensor, "batch chosen"]:
        return self.tokens.flatten(1).gather(1, beams * self.tokens.shape[-1] + children)


@dataclass(frozen=True)
class PlainChildren(Children):
    """The children in one segment.

    Attributes:
        first: the state of each beam's first child.
    """

    first: Int[Tensor, "batch beams"]

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        return self._take_tokens(beams, children), self.first.gather(1, beams) + children

    def take_at(
        self, places: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take_at`; tokens are in that order."""
        beams, children = places // self.tokens.shape[-1], places % self.tokens.shape[-1]
        return beams, self.tokens.flatten(1).gather(1, places), self.first.gather(1, beams) + children


@dataclass(frozen=True)
class MergedChildren(Children):
    """The children in what was compiled, then those in what was added since.

    Attributes:
        first: the state of each beam's first child.
        first_added: the state of its first child among those that were added.
        num_old: children before those.
    """

    first: Int[Tensor, "batch beams"]
    first_added: Int[Tensor, "batch beams"]
    num_old: int

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        old = self.first.gather(1, beams) + children
        added = self.first_added.gather(1, beams) + children - self.num_old
        return self._take_tokens(beams, children), torch.where(children < self.num_old, old, added)


@dataclass(frozen=True)
class WideChildren(Children):
    """The children of a wide level: one entry for every token of its span.

    Attributes:
        table: the table that they are read from.
        nodes: each beam's row of that table.
        first: the state of each beam's first child.
    """

    table: WideLevel
    nodes: Int[Tensor, "batch beams"]
    first: Int[Tensor, "batch beams"]

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        ranks = self.table.ranks[self.nodes.gather(1, beams), children]
        return self.table.first_token + children, self.first.gather(1, beams) + ranks

    def scores(
        self, log_probs: Float[Tensor, "rows vocab"], rows: slice = slice(None)
    ) -> Float[Tensor, "rows children"]:
        """See `Children.scores`: one slice of every row."""
        return log_probs[:, self.table.first_token : self.table.first_token + self.table.num_tokens]


@dataclass(frozen=True)
class UncheckedChildren(Children):
    """All codes of a level as children of every state.

    Attributes:
        states: the beams' own.
        follow: from states and tokens to new states.
    """

    states: Int[Tensor, "batch beams"]
    follow: Callable[[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]], Int[Tensor, "batch chosen"]]

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        tokens = self._take_tokens(beams, children)
        return tokens, self.follow(self.states.gather(1, beams), tokens)


@dataclass(frozen=True)
class ChildrenInColumns(Children):
    """Children whose `tokens` are columns of logits that are not over the vocabulary.

    Attributes:
        by_token: the same children by their tokens.
    """

    by_token: Children

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        return self.by_token.take(beams, children)
