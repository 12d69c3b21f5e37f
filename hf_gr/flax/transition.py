# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One trie step. Knows no beams and no model.

Source: STATIC, algorithm 2 (the vectorized node transition kernel), on a trie whose children are contiguous. What may
change while it serves is not in the trie: one bit a node says what is alive, a few nodes a row are hidden, and what
was added is a second, small trie beside the first.

A program is compiled for shapes, so what changes with a catalogue's content is no shape: arrays are filled up to
buckets, numbers of nodes are arrays, and every catalogue has bits and a second trie, all of them set and empty if need
be. Only the levels, their (bucketed) branching and whether a sequence can end there are static.

Axes: B batch, K beams, C children: the largest branching of the level, a static shape; E hidden nodes; U rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float, Int, Integer, UInt8

from hf_gr.catalogue.fanout import Fanout, Longs
from hf_gr.catalogue.segment import Liveness
from hf_gr.catalogue.snapshot import BatchRules, Snapshot
from hf_gr.catalogue.trie import Trie

from .buckets import bucket, padded

STEPS = 8  # sizes of a compiled catalogue's arrays, and of its branching, per doubling: at most a ninth is left empty
ADDED_NODES, ADDED_CHILDREN = 1024, 16  # what additions have room for before another program is compiled
HIDDEN_NODES = 16  # of a row: so many, or 4, 16, ... times as many
COMPARED = 32  # hidden nodes of a row, at most, that are compared one by one; more are searched (measured on a CPU)
CHILDREN = 4  # the least branching that a program is compiled for
PARENTS = 2**14  # a level of so many nodes has all of its offsets on the device: reading one is no search
SMALLEST = 64  # entries of a compiled catalogue's arrays
LARGEST_NODE = 2**31 - 2**16  # of both segments; the rest is for what is padded

# Where arrays live: a device, a sharding over several, or None for JAX's own choice.
Device = Any


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of a program, not of its arguments."""
    return field(metadata={"static": True}, **kwargs)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceTrie:
    """A segment's trie on a device; the fields are those of `hf_gr.catalogue.trie.Trie` and its fanouts, filled up.

    Attributes:
        tokens: behind the last are at least as many entries as the largest branching.
        offsets: by level.
        exceptions: by level, the number of the level's nodes behind the last; None where all offsets are there.
        token_bases: what to add to the tokens of level `l + 1`.
        level_starts: the first node of every level, then the number of nodes.
        branching: static.
        has_leaves: static.
    """

    tokens: Int[Array, " nodes_and_padding"]
    offsets: tuple[Int[Array, " _"], ...]
    exceptions: tuple[Int[Array, " _"] | None, ...]
    token_bases: Int[Array, " levels"]
    level_starts: Int[Array, " levels_and_two"]
    branching: tuple[int, ...] = static()
    has_leaves: tuple[bool, ...] = static()

    @property
    def num_nodes(self) -> Int[Array, ""]:
        """All nodes, the root included."""
        return self.level_starts[-1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DevicePart:
    """A segment as the requests of a batch see it.

    Attributes:
        trie: the trie.
        alive: by level from 1, by rule: one bit a node.
        hidden: by level from 1, nodes that a request need not enter, ascending, the root for what is missing; None
            without any.
    """

    trie: DeviceTrie
    alive: tuple[tuple[UInt8[Array, " _"], ...], ...]
    hidden: tuple[Int[Array, "batch _"], ...] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceCatalogue:
    """What a batch may be answered with.

    A state is a node of `added`, plus the number of nodes of `base`, wherever that one has the prefix, else a node of
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
    rule_of_row: Int[Array, " batch"]

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Children:
    """The children of every state, padded to the largest branching of the level.

    Their states are not stored: only those of the few that are kept are asked for (`take`). Nor is it stored twice
    which of them are legal: a program is compiled the faster, the fewer arrays it makes.

    Attributes:
        tokens: the token that leads to each child; -1 where there is no such child, or it is not alive.
        first: the state of each beam's first child.
        first_added: the state of its first child among those that come after: those of what was added.
        num_old: children before those (static).
    """

    tokens: Int[Array, "batch beams children"]
    first: Int[Array, "batch beams"]
    first_added: Int[Array, "batch beams"] | None = None
    num_old: int = static(default=0)

    @property
    def legal(self) -> Bool[Array, "batch beams children"]:
        """Whether there is such a child, and it is alive."""
        return self.tokens >= 0

    def take(
        self, beams: Int[Array, "batch chosen"], children: Int[Array, "batch chosen"]
    ) -> tuple[Int[Array, "batch chosen"], Int[Array, "batch chosen"]]:
        """Tokens and states of chosen children of chosen beams; states of no meaning where there is no such child."""
        _, num_beams, num_children = self.tokens.shape
        tokens = along(self.tokens.reshape(len(self.tokens), -1), beams * num_children + children)
        if self.first_added is None:
            return tokens, along(self.first, beams) + children
        first = jnp.concatenate([self.first, self.first_added - self.num_old], axis=1)
        return tokens, along(first, beams + num_beams * (children >= self.num_old)) + children

    def scores(self, log_probs: Float[Array, "batch beams vocab"]) -> Float[Array, "batch beams children"]:
        """What stands at the tokens of every beam; what stands at token 0, where there is none."""
        return along(log_probs, jnp.maximum(self.tokens, 0), axis=-1)


