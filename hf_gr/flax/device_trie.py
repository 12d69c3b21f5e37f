# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled trie on a device, and what was added to it. Knows no beams.

A program is compiled for shapes, so nothing that changes with a catalogue's content is a shape: arrays are padded to
buckets, and numbers of nodes are arrays. Only the levels, their (bucketed) branching, the form of their offsets and
whether a sequence can end there are static. Nothing is searched: a program without loops compiles faster, too.
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
from jax import lax
from jaxtyping import Array, Bool, Int, Integer

from hf_gr.catalogue.buckets import bucket
from hf_gr.catalogue.fanout import Fanout, Longs
from hf_gr.catalogue.segment import Liveness
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import Trie

from .arrays import Device, static, windows
from .buckets import padded

# Sizes that programs are compiled for.
STEPS = 8  # sizes of a compiled catalogue's arrays, and of its branching, per doubling: at most a ninth is left empty
ADDED_NODES, ADDED_CHILDREN = 1024, 16  # what additions have room for before another program is compiled
CHILDREN = 4  # the least branching that a program is compiled for
PARENTS = 2**14  # a level of so many nodes has all of its offsets on the device: one window each
SMALLEST = 64  # entries of a compiled catalogue's arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceTrie:
    """A segment's trie on a device; the fields are those of `hf_gr.catalogue.trie.Trie` and its fanouts, padded.

    Attributes:
        tokens: at least as many entries as the largest branching follow the last.
        offsets: by level; None where every node has one child.
        exceptions: by level, for every 32 nodes: a bit for each, set for those with no child or several, then how
            many of those come before. None where all offsets are there, or none.
        token_bases: what to add to the tokens of level `l + 1`.
        level_starts: the first node of every level, then the number of nodes.
        branching: static.
        has_leaves: static.
    """

    tokens: Int[Array, " nodes_and_padding"]
    offsets: tuple[Int[Array, " _"] | None, ...]
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
        if offsets is None:
            return local + end, is_here.astype(jnp.int32)
        if exceptions is None:
            first, last = _pairs(offsets, local)
            return first + end, jnp.where(is_here, last - first, 0)
        bits, before = _pairs(exceptions, local >> 5 << 1)
        own = local & 31
        before = before + lax.population_count(bits & ((1 << own) - 1))
        is_exception = bits >> own & 1
        shift, shift_through = _pairs(offsets, before)
        return local + shift + end, jnp.where(is_here, 1 + is_exception * (shift_through - shift), 0)

    def is_childless(self, nodes: Int[Array, "*shape"], *, level: int) -> Bool[Array, "*shape"]:
        """Whether nodes have no children, whatever is known of the level."""
        if level >= len(self.branching):
            return jnp.ones_like(nodes, dtype=bool)
        return self.child_range(nodes, level=level)[1] == 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceAdditions:
    """What was added to a catalogue, on a device: a small trie, without levels.

    Attributes:
        twins: for every node the node of the catalogue with the same prefix, or -1; then padding.
        ranges: for every node its first child, and the number of its children; at least one of padding has none.
        branching: static.
        has_leaves: static.
    """

    twins: Int[Array, " nodes_and_padding"]
    ranges: Int[Array, " twice_nodes"]
    branching: tuple[int, ...] = static()
    has_leaves: tuple[bool, ...] = static()

    @property
    def room(self) -> int:
        """Nodes, those of padding included."""
        return len(self.ranges) // 2

    def child_range(self, nodes: Int[Array, "*shape"]) -> tuple[Int[Array, "*shape"], Int[Array, "*shape"]]:
        """The first child of every node, and the number of them; of what is no node there are none."""
        first, count = _pairs(self.ranges, 2 * nodes)
        return first, jnp.where(nodes >= 0, count, 0)


def _pairs(values: Integer[Array, " _"], places: Int[Array, "*shape"]) -> tuple[Array, Array]:
    """The values at places and after them, as 32-bit integers."""
    pairs = windows(values, places, size=2).astype(jnp.int32)
    return pairs[..., 0], pairs[..., 1]


