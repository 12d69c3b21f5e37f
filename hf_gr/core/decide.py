# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One level decided: from the scores of candidates to beams and finished sequences. Knows no model and no framework.

Axes: B batch, K beams, C children, M candidates kept, L tokens of the longest sequence, R returned sequences a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxtyping import Bool, Float, Int

from . import beam
from .beam import DEAD, Beams, Candidates, Finished, paths_of
from .ops import Array
from .plan import Options


def accept(
    beams: Beams,  # prefixes of `level` tokens; those returned have one more
    finished: Finished | None,  # None where all sequences end together
    legal: Candidates,
    scores: Float[Array, "batch beams children"],  # cumulative, `-inf` where there is no child
    catalogue: Any,
    plan: Options,
    *,
    level: int,
    noise: Any = None,  # what is drawn comes from
    picked: Int[Array, "batch kept"] | None = None,  # as in `beam.select`
) -> tuple[Beams, Finished | None]:
    """Decide one level: extend the beams, and move complete ones to the finished."""
    may_end = catalogue.has_leaves[level] or plan.has_criteria
    how: dict[str, Any] = {"dead_state": catalogue.dead_state}
    if plan.do_sample and picked is None:
        assert noise is not None, "samples are drawn from noise"
        how["noise"] = noise.gumbel(beams, legal, paths=None if plan.is_beam_search else paths_of(beams))
    if not plan.is_beam_search:
        kept = beam.choose(beams, legal, scores, **how)
        if not may_end:
            return kept, finished
        assert finished is not None
        return beam.retire_in_place(*_ended(kept, finished, catalogue, plan, level=level))

    all_end = level + 1 == catalogue.max_length and plan.ends_together(is_ragged=catalogue.is_ragged)
    num_kept = plan.num_kept if (may_end and not all_end) or plan.do_sample else plan.num_beams
    kept = beam.select(beams, legal, scores, num_kept=num_kept, picked=picked, **how)
    if all_end:
        return kept, beam.finish(kept, length_penalty=plan.length_penalty)
    options: dict[str, Any] = {"length_penalty": plan.length_penalty, "early_stopping": plan.early_stopping}
    if may_end:
        assert finished is not None
        beams, finished = beam.retire(*_ended(kept, finished, catalogue, plan, level=level), **options)
    else:
        beams = beam.keep_best(kept, plan.num_beams) if plan.do_sample else kept
    if plan.has_criteria or any(catalogue.has_leaves[: level + 1]):
        assert finished is not None
        finished = beam.update_may_improve(beams, finished, max_new_tokens=plan.max_new_tokens, **options)
    return beams, finished


def _ended(
    kept: Beams, finished: Finished, catalogue: Any, plan: Options, *, level: int
) -> tuple[Beams, Finished, Bool[Array, "batch kept"]]:
    """The candidates, what is finished, and which candidates are complete: nothing follows those."""
    ends = catalogue.is_leaf(kept.states, level=level + 1)
    if plan.has_criteria:
        ends = ends | plan.meets_criteria(kept.sequences, max_length=catalogue.max_length)
        # What a criterion ends may have children in the catalogue: they would be drafted, and have scores later.
        kept = replace(kept, states=kept.ops.fill(kept.states, ends, catalogue.dead_state))
    return kept, finished, ends


def can_change(beams: Beams, finished: Finished | None, plan: Options) -> Bool[Array, " batch"]:
    """The rows that may still change."""
    is_open = (beams.scores > DEAD).any(-1)
    if plan.is_beam_search:
        assert finished is not None
        is_open = is_open & finished.may_improve[:, 0]
        if plan.early_stopping is True:
            is_open = is_open & ~finished.is_full[:, 0]
    return is_open


def best(
    finished: Finished, plan: Options
) -> tuple[Int[Array, "batch returned length"], Float[Array, "batch returned"], Int[Array, "batch returned length"]]:
    """The R best of every row, then padding if there are fewer: sequences, scores, and paths within the row."""
    fill, number = finished.ops.fill, plan.num_return_sequences
    scores = finished.scores[:, :number]
    is_missing = (scores == DEAD)[..., None]
    beam_indices = fill(finished.beam_indices[:, :number], is_missing, -1)
    sequences = fill(finished.sequences[:, :number], beam_indices < 0, plan.fill_token_id)
    return fill(sequences, is_missing, plan.missing_token_id), scores, beam_indices
