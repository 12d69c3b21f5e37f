# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which drafted nodes the beams stand on, and which of them a relaxed verification picks. Knows no model, no drafter.

Axes: B batch, K beams, N drafted nodes, C children, M candidates kept.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .beam import DEAD, Beams
from .children import Children
from .tree import Nodes

LAST_RESORT = 1e3  # what a candidate outside the residual loses, in log-probability: more than any residual has


def locate(beams: Beams, nodes: Nodes) -> tuple[Int[Tensor, "batch beams"], Bool[Tensor, " batch"]]:
    """Where each beam is among the nodes of its level that are scored already.

    This is all of strict verification: a step is accepted if all its beams were drafted. The target's scores alone
    decide which beams those are, so results are those without a draft.

    Returns:
        The place of every beam, anything where it has none; and whether all living beams of a row have one.

    Source: AtSpeed, section 2 and algorithm 1.
    """
    same = beams.states[..., None] == nodes.states[:, None]
    found = same.any(dim=-1) | (beams.scores == DEAD)
    return same.int().argmax(dim=-1), found.all(dim=-1)


def relaxed_places(
    candidates: Children,
    scores: Float[Tensor, "batch beams children"],
    nodes: Nodes,
    places: Int[Tensor, "batch beams"] | None,
    *,
    num_kept: int,
    uniform: Float[Tensor, "batch beams children"],
    gumbel: Float[Tensor, "batch beams children"],
) -> Int[Tensor, "batch kept"]:
    """Pick M children by relaxed sampling verification: a drafted one passes with probability `min(1, p / q)`.

    p is the softmax over all children of the target's beams of their cumulative scores; q the same of the draft model
    over its own beams. Of those that pass, the first M in the order in which the draft drew them are kept: a random
    choice that preserves the distribution where p equals q (a uniform choice would flatten it). If fewer pass, the
    others are drawn from `norm(max(0, p - q))`, and if that has too few, from p: so there are M distinct ones wherever
    M exist.

    How close this is to the target's own draws, by total variation of how often each item is drawn (256 items of 4
    levels, K = 3; two samples of the same differ by 0.02): 0.05 with as many drafted as are kept, from any draft; 0.09
    and 0.13 with two and four times as many from a draft that alone is 0.24 away, and 0.12 and 0.19 from one that is
    0.93 away. With one draft of one beam it is exact.

    Args:
        candidates: the children of the target's beams.
        scores: their cumulative scores, `-inf` where there is none.
        nodes: the drafted ones, with the draft's log-probabilities of all that it could have drawn.
        places: of the target's beams among the nodes one level above; None if each is at its own.
        num_kept: M, at most as many as drafted nodes.
        uniform: noise in (0, 1), independent of what the draft drew, by which drafted children pass.
        gumbel: Gumbel noise, independent of both, by which the others are drawn.

    Returns:
        Places among all children of a row, as `beam.select` takes them.

    Source: AtSpeed, section 3.2 and algorithm 2.
    """
    assert nodes.log_probs is not None
    num_beams, num_children = scores.shape[1:]
    flat = scores.flatten(1)
    p = flat.log_softmax(dim=-1).nan_to_num(nan=DEAD, neginf=DEAD)  # a row without any child has no softmax
    own = torch.arange(num_beams, device=scores.device).expand(len(scores), -1) if places is None else places
    # A beam's children have the same order for both models.
    q = nodes.log_probs.gather(1, own[..., None].expand(-1, -1, num_children)).flatten(1)
    # The place of each drafted node among the children; after the last one if its parent is no beam of the target.
    is_parent = nodes.parents[..., None] == own[:, None]
    parents = is_parent.int().argmax(dim=-1)
    along = parents[..., None].expand(-1, -1, num_children)
    is_child = (candidates.tokens.gather(1, along) == nodes.tokens[..., None]) & candidates.legal.gather(1, along)
    child = is_child.int().argmax(dim=-1)
    # A node that the draft could not draw, for lack of children, has an arbitrary token; its state is dead.
    is_it = candidates.take(parents, child)[1] == nodes.states
    is_there = is_parent.any(dim=-1) & is_child.any(dim=-1) & is_it
    drafted = torch.where(is_there, parents * num_children + child, flat.shape[1])

    p, q = (torch.nn.functional.pad(one, (0, 1), value=DEAD) for one in (p, q))
    uniform, gumbel = (torch.nn.functional.pad(one.flatten(1), (0, 1), value=0.5) for one in (uniform, gumbel))
    # Never 0, so that what the target gives probability 0 never passes.
    passes = is_there & (uniform.gather(1, drafted).log() <= p.gather(1, drafted) - q.gather(1, drafted))
    residual = (p.exp() - q.exp()).clamp_min(0.0).log()
    keys = torch.where(residual > DEAD, residual, p - LAST_RESORT) + gumbel
    # What passed is not drawn again; what failed is written to the extra column, which is never drawn from.
    drawn_keys, drawn = keys.scatter(1, torch.where(passes, drafted, flat.shape[1]), DEAD).topk(
        min(num_kept, keys.shape[1])
    )
    picks = torch.cat([drafted, drawn], dim=1)
    is_none = torch.cat([~passes, drawn_keys == DEAD], dim=1)
    first = is_none.int().argsort(dim=1, stable=True)[:, :num_kept]
    return torch.where(is_none.gather(1, first), flat.shape[1], picks.gather(1, first))
