# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits processors and stopping criteria inside a program: transformers' own, and a user's functions. Knows no model.

A processor is a small pytree: its numbers and tokens are arguments of the program, so that another penalty compiles
nothing; which processors there are, and in which order, is part of it. A function of the user's is part of it, too: a
new function object is a new program.

All of them see paths as `[paths, length]` tokens of one fixed length: the last token is in the last column, the
prompt's are before the generated ones, and -1, which is no token, is before the first real token of the prompt. So
`tokens[:, -1]` is the last token at every step, and `tokens >= 0` says which there are.

Axes: N paths, T tokens of a path, V vocabulary, W sequences of tokens, L tokens of the longest of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hf_gr.catalogue.buckets import bucket

from .arrays import HostOrDevice, Number, WholeNumber, static
from .scorers import Prompt

NEVER = 2**31 - 1  # a step that no sequence has
Tokens = Int[Array, "paths length"]
Scores = Float[Array, "paths vocab"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Repetition:
    """Scores of tokens that a path has: negative ones times `penalty`, others divided by it."""

    penalty: Number

    def __call__(self, tokens: Tokens, scores: Scores, step: WholeNumber) -> Scores:
        """See `apply`."""
        seen = _marked(tokens, jnp.ones(tokens.shape, dtype=bool), scores.shape[-1])
        return jnp.where(seen, jnp.where(scores < 0, scores * self.penalty, scores / self.penalty), scores)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoRepeat:
    """No `size` tokens in a row that the path already has: forbids what would complete them. `size` is static.

    Padding is no token here; in transformers it is one, so that a `size` of 1 forbids it after a padded prompt.
    """

    size: int = static()

    def __call__(self, tokens: Tokens, scores: Scores, step: WholeNumber) -> Scores:
        """See `apply`."""
        before, length = self.size - 1, tokens.shape[-1]
        if length < self.size:
            return scores
        last = tokens[:, length - before :]
        starts = length - before  # of all that may be followed by a token
        same = jnp.ones((len(tokens), starts), dtype=bool) & (last >= 0).all(-1, keepdims=True)
        for place in range(before):
            same = same & (tokens[:, place : place + starts] == last[:, place, None])
        return jnp.where(_marked(tokens[:, before:], same, scores.shape[-1]), -jnp.inf, scores)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Biases:
    """Adds to the score of a token that would complete a sequence; `-inf` forbids bad words.

    Attributes:
        prefixes: the sequences without their last tokens, aligned on the right; -1, in front, is equal to all.
        last: their last tokens; a number that is none, for padding.
        biases: what is added.
    """

    prefixes: Int[HostOrDevice, "sequences longest"]
    last: Int[HostOrDevice, " sequences"]
    biases: Float[HostOrDevice, " sequences"]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], biases: Sequence[float]) -> Biases:
        """The biases of sequences: a program is for up to 4 of them, 8, 16, ..., and of tokens of each likewise."""
        number, longest = bucket(len(sequences), least=4), bucket(max(map(len, sequences)), least=4)
        prefixes = np.full((number, longest - 1), -1, np.int32)
        last, of_each = np.full(number, NEVER, np.int32), np.zeros(number, np.float32)
        for row, (sequence, bias) in enumerate(zip(sequences, biases, strict=True)):
            prefixes[row, longest - len(sequence) :] = sequence[:-1]
            last[row], of_each[row] = sequence[-1], bias
        return cls(prefixes, last, of_each)

    def __call__(self, tokens: Tokens, scores: Scores, step: WholeNumber) -> Scores:
        """See `apply`."""
        prefixes, length = jnp.asarray(self.prefixes), self.prefixes.shape[-1]
        tokens = jnp.pad(tokens, ((0, 0), (max(length - tokens.shape[-1], 0), 0)), constant_values=-1)
        end = tokens[:, None, tokens.shape[-1] - length :]
        completed = ((prefixes == end) | (prefixes < 0)).all(-1)
        added = jnp.where(completed, jnp.asarray(self.biases), 0.0)
        return scores + jnp.zeros_like(scores).at[:, self.last].add(added, mode="drop")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forbidden:
    """Tokens that must not come at the steps from `first` to before `end`.

    Attributes:
        tokens: which of the vocabulary.
        first: a step: how many tokens have been generated.
        end: another one.
    """

    tokens: Bool[HostOrDevice, " vocab"]
    first: WholeNumber
    end: WholeNumber

    def __call__(self, tokens: Tokens, scores: Scores, step: WholeNumber) -> Scores:
        """See `apply`."""
        is_now = (step >= self.first) & (step < self.end)
        return jnp.where(is_now & jnp.asarray(self.tokens), -jnp.inf, scores)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decay:
    """The end becomes likelier with every token after the first `start`.

    Attributes:
        tokens: end tokens, of the vocabulary.
        start: tokens without an effect.
        factor: its power, less 1, times the score is added.
    """

    tokens: Bool[HostOrDevice, " vocab"]
    start: WholeNumber
    factor: Number

    def __call__(self, tokens: Tokens, scores: Scores, step: WholeNumber) -> Scores:
        """See `apply`."""
        more = jnp.maximum(step - self.start, 0)
        added = jnp.abs(scores) * (jnp.power(jnp.float32(self.factor), more) - 1)
        return jnp.where(jnp.asarray(self.tokens) & jnp.isfinite(scores), scores + added, scores)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Own:
    """A function of the user's: `function(tokens, scores) -> scores`, traced once. It is static."""

    function: Callable[[Array, Array], Array] = static()

    def __call__(self, tokens: Tokens, scores: Scores, step: WholeNumber) -> Scores:
        """See `apply`."""
        found = self.function(tokens, scores)
        if getattr(found, "shape", None) != scores.shape:
            raise ValueError(
                f"logits_processor returned {_what(found)}, expected scores of the shape that it got, "
                f"{list(scores.shape)}"
            )
        return found.astype(scores.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Processors:
    """What a call does to scores besides its warpers, and what ends its paths besides the end token.

    Attributes:
        before: processors before the catalogue's constraint, in order.
        after: those after it.
        criteria: functions of the user's that end paths: `function(tokens, None) -> bool [paths]`. Static.
        prompt: the prompt's tokens as paths see them; None until the program has its prompt.
    """

    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    criteria: tuple[Callable[[Array, None], Array], ...] = static(default=())
    prompt: Int[Array, "batch prompt"] | None = None

    def paths(self, sequences: Int[Array, "batch beams length"], *, room: int) -> Int[Array, "batch beams room"]:
        """The tokens that processors see: prompt and generated ones, with space for `room` of those in front."""
        assert self.prompt is not None
        batch, num_beams, width = sequences.shape
        prompt = jnp.broadcast_to(self.prompt[:, None], (batch, num_beams, self.prompt.shape[-1]))
        in_front = jnp.full((batch, num_beams, room - width), -1, jnp.int32)
        return jnp.concatenate([in_front, prompt, sequences], axis=-1)

    def ended(self, paths: Int[Array, "batch beams length"]) -> Bool[Array, "batch beams"]:
        """Which paths a criterion ends."""
        tokens = paths.reshape(-1, paths.shape[-1])
        ends = jnp.zeros(len(tokens), dtype=bool)
        for criterion in self.criteria:
            found = criterion(tokens, None)
            if getattr(found, "shape", None) != ends.shape or found.dtype != bool:
                raise ValueError(
                    f"stopping_criteria returned {_what(found)}, expected booleans [{len(tokens)}], one for each path"
                )
            ends = ends | found
        return ends.reshape(paths.shape[:2])


def apply(
    processors: Sequence[Any],
    paths: Int[Array, "batch beams length"],
    scores: Float[Array, "batch beams vocab"],
    *,
    step: WholeNumber,
) -> Float[Array, "batch beams vocab"]:
    """Processed scores.

    Args:
        processors: in order.
        paths: `Processors.paths`.
        scores: over the whole vocabulary.
        step: how many tokens have been generated.
    """
    tokens, flat = paths.reshape(-1, paths.shape[-1]), scores.reshape(-1, scores.shape[-1])
    for processor in processors:
        flat = processor(tokens, flat, step)
    return flat.reshape(scores.shape)


def real_tokens(prompt: Prompt) -> Int[Array, "batch prompt"]:
    """The tokens that generated ones follow, -1 before the first real one."""
    if prompt.decoder_input_ids is not None:
        return jnp.asarray(prompt.decoder_input_ids)
    has_begun = jnp.cumsum(jnp.asarray(prompt.mask), axis=-1) > 0
    return jnp.where(has_begun, jnp.asarray(prompt.input_ids), -1)


def _marked(tokens: Tokens, which: Bool[Array, "paths length"], vocab_size: int) -> Bool[Array, "paths vocab"]:
    """The tokens of each path that are there, and among `which`."""
    places = jnp.where(which & (tokens >= 0), tokens, vocab_size)  # after the vocabulary, where it is dropped
    rows = jnp.arange(len(tokens))[:, None]
    return jnp.zeros((len(tokens), vocab_size), dtype=bool).at[rows, places].set(True, mode="drop")


def _what(found: Any) -> str:
    return f"{found.dtype}{list(found.shape)}" if isinstance(found, jax.Array) else type(found).__name__
