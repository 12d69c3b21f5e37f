# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates to beams: selection, and the pool of finished sequences. Knows no model.

Meaning and order are those of transformers' beam search (`GenerationMixin._beam_search`), so results equal its own;
`-inf`, not a large negative number, stands for "no such beam", so a dead beam stays dead.

Axes: B batch, K beams, C children, M candidates kept (at least K), T tokens generated so far, L tokens of the longest
    sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .children import Children

DEAD = -torch.inf
CPU_BLOCK, CPU_BLOCKS_FROM = 64, 30_000  # candidates of a row from which blocks of them are faster (measured)
# Candidates of all rows. A device's own top-k reads them some six times, in a dozen launches; reading so many once
# saves more than launching a second top-k costs. An estimate for 3 TB/s: examples/benchmark/gpu.py measures it.
DEVICE_BLOCKS_FROM = 2**22
LARGEST_DIVISOR = 1e30  # fp32 holds scores divided by it, or by its inverse


class Paths:
    """How beams came about; put together when somebody reads it, which a plain search does once, at its end.

    Args:
        length: tokens of each.
        whole: sequences, and which beam of the row each token was appended to, if they are known.
        step: else shorter paths, which of them these extend, and by which tokens.
    """

    def __init__(
        self,
        length: int,
        *,
        whole: tuple[Tensor, Tensor] | None = None,
        step: tuple[Paths, Tensor, Tensor] | None = None,
    ) -> None:
        self.length = length
        self._whole = whole
        self._step = step

    def extended(self, parents: Int[Tensor, "batch chosen"], tokens: Int[Tensor, "batch chosen"]) -> Paths:
        """Some of these, each with one more token."""
        return Paths(self.length + 1, step=(self, parents, tokens))

    @property
    def last(self) -> tuple[Int[Tensor, "batch beams"], Int[Tensor, "batch beams"]]:
        """The token that each ends with, and the beam that it was appended to."""
        if self._step is not None:
            return self._step[2], self._step[1]
        sequences, beam_indices = self.whole
        return sequences[..., -1], beam_indices[..., -1]

    @property
    def whole(self) -> tuple[Int[Tensor, "batch beams length"], Int[Tensor, "batch beams length"]]:
        """Sequences and beam indices."""
        if self._whole is None:
            self._whole = self._put_together()
            self._step = None
        return self._whole

    def _put_together(self) -> tuple[Tensor, Tensor]:
        start, parents, tokens = self, [], []
        while start._step is not None:
            start, of_step, added = start._step
            parents.append(of_step)
            tokens.append(added)
        indices = [parents[0]]
        for step in parents[1:]:
            indices.append(step.gather(1, indices[-1]))
        # A beam stood where its next token was appended.
        chosen = [tokens[0], *(of_step.gather(1, at) for of_step, at in zip(tokens[1:], indices[:-1], strict=True))]
        new = [torch.stack(part[::-1], dim=-1) for part in (chosen, indices)]
        if start.length:
            along = indices[-1][..., None].expand(-1, -1, start.length)
            new = [torch.cat([old.gather(1, along), one], dim=-1) for old, one in zip(start.whole, new, strict=True)]
        return new[0], new[1]


