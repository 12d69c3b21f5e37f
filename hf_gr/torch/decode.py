# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one loop: score, then decide, level by level. Knows no model beyond its scorer.

A forward scores the live beams of every row and, with a drafter, nodes below them; the first one scores the prompt,
too. Levels whose beams are all among scored nodes are decided without another forward, and rows wait for no other.

Fixed-length catalogues run without a single host synchronisation if nothing is drafted. Ragged ones and a user's
stopping criteria synchronise once a level, to see whether anything is left to do, unless the plan says that nobody
leaves early; drafts synchronise for their size, and for whether they were accepted.

Axes: B batch, S some of its rows, K beams, C children, V vocabulary, T generated tokens, R returned sequences a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_gr.core import beam
from hf_gr.core.beam import Beams, Finished
from hf_gr.core.verifiers import locate, relaxed_places

from . import ops
from .children import Children, ChildrenInColumns
from .frontier import Frontier, Rows, by_level, in_order, per_field
from .log_probs import token_log_probs
from .noise import PASSES, paths_of
from .plan import DecodePlan, Processor
from .scorers import Scorer
from .speculation import Drafter, Level, Lookahead, Speculation
from .transfers import to_device
from .transition import DeviceCatalogue, mask_illegal, over_vocabulary
from .tree import Nodes


@dataclass(frozen=True)
class Decoded:
    """The result: transformers' fields, generated part only.

    Attributes:
        sequences: tokens, `fill_token_id` after the end; a row of `missing_token_id` where no sequence is left. They
            are as long as the catalogue's longest, until they are `cropped`.
        scores: `-inf` for such a row.
        beam_indices: with the batch offset, -1 after the end.
        step_scores: one entry a level, if requested; `-inf` after the end of a path.
        step_logits: one entry a level, if requested; those after the end of a path mean nothing.
        speculation: how many forwards it took, and what was scored ahead.
        may_be_shorter: whether the last columns may be empty in all rows.
    """

    sequences: Int[Tensor, "rows length"]
    scores: Float[Tensor, " rows"]
    beam_indices: Int[Tensor, "rows length"]
    step_scores: tuple[Float[Tensor, "paths vocab"], ...] | None
    step_logits: tuple[Float[Tensor, "paths vocab"], ...] | None
    speculation: Speculation
    may_be_shorter: bool = False

    def cropped(self) -> Decoded:
        """The same without columns that are empty in all rows; synchronises where there may be some."""
        if not self.may_be_shorter:
            return self
        length = max(int((self.beam_indices >= 0).sum(-1).max()), 1)
        return replace(self, sequences=self.sequences[:, :length], beam_indices=self.beam_indices[:, :length])


def decode(scorer: Scorer, catalogue: DeviceCatalogue, plan: DecodePlan, drafter: Drafter | None = None) -> Decoded:
    """Decode the best legal sequences of a batch.

    Args:
        scorer: over the prompt; this call uses it up.
        catalogue: the legal sequences of each row, on the scorer's device.
        plan: the options.
        drafter: proposes nodes to score ahead; the result does not depend on it, unless the plan is relaxed.

    Returns:
        R rows a request: the best first, then rows of padding if there are fewer.

    Source: STATIC, algorithm 1, with candidates scored before any truncation; AtSpeed, algorithms 1 and 2.
    """
    search = _Search(scorer, Rows(tuple(range(len(plan.prompt))), catalogue, plan), drafter)
    waiting = [Frontier.start(search.batch)]
    while waiting:
        # No name for what is scored: its logits, as wide as the vocabulary, are gone when the next ones are made.
        waiting = search.still_needed(
            left for part in search.lookahead.score(waiting) for left in search.advance(*part)
        )
    may_be_shorter = catalogue.is_ragged or plan.stopping_criteria is not None
    return Decoded(
        *_best(search.finished, plan, may_be_shorter=may_be_shorter),
        step_scores=search.steps("scores") if plan.output_scores else None,
        step_logits=search.steps("logits") if plan.output_logits else None,
        speculation=search.lookahead.speculation,
        may_be_shorter=may_be_shorter,
    )