# Keyed by what was moved, and kept while that lives: views of one index share its arrays on the device, too.
_MOVED: WeakKeyDictionary[Any, dict[Device, Any]] = WeakKeyDictionary()


def on_device(trie: Trie, device: Device) -> DeviceTrie:
    """What was compiled on a device; moved there once, for as long as it lives."""
    return _moved(trie, device, _move_base)


def bits_on_device(alive: Liveness, device: Device) -> tuple[Int[Array, " _"], ...]:
    """The bits of a rule on a device, by level from 1, in 32-bit numbers; moved there once, as long as it lives."""
    return _moved(alive, device, _move_bits)


def additions_on_device(trie: Trie, snapshot: Snapshot, device: Device) -> DeviceAdditions:
    """What was added to a snapshot on a device; moved there once, for as long as it lives."""
    return _moved(trie, device, lambda trie, device: _move_additions(trie, snapshot, device))


def living_tokens_on_device(alive: Liveness, device: Device) -> Int[Array, " nodes_and_padding"]:
    """The token of every added node that is alive, else -1; moved there once, for as long as the rule lives."""
    return _moved(alive, device, _move_living_tokens)


@lru_cache
def nothing_added(
    has_leaves: tuple[bool, ...], device: Device
) -> tuple[DeviceAdditions, Int[Array, " nodes_and_padding"]]:
    """The root alone, in the form of a few additions, and its (only) token."""
    size = ADDED_NODES + ADDED_CHILDREN
    twins, tokens, ranges = (
        np.full(size, -1, np.int32),
        np.full(size, -1, np.int32),
        np.zeros(2 * ADDED_NODES, np.int32),
    )
    twins[0] = 0
    twins, tokens, ranges = jax.device_put((twins, tokens, ranges), device)
    return DeviceAdditions(twins, ranges, branching=(ADDED_CHILDREN,) * len(has_leaves), has_leaves=has_leaves), tokens


def room_for_additions(num_nodes: int) -> int:
    """Nodes that a program is compiled for."""
    return bucket(num_nodes + 1, least=ADDED_NODES)  # and one without children


def _moved(what: Any, device: Device, move: Callable[[Any, Device], Any]) -> Any:
    on_devices = _MOVED.setdefault(what, {})
    if device not in on_devices:
        on_devices[device] = move(what, device)
    return on_devices[device]


def _move_base(trie: Trie, device: Device) -> DeviceTrie:
    branching = base_branching(trie)
    forms = [_form(fanout) for fanout in trie.fanouts]

    def filled(array: npt.NDArray[Any] | None) -> Any:
        return None if array is None else _up_to(array, bucket(len(array) + 1, least=SMALLEST, steps=STEPS))

    arrays = {
        "tokens": padded(trie.tokens, bucket(trie.level_starts[-1] + max(branching), least=SMALLEST, steps=STEPS)),
        "offsets": tuple(filled(offsets) for offsets, _ in forms),
        "exceptions": tuple(filled(exceptions) for _, exceptions in forms),
        "token_bases": np.array(trie.token_bases, np.int32),
        "level_starts": np.array(trie.level_starts, np.int32),
    }
    return DeviceTrie(**jax.device_put(arrays, device), branching=branching, has_leaves=trie.has_leaves)


def base_branching(trie: Trie) -> tuple[int, ...]:
    """By level, the children of a node that a program is compiled for."""
    return tuple(
        1 if _is_straight(fanout) else bucket(width, least=CHILDREN, steps=STEPS)
        for fanout, width in zip(trie.fanouts, trie.branching, strict=True)
    )


def _is_straight(fanout: Fanout) -> bool:
    """Whether every node of a large level has one child."""
    return fanout.num_parents > PARENTS and fanout.exceptions is not None and not len(fanout.exceptions)


