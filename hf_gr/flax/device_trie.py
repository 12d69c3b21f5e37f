# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled trie on a device. Knows no rules and no beams.

A program is compiled for shapes, so nothing that changes with a catalogue's content is a shape: arrays are padded to
buckets, and numbers of nodes are arrays. Only the levels, their (bucketed) branching and whether a sequence can end
there are static.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Int, UInt8

from hf_gr.catalogue.fanout import Fanout, Longs
from hf_gr.catalogue.segment import Liveness
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import Trie

from .arrays import Device, at, static
from .buckets import bucket, padded

STEPS = 8  # sizes of a compiled catalogue's arrays, and of its branching, per doubling: at most a ninth is left empty
ADDED_NODES, ADDED_CHILDREN = 1024, 16  # what additions have room for before another program is compiled
CHILDREN = 4  # the least branching that a program is compiled for
PARENTS = 2**14  # a level of so many nodes has all of its offsets on the device: reading one is no search
SMALLEST = 64  # entries of a compiled catalogue's arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceTrie:
    """A segment's trie on a device; the fields are those of `hf_gr.catalogue.trie.Trie` and its fanouts, padded.

    Attributes:
        tokens: at least as many entries as the largest branching follow the last.
        offsets: by level.
        exceptions: by level, the number of the level's nodes after the last; None where all offsets are there.
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

    def child_range(
        self, nodes: Int[Array, "*shape"], *, level: int
    ) -> tuple[Int[Array, "*shape"], Int[Array, "*shape"]]:
        """The first child of every node and the number of them, which is 0 for what is not a node of this level."""
        start, end = self.level_starts[level], self.level_starts[level + 1]
        local = nodes - start
        is_here = (local >= 0) & (nodes < end)
        local = jnp.where(is_here, local, 0)
        offsets, exceptions = self.offsets[level], self.exceptions[level]
        if exceptions is None:
            first, last = at(offsets, local), at(offsets, local + 1)
            return first + end, jnp.where(is_here, last - first, 0)
        before = jnp.searchsorted(exceptions, local.astype(exceptions.dtype)).astype(jnp.int32)
        through = before + (at(exceptions, before) == local)
        shift, shift_through = at(offsets, before), at(offsets, through)
        return local + shift + end, jnp.where(is_here, 1 + shift_through - shift, 0)

    def is_childless(self, nodes: Int[Array, "*shape"], *, level: int) -> Bool[Array, "*shape"]:
        """Whether nodes have no children, whatever is known of the level."""
        if level >= len(self.branching):
            return jnp.ones_like(nodes, dtype=bool)
        return self.child_range(nodes, level=level)[1] == 0


# Keyed by what was moved, and kept while that lives: views of one index share its arrays on the device, too.
_MOVED: WeakKeyDictionary[Any, dict[Device, Any]] = WeakKeyDictionary()


def on_device(trie: Trie, device: Device) -> DeviceTrie:
    """What was compiled on a device; moved there once, for as long as it lives."""
    return _moved(trie, device, _move_base)


def added_on_device(trie: Trie, snapshot: Snapshot, device: Device) -> tuple[DeviceTrie, Int[Array, " added_nodes"]]:
    """What was added to a snapshot on a device, with its twins; moved there once, for as long as it lives."""
    return _moved(trie, device, lambda trie, device: _move_added(trie, snapshot, device))


def bits_on_device(alive: Liveness, device: Device, *, is_base: bool) -> tuple[UInt8[Array, " _"], ...]:
    """The bits of a rule on a device, by level from 1; moved there once, for as long as the rule lives."""
    return _moved(alive, device, lambda alive, device: _move_bits(alive, device, is_base=is_base))


@lru_cache
def nothing_added(
    has_leaves: tuple[bool, ...], device: Device
) -> tuple[DeviceTrie, Int[Array, " added_nodes"], UInt8[Array, " _"]]:
    """The root alone, in the form of a few additions; with its twin, and the bits of a level."""
    num_levels = len(has_leaves)
    trie = _placed(
        device,
        tokens=np.zeros(ADDED_NODES + ADDED_CHILDREN, np.int32),
        offsets=(np.zeros(ADDED_NODES, np.int32),) * num_levels,
        exceptions=(None,) * num_levels,
        token_bases=np.zeros(num_levels, np.int32),
        level_starts=_up_to(np.array([0, 1], np.int32), num_levels + 2),
        branching=(ADDED_CHILDREN,) * num_levels,
        has_leaves=has_leaves,
    )
    dead = np.zeros(ADDED_NODES // 8, np.uint8)
    return trie, *jax.device_put((padded(np.zeros(1, np.int32), ADDED_NODES, -1), dead), device)


def _moved(what: Any, device: Device, move: Callable[[Any, Device], Any]) -> Any:
    on_devices = _MOVED.setdefault(what, {})
    if device not in on_devices:
        on_devices[device] = move(what, device)
    return on_devices[device]


def _placed(device: Device, *, branching: tuple[int, ...], has_leaves: tuple[bool, ...], **arrays: Any) -> DeviceTrie:
    """A trie of NumPy arrays on a device."""
    return DeviceTrie(**jax.device_put(arrays, device), branching=branching, has_leaves=has_leaves)


def _move_base(trie: Trie, device: Device) -> DeviceTrie:
    branching = tuple(bucket(width, least=CHILDREN, steps=STEPS) for width in trie.branching)
    fanouts = [
        Fanout.from_offsets(_all_offsets(fanout)) if fanout.num_parents <= PARENTS else fanout
        for fanout in trie.fanouts
    ]

    def filled(array: npt.NDArray[Any], fill: Any) -> Any:
        return padded(array, bucket(len(array), least=SMALLEST, steps=STEPS), fill)

    return _placed(
        device,
        tokens=padded(trie.tokens, bucket(trie.level_starts[-1] + max(branching), least=SMALLEST, steps=STEPS)),
        offsets=tuple(filled(fanout.offsets, fanout.offsets[-1]) for fanout in fanouts),
        exceptions=tuple(
            None if fanout.exceptions is None else filled(fanout.exceptions, fanout.num_parents) for fanout in fanouts
        ),
        token_bases=np.array(trie.token_bases, np.int32),
        level_starts=np.array(trie.level_starts, np.int32),
        branching=branching,
        has_leaves=trie.has_leaves,
    )


def _move_added(trie: Trie, snapshot: Snapshot, device: Device) -> tuple[DeviceTrie, Array]:
    """What was added, in the same form for any number of levels and items: with all offsets, in 32 bits."""
    assert snapshot.twins is not None
    base, num_levels, missing = snapshot.base.segment.trie, snapshot.max_length, snapshot.max_length - trie.max_length
    num_nodes = bucket(trie.level_starts[-1], least=ADDED_NODES)
    branching = tuple(bucket(width, least=ADDED_CHILDREN) for width in trie.branching) + (ADDED_CHILDREN,) * missing
    offsets = [_all_offsets(fanout).astype(np.int32) for fanout in trie.fanouts]
    offsets += [np.zeros(1, np.int32)] * missing
    added = _placed(
        device,
        tokens=padded(trie.tokens.astype(np.int32), num_nodes + max(branching)),
        offsets=tuple(_up_to(of, bucket(len(of), least=ADDED_NODES)) for of in offsets),
        exceptions=(None,) * num_levels,
        token_bases=padded(np.array(trie.token_bases, np.int32), num_levels),
        level_starts=_up_to(np.array(trie.level_starts, np.int32), num_levels + 2),
        branching=branching,
        # Where the base has some, so that the first addition needs no other program.
        has_leaves=tuple(any(flags) for flags in zip_longest(trie.has_leaves, base.has_leaves, fillvalue=False)),
    )
    return added, jax.device_put(padded(snapshot.twins.astype(np.int32), num_nodes, -1), device)


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
