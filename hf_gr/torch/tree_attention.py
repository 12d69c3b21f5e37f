# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of tree nodes in two parts: over the prompt that they share, and over each node's own ancestors.

The prompt's keys are read once for all nodes: these, and the query heads of a key head, are folded into one axis. No
mask is made where nothing is padded, and the prompt's keys are never copied nor repeated; a node's few ancestors are
gathered. Each part tells its weight, by which they are merged. On a CPU few nodes attend to all keys at once, under a
mask that is made once a forward, by PyTorch's own function. Knows no trie and no model. `Tree.attention_mask` is the
slow twin.

Source: xGR, section 5 (shared and unshared keys, one partial result each, merged by their softmax statistics), with
an ancestry table instead of reordered keys; FlashDecoding for the merge.

Axes: B batch, H query heads, h key heads, G = H / h, N nodes, P prompt, S slots, D ancestors, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .attention_kernels import Bias, attend, exact
from .tree import Tree

# Up to so many slots for each ancestor, one call over all keys under a mask is faster than two parts. Measured on a
# CPU (examples/benchmark/attention.py). On other devices all sizes are in parts: a mask keeps FlashAttention away.
SLOTS_AT_ONCE = {"cpu": 32}


@dataclass(frozen=True)
class TreeAttention:
    """What the attention of one forward of tree nodes needs besides queries, keys and values.

    Attributes:
        ancestry: slots of each node's ancestors and its own, as in `Tree`.
        is_level: whether all nodes have one depth, so that nothing is NO_SLOT.
        num_slots: keys after the prompt's, those of this forward included.
        prompt_mask: real tokens of the prompt; None if all are.
        depths: tokens from the prompt to each node: one number if all have one depth.
        made: what layers have in common, kept from the first one that needs it.
    """

    ancestry: Int[Tensor, "batch nodes depth"]
    is_level: bool
    num_slots: int
    prompt_mask: Bool[Tensor, "batch prompt"] | None
    depths: int | Int[Tensor, "#batch nodes"]
    made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to(self, device: torch.device) -> TreeAttention:
        """The same on another device, for models that are spread over several."""
        if self.ancestry.device == device:
            return self
        return self.kept(("on", device), (), lambda: self._copied(device))

    def _copied(self, device: torch.device) -> TreeAttention:
        return replace(
            self,
            ancestry=self.ancestry.to(device),
            prompt_mask=None if self.prompt_mask is None else self.prompt_mask.to(device),
            depths=self.depths if isinstance(self.depths, int) else self.depths.to(device),
        )

    def kept(self, name: Any, inputs: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns for inputs; layers with the same inputs share it.

        Args:
            name: of the thing, known when a program is traced.
            inputs: what it is made of besides this tree.
            make: computes it.
        """
        known = self.made.get(name)
        if known is None or known[0] != inputs:
            known = self.made[name] = (inputs, make())
        return known[1]


def tree_attention(
    query: Float[Tensor, "batch heads nodes width"],
    key: Float[Tensor, "batch key_heads keys width"],
    value: Float[Tensor, "batch key_heads keys value_width"],
    tree: TreeAttention,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "batch nodes heads value_width"]:
    """What every node makes of the prompt's real tokens, its ancestors and itself.

    Args:
        query: of the nodes.
        key: of the prompt's last tokens (a sliding layer may have dropped earlier ones), then of all slots.
        value: likewise.
        tree: who sees whom.
        scale: of the products.
        window: how far back a node sees, itself included; None for everything.
        softcap: the bound that a tanh puts on scores (Gemma 2).

    Example:
        >>> tree = TreeAttention(torch.tensor([[[0], [1]]]), True, 2, None, 1)  # two nodes below a prompt
        >>> value = torch.tensor([1.0, 2.0, 3.0, 6.0])[None, None, :, None].expand(1, 1, 4, 8)  # a prompt of two
        >>> tree_attention(torch.zeros((1, 1, 2, 8)), torch.zeros((1, 1, 4, 8)), value, tree, scale=1.0)[0, :, 0, 0]
        tensor([2., 3.])
    """
    batch_size, num_heads, num_nodes, width = query.shape
    num_key_heads, length = key.shape[1], key.shape[2] - tree.num_slots
    first = _first_seen(tree, length, window)
    if softcap is None and tree.num_slots <= SLOTS_AT_ONCE.get(query.device.type, 0) * tree.ancestry.shape[-1]:
        found = torch.nn.functional.scaled_dot_product_attention(
            query,
            key[:, :, first:],
            value[:, :, first:],
            attn_mask=_bias_of_all(tree, length, window, query.dtype),
            scale=scale,
            enable_gqa=num_heads > num_key_heads,
        )
        return found.transpose(1, 2).contiguous()

    options = {"scale": scale, "softcap": softcap}
    folded = query.reshape(batch_size, num_key_heads, -1, width)
    # By nodes: [B, N, h, G, ...]
    of_node = query.transpose(1, 2).reshape(batch_size * num_nodes, num_key_heads, -1, width)
    gathered = (_of_ancestors(states[:, :, length:], tree, window) for states in (key, value))
    found, weight = attend(of_node, *gathered, bias=_bias_of_ancestors(tree, window, query.dtype), **options)
    own, own_weight = (states.unflatten(0, (batch_size, num_nodes)) for states in (found, weight))
    if first < length:
        bias = _bias_of_prompt(tree, length, window, num_heads // num_key_heads, query.dtype)
        keys, values = (states[:, :, first:length] for states in (key, value))
        found, weight = attend(folded, keys, values, bias=bias, **options)
        shared, weight = (states.unflatten(2, (-1, num_nodes)).movedim(3, 1) for states in (found, weight))
        # In float32: a weight of 0.998 in bfloat16 would be wrong by the whole part of the ancestors.
        share, dtype = torch.sigmoid(weight - own_weight)[..., None], exact(query.dtype)
        own = torch.lerp(own.to(dtype), shared.to(dtype), share)
    return own.to(value.dtype, memory_format=torch.contiguous_format).reshape(batch_size, num_nodes, num_heads, -1)


def _first_seen(tree: TreeAttention, length: int, window: int | None) -> int:
    """The first of the prompt's keys that a node may see, by the window alone."""
    if window is None or not isinstance(tree.depths, int):
        return 0
    # The nearest prompt token is `depth` steps behind a node, and `window - 1` steps behind are still seen.
    return min(max(length + tree.depths - window, 0), length)


def _bias_of_prompt(
    tree: TreeAttention, length: int, window: int | None, num_groups: int, dtype: torch.dtype
) -> Bias | None:
    """Who sees which of the prompt's keys, from the first one that a node may see on; None if all see all."""
    by_node = window is not None and not isinstance(tree.depths, int)
    if tree.prompt_mask is None and not by_node:
        return None

    def make() -> Bias:
        first = _first_seen(tree, length, window)
        seen = None
        if tree.prompt_mask is not None:
            seen = tree.prompt_mask[:, None, tree.prompt_mask.shape[1] - length + first :]
        if window is not None and not isinstance(tree.depths, int):
            near = torch.arange(length, device=tree.depths.device) >= length - window + tree.depths[..., None]
            seen = near if seen is None else near & seen
        assert seen is not None
        return Bias.of(_for_groups(seen, num_groups), dtype, sees_some=False)

    return tree.kept(("prompt", window), (length, num_groups, dtype), make)


def _bias_of_ancestors(tree: TreeAttention, window: int | None, dtype: torch.dtype) -> Bias | None:
    """Which of its ancestors every node has, `[B * N, 1, 1, D]`; None if all have all."""
    if tree.is_level:
        return None

    def make() -> Bias:
        slots = _seen_ancestry(tree, window)
        return Bias.of((slots >= 0).flatten(0, 1)[:, None, None], dtype, sees_some=True)

    return tree.kept(("ancestors", window), dtype, make)


def _bias_of_all(
    tree: TreeAttention, length: int, window: int | None, dtype: torch.dtype
) -> Float[Tensor, "batch 1 nodes _"]:
    """Who sees which of all keys, from the first one of the prompt's that a node may see on: 0 or `-inf`."""

    def make() -> Tensor:
        device, depths, nodes = tree.ancestry.device, tree.depths, tree.ancestry.shape[:2]
        if tree.prompt_mask is None:
            real = torch.ones((nodes[0], length), dtype=torch.bool, device=device)
        else:
            real = tree.prompt_mask[:, tree.prompt_mask.shape[1] - length :]
        depths = torch.full((1, 1), depths, device=device) if isinstance(depths, int) else depths
        own = Tree(tree.ancestry, tree.num_slots, tree.is_level)
        seen = own.attention_mask(real, window, depths=depths.expand(nodes))
        seen = seen[..., _first_seen(tree, length, window) :]
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)

    return tree.kept(("all", window), (length, dtype), make)


