# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One trie step. Knows no beams and no model.

Source: STATIC, algorithm 2 (the vectorized node transition kernel), on a trie whose children are contiguous. What may
change while it serves is not in the trie: one bit a node says what is alive, a few nodes a row are hidden, and what
was added is a second, small trie beside the first.

Axes: B batch, K beams, C children: the largest branching of the level, a static shape; E hidden nodes; U rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from hf_gr.catalogue.fanout import Fanout
from hf_gr.catalogue.segment import Liveness
from hf_gr.catalogue.snapshot import BatchRules
from hf_gr.catalogue.trie import Trie

from .wide import WideLevel, wide_levels


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


@dataclass(frozen=True)
class DevicePart:
    """A segment as the requests of a batch see it.

    Attributes:
        trie: the trie.
        alive: by level from 1, one bit a node for every rule; None where everything is alive for all.
        hidden: by level from 1, nodes that a request need not enter, ascending, the root for what is missing; None
            without any.
        wide: by level: its table, where there is one; None if only a part of the children is alive.
    """

    trie: DeviceTrie
    alive: tuple[UInt8[Tensor, "rules _"], ...] | None = None
    hidden: tuple[Int[Tensor, "batch _"] | None, ...] | None = None
    wide: tuple[WideLevel | None, ...] | None = None


@dataclass(frozen=True)
class DeviceCatalogue:
    """What a batch may be answered with.

    A state is a node of `base`; with `added`, a node of that one, plus the number of nodes of `base`, wherever it has
    the prefix. The root is 0 in any case.

    Attributes:
        base: what was compiled.
        added: what was added since, or None.
        twins: for every node of `added` the node of `base` with the same prefix, or -1.
        rule_of_row: which rule each request has; None where there is one for all.
        unchecked: for the first levels, tokens that may all follow upon anything, legal or not; what leaves the
            catalogue comes to the dead state.
    """

    base: DevicePart
    added: DevicePart | None = None
    twins: Int[Tensor, " added_nodes"] | None = None
    rule_of_row: Int[Tensor, " batch"] | None = None
    unchecked: tuple[Int[Tensor, " codes"], ...] = ()

    @property
    def _tries(self) -> tuple[DeviceTrie, ...]:
        return (self.base.trie,) if self.added is None else (self.base.trie, self.added.trie)

    @property
    def device(self) -> torch.device:
        """Where its arrays are."""
        return self.base.trie.tokens.device

    @property
    def max_length(self) -> int:
        """The number of levels."""
        return max(len(trie.branching) for trie in self._tries)

    @property
    def nodes_per_level(self) -> tuple[int, ...]:
        """Nodes with 0 to L tokens, dead ones included; those in both segments count twice."""
        starts = [trie.level_starts for trie in self._tries]
        per_segment = [[end - start for start, end in zip(of, of[1:], strict=False)] for of in starts]
        return tuple(sum(level) for level in zip_longest(*per_segment, fillvalue=0))

    @property
    def dead_state(self) -> int:
        """The state without children that stands for no prefix at all."""
        return sum(trie.num_nodes for trie in self._tries)

    @property
    def has_leaves(self) -> tuple[bool, ...]:
        """By level: whether a sequence can end with its token number `level + 1`."""
        return tuple(
            any(level < len(trie.branching) and trie.has_leaves[level] for trie in self._tries)
            for level in range(self.max_length)
        )

    @property
    def is_ragged(self) -> bool:
        """Whether some sequence is shorter than another."""
        return any(self.has_leaves[:-1])


@dataclass(frozen=True)
class Children:
    """The children of every state, padded to the largest branching of the level; of a wide level, its span of tokens.

    Their states are not stored: only those of the few that are kept are asked for (`take`).

    Attributes:
        tokens: the token that leads to each child; some other node's, or 0, where `legal` is false.
        legal: whether there is such a child, and it is alive.
        first: the state of each beam's first child.
        first_added: the state of its first child among those that come after: those of what was added.
        num_old: children before those.
        wide: the table that this was read from, if the level is wide.
        nodes: each beam's row of that table.
        follow: on a level that is not checked, from states and tokens to new states; `first` then has the beams' own.
    """

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]
    first: Int[Tensor, "batch beams"]
    first_added: Int[Tensor, "batch beams"] | None = None
    num_old: int = 0
    wide: WideLevel | None = None
    nodes: Int[Tensor, "batch beams"] | None = None
    follow: Callable[[Tensor, Tensor], Tensor] | None = None

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """Tokens and states of chosen children of chosen beams; states of no meaning where there is no such child."""
        first = self.first.gather(1, beams)
        if self.wide is not None and self.nodes is not None:
            return self.wide.first_token + children, first + self.wide.ranks[self.nodes.gather(1, beams), children]
        tokens = self.tokens.flatten(1).gather(1, beams * self.tokens.shape[-1] + children)
        if self.follow is not None:
            return tokens, self.follow(first, tokens)
        if self.first_added is None:
            return tokens, first + children
        added = self.first_added.gather(1, beams) + children - self.num_old
        return tokens, torch.where(children < self.num_old, first + children, added)

    def scores(
        self, log_probs: Float[Tensor, "rows vocab"], rows: slice = slice(None)
    ) -> Float[Tensor, "rows children"]:
        """What stands at the tokens of some rows: the beams of all requests, one after the other."""
        if self.wide is not None:
            return log_probs[:, self.wide.first_token : self.wide.first_token + self.wide.num_tokens]
        return log_probs.gather(-1, self.tokens.flatten(0, 1)[rows])


