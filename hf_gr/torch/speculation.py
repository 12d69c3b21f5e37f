# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits for the live beams, and ahead of them for drafted nodes, from one forward. Decides nothing.

Each row advances at its own pace, and all stay in the batch: a forward scores the beams of every row on the level that
it has come to, and what is drafted below them. Rows that wait, or are done, have dead beams there.

Axes: B batch, K beams, N nodes of a level, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_gr.core.beam import DEAD, Beams

from .children import Children
from .plan import DecodePlan
from .scorers import Depth, Scorer
from .transfers import to_device
from .transition import DeviceCatalogue, children
from .tree import Nodes


@dataclass(frozen=True)
class Speculation:
    """What one call scored ahead, and what was accepted.

    Attributes:
        target_forwards: forwards of the model after the prefill; the same for all rows of a batch.
        draft_forwards: forwards of the draft model after its prefill.
        drafted_nodes: nodes scored ahead, by row.
        accepted_nodes: those of them that became beams.
        drafted_steps: levels drafted, by row; a level may be drafted several times.
        accepted_steps: levels of a draft whose beams had all been drafted, up to the first level where one had not
            (the paper's "accept steps").
        chosen: the draft that `drafting="auto"` has taken: "none", "trie", "head" or "assistant"; None without "auto".
    """

    target_forwards: int
    draft_forwards: int
    drafted_nodes: Int[Tensor, " batch"]
    accepted_nodes: Int[Tensor, " batch"]
    drafted_steps: Int[Tensor, " batch"]
    accepted_steps: Int[Tensor, " batch"]
    chosen: str | None = None


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
    """The rows of a batch whose beams have come to one level: what is drafted, and decided, together."""

    rows: Rows
    level: int
    beams: Beams  # those of other rows are dead
    parents: Int[Tensor, "batch beams"]  # places among the nodes that were scored last
    catalogue: DeviceCatalogue
    plan: DecodePlan
    _legal: Children | None = None

    @property
    def legal(self) -> Children:
        """The children of the beams; looked up once, when somebody asks."""
        if self._legal is None:
            self._legal = children(self.beams.states, self.catalogue, level=self.level)
        return self._legal

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


# Some rows, what is drafted below their beams, and the logits after the beams and each level drafted for any row.
Scored = tuple[Frontier, list[Nodes], list[Float[Tensor, "batch _ vocab"]]]


class Lookahead:
    """A scorer, what is drafted for it, and the counts. Serves one call."""

    def __init__(self, scorer: Scorer, drafter: Drafter | None, catalogue: DeviceCatalogue, num_rows: int) -> None:
        self.scorer = scorer
        self.drafter = drafter
        self.dead_state = catalogue.dead_state
        names = ("drafted_nodes", "accepted_nodes", "drafted_steps", "accepted_steps")
        nothing = torch.zeros(num_rows, dtype=torch.long, device=catalogue.device)
        # Without a drafter nothing is counted.
        self.counts = {name: nothing if drafter is None else nothing.clone() for name in names}

    def score(self, frontiers: Sequence[Frontier]) -> list[Scored]:
        """One forward for all rows."""
        parts = [part for frontier in frontiers for part in self._draft(frontier)]
        levels = _joined(parts, dead_state=self.dead_state)
        if frontiers[0].level:
            logits = self.scorer.score(levels, depth=_depth(frontiers, len(levels)))
        else:  # paths that do not compete stand on the root together
            drafted = levels[1:]
            drafted[:1] = [replace(nodes, parents=torch.zeros_like(nodes.parents)) for nodes in drafted[:1]]
            logits = self.scorer.begin(drafted)
        return [(frontier, drafted, logits) for frontier, drafted in parts]

    def accept(self, frontier: Frontier, nodes: Nodes, places: Int[Tensor, "batch beams"]) -> None:
        """Count a level whose beams had all been drafted; paths of a row that do not compete may share a node."""
        num_rows, num_nodes = nodes.states.shape
        columns = torch.where(frontier.beams.scores > DEAD, places, num_nodes)
        hit = torch.zeros((num_rows, num_nodes + 1), dtype=torch.long, device=columns.device)
        used = hit.scatter(1, columns, 1)[:, :-1].sum(dim=-1)
        self._count(frontier, accepted_nodes=used, accepted_steps=1)

    @property
    def speculation(self) -> Speculation:
        """What happened so far."""
        counts: dict[str, Any] = self.counts
        return Speculation(
            target_forwards=self.scorer.num_forwards,
            draft_forwards=0 if self.drafter is None else self.drafter.num_forwards,
            **counts,
        )

    def _draft(self, frontier: Frontier) -> list[Part]:
        if self.drafter is None or (frontier.level == 0 and not self.scorer.takes_prompt):
            return [(frontier, [])]
        parts = self.drafter.draft(frontier)
        for part, drafted in parts:
            for nodes in drafted:
                self._count(part, drafted_nodes=(nodes.states != self.dead_state).sum(dim=-1), drafted_steps=1)
        return parts

    def _count(self, frontier: Frontier, **more: Any) -> None:
        rows = frontier.rows
        for name, number in more.items():
            self.counts[name] += number if rows.are_all else rows.mask[:, 0] * number


def _live(frontier: Frontier) -> Nodes:
    """The beams as nodes; on the level of the root they are no tokens."""
    beams = frontier.beams
    tokens = beams.tokens if frontier.level else beams.states
    return Nodes(tokens, frontier.parents, beams.states)


def _depth(frontiers: Sequence[Frontier], num_levels: int) -> Depth:
    """Tokens to the nodes of each level; a row that is done is as deep as the least deep one.

    All rows have positions for that, and for no more tokens than have children in the catalogue.
    """
    rows = frontiers[0].rows
    if rows.are_all:
        return frontiers[0].level
    least, most = min(frontier.level for frontier in frontiers), frontiers[0].catalogue.max_length - 1
    own = (max((f.level for f in frontiers if f.rows.flags[row]), default=least) for row in range(len(rows.flags)))
    return [[min(level + number, most) for number in range(num_levels)] for level in own]


def _joined(parts: Sequence[Part], *, dead_state: int) -> list[Nodes]:
    """The beams of several parts, and what is drafted by its distance from them; padded to the widest."""
    levels = [(frontier.rows, [_live(frontier), *drafted]) for frontier, drafted in parts]
    if parts[0][0].rows.are_all:
        return levels[0][1]
    joined = []
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
        joined.append(Nodes(tokens, parents, states))
    return joined
