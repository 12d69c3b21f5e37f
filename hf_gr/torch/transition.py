# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One trie step. Knows no beams and no model.

Source: STATIC, algorithm 2 (the vectorized node transition kernel), on a trie whose children are contiguous. What may
change while it serves is not in the trie: one bit per node says what is alive, a few nodes per row are hidden, and
additions are a second, small trie beside the first.

Axes: B batch, K beams, C children: a static shape, the largest branching of the level or the span of its table;
E hidden nodes; U rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.snapshot import Snapshot

from .children import (
    Children,
    JoinedChildren,
    OnlyChildren,
    PlainChildren,
    RootChildren,
    UncheckedChildren,
    WideChildren,
)
from .device_trie import DeviceTrie, LivingBits, WideLevel, bits_on_device, living_bits, on_device
from .transfers import to_device

HIDDEN_SHARE = 2  # of a table's columns: with more hidden nodes it is cheaper to look each child up among them


@dataclass(frozen=True)
class DevicePart:
    """A segment as the requests of a batch see it.

    Attributes:
        trie: the trie.
        alive: by level from 1, one bit a node for every rule; None where everything is alive, or is if its parent is.
        hidden: by level from 1, nodes hidden from each request, sorted, padded with the root; None without any.
        wide: by level: its table, where there is one; None if there are children in another segment, or before the
            bits of a rule are there for it (its second use makes them).
        living: by level: for a level with such a table what is alive of it; None where everything is.
    """

    trie: DeviceTrie
    alive: tuple[UInt8[Tensor, "rules _"] | None, ...] | None = None
    hidden: tuple[Int[Tensor, "batch _"] | None, ...] | None = None
    wide: tuple[WideLevel | None, ...] | None = None
    living: tuple[LivingBits | None, ...] | None = None

    def is_whole(self, level: int) -> bool:
        """Whether all children of a level's nodes are alive where their parents are."""
        return (self.alive is None or self.alive[level] is None) and (
            self.hidden is None or self.hidden[level] is None
        )

    def table_for(self, level: int) -> WideLevel | None:
        """The table that serves a level, if there is one."""
        table = None if self.wide is None else self.wide[level]
        hidden = None if self.hidden is None else self.hidden[level]
        if table is None or hidden is None or hidden.shape[1] <= HIDDEN_SHARE * table.num_tokens:
            return table
        return None