class _Search:
    """Decides levels as far as they are scored. Serves one call.

    Args:
        scorer: the model.
        batch: all rows.
        drafter: proposes nodes to score ahead.
    """

    def __init__(self, scorer: Scorer, batch: Rows, drafter: Drafter | None) -> None:
        plan, catalogue = batch.plan, batch.catalogue
        self.scorer = scorer
        self.batch = batch
        self.lookahead = Lookahead(scorer, drafter, batch)
        self.may_close = plan.exit_early and (catalogue.is_ragged or plan.stopping_criteria is not None)
        # Without a draft all rows need equally many forwards; outputs of a level have all rows.
        self.rows_leave = drafter is not None and not plan.keeps_steps
        # A plain number would become a tensor at every level, and `torch.tensor` copies from the host, which waits.
        self.dead = torch.full((), beam.DEAD, device=catalogue.device)
        self.ended: list[Frontier] = []
        self.deepest = 0  # the level that all rows decide if they do not leave
        self.kept: list[tuple[str, int, tuple[int, ...], Tensor]] = []  # what is kept of levels, by name and level

    def advance(self, frontier: Frontier, levels: Sequence[Level]) -> Iterator[Frontier]:
        """Decide levels while the beams of a row are among the scored nodes; gives the rows that need a forward."""
        for number in range(len(levels)):
            places = None  # of the beams among the scored nodes; None if each is its own
            if number:
                nodes = levels[number].nodes
                assert nodes is not None
                places, found = locate(frontier.beams, nodes.states)
                # Only a draft that may lack a node needs this check, which synchronises.
                if not nodes.is_complete and not all(flags := found.tolist()):
                    yield frontier.where([not flag for flag in flags])
                    frontier, levels = _narrowed(frontier, levels, flags)
                    if not frontier.rows.numbers:
                        return
                    nodes, places = levels[number].nodes, places[found]
                self.lookahead.accept(frontier, nodes, places)
            below = levels[number + 1].nodes if number + 1 < len(levels) else None
            if frontier.is_open:
                self.deepest = max(self.deepest, frontier.level + 1)
            frontier = self._decide(frontier, levels[number], places, below)
            if frontier.level == self.batch.catalogue.max_length:
                self.ended.append(frontier)
                return
            if self.may_close:
                frontier, levels = self._close(frontier, levels)
                if not frontier.rows.numbers:
                    return
        yield frontier

    def still_needed(self, frontiers: Iterable[Frontier]) -> list[Frontier]:
        """The frontiers that need a forward, one a level; none if nothing can change any more."""
        waiting = by_level(frontiers)
        if any(frontier.is_open or frontier.level < self.deepest for frontier in waiting):
            return waiting
        self.ended += waiting
        return []

    @property
    def finished(self) -> Finished:
        """The result of all rows."""
        numbers = [frontier.rows.numbers for frontier in self.ended]
        found = [frontier.finished for frontier in self.ended if frontier.finished is not None]
        return per_field(lambda *parts: in_order(numbers, parts), *found)

    def steps(self, name: str) -> tuple[Tensor, ...]:
        """What was kept of every level, one row a path; the first step of a plain beam search is that of all paths."""
        found = []
        for level in range(self.deepest):
            parts = [(rows, values) for kind, at, rows, values in self.kept if (kind, at) == (name, level)]
            step = in_order([rows for rows, _ in parts], [values for _, values in parts])
            found.append(step.expand(-1, self.batch.plan.width, -1).flatten(0, 1))
        return tuple(found)

    def _decide(
        self, frontier: Frontier, scored: Level, places: Int[Tensor, "some beams"] | None, below: Nodes | None
    ) -> Frontier:
        """Decide one level.

        Args:
            frontier: the beams.
            scored: nodes of their level with their logits.
            places: of the beams among those; None if each is its own.
            below: what was drafted below the nodes.
        """
        beams, legal, rows, level = frontier.beams, frontier.legal, frontier.rows, frontier.level
        plan, logits = rows.plan, scored.logits
        if scored.nodes is None:  # the root
            logits, places = logits.expand(-1, beams.scores.shape[1], -1), beams.states  # both are 0 there
        elif places is not None:
            logits = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
        scores = child_scores(logits, in_columns(legal, self.scorer, level=level), beams, plan)
        if plan.output_scores:
            self.kept.append(("scores", level, rows.numbers, over_vocabulary(scores, legal, logits.shape[-1])))
        if plan.output_logits:
            self.kept.append(("logits", level, rows.numbers, logits.float()))
        del logits  # as wide as the vocabulary, and the next ones are about to be allocated
        scores = sum_scores(scores, legal, beams, plan, self.dead)
        picked = None
        if plan.is_relaxed and below is not None and below.log_probs is not None:
            assert plan.noise is not None
            picked = relaxed_places(
                legal,
                scores,
                below,
                places,
                num_kept=plan.num_kept,
                uniform=plan.noise.stream(PASSES).uniform(beams, legal),
                gumbel=plan.noise.gumbel(beams, legal),
                ops=ops,
            )
        beams, finished = accept(
            beams, frontier.finished, legal, scores, rows.catalogue, plan, level=level, picked=picked
        )
        parents = beams.parents if places is None else places.gather(1, beams.parents)
        parents = parents + scored.start if scored.start else parents
        return Frontier(self.batch, rows, level + 1, beams, finished, parents, frontier.is_open)

    def _close(self, frontier: Frontier, levels: Sequence[Level]) -> tuple[Frontier, Sequence[Level]]:
        """The rows that can still change, or all of them if they do not leave; synchronises."""
        flags = _can_change(frontier.beams, frontier.finished, self.batch.plan).tolist()
        if not self.rows_leave:
            frontier = replace(frontier, is_open=any(flags))
        elif not all(flags):
            self.ended.append(frontier.where([not flag for flag in flags]))
            return _narrowed(frontier, levels, flags)
        return frontier, levels


