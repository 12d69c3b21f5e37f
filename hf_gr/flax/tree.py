# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beams as a tree of tokens over one shared prompt: ancestry, and attention masks. Knows no trie and no model.

Every scored token gets a fixed *slot* after the prompt's keys: selecting beams moves no keys, only the small table of
ancestors. Source: xGR, section 5 (separated shared and unshared cache), with an ancestry table instead of its in-place
reordering, which needs sorted parents.

Axes: B batch, N nodes scored together, D depth (tokens from the prompt to a node, itself included), S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .arrays import along


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nodes:
    """Drafted nodes below the live beams, of all levels, the upper ones first; then padding.

    Attributes:
        tokens: the last token of each.
        parents: places among the live beams and, after those, these nodes; the first beam for padding.
        states: trie nodes, by which beams are found among the drafted nodes; the dead state for padding.
        depths: tokens from the prompt to each node, the same in every row.
    """

    tokens: Int[Array, "batch nodes"]
    parents: Int[Array, "batch nodes"]
    states: Int[Array, "batch nodes"]
    depths: Int[Array, " nodes"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """The nodes scored last, by the slots of their ancestors and their own.

    Attributes:
        ancestry: slots from the first token to the node itself.
        num_slots: slots in use, those of other nodes included (static).
    """

    ancestry: Int[Array, "batch nodes depth"]
    num_slots: int = field(metadata={"static": True})

    @classmethod
    def over_prompt(cls, batch_size: int, num_nodes: int) -> Tree:
        """The tree of a prompt alone: `num_nodes` nodes of depth 0, all of them the prompt."""
        return cls(jnp.zeros((batch_size, num_nodes, 0), dtype=jnp.int32), 0)

    @property
    def depth(self) -> int:
        """Tokens from the prompt to a node."""
        return self.ancestry.shape[-1]

    def grow(self, parents: Int[Array, "batch nodes"], slots: Int[Array, "batch nodes"] | None = None) -> Tree:
        """One more node below each of `parents`.

        Args:
            parents: positions among the nodes of this tree.
            slots: where the nodes are, if they have been scored before; None for the slots after those in use.
        """
        num_slots = self.num_slots
        if slots is None:
            num_slots += parents.shape[1]
            slots = jnp.broadcast_to(jnp.arange(self.num_slots, num_slots, dtype=jnp.int32), parents.shape)
        inherited = along(self.ancestry, parents[..., None])
        return Tree(jnp.concatenate([inherited, slots[..., None]], axis=-1), num_slots)

    def attention_mask(self) -> Bool[Array, "batch nodes slots"]:
        """Who sees whom after the prompt, which all nodes see: a node sees its ancestors and itself."""
        slots = jnp.arange(self.num_slots, dtype=jnp.int32)
        return (self.ancestry[..., None] == slots).any(-2)

    def mask_with(self, nodes: Nodes, *, num_levels: int) -> Bool[Array, "batch nodes_and_drafted slots_and_drafted"]:
        """Who sees whom if drafted nodes below this tree's are scored together with them, and placed after them.

        Args:
            nodes: the drafted nodes.
            num_levels: how many levels below this tree's nodes the lowest of them is.
        """
        live, drafted = self.ancestry.shape[1], nodes.tokens.shape[1]
        own = jnp.arange(live, live + drafted, dtype=jnp.int32)
        above = jnp.concatenate(
            [jnp.broadcast_to(jnp.arange(live, dtype=jnp.int32), (len(nodes.parents), live)), nodes.parents], axis=1
        )
        ancestor = nodes.parents
        sees = own[:, None] == own
        for _ in range(num_levels - 1):
            sees = sees | (ancestor[..., None] == own)
            ancestor = along(above, ancestor)  # of a live node: itself
        mask = self.attention_mask()
        below = jnp.concatenate(
            [along(mask, ancestor[..., None]), jnp.broadcast_to(sees, (len(mask), drafted, drafted))], axis=-1
        )
        return jnp.concatenate([jnp.pad(mask, ((0, 0), (0, 0), (0, drafted))), below], axis=1)