@dataclass(frozen=True)
class Beams:
    """Prefixes with their scores.

    Attributes:
        paths: their tokens, and the beams that they were.
        scores: sum of log-probabilities; `-inf` for a beam that does not exist.
        states: trie nodes.
    """

    paths: Paths
    scores: Float[Tensor, "batch beams"]
    states: Int[Tensor, "batch beams"]

    @classmethod
    def of(
        cls,
        sequences: Int[Tensor, "batch beams length"],
        beam_indices: Int[Tensor, "batch beams length"],
        scores: Float[Tensor, "batch beams"],
        states: Int[Tensor, "batch beams"],
    ) -> Beams:
        """Beams whose sequences are known; `beam_indices` as below."""
        return cls(Paths(sequences.shape[-1], whole=(sequences, beam_indices)), scores, states)

    @classmethod
    def start(cls, batch_size: int, width: int, device: torch.device, *, independent: bool = False) -> Beams:
        """Empty prefixes at the root: one alive, so that equal beams do not compete; all of them if `independent`."""
        nothing = torch.zeros((batch_size, width, 0), dtype=torch.long, device=device)
        scores = torch.zeros((batch_size, width), device=device)
        if width > 1 and not independent:
            scores[:, 1:].fill_(DEAD)  # an assignment would make a tensor of the number first
        states = torch.zeros((batch_size, width), dtype=torch.long, device=device)
        return cls.of(nothing, nothing, scores, states)

    @property
    def sequences(self) -> Int[Tensor, "batch beams length"]:
        """Generated tokens."""
        return self.paths.whole[0]

    @property
    def beam_indices(self) -> Int[Tensor, "batch beams length"]:
        """Which beam of the row each token was appended to: transformers' field, without the batch offset."""
        return self.paths.whole[1]

    @property
    def length(self) -> int:
        """Generated tokens of each beam."""
        return self.paths.length

    @property
    def tokens(self) -> Int[Tensor, "batch beams"]:
        """The token that each beam ends with."""
        return self.paths.last[0]

    @property
    def parents(self) -> Int[Tensor, "batch beams"]:
        """The beam that each beam was before its last token."""
        return self.paths.last[1]

    def take(self, positions: Int[Tensor, "batch selected"]) -> Beams:
        """These beams of every row, in this order."""
        along = positions[..., None].expand(-1, -1, self.length)
        return Beams.of(
            self.sequences.gather(1, along),
            self.beam_indices.gather(1, along),
            self.scores.gather(1, positions),
            self.states.gather(1, positions),
        )


@dataclass(frozen=True)
class Finished:
    """The complete sequences of every row so far; for beams the best, best first; else one for each path.

    Attributes:
        sequences: tokens; anything after the end.
        beam_indices: as in `Beams`, -1 after the end.
        scores: of beams, as `per_length` has them; `-inf` where there is no sequence yet.
        may_improve: whether the row's running beams may still beat its finished ones.
    """

    sequences: Int[Tensor, "batch beams max_length"]
    beam_indices: Int[Tensor, "batch beams max_length"]
    scores: Float[Tensor, "batch beams"]
    may_improve: Bool[Tensor, "batch 1"]

    @classmethod
    def none_yet(cls, batch_size: int, num_beams: int, max_length: int, device: torch.device) -> Finished:
        """An empty pool."""
        shape = (batch_size, num_beams, max_length)
        return cls(
            sequences=torch.zeros(shape, dtype=torch.long, device=device),
            beam_indices=torch.full(shape, -1, dtype=torch.long, device=device),
            scores=torch.full(shape[:2], DEAD, device=device),
            may_improve=torch.ones((batch_size, 1), dtype=torch.bool, device=device),
        )

    @property
    def is_full(self) -> Bool[Tensor, "batch 1"]:
        """Whether a row has as many sequences as beams."""
        return (self.scores > DEAD).all(dim=-1, keepdim=True)


def select(
    beams: Beams,
    candidates: Children,
    scores: Float[Tensor, "batch beams children"],
    *,
    num_kept: int,
    dead_state: int,
    noise: Float[Tensor, "batch beams children"] | None = None,
    picked: Int[Tensor, "batch kept"] | None = None,
) -> Beams:
    """Extend every beam by every legal child and keep the M best, or M drawn without replacement, in order of drawing.

    Args:
        beams: the prefixes.
        candidates: their children.
        scores: cumulative score of each child, `-inf` where there is none.
        num_kept: M.
        dead_state: the state of a kept beam that does not exist.
        noise: Gumbel noise of each child: added to the scores, it draws with probability proportional to `exp(score)`
            instead (the Gumbel top-k trick).
        picked: places among all children of a row, chosen elsewhere: those are kept instead. The place after the last
            one stands for none.
    """
    flat = scores.flatten(1)
    keys = flat if noise is None else flat + noise.flatten(1)
    size = flat.shape[-1]
    missing = max(num_kept - size, int(picked is not None))
    if missing:
        flat, keys = (F.pad(one, (0, missing), value=DEAD) for one in (flat, keys))
    kept_scores, chosen = top_keys(keys, num_kept) if picked is None else (None, picked)
    if kept_scores is None or noise is not None:
        kept_scores = flat.gather(1, chosen)
    # Padding comes after the last child; it is dead, so any position within range will do.
    chosen = chosen.clamp(max=size - 1) if missing else chosen
    parents, tokens, states = candidates.take_at(chosen)
    return _extend(beams, parents, tokens, states, kept_scores, dead_state)