def along(values: Array, places: Array, *, axis: int = 1) -> Array:
    """`jnp.take_along_axis` of places that are within range, which saves the checks."""
    return jnp.take_along_axis(values, places, axis=axis, mode="promise_in_bounds")


# By what was moved, so that views of one index share its arrays on the device, too; for as long as that lives.
_MOVED: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def device_catalogue(rules: BatchRules, device: Device = None, *, num_rows: int | None = None) -> DeviceCatalogue:
    """The catalogue of a batch on a device; segments and rules are moved there once, as long as they live.

    Args:
        rules: the catalogue of every request.
        device: a device, a sharding over several devices, or None for the default device. What has a batch axis stays
            in NumPy: a compiled program moves it itself.
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
    tries = [part.segment.trie for part in rules.any.parts]
    num_levels = max(trie.max_length for trie in tries)
    num_nodes = sum(trie.level_starts[-1] + max(trie.branching) for trie in tries)
    if num_nodes > LARGEST_NODE:
        raise ValueError(
            f"constraint_index has {num_nodes} nodes, expected at most {LARGEST_NODE}, which is what JAX's 32-bit "
            "integers number: backend='torch' has 64"
        )
    hidden = _hidden_nodes(rules, order, num_levels)
    base = DevicePart(_kept(tries[0], device, _move_base), _bits(rules, 0, device), hidden[0])
    if rules.any.added is None:
        trie, twins, dead = _nothing_added(base.trie.has_leaves, device)
        bits = ((dead,) * bucket(len(rules.snapshots)),) * num_levels
    else:
        trie, twins = _kept(tries[1], device, lambda trie, device: _move_added(trie, rules.any, device))
        bits = _bits(rules, 1, device)
        bits += bits[:1] * (num_levels - len(bits))  # levels without nodes
    added = DevicePart(trie, bits, hidden[1])
    rule_of_row = np.zeros(num_rows, np.int64) if rules.rule_of_row is None else rules.rule_of_row[order]
    return DeviceCatalogue(base, added, twins, np.asarray(rule_of_row, np.int32))  # pyright: ignore


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
    return Children(
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
    tries = catalogue.base.trie, catalogue.added.trie
    return _is_childless(nodes, tries[0], level) & _is_childless(in_added, tries[1], level)


def over_vocabulary(
    scores: Float[Array, "batch beams children"], legal: Children, vocab_size: int
) -> Float[Array, "batch beams vocab"]:
    """The scores of legal children in their tokens' places, `-inf` everywhere else."""
    tokens = jnp.where(legal.legal, legal.tokens, vocab_size)  # behind the vocabulary, where it is dropped
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
    """The node of `added` and that of `base` for every state; no node at all where a segment lacks the prefix."""
    in_added = states - catalogue.base.trie.num_nodes
    is_added = (in_added >= 0) & (in_added < catalogue.added.trie.num_nodes)
    return in_added, jnp.where(is_added, _at(catalogue.twins, in_added), states)


