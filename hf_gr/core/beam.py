# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates to beams: selection, and the pool of finished sequences. Knows no model and no framework.

Meaning and order are those of transformers' beam search (`GenerationMixin._beam_search`), so results equal its own;
`-inf`, not a large negative number, means "no such beam", so a dead beam stays dead.

Axes: B batch, K beams, C children, M candidates kept (at least K).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int

from .ops import Array

DEAD = -math.inf
ROUNDING = 1e-6  # of one term of a score of 1: a sum in fp32 that is not larger by so much a term is not proven to be


@runtime_checkable
class Candidates(Protocol):
    """The children of every beam, padded to C; tokens are anything where `legal` is false: no child, or a dead one."""

    @property
    def tokens(self) -> Int[Array, "batch beams children"]: ...  # noqa: D102

    @property
    def legal(self) -> Bool[Array, "batch beams children"]: ...  # noqa: D102

    def take(self, places: Array) -> tuple[Array, Array]:
        """Tokens and states at places, `[B, M]`, among all children of a row."""
        ...


@dataclass(frozen=True)
class Beams:
    """Prefixes with their scores."""

    ops: Any  # of the backend that made the arrays
    sequences: Int[Array, "batch beams length"]
    beam_indices: Int[Array, "batch beams length"]  # of the row, to which a token was appended; no batch offset
    scores: Float[Array, "batch beams"]  # sum of log-probabilities; `-inf` for a beam that does not exist
    states: Int[Array, "batch beams"]  # trie nodes
    lost: Float[Array, "batch 1"] | None = None  # the best score that was ever cut; None where nobody asks

    @classmethod
    def start(
        cls,
        ops: Any,
        like: Array,
        *,
        batch_size: int,
        width: int,
        independent: bool = False,
        certifies: bool = False,  # whether what is cut is noted
    ) -> Beams:
        """Empty prefixes at the root: one alive, so that equal beams do not compete; all if they are `independent`."""
        nothing = ops.full((batch_size, width, 0), 0, like)
        scores = ops.full((batch_size, width), 0.0, like)
        if not independent:
            scores = ops.fill(scores, ops.arange(width, like) > 0, DEAD)
        lost = ops.full((batch_size, 1), DEAD, like) if certifies else None
        return cls(ops, nothing, nothing, scores, ops.full((batch_size, width), 0, like), lost)

    @property
    def length(self) -> int:
        """Generated tokens of each beam."""
        return self.sequences.shape[-1]

    @property
    def tokens(self) -> Int[Array, "batch beams"]:
        """The token that each beam ends with."""
        return self.sequences[..., -1]

    @property
    def parents(self) -> Int[Array, "batch beams"]:
        """The beam that each beam was before its last token."""
        return self.beam_indices[..., -1]

    def take(self, places: Int[Array, "batch selected"]) -> Beams:
        """These beams of every row, in this order."""
        values = (self.sequences, self.beam_indices, self.scores, self.states)
        return Beams(self.ops, *(self.ops.along(value, places) for value in values), lost=self.lost)

    def losing(self, scores: Float[Array, "batch cut"]) -> Beams:
        """The same, when prefixes or sequences of these scores, if that is noted, are cut."""
        if self.lost is None:
            return self
        return replace(self, lost=self.ops.largest(self.ops.concat([self.lost, scores], 1)))

    def judged(self, scores: Float[Array, "batch beams children"], legal: Array) -> tuple[Beams, Array]:
        """The same and the legal children, when all that is below a beam is lost if its scores are no numbers."""
        if self.lost is None:
            return self, legal
        first = scores[..., :1]
        is_sound = first == first
        return self.losing(self.ops.fill(self.scores, is_sound[..., 0], DEAD)), legal & is_sound


@dataclass(frozen=True)
class Finished:
    """The complete sequences of every row so far: for beams the best, best first; else one for each path."""

    ops: Any
    sequences: Int[Array, "batch beams max_length"]  # anything after the end
    beam_indices: Int[Array, "batch beams max_length"]  # as in `Beams`, -1 after the end
    scores: Float[Array, "batch beams"]  # of beams, divided by their length's penalty; `-inf` for none yet
    may_improve: Bool[Array, "batch 1"]  # whether the row's live beams may still beat its finished ones

    @classmethod
    def none_yet(cls, ops: Any, like: Array, *, batch_size: int, width: int, max_length: int) -> Finished:
        """An empty pool; the arguments are those of `Beams.start`."""
        shape = (batch_size, width, max_length)
        return cls(
            ops,
            sequences=ops.full(shape, 0, like),
            beam_indices=ops.full(shape, -1, like),
            scores=ops.full(shape[:2], DEAD, like),
            may_improve=ops.full((batch_size, 1), True, like),
        )

    @property
    def is_full(self) -> Bool[Array, "batch 1"]:
        """Whether a row has as many sequences as beams."""
        return (self.scores > DEAD).all(-1)[:, None]


