# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of tree nodes in two parts: over the prompt that they share, and over each node's own ancestors.

The prompt's keys are read once for all nodes: these, and the query heads of a key head, are folded into one axis. No
mask is made, no key is copied or repeated. Both parts give the logarithm of their weight, by which they are merged.
Knows no trie and no model. `Tree.attention_mask` is the slow twin.

Source: xGR, section 5 (shared and unshared keys, one partial result each, merged by their softmax statistics).

Axes: B batch, H query heads, h key heads, G = H / h, N nodes, P prompt, S slots, D depth, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
# Added to the scores of keys that are not seen: no exponential survives it, and it is a number in every kernel.
HIDDEN = {torch.float16: -3e4}
HIDDEN_ELSE = -1e30


@dataclass(frozen=True)
class TreeAttention:
    """What the attention of one forward of tree nodes needs besides queries, keys and values.

    Attributes:
        ancestry: slots of each node's ancestors and its own, as in `Tree`.
        is_level: whether all nodes have one depth, so that nothing is NO_SLOT.
        num_slots: keys after the prompt's, those of this forward included.
        prompt_mask: real tokens of the prompt; None if all are.
        depths: tokens from the prompt to each node: one number if all have one depth.
    """

    ancestry: Int[Tensor, "batch nodes depth"]
    is_level: bool
    num_slots: int
    prompt_mask: Bool[Tensor, "batch prompt"] | None
    depths: int | Int[Tensor, "#batch nodes"]

    def to(self, device: torch.device) -> TreeAttention:
        """The same on another device, for models that are spread over several."""
        if self.ancestry.device == device:
            return self
        return replace(
            self,
            ancestry=self.ancestry.to(device),
            prompt_mask=None if self.prompt_mask is None else self.prompt_mask.to(device),
            depths=self.depths if isinstance(self.depths, int) else self.depths.to(device),
        )


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
    """
    prompt_length, num_groups = key.shape[2] - tree.num_slots, query.shape[1] // key.shape[1]
    query = query.unflatten(1, (-1, num_groups))
    own, own_weight = _over_ancestors(
        query, key[:, :, prompt_length:], value[:, :, prompt_length:], tree, scale, window, softcap
    )
    first, seen = _of_prompt(tree, prompt_length, window)
    answer = own
    if first < prompt_length:
        shared, weight = _over_prompt(
            query, key[:, :, first:prompt_length], value[:, :, first:prompt_length], seen, scale, softcap
        )
        answer = own.lerp(shared.to(own.dtype), torch.sigmoid(weight - own_weight)[..., None].to(own.dtype))
    return answer.to(value.dtype).flatten(1, 2).transpose(1, 2).contiguous()


def _over_ancestors(
    query: Float[Tensor, "batch key_heads groups nodes width"],
    key: Float[Tensor, "batch key_heads slots width"],
    value: Float[Tensor, "batch key_heads slots value_width"],
    tree: TreeAttention,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Tensor, "batch key_heads groups nodes value_width"], Float[Tensor, "batch key_heads groups nodes"]]:
    """Attention over the slots of each node's ancestors and its own, and the logarithm of its weight."""
    slots = tree.ancestry if window is None else tree.ancestry[..., -window:]
    at, seen = slots, None
    if not tree.is_level:
        at, seen = slots.clamp(min=0), (slots >= 0).repeat_interleave(query.shape[1], dim=0)[:, :, None]
    exact = torch.promote_types(query.dtype, torch.float32)  # what is merged is rounded once
    # Each node is a head of its own, whose rows are the query heads that share a key head.
    key, value = (states.to(exact) for states in _taken((key, value), at))
    found, weight = _attend(query.transpose(2, 3).flatten(0, 1).to(exact), key, value, seen, scale, softcap)
    shape = (*query.shape[:2], query.shape[3], query.shape[2])
    return found.view(*shape, -1).transpose(2, 3), weight.view(shape).transpose(2, 3)


def _taken(
    parts: tuple[Tensor, Tensor], at: Int[Tensor, "batch nodes depth"]
) -> Iterator[Float[Tensor, "batch_heads nodes depth _"]]:
    """The keys and values at slots; whole rows are copied, which `gather` does number by number."""
    batch_size, num_heads = parts[0].shape[:2]
    if batch_size == 1:
        found = (states[0].index_select(1, at.flatten()) for states in parts)
    else:
        rows = torch.arange(batch_size, device=at.device)[:, None, None]
        heads = torch.arange(num_heads, device=at.device)[None, :, None]
        flat = at.flatten(1)[:, None]
        found = (states[rows, heads, flat].flatten(0, 1) for states in parts)
    return (states.unflatten(1, at.shape[1:]) for states in found)