def _narrowed(frontier: Frontier, levels: Sequence[Level], flags: Sequence[bool]) -> tuple[Frontier, Sequence[Level]]:
    """The rows with a flag, and what was scored of them."""
    kept = to_device([row for row, flag in enumerate(flags) if flag], frontier.parents.device)
    return frontier.where(flags), [level.of_rows(kept) for level in levels] if len(kept) else []


def in_columns(legal: Children, scorer: Scorer, *, level: int) -> Children:
    """Children by their columns in a scorer's logits, if those are not over the vocabulary."""
    if scorer.columns is None:
        return legal
    return ChildrenInColumns(scorer.columns(legal.tokens, level=level), legal.legal, by_token=legal)


def child_scores(
    logits: Float[Tensor, "batch beams vocab"], legal: Children, beams: Beams, plan: DecodePlan
) -> Float[Tensor, "batch beams children"]:
    """The scores of one step for the children of every beam; the entries at illegal ones mean nothing.

    Beam methods sum log-softmax values over the *full* vocabulary and then drop invalid tokens; independent paths
    compare logits. Both as in transformers; processors see what they would see there.
    """
    if plan.processors is not None:
        return process_scores(logits, legal, beams, plan).gather(-1, legal.tokens)
    if _is_forced(beams, plan):
        return torch.zeros(legal.shape, device=logits.device)
    if plan.tokens_per_beam is not None and plan.tokens_per_beam < logits.shape[-1]:
        least = logits.topk(plan.tokens_per_beam).values[..., -1:]
        scores = child_scores(logits, legal, beams, replace(plan, tokens_per_beam=None))
        return scores.masked_fill(logits.gather(-1, legal.tokens) < least, beam.DEAD)
    if not plan.is_beam_search:
        return logits.gather(-1, legal.tokens).float()
    return token_log_probs(logits.flatten(0, 1), legal.tokens.flatten(0, 1)).view(legal.shape)


def sum_scores(
    scores: Float[Tensor, "batch beams children"],
    legal: Children,
    beams: Beams,
    plan: DecodePlan,
    dead: Float[Tensor, ""],
) -> Float[Tensor, "batch beams children"]:
    """The cumulative scores of legal children, `dead` for all others."""
    if plan.is_beam_search and plan.processors is None:
        return legal.summed(scores, beams.scores, dead)
    # A processor's scores, and logits, may be no numbers at illegal tokens alone.
    return Children.summed(legal, scores, beams.scores, dead)


def process_scores(
    logits: Float[Tensor, "batch beams vocab"], legal: Children, beams: Beams, plan: DecodePlan
) -> Float[Tensor, "batch beams vocab"]:
    """Scores over the vocabulary: processors before the constraint, the constraint, processors after it."""
    assert plan.processors is not None
    before, after = plan.processors
    scores = logits.float().log_softmax(dim=-1) if plan.is_beam_search else logits.float()
    scores = _in_groups(before, scores, beams, plan)
    scores = torch.zeros_like(scores) if _is_forced(beams, plan) else scores
    return _in_groups(after, mask_illegal(scores, legal), beams, plan)


def _is_forced(beams: Beams, plan: DecodePlan) -> bool:
    """Whether the next token is the end token that is certain; the catalogue allows no other there."""
    return plan.forces_end and beams.length + 1 == plan.max_new_tokens


