# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which drafted nodes the beams have reached, and which ones relaxed verification picks. Knows no model, no drafter.

Axes: B batch, K beams, N drafted nodes, W nodes one level above them, C children, M candidates kept.
"""

from typing import Any

from jaxtyping import Bool, Float, Int

from .beam import DEAD, Beams, Candidates
from .ops import Array

LAST_RESORT = 1e3  # subtracted from the log-probability of candidates outside the residual, so that they come last


def locate(beams: Beams, states: Int[Array, "batch nodes"]) -> tuple[Int[Array, "batch beams"], Bool[Array, " batch"]]:
    """The place of each beam among its level's scored nodes; whether all living ones of a row have one.

    This is all of strict verification: a step is accepted if all its beams were drafted. The target's scores alone
    decide which beams those are, so results are those without a draft. A place is anything where there is none.

    Source: AtSpeed, section 2 and algorithm 1.
    """
    same = beams.states[..., None] == states[:, None]
    found = same.any(-1) | (beams.scores == DEAD)
    return beams.ops.argmax(same), found.all(-1)


def relaxed_places(
    candidates: Candidates,
    scores: Float[Array, "batch beams children"],  # cumulative, `-inf` where there is no child
    nodes: Any,  # drafted, in drawing order
    log_probs: Float[Array, "batch above children"],  # of all that could have been drawn
    places: Int[Array, "batch beams"] | None,  # of beams among the nodes one level above; None: each is at its own
    *,
    num_kept: int,  # M; fewer are picked if there are fewer candidates and drafted nodes in all
    uniform: Float[Array, "batch beams children"],  # in (0, 1), not the draft's: by it drafted ones pass
    gumbel: Float[Array, "batch beams children"],  # independent of both: by it the others are drawn
    ops: Any,
) -> Int[Array, "batch kept"]:
    """Pick M children by relaxed sampling verification: a drafted one passes with probability `min(1, p / q)`.

    p is the softmax over all children of the target's beams of their cumulative scores; q the same of the draft
    model over its own beams. Of those that pass, the first M in the order in which the draft drew them are kept: a
    random choice that preserves the distribution where p equals q (a uniform choice would flatten it). If fewer
    pass, the others are drawn from `norm(max(0, p - q))`, and if that has too few, from p: so there are M distinct
    ones wherever M exist. Picks are places among all children of a row.

    How close this is to the target's own draws, by total variation of how often each item is drawn (256 items of 4
    levels, K = 3; two samples of the same differ by 0.02): 0.05 with as many drafted as are kept, from any draft;
    0.09 and 0.13 with two and four times as many from a draft that alone is 0.24 away, and 0.12 and 0.19 from one
    that is 0.93 away. With one draft of one beam it is exact.

    Source: AtSpeed, section 3.2 and algorithm 2.
    """
    num_rows, num_beams, num_children = scores.shape
    size = num_beams * num_children
    flat = scores.reshape(num_rows, size)
    own = ops.expand(ops.arange(num_beams, scores), (num_rows, num_beams)) if places is None else places
    p = ops.fill(ops.log_softmax(flat), ~(flat > DEAD), DEAD)  # a row without any child has no softmax
    # A beam's children have the same order for both models.
    q = ops.along(log_probs, own).reshape(num_rows, size)
    # The place of each drafted node among the children; after the last one if its parent is no beam of the target.
    is_parent = nodes.parents[..., None] == own[:, None]
    parents = ops.argmax(is_parent)
    tokens, legal = (ops.along(values, parents) for values in (candidates.tokens, candidates.legal))
    is_child = legal & (tokens == nodes.tokens[..., None])
    child = ops.argmax(is_child)
    # A node that the draft could not draw, for lack of children, has an arbitrary token; its state is dead.
    place = parents * num_children + child
    is_it = candidates.take(place)[1] == nodes.states
    is_there = is_parent.any(-1) & is_child.any(-1) & is_it
    drafted = ops.fill(place, ~is_there, size)

    p, q = (ops.pad(one, 1, DEAD) for one in (p, q))
    uniform, gumbel = (ops.pad(one.reshape(num_rows, size), 1, 0.5) for one in (uniform, gumbel))
    # Never 0, so that what the target gives probability 0 never passes.
    passes = is_there & (ops.log(ops.along(uniform, drafted)) <= ops.along(p, drafted) - ops.along(q, drafted))
    residual = ops.log((ops.exp(p) - ops.exp(q)).clip(0.0))
    keys = ops.where(residual > DEAD, residual, p - LAST_RESORT) + gumbel
    # Drafts that passed are not drawn again; those that failed go to the extra column, which is never drawn from.
    keys = ops.put(keys, ops.fill(drafted, ~passes, size), DEAD)
    drawn_keys, drawn = ops.topk(keys, min(num_kept, size + 1))
    picks = ops.concat([drafted, drawn], 1)
    is_none = ops.concat([~passes, drawn_keys == DEAD], 1)
    first = ops.argsort(is_none)[..., :num_kept]
    return ops.fill(ops.along(picks, first), ops.along(is_none, first), size)
