# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The nodes that one forward scores: the live beams of some rows, and drafts below them. Decides nothing.

Each row advances at its own pace, and all stay in the batch: a forward scores the beams of every row on the level that
it has come to, and what is drafted below them. Rows that wait, or are done, have dead beams there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from hf_gr.core.beam import DEAD, Beams

from .ops import to_device
from .scores import DecodePlan
from .transition import Children, DeviceCatalogue, children
from .tree import Nodes


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, as the host knows them; all others wait."""

    flags: tuple[bool, ...]
    device: torch.device

    @property
    def are_all(self) -> bool:
        """Whether no row waits."""
        return all(self.flags)

    @cached_property
    def mask(self) -> Bool[Tensor, "batch 1"]:
        """The flags on the device."""
        return to_device(np.array(self.flags), self.device)[:, None]

    @cached_property
    def source(self) -> Int[Tensor, " batch"]:
        """For each of these rows its own number, for all others that of the first one."""
        first = self.flags.index(True)
        return to_device([row if flag else first for row, flag in enumerate(self.flags)], self.device)

    def where(self, new: Tensor, old: Tensor) -> Tensor:
        """New values for these rows."""
        if self.are_all:
            return new
        return torch.where(self.mask.view(-1, *[1] * (new.ndim - 1)), new, old)


@dataclass
class Frontier:
    """The rows of a batch whose beams have come to one level, for which drafts and decisions are made together."""

    rows: Rows
    level: int
    beams: Beams  # those of other rows are dead
    parents: Int[Tensor, "batch beams"]  # places among the nodes that were scored last
    catalogue: DeviceCatalogue
    plan: DecodePlan
    _legal: Children | None = None

    @property
    def legal(self) -> Children:
        """The children of the beams; looked up once, on first use."""
        if self._legal is None:
            self._legal = children(self.beams.states, self.catalogue, level=self.level)
        return self._legal

    @property
    def nodes(self) -> Nodes:
        """The beams as nodes; on the level of the root they are no tokens, and the parents are none."""
        tokens = self.beams.sequences[..., -1] if self.level else self.beams.states
        return Nodes(tokens, self.parents, self.beams.states)

    def where(self, flags: Sequence[bool]) -> Frontier:
        """Those of the rows that have a flag."""
        rows = replace(self.rows, flags=tuple(map(operator.and_, self.rows.flags, flags)))
        beams = of_rows(self.beams, rows, dead_state=self.catalogue.dead_state)
        return replace(self, rows=rows, beams=beams, _legal=None)


def of_rows(beams: Beams, rows: Rows, *, dead_state: int) -> Beams:
    """The beams of some rows; all others have dead ones, with the tokens of the first of them."""
    if rows.are_all:
        return beams
    return Beams(
        beams.ops,
        beams.sequences[rows.source],
        beams.beam_indices[rows.source],
        beams.scores.masked_fill(~rows.mask, DEAD),
        beams.states.masked_fill(~rows.mask, dead_state),
        beams.lost,
    )


# Some rows, and what is drafted below their beams.
Part = tuple[Frontier, list[Nodes]]


@runtime_checkable
class Drafter(Protocol):
    """Proposes nodes below the live beams; counts the forwards of a draft model."""

    @property
    def num_forwards(self) -> int: ...  # noqa: D102

    def draft(self, frontier: Frontier) -> list[Part]:
        """The rows in parts, each with levels of nodes below the beams; without, if none are worth scoring."""
        ...


def joined(parts: Sequence[Part]) -> list[Nodes]:
    """The beams of several parts, then their drafts, level by level below the beams; padded to the widest."""
    first, drafted = parts[0]
    if first.rows.are_all:
        return [first.nodes, *drafted]
    dead_state, every = first.catalogue.dead_state, []
    levels = [(frontier.rows, [frontier.nodes, *drafted]) for frontier, drafted in parts]
    for below in range(max(len(of) for _, of in levels)):
        there = [(rows, of[below]) for rows, of in levels if below < len(of)]
        width = max(nodes.tokens.shape[1] for _, nodes in there)
        nothing = torch.zeros_like(there[0][1].tokens[:, :1]).expand(-1, width)
        tokens, parents, states = nothing, nothing, nothing + dead_state
        for rows, nodes in there:
            missing = (0, width - nodes.tokens.shape[1])
            tokens = rows.where(F.pad(nodes.tokens, missing), tokens)
            parents = rows.where(F.pad(nodes.parents, missing), parents)
            states = rows.where(F.pad(nodes.states, missing, value=dead_state), states)
        every.append(Nodes(tokens, parents, states))
    return every