# By what was moved, so that views of one index share its arrays on the device, too; for as long as that lives.
_MOVED: WeakKeyDictionary[Any, dict[torch.device, Any]] = WeakKeyDictionary()
_WIDE: WeakKeyDictionary[Any, dict[torch.device, Any]] = WeakKeyDictionary()


def device_catalogue(rules: BatchRules, device: torch.device) -> DeviceCatalogue:
    """The catalogue of a batch on a device; segments and rules are moved there once, as long as they live."""
    parts = [_device_part(rules, number, device) for number in range(len(rules.any.parts))]
    if len(parts) == 1 and parts[0].alive is None and parts[0].hidden is None:
        trie = rules.any.base.segment.trie
        parts = [replace(parts[0], wide=kept(_WIDE, trie, device, wide_levels))]
    twins, rule_of_row = rules.any.twins, rules.rule_of_row
    return DeviceCatalogue(
        base=parts[0],
        added=parts[1] if len(parts) > 1 else None,
        twins=None if twins is None else torch.from_numpy(twins).to(device),
        rule_of_row=None if rule_of_row is None else torch.from_numpy(rule_of_row).to(device),
    )


def children(states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int) -> Children:
    """The living children of every state of a level (level 0 is the root), in token order within a segment.

    In plain loops: `for b, k, c: child = first[b, k] + c; legal = c < count[b, k] and alive[child]; token =
    tokens[child]`.
    """
    base, added = catalogue.base, catalogue.added
    if level < len(catalogue.unchecked):
        return _unchecked_children(states, catalogue, level=level)
    if added is None:
        wide = None if base.wide is None else base.wide[level]
        if wide is not None:
            return _wide_children(states - base.trie.level_starts[level], wide)
        return _part_children(states, base, catalogue.rule_of_row, level)[0]
    assert catalogue.twins is not None
    in_added, nodes = _both_nodes(states, catalogue) if level else (states, states)
    if level >= len(added.trie.branching):
        return _part_children(nodes, base, catalogue.rule_of_row, level)[0]
    new, _ = _part_children(in_added, added, catalogue.rule_of_row, level)
    first_added = new.first + base.trie.num_nodes
    if level >= len(base.trie.branching):
        return replace(new, first=first_added)
    old, count = _part_children(nodes, base, catalogue.rule_of_row, level)
    # A child that is in both is reached through `added`, which knows its twin.
    below = new.first[..., None] + torch.arange(new.tokens.shape[-1], device=states.device)
    shadowed = torch.where(new.legal, catalogue.twins[below.clamp(max=added.trie.num_nodes - 1)], -1)
    return Children(
        tokens=torch.cat([old.tokens, new.tokens], dim=-1),
        legal=torch.cat([_hide(old.legal, shadowed, old.first, count), new.legal], dim=-1),
        first=old.first,
        first_added=first_added,
        num_old=old.tokens.shape[-1],
    )


def is_leaf(
    states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int
) -> Bool[Tensor, "batch beams"]:
    """Whether a sequence ends in this state of a level, or of one above it (true for the dead state, too)."""
    if level == catalogue.max_length:
        return torch.ones_like(states, dtype=torch.bool)
    base, added = catalogue.base.trie, catalogue.added
    if added is None:
        return _is_childless(states, base, level)
    in_added, nodes = _both_nodes(states, catalogue)
    return _is_childless(nodes, base, level) & _is_childless(in_added, added.trie, level)


def over_vocabulary(
    scores: Float[Tensor, "batch beams children"], legal: Children, vocab_size: int
) -> Float[Tensor, "batch beams vocab"]:
    """The scores of legal children in their tokens' places, `-inf` everywhere else."""
    # An illegal entry repeats some other node's token: point it at an extra column that is cut off again.
    tokens = torch.where(legal.legal, legal.tokens, vocab_size)
    nothing = torch.full((*scores.shape[:-1], vocab_size + 1), -torch.inf, dtype=scores.dtype, device=scores.device)
    return nothing.scatter(-1, tokens, scores)[..., :-1]