def _part_children(
    nodes: Int[Array, "batch beams"], part: DevicePart, rule_of_row: Int[Array, " batch"], level: int
) -> Children:
    """The children of one segment's nodes."""
    trie = part.trie
    first, count = _child_range(nodes, trie, level)
    places = jnp.arange(trie.branching[level], dtype=jnp.int32)
    below = first[..., None] + places
    alive = _are_alive(below - trie.level_starts[level + 1], part.alive[level], rule_of_row)
    legal = (places < count[..., None]) & alive
    if part.hidden is not None:
        legal = legal & ~_is_among(below, part.hidden[level])
    tokens = _at(trie.tokens, below) + trie.token_bases[level]
    return Children(tokens=jnp.where(legal, tokens, -1), first=first)


def _child_range(
    nodes: Int[Array, "batch beams"], trie: DeviceTrie, level: int
) -> tuple[Int[Array, "batch beams"], Int[Array, "batch beams"]]:
    """The first child of every node and the number of them, which is 0 for what is no node of this level."""
    start, end = trie.level_starts[level], trie.level_starts[level + 1]
    local = nodes - start
    is_here = (local >= 0) & (nodes < end)
    local = jnp.where(is_here, local, 0)
    offsets, exceptions = trie.offsets[level], trie.exceptions[level]
    if exceptions is None:
        first, last = _at(offsets, local), _at(offsets, local + 1)
        return first + end, jnp.where(is_here, last - first, 0)
    before = jnp.searchsorted(exceptions, local.astype(exceptions.dtype)).astype(jnp.int32)
    through = before + (_at(exceptions, before) == local)
    shift, behind = _at(offsets, before), _at(offsets, through)
    return local + shift + end, jnp.where(is_here, 1 + behind - shift, 0)


def _is_childless(nodes: Int[Array, "batch beams"], trie: DeviceTrie, level: int) -> Bool[Array, "batch beams"]:
    """Whether nodes have no children in a segment, of whatever it knows of the level."""
    if level >= len(trie.branching):
        return jnp.ones_like(nodes, dtype=bool)
    return _child_range(nodes, trie, level)[1] == 0


def _are_alive(
    nodes: Int[Array, "batch beams children"], bits: Sequence[Array], rule_of_row: Int[Array, " batch"]
) -> Bool[Array, "batch beams children"]:
    """The bits of nodes, numbered within their level."""
    places = nodes >> 3
    if len(bits) > 1:  # one rule behind the other
        places = jnp.minimum(places, len(bits[0]) - 1) + rule_of_row[:, None, None] * len(bits[0])
    found = _at(jnp.concatenate(bits) if len(bits) > 1 else bits[0], places)
    return (found >> (nodes & 7) & 1).astype(bool)


def _is_among(
    nodes: Int[Array, "batch beams children"], hidden: Int[Array, "batch hidden"]
) -> Bool[Array, "batch beams children"]:
    """Whether each node is one of those of its row, which ascend."""
    if hidden.shape[1] <= COMPARED:
        return (nodes[..., None] == hidden[:, None, None]).any(-1)
    places = jax.vmap(jnp.searchsorted)(hidden, nodes)
    return jax.vmap(_at)(hidden, places) == nodes


