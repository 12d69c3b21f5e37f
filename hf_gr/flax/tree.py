# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beams as a tree of tokens over one shared prompt: who sees whom. Knows no trie and no model.

The keys of every beam's token have a fixed *slot* after the prompt: the beams of the first level have the first K
slots, those of the second the next, and so on. Selecting beams moves nothing: a beam knows which beam of its row each
of its tokens was appended to. Source: xGR, section 5 (separated shared and unshared cache), with this table instead of
its in-place reordering, which needs sorted parents.

Axes: B batch, K beams, N drafted nodes, M beams and drafted nodes, L levels, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .arrays import along


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nodes:
    """Drafted nodes below the live beams, of all levels, the upper ones first, with padding anywhere."""

    tokens: Int[Array, "batch nodes"]  # the last token of each
    # places among the live beams and, after those, these nodes; the first beam for padding
    parents: Int[Array, "batch nodes"]
    # trie nodes, by which beams are found among the drafted nodes; the dead state for padding
    states: Int[Array, "batch nodes"]
    depths: Int[Array, "batch nodes"]  # tokens from the prompt to each node

    @classmethod
    def none(cls, batch_size: int, number: int, dead_state: Int[Array, ""]) -> Nodes:
        """Padding alone."""
        nothing = jnp.zeros((batch_size, number), dtype=jnp.int32)
        return cls(nothing, nothing, nothing + dead_state, nothing + 1)


def slots_seen(
    beam_indices: Int[Array, "batch beams levels"], levels: Int[Array, " batch"], num_slots: int
) -> Bool[Array, "batch beams slots"]:
    """Which slots each beam sees: those of its tokens but the last one, which is in none yet."""
    num_beams = beam_indices.shape[1]
    own = jnp.arange(num_beams, dtype=jnp.int32)
    depths = jnp.arange(1, 1 + num_slots // num_beams)
    is_in_slot = (depths < levels[:, None])[:, None, :, None]
    seen = (beam_indices[..., 1 : 1 + len(depths), None] == own) & is_in_slot
    return seen.reshape(*beam_indices.shape[:2], num_slots)


def nodes_seen(
    parents: Int[Array, "batch nodes"], num_live: int, *, num_levels: int
) -> tuple[Bool[Array, "batch live_and_nodes live_and_nodes"], Int[Array, "batch live_and_nodes"]]:
    """Who sees whom of live beams and the nodes drafted below them: everyone itself and its ancestors.

    Returns:
        Who sees whom; and the beam that each is or is below.
    """
    live = jnp.broadcast_to(jnp.arange(num_live, dtype=jnp.int32), (len(parents), num_live))
    above = jnp.concatenate([live, parents], axis=1)
    own = jnp.arange(above.shape[1], dtype=jnp.int32)
    sees, ancestor = jnp.broadcast_to(own[:, None] == own, (len(parents), len(own), len(own))), above
    for number in range(num_levels):
        sees = sees | (ancestor[..., None] == own)
        if number + 1 < num_levels:
            ancestor = along(above, ancestor)
    return sees, ancestor
