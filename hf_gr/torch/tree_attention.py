# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of tree nodes in two parts: over the prompt that they share, and over each node's own ancestors.

The prompt's keys are read once for all nodes: these, and the query heads of a key head, are folded into one axis, and
keys are never copied nor repeated; a node's few ancestors are gathered. Each part returns the log-sum-exp of its
scores, by which the parts are merged. A few nodes, or any number on a device, attend to all keys at once instead,
with a mask made once per forward, by PyTorch's own function, which chooses a kernel. Knows no trie and no model.
`Tree.attention_mask` is the slow twin.

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

from .tree import Tree

# Up to so many slots for each ancestor, one call over all keys under a mask is faster than two parts: measured on a
# CPU. Devices attend to all keys at once: two parts are ten launches and more.
SLOTS_AT_ONCE = 32
ALIGNMENT = 16  # numbers, to which scaled_dot_product_attention would pad the rows of a mask in every layer


@dataclass(frozen=True)
class TreeAttention:
    """What the attention of one forward of tree nodes needs, other than queries, keys and values.

    Results that all layers share are made by the first one that needs them, and kept (`made`).
    """

    tree: Tree
    prompt_mask: Bool[Tensor, "batch prompt"]  # real tokens
    depths: int | Int[Tensor, "#batch nodes"]  # one number if all nodes have one
    made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to(self, device: torch.device) -> TreeAttention:
        """The same on another device, for models that are spread over several."""
        if self.prompt_mask.device == device:
            return self
        return self.kept(_copied, None, device)

    def kept(self, make: Callable[..., Any], window: int | None, *inputs: Any) -> Any:
        """What `make` returns for a window and other inputs; layers with the same share it."""
        name = make.__name__, window  # which is known in tracing
        known = self.made.get(name)
        if known is None or known[0] != inputs:
            known = self.made[name] = (inputs, make(self, window, *inputs))
        return known[1]


def _copied(how: TreeAttention, window: None, device: torch.device) -> TreeAttention:
    depths = how.depths if isinstance(how.depths, int) else how.depths.to(device)
    tree = replace(how.tree, ancestry=how.tree.ancestry.to(device))
    return TreeAttention(tree, how.prompt_mask.to(device), depths)


