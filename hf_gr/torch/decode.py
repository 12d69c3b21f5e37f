# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one loop: score, then accept, level by level. Knows no model beyond its scorer.

Plain constrained beam search scores the live beams, level by level. With a drafter, a forward also scores nodes below
them; levels whose beams are all among those nodes need no forward of their own.

Fixed-length catalogues run without a single host synchronisation if nothing is drafted. Ragged ones and a user's
stopping criteria synchronise once a level, to see whether anything is left to do; drafts synchronise for their size,
and for whether they were accepted.

Axes: B batch, K beams, C children, V vocabulary, P prompt, T generated tokens, R returned sequences a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from . import beam
from .beam import Beams, Finished
from .children import Children, ChildrenInColumns
from .scorers import Scorer
from .speculation import Drafter, Lookahead, Speculation
from .transition import DeviceCatalogue, children, is_leaf, mask_illegal, over_vocabulary
from .verifiers import relaxed_places

SCORES_AT_ONCE = 2**21  # log-probabilities computed together: a temporary of 8 MB

# (sequences [rows, P + T], scores [rows, V]) -> scores
Processor = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class DecodePlan:
    """The options of one call; names and meanings are transformers'.

    Attributes:
        prompt: the prompt's tokens, for processors and stopping criteria.
        num_beams: K; 1 decodes every path on its own (greedy, or sampling).
        num_return_sequences: R.
        num_kept: candidates kept a level: K, plus spares to replace beams that end here.
        do_sample: sample instead of taking the best.
        length_penalty: exponent of the length that scores are divided by.
        early_stopping: when a row with K complete sequences is done.
        max_new_tokens: the longest sequence that the heuristic of `early_stopping="never"` assumes.
        forces_end: whether the last of those tokens, the end token, is certain: transformers' `forced_eos_token_id`.
        fill_token_id: what follows the end of a sequence.
        missing_token_id: fills a row that has no sequence left; not `fill_token_id` if such a row would be a sequence
            of the catalogue.
        processors: logits processors before the constraint and after it; None if there are none, which saves all work
            as wide as the vocabulary except the normalisation.
        processor_width: paths a row that processors expect; None for as many as there are.
        stopping_criteria: the user's own; sequences that meet them are complete.
        output_scores: keep the processed scores of every level.
        output_logits: keep the logits of every level.
        exit_early: leave the loop once nothing can change; off where several processes must run equally many forwards.
        is_relaxed: sampling beams accept drafted samples by relaxed verification; they compete even if there is only
            one.
        generator: the source of all draws; None for the device's own.
    """

    prompt: Int[Tensor, "batch prompt"]
    num_beams: int
    num_return_sequences: int
    num_kept: int
    do_sample: bool
    length_penalty: float
    early_stopping: bool | str
    max_new_tokens: int
    fill_token_id: int
    missing_token_id: int
    forces_end: bool = False
    processors: tuple[Processor, Processor] | None = None
    processor_width: int | None = None
    stopping_criteria: Callable[[Tensor], Tensor] | None = None
    output_scores: bool = False
    output_logits: bool = False
    exit_early: bool = True
    is_relaxed: bool = False
    generator: torch.Generator | None = None

    @property
    def is_beam_search(self) -> bool:
        """Whether the paths of a row compete."""
        return self.num_beams > 1 or self.is_relaxed

    @property
    def width(self) -> int:
        """Paths a row."""
        return max(self.num_beams, self.num_return_sequences)

    def full_sequences(self, sequences: Int[Tensor, "batch beams length"]) -> Int[Tensor, "rows full_length"]:
        """Prompt and generated tokens, one row a path."""
        prompt = self.prompt[:, None].expand(-1, sequences.shape[1], -1)
        return torch.cat([prompt, sequences], dim=-1).flatten(0, 1)


@dataclass(frozen=True)
class Decoded:
    """The result: transformers' fields, generated part only.

    Attributes:
        sequences: tokens, `fill_token_id` after the end; a row of `missing_token_id` where no sequence is left.
        scores: `-inf` for such a row.
        beam_indices: with the batch offset, -1 after the end.
        step_scores: one entry a level, if requested.
        step_logits: one entry a level, if requested.
        speculation: how many forwards it took, and what was scored ahead.
    """

    sequences: Int[Tensor, "rows length"]
    scores: Float[Tensor, " rows"]
    beam_indices: Int[Tensor, "rows length"]
    step_scores: tuple[Float[Tensor, "paths vocab"], ...] | None
    step_logits: tuple[Float[Tensor, "paths vocab"], ...] | None
    speculation: Speculation