def _of_prompt(
    tree: TreeAttention, prompt_length: int, window: int | None
) -> tuple[int, Bool[Tensor, "batch _ keys"] | None]:
    """The first of the prompt's keys that a node may see, and which nodes see which from there on; None for all."""
    first, seen = 0, None
    if tree.prompt_mask is not None:
        seen = tree.prompt_mask[:, None, tree.prompt_mask.shape[1] - prompt_length :]
    if window is None:
        return first, seen
    # The nearest prompt token is `depth` steps behind a node, and `window - 1` steps behind are still seen.
    if isinstance(tree.depths, int):
        first = max(prompt_length + tree.depths - window, 0)
        return first, None if seen is None else seen[..., first:]
    places = torch.arange(prompt_length, device=tree.depths.device)
    near = places >= (prompt_length - window) + tree.depths[..., None]
    return first, near if seen is None else near & seen


def _over_prompt(
    query: Float[Tensor, "batch key_heads groups nodes width"],
    key: Float[Tensor, "batch key_heads keys width"],
    value: Float[Tensor, "batch key_heads keys value_width"],
    seen: Bool[Tensor, "batch _ keys"] | None,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "batch key_heads groups nodes value_width"], Float[Tensor, "batch key_heads groups nodes"]]:
    """Attention over keys that all nodes share, and the logarithm of its weight."""
    num_groups = query.shape[2]
    if seen is not None and seen.shape[1] > 1:  # it differs by node, and rows are query heads by nodes
        seen = seen.repeat(1, num_groups, 1)
    found, weight = _attend(query.flatten(2, 3), key, value, None if seen is None else seen[:, None], scale, softcap)
    return found.unflatten(2, (num_groups, -1)), weight.unflatten(2, (num_groups, -1))


def _attend(
    query: Float[Tensor, "batch heads rows width"],
    key: Float[Tensor, "batch heads keys width"],
    value: Float[Tensor, "batch heads keys value_width"],
    seen: Bool[Tensor, "batch _ _ keys"] | None,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "batch heads rows value_width"], Float[Tensor, "batch heads rows"]]:
    """Attention, and the logarithm of the sum of its exponentials."""
    bias = None
    if seen is not None:
        zeros = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
        bias = zeros.masked_fill(~seen, HIDDEN.get(query.dtype, HIDDEN_ELSE))
    kernel = _kernel(query.device.type, query, key, value, seen, softcap)
    return kernel(query, key, value, bias, scale, softcap)


Kernel = Callable[..., tuple[Tensor, Tensor]]


def _kernel(
    device: str, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, softcap: float | None
) -> Kernel:
    """The fastest way that fits: by what PyTorch's own kernels require."""
    width = query.shape[-1]
    if softcap is not None or width != value.shape[-1]:
        return _plain
    if device == "cpu":
        return _on_cpu
    if device != "cuda" or width % 8 or key.stride(-1) != 1 or value.stride(-1) != 1:
        return _plain
    if seen is None and query.dtype in HALF and width <= 256:
        return _by_flash
    return _by_efficient if query.dtype in (*HALF, torch.float32) else _plain


def _plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exact) @ key.to(exact).mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if bias is None else scores + bias
    weight = scores.logsumexp(-1)
    return ((scores - weight[..., None]).exp() @ value.to(exact)).to(value.dtype), weight


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: None
) -> tuple[Tensor, Tensor]:
    # The kernel takes a bias of all heads or of one, and of all rows.
    bias = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)


def _by_flash(
    query: Tensor, key: Tensor, value: Tensor, bias: None, scale: float, softcap: None
) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]


def _by_efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: None
) -> tuple[Tensor, Tensor]:
    if bias is not None:
        # The kernel reads 16 numbers at once: rows of a bias begin at multiples of that.
        num_keys = bias.shape[-1]
        bias = torch.nn.functional.pad(bias, (0, -num_keys % 16))[..., :num_keys]
        bias = bias.expand(*query.shape[:3], -1)
    found, weight = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)[:2]
    return found, weight[..., : query.shape[2]]  # whose rows are padded