def mask_illegal(scores: Float[Tensor, "batch beams vocab"], legal: Children) -> Float[Tensor, "batch beams vocab"]:
    """The scores of legal tokens, `-inf` for all others: the constraint over a whole vocabulary."""
    return over_vocabulary(scores.gather(-1, legal.tokens), legal, scores.shape[-1])


def advance(
    states: Int[Tensor, "batch beams"], tokens: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int
) -> Int[Tensor, "batch beams"]:
    """Follow one token from every state: a leaf stays where it is, an illegal token leads to the dead state."""
    below = children(states, catalogue, level=level)
    hit = below.legal & (below.tokens == tokens[..., None])
    beams = torch.arange(states.shape[1], device=states.device).expand(states.shape)
    moved = torch.where(hit.any(-1), below.take(beams, hit.int().argmax(-1))[1], catalogue.dead_state)
    return torch.where(below.legal.any(-1), moved, states)


def _both_nodes(
    states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue
) -> tuple[Int[Tensor, "batch beams"], Int[Tensor, "batch beams"]]:
    """The node of `added` and that of `base` for every state; no node at all where a segment lacks the prefix."""
    assert catalogue.added is not None
    assert catalogue.twins is not None
    num_added = catalogue.added.trie.num_nodes
    in_added = states - catalogue.base.trie.num_nodes
    is_added = (in_added >= 0) & (in_added < num_added)
    return in_added, torch.where(is_added, catalogue.twins[in_added.clamp(0, num_added - 1)], states)


def _unchecked_children(states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int) -> Children:
    """All codes of a level as children of every state."""
    codes, checked = catalogue.unchecked[level], replace(catalogue, unchecked=())

    def follow(states: Int[Tensor, "batch chosen"], tokens: Int[Tensor, "batch chosen"]) -> Tensor:
        return advance(states, tokens, checked, level=level)

    tokens = codes.expand(*states.shape, -1)
    return Children(tokens, torch.ones_like(tokens, dtype=torch.bool), states, follow=follow)


def _wide_children(nodes: Int[Tensor, "batch beams"], wide: WideLevel) -> Children:
    """The children of nodes, numbered within their level, one entry for every token of the level's span."""
    nodes = torch.where((nodes >= 0) & (nodes < wide.num_nodes), nodes, wide.num_nodes)
    tokens = torch.arange(wide.first_token, wide.first_token + wide.num_tokens, device=nodes.device)
    legal = wide.legal[nodes]
    return Children(tokens.expand(legal.shape), legal, wide.first[nodes], wide=wide, nodes=nodes)


def _part_children(
    nodes: Int[Tensor, "batch beams"], part: DevicePart, rule_of_row: Int[Tensor, " batch"] | None, level: int
) -> tuple[Children, Int[Tensor, "batch beams"]]:
    """The children of one segment's nodes, and how many there are of each, alive or not."""
    trie = part.trie
    first, count = _child_range(nodes, trie, level)
    places = torch.arange(trie.branching[level], device=nodes.device)
    legal = places < count[..., None]
    if part.alive is not None:
        local = first[..., None] - trie.level_starts[level + 1] + places
        last = trie.level_starts[level + 2] - trie.level_starts[level + 1] - 1
        legal = legal & _are_alive(local.clamp(max=last), part.alive[level], rule_of_row)
    hidden = None if part.hidden is None else part.hidden[level]
    if hidden is not None and hidden.shape[1] <= 2 * trie.branching[level]:
        legal = _hide(legal, hidden[:, None].expand(-1, nodes.shape[1], -1), first, count)
    elif hidden is not None:  # so many that looking each child up among them is cheaper
        below = (first[..., None] + places).flatten(1)
        at = torch.searchsorted(hidden, below).clamp(max=hidden.shape[1] - 1)
        legal = legal & (hidden.gather(1, at) != below).view(legal.shape)
    # Windows over the tokens, copied as wholes: three times faster than a number for every child.
    tokens = trie.tokens.unfold(0, trie.branching[level], 1)[first].long()
    if any(trie.token_bases):  # a window reaches into levels with another base: that would be no token
        tokens = torch.where(legal, tokens + trie.token_bases[level], 0)
    return Children(tokens=tokens, legal=legal, first=first), count