def _at(values: Integer[Array, " _"], places: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The values at places as 32-bit integers; the first or the last one for places out of range."""
    return values.at[places].get(mode="clip", wrap_negative_indices=False).astype(jnp.int32)


def _bits(rules: BatchRules, number: int, device: Device) -> tuple[tuple[Array, ...], ...]:
    """By level and rule, the bits of one segment; as many rules as a bucket has, the first one several times."""
    segment = rules.any.parts[number].segment
    lives = [snapshot.parts[number].alive or segment.all_alive for snapshot in rules.snapshots]
    moved = [_kept(live, device, lambda live, device: _move_bits(live, device, is_base=not number)) for live in lives]
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


def _kept(of: Any, device: Device, make: Callable[[Any, Device], Any]) -> Any:
    """What is made of something for a device, once."""
    on_devices = _MOVED.setdefault(of, {})
    if device not in on_devices:
        on_devices[device] = make(of, device)
    return on_devices[device]


def _move_base(trie: Trie, device: Device) -> DeviceTrie:
    branching = tuple(bucket(width, least=CHILDREN, steps=STEPS) for width in trie.branching)
    fanouts = [
        Fanout.from_offsets(_all_offsets(fanout)) if fanout.num_parents <= PARENTS else fanout
        for fanout in trie.fanouts
    ]

    def filled(array: npt.NDArray[Any], fill: Any) -> Any:
        return padded(array, bucket(len(array), least=SMALLEST, steps=STEPS), fill)

    made = DeviceTrie(
        tokens=padded(trie.tokens, bucket(trie.level_starts[-1] + max(branching), least=SMALLEST, steps=STEPS)),
        offsets=tuple(filled(fanout.offsets, fanout.offsets[-1]) for fanout in fanouts),
        exceptions=tuple(
            None if fanout.exceptions is None else filled(fanout.exceptions, fanout.num_parents) for fanout in fanouts
        ),
        token_bases=np.array(trie.token_bases, np.int32),  # pyright: ignore
        level_starts=np.array(trie.level_starts, np.int32),  # pyright: ignore
        branching=branching,
        has_leaves=trie.has_leaves,
    )
    return jax.device_put(made, device)


def _move_added(trie: Trie, snapshot: Snapshot, device: Device) -> tuple[DeviceTrie, Array]:
    """What was added, in the same form for every number of levels and items: with all offsets, of 32 bits."""
    assert snapshot.twins is not None
    base, num_levels, behind = snapshot.base.segment.trie, snapshot.max_length, snapshot.max_length - trie.max_length
    num_nodes = bucket(trie.level_starts[-1], least=ADDED_NODES)
    branching = tuple(bucket(width, least=ADDED_CHILDREN) for width in trie.branching) + (ADDED_CHILDREN,) * behind
    offsets = [_all_offsets(fanout).astype(np.int32) for fanout in trie.fanouts]
    offsets += [np.zeros(1, np.int32)] * behind
    made = DeviceTrie(
        tokens=padded(trie.tokens.astype(np.int32), num_nodes + max(branching)),
        offsets=tuple(_up_to(of, bucket(len(of), least=ADDED_NODES)) for of in offsets),
        exceptions=(None,) * num_levels,
        token_bases=padded(np.array(trie.token_bases, np.int32), num_levels),
        level_starts=_up_to(np.array(trie.level_starts, np.int32), num_levels + 2),
        branching=branching,
        # Where the base has some, so that the first addition needs no other program.
        has_leaves=tuple(any(flags) for flags in zip_longest(trie.has_leaves, base.has_leaves, fillvalue=False)),
    )
    return jax.device_put((made, padded(snapshot.twins.astype(np.int32), num_nodes, -1)), device)


@lru_cache
def _nothing_added(has_leaves: tuple[bool, ...], device: Device) -> tuple[DeviceTrie, Array, Array]:
    """The root alone, in the form of a few additions; with its twin, and the bits of a level."""
    num_levels = len(has_leaves)
    made = DeviceTrie(
        tokens=np.zeros(ADDED_NODES + ADDED_CHILDREN, np.int32),  # pyright: ignore
        offsets=(np.zeros(ADDED_NODES, np.int32),) * num_levels,  # pyright: ignore
        exceptions=(None,) * num_levels,
        token_bases=np.zeros(num_levels, np.int32),  # pyright: ignore
        level_starts=_up_to(np.array([0, 1], np.int32), num_levels + 2),
        branching=(ADDED_CHILDREN,) * num_levels,
        has_leaves=has_leaves,
    )
    dead = np.zeros(ADDED_NODES // 8, np.uint8)
    return jax.device_put((made, padded(np.zeros(1, np.int32), ADDED_NODES, -1), dead), device)


def _move_bits(alive: Liveness, device: Device, *, is_base: bool) -> tuple[Array, ...]:
    least, steps = (SMALLEST, STEPS) if is_base else (ADDED_NODES // 8, 1)
    by_id: dict[int, Array] = {}  # levels without branches share one array
    for bits in alive.nodes:
        if id(bits) not in by_id:
            by_id[id(bits)] = jax.device_put(padded(bits, bucket(len(bits), least=least, steps=steps)), device)
    return tuple(by_id[id(bits)] for bits in alive.nodes)


def _all_offsets(fanout: Fanout) -> Longs:
    """The first child of every parent, and the number of children."""
    first, _ = fanout.ranges(np.arange(fanout.num_parents))
    return np.append(first, fanout.num_children)


def _up_to(ascending: npt.NDArray[Any], size: int) -> Any:
    """Ascending numbers, the last one repeated."""
    return padded(ascending, size, ascending[-1])
