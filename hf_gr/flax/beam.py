# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates to beams: selection, and the pool of finished sequences. Knows no model.

Meaning and order are those of transformers' beam search (`GenerationMixin._beam_search`), so results equal its own;
`-inf`, not a large negative number, means "no such beam", so a dead beam stays dead. If a level has fewer candidates
than K there are only that many beams, so that no forward scores beams that cannot exist.

Axes: B batch, K beams, C children, M candidates kept (at least K), T tokens generated so far, L tokens of the longest
    sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .arrays import Number, WholeNumber, along
from .children import Children

DEAD = -jnp.inf
LARGEST_DIVISOR = 1e30  # fp32 holds scores divided by it, or by its inverse


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beams:
    """Prefixes with their scores.

    Attributes:
        sequences: generated tokens.
        beam_indices: which beam of the row each token was appended to: transformers' field, without the batch offset.
        scores: sum of log-probabilities; `-inf` for a beam that does not exist.
        states: trie nodes.
    """

    sequences: Int[Array, "batch beams length"]
    beam_indices: Int[Array, "batch beams length"]
    scores: Float[Array, "batch beams"]
    states: Int[Array, "batch beams"]

    @classmethod
    def start(cls, batch_size: int, width: int, *, independent: bool = False) -> Beams:
        """Empty prefixes at the root: one alive, so that equal beams do not compete; all of them if `independent`."""
        nothing = jnp.zeros((batch_size, width, 0), dtype=jnp.int32)
        first = jnp.where(jnp.arange(width) == 0, 0.0, 0.0 if independent else DEAD)
        scores = jnp.broadcast_to(first.astype(jnp.float32), (batch_size, width))
        return cls(nothing, nothing, scores, jnp.zeros((batch_size, width), dtype=jnp.int32))

    @property
    def tokens(self) -> Int[Array, "batch beams"]:
        """The last token of each beam."""
        return self.sequences[..., -1]

    @property
    def parents(self) -> Int[Array, "batch beams"]:
        """The beam that each beam was before its last token."""
        return self.beam_indices[..., -1]

    def take(self, positions: Int[Array, "batch selected"]) -> Beams:
        """These beams of every row, in this order."""
        return Beams(
            sequences=along(self.sequences, positions[..., None]),
            beam_indices=along(self.beam_indices, positions[..., None]),
            scores=along(self.scores, positions),
            states=along(self.states, positions),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Finished:
    """The complete sequences of every row so far: for beams the best, best first; else one for each path.

    Attributes:
        sequences: tokens; arbitrary after the end.
        beam_indices: as in `Beams`, -1 after the end.
        scores: of beams, as `per_length` has them; `-inf` where there is no sequence yet.
        may_improve: whether the row's live beams may still beat its finished ones.
    """

    sequences: Int[Array, "batch beams max_length"]
    beam_indices: Int[Array, "batch beams max_length"]
    scores: Float[Array, "batch beams"]
    may_improve: Bool[Array, "batch 1"]

    @classmethod
    def none_yet(cls, batch_size: int, num_beams: int, max_length: int) -> Finished:
        """An empty pool."""
        shape = (batch_size, num_beams, max_length)
        return cls(
            sequences=jnp.zeros(shape, dtype=jnp.int32),
            beam_indices=jnp.full(shape, -1, dtype=jnp.int32),
            scores=jnp.full(shape[:2], DEAD, dtype=jnp.float32),
            may_improve=jnp.ones((batch_size, 1), dtype=bool),
        )

    @property
    def is_full(self) -> Bool[Array, "batch 1"]:
        """Whether a row has as many sequences as beams."""
        return (self.scores > DEAD).all(axis=-1, keepdims=True)


def select(
    beams: Beams,
    candidates: Children,
    scores: Float[Array, "batch beams children"],
    *,
    num_kept: int,
    dead_state: int | Int[Array, ""],
    noise: Float[Array, "batch beams children"] | None = None,
    picked: Int[Array, "batch kept"] | None = None,
) -> Beams:
    """Extend every beam by every legal child and keep the M best, or M drawn without replacement, in order of drawing.

    Args:
        beams: the prefixes.
        candidates: their children.
        scores: cumulative score of each child, `-inf` if there is none.
        num_kept: M; fewer are kept if there are fewer candidates, illegal ones included.
        dead_state: the state of a kept beam that does not exist.
        noise: Gumbel noise of each child: added to the scores, it draws with probability proportional to `exp(score)`
            instead (the Gumbel top-k trick).
        picked: places among all children of a row, chosen elsewhere: those are kept instead. The place after the last
            one stands for none.
    """
    num_children = scores.shape[-1]
    flat = scores.reshape(len(scores), -1)
    if picked is None:
        keys = flat if noise is None else flat + noise.reshape(flat.shape)
        # Not in blocks as in PyTorch: XLA's own top-k of 34,000 candidates is faster (0.1 ms on a CPU).
        chosen = lax.top_k(keys, min(num_kept, flat.shape[-1]))[1]
        kept_scores = along(flat, chosen)
    else:
        chosen = jnp.minimum(picked, flat.shape[-1] - 1)
        kept_scores = jnp.where(picked < flat.shape[-1], along(flat, chosen), DEAD)
    parents = chosen // num_children
    tokens, states = candidates.take(parents, chosen - parents * num_children)
    return _extend(beams, parents, tokens, states, kept_scores, dead_state)


def choose(
    beams: Beams,
    candidates: Children,
    scores: Float[Array, "batch beams children"],
    *,
    dead_state: int | Int[Array, ""],
    noise: Float[Array, "batch beams children"] | None = None,
) -> Beams:
    """Extend every beam by its own best child, or by one drawn from its own children: beams do not compete.

    Arguments, and the meaning of `-inf`, are as in `select`.
    """
    keys = scores if noise is None else scores + noise
    best = keys.argmax(axis=-1).astype(jnp.int32)
    parents = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.int32), scores.shape[:2])
    tokens, states = candidates.take(parents, best)
    kept_scores = along(scores, best[..., None], axis=-1)[..., 0]
    return _extend(beams, parents, tokens, states, kept_scores, dead_state)


