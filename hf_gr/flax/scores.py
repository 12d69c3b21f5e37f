# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The options of one call, and what they do to scores after the constraint: processors, then warpers. Knows no model.

Which tokens are suppressed is an argument of the program. A user's function is part of it, traced once: a new function
object is a new program. It sees paths as `[paths, length]` tokens of one fixed length: the last token is in the last
column, the prompt's are before the generated ones, and -1, which is no token, is before the first real token of the
prompt. So `tokens[:, -1]` is the last token at every step, and `tokens >= 0` says which there are.

The warpers are transformers' own, over children instead of the vocabulary: illegal tokens have a score of `-inf` by
then. Tokens of equal score are kept or dropped together here; transformers' `TopPLogitsWarper` may keep some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hf_gr.core.beam import DEAD
from hf_gr.core.plan import Options, static

from .arrays import HostOrDevice, Number
from .scorers import Prompt
from .transition import Children, over_vocabulary

Scores = Float[Array, "batch beams children"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodePlan(Options):
    """The options of one call."""

    top_k: int | None = static(default=None)  # number of children to sample from; None for all
    min_tokens_to_keep: int = static(default=1)  # children that every warper keeps
    renormalize_logits: bool = static(default=False)  # normalise scores over the legal tokens of each step
    drafter: Any = static(default=None)  # proposes nodes to score ahead: `drafters.TreeDrafter`; None for no draft
    # the mesh axis over which rows that advance together are sharded; None if these advance alone
    rows_axis: str | None = static(default=None)
    temperature: Number | None = None  # divisor of scores; None for none
    top_p: Number | None = None  # total probability of the children to sample from; None for all
    min_p: Number | None = None  # the least probability of those, relative to the largest; None for any
    processors: Processors | None = None  # what else changes scores or ends sequences; None for nothing

    @property
    def has_criteria(self) -> bool:
        """See `Options.has_criteria`."""
        return self.processors is not None and bool(self.processors.criteria)

    def meets_criteria(
        self, sequences: Int[Array, "batch kept length"], *, max_length: int
    ) -> Bool[Array, "batch kept"]:
        """See `Options.meets_criteria`."""
        assert self.processors is not None
        return self.processors.ended(sequences, room=max_length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Processors:
    """Functions that change scores after the constraint and before the warpers, or that end paths early."""

    # tokens that must not come first, and those that must not come later; None for none
    suppressed: Bool[HostOrDevice, "2 vocab"] | None = None
    # of the user's, `function(tokens, scores) -> scores`. Static.
    functions: tuple[Callable[[Array, Array], Array], ...] = static(default=())
    # functions of the user's that end paths: `function(tokens, None) -> bool [paths]`. Static.
    criteria: tuple[Callable[[Array, None], Array], ...] = static(default=())
    # the prompt's tokens as functions see them; None until the program has its prompt
    prompt: Int[Array, "batch prompt"] | None = None

    def after(self, prompt: Prompt) -> Processors:
        """The same of a program that has its prompt: the tokens that generated ones follow."""
        if prompt.decoder_input_ids is not None:
            return replace(self, prompt=jnp.asarray(prompt.decoder_input_ids))
        has_begun = jnp.cumsum(jnp.asarray(prompt.mask), axis=-1) > 0
        return replace(self, prompt=jnp.where(has_begun, jnp.asarray(prompt.input_ids), -1))

    def scores(
        self,
        scores: Float[Array, "batch beams children"],
        legal: Children,
        sequences: Int[Array, "batch beams length"],
        *,
        vocab_size: int,
        room: int,
    ) -> Float[Array, "batch beams children"]:
        """Processed scores of legal children."""
        if self.suppressed is not None:
            is_suppressed = jnp.asarray(self.suppressed)[min(sequences.shape[-1], 1)]
            scores = jnp.where(is_suppressed[jnp.maximum(legal.tokens, 0)], -jnp.inf, scores)
        if not self.functions:
            return scores
        tokens, whole = self._paths(sequences, room=room), over_vocabulary(scores, legal, vocab_size)
        flat = whole.reshape(-1, vocab_size)
        for function in self.functions:
            found = function(tokens, flat)
            if getattr(found, "shape", None) != flat.shape:
                raise ValueError(
                    f"logits_processor returned {_what(found)}, expected scores of the shape that it got, "
                    f"{list(flat.shape)}"
                )
            flat = found.astype(flat.dtype)
        return jnp.where(legal.legal, legal.scores(flat.reshape(whole.shape)), -jnp.inf)

    def ended(self, sequences: Int[Array, "batch beams length"], *, room: int) -> Bool[Array, "batch beams"]:
        """Which paths a criterion ends; the arguments are those of `scores`."""
        tokens = self._paths(sequences, room=room)
        ends = jnp.zeros(len(tokens), dtype=bool)
        for criterion in self.criteria:
            found = criterion(tokens, None)
            if getattr(found, "shape", None) != ends.shape or found.dtype != bool:
                raise ValueError(
                    f"stopping_criteria returned {_what(found)}, expected booleans [{len(tokens)}], one for each path"
                )
            ends = ends | found
        return ends.reshape(sequences.shape[:2])

    def _paths(self, sequences: Int[Array, "batch beams length"], *, room: int) -> Int[Array, "paths room"]:
        assert self.prompt is not None
        batch, num_beams, width = sequences.shape
        prompt = jnp.broadcast_to(self.prompt[:, None], (batch, num_beams, self.prompt.shape[-1]))
        in_front = jnp.full((batch, num_beams, room - width), -1, jnp.int32)
        paths = jnp.concatenate([in_front, prompt, sequences], axis=-1)
        return paths.reshape(-1, paths.shape[-1])


def _what(found: Any) -> str:
    return f"{found.dtype}{list(found.shape)}" if isinstance(found, jax.Array) else type(found).__name__


def warped(scores: Scores, plan: DecodePlan) -> Scores:
    """The scores of all that may follow, after the warpers of sampling and the normalisation."""
    if plan.do_sample:
        keep = {"min_tokens_to_keep": plan.min_tokens_to_keep}
        scores = scores if plan.temperature is None else scores / plan.temperature
        scores = scores if plan.top_k is None else keep_top_k(scores, plan.top_k, **keep)
        scores = scores if plan.top_p is None else keep_top_p(scores, plan.top_p, **keep)
        scores = scores if plan.min_p is None else keep_min_p(scores, plan.min_p, **keep)
    return renormalize(scores) if plan.renormalize_logits else scores


def keep_top_k(scores: Scores, top_k: int, *, min_tokens_to_keep: int = 1) -> Scores:
    """The `top_k` largest scores, `-inf` for all others: `TopKLogitsWarper`."""
    number = min(max(top_k, min_tokens_to_keep), scores.shape[-1])
    return jnp.where(scores >= lax.top_k(scores, number)[0][..., -1:], scores, DEAD)


def keep_top_p(scores: Scores, top_p: Number, *, min_tokens_to_keep: int = 1) -> Scores:
    """The fewest largest scores whose probabilities reach `top_p`, `-inf` for all others: `TopPLogitsWarper`."""
    descending = lax.top_k(scores, scores.shape[-1])[0]  # on a CPU, faster than XLA's sort
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = probabilities.cumsum(-1) - probabilities
    number = jnp.maximum((before < top_p).sum(-1, keepdims=True), min_tokens_to_keep)
    last = jnp.take_along_axis(descending, number - 1, axis=-1, mode="clip")
    return jnp.where(scores >= last, scores, DEAD)


def keep_min_p(scores: Scores, min_p: Number, *, min_tokens_to_keep: int = 1) -> Scores:
    """The scores of at least `min_p` times the largest probability, `-inf` for all others: `MinPLogitsWarper`."""
    best = lax.top_k(scores, min(min_tokens_to_keep, scores.shape[-1]))[0]
    least = jnp.minimum(best[..., :1] + jnp.log(min_p), best[..., -1:])
    return jnp.where(scores >= least, scores, DEAD)


def renormalize(scores: Scores) -> Scores:
    """Log-probabilities among the children alone: `LogitNormalization`."""
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.where(total > DEAD, scores - total, DEAD)
