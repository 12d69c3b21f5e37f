# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One trie step. Knows no beams and no model.

Source: STATIC, algorithm 2 (the vectorized node transition kernel), on a trie whose children are contiguous. What may
change while it serves is not in the trie: one bit per node says what is alive, a few nodes per row are hidden, and
additions are a second, small trie beside the first.

A program is compiled for shapes, so nothing that changes with a catalogue's content is a shape: every catalogue has
bits and a second trie, if need be all set and empty.

Axes: B batch, K beams, C children: the largest branching of the level, a static shape; E hidden nodes; U rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float, Int, UInt8

from hf_gr.catalogue.snapshot import BatchRules

from .arrays import Device, HostOrDevice, at
from .buckets import bucket, padded
from .children import Children, MergedChildren, PlainChildren
from .device_trie import DeviceTrie, added_on_device, bits_on_device, nothing_added, on_device

HIDDEN_NODES = 16  # of a row: so many, or 4, 16, ... times as many
COMPARED = 32  # hidden nodes of a row, at most, that are compared one by one; more are searched (measured on a CPU)
LARGEST_NODE = 2**31 - 2**16  # of both segments; the rest is for padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DevicePart:
    """A segment as the requests of a batch see it.

    Attributes:
        trie: the trie.
        alive: by level from 1, by rule: one bit a node.
        hidden: by level from 1, nodes hidden from each request, sorted, padded with the root; None without any.
    """

    trie: DeviceTrie
    alive: tuple[tuple[UInt8[Array, " _"], ...], ...]
    hidden: tuple[Int[HostOrDevice, "batch _"], ...] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceCatalogue:
    """What may be generated for a batch.

    A state is a node of `added` plus the number of nodes of `base` where `added` has the prefix, else a node of
    `base`. The root is 0.

    Attributes:
        base: what was compiled.
        added: what was added since; only a root if nothing was.
        twins: for every node of `added` the node of `base` with the same prefix, or -1.
        rule_of_row: which rule each request has.
    """

    base: DevicePart
    added: DevicePart
    twins: Int[Array, " added_nodes"]
    rule_of_row: Int[HostOrDevice, " batch"]

    @property
    def max_length(self) -> int:
        """The number of levels."""
        return max(len(part.trie.branching) for part in (self.base, self.added))

    @property
    def dead_state(self) -> Int[Array, ""]:
        """The state without children that stands for no prefix at all."""
        return self.base.trie.num_nodes + self.added.trie.num_nodes

    @property
    def has_leaves(self) -> tuple[bool, ...]:
        """By level: whether a sequence can end with its token number `level + 1`."""
        flags = [part.trie.has_leaves for part in (self.base, self.added)]
        return tuple(any(of[level] for of in flags if level < len(of)) for level in range(self.max_length))

    @property
    def is_ragged(self) -> bool:
        """Whether some sequence is shorter than another."""
        return any(self.has_leaves[:-1])


def device_catalogue(rules: BatchRules, device: Device = None, *, num_rows: int | None = None) -> DeviceCatalogue:
    """The catalogue of a batch on a device; segments and rules are moved there once, for as long as they live.

    Args:
        rules: the catalogue of every request.
        device: a device, a sharding over several devices, or None for the default device. Arrays with a batch axis
            stay in NumPy: a compiled program moves them.
        num_rows: B; the number of rows of `rules` by default, which must know it then. Rows beyond those of `rules`
            are copies of the first.

    Raises:
        ValueError: a catalogue with more nodes than 32 bits can number.
    """
    given = rules.num_rows
    num_rows = num_rows or given
    assert num_rows is not None, "rules for any number of rows: pass num_rows"
    order = np.arange(num_rows)
    order[given:] = 0
    tries = [part.segment.trie for part in rules.shared.parts]
    num_levels = max(trie.max_length for trie in tries)
    num_nodes = sum(trie.level_starts[-1] + max(trie.branching) for trie in tries)
    if num_nodes > LARGEST_NODE:
        raise ValueError(
            f"constraint_index has {num_nodes} nodes, expected at most {LARGEST_NODE}, which is what JAX's 32-bit "
            "integers number: backend='torch' has 64"
        )
    hidden = _hidden_nodes(rules, order, num_levels)
    base = DevicePart(on_device(tries[0], device), _bits(rules, 0, device), hidden[0])
    if rules.shared.added is None:
        trie, twins, dead = nothing_added(base.trie.has_leaves, device)
        bits = ((dead,) * bucket(len(rules.snapshots)),) * num_levels
    else:
        trie, twins = added_on_device(tries[1], rules.shared, device)
        bits = _bits(rules, 1, device)
        bits += bits[:1] * (num_levels - len(bits))  # levels without nodes
    added = DevicePart(trie, bits, hidden[1])
    rule_of_row = np.zeros(num_rows, np.int64) if rules.rule_of_row is None else rules.rule_of_row[order]
    return DeviceCatalogue(base, added, twins, np.asarray(rule_of_row, np.int32))