@dataclass(frozen=True)
class DeviceCatalogue:
    """What may be generated for a batch.

    A state is a node of `base`; where `added` has the prefix, a node of `added` plus the number of nodes of `base`.
    The root is always 0.

    Attributes:
        base: what was compiled.
        added: what was added since, or None.
        twins: for every node of `added` the node of `base` with the same prefix, or -1.
        rule_of_row: which rule each request has; None where there is one for all.
        unchecked: for the first levels, tokens that may follow anything, legal or not; an illegal one leads to the
            dead state.
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
        if self.added is None:  # asked for at every level, like those below
            return len(self.base.trie.branching)
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
        return self.base.trie.num_nodes + (0 if self.added is None else self.added.trie.num_nodes)

    @property
    def has_leaves(self) -> tuple[bool, ...]:
        """By level: whether a sequence can end with its token number `level + 1`."""
        if self.added is None:
            return self.base.trie.has_leaves
        return tuple(
            any(level < len(trie.branching) and trie.has_leaves[level] for trie in self._tries)
            for level in range(self.max_length)
        )

    @property
    def is_ragged(self) -> bool:
        """Whether some sequence is shorter than another."""
        return any(self.has_leaves[:-1])

    def is_leaf(self, states: Int[Tensor, "batch beams"], *, level: int) -> Bool[Tensor, "batch beams"]:
        """Whether a sequence ends in each state."""
        return is_leaf(states, self, level=level)


@torch.inference_mode(False)  # what is kept here serves training, too
def device_catalogue(rules: BatchRules, device: torch.device) -> DeviceCatalogue:
    """The catalogue of a batch on a device; segments and rules are moved there once, for as long as they live.

    What only this batch has joins the device's queue: nobody waits for it.
    """
    rule_of_row = rules.rule_of_row
    return DeviceCatalogue(
        base=_without_added(_device_part(rules, device), rules.snapshots),
        rule_of_row=None if rule_of_row is None else to_device(rule_of_row, device),
    )


def children(
    states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int, lists_all: bool = False
) -> Children:
    """The living children of every living state of a level (level 0 is the root), in token order within a segment.

    Who `lists_all` of them, one by one, gets few columns rather than fast sums.

    In plain loops: `for b, k, c: child = first[b, k] + c; legal = c < count[b, k] and alive[child]; token =
    tokens[child]`.
    """
    if level < len(catalogue.unchecked):
        return _unchecked_children(states, catalogue, level=level)
    if catalogue.added is not None:
        return _merged_children(states, catalogue, catalogue.added, level)
    base = catalogue.base
    if level == 0 and base.is_whole(level):
        return RootChildren(base.trie.root.tokens.expand(*states.shape, -1), states, base.trie.root)
    if (table := base.table_for(level)) is not None and (table.parents is None or not lists_all):
        below = _wide_children(states, base, table, catalogue.rule_of_row, level)
        if table.parents is None:
            return below
        others = states.masked_fill(below.nodes > 0, catalogue.dead_state)
        return JoinedChildren(below, _part_children(others, base, catalogue.rule_of_row, level, most=table.rest))
    if base.is_whole(level) and base.trie.is_chain(level):
        return _only_children(states, base.trie, level)
    return _part_children(states, base, catalogue.rule_of_row, level)


def is_leaf(
    states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int
) -> Bool[Tensor, "batch beams"]:
    """Whether a sequence ends in this state of a level, or of one above it (true for the dead state, too)."""
    if level == catalogue.max_length:
        return torch.ones_like(states, dtype=torch.bool)
    base, added = catalogue.base.trie, catalogue.added
    if added is None:
        return base.is_childless(states, level=level)
    in_added, nodes = _both_nodes(states, catalogue)
    return base.is_childless(nodes, level=level) & added.trie.is_childless(in_added, level=level)


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
    """The node of `added` and that of `base` for every state; no node where a segment lacks the prefix."""
    assert catalogue.added is not None
    assert catalogue.twins is not None
    num_added = catalogue.added.trie.num_nodes
    in_added = states - catalogue.base.trie.num_nodes
    is_added = (in_added >= 0) & (in_added < num_added)
    return in_added, torch.where(is_added, catalogue.twins[in_added.clamp(0, num_added - 1)], states)


def _unchecked_children(
    states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int
) -> UncheckedChildren:
    """All codes of a level as children of every state."""
    codes, checked = catalogue.unchecked[level], replace(catalogue, unchecked=())

    def follow(states: Int[Tensor, "batch chosen"], tokens: Int[Tensor, "batch chosen"]) -> Tensor:
        return advance(states, tokens, checked, level=level)

    tokens = codes.expand(*states.shape, -1)
    return UncheckedChildren(tokens, torch.ones_like(tokens, dtype=torch.bool), states, follow)


def _wide_children(
    states: Int[Tensor, "batch beams"],
    part: DevicePart,
    table: WideLevel,
    rule_of_row: Int[Tensor, " batch"] | None,
    level: int,
) -> WideChildren:
    """The children of the nodes that have a row in a level's table, one entry for every token of its span."""
    trie, num_tokens = part.trie, table.num_tokens
    nodes = table.rows(states)
    living = hidden = None
    if part.living is not None and (bits := part.living[level]) is not None:
        living = bits, nodes if rule_of_row is None else nodes + (rule_of_row * len(table.first))[:, None]
    if part.hidden is not None and (below := part.hidden[level]) is not None:
        first, after = trie.child_bounds(states, level=level)[:, :, None].unbind(-1)
        columns = trie.tokens.take(below) + (trie.constants[level].token_base - table.first_token)
        hidden = columns.clamp(0, num_tokens - 1), (below[:, None] >= first) & (below[:, None] < after)
    return WideChildren(table.tokens.expand(*states.shape, -1), table, nodes, living, hidden)


def _only_children(states: Int[Tensor, "batch beams"], trie: DeviceTrie, level: int) -> OnlyChildren:
    """The children of a level whose nodes have one each, all alive where their parents are."""
    start, end, after = trie.level_starts[level : level + 3]
    below = states + (end - start)
    # What is no node of the level reads some token of it.
    tokens = trie.tokens.take(below.clamp(end, after - 1)).long()
    if trie.has_bases:
        tokens = tokens + trie.token_bases[level]
    return OnlyChildren(tokens[..., None], below, end, after)


def _merged_children(
    states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, added: DevicePart, level: int
) -> PlainChildren:
    """The children in both segments; those in one of them, where the other has no such level."""
    assert catalogue.twins is not None
    base, rules = catalogue.base, catalogue.rule_of_row
    in_added, nodes = _both_nodes(states, catalogue) if level else (states, states)
    if level >= len(added.trie.branching):
        return _part_children(nodes, base, rules, level)
    new = _part_children(in_added, added, rules, level)
    states_of_new = new.states + base.trie.num_nodes
    if level >= len(base.trie.branching):
        return replace(new, states=states_of_new)
    old = _part_children(nodes, base, rules, level)
    # A child that is in both is reached through `added`, which knows its twin.
    shadowed = torch.where(new.legal, catalogue.twins[new.states.clamp(max=added.trie.num_nodes - 1)], -1)
    first, after = base.trie.child_bounds(nodes, level=level).unbind(-1)
    return PlainChildren(
        tokens=torch.cat([old.tokens, new.tokens], dim=-1),
        legal=torch.cat([_hide(old.legal, shadowed, first, after - first), new.legal], dim=-1),
        states=torch.cat([old.states, states_of_new], dim=-1),
    )


