# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled trie on a device, in every form that a step reads. Knows no rules and no beams.

The arrays by level are those of the host; they are moved once for each device. Three other forms are made from them on
the device on first use: `wide`, tables for the levels near the root; `edges`, one search for a step from any level;
and `flat`, the children of any node without its level.

Source: STATIC, section 4 (dense layers near the root), over a level's span of tokens instead of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from hf_gr.catalogue.fanout import Fanout, Longs
from hf_gr.catalogue.memory_plan import LARGEST_TABLE, WIDE_FROM, WIDE_SHARE
from hf_gr.catalogue.segment import Liveness
from hf_gr.catalogue.trie import Trie

from .transfers import to_device

CHILDREN_AT_ONCE = 2**20  # of a table that is being made
TOKEN_BITS = 32


@dataclass(frozen=True)
class WideLevel:
    """The children of a level whose nodes have so many that reading every token is cheaper than gathering legal ones.

    Near the root of a large catalogue nearly every token is legal. A step copies whole rows of this table, and reads
    whole slices of the scores. The row after the last stands for what is not a node of the level.

    Attributes:
        first_token: the token of the first column.
        legal: whether a token leads to a child.
        ranks: how many children come before that one.
        first: the first child of every node, by its number in the trie.
    """

    first_token: int
    legal: Bool[Tensor, "nodes span"]
    ranks: Int[Tensor, "nodes span"]
    first: Int[Tensor, " nodes"]

    @property
    def num_nodes(self) -> int:
        """Nodes of the level."""
        return len(self.first) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the span."""
        return self.legal.shape[1]


@dataclass(frozen=True)
class FlatTrie:
    """A trie without levels; the node after the last stands for no prefix.

    Attributes:
        tokens: the token on the edge into each node; 0 for the root and for no prefix.
        first_child: the first child of each node, whose children end where those of the next one begin.
    """

    tokens: Int[Tensor, " nodes"]
    first_child: Int[Tensor, " nodes_and_one"]


@dataclass(frozen=True)
class DeviceTrie:
    """A segment's trie on a device; the fields are those of `hf_gr.catalogue.trie.Trie` and its fanouts."""

    tokens: Int[Tensor, " nodes_and_padding"]
    offsets: tuple[Int[Tensor, " _"], ...]
    exceptions: tuple[Int[Tensor, " _"] | None, ...]
    token_bases: tuple[int, ...]
    level_starts: tuple[int, ...]
    branching: tuple[int, ...]
    has_leaves: tuple[bool, ...]

    @property
    def num_nodes(self) -> int:
        """All nodes, the root included."""
        return self.level_starts[-1]

    def child_range(
        self, nodes: Int[Tensor, "*shape"], *, level: int
    ) -> tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"]]:
        """The first child of every node and the number of them, which is 0 for what is not a node of this level."""
        start, end = self.level_starts[level], self.level_starts[level + 1]
        given = nodes - start
        local = given.clamp(0, end - start - 1)
        is_here = local == given
        offsets, exceptions = self.offsets[level], self.exceptions[level]
        if exceptions is None:
            first, after = offsets.unfold(0, 2, 1)[local].long().unbind(-1)
            return first + end, (after - first) * is_here
        if not len(exceptions):
            return local + end, is_here.long()
        sought = local.to(exceptions.dtype)
        before = offsets[torch.searchsorted(exceptions, sought)].long()
        through = offsets[torch.searchsorted(exceptions, sought, right=True)].long()
        return local + before + end, (1 + through - before) * is_here

    def is_childless(self, nodes: Int[Tensor, "*shape"], *, level: int) -> Bool[Tensor, "*shape"]:
        """Whether nodes have no children, whatever is known of the level."""
        if level >= len(self.branching):
            return torch.ones_like(nodes, dtype=torch.bool)
        return self.child_range(nodes, level=level)[1] == 0

    @cached_property
    def wide(self) -> tuple[WideLevel | None, ...]:
        """By level: its table; None for a level that is not wide."""
        return tuple(_wide_level(self, level) for level in range(len(self.branching)))

    @cached_property
    def edges(self) -> Int[Tensor, " edges"]:
        """By node from 1: its parent and its token in one number; the numbers ascend.

        Eight bytes a node, too much for a catalogue of millions of items: that one reads children by level.
        """
        levels = [self._edges_from(level) for level in range(len(self.branching))]
        return torch.cat([parents << TOKEN_BITS | tokens for parents, tokens in levels])

    def follow(self, nodes: Int[Tensor, "*shape"], tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Follow one token from every node, of any level; the number after the last node stands for no prefix."""
        wanted = nodes << TOKEN_BITS | tokens.clamp(min=0)
        at = torch.searchsorted(self.edges, wanted).clamp(max=len(self.edges) - 1)
        return torch.where((self.edges[at] == wanted) & (tokens >= 0), at + 1, self.num_nodes)

    @cached_property
    def flat(self) -> FlatTrie:
        """The trie without levels."""
        nodes = torch.arange(self.num_nodes, device=self.tokens.device)
        levels = list(zip(self.level_starts, self.level_starts[1:], strict=False))
        first = [self.child_range(nodes[start:end], level=level)[0] for level, (start, end) in enumerate(levels[:-1])]
        tokens = [self._edges_from(level)[1] for level in range(len(self.branching))]
        end = nodes.new_full((levels[-1][1] - levels[-1][0] + 2,), self.num_nodes)
        nothing = nodes.new_zeros(1)
        return FlatTrie(tokens=torch.cat([nothing, *tokens, nothing]), first_child=torch.cat([*first, end]))

    def _edges_from(self, level: int) -> tuple[Int[Tensor, " children"], Int[Tensor, " children"]]:
        """The parent and the token of every node one level below, in order."""
        start, end, below = self.level_starts[level : level + 3]
        nodes = torch.arange(start, end, device=self.tokens.device)
        parents = nodes.repeat_interleave(self.child_range(nodes, level=level)[1], output_size=below - end)
        return parents, self.tokens[end:below].long() + self.token_bases[level]


# Keyed by what was moved, and kept while that lives: views of one index share its arrays on the device, too.
_MOVED: WeakKeyDictionary[Any, dict[torch.device, Any]] = WeakKeyDictionary()
# By the trie of what was added: the array on the host, which its views share, and on devices.
_TWINS: WeakKeyDictionary[Trie, tuple[Longs, dict[torch.device, Tensor]]] = WeakKeyDictionary()


def on_device(trie: Trie, device: torch.device) -> DeviceTrie:
    """A trie on a device; moved there once, for as long as it lives."""
    return _moved(trie, device, _move_trie)


def bits_on_device(alive: Liveness, device: torch.device) -> tuple[UInt8[Tensor, " _"], ...]:
    """The bits of a rule on a device, by level from 1; moved there once, for as long as the rule lives."""
    return _moved(alive, device, _move_bits)


def twins_on_device(added: Trie, twins: Longs, device: torch.device) -> Int[Tensor, " added_nodes"]:
    """The twins of the nodes of what was added; moved there once, for as long as its trie lives."""
    known = _TWINS.get(added)
    if known is None or known[0] is not twins:
        known = _TWINS[added] = twins, {}
    if device not in known[1]:
        known[1][device] = to_device(twins, device)
    return known[1][device]


def _moved(what: Any, device: torch.device, move: Callable[[Any, torch.device], Any]) -> Any:
    on_devices = _MOVED.setdefault(what, {})
    if device not in on_devices:
        on_devices[device] = move(what, device)
    return on_devices[device]


def _move_trie(trie: Trie, device: torch.device) -> DeviceTrie:
    def exceptions_of(fanout: Fanout) -> Tensor | None:
        return None if fanout.exceptions is None else to_device(fanout.exceptions, device)

    return DeviceTrie(
        tokens=to_device(trie.tokens, device),
        offsets=tuple(to_device(fanout.offsets, device) for fanout in trie.fanouts),
        exceptions=tuple(exceptions_of(fanout) for fanout in trie.fanouts),
        token_bases=trie.token_bases,
        level_starts=trie.level_starts,
        branching=trie.branching,
        has_leaves=trie.has_leaves,
    )


def _move_bits(alive: Liveness, device: torch.device) -> tuple[Tensor, ...]:
    distinct = {id(bits): bits for bits in alive.nodes}  # levels without branches share one array
    by_id = {key: to_device(bits, device) for key, bits in distinct.items()}
    return tuple(by_id[id(bits)] for bits in alive.nodes)


def _wide_level(trie: DeviceTrie, level: int) -> WideLevel | None:
    start, end, below = trie.level_starts[level : level + 3]
    num_nodes, largest = end - start, trie.branching[level]
    if largest < WIDE_FROM or num_nodes * largest > LARGEST_TABLE:
        return None
    edges, base = trie.tokens[end:below], trie.token_bases[level]
    first_token = int(edges.min()) + base
    span = int(edges.max()) + base - first_token + 1
    if span > WIDE_SHARE * largest or num_nodes * span > LARGEST_TABLE:
        return None
    device = edges.device
    legal = torch.zeros((num_nodes + 1, span), dtype=torch.bool, device=device)
    smallest = torch.int16 if largest <= torch.iinfo(torch.int16).max else torch.int32
    ranks = torch.zeros(legal.shape, dtype=smallest, device=device)
    first, count = trie.child_range(torch.arange(start, end, device=device), level=level)
    places = torch.arange(num_nodes, device=device)
    # In pieces: what is made on the way takes more memory than the table.
    pieces = [each.split(max(CHILDREN_AT_ONCE // largest, 1)) for each in (places, first, count)]
    for own, begin, number in zip(*pieces, strict=True):
        lowest, size = int(begin[0]), int(number.sum())
        parents = own.repeat_interleave(number, output_size=size)
        children = torch.arange(lowest, lowest + size, device=device)
        columns = trie.tokens[lowest : lowest + size].long() + (base - first_token)
        legal[parents, columns] = True
        ranks[parents, columns] = (children - first[parents]).to(smallest)
    return WideLevel(first_token, legal, ranks, first=torch.nn.functional.pad(first, (0, 1)))