def _extend(
    prefixes: Beams,
    parents: Int[Array, "batch kept"],
    tokens: Int[Array, "batch kept"],
    states: Int[Array, "batch kept"],
    scores: Float[Array, "batch kept"],
    dead_state: int | Int[Array, ""],
) -> Beams:
    """The prefixes `parents`, each with one more token."""
    parent = parents[..., None]
    is_alive = scores > DEAD
    return Beams(
        sequences=jnp.concatenate([along(prefixes.sequences, parent), tokens[..., None]], axis=-1),
        beam_indices=jnp.concatenate([along(prefixes.beam_indices, parent), parent], axis=-1),
        scores=jnp.where(is_alive, scores, DEAD),
        states=jnp.where(is_alive, states, dead_state),
    )


def per_length(
    scores: Float[Array, "*shape"], length: Number | WholeNumber, *, length_penalty: Number, longest: int
) -> Float[Array, "*shape"]:
    """Scores divided by `length ** length_penalty`, as far as that is a number of their type.

    Where it might not be, lengths are measured in `sqrt(longest)` instead of tokens: that changes all scores of a
    catalogue by one factor, which `true_scores` undoes.
    """
    return scores / _power(length / _unit_length(length_penalty, longest), length_penalty)


def true_scores(scores: Float[Array, "*shape"], *, length_penalty: Number, longest: int) -> Float[Array, "*shape"]:
    """The pool's scores, lengths measured in tokens: finite, except where there is no sequence."""
    divided = scores / _power(_unit_length(length_penalty, longest), length_penalty)
    return jnp.where(scores > DEAD, jnp.maximum(divided, jnp.finfo(scores.dtype).min), scores)


def _unit_length(length_penalty: Number, longest: int) -> Number:
    may_overflow = jnp.abs(length_penalty) * math.log(longest) > math.log(LARGEST_DIVISOR)
    return jnp.where(may_overflow, math.sqrt(longest), 1.0)


def _power(length: Number, exponent: Number) -> Number:
    return jnp.clip(jnp.power(length, exponent), 1 / LARGEST_DIVISOR, LARGEST_DIVISOR)


def retire(
    kept: Beams,
    finished: Finished,
    ends: Bool[Array, "batch kept"],
    *,
    length_penalty: Number,
    early_stopping: bool | str,
) -> tuple[Beams, Finished]:
    """Move the candidates that end, and are among the K best, into the pool; the K best of the others continue.

    Args:
        kept: M candidates of one length, best first.
        finished: the pool of K.
        ends: which candidates are complete.
        length_penalty: as in transformers: scores are divided by `length ** length_penalty`.
        early_stopping: as in transformers: True closes a row as soon as its pool is full.

    Returns:
        The K beams that continue, best first, and the new pool.
    """
    num_beams = finished.scores.shape[1]
    length = kept.sequences.shape[-1]
    is_open = finished.may_improve
    if early_stopping is True:
        is_open = is_open & ~finished.is_full
    among_best = jnp.arange(ends.shape[1]) < num_beams
    longest = finished.sequences.shape[-1]
    scores = per_length(kept.scores, length, length_penalty=length_penalty, longest=longest)
    scores = jnp.where(ends & among_best & is_open, scores, DEAD)
    sequences, beam_indices = _to_length(kept, longest)

    best_scores, best = lax.top_k(jnp.concatenate([finished.scores, scores], axis=1), num_beams)
    pool = Finished(
        sequences=along(jnp.concatenate([finished.sequences, sequences], axis=1), best[..., None]),
        beam_indices=along(jnp.concatenate([finished.beam_indices, beam_indices], axis=1), best[..., None]),
        scores=best_scores,
        may_improve=finished.may_improve,
    )
    return keep_best(_stop(kept, ends), num_beams), pool


