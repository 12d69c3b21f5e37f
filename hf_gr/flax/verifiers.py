# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which drafted nodes the beams stand on. Knows no model, no drafter.

Axes: B batch, K beams, N drafted nodes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .beam import DEAD, Beams
from .tree import Nodes


def locate(beams: Beams, nodes: Nodes) -> tuple[Int[Array, "batch beams"], Bool[Array, " batch"]]:
    """Where each beam is among the nodes already scored.

    This is all of strict verification: a step is accepted if all its beams have been drafted. The target's scores
    alone decide the beams, so results are the same as without a draft.

    Returns:
        The place of every beam, arbitrary if it has none; and whether all live beams of a row have one.

    Source: AtSpeed, section 2 and algorithm 1.
    """
    same = beams.states[..., None] == nodes.states[:, None]
    found = same.any(-1) | (beams.scores == DEAD)
    return same.argmax(-1).astype(jnp.int32), found.all(-1)
