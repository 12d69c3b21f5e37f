# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beams whose arrays have room for all tokens, which a program's loop needs. Decides nothing.

Axes: B batch, K beams.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from hf_gr.core.beam import DEAD, Beams


def last_tokens(beams: Beams, levels: Int[Array, " batch"]) -> Int[Array, "batch beams"]:
    """The last token of each beam, where beams have room for all and rows have their own number of tokens."""
    return jnp.take_along_axis(beams.sequences, jnp.maximum(levels - 1, 0)[:, None, None], axis=2)[..., 0]


def of_level(beams: Beams, level: int, *, width: int) -> Beams:
    """Beams of a level, without the room for later tokens."""
    return Beams(
        beams.ops,
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
    after = ((0, 0), (0, missing), (0, 0))
    return Beams(
        beams.ops,
        sequences=jnp.pad(beams.sequences, after),
        beam_indices=jnp.pad(beams.beam_indices, after, constant_values=-1),
        scores=jnp.pad(beams.scores, after[:2], constant_values=DEAD),
        states=jnp.pad(beams.states, after[:2]),
    )
