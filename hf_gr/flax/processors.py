# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Suppressed tokens, and a user's functions of scores and of ends, inside a program. Knows no model.

Which tokens are suppressed is an argument of the program. A function is part of it, traced once: a new function object
is a new program.

Functions see paths as `[paths, length]` tokens of one fixed length: the last token is in the last column, the
prompt's are before the generated ones, and -1, which is no token, is before the first real token of the prompt. So
`tokens[:, -1]` is the last token at every step, and `tokens >= 0` says which there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hf_gr.core.plan import static

from .arrays import HostOrDevice
from .scorers import Prompt
from .transition import Children, over_vocabulary


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
