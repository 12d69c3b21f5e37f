# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of scores before sampling: transformers' warpers, over children instead of the vocabulary.

Illegal tokens have a score of `-inf` by then, so omitting them changes nothing. Tokens of equal score are kept or
dropped together here; transformers' `TopPLogitsWarper` may keep some of them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hf_gr.core.beam import DEAD

from .arrays import Number

Scores = Float[Array, "batch beams children"]


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
