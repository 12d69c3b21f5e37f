# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One level decided: from the scores of candidates to beams and finished sequences. Knows no model and no framework.

Axes: B batch, K beams, C children, M candidates kept, L tokens of the longest sequence, R returned sequences a row.
"""

from dataclasses import replace
from typing import Any

from jaxtyping import Bool, Float, Int

from . import beam
from .beam import DEAD, Beams, Candidates, Finished, num_above, paths_of, penalized
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
    noise: Any = None,  # the source of randomness
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
    number = plan.beams_at(level)
    num_kept = plan.num_kept // plan.num_beams * number if (may_end and not all_end) or plan.do_sample else number
    kept = beam.select(beams, legal, scores, num_kept=num_kept, picked=picked, **how)
    if all_end:
        wide = kept if number == plan.num_beams else beam.widened(kept, plan.num_beams)
        finished = beam.finish(wide, length_penalty=plan.length_penalty)
        return replace(kept, scores=kept.ops.full(kept.scores.shape, DEAD, kept.scores)), finished
    options: dict[str, Any] = {"length_penalty": plan.length_penalty, "early_stopping": plan.early_stopping}
    if may_end:
        assert finished is not None
        ended = _ended(kept, finished, catalogue, plan, level=level)
        beams, finished = beam.retire(*ended, num_beams=number, **options)
    else:
        beams = beam.keep_best(kept, number) if plan.do_sample else kept
    if plan.has_criteria or any(catalogue.has_leaves[: level + 1]):
        assert finished is not None
        finished = beam.update_may_improve(beams, finished, max_new_tokens=plan.max_new_tokens, **options)
    return beams, finished


def draft_best(
    nodes: Beams,  # the draft's last level; on its first one the target's beams
    paths: Int[Array, "batch above"],  # that they belong to, used where paths do not compete
    behind: Float[Array, "batch above"],  # how far each is below its path's own choice; 0 for the beams
    legal: Candidates,
    scores: Float[Array, "batch above children"],  # cumulative, `-inf` where there is no child
    is_open: Bool[Array, "batch above children"],  # which children have children
    plan: Options,
    *,
    number: int,  # N
    dead_state: int | Array,
    noise: Any = None,
) -> tuple[Beams, Int[Array, "batch nodes"], Float[Array, "batch nodes"]]:
    """The N best nodes of one more level of a draft model's search, with the target's own noise if it samples.

    Best first, then padding; with their paths, and `behind` for each. Source: AtSpeed, equation 1.
    """
    ops, keys = nodes.ops, scores
    if plan.do_sample:
        assert noise is not None, "samples are drawn from noise"
        keys = scores + noise.gumbel(nodes, legal, paths=None if plan.is_beam_search else paths)
    if not plan.is_beam_search:
        keys = keys - ops.pick(keys, ops.argmax(keys))[..., None] + behind[..., None]
    keys = ops.fill(keys, ~(is_open & (scores > DEAD)), DEAD).reshape(len(scores), -1)
    after_last = keys.shape[1]
    if missing := max(number - after_last, 0):
        keys = ops.pad(keys, missing, DEAD)
    behind, picked = ops.topk(keys, number)
    picked = ops.fill(picked, ~(behind > DEAD), after_last)
    below = beam.select(nodes, legal, scores, num_kept=number, dead_state=dead_state, picked=picked)
    return below, ops.along(paths, below.parents), behind


def draw(
    nodes: Beams,
    legal: Candidates,
    scores: Float[Array, "batch above children"],
    *,
    number: int,
    dead_state: int | Array,
    noise: Any,
) -> tuple[Beams, Float[Array, "batch above children"]]:
    """N samples without replacement in drawing order, then padding, and the log-probabilities of all children (q).

    Source: AtSpeed, section 3.2.
    """
    ops, flat = nodes.ops, scores.reshape(scores.shape[0], -1)
    gumbel = noise.gumbel(nodes, legal)
    below = beam.select(nodes, legal, scores, num_kept=number, dead_state=dead_state, noise=gumbel)
    return below, ops.fill(ops.log_softmax(flat), ~(flat > DEAD), DEAD).reshape(scores.shape)


def _ended(
    kept: Beams, finished: Finished, catalogue: Any, plan: Options, *, level: int
) -> tuple[Beams, Finished, Bool[Array, "batch kept"]]:
    """The candidates, the finished sequences, and which candidates are complete: nothing follows those."""
    ends = catalogue.is_leaf(kept.states, level=level + 1)
    if plan.has_criteria:
        ends = ends | plan.meets_criteria(kept.sequences, max_length=catalogue.max_length)
        # A sequence ended by a criterion may have children in the catalogue: they would be drafted and scored later.
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


def proven(beams: Beams, finished: Finished, plan: Options, *, max_length: int) -> Int[Array, " batch"] | None:
    """How many of a row's first answers score better than anything that was cut, and so than anything not found.

    A term of a score is a log-probability, which is never positive: no item scores better than a prefix of it. A
    score divided by a length's penalty is at most the prefix's divided by that of the longest sequence.
    """
    if beams.lost is None:
        return None
    cut, scores = beams.losing(beams.scores).lost, finished.scores[:, : plan.num_return_sequences]
    bound = penalized(cut, max_length, plan.length_penalty)
    return num_above(scores, bound, max_length)


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
