# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled trie on a device. Knows no beams.

A program is compiled for shapes, so nothing that changes with a catalogue's content is a shape: arrays are padded to
buckets, and numbers of nodes are arrays. Only the levels, their (bucketed) branching, the form of their offsets and
whether a sequence can end there are static. Nothing is searched: a program without loops compiles faster, too.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Bool, Int, Integer

from hf_gr.catalogue.fanout import Fanout
from hf_gr.catalogue.item_values import ItemBias, ItemGroups
from hf_gr.catalogue.items import Liveness
from hf_gr.catalogue.trie import Trie
from hf_gr.core.plan import static
from hf_gr.core.widths import bucket

from .arrays import Device, padded, windows

# Sizes that programs are compiled for.
STEPS = 8  # sizes of a compiled catalogue's arrays, and of its branching, per doubling: at most a ninth is left empty
CHILDREN = 4  # the least branching that a program is compiled for
PARENTS = 2**14  # a level of so many nodes has all of its offsets on the device: one window each
SMALLEST = 64  # entries of a compiled catalogue's arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceTrie:
    """A trie on a device; the fields are those of `hf_gr.catalogue.trie.Trie` and its fanouts, padded."""

    tokens: Int[Array, " nodes_and_padding"]  # at least as many entries as the largest branching follow the last
    offsets: tuple[Int[Array, " _"] | None, ...]  # by level; None where every node has one child
    # by level, for every 32 nodes: a bit for each, set for those with no child or several, then how many of those come
    # before. None where all offsets are there, or none.
    exceptions: tuple[Int[Array, " _"] | None, ...]
    token_bases: Int[Array, " levels"]  # what to add to the tokens of level `l + 1`
    level_starts: Int[Array, " levels_and_two"]  # the first node of every level, then the number of nodes
    branching: tuple[int, ...] = static()  # static
    has_leaves: tuple[bool, ...] = static()  # static

    @property
    def num_nodes(self) -> Int[Array, ""]:
        """All nodes, the root included."""
        return self.level_starts[-1]

    def child_range(
        self, nodes: Int[Array, "*shape"], *, level: int
    ) -> tuple[Int[Array, "*shape"], Int[Array, "*shape"]]:
        """The first child of every node and the number of children, which is 0 for nodes of other levels."""
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

    def is_leaf(self, nodes: Int[Array, "*shape"], *, level: int) -> Bool[Array, "*shape"]:
        """Whether nodes of a level have no children; so do those of others."""
        if level >= len(self.branching):
            return jnp.ones_like(nodes, dtype=bool)
        return self.child_range(nodes, level=level)[1] == 0


def _pairs(values: Integer[Array, " _"], places: Int[Array, "*shape"]) -> tuple[Array, Array]:
    """The values at places and after them, as 32-bit integers."""
    pairs = windows(values, places, size=2).astype(jnp.int32)
    return pairs[..., 0], pairs[..., 1]


# Keyed by what was moved, and kept while that lives: views of one index share its arrays on the device, too.
_MOVED: WeakKeyDictionary[Any, dict[Device, Any]] = WeakKeyDictionary()


def on_device(what: Trie | Liveness | ItemBias | ItemGroups, device: Device) -> Any:
    """A trie, the bits of a rule by level from 1, or numbers by node; moved there once, for as long as they live."""
    on_devices = _MOVED.setdefault(what, {})
    if device not in on_devices:
        move = {Trie: _move_trie, Liveness: _move_bits}.get(type(what), _move_numbers)
        on_devices[device] = move(what, device)
    return on_devices[device]


def _move_numbers(values: ItemBias | ItemGroups, device: Device) -> Array:
    return jax.device_put(padded(values.by_node[: values.trie.level_starts[-1]], _num_tokens(values.trie)), device)


def _num_tokens(trie: Trie) -> int:
    """Entries of an array by node, with padding."""
    return bucket(trie.level_starts[-1] + max(padded_branching(trie)), least=SMALLEST, steps=STEPS)


def _move_trie(trie: Trie, device: Device) -> DeviceTrie:
    branching = padded_branching(trie)
    forms = [_form(fanout) for fanout in trie.fanouts]

    def filled(array: npt.NDArray[Any] | None) -> Any:
        if array is None:
            return None
        return padded(array, bucket(len(array) + 1, least=SMALLEST, steps=STEPS), array[-1])

    arrays = {
        "tokens": padded(trie.tokens, _num_tokens(trie)),
        "offsets": tuple(filled(offsets) for offsets, _ in forms),
        "exceptions": tuple(filled(exceptions) for _, exceptions in forms),
        "token_bases": np.array(trie.token_bases, np.int32),
        "level_starts": np.array(trie.level_starts, np.int32),
    }
    return DeviceTrie(**jax.device_put(arrays, device), branching=branching, has_leaves=trie.has_leaves)


def padded_branching(trie: Trie) -> tuple[int, ...]:
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
        if fanout.exceptions is None:
            return fanout.offsets, None
        first, _ = fanout.ranges(np.arange(fanout.num_parents))
        return Fanout.from_offsets(np.append(first, fanout.num_children)).offsets, None
    return fanout.offsets, exception_bits(fanout.exceptions, fanout.num_parents)


def exception_bits(exceptions: npt.NDArray[Any], num_parents: int) -> npt.NDArray[np.int32]:
    """For every 32 parents a bit each, set for exceptions, then how many exceptions come before."""
    flags = np.zeros(-(-num_parents // 32) * 32, bool)
    flags[exceptions] = True
    bits = np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)
    counts = flags.reshape(-1, 32).sum(-1, dtype=np.int32)
    return np.stack([bits, np.cumsum(counts, dtype=np.int32) - counts], axis=1).ravel()


def _move_bits(alive: Liveness, device: Device) -> tuple[Array, ...]:
    behind = max(padded_branching(alive.of.trie)) // 8 + 8  # bytes that a window may read past the last node's
    by_id: dict[int, Array] = {}  # levels without branches share one array
    for bits in alive.nodes:
        if id(bits) not in by_id:
            size = bucket(-(-(len(bits) + behind) // 4), least=SMALLEST, steps=STEPS)
            words = padded(bits, 4 * size).view("<u4").astype(np.uint32).view(np.int32)
            by_id[id(bits)] = jax.device_put(words, device)
    return tuple(by_id[id(bits)] for bits in alive.nodes)
