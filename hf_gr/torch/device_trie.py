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
from jaxtyping import Bool, Int, Shaped, UInt8
from torch import Tensor

from hf_gr.catalogue.fanout import Array, Fanout, smallest_dtype
from hf_gr.catalogue.items import Liveness
from hf_gr.catalogue.trie import Trie

from .transfers import to_device

TOKEN_BITS = 32


@dataclass(frozen=True)
class LevelConstants:
    """What every step from a level reads; made once, since a step of a small vocabulary costs as much as its calls."""

    own_and_next: Int[Tensor, "2"]  # 0 and 1
    places: Int[Tensor, " children"]  # of the children of a node


@dataclass(frozen=True)
class DeviceTrie:
    """`hf_gr.catalogue.trie.Trie` and its fanouts on a device; nodes are numbered as there, not within their levels.

    A child's number is an offset of its parent, or the parent's own and such an offset.
    """

    tokens: Int[Tensor, " nodes_and_padding"]
    offsets: tuple[Int[Tensor, " _"], ...]
    exceptions: tuple[Int[Tensor, " _"] | None, ...]
    token_bases: tuple[int, ...]
    level_starts: tuple[int, ...]
    branching: tuple[int, ...]
    has_leaves: tuple[bool, ...]

    def __post_init__(self) -> None:
        _ = self.constants  # made here: a captured step must not copy from the host

    @property
    def num_nodes(self) -> int:
        """All nodes, the root included."""
        return self.level_starts[-1]

    @property
    def has_bases(self) -> bool:
        """Whether tokens of some level are stored less a base."""
        return any(self.token_bases)

    def is_chain(self, level: int) -> bool:
        """Whether every node of a level has one child."""
        exceptions = self.exceptions[level]
        return exceptions is not None and not len(exceptions)

    @cached_property
    def constants(self) -> tuple[LevelConstants, ...]:
        """By level."""
        device = self.tokens.device
        own_and_next = torch.arange(2, device=device)
        return tuple(LevelConstants(own_and_next, torch.arange(size, device=device)) for size in self.branching)

    def child_bounds(
        self, nodes: Int[Tensor, "*shape"], *, level: int
    ) -> tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"]]:
        """The first child of every node, and the one after its last: the same for what is no node of this level."""
        offsets, exceptions = self.offsets[level], self.exceptions[level]
        start, end = self.level_starts[level : level + 2]
        own_and_next = (nodes[..., None] + self.constants[level].own_and_next).clamp(start, end)
        if exceptions is None:
            bounds = offsets.take(own_and_next - start).long()
        elif self.is_chain(level):
            bounds = own_and_next + offsets
        else:
            bounds = own_and_next + offsets.take(torch.searchsorted(exceptions, own_and_next.to(exceptions.dtype)))
        first, after = bounds.unbind(-1)
        return first, after

    def child_range(
        self, nodes: Int[Tensor, "*shape"], *, level: int
    ) -> tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"]]:
        """The first child of every node and the number of them, which is 0 for what is not a node of this level."""
        first, after = self.child_bounds(nodes, level=level)
        return first, after - first

    def is_childless(self, nodes: Int[Tensor, "*shape"], *, level: int) -> Bool[Tensor, "*shape"]:
        """Whether nodes have no children, whatever is known of the level."""
        if level >= len(self.branching):
            return torch.ones_like(nodes, dtype=torch.bool)
        first, after = self.child_bounds(nodes, level=level)
        return first == after

    @cached_property
    def edges(self) -> Int[Tensor, " edges"]:
        """By node from 1 its parent and token in one ascending number: 8 bytes, too much for millions of items."""
        levels = [self._edges_from(level) for level in range(len(self.branching))]
        return torch.cat([parents << TOKEN_BITS | tokens for parents, tokens in levels])

    def follow(self, nodes: Int[Tensor, "*shape"], tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Follow one token from every node, of any level; the number after the last node stands for no prefix."""
        wanted = nodes << TOKEN_BITS | tokens.clamp(min=0)
        at = torch.searchsorted(self.edges, wanted).clamp(max=len(self.edges) - 1)
        return torch.where((self.edges[at] == wanted) & (tokens >= 0), at + 1, self.num_nodes)

    def _edges_from(self, level: int) -> tuple[Int[Tensor, " children"], Int[Tensor, " children"]]:
        """The parent and the token of every node one level below, in order."""
        start, end, below = self.level_starts[level : level + 3]
        nodes = torch.arange(start, end, device=self.tokens.device)
        parents = nodes.repeat_interleave(self.child_range(nodes, level=level)[1], output_size=below - end)
        return parents, self.tokens[end:below].long() + self.token_bases[level]


def windows(
    values: Shaped[Tensor, " _"], starts: Int[Tensor, "batch beams"], *, size: int
) -> Shaped[Tensor, "batch beams size"]:
    """`size` consecutive values from each start on; far faster than one index for every value."""
    return values.unfold(0, size, 1).index_select(0, starts.flatten()).view(*starts.shape, size)


# Keyed by what was moved, and kept while that lives: views of one index share its arrays on the device, too.
_MOVED: WeakKeyDictionary[Any, dict[torch.device, Any]] = WeakKeyDictionary()


def on_device(trie: Trie, device: torch.device) -> DeviceTrie:
    """A trie on a device; moved there once, for as long as it lives."""
    return _moved(trie, device, _move_trie)


def bits_on_device(alive: Liveness, device: torch.device) -> tuple[UInt8[Tensor, " _"], ...]:
    """The bits of a rule on a device, by level from 1; moved there once, for as long as the rule lives."""
    return _moved(alive, device, _move_bits)


def _moved(what: Any, device: torch.device, move: Callable[[Any, torch.device], Any]) -> Any:
    on_devices = _MOVED.setdefault(what, {})
    if device not in on_devices:
        on_devices[device] = move(what, device)
    return on_devices[device]


def _move_trie(trie: Trie, device: torch.device) -> DeviceTrie:
    forms = [_form(*level) for level in zip(trie.fanouts, trie.level_starts, trie.level_starts[1:], strict=False)]
    return DeviceTrie(
        tokens=to_device(trie.tokens, device),
        offsets=tuple(to_device(offsets, device) for offsets, _ in forms),
        exceptions=tuple(None if listed is None else to_device(listed, device) for _, listed in forms),
        token_bases=trie.token_bases,
        level_starts=trie.level_starts,
        branching=trie.branching,
        has_leaves=trie.has_leaves,
    )


def _form(fanout: Fanout, start: int, end: int) -> tuple[Array, Array | None]:
    """Offsets and exceptions as `DeviceTrie` has them, of a level from one node to another."""
    dtype = smallest_dtype(end + fanout.num_children)
    if fanout.exceptions is None:
        return fanout.offsets.astype(dtype) + dtype.type(end), None
    return fanout.offsets.astype(dtype) + dtype.type(end - start), fanout.exceptions.astype(dtype) + dtype.type(start)


def _move_bits(alive: Liveness, device: torch.device) -> tuple[Tensor, ...]:
    behind = max(alive.of.trie.branching) // 8 + 2  # bytes that a window may reach behind the last node's
    distinct = {id(bits): bits for bits in alive.nodes}  # levels without branches share one array
    by_id = {key: to_device(np.pad(bits, (0, behind)), device) for key, bits in distinct.items()}
    return tuple(by_id[id(bits)] for bits in alive.nodes)