def _form(fanout: Fanout) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
    """Offsets and exceptions as `DeviceTrie` has them."""
    if _is_straight(fanout):
        return None, None
    if fanout.exceptions is None or fanout.num_parents <= PARENTS:
        offsets = fanout.offsets if fanout.exceptions is None else Fanout.from_offsets(_all_offsets(fanout)).offsets
        return offsets, None
    return fanout.offsets, exception_bits(fanout.exceptions, fanout.num_parents)


def exception_bits(exceptions: npt.NDArray[Any], num_parents: int) -> npt.NDArray[np.int32]:
    """For every 32 parents a bit each, set for exceptions, then how many exceptions come before."""
    flags = np.zeros(-(-num_parents // 32) * 32, bool)
    flags[exceptions] = True
    bits = np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)
    counts = flags.reshape(-1, 32).sum(-1, dtype=np.int32)
    return np.stack([bits, np.cumsum(counts, dtype=np.int32) - counts], axis=1).ravel()


def _move_additions(trie: Trie, snapshot: Snapshot, device: Device) -> DeviceAdditions:
    """What was added, in the same form for any number of levels and items."""
    assert snapshot.twins is not None
    base, missing = snapshot.base.segment.trie, snapshot.max_length - trie.max_length
    ranges = np.zeros((room_for_additions(trie.level_starts[-1]), 2), np.int32)
    for fanout, start, end in zip(trie.fanouts, trie.level_starts, trie.level_starts[1:], strict=False):
        offsets = _all_offsets(fanout)
        ranges[start:end] = np.stack([offsets[:-1] + end, np.diff(offsets)], axis=1)
    twins = padded(snapshot.twins.astype(np.int32), _room_for_windows(trie), -1)
    twins, ranges = jax.device_put((twins, ranges.ravel()), device)
    return DeviceAdditions(
        twins,
        ranges,
        branching=(*added_branching(trie), *[ADDED_CHILDREN] * missing),
        # Where the base has some, so that the first addition needs no other program.
        has_leaves=tuple(any(flags) for flags in zip_longest(trie.has_leaves, base.has_leaves, fillvalue=False)),
    )


def added_branching(trie: Trie) -> tuple[int, ...]:
    """By level, the added children of a node that a program is compiled for."""
    return tuple(bucket(width, least=ADDED_CHILDREN) for width in trie.branching)


def _room_for_windows(trie: Trie) -> int:
    """Entries for added nodes, with padding for the children of the last."""
    return room_for_additions(trie.level_starts[-1]) + max(added_branching(trie))


def _move_living_tokens(alive: Liveness, device: Device) -> Array:
    trie = alive.segment.trie
    starts = trie.level_starts
    tokens = np.full(_room_for_windows(trie), -1, np.int32)
    for level, bits in enumerate(alive.nodes):
        start, end = starts[level + 1 : level + 3]
        is_alive = np.unpackbits(bits, count=end - start, bitorder="little")
        tokens[start:end] = np.where(is_alive, trie.tokens[start:end].astype(np.int32) + trie.token_bases[level], -1)
    return jax.device_put(tokens, device)


def _move_bits(alive: Liveness, device: Device) -> tuple[Array, ...]:
    behind = max(base_branching(alive.segment.trie)) // 8 + 8  # bytes that a window may reach behind the last node's
    by_id: dict[int, Array] = {}  # levels without branches share one array
    for bits in alive.nodes:
        if id(bits) not in by_id:
            size = bucket(-(-(len(bits) + behind) // 4), least=SMALLEST, steps=STEPS)
            words = padded(bits, 4 * size).view("<u4").astype(np.uint32).view(np.int32)
            by_id[id(bits)] = jax.device_put(words, device)
    return tuple(by_id[id(bits)] for bits in alive.nodes)


def _all_offsets(fanout: Fanout) -> Longs:
    """The first child of every parent, and the number of children."""
    first, _ = fanout.ranges(np.arange(fanout.num_parents))
    return np.append(first, fanout.num_children)


def _up_to(ascending: npt.NDArray[Any], size: int) -> Any:
    """Numbers, the last one repeated."""
    return padded(ascending, size, ascending[-1])