def paths_of(beams: Beams) -> Int[Array, "batch beams"]:
    """The numbers of paths that do not compete, which keep their places."""
    return beams.ops.expand(beams.ops.arange(beams.states.shape[1], beams.states), beams.states.shape)


def select(
    beams: Beams,
    candidates: Candidates,
    scores: Float[Array, "batch beams children"],  # cumulative, `-inf` where there is no child
    *,
    num_kept: int,  # M
    dead_state: int | Array,  # of a kept beam that does not exist
    noise: Float[Array, "batch beams children"] | None = None,
    picked: Int[Array, "batch kept"] | None = None,
) -> Beams:
    """Extend every beam by every legal child and keep the M best, or M drawn without replacement, in order of drawing.

    Gumbel noise, added to the scores, draws with probability proportional to `exp(score)` (the Gumbel top-k
    trick). Places among all children of a row that were `picked` elsewhere are kept instead; the one after the
    last stands for none.

    Source: STATIC, algorithm 1; xGR, section 6.
    """
    ops, num_children = beams.ops, scores.shape[-1]
    flat = scores.reshape(scores.shape[0], -1)
    size = flat.shape[-1]
    keys = flat if noise is None else flat + noise.reshape(flat.shape)
    number = num_kept + (beams.lost is not None)  # with the best that is cut
    # Padding comes after the last child, and is dead.
    if missing := max(number - size, int(picked is not None)):
        flat, keys = (ops.pad(one, missing, DEAD) for one in (flat, keys))
    chosen, kept_scores = picked, None
    if chosen is None:
        kept_scores, chosen = ops.topk(keys, number)
    if kept_scores is None or noise is not None:
        kept_scores = ops.along(flat, chosen)
    if number > num_kept:
        beams = beams.losing(kept_scores[:, num_kept:])
        chosen, kept_scores = chosen[:, :num_kept], kept_scores[:, :num_kept]
    chosen = chosen.clip(0, size - 1) if missing else chosen
    parents = chosen if num_children == 1 else chosen // num_children
    tokens, states = candidates.take(chosen)
    return _extend(beams, parents, tokens, states, kept_scores, dead_state)


def choose(
    beams: Beams,
    candidates: Candidates,
    scores: Float[Array, "batch beams children"],
    *,
    dead_state: int | Array,
    noise: Float[Array, "batch beams children"] | None = None,
) -> Beams:
    """Extend every beam by its own best child, or by one drawn from its own: no competition. Else as `select`."""
    ops = beams.ops
    best = ops.argmax(scores if noise is None else scores + noise)
    parents = ops.expand(ops.arange(scores.shape[1], scores), scores.shape[:2])
    tokens, states = candidates.take(parents * scores.shape[2] + best)
    return _extend(beams, parents, tokens, states, ops.pick(scores, best), dead_state)


def _extend(
    beams: Beams, parents: Array, tokens: Array, states: Array, scores: Array, dead_state: int | Array
) -> Beams:
    """The prefixes `parents`, each with one more token."""
    ops, is_dead = beams.ops, ~(scores > DEAD)  # or no number, which a user's processor may give
    return Beams(
        ops,
        sequences=ops.concat([ops.along(beams.sequences, parents), tokens[..., None]], -1),
        beam_indices=ops.concat([ops.along(beams.beam_indices, parents), parents[..., None]], -1),
        scores=ops.fill(scores, is_dead, DEAD),
        states=ops.fill(states, is_dead, dead_state),
        lost=beams.lost,
    )


def penalized(scores: Float[Array, "batch _"], length: Any, length_penalty: Any) -> Float[Array, "batch _"]:
    """Scores divided by `length ** length_penalty`; rows may have lengths of their own, `[B]`."""
    return scores / (length[:, None] if getattr(length, "ndim", 0) else length) ** length_penalty


def margin(scores: Float[Array, "batch _"], max_length: int) -> Float[Array, "batch _"]:
    """By how much rounding may change scores of so many terms."""
    return ROUNDING * max_length * abs(scores).clip(1.0)


def num_above(
    scores: Float[Array, "batch sequences"], bound: Float[Array, "batch 1"], max_length: int
) -> Int[Array, " batch"]:
    """How many of a row's first scores are larger than what bounds all others, by more than rounding."""
    return ((scores > DEAD) & (scores - margin(scores, max_length) >= bound)).sum(-1)