def tree_attention(
    query: Float[Tensor, "batch heads nodes width"],
    # Of the prompt's last tokens (a sliding layer may have dropped earlier ones), then of all slots.
    key: Float[Tensor, "batch key_heads keys width"],
    value: Float[Tensor, "batch key_heads keys value_width"],
    how: TreeAttention,
    *,
    scale: float,
    window: int | None = None,  # how far back a node sees, itself included; None for everything
    softcap: float | None = None,  # the bound that a tanh puts on scores (Gemma 2)
) -> Float[Tensor, "batch nodes heads value_width"]:
    """The attention output of every node over the prompt's real tokens, its ancestors and itself.

    Example:
        >>> tree = Tree(torch.tensor([[[0], [1]]]), 2)  # two nodes below a prompt
        >>> how = TreeAttention(tree, torch.ones((1, 2), dtype=torch.bool), 1)
        >>> value = torch.tensor([1.0, 2.0, 3.0, 6.0])[None, None, :, None].expand(1, 1, 4, 8)  # a prompt of two
        >>> tree_attention(torch.zeros((1, 1, 2, 8)), torch.zeros((1, 1, 4, 8)), value, how, scale=1.0)[0, :, 0, 0]
        tensor([2., 3.])
    """
    tree, dtype = how.tree, query.dtype
    batch_size, num_heads, num_nodes, width = query.shape
    num_key_heads, length = key.shape[1], key.shape[2] - tree.num_slots
    num_groups = num_heads // num_key_heads
    folded = query.reshape(batch_size, num_key_heads, -1, width)
    is_small = query.device.type != "cpu" or tree.num_slots <= SLOTS_AT_ONCE * tree.depth
    if softcap is None and is_small:
        first, bias = how.kept(_all_keys, window, length, num_groups, dtype)
        found = torch.nn.functional.scaled_dot_product_attention(
            folded, key[:, :, first:], value[:, :, first:], attn_mask=bias, scale=scale
        )
        return found.reshape(batch_size, num_heads, num_nodes, -1).transpose(1, 2).contiguous()

    # By nodes: [B, N, h, G, ...]
    of_node = query.transpose(1, 2).reshape(batch_size * num_nodes, num_key_heads, -1, width)
    slots, bias = how.kept(_ancestors, window, dtype)
    own_keys = _of_slots(key[:, :, length:], slots, how, window)
    own_values = _of_slots(value[:, :, length:], slots, how, window)
    own, own_weight = _attend(of_node, own_keys, own_values, bias, scale, softcap)
    own = own.unflatten(0, (batch_size, num_nodes))
    first, bias, blind = how.kept(_prompts_keys, window, length, num_groups, dtype)
    if first < length:
        keys, values = key[:, :, first:length], value[:, :, first:length]
        shared, weight = _attend(folded, keys, values, bias, scale, softcap)
        weight = weight.masked_fill(blind, -torch.inf).unflatten(2, (-1, num_nodes)).movedim(3, 1)
        shared = shared.unflatten(2, (-1, num_nodes)).movedim(3, 1)
        # In float32: a weight of 0.998 in bfloat16 would be wrong by the whole part of the ancestors.
        share = torch.sigmoid(weight - own_weight.unflatten(0, (batch_size, num_nodes)))[..., None]
        own = torch.lerp(own.to(weight.dtype), shared.to(weight.dtype), share)
    return own.to(value.dtype, memory_format=torch.contiguous_format).reshape(batch_size, num_nodes, num_heads, -1)


def _attend(
    query: Float[Tensor, "batch key_heads rows width"],
    key: Float[Tensor, "batch key_heads keys width"],
    value: Float[Tensor, "batch key_heads keys value_width"],
    bias: Float[Tensor, "batch 1 _ keys"] | None,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "batch key_heads rows value_width"], Float[Tensor, "batch key_heads rows"]]:
    """`softmax(scale * query @ key.T + bias) @ value`, and the log-sum-exp of the same scores, at least in float32."""
    if softcap is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        if query.dtype == key.dtype == value.dtype and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
            # scaled_dot_product_attention calls this, but does not return the log-sum-exp.
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return attend(query, key, value, attn_mask=bias, scale=scale)
    return _by_products(query, key, value, bias, scale, softcap)


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """`_attend` of any dtypes, widths, memory and device."""
    dtype = query.dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    if softcap is None:  # models that have one come with eager attention, which rounds products
        query, key, value = (each.to(exact) for each in (query, key, value))
    scores = (query @ key.mT).to(exact) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return (scores.softmax(-1).to(value.dtype) @ value).to(dtype), scores.logsumexp(-1)


def _first_seen(how: TreeAttention, length: int, window: int | None) -> int:
    """The first of the prompt's keys that a node may see, by the window alone."""
    if window is None or not isinstance(how.depths, int):
        return 0
    # The nearest prompt token is `depth` steps before a node, which sees up to `window - 1` steps back.
    return min(max(length + how.depths - window, 0), length)