def decode(scorer: Scorer, catalogue: DeviceCatalogue, plan: DecodePlan, drafter: Drafter | None = None) -> Decoded:
    """Decode the best legal sequences of a batch.

    Args:
        scorer: over a prefilled prompt; this call uses it up.
        catalogue: the legal sequences of each row, on the scorer's device.
        plan: the options.
        drafter: proposes nodes to score ahead; the result does not depend on it, unless the plan is relaxed.

    Returns:
        R rows a request: the best first, then rows of padding if there are fewer.

    Source: STATIC, algorithm 1, with candidates scored before any truncation; AtSpeed, algorithms 1 and 2.
    """
    lookahead = Lookahead(scorer, drafter, dead_state=catalogue.dead_state)
    batch_size, device = scorer.prompt_logits.shape[0], scorer.prompt_logits.device
    # Equal beams need not be scored K times, unless a processor expects K rows.
    width = plan.width if plan.processors is not None or not plan.is_beam_search else 1
    beams = Beams.start(batch_size, width, device, independent=not plan.is_beam_search)
    finished = Finished.none_yet(batch_size, plan.width, catalogue.max_length, device)
    dead = torch.tensor(beam.DEAD, device=device)  # a plain number would become a tensor at every level
    step_scores: list[Tensor] = []
    step_logits: list[Tensor] = []

    for level in range(catalogue.max_length):
        legal = children(beams.states, catalogue, level=level)
        logits = lookahead.logits(beams, legal, level=level)
        scores = child_scores(logits, in_columns(legal, scorer, level=level), beams, plan)
        if plan.output_scores:
            step_scores.append(over_vocabulary(scores, legal, logits.shape[-1]))
        if plan.output_logits:
            step_logits.append(logits.float())
        del logits  # as wide as the vocabulary, and the next ones are about to be allocated
        scores = torch.where(legal.legal, beams.scores[..., None] + scores, dead)
        picked = None
        if plan.is_relaxed and (samples := lookahead.samples) is not None:
            picked = relaxed_places(
                legal, scores, samples, lookahead.places, num_kept=plan.num_kept, generator=plan.generator
            )
        beams, finished = accept(beams, finished, legal, scores, catalogue, plan, level=level, picked=picked)
        if level + 1 < catalogue.max_length and _nothing_left(beams, finished, catalogue, plan):
            break

    return Decoded(
        *_best(finished, plan, crop=catalogue.is_ragged or plan.stopping_criteria is not None),
        step_scores=_per_path(step_scores, plan) if plan.output_scores else None,
        step_logits=_per_path(step_logits, plan) if plan.output_logits else None,
        speculation=lookahead.speculation,
    )


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
        return torch.zeros(legal.tokens.shape, device=logits.device)
    if not plan.is_beam_search:
        return legal.scores(logits.flatten(0, 1)).float().view(legal.tokens.shape)
    # In pieces if necessary: nothing else here is as large as beams times vocabulary.
    rows = logits.flatten(0, 1)
    at_once = max(SCORES_AT_ONCE // logits.shape[-1], 1)
    if len(rows) <= at_once:
        return legal.scores(rows.float().log_softmax(-1)).view(legal.tokens.shape)
    pieces = [slice(start, start + at_once) for start in range(0, len(rows), at_once)]
    scores = [legal.scores(rows[piece].float().log_softmax(-1), piece) for piece in pieces]
    return torch.cat(scores).view(legal.tokens.shape)


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
    return plan.forces_end and beams.sequences.shape[-1] + 1 == plan.max_new_tokens


def _in_groups(
    processor: Processor, scores: Float[Tensor, "batch beams vocab"], beams: Beams, plan: DecodePlan
) -> Float[Tensor, "batch beams vocab"]:
    """Processed scores; the processor is called with as many paths of each row at once as it expects.

    transformers' processors store the padding of every row, and a draft has more rows than the model it drafts for.
    """
    batch_size, num_beams = scores.shape[:2]
    sequences = plan.full_sequences(beams.sequences).unflatten(0, (batch_size, num_beams))
    width = plan.processor_width or num_beams
    if width == num_beams:
        return _processed(processor, sequences, scores)
    places = torch.arange(-(-num_beams // width) * width, device=scores.device) % num_beams
    groups = [_processed(processor, sequences[:, group], scores[:, group]) for group in places.split(width)]
    return torch.cat(groups, dim=1)[:, :num_beams]


def _processed(
    processor: Processor, sequences: Int[Tensor, "batch beams length"], scores: Float[Tensor, "batch beams vocab"]
) -> Float[Tensor, "batch beams vocab"]:
    given = scores.flatten(0, 1)
    processed = processor(sequences.flatten(0, 1), given)
    if getattr(processed, "shape", None) != given.shape:
        found = list(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
        raise ValueError(
            f"logits_processor returned {found}, expected scores of the shape that it got, {list(given.shape)}"
        )
    return processed.unflatten(0, scores.shape[:2])


def accept(
    beams: Beams,
    finished: Finished,
    legal: Children,
    scores: Float[Tensor, "batch beams children"],
    catalogue: DeviceCatalogue,
    plan: DecodePlan,
    *,
    level: int,
    picked: Int[Tensor, "batch kept"] | None = None,
) -> tuple[Beams, Finished]:
    """Decide one level: extend the beams (by `picked`, if given), and move complete ones to the finished."""
    may_end = catalogue.has_leaves[level] or plan.stopping_criteria is not None
    how: dict[str, Any] = {
        "dead_state": catalogue.dead_state,
        "do_sample": plan.do_sample,
        "generator": plan.generator,
    }
    if not plan.is_beam_search:
        kept = beam.choose(beams, legal, scores, **how)
        return (
            beam.retire_in_place(kept, finished, _ends(kept, catalogue, plan, level=level))
            if may_end
            else (kept, finished)
        )

    is_ragged = catalogue.is_ragged or plan.stopping_criteria is not None
    all_end = level + 1 == catalogue.max_length and not is_ragged and not plan.do_sample
    num_kept = plan.num_kept if (may_end and not all_end) or plan.do_sample else plan.num_beams
    kept = beam.select(beams, legal, scores, num_kept=num_kept, picked=picked, **how)
    if all_end:
        return kept, beam.finish(kept, length_penalty=plan.length_penalty)
    if may_end:
        beams, finished = beam.retire(
            kept,
            finished,
            _ends(kept, catalogue, plan, level=level),
            length_penalty=plan.length_penalty,
            early_stopping=plan.early_stopping,
        )
    else:
        beams = beam.keep_best(kept, plan.num_beams) if plan.do_sample else kept
    if plan.stopping_criteria is not None or any(catalogue.has_leaves[: level + 1]):
        finished = beam.update_may_improve(
            beams,
            finished,
            length_penalty=plan.length_penalty,
            early_stopping=plan.early_stopping,
            max_new_tokens=plan.max_new_tokens,
        )
    return beams, finished


def _ends(kept: Beams, catalogue: DeviceCatalogue, plan: DecodePlan, *, level: int) -> Bool[Tensor, "batch kept"]:
    ends = is_leaf(kept.states, catalogue, level=level + 1)
    if plan.stopping_criteria is None:
        return ends
    stopped = plan.stopping_criteria(plan.full_sequences(kept.sequences))
    return ends | stopped.unflatten(0, ends.shape)


def _nothing_left(beams: Beams, finished: Finished, catalogue: DeviceCatalogue, plan: DecodePlan) -> bool:
    """Whether no row can change any more; synchronises, but only where sequences can end early."""
    if not plan.exit_early or not (catalogue.is_ragged or plan.stopping_criteria is not None):
        return False
    open_rows = (beams.scores > beam.DEAD).any(dim=-1, keepdim=True)
    if plan.is_beam_search:
        open_rows = open_rows & finished.may_improve
        if plan.early_stopping is True:
            open_rows = open_rows & ~finished.is_full
    return not bool(open_rows.any())


def _best(
    finished: Finished, plan: DecodePlan, *, crop: bool
) -> tuple[Int[Tensor, "rows length"], Float[Tensor, " rows"], Int[Tensor, "rows length"]]:
    """The R best of every row, one row each."""
    beam_indices = finished.beam_indices[:, : plan.num_return_sequences]
    scores = finished.scores[:, : plan.num_return_sequences]
    there = (beam_indices >= 0) & (scores[..., None] > beam.DEAD)
    first_path = torch.arange(len(there), device=there.device)[:, None, None] * plan.width
    beam_indices = torch.where(there, beam_indices + first_path, -1).flatten(0, 1)
    sequences = finished.sequences[:, : plan.num_return_sequences].masked_fill(~there, plan.fill_token_id)
    sequences = sequences.masked_fill(scores[..., None] == beam.DEAD, plan.missing_token_id)
    if plan.is_beam_search:
        longest = finished.sequences.shape[-1]
        scores = beam.true_scores(scores, length_penalty=plan.length_penalty, longest=longest)
    length = max(int(there.sum(-1).max()), 1) if crop else there.shape[-1]
    return sequences.flatten(0, 1)[:, :length], scores.flatten(), beam_indices[:, :length]


def _per_path(steps: list[Tensor], plan: DecodePlan) -> tuple[Tensor, ...]:
    """One row a path for every level; the first step of a plain beam search is the same for all paths."""
    return tuple(step.expand(-1, plan.width, -1).flatten(0, 1) for step in steps)
