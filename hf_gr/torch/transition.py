# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One trie step. Knows no beams and no model.

Source: STATIC, algorithm 2 (the vectorized node transition kernel), on a trie whose children are contiguous.
Axes: B batch, K beams, C children: the largest branching of the level, a static shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_gr.catalogue import ConstraintIndex


@dataclass(frozen=True)
class DeviceTrie:
    """A catalogue's trie on a device; the fields are those of `hf_gr.catalogue.trie.Trie`."""

    tokens: Int[Tensor, " nodes"]
    child_offsets: Int[Tensor, " offsets"]
    branching: tuple[int, ...]
    has_leaves: tuple[bool, ...]

    @property
    def max_length(self) -> int:
        """The number of levels."""
        return len(self.branching)

    @property
    def dead_state(self) -> int:
        """The state without children that stands for no prefix at all."""
        return len(self.child_offsets) - 2

    @property
    def is_ragged(self) -> bool:
        """Whether some sequence is shorter than another."""
        return any(self.has_leaves[:-1])


@dataclass(frozen=True)
class Children:
    """The children of every state, padded to the largest branching of the level.

    Attributes:
        tokens: the token that leads to each child; that of some other node where `legal` is false.
        states: the child's node.
        legal: whether there is such a child.
    """

    tokens: Int[Tensor, "batch beams children"]
    states: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]


_DEVICE_TRIES: WeakKeyDictionary[ConstraintIndex, dict[torch.device, DeviceTrie]] = WeakKeyDictionary()


def device_trie(index: ConstraintIndex, device: torch.device) -> DeviceTrie:
    """The trie of an index on a device, moved there once and kept as long as the index lives."""
    on_devices = _DEVICE_TRIES.setdefault(index, {})
    if device not in on_devices:
        on_devices[device] = DeviceTrie(
            tokens=torch.from_numpy(index.trie.tokens).to(device),
            child_offsets=torch.from_numpy(index.trie.child_offsets).to(device),
            branching=index.trie.branching,
            has_leaves=index.trie.has_leaves,
        )
    return on_devices[device]


def child_range(
    states: Int[Tensor, "*shape"], trie: DeviceTrie
) -> tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"]]:
    """First and one past the last child of every state."""
    states = states.clamp(max=trie.dead_state)
    return trie.child_offsets[states].long(), trie.child_offsets[states + 1].long()


def children(states: Int[Tensor, "batch beams"], trie: DeviceTrie, *, level: int) -> Children:
    """The children of every state of a level (level 0 is the root), in token order.

    In plain loops: `for b, k, c: child = first[b, k] + c; legal = child < last[b, k]; token = tokens[child]`.
    """
    first, last = child_range(states, trie)
    nodes = first[..., None] + torch.arange(trie.branching[level], device=states.device)
    legal = nodes < last[..., None]
    nodes = nodes.clamp(max=len(trie.tokens) - 1)
    return Children(tokens=trie.tokens[nodes].long(), states=nodes, legal=legal)


def is_leaf(states: Int[Tensor, "*shape"], trie: DeviceTrie) -> Bool[Tensor, "*shape"]:
    """Whether a sequence ends in this state (true for the dead state, too)."""
    first, last = child_range(states, trie)
    return first == last


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
    states: Int[Tensor, "batch beams"], tokens: Int[Tensor, "batch beams"], trie: DeviceTrie, *, level: int
) -> Int[Tensor, "batch beams"]:
    """Follow one token from every state: a leaf stays where it is, an illegal token leads to the dead state."""
    below = children(states, trie, level=level)
    hit = below.legal & (below.tokens == tokens[..., None])
    moved = torch.where(hit.any(-1), (below.states * hit).sum(-1), trie.dead_state)
    return torch.where(below.legal.any(-1), moved, states)