def top_keys(
    keys: Float[Tensor, "batch candidates"], number: int
) -> tuple[Float[Tensor, "batch number"], Int[Tensor, "batch number"]]:
    """The largest keys of every row, best first, and their places.

    Many candidates are first reduced to the `number` blocks with the largest maxima: all others hold only smaller
    keys, or keys equal to the last one chosen. This reads the candidates once and sorts few of them, and has no branch
    that depends on them.

    Source: xGR, section 6.2 (early sorting termination), where a heap stops reading a beam's sorted candidates at the
    first one that is too small. A device does the same for all blocks at once: those whose largest key is too small
    are not read again.
    """
    size = keys.shape[1]
    block = _block_size(keys.shape[0], size, number, keys.device)
    if block == 1:
        best = keys.topk(number)
        return best.values, best.indices
    in_blocks = size - size % block
    largest = keys[:, :in_blocks].unflatten(1, (-1, block)).amax(-1)
    first = largest.topk(number, sorted=False).indices * block
    places = (first[..., None] + torch.arange(block, device=keys.device)).flatten(1)
    if in_blocks < size:  # what fills no block competes with the best blocks
        rest = torch.arange(in_blocks, size, device=keys.device)
        places = torch.cat([places, rest.expand(len(keys), -1)], dim=1)
    best = keys.gather(1, places).topk(number)
    return best.values, places.gather(1, best.indices)


def _block_size(num_rows: int, size: int, number: int, device: torch.device) -> int:
    """How many candidates to treat as one at first; 1 if one top-k over all is faster."""
    if device.type == "cpu":
        block = CPU_BLOCK if size >= CPU_BLOCKS_FROM else 1
    elif num_rows * size >= DEVICE_BLOCKS_FROM:
        # With the root of size / number, as many maxima are sorted at first as candidates at last.
        block = 2 ** round(math.log2(size / number) / 2)
    else:
        block = 1
    return block if 2 * number * block <= size else 1


def choose(
    beams: Beams,
    candidates: Children,
    scores: Float[Tensor, "batch beams children"],
    *,
    dead_state: int,
    noise: Float[Tensor, "batch beams children"] | None = None,
) -> Beams:
    """Extend every beam by its own best child, or by one drawn from its own children: beams do not compete.

    The arguments, and the meaning of a score of `-inf`, are those of `select`.
    """
    keys = scores if noise is None else scores + noise
    best = keys.argmax(dim=-1, keepdim=True)
    parents = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape[0], -1)
    tokens, states = candidates.take(parents, best[..., 0])
    return _extend(beams, parents, tokens, states, scores.gather(-1, best)[..., 0], dead_state)


def _extend(
    prefixes: Beams,
    parents: Int[Tensor, "batch kept"],
    tokens: Int[Tensor, "batch kept"],
    states: Int[Tensor, "batch kept"],
    scores: Float[Tensor, "batch kept"],
    dead_state: int,
) -> Beams:
    """The prefixes `parents`, each with one more token."""
    is_dead = (scores > DEAD).logical_not_()  # or no number, which a user's processor may give
    return Beams(
        prefixes.paths.extended(parents, tokens),
        scores=scores.masked_fill(is_dead, DEAD),
        states=states.masked_fill(is_dead, dead_state),
    )


def per_length(
    scores: Float[Tensor, "*shape"], length: int, *, length_penalty: float, longest: int
) -> Float[Tensor, "*shape"]:
    """Scores divided by `length ** length_penalty`, as far as that is a number of their type.

    Where it might not be, lengths are measured in `sqrt(longest)` instead of tokens: that changes all scores of a
    catalogue by one factor, which `true_scores` undoes.
    """
    divisor = _power(length / _unit_length(length_penalty, longest), length_penalty)
    return scores if divisor == 1.0 else scores / divisor


def true_scores(scores: Float[Tensor, "*shape"], *, length_penalty: float, longest: int) -> Float[Tensor, "*shape"]:
    """The pool's scores, lengths measured in tokens: finite, except where there is no sequence."""
    unit = _power(_unit_length(length_penalty, longest), length_penalty)
    if unit == 1.0:  # they are so already
        return scores
    divided = scores / unit
    return torch.where(scores > DEAD, divided.clamp_min(torch.finfo(scores.dtype).min), scores)