def retire(
    kept: Beams,  # M of one length, best first
    finished: Finished,
    ends: Bool[Array, "batch kept"],
    *,
    length_penalty: float | Array,  # as in transformers: scores are divided by `length ** length_penalty`
    early_stopping: bool | str,  # as in transformers: True closes a row as soon as its pool is full
    length: int | Int[Array, " batch"] | None = None,  # of the candidates; None for as many as they have columns
    num_beams: int | None = None,  # K; None for as many as the pool has room for
) -> tuple[Beams, Finished]:
    """Move the candidates that end, and are among the K best, into the pool; the K best of the others continue."""
    ops, room = kept.ops, finished.scores.shape[1]
    number: int = room if num_beams is None else num_beams
    is_open = finished.may_improve
    if early_stopping is True:
        is_open = is_open & ~finished.is_full
    is_accepted = ends & (ops.arange(ends.shape[1], ends) < number) & is_open
    scores = penalized(kept.scores, kept.length if length is None else length, length_penalty)
    scores = ops.fill(scores, ~is_accepted, DEAD)
    if kept.lost is not None:
        kept = kept.losing(ops.fill(kept.scores, is_accepted | ~ends, DEAD))
    sequences, beam_indices = _to_length(kept, finished.sequences.shape[-1])

    best_scores, best = ops.topk(ops.concat([finished.scores, scores], 1), room)
    pool = Finished(
        ops,
        sequences=ops.along(ops.concat([finished.sequences, sequences], 1), best),
        beam_indices=ops.along(ops.concat([finished.beam_indices, beam_indices], 1), best),
        scores=best_scores,
        may_improve=finished.may_improve,
    )
    return keep_best(_stop(kept, ends), number), pool


def finish(kept: Beams, *, length_penalty: float | Array) -> Finished:
    """The pool of K beams, best first, that all end with their last token: what `retire` would make of them."""
    scores = penalized(kept.scores, kept.length, length_penalty)
    may_improve = kept.ops.full((len(scores), 1), True, scores)
    return Finished(kept.ops, kept.sequences, kept.beam_indices, scores, may_improve)


def retire_in_place(kept: Beams, finished: Finished, ends: Bool[Array, "batch beams"]) -> tuple[Beams, Finished]:
    """Move the paths that end to their own places in the pool; they do not continue."""
    ops, ends = kept.ops, ends & (kept.scores > DEAD)
    sequences, beam_indices = _to_length(kept, finished.sequences.shape[-1])
    pool = Finished(
        ops,
        sequences=ops.where(ends[..., None], sequences, finished.sequences),
        beam_indices=ops.where(ends[..., None], beam_indices, finished.beam_indices),
        scores=ops.where(ends, kept.scores, finished.scores),
        may_improve=finished.may_improve,
    )
    return _stop(kept, ends), pool


def keep_best(beams: Beams, num_beams: int) -> Beams:
    """The K best beams, best first."""
    if beams.lost is None:
        return beams.take(beams.ops.topk(beams.scores, num_beams)[1])
    scores, best = beams.ops.topk(beams.scores, num_beams + 1)
    return beams.losing(scores[:, num_beams:]).take(best[:, :num_beams])


def update_may_improve(
    beams: Beams,
    finished: Finished,
    *,
    length_penalty: float | Array,
    early_stopping: bool | str,
    max_new_tokens: int | Array,  # that `early_stopping="never"` assumes where longer sequences score better
    length: int | Int[Array, " batch"] | None = None,  # as for `retire`
) -> Finished:
    """Close the rows whose best live beam cannot beat the worst finished one, by transformers' own heuristic."""
    now = penalized(beams.scores[:, :1], beams.length if length is None else length, length_penalty)
    if early_stopping == "never":
        at_end = penalized(beams.scores[:, :1], max_new_tokens, length_penalty)
        # Scores are negative: with a positive penalty the longest sequence has the best.
        now = beams.ops.where(beams.ops.full((), 0.0, now) < length_penalty, at_end, now)
    is_better = now > beams.ops.smallest(finished.scores)
    return replace(finished, may_improve=finished.may_improve & is_better)


def _stop(beams: Beams, ends: Bool[Array, "batch beams"]) -> Beams:
    return replace(beams, scores=beams.ops.fill(beams.scores, ends, DEAD))


def _to_length(beams: Beams, max_length: int) -> tuple[Array, Array]:
    """Sequences and beam indices with room for the longest sequence."""
    ops, missing = beams.ops, max_length - beams.length
    return ops.pad(beams.sequences, missing, 0), ops.pad(beams.beam_indices, missing, -1)


def of_level(beams: Beams, level: int, *, width: int) -> Beams:
    """Beams of a level, without the room for later tokens."""
    values = (beams.sequences[:, :width, :level], beams.beam_indices[:, :width, :level])
    return Beams(beams.ops, *values, scores=beams.scores[:, :width], states=beams.states[:, :width], lost=beams.lost)


def to_room(beams: Beams, num_levels: int) -> Beams:
    """Beams with room for all tokens."""
    sequences, beam_indices = _to_length(beams, num_levels)
    return replace(beams, sequences=sequences, beam_indices=beam_indices)


def widened(beams: Beams, width: int) -> Beams:
    """The same beams, and dead ones after them."""
    missing = width - beams.scores.shape[1]
    if not missing:
        return beams

    def filled(values: Array, number: int | float) -> Array:
        more = beams.ops.full((len(values), missing, *values.shape[2:]), number, values)
        return beams.ops.concat([values, more], 1)

    return Beams(
        beams.ops,
        sequences=filled(beams.sequences, 0),
        beam_indices=filled(beams.beam_indices, -1),
        scores=filled(beams.scores, DEAD),
        states=filled(beams.states, 0),
        lost=beams.lost,
    )
