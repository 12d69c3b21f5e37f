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
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from hf_gr.catalogue.buckets import bucket
from hf_gr.catalogue.segment import Liveness
from hf_gr.catalogue.snapshot import BatchRules

from .arrays import Device, HostOrDevice, windows
from .buckets import padded
from .children import Children, MergedChildren, PlainChildren
from .device_trie import (
    DeviceAdditions,
    DeviceTrie,
    additions_on_device,
    base_branching,
    bits_on_device,
    living_tokens_on_device,
    nothing_added,
    on_device,
    room_for_additions,
)

HIDDEN_NODES = 16  # of a row: so many, or 4, 16, ... times as many
LARGEST_NODE = 2**31 - 2**16  # of both segments; the rest is for padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DevicePart:
    """A segment as the requests of a batch see it.

    Attributes:
        trie: the trie.
        alive: by level from 1, by rule: one bit a node, 32 in each number.
        hidden: by level from 1, nodes hidden from each request, sorted, padded with the root; None without any.
    """

    trie: DeviceTrie
    alive: tuple[tuple[Int[Array, " _"], ...], ...]
    hidden: tuple[Int[HostOrDevice, "batch _"], ...] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AddedPart:
    """What was added, as the requests of a batch see it.

    Attributes:
        trie: the trie.
        tokens: by rule, the token of every node; -1 for what is not alive, and after the last node.
        hidden: as in `DevicePart`.
    """

    trie: DeviceAdditions
    tokens: tuple[Int[Array, " nodes_and_padding"], ...]
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
        rule_of_row: which rule each request has.
    """

    base: DevicePart
    added: AddedPart
    rule_of_row: Int[HostOrDevice, " batch"]

    @property
    def max_length(self) -> int:
        """The number of levels."""
        return max(len(part.trie.branching) for part in (self.base, self.added))

    @property
    def dead_state(self) -> Int[Array, ""]:
        """The state without children that stands for no prefix at all."""
        return self.base.trie.num_nodes + (self.added.trie.room - 1)

    @property
    def has_leaves(self) -> tuple[bool, ...]:
        """By level: whether a sequence can end with its token number `level + 1`."""
        flags = zip_longest(self.base.trie.has_leaves, self.added.trie.has_leaves, fillvalue=False)
        return tuple(any(of) for of in flags)

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
    num_nodes = tries[0].level_starts[-1] + max(base_branching(tries[0]))
    num_nodes += sum(room_for_additions(trie.level_starts[-1]) for trie in tries[1:])
    if num_nodes > LARGEST_NODE:
        raise ValueError(
            f"constraint_index has {num_nodes} nodes, expected at most {LARGEST_NODE}, which is what JAX's 32-bit "
            "integers number: backend='torch' has 64"
        )
    hidden = _hidden_nodes(rules, order, num_levels)
    base = DevicePart(on_device(tries[0], device), _bits(rules, device), hidden[0])
    if rules.shared.added is None:
        trie, tokens = nothing_added(base.trie.has_leaves, device)
        by_rule = (tokens,) * bucket(len(rules.snapshots))
    else:
        trie = additions_on_device(tries[1], rules.shared, device)
        by_rule = tuple(living_tokens_on_device(alive, device) for alive in _alive(rules, 1))
    added = AddedPart(trie, by_rule, hidden[1])
    rule_of_row = np.zeros(num_rows, np.int64) if rules.rule_of_row is None else rules.rule_of_row[order]
    return DeviceCatalogue(base, added, np.asarray(rule_of_row, np.int32))


def children(states: Int[Array, "batch beams"], catalogue: DeviceCatalogue, *, level: int) -> Children:
    """The living children of every state of a level (level 0 is the root), in token order within a segment.

    In plain loops: `for b, k, c: child = first[b, k] + c; legal = c < count[b, k] and alive[child]; token =
    tokens[child]`.
    """
    base, added, rules = catalogue.base, catalogue.added, catalogue.rule_of_row
    nodes, first, count = _both_nodes(states, catalogue, level=level)
    hidden = None if added.hidden is None else added.hidden[level]
    size = added.trie.branching[level]
    seen = _seen(first, count, hidden, size=size)
    new = _tokens(_windows_by_rule(added.tokens, first, rules, size=size), seen)
    first_added = first + base.trie.num_nodes
    if level >= len(base.trie.branching):
        return PlainChildren(new, first_added)
    # A child that is in both is reached through `added`.
    in_both = jnp.where(new >= 0, windows(added.trie.twins, first, size=size), -1)
    old = _base_children(nodes, base, rules, in_both, level=level)
    return MergedChildren(
        tokens=jnp.concatenate([old.tokens, new], axis=-1),
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
    nodes, _, num_added = _both_nodes(states, catalogue, level=level)
    return catalogue.base.trie.is_childless(nodes, level=level) & (num_added == 0)


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
    states: Int[Array, "batch beams"], catalogue: DeviceCatalogue, *, level: int
) -> tuple[Int[Array, "batch beams"], Int[Array, "batch beams"], Int[Array, "batch beams"]]:
    """The node of `base` for every state, or none (-1); its first child in `added`, and the number of those."""
    added = catalogue.added.trie
    if not level:
        return states, *added.child_range(states)
    in_added = states - catalogue.base.trie.num_nodes
    twins = windows(added.twins, in_added, size=1)[..., 0]
    return jnp.where(in_added >= 0, twins, states), *added.child_range(in_added)


def _base_children(
    nodes: Int[Array, "batch beams"],
    part: DevicePart,
    rule_of_row: Int[HostOrDevice, " batch"],
    in_both: Int[Array, "batch beams added"],
    *,
    level: int,
) -> PlainChildren:
    """The children of nodes in what was compiled, without some of them."""
    trie, size = part.trie, part.trie.branching[level]
    first, count = trie.child_range(nodes, level=level)
    alive = _are_alive(first - trie.level_starts[level + 1], part.alive[level], rule_of_row, size=size)
    hidden = None if part.hidden is None else part.hidden[level]
    seen = alive & _seen(first, count, hidden, size=size) & ~_words_at(in_both - first[..., None], size=size)
    tokens = windows(trie.tokens, first, size=size).astype(jnp.int32) + trie.token_bases[level]
    return PlainChildren(_tokens(tokens, seen), first)


def _tokens(
    tokens: Int[Array, "batch beams children"], flags: Int[Array, "batch beams words"]
) -> Int[Array, "batch beams children"]:
    """The tokens of flagged children, -1 for the others."""
    bits = flags[..., None] >> jnp.arange(32, dtype=jnp.int32) & 1
    return jnp.where(bits.reshape(*flags.shape[:-1], -1)[..., : tokens.shape[-1]] > 0, tokens, -1)


def _seen(
    first: Int[Array, "batch beams"],
    count: Int[Array, "batch beams"],
    hidden: Int[HostOrDevice, "batch hidden"] | None,
    *,
    size: int,
) -> Int[Array, "batch beams words"]:
    """A flag for each of `size` children: whether there is such a child, and it is not hidden."""
    last = count[..., None] - 32 * jnp.arange(-(-size // 32), dtype=jnp.int32)
    there = jnp.where(last > 31, -1, (1 << jnp.clip(last, 0, 31)) - 1)
    return there if hidden is None else there & ~_words_at(jnp.asarray(hidden)[:, None] - first[..., None], size=size)


def _are_alive(
    first: Int[Array, "batch beams"], bits: Sequence[Array], rule_of_row: Int[HostOrDevice, " batch"], *, size: int
) -> Int[Array, "batch beams words"]:
    """The flags of `size` nodes from each first one on, which are numbered within their level."""
    found = _windows_by_rule(bits, first >> 5, rule_of_row, size=-(-size // 32) + 1)
    behind = (first & 31)[..., None]  # bits of the first word before the first node's
    low = lax.shift_right_logical(found[..., :-1], jnp.broadcast_to(behind, found[..., :-1].shape))
    return low | found[..., 1:] << 1 << (31 - behind)


def _words_at(places: Int[Array, "batch beams some"], *, size: int) -> Int[Array, "batch beams words"]:
    """Flags for `size` children, set at places; those out of range do not matter."""
    words = jnp.arange(-(-size // 32), dtype=jnp.int32)[:, None]
    places = places[..., None, :]
    flags = jnp.where(places >> 5 == words, 1 << (places & 31), 0)
    return lax.reduce(flags, jnp.int32(0), lax.bitwise_or, (flags.ndim - 1,))


def _windows_by_rule(
    by_rule: Sequence[Array],
    starts: Int[Array, "batch beams"],
    rule_of_row: Int[HostOrDevice, " batch"],
    *,
    size: int,
) -> Integer[Array, "batch beams size"]:
    """`windows` of the array of each row's rule."""
    if len(by_rule) == 1:
        return windows(by_rule[0], starts, size=size)
    length = len(by_rule[0])
    starts = jnp.clip(starts, 0, length - size) + rule_of_row[:, None] * length
    return windows(jnp.concatenate(by_rule), starts, size=size)


def _bits(rules: BatchRules, device: Device) -> tuple[tuple[Array, ...], ...]:
    """By level and rule, the bits of what was compiled."""
    return tuple(zip(*(bits_on_device(alive, device) for alive in _alive(rules, 0)), strict=True))


def _alive(rules: BatchRules, number: int) -> list[Liveness]:
    """What is alive in one segment, by rule; as many rules as a bucket has, the first one several times."""
    segment = rules.shared.parts[number].segment
    lives = [snapshot.parts[number].alive or segment.all_alive for snapshot in rules.snapshots]
    return lives + lives[:1] * (bucket(len(lives)) - len(lives))


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