def _unit_length(length_penalty: float, longest: int) -> float:
    may_overflow = abs(length_penalty) * math.log(longest) > math.log(LARGEST_DIVISOR)
    return math.sqrt(longest) if may_overflow else 1.0


def _power(length: float, exponent: float) -> float:
    limit = math.log(LARGEST_DIVISOR)
    return math.exp(min(max(exponent * math.log(length), -limit), limit))


def retire(
    kept: Beams,
    finished: Finished,
    ends: Bool[Tensor, "batch kept"],
    *,
    length_penalty: float,
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
    num_beams, length = finished.scores.shape[1], kept.length
    closed = ~finished.may_improve
    if early_stopping is True:
        closed = closed | finished.is_full
    among_best = torch.arange(ends.shape[1], device=ends.device) < num_beams
    longest = finished.sequences.shape[-1]
    scores = per_length(kept.scores, length, length_penalty=length_penalty, longest=longest)
    scores = scores.masked_fill(~(ends & among_best) | closed, DEAD)
    sequences, beam_indices = _to_length(kept, longest)

    best_scores, best = torch.cat([finished.scores, scores], dim=1).topk(num_beams)
    along = best[..., None].expand(-1, -1, sequences.shape[-1])
    pool = Finished(
        sequences=torch.cat([finished.sequences, sequences], dim=1).gather(1, along),
        beam_indices=torch.cat([finished.beam_indices, beam_indices], dim=1).gather(1, along),
        scores=best_scores,
        may_improve=finished.may_improve,
    )
    return keep_best(_stop(kept, ends), num_beams), pool


def finish(kept: Beams, *, length_penalty: float) -> Finished:
    """The pool of K beams, best first, that all end with their last token: what `retire` would make of them."""
    length = kept.length
    return Finished(
        sequences=kept.sequences,
        beam_indices=kept.beam_indices,
        scores=per_length(kept.scores, length, length_penalty=length_penalty, longest=length),
        may_improve=torch.ones_like(kept.scores[:, :1], dtype=torch.bool),
    )


def retire_in_place(kept: Beams, finished: Finished, ends: Bool[Tensor, "batch beams"]) -> tuple[Beams, Finished]:
    """Move the paths that end to their own places in the pool; they do not continue."""
    ends = ends & (kept.scores > DEAD)
    sequences, beam_indices = _to_length(kept, finished.sequences.shape[-1])
    pool = Finished(
        sequences=torch.where(ends[..., None], sequences, finished.sequences),
        beam_indices=torch.where(ends[..., None], beam_indices, finished.beam_indices),
        scores=torch.where(ends, kept.scores, finished.scores),
        may_improve=finished.may_improve,
    )
    return _stop(kept, ends), pool


def keep_best(beams: Beams, num_beams: int) -> Beams:
    """The K best beams, best first."""
    return beams.take(beams.scores.topk(num_beams).indices)


def update_may_improve(
    beams: Beams, finished: Finished, *, length_penalty: float, early_stopping: bool | str, max_new_tokens: int
) -> Finished:
    """Close the rows whose best running beam cannot beat the worst finished one, by transformers' own heuristic."""
    reaches_end = early_stopping == "never" and length_penalty > 0.0
    length = max_new_tokens if reaches_end else beams.length
    longest = finished.sequences.shape[-1]
    best_possible = per_length(beams.scores[:, :1], length, length_penalty=length_penalty, longest=longest)
    worst = finished.scores.min(dim=-1, keepdim=True).values
    return replace(finished, may_improve=finished.may_improve & (best_possible > worst))


def _stop(beams: Beams, ends: Bool[Tensor, "batch beams"]) -> Beams:
    return replace(beams, scores=beams.scores.masked_fill(ends, DEAD))


def _to_length(
    beams: Beams, max_length: int
) -> tuple[Int[Tensor, "batch beams max_length"], Int[Tensor, "batch beams max_length"]]:
    missing = max_length - beams.length
    return F.pad(beams.sequences, (0, missing)), F.pad(beams.beam_indices, (0, missing), value=-1)