def _additive(seen: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """0 for a key that is seen, else `-inf`; in memory whose rows are aligned."""
    hidden = torch.nn.functional.pad(~seen, (0, -seen.shape[-1] % ALIGNMENT))
    bias = torch.zeros(hidden.shape, dtype=dtype, device=seen.device).masked_fill(hidden, -torch.inf)
    return bias[..., : seen.shape[-1]]


def _all_keys(
    how: TreeAttention, window: int | None, length: int, num_groups: int, dtype: torch.dtype
) -> tuple[int, Float[Tensor, "batch 1 rows _"]]:
    """The first of the prompt's keys that a node may see, and the bias of all keys from there on."""
    first, depths = _first_seen(how, length, window), None if isinstance(how.depths, int) else how.depths
    real = how.prompt_mask[:, how.prompt_mask.shape[1] - length :]
    seen = how.tree.attention_mask(real, window, depths=depths)[..., first:]
    return first, _additive(seen.repeat(1, 1, num_groups, 1), dtype)


def _prompts_keys(
    how: TreeAttention, window: int | None, length: int, num_groups: int, dtype: torch.dtype
) -> tuple[int, Float[Tensor, "batch 1 _ keys"], Bool[Tensor, "batch 1 _"]]:
    """The first of the prompt's keys that a node may see, the bias of those from there on, and who sees none.

    To those who see none all keys are shown: kernels differ about such rows.
    """
    first = _first_seen(how, length, window)
    seen = how.prompt_mask[:, None, None, how.prompt_mask.shape[1] - length + first :]
    if window is not None and not isinstance(how.depths, int):
        far = how.depths[:, None, :, None]
        near = torch.arange(length, device=far.device) >= length - window + far
        seen = (near & seen).repeat(1, 1, num_groups, 1)
    blind = ~seen.any(-1)
    return first, _additive(seen | blind[..., None], dtype), blind


def _ancestors(
    how: TreeAttention, window: int | None, dtype: torch.dtype
) -> tuple[Int[Tensor, "batch nodes seen"], Float[Tensor, "batch_nodes 1 1 seen"] | None]:
    """The slots that each node sees, itself included; and the bias that hides those that stand for none."""
    slots = how.tree.ancestry if window is None else how.tree.ancestry[..., -window:]
    if how.tree.is_level:
        return slots, None
    return slots.clamp(min=0), _additive((slots >= 0).flatten(0, 1)[:, None, None], dtype)


def _of_slots(
    states: Float[Tensor, "batch key_heads slots width"],
    slots: Int[Tensor, "batch nodes seen"],
    how: TreeAttention,
    window: int | None,
) -> Float[Tensor, "_ key_heads seen width"]:
    """Keys or values of each node's ancestors and its own, `[B * N, h, D, W]`."""
    batch_size, num_heads, num_slots, width = states.shape
    num_nodes, num_seen = slots.shape[1:]
    shape = batch_size * num_nodes, num_heads, num_seen, width
    of_request, of_head, of_slot, of_number = states.stride()
    of_request, of_head = of_request * (batch_size > 1), of_head * (num_heads > 1)
    if of_number != 1 or of_slot == 0 or of_request % of_slot or of_head % of_slot:
        # Memory in another order: number by number, 2 to 45 times as slow on a CPU.
        wide = states[:, None].expand(-1, num_nodes, -1, -1, -1)
        return wide.gather(3, slots[:, :, None, :, None].expand(-1, -1, num_heads, -1, width)).view(shape)
    steps = of_request // of_slot, of_head // of_slot
    # The memory as one table with a row for every key: rows are copied as they are, in the order that is needed.
    num_rows = steps[0] * (batch_size - 1) + steps[1] * (num_heads - 1) + num_slots
    table = states.as_strided((num_rows, width), (of_slot, 1))
    return table.index_select(0, how.kept(_rows_of_slots, window, num_heads, steps)).view(shape)


def _rows_of_slots(how: TreeAttention, window: int | None, num_heads: int, steps: tuple[int, int]) -> Tensor:
    """The rows of such a table, given how many there are from one request, and one head, to the next."""
    slots = how.tree.ancestry if window is None else how.tree.ancestry[..., -window:]
    slots = slots if how.tree.is_level else slots.clamp(min=0)
    heads = torch.arange(num_heads, device=slots.device)[:, None] * steps[1]
    requests = torch.arange(len(slots), device=slots.device)[:, None, None, None] * steps[0]
    return (slots[:, :, None] + heads + requests).flatten()