def _in_groups(
    processor: Processor, scores: Float[Tensor, "batch beams vocab"], beams: Beams, plan: DecodePlan
) -> Float[Tensor, "batch beams vocab"]:
    """Processed scores; the processor is called with as many paths of each row at once as it expects.

    transformers' processors store the padding of every row, and a draft has more rows than the model it drafts for.
    """
    num_beams = scores.shape[1]
    sequences, width = beams.sequences, plan.processor_width or num_beams
    if width == num_beams:
        return _processed(processor, sequences, scores, plan)
    places = torch.arange(-(-num_beams // width) * width, device=scores.device) % num_beams
    groups = [_processed(processor, sequences[:, group], scores[:, group], plan) for group in places.split(width)]
    return torch.cat(groups, dim=1)[:, :num_beams]


def _processed(
    processor: Processor,
    sequences: Int[Tensor, "batch beams length"],
    scores: Float[Tensor, "batch beams vocab"],
    plan: DecodePlan,
) -> Float[Tensor, "batch beams vocab"]:
    def checked(full: Tensor, given: Tensor) -> Tensor:
        processed = processor(full, given)
        if getattr(processed, "shape", None) != given.shape:
            found = list(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
            raise ValueError(
                f"logits_processor returned {found}, expected scores of the shape that it got, {list(given.shape)}"
            )
        return processed

    return plan.apply(checked, sequences, scores)


def accept(
    beams: Beams,
    finished: Finished | None,
    legal: Children,
    scores: Float[Tensor, "batch beams children"],
    catalogue: DeviceCatalogue,
    plan: DecodePlan,
    *,
    level: int,
    picked: Int[Tensor, "batch kept"] | None = None,
) -> tuple[Beams, Finished | None]:
    """Decide one level: extend the beams (by `picked`, if given), and move complete ones to the finished."""
    may_end = catalogue.has_leaves[level] or plan.stopping_criteria is not None
    how: dict[str, Any] = {"dead_state": catalogue.dead_state}
    if plan.do_sample and picked is None:
        assert plan.noise is not None, "samples are drawn from noise"
        how["noise"] = plan.noise.gumbel(beams, legal, paths=None if plan.is_beam_search else paths_of(beams))
    if not plan.is_beam_search:
        kept = beam.choose(beams, legal, scores, **how)
        if not may_end:
            return kept, finished
        assert finished is not None
        kept, ends = _ended(kept, catalogue, plan, level=level)
        return beam.retire_in_place(kept, finished, ends)

    all_end = level + 1 == catalogue.max_length and plan.ends_together(is_ragged=catalogue.is_ragged)
    num_kept = plan.num_kept if (may_end and not all_end) or plan.do_sample else plan.num_beams
    kept = beam.select(beams, legal, scores, num_kept=num_kept, picked=picked, **how)
    if all_end:
        return kept, beam.finish(kept, length_penalty=plan.length_penalty)
    if may_end:
        assert finished is not None
        kept, ends = _ended(kept, catalogue, plan, level=level)
        beams, finished = beam.retire(
            kept, finished, ends, length_penalty=plan.length_penalty, early_stopping=plan.early_stopping
        )
    else:
        beams = beam.keep_best(kept, plan.num_beams) if plan.do_sample else kept
    if plan.stopping_criteria is not None or any(catalogue.has_leaves[: level + 1]):
        assert finished is not None
        finished = beam.update_may_improve(
            beams,
            finished,
            length_penalty=plan.length_penalty,
            early_stopping=plan.early_stopping,
            max_new_tokens=plan.max_new_tokens,
        )
    return beams, finished


def _ended(
    kept: Beams, catalogue: DeviceCatalogue, plan: DecodePlan, *, level: int
) -> tuple[Beams, Bool[Tensor, "batch kept"]]:
    """The candidates, and which of them are complete: nothing follows those."""
    ends = catalogue.is_leaf(kept.states, level=level + 1)
    if plan.stopping_criteria is None:
        return kept, ends
    ends = ends | plan.apply(plan.stopping_criteria, kept.sequences)
    # What a criterion ends may have children in the catalogue: they would be drafted, and have scores at later steps.
    return replace(kept, states=kept.states.masked_fill(ends, catalogue.dead_state)), ends


def _can_change(beams: Beams, finished: Finished | None, plan: DecodePlan) -> Bool[Tensor, " batch"]:
    """Which rows can still change."""
    is_open = (beams.scores > beam.DEAD).any(dim=-1, keepdim=True)
    if plan.is_beam_search:
        assert finished is not None
        is_open = is_open & finished.may_improve
        if plan.early_stopping is True:
            is_open = is_open & ~finished.is_full
    return is_open[:, 0]


def _best(
    finished: Finished, plan: DecodePlan, *, may_be_shorter: bool
) -> tuple[Int[Tensor, "rows length"], Float[Tensor, " rows"], Int[Tensor, "rows length"]]:
    """The R best of every row, one row each."""
    beam_indices = finished.beam_indices[:, : plan.num_return_sequences]
    scores = finished.scores[:, : plan.num_return_sequences]
    is_dead = scores[..., None] == beam.DEAD
    is_missing = (beam_indices < 0) | is_dead if may_be_shorter else is_dead
    first_path = torch.arange(0, len(scores) * plan.width, plan.width, device=scores.device)[:, None, None]
    beam_indices = (beam_indices + first_path).masked_fill(is_missing, -1).flatten(0, 1)
    sequences = finished.sequences[:, : plan.num_return_sequences]
    if may_be_shorter:
        sequences = sequences.masked_fill(is_missing, plan.fill_token_id)
    sequences = sequences.masked_fill(is_dead, plan.missing_token_id)
    return sequences.flatten(0, 1), scores.flatten(), beam_indices
