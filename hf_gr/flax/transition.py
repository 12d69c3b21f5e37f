# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One trie step. Knows no beams and no model.

Source: STATIC, algorithm 2 (the vectorized node transition kernel), on a trie whose children are contiguous. What may
be dead is not in the trie: one bit per node says what is alive, and a few nodes per row are hidden.

No shape depends on what changes with a catalogue: every catalogue has bits, if need be all set.

Axes: B batch, K beams, C children: the largest branching of the level, a static shape; E hidden nodes; U rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hf_gr.catalogue.rules import BatchRules
from hf_gr.core.widths import bucket

from .arrays import Device, HostOrDevice, along, padded, windows
from .device_trie import DeviceTrie, on_device, padded_branching

HIDDEN_NODES = 16  # of a row: so many, or 4, 16, ... times as many
LARGEST_NODE = 2**31 - 2**16  # the rest is for padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Children:
    """The children of every state of a level, padded to C.

    States are not stored: `take` computes those of the few children that are kept. Nor is legality stored in its own
    array: a program with fewer arrays compiles faster.
    """

    # the token that leads to each child; -1 where there is no such child, or it is not alive
    tokens: Int[Array, "batch beams children"]
    first: Int[Array, "batch beams"]  # the state of each beam's first child

    @property
    def legal(self) -> Bool[Array, "batch beams children"]:
        """Whether there is such a child, and it is alive."""
        return self.tokens >= 0

    def take(
        self, places: Int[Array, "batch chosen"]
    ) -> tuple[Int[Array, "batch chosen"], Int[Array, "batch chosen"]]:
        """Tokens and states at places among all children of a row; meaningless states where there is no such child."""
        tokens = along(self.tokens.reshape(len(self.tokens), -1), places)
        beams = places // self.tokens.shape[-1]
        return tokens, along(self.first, beams) + places - beams * self.tokens.shape[-1]

    def scores(self, log_probs: Float[Array, "batch beams vocab"]) -> Float[Array, "batch beams children"]:
        """The scores at the tokens of every beam; the score at token 0, where there is none."""
        return along(log_probs, jnp.maximum(self.tokens, 0), axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceCatalogue:
    """The sequences that may be generated for a batch. A state is a node of the trie; the root is 0."""

    trie: DeviceTrie  # the trie
    alive: tuple[tuple[Int[Array, " _"], ...], ...]  # by level from 1, by rule: one bit a node, 32 in each number
    rule_of_row: Int[HostOrDevice, " batch"]  # which rule each request has
    # by level from 1, nodes hidden from each request, sorted, padded with the root; None without any
    hidden: tuple[Int[HostOrDevice, "batch _"], ...] | None = None
    bias: Float[Array, " nodes_and_padding"] | None = None  # `ItemBias.by_node`
    groups: Int[Array, " nodes_and_padding"] | None = None  # `ItemGroups.by_node`

    @property
    def max_length(self) -> int:
        """The number of levels."""
        return len(self.trie.branching)

    @property
    def dead_state(self) -> Int[Array, ""]:
        """The state without children that stands for no prefix at all."""
        return self.trie.num_nodes

    @property
    def has_leaves(self) -> tuple[bool, ...]:
        """By level: whether a sequence can end with its token number `level + 1`."""
        return self.trie.has_leaves

    @property
    def is_ragged(self) -> bool:
        """Whether some sequence is shorter than another."""
        return any(self.has_leaves[:-1])

    def is_leaf(self, states: Int[Array, "batch beams"], *, level: int) -> Bool[Array, "batch beams"]:
        """Whether a sequence ends in each state of a level, or of one above it; true for the dead state, too."""
        return self.trie.is_leaf(states, level=level)

    def biased(
        self, scores: Float[Array, "batch beams children"], states: Int[Array, "batch beams"], legal: Children
    ) -> Float[Array, "batch beams children"]:
        """The scores of a step with the terms of items' biases."""
        if self.bias is None:
            return scores
        return scores + windows(self.bias, legal.first, size=scores.shape[-1]) - self.bias[states][..., None]


def device_catalogue(rules: BatchRules, device: Device = None, *, num_rows: int | None = None) -> DeviceCatalogue:
    """The catalogue of a batch on a device, a sharding, or JAX's default; tries and rules are moved there once.

    Arrays with a batch axis stay in NumPy: a compiled program moves them. There are `num_rows` rows, by default those
    of `rules`; rows beyond those are copies of the first.

    Raises:
        ValueError: a catalogue with more nodes than 32 bits can number.
    """
    given = rules.num_rows
    num_rows = num_rows or given
    assert num_rows is not None, "rules for any number of rows: pass num_rows"
    order = np.arange(num_rows)
    order[given:] = 0
    trie = rules.shared.trie
    num_nodes = trie.level_starts[-1] + max(padded_branching(trie))
    if num_nodes > LARGEST_NODE:
        raise ValueError(
            f"constraint_index has {num_nodes} nodes, expected at most {LARGEST_NODE}, which is what JAX's 32-bit "
            "integers number: backend='torch' has 64"
        )
    lives = [snapshot.alive or snapshot.items.all_alive for snapshot in rules.snapshots]
    lives += lives[:1] * (bucket(len(lives)) - len(lives))  # as many rules as a bucket has
    alive = tuple(zip(*(on_device(of_rule, device) for of_rule in lives), strict=True))
    rule_of_row = np.zeros(num_rows, np.int64) if rules.rule_of_row is None else rules.rule_of_row[order]
    return DeviceCatalogue(
        on_device(trie, device),
        alive,
        np.asarray(rule_of_row, np.int32),
        _hidden_nodes(rules, order),
        bias=None if rules.bias is None else on_device(rules.bias, device),
        groups=None if rules.groups is None else on_device(rules.groups, device),
    )


def children(states: Int[Array, "batch beams"], catalogue: DeviceCatalogue, *, level: int) -> Children:
    """The living children of every state of a level (level 0 is the root), in token order.

    In plain loops: `for b, k, c: child = first[b, k] + c; legal = c < count[b, k] and alive[child]; token =
    tokens[child]`.
    """
    trie, size = catalogue.trie, catalogue.trie.branching[level]
    first, count = trie.child_range(states, level=level)
    local = first - trie.level_starts[level + 1]
    alive = _are_alive(local, catalogue.alive[level], catalogue.rule_of_row, size=size)
    hidden = None if catalogue.hidden is None else catalogue.hidden[level]
    tokens = windows(trie.tokens, first, size=size).astype(jnp.int32) + trie.token_bases[level]
    flags = (alive & _seen(first, count, hidden, size=size))[..., None] >> jnp.arange(32, dtype=jnp.int32) & 1
    return Children(jnp.where(flags.reshape(*first.shape, -1)[..., :size] > 0, tokens, -1), first)


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
    first = jnp.arange(0, hit[0].size, hit.shape[-1], dtype=jnp.int32)
    chosen = first + hit.argmax(-1).astype(jnp.int32)
    moved = jnp.where(hit.any(-1), below.take(chosen)[1], catalogue.dead_state)
    return jnp.where(below.legal.any(-1), moved, states)


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
    """The flags of `size` nodes of a level from each first one on, by the bits of each row's rule."""
    starts, words = first >> 5, -(-size // 32) + 1
    if len(bits) > 1:
        length = len(bits[0])
        starts = jnp.clip(starts, 0, length - words) + rule_of_row[:, None] * length
    found = windows(bits[0] if len(bits) == 1 else jnp.concatenate(bits), starts, size=words)
    behind = (first & 31)[..., None]  # bits of the first word before the first node's
    low = lax.shift_right_logical(found[..., :-1], jnp.broadcast_to(behind, found[..., :-1].shape))
    return low | found[..., 1:] << 1 << (31 - behind)


def _words_at(places: Int[Array, "batch beams some"], *, size: int) -> Int[Array, "batch beams words"]:
    """Flags for `size` children, set at places; those out of range do not matter."""
    words = jnp.arange(-(-size // 32), dtype=jnp.int32)[:, None]
    places = places[..., None, :]
    flags = jnp.where(places >> 5 == words, 1 << (places & 31), 0)
    return lax.reduce(flags, jnp.int32(0), lax.bitwise_or, (flags.ndim - 1,))


def _hidden_nodes(rules: BatchRules, order: npt.NDArray[Any]) -> tuple[Any, ...] | None:
    """By level the nodes hidden from every row, all equally wide; None where none can be hidden."""
    if rules.excluded_ids is None:
        return None
    levels = rules.excluded or (None,) * rules.shared.max_length
    most = max((level.shape[1] for level in levels if level is not None), default=0)
    size = HIDDEN_NODES
    while size < most:
        size *= 4
    nothing = np.zeros((len(order), size), np.int32)
    return tuple(
        nothing if level is None else np.sort(padded(level.astype(np.int32), size, axis=1), axis=1)[order]
        for level in levels
    )
