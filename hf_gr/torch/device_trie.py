# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled trie on a device, in every form that a step reads. Knows no rules and no beams.

The arrays by level are those of the host; they are moved once for each device. Another form is made from them on
the device on first use: `edges`, one search for a step from any level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from hf_gr.catalogue.fanout import Fanout, smallest_dtype
from hf_gr.catalogue.item_values import ItemBias, ItemGroups
from hf_gr.catalogue.items import Liveness
from hf_gr.catalogue.trie import Trie

from .ops import to_device

TOKEN_BITS = 32
TAKEN_ONE_BY_ONE = 8  # children of a node: more are read faster as one window (measured)


@dataclass(frozen=True)
class Level:
    """The nodes of a level, numbered within it, and their children, which are numbered over the whole trie.

    A child's number is an offset of its parent, or the parent's own and such an offset.
    """

    size: int
    own_and_next: Int[Tensor, "2"]  # to add to a node: its number within the level, and the next one's
    places: Int[Tensor, " children"]  # of the children of a node, as many as the largest has
    offsets: Int[Tensor, " _"]
    exceptions: Int[Tensor, " _"] | None
    token_base: int  # of the children's tokens
    is_chain: bool  # whether every node has one child

    @classmethod
    def of(cls, fanout: Fanout, start: int, token_base: int, device: torch.device) -> Level:
        """The level that starts with a node."""
        below = start + fanout.num_parents
        dtype = smallest_dtype(below + fanout.num_children)
        return cls(
            size=fanout.num_parents,
            own_and_next=torch.arange(-start, 2 - start, device=device),
            places=torch.arange(fanout.largest, device=device),
            offsets=to_device(fanout.offsets.astype(dtype) + dtype.type(below), device),
            exceptions=None if fanout.exceptions is None else to_device(fanout.exceptions.astype(dtype), device),
            token_base=token_base,
            is_chain=fanout.exceptions is not None and not len(fanout.exceptions),
        )


@dataclass(frozen=True)
class DeviceTrie:
    """`hf_gr.catalogue.trie.Trie` and its fanouts on a device; nodes are numbered as there."""

    tokens: Int[Tensor, " nodes_and_padding"]
    levels: tuple[Level, ...]
    level_starts: tuple[int, ...]
    has_leaves: tuple[bool, ...]
    has_bases: bool  # whether tokens of some level are stored less a base

    @property
    def num_nodes(self) -> int:
        """All nodes, the root included."""
        return self.level_starts[-1]

    def child_bounds(
        self, nodes: Int[Tensor, "*shape"], *, level: int
    ) -> tuple[Int[Tensor, "*shape 1"], Int[Tensor, "*shape 1"]]:
        """The first child of every node, and the one after its last: both equal for nodes of other levels."""
        of = self.levels[level]
        own_and_next = (nodes[..., None] + of.own_and_next).clamp(0, of.size)
        if of.exceptions is None:
            bounds = of.offsets.take(own_and_next).long()
        elif of.is_chain:
            bounds = own_and_next + of.offsets
        else:
            bounds = torch.searchsorted(of.exceptions, own_and_next.to(of.exceptions.dtype))
            bounds = own_and_next + of.offsets.take(bounds)
        return bounds[..., :1], bounds[..., 1:]

    def is_leaf(self, nodes: Int[Tensor, "*shape"], *, level: int) -> Bool[Tensor, "*shape"]:
        """Whether a sequence ends in each node of a level, or of one above it; true for the dead state, too."""
        if level >= len(self.levels):
            return torch.ones_like(nodes, dtype=torch.bool)
        first, after = self.child_bounds(nodes, level=level)
        return (first == after)[..., 0]

    @cached_property
    def edges(self) -> Int[Tensor, " edges"]:
        """By node from 1 its parent and token in one ascending number: 8 bytes, too much for millions of items."""
        return torch.cat([self._edges_from(level) for level in range(len(self.levels))])

    def follow(self, nodes: Int[Tensor, "*shape"], tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Follow one token from every node, of any level; the number after the last node stands for no prefix."""
        wanted = nodes << TOKEN_BITS | tokens.clamp(min=0)
        at = torch.searchsorted(self.edges, wanted).clamp(max=len(self.edges) - 1)
        return torch.where((self.edges[at] == wanted) & (tokens >= 0), at + 1, self.num_nodes)

    def _edges_from(self, level: int) -> Int[Tensor, " children"]:
        start, end, below = self.level_starts[level : level + 3]
        nodes = torch.arange(start, end, device=self.tokens.device)
        first, after = self.child_bounds(nodes, level=level)
        parents = nodes.repeat_interleave((after - first)[:, 0], output_size=below - end)
        return parents << TOKEN_BITS | self.tokens[end:below].long() + self.levels[level].token_base


def windows(
    values: Shaped[Tensor, " _"], starts: Int[Tensor, "batch beams"], *, size: int
) -> Shaped[Tensor, "batch beams size"]:
    """`size` consecutive values from each start on; many faster than by one index for every value."""
    return values.unfold(0, size, 1).index_select(0, starts.flatten()).view(*starts.shape, size)


# Keyed by what was moved, and kept while that lives: views of one index share its arrays on the device, too.
_MOVED: WeakKeyDictionary[Any, dict[torch.device, Any]] = WeakKeyDictionary()


def on_device(what: Trie | Liveness | ItemBias | ItemGroups, device: torch.device) -> Any:
    """A trie, the bits of a rule by level from 1, or numbers by node; moved there once, for as long as they live."""
    return moved(what, device, {Trie: _move_trie, Liveness: _move_bits}.get(type(what), _move_numbers))


def moved(what: Any, device: torch.device, move: Callable[[Any, torch.device], Any]) -> Any:
    """What `move` makes of something on a device, made once."""
    on_devices = _MOVED.setdefault(what, {})
    if device not in on_devices:
        on_devices[device] = move(what, device)
    return on_devices[device]


def _move_numbers(values: ItemBias | ItemGroups, device: torch.device) -> Tensor:
    return to_device(values.by_node, device)


def _move_trie(trie: Trie, device: torch.device) -> DeviceTrie:
    levels = zip(trie.fanouts, trie.level_starts, trie.token_bases, strict=False)
    return DeviceTrie(
        tokens=to_device(trie.tokens, device),
        levels=tuple(Level.of(*level, device) for level in levels),
        level_starts=trie.level_starts,
        has_leaves=trie.has_leaves,
        has_bases=any(trie.token_bases),
    )


def _move_bits(alive: Liveness, device: torch.device) -> tuple[Tensor, ...]:
    behind = max(alive.of.trie.branching) // 8 + 2  # bytes that a window may read past the last node's
    distinct = {id(bits): bits for bits in alive.nodes}  # levels without branches share one array
    by_id = {key: to_device(np.pad(bits, (0, behind)), device) for key, bits in distinct.items()}
    return tuple(by_id[id(bits)] for bits in alive.nodes)
