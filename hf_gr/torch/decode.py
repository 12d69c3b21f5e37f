# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one loop: score, then decide, level by level. Knows no model beyond its scorer.

A forward scores the live beams of every row and, with a drafter, nodes below them; the first one scores the prompt,
too. Then levels are decided in order, each for the rows whose beams have come to it and are all among the scored
nodes: each row advances at its own pace. Rows that wait, or are done, stay in the batch, masked.

Fixed-length catalogues run without a single host synchronisation if nothing is drafted. Ragged ones and a user's
stopping criteria synchronise once a level, to see whether anything is left to do, unless the plan says that no row
leaves early; drafts synchronise for their size, and for whether they were accepted.

Axes: B batch, K beams, C children, V vocabulary, T generated tokens, R returned sequences a row.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.core import beam
from hf_gr.core.beam import Beams, Finished, of_level, to_room, widened
from hf_gr.core.decide import accept, best, can_change, proven
from hf_gr.core.plan import Speculation
from hf_gr.core.verifiers import locate, relaxed_places

from . import ops
from .noise import PASSES
from .scorers import Depth, Scorer
from .scores import DecodePlan, child_scores
from .speculation import Drafter, Frontier, Part, Rows, joined, of_rows
from .transition import DeviceCatalogue, over_vocabulary
from .tree import Nodes


@dataclass(frozen=True)
class Decoded:
    """The result: transformers' fields, generated part only."""

    sequences: Int[Tensor, "rows length"]  # as long as the catalogue's longest, until they are `cropped`
    scores: Float[Tensor, " rows"]  # `-inf` for a row of `missing_token_id`
    beam_indices: Int[Tensor, "rows length"]  # with the batch offset, -1 after the end
    step_scores: tuple[Float[Tensor, "paths vocab"], ...] | None  # by level; `-inf` after the end of a path
    step_logits: tuple[Float[Tensor, "paths vocab"], ...] | None  # by level; anything after the end
    num_proven: Int[Tensor, " batch"] | None  # first answers of a row that are proven to be the best
    speculation: Speculation
    perturbed_scores: Float[Tensor, " rows"] | None = None  # of samples without replacement, by which they are ranked
    may_be_shorter: bool = False  # whether the last columns may be empty in all rows

    def cropped(self) -> Decoded:
        """The same without columns that are empty in all rows; synchronises where there may be some."""
        if not self.may_be_shorter:
            return self
        length = max(int((self.beam_indices >= 0).sum(-1).max()), 1)
        return replace(self, sequences=self.sequences[:, :length], beam_indices=self.beam_indices[:, :length])


def decode(scorer: Scorer, catalogue: DeviceCatalogue, plan: DecodePlan, drafter: Drafter | None = None) -> Decoded:
    """The best legal sequences of a batch, R rows a request, best first, then padding; this uses the scorer up.

    The result does not depend on a drafter, unless the plan is relaxed.

    Source: STATIC, algorithm 1, with candidates scored before any truncation; AtSpeed, algorithms 1 and 2.
    """
    search = _Search(scorer, catalogue, plan, drafter)
    state = search.start()
    while any(rows := search.open_rows(state)):
        parts, nodes, depth = search.draft(state, rows)
        # No name for logits, which are as wide as the vocabulary: these are gone when the next ones are made.
        state = search.decide(state, parts, scorer.score(nodes, depth=depth) if depth else scorer.begin(nodes))
    return search.result(state)


COUNTS = ("drafted_nodes", "accepted_nodes", "drafted_steps", "accepted_steps")  # fields of `Speculation`


@dataclass(frozen=True)
class _State:
    """The state passed from one forward to the next."""

    beams: Beams  # as long as their level, if all rows are at the same one; else with room for all tokens
    levels: tuple[int, ...]  # tokens of the beams of each row
    can_change: tuple[bool, ...]  # by row
    finished: Finished | None  # None if there are no results before the last level
    parents: Int[Tensor, "batch beams"]  # places among the nodes that were scored last

    def at(self, level: int, flags: Iterable[bool]) -> tuple[bool, ...]:
        """The rows with a flag that have come to a level."""
        return tuple(flag and own == level for flag, own in zip(flags, self.levels, strict=True))