def finish(kept: Beams, *, length_penalty: Number) -> Finished:
    """The pool of K beams, best first, that all end with their last token: what `retire` would return."""
    length = kept.sequences.shape[-1]
    return Finished(
        sequences=kept.sequences,
        beam_indices=kept.beam_indices,
        scores=per_length(kept.scores, length, length_penalty=length_penalty, longest=length),
        may_improve=jnp.ones_like(kept.scores[:, :1], dtype=bool),
    )


def retire_in_place(kept: Beams, finished: Finished, ends: Bool[Array, "batch beams"]) -> tuple[Beams, Finished]:
    """Move the paths that end to their own places in the pool; they do not continue."""
    ends = ends & (kept.scores > DEAD)
    sequences, beam_indices = _to_length(kept, finished.sequences.shape[-1])
    pool = Finished(
        sequences=jnp.where(ends[..., None], sequences, finished.sequences),
        beam_indices=jnp.where(ends[..., None], beam_indices, finished.beam_indices),
        scores=jnp.where(ends, kept.scores, finished.scores),
        may_improve=finished.may_improve,
    )
    return _stop(kept, ends), pool


def keep_best(beams: Beams, num_beams: int) -> Beams:
    """The K best beams, best first; all of them if there are fewer."""
    return beams.take(lax.top_k(beams.scores, min(num_beams, beams.scores.shape[1]))[1])


def update_may_improve(
    beams: Beams,
    finished: Finished,
    *,
    length_penalty: Number,
    early_stopping: bool | str,
    max_new_tokens: WholeNumber,
) -> Finished:
    """Close the rows whose best live beam cannot beat the worst finished one, by transformers' own heuristic."""
    length: Any = beams.sequences.shape[-1]
    if early_stopping == "never":
        length = jnp.where(jnp.asarray(length_penalty) > 0.0, jnp.asarray(max_new_tokens, jnp.float32), length)
    longest = finished.sequences.shape[-1]
    best_possible = per_length(beams.scores[:, :1], length, length_penalty=length_penalty, longest=longest)
    worst = finished.scores.min(axis=-1, keepdims=True)
    return replace(finished, may_improve=finished.may_improve & (best_possible > worst))


def _stop(beams: Beams, ends: Bool[Array, "batch beams"]) -> Beams:
    return replace(beams, scores=jnp.where(ends, DEAD, beams.scores))


def _to_length(
    beams: Beams, max_length: int
) -> tuple[Int[Array, "batch beams max_length"], Int[Array, "batch beams max_length"]]:
    after = ((0, 0), (0, 0), (0, max_length - beams.sequences.shape[-1]))
    return jnp.pad(beams.sequences, after), jnp.pad(beams.beam_indices, after, constant_values=-1)


def last_tokens(beams: Beams, levels: Int[Array, " batch"]) -> Int[Array, "batch beams"]:
    """The last token of each beam, where beams have room for all and rows have their own number of tokens."""
    return along(beams.sequences, jnp.maximum(levels - 1, 0)[:, None, None], axis=2)[..., 0]


def of_level(beams: Beams, level: int, *, width: int) -> Beams:
    """Beams of a level, without the room for later tokens."""
    return Beams(
        sequences=beams.sequences[:, :width, :level],
        beam_indices=beams.beam_indices[:, :width, :level],
        scores=beams.scores[:, :width],
        states=beams.states[:, :width],
    )


def to_room(beams: Beams, num_levels: int) -> Beams:
    """Beams with room for all tokens."""
    after = ((0, 0), (0, 0), (0, num_levels - beams.sequences.shape[-1]))
    return replace(beams, sequences=jnp.pad(beams.sequences, after), beam_indices=jnp.pad(beams.beam_indices, after))


def widened(beams: Beams, width: int) -> Beams:
    """The same beams, and dead ones after them."""
    missing = width - beams.scores.shape[1]

    def filled(array: Array, value: Any) -> Array:
        return jnp.pad(array, ((0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)), constant_values=value)

    return Beams(
        sequences=filled(beams.sequences, 0),
        beam_indices=filled(beams.beam_indices, -1),
        scores=filled(beams.scores, DEAD),
        states=filled(beams.states, 0),
    )
