# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which drafted nodes the beams stand on, and which of them a relaxed verification picks. Knows no model, no drafter.

Axes: B batch, K beams, N drafted nodes, W nodes one level above them, C children, M candidates kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .arrays import along
from .beam import DEAD, Beams
from .children import Children

LAST_RESORT = 1e3  # what a candidate outside the residual loses, in log-probability: more than any residual has


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """What a draft model drew on one level, in drawing order.

    Attributes:
        tokens: of each node.
        parents: places among the nodes one level above.
        states: trie nodes; the dead state for padding.
        log_probs: what they were drawn with (AtSpeed's q): log-probabilities of all children of the nodes above.
    """

    tokens: Int[Array, "batch nodes"]
    parents: Int[Array, "batch nodes"]
    states: Int[Array, "batch nodes"]
    log_probs: Float[Array, "batch above children"]


def locate(beams: Beams, states: Int[Array, "batch nodes"]) -> tuple[Int[Array, "batch beams"], Bool[Array, " batch"]]:
    """Where each beam is among the nodes already scored, which have these states.

    This is all of strict verification: a step is accepted if all its beams have been drafted. The target's scores
    alone decide the beams, so results are the same as without a draft.

    Returns:
        The place of every beam, arbitrary if it has none; and whether all live beams of a row have one.

    Source: AtSpeed, section 2 and algorithm 1.
    """
    same = beams.states[..., None] == states[:, None]
    found = same.any(-1) | (beams.scores == DEAD)
    return same.argmax(-1).astype(jnp.int32), found.all(-1)


def relaxed_places(
    candidates: Children,
    scores: Float[Array, "batch beams children"],
    nodes: Drawn,
    places: Int[Array, "batch beams"] | None,
    *,
    num_kept: int,
    uniform: Float[Array, "batch beams children"],
    gumbel: Float[Array, "batch beams children"],
) -> Int[Array, "batch kept"]:
    """Pick M children by relaxed sampling verification: `hf_gr.torch.verifiers.relaxed_places` says how, and why.

    Args:
        candidates: the children of the target's beams.
        scores: their cumulative scores, `-inf` where there is none.
        nodes: what the draft drew.
        places: of the target's beams among the nodes one level above; None if each is at its own.
        num_kept: M; fewer are picked if there are fewer candidates and drafted nodes in all.
        uniform: noise in (0, 1), independent of what the draft drew, by which drafted children pass.
        gumbel: Gumbel noise, independent of both, by which the others are drawn.

    Returns:
        Places among all children of a row, as `beam.select` takes them.

    Source: AtSpeed, section 3.2 and algorithm 2.
    """
    num_rows, num_beams, num_children = scores.shape
    size = num_beams * num_children
    flat = scores.reshape(num_rows, size)
    own = jnp.broadcast_to(jnp.arange(num_beams), (num_rows, num_beams)) if places is None else places
    p = jax.nn.log_softmax(flat, axis=-1)
    p = jnp.where(flat > DEAD, p, DEAD)  # a row without any child has no softmax
    # A beam's children have the same order for both models.
    q = along(nodes.log_probs, own[..., None]).reshape(num_rows, size)
    # The place of each drafted node among the children; after the last one if its parent is no beam of the target.
    is_parent = nodes.parents[..., None] == own[:, None]
    parents = is_parent.argmax(-1).astype(jnp.int32)
    tokens = along(candidates.tokens, parents[..., None])
    is_child = (tokens == nodes.tokens[..., None]) & (tokens >= 0)
    child = is_child.argmax(-1).astype(jnp.int32)
    # A node that the draft could not draw, for lack of children, has an arbitrary token; its state is dead.
    is_it = candidates.take(parents, child)[1] == nodes.states
    is_there = is_parent.any(-1) & is_child.any(-1) & is_it
    drafted = jnp.where(is_there, parents * num_children + child, size)

    p, q = (jnp.pad(one, ((0, 0), (0, 1)), constant_values=DEAD) for one in (p, q))
    uniform, gumbel = (
        jnp.pad(one.reshape(num_rows, size), ((0, 0), (0, 1)), constant_values=0.5) for one in (uniform, gumbel)
    )
    # Never 0, so that what the target gives probability 0 never passes.
    passes = is_there & (jnp.log(along(uniform, drafted)) <= along(p, drafted) - along(q, drafted))
    residual = jnp.log(jnp.maximum(jnp.exp(p) - jnp.exp(q), 0.0))
    keys = jnp.where(residual > DEAD, residual, p - LAST_RESORT) + gumbel
    # What passed is not drawn again; what failed is written to the extra column, which is never drawn from.
    rows = jnp.arange(num_rows)[:, None]
    keys = keys.at[rows, jnp.where(passes, drafted, size)].set(DEAD, mode="promise_in_bounds")
    drawn_keys, others = lax.top_k(keys, min(num_kept, size + 1))
    picks = jnp.concatenate([drafted, others.astype(drafted.dtype)], axis=1)
    is_none = jnp.concatenate([~passes, drawn_keys == DEAD], axis=1)
    first = jnp.argsort(is_none, axis=1, stable=True)[:, :num_kept]
    return jnp.where(along(is_none, first), size, along(picks, first))
