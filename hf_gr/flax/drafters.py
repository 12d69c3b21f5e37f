# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts nodes to score ahead: all below the live beams if they are few enough, and a draft model's. Decides nothing.

Inside a program shapes are fixed, so a draft always has as many nodes, padding included.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from hf_gr.core.beam import Beams

from .arrays import along
from .speculation import Context, Draft
from .transition import Children, DeviceCatalogue, children
from .tree import Nodes


def open_children(legal: Children, catalogue: DeviceCatalogue, *, depth: int) -> Bool[Array, "batch above children"]:
    """Which children have children of their own: those after which logits are needed."""
    if not catalogue.has_leaves[depth - 1]:
        return legal.legal
    states = legal.first[..., None] + jnp.arange(legal.tokens.shape[-1], dtype=jnp.int32)
    return legal.legal & ~catalogue.trie.is_leaf(states, level=depth)


@dataclass(frozen=True)
class TreeDrafter:
    """Drafts the legal subtree below the beams, level by level, as long as it fits. Static: hashable, without arrays.

    A level is drafted whole or not at all, so beams are always found on it.
    """

    sizes: tuple[int, ...]  # by level of the beams, nodes of a draft: see `plan_sizes`, for the root `plan_first`
    num_first: int = 0  # the most levels of a draft below the prompt: see `plan_first`
    budget: int = 2**30  # nodes of a draft
    least: int = 0  # nodes of a level that are always allowed

    tail: tuple[int, ...] = ()  # tokens that the model reads after the prompt, for the draft alone

    def size(self, *, at_root: bool) -> int:
        """How many nodes a draft has, padding included: below the prompt, or below later beams; 0 for no draft."""
        return self.sizes[0] if at_root else max(self.sizes[1:], default=0)

    def start(self, params: Any, prompt: Any, hidden: Any) -> None:
        """Read the prompts; `hidden` is the model's normed output at their ends and at the tail, if there is one."""

    def draft(
        self, beams: Beams, levels: Int[Array, " batch"], wanted: Bool[Array, " batch"], context: Context
    ) -> Draft:
        """Nodes below the beams of `wanted` rows; the root has no tokens and level 0, in all rows."""
        catalogue, at_root = context.catalogue, beams.sequences.shape[-1] == 0
        states = beams.states[:, :1] if at_root else beams.states  # equal beams are one root
        none = Draft.none(len(levels), self.size(at_root=at_root), catalogue.dead_state, num_live=states.shape[1])
        first = 0 if at_root else next((level for level in range(1, len(self.sizes)) if self.sizes[level]), None)
        if first is None or not self.sizes[first]:
            return none
        sizes = jnp.array((*self.sizes, 0), dtype=jnp.int32)[jnp.minimum(levels, len(self.sizes))]
        nodes, num_steps, fits = subtree(
            states,
            levels,
            wanted & (sizes > 0),
            catalogue,
            first=first,
            end=1 + self.num_first if at_root else catalogue.max_length,
            size=none.nodes.tokens.shape[1],
            room=sizes,
            budget=self.budget,
            least=self.least,
        )
        is_whole = fits if not at_root or 1 + self.num_first == catalogue.max_length else jnp.zeros_like(fits)
        return replace(none, nodes=nodes, num_steps=num_steps, is_whole=is_whole)