def children(states: Int[Array, "batch beams"], catalogue: DeviceCatalogue, *, level: int) -> Children:
    """The living children of every state of a level (level 0 is the root), in token order within a segment.

    In plain loops: `for b, k, c: child = first[b, k] + c; legal = c < count[b, k] and alive[child]; token =
    tokens[child]`.
    """
    base, added = catalogue.base, catalogue.added
    in_added, nodes = _both_nodes(states, catalogue) if level else (states, states)
    new = _part_children(in_added, added, catalogue.rule_of_row, level)
    first_added = new.first + base.trie.num_nodes
    if level >= len(base.trie.branching):
        return replace(new, first=first_added)
    old = _part_children(nodes, base, catalogue.rule_of_row, level)
    # A child that is in both is reached through `added`, which knows its twin.
    shadowed = (old.tokens[..., None] == new.tokens[..., None, :]).any(-1)
    return MergedChildren(
        tokens=jnp.concatenate([jnp.where(shadowed, -1, old.tokens), new.tokens], axis=-1),
        first=old.first,
        first_added=first_added,
        num_old=old.tokens.shape[-1],
    )


def is_leaf(
    states: Int[Array, "batch beams"], catalogue: DeviceCatalogue, *, level: int
) -> Bool[Array, "batch beams"]:
    """Whether a sequence ends in this state of a level, or of one above it (true for the dead state, too)."""
    if level == catalogue.max_length:
        return jnp.ones_like(states, dtype=bool)
    in_added, nodes = _both_nodes(states, catalogue)
    base, added = catalogue.base.trie, catalogue.added.trie
    return base.is_childless(nodes, level=level) & added.is_childless(in_added, level=level)


def over_vocabulary(
    scores: Float[Array, "batch beams children"], legal: Children, vocab_size: int
) -> Float[Array, "batch beams vocab"]:
    """The scores of legal children in their tokens' places, `-inf` everywhere else."""
    tokens = jnp.where(legal.legal, legal.tokens, vocab_size)  # after the vocabulary, where it is dropped
    rows, beams = jnp.ix_(jnp.arange(scores.shape[0]), jnp.arange(scores.shape[1]))
    nothing = jnp.full((*scores.shape[:-1], vocab_size), -jnp.inf, dtype=scores.dtype)
    return nothing.at[rows[..., None], beams[..., None], tokens].set(scores, mode="drop")


def advance(
    states: Int[Array, "batch beams"], tokens: Int[Array, "batch beams"], catalogue: DeviceCatalogue, *, level: int
) -> Int[Array, "batch beams"]:
    """Follow one token from every state: a leaf stays where it is, an illegal token leads to the dead state."""
    below = children(states, catalogue, level=level)
    hit = below.legal & (below.tokens == tokens[..., None])
    beams = jnp.broadcast_to(jnp.arange(states.shape[1], dtype=jnp.int32), states.shape)
    chosen = hit.argmax(-1).astype(jnp.int32)
    moved = jnp.where(hit.any(-1), below.take(beams, chosen)[1], catalogue.dead_state)
    return jnp.where(below.legal.any(-1), moved, states)