class _Search:
    """Scores, and decides levels as far as they are scored. Serves one call; the arguments are those of `decode`."""

    def __init__(self, scorer: Scorer, catalogue: DeviceCatalogue, plan: DecodePlan, drafter: Drafter | None) -> None:
        self.scorer, self.catalogue, self.plan, self.drafter = scorer, catalogue, plan, drafter
        self.may_close = plan.exit_early and (catalogue.is_ragged or plan.stopping_criteria is not None)
        # Without a draft all rows need equally many forwards; outputs of a level have all rows.
        self.rows_leave = drafter is not None and not plan.keeps_steps
        # Equal beams need not be scored K times, unless a processor expects K rows.
        self.first_width = plan.width if plan.processors is not None or not plan.is_beam_search else 1
        # A plain number would become a tensor at every level, and `torch.tensor` copies from the host, which waits.
        self.dead = torch.full((), beam.DEAD, device=catalogue.device)
        self.deepest = 0  # the level that all rows decide if they do not leave
        self.kept: dict[str, list[Tensor]] = {"scores": [], "logits": []}  # by level, if they are wanted
        nothing = torch.zeros(len(plan.prompt), dtype=torch.long, device=catalogue.device)
        self.counts: dict[str, Tensor] = dict.fromkeys(COUNTS, nothing)  # of what is drafted, by row

    def start(self) -> _State:
        """All rows at the root."""
        plan, catalogue, num_rows = self.plan, self.catalogue, len(self.plan.prompt)
        where: dict[str, Any] = {"ops": ops, "like": plan.prompt, "batch_size": num_rows}
        alone = not plan.is_beam_search
        beams = Beams.start(**where, width=self.first_width, independent=alone, certifies=plan.certifies)
        finished = None
        if not plan.ends_together(is_ragged=catalogue.is_ragged):
            finished = Finished.none_yet(**where, width=plan.width, max_length=catalogue.max_length)
        parents = beams.states.expand(-1, plan.width)
        return _State(beams, (0,) * num_rows, (True,) * num_rows, finished, parents)

    def open_rows(self, state: _State) -> tuple[bool, ...]:
        """The rows that have levels left, and may still change; if they do not leave, all while some row may."""
        unfinished = tuple(level < self.catalogue.max_length for level in state.levels)
        can_change = tuple(map(operator.and_, unfinished, state.can_change))
        if self.rows_leave:
            return can_change
        return unfinished if any(can_change) else tuple(level < self.deepest for level in state.levels)

    def draft(self, state: _State, rows: tuple[bool, ...]) -> tuple[list[Part], list[Nodes], Depth]:
        """The nodes for the next forward: the open rows' beams and the drafts below them; and their depths.

        Nodes of the first forward are those below the prompt, which is at depth 0.
        """
        parts: list[Part] = []
        levels = sorted(set(compress(state.levels, rows)))
        for level in levels:
            frontier = self._frontier(state, rows if len(levels) == 1 else state.at(level, rows), level)
            parts += [(frontier, [])] if self.drafter is None else self._drafted(self.drafter, frontier)
        nodes, least = joined(parts), levels[0]
        if not least:  # paths that do not compete stand on the root together
            below = nodes[1:]
            if below:
                below[0] = replace(below[0], parents=torch.zeros_like(below[0].parents))
            return parts, below, 0
        if all(rows) and len(levels) == 1:
            return parts, nodes, least
        # A row that is done is as deep as the least deep one: all rows have positions for that, and for no more tokens
        # than have children in the catalogue.
        most = self.catalogue.max_length - 1
        own = (level if is_open else least for level, is_open in zip(state.levels, rows, strict=True))
        return parts, nodes, [[min(level + number, most) for number in range(len(nodes))] for level in own]

    def decide(self, state: _State, parts: Sequence[Part], logits: Sequence[Float[Tensor, "batch _ vocab"]]) -> _State:
        """Decide levels while the beams of a row are among the scored nodes, by the logits after beams and drafts."""
        for first, drafted in parts:
            state = self._decide(state, first, logits[0], None, 0, *drafted[:1])
            start = logits[0].shape[1]  # of a level among all nodes that were scored
            for number, nodes in enumerate(drafted, start=1):
                flags = state.at(first.level + number, map(operator.and_, first.rows.flags, self.open_rows(state)))
                places, found = locate(state.beams, nodes.states)
                # Only a draft that may lack a node needs this check, which synchronises.
                if any(flags) and not nodes.is_complete:
                    flags = tuple(map(operator.and_, flags, found.tolist()))
                if not any(flags):
                    break
                frontier = self._frontier(state, flags, first.level + number)
                self._accept(frontier, nodes, places)
                state = self._decide(state, frontier, logits[number], places, start, *drafted[number : number + 1])
                start += logits[number].shape[1]
        return state

    def result(self, state: _State) -> Decoded:
        """The results, a row each, with paths numbered over the batch."""
        plan, scorer = self.plan, self.scorer
        assert state.finished is not None
        sequences, scores, beam_indices = best(state.finished, plan)
        first_path = torch.arange(0, len(scores) * plan.width, plan.width, device=scores.device)[:, None, None]
        beam_indices = (beam_indices + first_path).masked_fill(beam_indices < 0, -1)
        draft_forwards = 0 if self.drafter is None else self.drafter.num_forwards
        counts: dict[str, Any] = self.counts
        return Decoded(
            sequences.flatten(0, 1),
            scores.flatten(),
            beam_indices.flatten(0, 1),
            step_scores=self._steps("scores") if plan.output_scores else None,
            step_logits=self._steps("logits") if plan.output_logits else None,
            num_proven=proven(state.beams, state.finished, plan, max_length=self.catalogue.max_length),
            speculation=Speculation(scorer.num_forwards, draft_forwards, **counts),
            may_be_shorter=self.catalogue.is_ragged or plan.stopping_criteria is not None,
        )

    def _drafted(self, drafter: Drafter, frontier: Frontier) -> list[Part]:
        """The drafts for some rows, which are counted."""
        if frontier.level == 0 and not self.scorer.takes_prompt:
            return [(frontier, [])]
        parts = drafter.draft(frontier)
        for part, drafted in parts:
            for nodes in drafted:
                number = (nodes.states != self.catalogue.dead_state).sum(dim=-1)
                self._count(part.rows, drafted_nodes=number, drafted_steps=torch.ones_like(number))
        return parts

    def _accept(self, frontier: Frontier, nodes: Nodes, places: Int[Tensor, "batch beams"]) -> None:
        """Count a level whose beams had all been drafted; paths of a row that do not compete may share a node."""
        num_rows, num_nodes = nodes.states.shape
        columns = torch.where(frontier.beams.scores > beam.DEAD, places, num_nodes)
        hit = torch.zeros((num_rows, num_nodes + 1), dtype=torch.long, device=columns.device)
        used = hit.scatter(1, columns, 1)[:, :-1].sum(dim=-1)
        self._count(frontier.rows, accepted_nodes=used, accepted_steps=torch.ones_like(used))

    def _count(self, rows: Rows, **more: Tensor) -> None:
        for name, number in more.items():
            self.counts[name] = rows.where(self.counts[name] + number, self.counts[name])

    def _frontier(self, state: _State, flags: tuple[bool, ...], level: int) -> Frontier:
        """Some rows, which have come to a level."""
        rows = Rows(flags, self.catalogue.device)
        beams = state.beams
        if beams.length != level or not rows.are_all:
            beams = of_level(beams, level, width=self.plan.width if level else self.first_width)
            beams = of_rows(beams, rows, dead_state=self.catalogue.dead_state)
        parents = state.parents[:, : beams.states.shape[1]]
        return Frontier(rows, level, beams, parents, self.catalogue, self.plan)

    def _decide(
        self,
        state: _State,
        frontier: Frontier,
        logits: Float[Tensor, "batch nodes vocab"],  # after the nodes of the level
        places: Int[Tensor, "batch beams"] | None,  # of the beams among the nodes; None if each is its own
        start: int,  # the place of the first of the nodes among all that were scored
        below: Nodes | None = None,  # what was drafted below the nodes
    ) -> _State:
        """Decide one level, for the rows whose beams are among the scored nodes."""
        beams, legal, rows, level = frontier.beams, frontier.legal, frontier.rows, frontier.level
        plan = self.plan
        if not level:  # the root
            logits, places = logits.expand(-1, beams.scores.shape[1], -1), frontier.parents  # all are 0 there
        elif places is not None:
            logits = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
        scores = child_scores(logits, legal, beams, plan, self.scorer.columns)
        if plan.output_scores:
            self._keep("scores", frontier, over_vocabulary(scores, legal, logits.shape[-1]))
        if plan.output_logits:
            self._keep("logits", frontier, logits.float())
        del logits  # as wide as the vocabulary, and the next ones are about to be allocated
        scores = self.catalogue.biased(scores, beams.states, legal)
        beams, is_there = beams.judged(scores, legal.legal)
        scores = torch.where(is_there, beams.scores[..., None] + scores, self.dead)
        picked = None
        if plan.is_relaxed and below is not None and below.log_probs is not None:
            assert plan.noise is not None
            picked = relaxed_places(
                legal,
                scores,
                below,
                below.log_probs,
                places,
                num_kept=plan.num_kept,
                uniform=plan.noise.stream(PASSES).uniform(beams, legal),
                gumbel=plan.noise.gumbel(beams, legal),
                ops=ops,
            )
        if any(map(operator.and_, rows.flags, state.can_change)):
            self.deepest = max(self.deepest, level + 1)
        how: dict[str, Any] = {"level": level, "noise": plan.noise, "picked": picked}
        kept, finished = accept(beams, state.finished, legal, scores, self.catalogue, plan, **how)
        parents = kept.parents if places is None else places.gather(1, kept.parents)
        parents = parents + start if start else parents
        new = _State(
            beams=kept,
            levels=tuple(map(operator.add, state.levels, rows.flags)),
            can_change=state.can_change,
            finished=finished,
            parents=parents,
        )
        state = new if rows.are_all else self._merged(rows, new, state)
        if self.may_close and level + 1 < self.catalogue.max_length:
            state = replace(state, can_change=tuple(can_change(state.beams, state.finished, plan).tolist()))
        return state

    def _merged(self, rows: Rows, new: _State, old: _State) -> _State:
        """The new state in some rows, the old one in all others."""

        def where(new: Any, old: Any) -> Any:
            names = [field.name for field in fields(new)[1:] if getattr(new, field.name) is not None]
            return replace(new, **{name: rows.where(getattr(new, name), getattr(old, name)) for name in names})

        width, length = self.plan.width, self.catalogue.max_length
        beams = [to_room(widened(one.beams, width), length) for one in (new, old)]
        finished = new.finished if old.finished is None else where(new.finished, old.finished)
        parents = (F.pad(one.parents, (0, width - one.parents.shape[1])) for one in (new, old))
        return replace(new, beams=where(*beams), finished=finished, parents=rows.where(*parents))

    def _keep(self, name: str, frontier: Frontier, step: Float[Tensor, "batch beams vocab"]) -> None:
        """Keep what was found of a level."""
        steps, level = self.kept[name], frontier.level
        steps[level:] = [frontier.rows.where(step, steps[level]) if level < len(steps) else step, *steps[level + 1 :]]

    def _steps(self, name: str) -> tuple[Tensor, ...]:
        """The outputs kept for every level, one row a path; all paths of a beam search share the first step's."""
        steps, width = self.kept[name][: self.deepest], self.plan.width
        wide = (
            step if step.shape[1] == 1 else F.pad(step, (0, 0, 0, width - step.shape[1]), value=beam.DEAD)
            for step in steps
        )
        return tuple(step.expand(-1, width, -1).flatten(0, 1) for step in wide)