def subtree(
    states: Int[Array, "batch above"],
    levels: Int[Array, " batch"],
    wanted: Bool[Array, " batch"],
    catalogue: DeviceCatalogue,
    *,
    first: int,
    end: int,
    size: int,
    room: int | Int[Array, " batch"],
    budget: int,
    least: int,
    used: int | Int[Array, ""] = 0,
) -> tuple[Nodes, Int[Array, " batch"], Bool[Array, " batch"]]:
    """The legal nodes below those of `states`, level by level while they fit, for the rows that want them.

    Nodes above have `levels` tokens, `first` at least; none gets `end`, since nothing follows the last level's tokens.
    A row has `room` of the `size` places; `budget` counts the `used` nodes, too; `least` nodes of a level are allowed.

    Returns:
        The nodes, after those above, by which their parents are numbered; how many levels have some, by row; and the
        rows where all of them fit.
    """
    batch_size, num_above = states.shape
    width = max(num_above, size)  # one code for rows that begin on this level and rows that continue from it
    nothing = jnp.zeros(batch_size, dtype=jnp.int32)
    above = jnp.pad(states, ((0, 0), (0, width - num_above)), constant_values=-1)
    above = jnp.where(above < 0, catalogue.dead_state, above)
    own = jnp.arange(width, dtype=jnp.int32)

    def expanded(grown: _Grown, is_here: Array, depth: int) -> _Grown:
        begins = (levels == depth - 1)[:, None]
        places = jnp.where(begins, own, grown.places)
        legal = children(jnp.where(begins, above, grown.states), catalogue, level=depth - 1)
        new, counts = _all_children(legal, places, catalogue, depth=depth, room=size)
        start, fits = grown.start, is_here & grown.fits
        fits = fits & (start + counts <= room) & (counts <= jnp.maximum(budget - used - start, least))
        # After the levels above; each level's padding is overwritten by the next.
        put = partial(_put, starts=jnp.where(fits, start, size))
        missing = ((0, 0), (0, width - new.states.shape[1]))
        below = jnp.pad(new.states, missing, constant_values=-1)
        below = jnp.where(fits[:, None] & (below >= 0), below, catalogue.dead_state)
        return _Grown(
            nodes=jax.tree.map(put, grown.nodes, new),
            states=below,
            places=num_above + start[:, None] + own,
            start=start + jnp.where(fits, counts, 0),
            num_steps=grown.num_steps + (fits & (counts > 0)),
            fits=jnp.where(is_here, fits, grown.fits),
        )

    grown = _Grown(
        nodes=Nodes.none(batch_size, size, catalogue.dead_state),
        states=jnp.full((batch_size, width), catalogue.dead_state, dtype=jnp.int32),
        places=jnp.broadcast_to(own, (batch_size, width)),
        start=nothing,
        num_steps=nothing,
        fits=wanted,
    )
    for depth in range(first + 1, end):
        is_here = wanted & (levels < depth)
        step = partial(expanded, depth=depth)
        grown = lax.cond(is_here.any(), step, lambda grown, _: grown, grown, is_here)
    return grown.nodes, grown.num_steps, grown.fits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Grown:
    """A subtree so far."""

    nodes: Nodes  # the nodes
    states: Int[Array, "batch width"]  # trie nodes of the last level
    places: Int[Array, "batch width"]  # of those among the nodes above and the nodes
    start: Int[Array, " batch"]  # the number of nodes
    num_steps: Int[Array, " batch"]  # levels with some
    fits: Bool[Array, " batch"]  # the rows where all fitted


def _all_children(
    legal: Children, places: Int[Array, "batch above"], catalogue: DeviceCatalogue, *, depth: int, room: int
) -> tuple[Nodes, Int[Array, " batch"]]:
    """All children with children of their own, as far as there is room, with parents by place; and their number."""
    batch_size, num_above, num_children = legal.tokens.shape
    wanted = open_children(legal, catalogue, depth=depth).reshape(batch_size, -1)
    so_far = jnp.cumsum(wanted, axis=-1, dtype=jnp.int32)
    counts = so_far[:, -1:]
    own = jnp.arange(min(room, wanted.shape[1]), dtype=jnp.int32)
    chosen = jax.vmap(lambda row: jnp.searchsorted(row, own + 1))(so_far).astype(jnp.int32)
    chosen = jnp.minimum(chosen, wanted.shape[1] - 1)
    parents = chosen // num_children
    tokens, states = legal.take(chosen)
    is_there = own < counts
    nodes = Nodes(
        jnp.where(is_there, tokens, 0),
        jnp.where(is_there, along(places, parents), 0),
        jnp.where(is_there, states, catalogue.dead_state),
        jnp.full(tokens.shape, depth, dtype=jnp.int32),
    )
    return nodes, counts[:, 0]


def _put(
    rows: Int[Array, "batch nodes"], new: Int[Array, "batch some"], *, starts: Int[Array, " batch"]
) -> Int[Array, "batch nodes"]:
    """Write new entries of every row from its start; those without room are dropped."""
    longer = jnp.pad(rows, ((0, 0), (0, new.shape[1])))
    put = jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=0))
    return put(longer, new, starts)[:, : rows.shape[1]]
