# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits for the live beams, and ahead of them for drafted nodes, from one forward. Knows no trie, decides nothing.

The rows of a batch go on by themselves: a forward scores the beams of every row on the level that it has come to, and
what is drafted below them.

Axes: B batch, S some of its rows, K beams, N nodes of a level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.core.beam import DEAD

from .frontier import Frontier, Rows
from .scorers import Depth, Scorer
from .transfers import to_device
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


# Some rows, and what is drafted below their beams.
Part = tuple[Frontier, list[Nodes]]


@runtime_checkable
class Drafter(Protocol):
    """Proposes nodes below the live beams.

    Attributes:
        num_forwards: forwards of a draft model so far.
    """

    @property
    def num_forwards(self) -> int: ...  # noqa: D102

    def draft(self, frontier: Frontier) -> list[Part]:
        """The rows of a frontier, in parts, each with nodes of consecutive levels, the first below the beams.

        There are no nodes where nothing is worth scoring ahead.
        """
        ...


@dataclass(frozen=True)
class Level:
    """Nodes of one level of a frontier's rows, scored.

    Attributes:
        nodes: the live beams on the first level (None for the root), then what was drafted.
        logits: after each.
        start: where the first of them is among all nodes of the forward.
    """

    nodes: Nodes | None
    logits: Float[Tensor, "some _ vocab"]
    start: int

    def of_rows(self, rows: Int[Tensor, " kept"]) -> Level:
        """Those of some rows."""
        return Level(None if self.nodes is None else self.nodes.of_rows(rows), self.logits[rows], self.start)


class Lookahead:
    """A scorer, what is drafted for it, and the counts. Serves one call.

    Args:
        scorer: the model.
        drafter: proposes nodes; None for no draft.
        batch: all rows.
    """

    def __init__(self, scorer: Scorer, drafter: Drafter | None, batch: Rows) -> None:
        self.scorer = scorer
        self.drafter = drafter
        self.rows = batch.numbers  # that the scorer still has
        self.dead_state = batch.catalogue.dead_state
        names = ("drafted_nodes", "accepted_nodes", "drafted_steps", "accepted_steps")
        nothing = torch.zeros(len(batch.numbers), dtype=torch.long, device=batch.catalogue.device)
        # Without a drafter nothing is counted.
        self.counts = {name: nothing if drafter is None else nothing.clone() for name in names}

    def score(self, frontiers: Sequence[Frontier]) -> list[tuple[Frontier, list[Level]]]:
        """One forward for all rows of the frontiers.

        Returns:
            The rows, in parts, each with the level of its beams and what was drafted below it.
        """
        parts = [part for frontier in frontiers for part in self._draft(frontier)]
        self._forget([frontier for frontier, _ in parts])
        levels = [[_live(frontier), *drafted] for frontier, drafted in parts]
        if len(parts) == 1:
            (frontier, _), (own,) = parts[0], levels
            return [(frontier, self._forward(own, frontier.level))]
        place_of = {number: place for place, number in enumerate(self.rows)}
        places = [[place_of[number] for number in frontier.rows.numbers] for frontier, _ in parts]
        depth = [frontier.level for (frontier, _), of_part in zip(parts, places, strict=True) for _ in of_part]
        depth = [depth for _, depth in sorted(zip(chain(*places), depth, strict=True))]
        where = [to_device(of_part, levels[0][0].tokens.device) for of_part in places]
        joined = _joined(levels, where, num_rows=len(self.rows), dead_state=self.dead_state)
        scored = self._forward(joined, depth if len(set(depth)) > 1 else depth[0])
        return [
            (
                frontier,
                [
                    Level(None if at.nodes is None else nodes, at.logits[rows, : nodes.tokens.shape[1]], at.start)
                    for nodes, at in zip(own, scored, strict=False)
                ],
            )
            for (frontier, _), own, rows in zip(parts, levels, where, strict=True)
        ]

    def _forward(self, levels: list[Nodes], depth: Depth) -> list[Level]:
        """The levels, the first of which is the root's if that has not been scored."""
        if depth:
            return _numbered(levels, self.scorer.score(levels, depth=depth))
        drafted = levels[1:]
        # Paths that do not compete stand on the root together.
        drafted[:1] = [replace(nodes, parents=torch.zeros_like(nodes.parents)) for nodes in drafted[:1]]
        return _numbered([None, *drafted], self.scorer.begin(drafted))

    def accept(self, frontier: Frontier, nodes: Nodes, places: Int[Tensor, "some beams"]) -> None:
        """Count a level whose beams had all been drafted.

        Args:
            frontier: the beams.
            nodes: the drafted nodes.
            places: of the beams among the nodes; paths of a row that do not compete may share a node.
        """
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
        rows = frontier.rows.plan.rows
        for name, number in more.items():
            self.counts[name][slice(None) if rows is None else rows] += number

    def _forget(self, frontiers: Sequence[Frontier]) -> None:
        """Drop the rows that are done from the scorer."""
        if len(frontiers) == 1 and len(frontiers[0].rows.numbers) == len(self.rows):
            return
        wanted = {number for frontier in frontiers for number in frontier.rows.numbers}
        if len(wanted) == len(self.rows):
            return
        kept = [place for place, number in enumerate(self.rows) if number in wanted]
        self.scorer.keep(to_device(kept, frontiers[0].beams.states.device))
        self.rows = tuple(self.rows[place] for place in kept)


def _live(frontier: Frontier) -> Nodes:
    """The beams as nodes; on the level of the root they are no tokens."""
    beams = frontier.beams
    tokens = beams.tokens if frontier.level else beams.states
    return Nodes(tokens, frontier.parents, beams.states)


def _numbered(levels: Sequence[Nodes | None], logits: Sequence[Tensor]) -> list[Level]:
    """Levels with their logits, and their places among the nodes of the forward."""
    found, start = [], 0
    for nodes, of_nodes in zip(levels, logits, strict=True):
        found.append(Level(nodes, of_nodes, start))
        start += of_nodes.shape[1]
    return found


def _joined(
    levels: Sequence[Sequence[Nodes]], rows: Sequence[Int[Tensor, " _"]], *, num_rows: int, dead_state: int
) -> list[Nodes]:
    """The levels of several frontiers side by side, each at its distance from its frontier; padded to the widest."""
    joined = []
    for below in range(max(map(len, levels))):
        there = [(of[below], which) for of, which in zip(levels, rows, strict=True) if below < len(of)]
        shape = (num_rows, max(nodes.tokens.shape[1] for nodes, _ in there))
        nothing = torch.zeros(shape, dtype=torch.long, device=there[0][1].device)
        tokens, parents, states = nothing, nothing.clone(), nothing + dead_state
        for nodes, which in there:
            for whole, part in ((tokens, nodes.tokens), (parents, nodes.parents), (states, nodes.states)):
                whole[which, : part.shape[1]] = part
        joined.append(Nodes(tokens, parents, states))
    return joined
