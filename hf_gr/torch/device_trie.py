# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled trie on a device, in every form that a step reads. Knows no rules and no beams.

The arrays by level are those of the host; they are moved once for each device. Three other forms are made from them on
the device on first use: `wide`, tables for nodes with many children; `edges`, one search for a step from any level;
and `flat`, the children of any node without its level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from hf_gr.catalogue.fanout import Fanout, Longs
from hf_gr.catalogue.items import Liveness
from hf_gr.catalogue.tables import LARGEST_TABLE, TableShape, table_shape
from hf_gr.catalogue.trie import Trie

from .transfers import to_device

WINDOWS_FROM = 16  # children of one node; below, tokens are read one by one
CHILDREN_AT_ONCE = 2**20  # of a table that is being made
TOKEN_BITS = 32


@dataclass(frozen=True)
class WideLevel:
    """The children of nodes with so many that reading every token is cheaper than gathering legal ones.

    A step adds whole rows of this table to slices of the scores: a choice by flags costs ten times as much where it
    cannot be predicted. The rows before the first node and after the last stand for what has no row.

    Attributes:
        start: the first node of the level.
        first_token: the token of the first column.
        penalties: 0 where a token leads to a child, else `-inf`.
        ranks: how many children come before that one.
        first: the first child of every node, by its number in the trie.
        tokens: those of the columns.
        parents: the nodes that have a row, ascending; None if all of the level have.
        rest: the most children of one that has none.
    """

    start: int
    first_token: int
    penalties: Float[Tensor, "nodes span"]
    ranks: Int[Tensor, "nodes span"]
    first: Int[Tensor, " nodes"]
    tokens: Int[Tensor, " span"]
    parents: Int[Tensor, " large"] | None = None
    rest: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the span."""
        return self.penalties.shape[1]

    def rows(self, nodes: Int[Tensor, "batch beams"]) -> Int[Tensor, "batch beams"]:
        """The row of every node; for what has none one of `-inf`: row 0, if it may be a node of the level."""
        if self.parents is None:
            return (nodes + (1 - self.start)).clamp(0, len(self.first) - 1)
        at = torch.searchsorted(self.parents, nodes.contiguous()).clamp_(max=len(self.parents) - 1)
        return torch.where(self.parents.take(at) == nodes, at + 1, 0)


@dataclass(frozen=True)
class RootLevel:
    """The children of the root; the state of the first is 1.

    Attributes:
        tokens: those that lead to them, ascending.
        first_token: the first, if they leave none out; else None.
    """

    tokens: Int[Tensor, " children"]
    first_token: int | None


@dataclass(frozen=True)
class LivingBits:
    """What is alive of a wide level under some rules: a bit for an entry of the table, which takes 32 of them.

    Attributes:
        bits: the rows of `WideLevel` for the first rule, for the second and so on; eight tokens a byte.
        spread: the penalties of the tokens of each byte.
    """

    bits: UInt8[Tensor, "rows bytes"]
    spread: Float[Tensor, "256 8"]

    def penalties(self, rows: Int[Tensor, " some"], num_tokens: int) -> Float[Tensor, "some span"]:
        """0 for what is alive in some rows, `-inf` for all else."""
        found = self.bits.index_select(0, rows)
        return self.spread.index_select(0, found.flatten().int()).view(len(found), -1)[:, :num_tokens]


@dataclass(frozen=True)
class LevelConstants:
    """What every step from a level reads; made once, since a step of a small vocabulary costs as much as its calls.

    Attributes:
        shifts: from a node to its number within the level and the next one; where each has one child, from a node to
            that child and the next one.
        end: the first node below the level.
        places: of the children of a node.
        token_base: what to add to the tokens of children.
    """

    shifts: Int[Tensor, "2"]
    end: Int[Tensor, "1"]
    places: Int[Tensor, " children"]
    token_base: Int[Tensor, "1"]


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
    tables: tuple[TableShape | None, ...] = ()

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
        return tuple(_constants(self, level) for level in range(len(self.branching)))

    def child_bounds(self, nodes: Int[Tensor, "*shape"], *, level: int) -> Int[Tensor, "*shape 2"]:
        """The first child of every node, and the one after its last: the same for what is not a node of this level."""
        constants, end = self.constants[level], self.level_starts[level + 1]
        offsets, exceptions = self.offsets[level], self.exceptions[level]
        own_and_next = nodes[..., None] + constants.shifts
        if self.is_chain(level):
            return own_and_next.clamp(end, 2 * end - self.level_starts[level])
        own_and_next = own_and_next.clamp(0, end - self.level_starts[level])
        if exceptions is None:
            return offsets.take(own_and_next) + constants.end
        before = torch.searchsorted(exceptions, own_and_next.to(exceptions.dtype))
        return offsets.take(before) + constants.end + own_and_next

    def child_range(
        self, nodes: Int[Tensor, "*shape"], *, level: int
    ) -> tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"]]:
        """The first child of every node and the number of them, which is 0 for what is not a node of this level."""
        first, after = self.child_bounds(nodes, level=level).unbind(-1)
        return first, after - first

    def tokens_of(
        self, children: Int[Tensor, "batch beams children"], *, level: int
    ) -> Int[Tensor, "batch beams children"]:
        """The tokens of consecutive nodes below a level, at most as many as its largest node has, less their base.

        Those that are no children may be of another level.
        """
        if children.shape[-1] < WINDOWS_FROM:
            return self.tokens.take(children)
        # Copies whole windows of the tokens: three times faster than one index per child.
        return self.tokens.unfold(0, children.shape[-1], 1)[children[..., 0]]

    def is_childless(self, nodes: Int[Tensor, "*shape"], *, level: int) -> Bool[Tensor, "*shape"]:
        """Whether nodes have no children, whatever is known of the level."""
        if level >= len(self.branching):
            return torch.ones_like(nodes, dtype=torch.bool)
        first, after = self.child_bounds(nodes, level=level).unbind(-1)
        return first == after

    @cached_property
    def wide(self) -> tuple[WideLevel | None, ...]:
        """By level: its table; None for a level without one."""
        shapes = enumerate(self.tables)
        return tuple(None if shape is None else _wide_level(self, level, shape) for level, shape in shapes)

    @cached_property
    def root(self) -> RootLevel:
        """The children of the root; waits for the device."""
        tokens = self.tokens[1 : self.level_starts[2]].long() + self.token_bases[0]
        first, last = int(tokens[0]), int(tokens[-1])
        return RootLevel(tokens, first if last - first + 1 == len(tokens) else None)

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

    def _edges_from(self, level: int) -> tuple[Int[Tensor, " children"], Int[Tensor, " children"]]:
        """The parent and the token of every node one level below, in order."""
        start, end, below = self.level_starts[level : level + 3]
        nodes = torch.arange(start, end, device=self.tokens.device)
        parents = nodes.repeat_interleave(self.child_range(nodes, level=level)[1], output_size=below - end)
        return parents, self.tokens[end:below].long() + self.token_bases[level]


# Keyed by what was moved, and kept while that lives: views of one index share its arrays on the device, too.
_MOVED: WeakKeyDictionary[Any, dict[torch.device, Any]] = WeakKeyDictionary()
# By the rule: by device, the bits of its wide levels; None after a first use, which they would not pay for.
_LIVING: WeakKeyDictionary[Liveness, dict[torch.device, tuple[Tensor | None, ...] | None]] = WeakKeyDictionary()
# By the trie of what was added: the array on the host, which its views share, and on devices.
_TWINS: WeakKeyDictionary[Trie, tuple[Longs, dict[torch.device, Tensor]]] = WeakKeyDictionary()


def on_device(trie: Trie, device: torch.device) -> DeviceTrie:
    """A trie on a device; moved there once, for as long as it lives."""
    return _moved(trie, device, _move_trie)


def bits_on_device(alive: Liveness, device: torch.device) -> tuple[UInt8[Tensor, " _"], ...]:
    """The bits of a rule on a device, by level from 1; moved there once, for as long as the rule lives."""
    return _moved(alive, device, _move_bits)


def living_bits(
    rules: Sequence[Liveness], trie: DeviceTrie, alive: Sequence[UInt8[Tensor, "rules _"] | None]
) -> tuple[LivingBits | None, ...] | None:
    """What is alive of the wide levels of a trie under rules; None if some rule is new, or all take too much memory.

    Args:
        rules: the rules.
        trie: the trie.
        alive: by level from 1, the bits of its nodes for every rule.
    """
    device, known = trie.tokens.device, [_LIVING.setdefault(rule, {}) for rule in rules]
    if any(device not in of_rule for of_rule in known):
        for of_rule in known:
            of_rule.setdefault(device, None)
        return None
    if len(rules) * sum(shape.living_bytes for shape in trie.tables if shape is not None) > LARGEST_TABLE:
        return None
    for number, of_rule in enumerate(known):
        if of_rule[device] is None:
            of_rule[device] = tuple(
                None if table is None or bits is None else _living(table, bits[number], end)
                for table, bits, end in zip(trie.wide, alive, trie.level_starts[1:-1], strict=True)
            )
    by_level = zip(*(of_rule[device] or () for of_rule in known), strict=True)
    is_legal = _unpack(torch.arange(256, dtype=torch.uint8, device=device)).view(256, 8)
    spread = torch.zeros(is_legal.shape, dtype=torch.float32, device=device).masked_fill_(~is_legal, -torch.inf)
    joined = (level[0] if level[0] is None or len(level) == 1 else torch.cat(level) for level in by_level)
    return tuple(None if bits is None else LivingBits(bits, spread) for bits in joined)


def _living(table: WideLevel, alive: UInt8[Tensor, " children"], end: int) -> UInt8[Tensor, "nodes bytes"]:
    """The bits of a rule by the places of a table instead of by child; the first child of the level is node `end`."""
    legal = table.penalties == 0
    flags = _unpack(alive)
    if table.parents is not None:
        below = table.first[:, None] - end + table.ranks
        flags = flags.take(below.clamp_(0, len(flags) - 1)) & legal
    else:  # rows and columns ascend like the children
        flags = torch.zeros_like(legal).masked_scatter_(legal, flags)
    flags = torch.nn.functional.pad(flags, (0, -table.num_tokens % 8))
    weights = 2.0 ** torch.arange(8, device=flags.device)
    return (flags.view(len(flags), -1, 8).float() @ weights).to(torch.uint8)


def _unpack(packed: UInt8[Tensor, " bytes"]) -> Bool[Tensor, " bits"]:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).bool().flatten()


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
        tables=tuple(table_shape(trie, level) for level in range(trie.max_length)),
    )


def _constants(trie: DeviceTrie, level: int) -> LevelConstants:
    start, end = trie.level_starts[level : level + 2]
    shift = end - start if trie.is_chain(level) else -start
    device = trie.tokens.device
    return LevelConstants(
        shifts=to_device([shift, shift + 1], device),
        end=to_device([end], device),
        places=torch.arange(trie.branching[level], device=device),
        token_base=to_device([trie.token_bases[level]], device),
    )


def _move_bits(alive: Liveness, device: torch.device) -> tuple[Tensor, ...]:
    distinct = {id(bits): bits for bits in alive.nodes}  # levels without branches share one array
    by_id = {key: to_device(bits, device) for key, bits in distinct.items()}
    return tuple(by_id[id(bits)] for bits in alive.nodes)


def _wide_level(trie: DeviceTrie, level: int, shape: TableShape) -> WideLevel:
    start, end = trie.level_starts[level : level + 2]
    device, base = trie.tokens.device, trie.token_bases[level]
    penalties = torch.full((shape.num_rows + 2, shape.span), -torch.inf, dtype=torch.float32, device=device)
    largest = trie.branching[level]
    smallest = torch.int16 if largest <= torch.iinfo(torch.int16).max else torch.int32
    ranks = torch.zeros(penalties.shape, dtype=smallest, device=device)
    parents = None if shape.parents is None else to_device(shape.parents + start, device)
    nodes = torch.arange(start, end, device=device) if parents is None else parents
    first, count = trie.child_range(nodes, level=level)
    places = torch.arange(1, shape.num_rows + 1, device=device)
    # In pieces: what is made on the way takes more memory than the table.
    pieces = [each.split(max(CHILDREN_AT_ONCE // largest, 1)) for each in (places, first, count)]
    for own, begin, number in zip(*pieces, strict=True):
        size = int(number.sum())  # waits for the device, once
        of = torch.arange(len(own), device=device).repeat_interleave(number, output_size=size)
        rank = torch.arange(size, device=device) - (number.cumsum(0) - number)[of]
        columns = trie.tokens.take(begin[of] + rank).long() + (base - shape.first_token)
        penalties[own[of], columns] = 0
        ranks[own[of], columns] = rank.to(smallest)
    return WideLevel(
        start,
        shape.first_token,
        penalties,
        ranks,
        first=torch.nn.functional.pad(first, (1, 1)),
        tokens=torch.arange(shape.first_token, shape.first_token + shape.span, device=device),
        parents=parents,
        rest=shape.rest,
    )