def _child_range(
    nodes: Int[Tensor, "batch beams"], trie: DeviceTrie, level: int
) -> tuple[Int[Tensor, "batch beams"], Int[Tensor, "batch beams"]]:
    """The first child of every node and the number of them, which is 0 for what is no node of this level."""
    start, end = trie.level_starts[level], trie.level_starts[level + 1]
    local = nodes - start
    is_here = (local >= 0) & (local < end - start)
    local = local.clamp(0, end - start - 1)
    offsets, exceptions = trie.offsets[level], trie.exceptions[level]
    if exceptions is None:
        first = offsets[local].long()
        return first + end, (offsets[local + 1].long() - first) * is_here
    if not len(exceptions):
        return local + end, is_here.long()
    sought = local.to(exceptions.dtype)
    before = offsets[torch.searchsorted(exceptions, sought)].long()
    through = offsets[torch.searchsorted(exceptions, sought, right=True)].long()
    return local + before + end, (1 + through - before) * is_here


def _is_childless(nodes: Int[Tensor, "batch beams"], trie: DeviceTrie, level: int) -> Bool[Tensor, "batch beams"]:
    """Whether nodes have no children in a segment, of whatever it knows of the level."""
    if level >= len(trie.branching):
        return torch.ones_like(nodes, dtype=torch.bool)
    return _child_range(nodes, trie, level)[1] == 0


def _are_alive(
    nodes: Int[Tensor, "batch beams children"],
    bits: UInt8[Tensor, "rules bytes"],
    rule_of_row: Int[Tensor, " batch"] | None,
) -> Bool[Tensor, "batch beams children"]:
    """The bits of nodes, numbered within their level."""
    places = nodes >> 3
    found = bits[0, places] if rule_of_row is None else bits[rule_of_row[:, None, None], places]
    return (found.int() >> (nodes & 7).int() & 1).bool()


def _hide(
    legal: Bool[Tensor, "batch beams children"],
    hidden: Int[Tensor, "batch beams hidden"],
    first: Int[Tensor, "batch beams"],
    count: Int[Tensor, "batch beams"],
) -> Bool[Tensor, "batch beams children"]:
    """The same without some nodes, wherever they are among the children."""
    places = hidden - first[..., None]
    # What is no child here goes to an extra column that is cut off again.
    slots = torch.where((places >= 0) & (places < count[..., None]), places, legal.shape[-1])
    return torch.nn.functional.pad(legal, (0, 1)).scatter(-1, slots, False)[..., :-1]


def _device_part(rules: BatchRules, number: int, device: torch.device) -> DevicePart:
    """One segment of a batch: its trie, one row of bits for every rule, its hidden nodes."""
    segment = rules.any.parts[number].segment
    alive: tuple[Tensor, ...] | None = None
    lives = [snapshot.parts[number].alive for snapshot in rules.snapshots]
    if any(live is not None for live in lives):
        moved = [_moved(live or segment.all_alive, device) for live in lives]
        stacked: dict[tuple[int, ...], Tensor] = {}  # levels without branches share their bits
        for level in zip(*moved, strict=True):
            if (key := tuple(map(id, level))) not in stacked:
                stacked[key] = level[0][None] if len(moved) == 1 else torch.stack(level)
        alive = tuple(stacked[tuple(map(id, level))] for level in zip(*moved, strict=True))
    hidden = None
    if rules.excluded:
        nodes = rules.excluded[number]
        ascending = [None if level is None else np.sort(level, axis=1) for level in nodes]
        hidden = tuple(None if level is None else torch.from_numpy(level).to(device) for level in ascending)
    return DevicePart(_moved(segment.trie, device), alive, hidden)


def _moved(what: Trie | Liveness, device: torch.device) -> Any:
    """A trie or the bits of a rule on a device."""
    return kept(_MOVED, what, device, _move_trie if isinstance(what, Trie) else _move_bits)


def kept(made: WeakKeyDictionary[Any, Any], of: Any, device: torch.device, make: Callable[[Any, Any], Any]) -> Any:
    """What is made of something for a device, once."""
    on_devices = made.setdefault(of, {})
    if device not in on_devices:
        on_devices[device] = make(of, device)
    return on_devices[device]


def _move_trie(trie: Trie, device: torch.device) -> DeviceTrie:
    def exceptions_of(fanout: Fanout) -> Tensor | None:
        return None if fanout.exceptions is None else torch.from_numpy(fanout.exceptions).to(device)

    return DeviceTrie(
        tokens=torch.from_numpy(trie.tokens).to(device),
        offsets=tuple(torch.from_numpy(fanout.offsets).to(device) for fanout in trie.fanouts),
        exceptions=tuple(exceptions_of(fanout) for fanout in trie.fanouts),
        token_bases=trie.token_bases,
        level_starts=trie.level_starts,
        branching=trie.branching,
        has_leaves=trie.has_leaves,
    )


def _move_bits(alive: Liveness, device: torch.device) -> tuple[Tensor, ...]:
    by_id: dict[int, Tensor] = {}  # levels without branches share one array
    return tuple(by_id.setdefault(id(bits), torch.from_numpy(bits).to(device)) for bits in alive.nodes)
