# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One trie step. Knows no beams and no model.

Source: STATIC, algorithm 2 (the vectorized node transition kernel), on a trie whose children are contiguous. What may
be dead is not in the trie: one bit per node says what is alive, and a few nodes per row are hidden.

Axes: B batch, K beams, C children: a static shape, the largest branching of the level, or on a CPU the beams' own;
E hidden nodes; U rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from hf_gr.catalogue.rules import BatchRules

from .device_trie import TAKEN_ONE_BY_ONE, DeviceTrie, moved, on_device, windows
from .ops import to_device

# Children of a level's largest node from which those of the beams are counted on a CPU, where that waits for nothing:
# in a skewed catalogue a few nodes have thousands, and most have one.
COUNTED_FROM = 64


@dataclass(frozen=True)
class Children:
    """The children of every state, padded to C; tokens and states mean nothing where `legal` is false."""

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]
    states: Int[Tensor, "batch beams children"]

    @property
    def shape(self) -> torch.Size:
        """B, K and C."""
        return self.tokens.shape

    def of(self, columns: slice) -> Children:
        """Some columns of children."""
        return Children(self.tokens[..., columns], self.legal[..., columns], self.states[..., columns])

    def take(
        self, places: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """Tokens and states at places among all children of a row."""
        return self.tokens.flatten(1).gather(1, places), self.states.flatten(1).gather(1, places)


@dataclass(frozen=True)
class DeviceCatalogue:
    """The sequences that may be generated for a batch. A state is a node of the trie; the root is 0.

    `alive` has by level from 1 one bit a node for every rule, `hidden` nodes hidden from each request, sorted,
    padded with the root. An illegal one of the `unchecked` tokens, which may follow anything on the first levels,
    leads to the dead state.
    """

    trie: DeviceTrie
    # None where everything is alive, or is if its parent is.
    alive: tuple[UInt8[Tensor, "rules _"] | None, ...] | None = None
    hidden: tuple[Int[Tensor, "batch _"] | None, ...] | None = None  # None without any
    rule_of_row: Int[Tensor, " batch"] | None = None  # None where there is one for all
    unchecked: tuple[Int[Tensor, " codes"], ...] = ()  # ascending
    bias: Float[Tensor, " nodes_and_padding"] | None = None  # `ItemBias.by_node`
    groups: Int[Tensor, " nodes_and_padding"] | None = None  # `ItemGroups.by_node`
    # Of its trie, at hand for every step:
    device: torch.device = field(init=False)
    max_length: int = field(init=False)  # the number of levels
    dead_state: int = field(init=False)  # the state without children that stands for no prefix at all
    has_leaves: tuple[bool, ...] = field(init=False)  # by level: whether a sequence can end with its next token
    is_ragged: bool = field(init=False)  # whether some sequence is shorter than another

    @property
    def nodes_per_level(self) -> tuple[int, ...]:
        """Nodes with 0 to L tokens, dead ones included."""
        starts = self.trie.level_starts
        return tuple(end - start for start, end in zip(starts, starts[1:], strict=False))

    def __post_init__(self) -> None:
        has_leaves = self.trie.has_leaves
        facts = {"device": self.trie.tokens.device, "max_length": len(has_leaves), "dead_state": self.trie.num_nodes}
        vars(self).update(facts, has_leaves=has_leaves, is_ragged=any(has_leaves[:-1]))

    def is_leaf(self, states: Int[Tensor, "batch beams"], *, level: int) -> Bool[Tensor, "batch beams"]:
        """Whether a sequence ends in each state of a level, or of one above it; true for the dead state, too."""
        return self.trie.is_leaf(states, level=level)

    def biased(
        self, scores: Float[Tensor, "batch beams children"], states: Int[Tensor, "batch beams"], legal: Children
    ) -> Float[Tensor, "batch beams children"]:
        """The scores of a step with the terms of items' biases."""
        if self.bias is None:
            return scores
        return scores + (self.bias[legal.states] - self.bias[states][..., None])


@torch.inference_mode(False)  # what is kept here serves training, too
def device_catalogue(rules: BatchRules, device: torch.device) -> DeviceCatalogue:
    """A batch's catalogue on a device; tries and rules move there once, the rest without synchronising."""
    if rules.rule_of_row is None and not rules.excluded:  # the same for all batches
        made = moved(rules.shared, device, lambda snapshot, device: _of_batch(BatchRules((snapshot,)), device))
    else:
        made = _of_batch(rules, device)
    values = {"bias": rules.bias, "groups": rules.groups}
    given = {name: on_device(value, device) for name, value in values.items() if value is not None}
    return replace(made, **given) if given else made


def _of_batch(rules: BatchRules, device: torch.device) -> DeviceCatalogue:
    trie = on_device(rules.shared.trie, device)
    # An only child is alive if its parent is, which is checked above; the root is not checked.
    is_checked = [number > 0 and level.is_chain for number, level in enumerate(trie.levels)]
    alive: tuple[Tensor | None, ...] | None = None
    if any(snapshot.alive is not None for snapshot in rules.snapshots):
        of_rules = [on_device(snapshot.alive or snapshot.items.all_alive, device) for snapshot in rules.snapshots]
        levels = zip(is_checked, zip(*of_rules, strict=True), strict=True)
        alive = tuple(
            None if done else bits[0][None] if len(bits) == 1 else torch.stack(bits) for done, bits in levels
        )
    hidden: tuple[Tensor | None, ...] | None = None
    if rules.excluded:
        hidden = tuple(
            None if done or nodes is None else to_device(np.sort(nodes, axis=1), device)
            for done, nodes in zip(is_checked, rules.excluded, strict=True)
        )
    rule_of_row = None if rules.rule_of_row is None else to_device(rules.rule_of_row, device)
    return DeviceCatalogue(trie, alive, hidden, rule_of_row)


def children(states: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int) -> Children:
    """The living children of every living state of a level (level 0 is the root), in token order.

    In plain loops: `for b, k, c: child = first[b, k] + c; legal = c < count[b, k] and alive[child]; token =
    tokens[child]`.
    """
    if level < len(catalogue.unchecked):
        checked = children(states, replace(catalogue, unchecked=()), level=level)
        return _unchecked_children(checked, catalogue.unchecked[level], catalogue.dead_state)
    trie, of = catalogue.trie, catalogue.trie.levels[level]
    first, after = trie.child_bounds(states, level=level)
    places, number = of.places, after - first
    if level and len(places) > COUNTED_FROM and states.device.type == "cpu" and not torch.compiler.is_compiling():
        places = places[: max(int(number.max()), 1)]
    below, legal = first + places, places < number
    if catalogue.alive is not None and (bits := catalogue.alive[level]) is not None:
        legal = legal & _are_alive(below - trie.level_starts[level + 1], bits, catalogue.rule_of_row)
    if catalogue.hidden is not None and (hidden := catalogue.hidden[level]) is not None:
        legal = _without(legal, below, hidden)
    if below.shape[-1] <= TAKEN_ONE_BY_ONE:
        tokens = trie.tokens.take(below).long()
    else:
        tokens = windows(trie.tokens, first[..., 0], size=below.shape[-1]).long()
    if trie.has_bases:  # a window may reach a level with another base, where this is no token
        tokens = (tokens + of.token_base) * legal
    return Children(tokens, legal, below)


def over_vocabulary(
    scores: Float[Tensor, "batch beams children"], legal: Children, vocab_size: int
) -> Float[Tensor, "batch beams vocab"]:
    """The scores of legal children in their tokens' places, `-inf` everywhere else."""
    # An illegal entry repeats some other node's token: point it at an extra column that is cut off again.
    tokens = torch.where(legal.legal, legal.tokens, vocab_size)
    nothing = torch.full((*scores.shape[:-1], vocab_size + 1), -torch.inf, dtype=scores.dtype, device=scores.device)
    return nothing.scatter(-1, tokens, scores)[..., :-1]


def advance(
    states: Int[Tensor, "batch beams"], tokens: Int[Tensor, "batch beams"], catalogue: DeviceCatalogue, *, level: int
) -> Int[Tensor, "batch beams"]:
    """Follow one token from every state: a leaf stays where it is, an illegal token leads to the dead state."""
    below = children(states, catalogue, level=level)
    hit = below.legal & (below.tokens == tokens[..., None])
    found = below.states.gather(-1, hit.int().argmax(-1, keepdim=True))[..., 0]
    moved = torch.where(hit.any(-1), found, catalogue.dead_state)
    return torch.where(below.legal.any(-1), moved, states)


def _unchecked_children(below: Children, codes: Int[Tensor, " codes"], dead_state: int) -> Children:
    """All codes of a level, which ascend, as children of every state; those that are no legal children are dead."""
    number, tokens = len(codes), codes.expand(*below.shape[:2], -1)
    columns = torch.where(below.legal, torch.searchsorted(codes, below.tokens), number)
    nowhere = torch.full((*below.shape[:2], number + 1), dead_state, device=codes.device)
    states = nowhere.scatter(-1, columns, below.states)[..., :-1]
    return Children(tokens, torch.ones_like(tokens, dtype=torch.bool), states)


def _are_alive(
    below: Int[Tensor, "batch beams children"], bits: UInt8[Tensor, "rules bytes"], rule_of_row: Tensor | None
) -> Bool[Tensor, "batch beams children"]:
    """The flags of consecutive nodes, which are numbered within their level."""
    size = below.shape[-1]
    is_window = size > TAKEN_ONE_BY_ONE
    nodes = below[..., :1] if is_window else below
    start = nodes >> 3 if rule_of_row is None else (nodes >> 3) + (rule_of_row * bits.shape[1])[:, None, None]
    if not is_window:
        return (bits.take(start) >> (below & 7) & 1).bool()
    found = windows(bits.flatten(), start[..., 0], size=(size + 14) // 8)
    flags = (found[..., None] >> torch.arange(8, dtype=torch.uint8, device=found.device) & 1).bool().flatten()
    before = torch.arange(0, len(flags), 8 * found.shape[-1], device=flags.device).view(start.shape[:-1])
    return windows(flags, before + (nodes[..., 0] & 7), size=size)


def _without(
    legal: Bool[Tensor, "batch beams children"],
    below: Int[Tensor, "batch beams children"],
    hidden: Int[Tensor, "batch hidden"],
) -> Bool[Tensor, "batch beams children"]:
    """The same without consecutive nodes that are hidden from their row; the hidden ones ascend."""
    size, number = legal.shape[-1], hidden.shape[1]
    if size <= TAKEN_ONE_BY_ONE:
        nodes = below.flatten(1)
        at = torch.searchsorted(hidden, nodes).clamp(max=number - 1)
        return legal & (hidden.gather(1, at) != nodes).view(legal.shape)
    first = below[..., :1]
    at = torch.searchsorted(hidden, first[..., 0].contiguous())[..., None]
    at = (at + torch.arange(min(size, number), device=first.device)).clamp(max=number - 1)
    places = hidden.gather(1, at.flatten(1)).view(at.shape) - first
    slots = torch.where((places >= 0) & (places < size), places, size)  # an extra column, which is cut off again
    return torch.nn.functional.pad(legal, (0, 1)).scatter(-1, slots, False)[..., :-1]