def _part_children(
    nodes: Int[Tensor, "batch beams"],
    part: DevicePart,
    rule_of_row: Int[Tensor, " batch"] | None,
    level: int,
    *,
    most: int | None = None,
) -> PlainChildren:
    """The children of one segment's nodes; of nodes that have at most so many."""
    trie = part.trie
    constants, branching = trie.constants[level], trie.branching[level] if most is None else most
    bounds = trie.child_bounds(nodes, level=level)
    first, after = bounds[..., :1], bounds[..., 1:]
    below = first if branching == 1 else first + constants.places[:branching]
    legal = below < after
    if part.alive is not None and (bits := part.alive[level]) is not None:
        local = (below - trie.level_starts[level + 1]).clamp(max=8 * bits.shape[1] - 1)
        legal = legal & _are_alive(local, bits, rule_of_row)
    hidden = None if part.hidden is None else part.hidden[level]
    if hidden is not None and hidden.shape[1] <= 2 * branching:
        of_beams = hidden[:, None].expand(-1, nodes.shape[1], -1)
        legal = _hide(legal, of_beams, first[..., 0], (after - first)[..., 0])
    elif hidden is not None:  # so many that looking each child up among them is cheaper
        flat = below.flatten(1).contiguous()
        at = torch.searchsorted(hidden, flat).clamp_(max=hidden.shape[1] - 1)
        legal = legal & (hidden.gather(1, at) != flat).view(legal.shape)
    tokens = trie.tokens_of(below, level=level)
    if not trie.has_bases:
        return PlainChildren(tokens.long(), legal, below)
    # A window may reach a level with another base, where this is no token.
    return PlainChildren((tokens + constants.token_base) * legal, legal, below)


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
    # What is not a child here goes to an extra column that is cut off again.
    slots = torch.where((places >= 0) & (places < count[..., None]), places, legal.shape[-1])
    return torch.nn.functional.pad(legal, (0, 1)).scatter(-1, slots, False)[..., :-1]


def _without_added(part: DevicePart, views: Sequence[Snapshot]) -> DevicePart:
    """A segment that is all there is: its tables serve, and what one child alone continues is checked above it.

    Beside another segment, a prefix that is dead here may be alive there.
    """
    trie, alive, hidden = part.trie, part.alive, part.hidden
    _ = trie.root  # made here: a captured step must not wait for the device
    living = None
    if alive is not None:
        living = living_bits([view.alive or view.items.all_alive for view in views], trie, alive)
    wide = trie.wide if alive is None or living is not None else None
    # The root is not checked above.
    is_checked = [level > 0 and trie.is_chain(level) for level in range(len(trie.branching))]
    if alive is not None:
        alive = tuple(None if done else bits for done, bits in zip(is_checked, alive, strict=True))
    if hidden is not None:
        hidden = tuple(None if done else nodes for done, nodes in zip(is_checked, hidden, strict=True))
    return replace(part, alive=alive, hidden=hidden, wide=wide, living=living)


def _device_part(rules: BatchRules, device: torch.device) -> DevicePart:
    """One segment of a batch: its trie, one row of bits for every rule, its hidden nodes."""
    items = rules.shared.items
    alive: tuple[Tensor, ...] | None = None
    lives = [snapshot.alive for snapshot in rules.snapshots]
    if any(live is not None for live in lives):
        moved = [bits_on_device(live or items.all_alive, device) for live in lives]
        stacked: dict[tuple[int, ...], Tensor] = {}  # levels without branches share their bits
        for level in zip(*moved, strict=True):
            if (key := tuple(map(id, level))) not in stacked:
                stacked[key] = level[0][None] if len(moved) == 1 else torch.stack(level)
        alive = tuple(stacked[tuple(map(id, level))] for level in zip(*moved, strict=True))
    hidden = None
    if rules.excluded:
        nodes = rules.excluded
        ascending = [None if level is None else np.sort(level, axis=1) for level in nodes]
        hidden = tuple(None if level is None else to_device(level, device) for level in ascending)
    return DevicePart(on_device(items.trie, device), alive, hidden)