def _both_nodes(
    states: Int[Array, "batch beams"], catalogue: DeviceCatalogue
) -> tuple[Int[Array, "batch beams"], Int[Array, "batch beams"]]:
    """The node of `added` and that of `base` for every state; no node where a segment lacks the prefix."""
    in_added = states - catalogue.base.trie.num_nodes
    is_added = (in_added >= 0) & (in_added < catalogue.added.trie.num_nodes)
    return in_added, jnp.where(is_added, at(catalogue.twins, in_added), states)


def _part_children(
    nodes: Int[Array, "batch beams"], part: DevicePart, rule_of_row: Int[HostOrDevice, " batch"], level: int
) -> PlainChildren:
    """The children of one segment's nodes."""
    trie = part.trie
    first, count = trie.child_range(nodes, level=level)
    places = jnp.arange(trie.branching[level], dtype=jnp.int32)
    below = first[..., None] + places
    alive = _are_alive(below - trie.level_starts[level + 1], part.alive[level], rule_of_row)
    legal = (places < count[..., None]) & alive
    if part.hidden is not None:
        legal = legal & ~_is_among(below, part.hidden[level])
    tokens = at(trie.tokens, below) + trie.token_bases[level]
    return PlainChildren(tokens=jnp.where(legal, tokens, -1), first=first)


def _are_alive(
    nodes: Int[Array, "batch beams children"], bits: Sequence[Array], rule_of_row: Int[HostOrDevice, " batch"]
) -> Bool[Array, "batch beams children"]:
    """The bits of nodes, numbered within their level."""
    places = nodes >> 3
    if len(bits) > 1:  # the rules' bits, concatenated
        places = jnp.minimum(places, len(bits[0]) - 1) + rule_of_row[:, None, None] * len(bits[0])
    found = at(jnp.concatenate(bits) if len(bits) > 1 else bits[0], places)
    return (found >> (nodes & 7) & 1).astype(bool)


def _is_among(
    nodes: Int[Array, "batch beams children"], hidden: Int[HostOrDevice, "batch hidden"]
) -> Bool[Array, "batch beams children"]:
    """Whether each node is one of those of its row, which ascend."""
    if hidden.shape[1] <= COMPARED:
        return (nodes[..., None] == hidden[:, None, None]).any(-1)
    places = jax.vmap(jnp.searchsorted)(hidden, nodes)
    return jax.vmap(at)(jnp.asarray(hidden), places) == nodes


def _bits(rules: BatchRules, number: int, device: Device) -> tuple[tuple[Array, ...], ...]:
    """By level and rule, the bits of one segment; as many rules as a bucket has, the first one several times."""
    segment = rules.shared.parts[number].segment
    lives = [snapshot.parts[number].alive or segment.all_alive for snapshot in rules.snapshots]
    moved = [bits_on_device(live, device, is_base=not number) for live in lives]
    moved += moved[:1] * (bucket(len(moved)) - len(moved))
    return tuple(zip(*moved, strict=True))


def _hidden_nodes(
    rules: BatchRules, order: npt.NDArray[Any], num_levels: int
) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """By segment and level what is hidden from every row, as wide everywhere; None where nothing can be."""
    if rules.excluded_ids is None:
        return None, None
    parts = [*rules.excluded, (), ()][:2]
    most = max((level.shape[1] for part in parts for level in part if level is not None), default=0)
    size = HIDDEN_NODES
    while size < most:
        size *= 4
    nothing = np.zeros((len(order), size), np.int32)
    hidden: list[tuple[Any, ...]] = []
    for part in parts:
        levels = [
            nothing if level is None else np.sort(padded(level.astype(np.int32), size, axis=1), axis=1)[order]
            for level in part
        ]
        hidden.append((*levels, *[nothing] * (num_levels - len(levels))))
    return hidden[0], hidden[1]