def _for_groups(seen: Bool[Tensor, "batch _ keys"], num_groups: int) -> Bool[Tensor, "batch 1 _ keys"]:
    """The same for the rows of a key head, which are query heads by nodes; one row stays one row."""
    seen = seen[:, None]
    return seen if seen.shape[2] == 1 else seen.repeat(1, 1, num_groups, 1)


def _seen_ancestry(tree: TreeAttention, window: int | None) -> Int[Tensor, "batch nodes _"]:
    return tree.ancestry if window is None else tree.ancestry[..., -window:]


def _of_ancestors(
    states: Float[Tensor, "batch key_heads slots width"], tree: TreeAttention, window: int | None
) -> Float[Tensor, "_ key_heads _ width"]:
    """Keys or values of each node's ancestors and its own, `[B * N, h, D, W]`."""
    batch_size, num_heads, num_slots, width = states.shape
    num_nodes, num_seen = _seen_ancestry(tree, window).shape[1:]
    shape = batch_size * num_nodes, num_heads, num_seen, width
    of_request, of_head, of_slot, of_number = states.stride()
    of_request, of_head = of_request * (batch_size > 1), of_head * (num_heads > 1)
    if of_number != 1 or of_slot == 0 or of_request % of_slot or of_head % of_slot:
        # Memory in another order: number by number, 2 to 45 times as slow on a CPU.
        wide = states[:, None].expand(-1, num_nodes, -1, -1, -1)
        return wide.gather(3, _slots(tree, window)[:, :, None, :, None].expand(-1, -1, num_heads, -1, width)).view(
            shape
        )
    steps = of_request // of_slot, of_head // of_slot
    # The memory as one table with a row for every key: rows are copied as they are, in the order that is needed.
    num_rows = steps[0] * (batch_size - 1) + steps[1] * (num_heads - 1) + num_slots
    table = states.as_strided((num_rows, width), (of_slot, 1))

    def make() -> Tensor:
        slots = _slots(tree, window)
        heads = torch.arange(num_heads, device=slots.device)[:, None] * steps[1]
        requests = torch.arange(batch_size, device=slots.device)[:, None, None, None] * steps[0]
        return (slots[:, :, None] + heads + requests).flatten()

    return table.index_select(0, tree.kept(("rows", window), (num_heads, steps), make)).view(shape)


def _slots(tree: TreeAttention, window: int | None) -> Int[Tensor, "batch nodes _"]:
    """Slots that exist: any other one for NO_SLOT, which a bias hides."""
    slots = _seen_ancestry(tree, window)
    return slots if tree.is_level else slots.clamp(min=0)
