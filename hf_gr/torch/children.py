# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The children of the states of a level: one kind for each form that `transition.children` reads them from.

All kinds have the same methods. Where states need not be stored, `take` computes those of the few children that are
kept.

Axes: B batch, K beams, C children: those of the level's largest node; of a level with a table, its span of tokens, and
those of the largest node that has no row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .device_trie import LivingBits, RootLevel, WideLevel


class Children(ABC):
    """The children of every state, padded to C.

    Attributes:
        tokens: the token that leads to each child; some other node's, or 0, where `legal` is false.
        legal: whether there is such a child, and it is alive.
    """

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]

    @property
    def shape(self) -> torch.Size:
        """B, K and C."""
        return self.tokens.shape

    @abstractmethod
    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """Tokens and states of chosen children of chosen beams; meaningless states where there is no such child."""

    def take_at(
        self, places: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """Beams, tokens and states of chosen children, by their places among all children of a row."""
        width = self.shape[-1]
        beams = places // width
        return beams, *self.take(beams, places % width)

    def scores(
        self, log_probs: Float[Tensor, "rows vocab"], rows: slice = slice(None)
    ) -> Float[Tensor, "rows children"]:
        """The scores at the tokens of some rows: the beams of all requests, concatenated."""
        tokens = self.tokens.flatten(0, 1)
        return log_probs.gather(-1, tokens if tokens.shape[0] == log_probs.shape[0] else tokens[rows])

    def summed(
        self,
        scores: Float[Tensor, "batch beams children"],
        before: Float[Tensor, "batch beams"],
        dead: Float[Tensor, ""],
    ) -> Float[Tensor, "batch beams children"]:
        """The scores of legal children after those of their beams; `dead` for all others."""
        return torch.where(self.legal, before[..., None] + scores, dead)

    def _take_tokens(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> Int[Tensor, "batch chosen"]:
        return self.tokens.flatten(1).gather(1, beams * self.tokens.shape[-1] + children)


@dataclass(frozen=True)
class PlainChildren(Children):
    """Children one by one.

    Attributes:
        tokens: see `Children`.
        legal: see `Children`.
        states: the state of each.
    """

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]
    states: Int[Tensor, "batch beams children"]

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        return self.take_at(beams * self.tokens.shape[-1] + children)[1:]

    def take_at(
        self, places: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take_at`."""
        width = self.tokens.shape[-1]
        beams = places if width == 1 else places // width
        return beams, self.tokens.flatten(1).gather(1, places), self.states.flatten(1).gather(1, places)


@dataclass(frozen=True)
class OnlyChildren(Children):
    """The children of a level whose nodes have one each, all alive where their parents are.

    Attributes:
        tokens: see `Children`.
        states: the state of each.
        first: the first state that is one of these,
        after: and the one after the last.
    """

    tokens: Int[Tensor, "batch beams 1"]
    states: Int[Tensor, "batch beams"]
    first: int
    after: int

    @property
    def legal(self) -> Bool[Tensor, "batch beams 1"]:
        """See `Children`."""
        return ((self.states >= self.first) & (self.states < self.after))[..., None]

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        return self.tokens[..., 0].gather(1, beams), self.states.gather(1, beams)

    def take_at(
        self, places: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take_at`."""
        return places, *self.take(places, places)


@dataclass(frozen=True)
class RootChildren(Children):
    """The children of the root, all alive.

    Attributes:
        tokens: see `Children`.
        states: the beams' own.
        root: the children.
    """

    tokens: Int[Tensor, "batch beams children"]
    states: Int[Tensor, "batch beams"]
    root: RootLevel

    @property
    def legal(self) -> Bool[Tensor, "batch beams children"]:
        """See `Children`."""
        return (self.states == 0)[..., None].expand(self.tokens.shape)

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        return self.root.tokens.take(children), children + 1

    def scores(
        self, log_probs: Float[Tensor, "rows vocab"], rows: slice = slice(None)
    ) -> Float[Tensor, "rows children"]:
        """See `Children.scores`: one slice of every row, if no token is left out."""
        first, size = self.root.first_token, self.tokens.shape[-1]
        return super().scores(log_probs, rows) if first is None else _columns(log_probs, first, size, rows)

    def summed(
        self,
        scores: Float[Tensor, "batch beams children"],
        before: Float[Tensor, "batch beams"],
        dead: Float[Tensor, ""],
    ) -> Float[Tensor, "batch beams children"]:
        """See `Children.summed`: a beam that is elsewhere is dead."""
        return before[..., None] + scores


@dataclass(frozen=True)
class WideChildren(Children):
    """The children of a wide level: one entry for every token of its span.

    Attributes:
        tokens: see `Children`.
        table: the table that they are read from.
        nodes: each beam's row of that table.
        living: bits of what is alive, and each beam's row of them; None where everything is.
        hidden: columns that are hidden from each request, and whether they are of each beam; None without any.
    """

    tokens: Int[Tensor, "batch beams children"]
    table: WideLevel
    nodes: Int[Tensor, "batch beams"]
    living: tuple[LivingBits, Int[Tensor, "batch beams"]] | None = None
    hidden: tuple[Int[Tensor, "batch hidden"], Bool[Tensor, "batch beams hidden"]] | None = None

    @property
    def legal(self) -> Bool[Tensor, "batch beams children"]:
        """See `Children`."""
        return self.penalties() == 0

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        nodes = self.nodes.gather(1, beams)
        ranks = self.table.ranks.take(nodes * self.table.num_tokens + children)
        return self.table.first_token + children, self.table.first.take(nodes) + ranks

    def scores(
        self, log_probs: Float[Tensor, "rows vocab"], rows: slice = slice(None)
    ) -> Float[Tensor, "rows children"]:
        """See `Children.scores`: one slice of every row."""
        return _columns(log_probs, self.table.first_token, self.table.num_tokens, rows)

    def summed(
        self,
        scores: Float[Tensor, "batch beams children"],
        before: Float[Tensor, "batch beams"],
        dead: Float[Tensor, ""],
    ) -> Float[Tensor, "batch beams children"]:
        """See `Children.summed`; what is no number stays so."""
        return self.penalties().add_(scores).add_(before[..., None])

    def penalties(self) -> Float[Tensor, "batch beams children"]:
        """0 for legal children, `-inf` for all others; new ones with every call."""
        if self.living is None:
            rows = self.table.penalties.index_select(0, self.nodes.flatten())
        else:
            bits, of_beams = self.living
            rows = bits.penalties(of_beams.flatten(), self.table.num_tokens)
        rows = rows.view(*self.nodes.shape, -1)
        if self.hidden is not None:
            columns, are_below = self.hidden
            hide = torch.zeros(are_below.shape, dtype=rows.dtype, device=rows.device).masked_fill_(
                are_below, -torch.inf
            )
            rows.scatter_reduce_(-1, columns[:, None].expand(are_below.shape), hide, "amin")
        return rows


@dataclass(frozen=True)
class JoinedChildren(Children):
    """The children of a level where few nodes have many: those of the few by a table, then those of the others.

    Attributes:
        wide: children of nodes that have a row in the table.
        others: children of all other nodes.
    """

    wide: WideChildren
    others: PlainChildren

    @property
    def shape(self) -> torch.Size:
        """See `Children`; without the tokens, which few need."""
        return torch.Size([*self.wide.tokens.shape[:-1], self.wide.tokens.shape[-1] + self.others.tokens.shape[-1]])

    @property
    def tokens(self) -> Int[Tensor, "batch beams children"]:
        """See `Children`."""
        return torch.cat([self.wide.tokens, self.others.tokens], dim=-1)

    @property
    def legal(self) -> Bool[Tensor, "batch beams children"]:
        """See `Children`."""
        return torch.cat([self.wide.legal, self.others.legal], dim=-1)

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        span = self.wide.table.num_tokens
        is_wide = children < span
        tokens, states = self.wide.take(beams, children.clamp(max=span - 1))
        other_tokens, other_states = self.others.take(beams, (children - span).clamp(min=0))
        return torch.where(is_wide, tokens, other_tokens), torch.where(is_wide, states, other_states)

    def scores(
        self, log_probs: Float[Tensor, "rows vocab"], rows: slice = slice(None)
    ) -> Float[Tensor, "rows children"]:
        """See `Children.scores`."""
        return torch.cat([self.wide.scores(log_probs), self.others.scores(log_probs, rows)], dim=-1)

    def summed(
        self,
        scores: Float[Tensor, "batch beams children"],
        before: Float[Tensor, "batch beams"],
        dead: Float[Tensor, ""],
    ) -> Float[Tensor, "batch beams children"]:
        """See `Children.summed`."""
        span = self.wide.table.num_tokens
        found = scores + before[..., None]
        found[..., :span].add_(self.wide.penalties())
        found[..., span:].masked_fill_(~self.others.legal, -torch.inf)
        return found


@dataclass(frozen=True)
class UncheckedChildren(Children):
    """All codes of a level as children of every state.

    Attributes:
        tokens: see `Children`.
        legal: see `Children`.
        states: the beams' own.
        follow: from states and tokens to new states.
    """

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]
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
        tokens: see `Children`.
        legal: see `Children`.
        by_token: the same children by their tokens.
    """

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]
    by_token: Children

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        return self.by_token.take(beams, children)


def _columns(
    log_probs: Float[Tensor, "rows vocab"], first: int, size: int, rows: slice
) -> Float[Tensor, "rows children"]:
    """Some columns; of a piece of the rows a copy, since a view would keep all of the piece."""
    found = log_probs[:, first : first + size]
    return found if rows.stop is None else found.clone()
