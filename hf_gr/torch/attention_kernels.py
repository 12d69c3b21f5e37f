# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention that also tells the weight of its keys, by the kernel that fits. Knows no trees and no model.

The weight of some keys is the log-sum-exp of their scores: results over different keys are merged by it, as
FlashDecoding does. `scaled_dot_product_attention` keeps it to itself, so the kernels are called that it calls, with
what it requires of them (its `sdp_utils.cpp`, `attention.cu` and `kernel_forward.h`). The CPU's is measured with torch
2.13; those of CUDA have not run, their shapes are checked by torch's own descriptions of them.

Public functions that tell the weight would copy or compile: `varlen_attn` takes keys that are packed by rows, and
only on CUDA; `flex_attention` is meant to be compiled.

Axes: B batch, h key heads, R rows (queries of a key head), S keys, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
MOST_BLOCKS = 65535  # of a CUDA grid along the axes of requests and heads
FLASH_WIDTH = 256  # the widest head of FlashAttention
AMPERE = 8  # the first generation with FlashAttention, and with bfloat16
BIAS_ALIGNMENT = 16  # numbers, as scaled_dot_product_attention pads masks for the efficient kernel


@dataclass(frozen=True)
class Bias:
    """What keeps rows from seeing keys.

    Attributes:
        scores: added to them, `-inf` for a key that is not seen. A row that sees none has 0 everywhere, because
            kernels differ about such rows.
        weight: added to a row's weight, `-inf` if it sees no key; None if each sees one.
    """

    scores: Float[Tensor, "batch 1 _ keys"]
    weight: Float[Tensor, "batch 1 _"] | None = None

    @classmethod
    def of(cls, seen: Bool[Tensor, "batch 1 _ keys"], dtype: torch.dtype, *, sees_some: bool) -> Bias:
        """For kernels of queries of a dtype.

        Args:
            seen: which rows see which keys; one row stands for all.
            dtype: of the queries.
            sees_some: whether each row is known to see a key.
        """
        weight = None
        if not sees_some:
            is_blind = ~seen.any(-1)
            weight = torch.zeros(is_blind.shape, dtype=exact(dtype), device=seen.device)
            weight = weight.masked_fill(is_blind, -torch.inf)
            seen = seen | is_blind[..., None]
        num_keys = seen.shape[-1]
        hidden = torch.nn.functional.pad(~seen, (0, -num_keys % BIAS_ALIGNMENT))
        scores = torch.zeros(hidden.shape, dtype=dtype, device=seen.device).masked_fill(hidden, -torch.inf)
        return cls(scores[..., :num_keys], weight)


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype of weights: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    query: Float[Tensor, "batch key_heads rows width"],
    key: Float[Tensor, "batch key_heads keys width"],
    value: Float[Tensor, "batch key_heads keys value_width"],
    *,
    scale: float,
    bias: Bias | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "batch key_heads rows value_width"], Float[Tensor, "batch key_heads rows"]]:
    """`softmax(scale * query @ key.T + bias) @ value` and the weight, the log-sum-exp of the same scores.

    Keys may be views of larger memory: no kernel copies or repeats them. For a row that sees nothing the weight is
    `-inf` and the result finite.

    Args:
        query: of every key head.
        key: at least one.
        value: as wide as keys or not.
        scale: of the products.
        bias: what keeps rows from seeing keys; None if they see all.
        softcap: the bound that a tanh puts on scores (Gemma 2).

    Example:
        >>> ones = torch.ones((1, 1, 2, 4))
        >>> found, weight = attend(ones, ones, 3 * ones, scale=0.25)
        >>> found[0, 0, 0].tolist(), weight[0, 0].tolist()  # log(exp(1) + exp(1))
        ([3.0, 3.0, 3.0, 3.0], [1.6931471824645996, 1.6931471824645996])
    """
    kernel = _kernel_of(query, key, value, has_bias=bias is not None, softcap=softcap)
    found, weight = kernel(query, key, value, None if bias is None else bias.scores, scale, softcap)
    if bias is not None and bias.weight is not None:
        weight = weight + bias.weight
    return found, weight


Kernel = Callable[..., tuple[Tensor, Tensor]]


def _kernel_of(query: Tensor, key: Tensor, value: Tensor, *, has_bias: bool, softcap: float | None) -> Kernel:
    """The kernel for these tensors: plain products, which take anything, if they miss a requirement of the others."""
    given, dtype, device = (query, key, value), query.dtype, query.device
    # Under autocast dtypes may differ, which products mend.
    if softcap is not None or any(each.dtype != dtype or each.stride(-1) != 1 for each in given):
        return _plain
    if device.type == "cpu":
        return _on_cpu if query.shape[-1] == value.shape[-1] else _plain
    if device.type != "cuda" or torch.version.cuda is None:
        return _plain
    return _kernel_on_cuda(query, key, value, has_bias=has_bias, generation=_generation(device.index or 0))


def _kernel_on_cuda(query: Tensor, key: Tensor, value: Tensor, *, has_bias: bool, generation: int) -> Kernel:
    """See `_kernel_of`; for tensors of one dtype on a CUDA device."""
    given, dtype, widths = (query, key, value), query.dtype, (query.shape[-1], value.shape[-1])
    lanes = 8 if dtype in HALF else 4  # numbers in 16 bytes, which are read at once
    steps = [each.storage_offset() for each in given] + [step for each in given for step in each.stride()[:-1]]
    if dtype not in (*HALF, torch.float32) or (dtype == torch.bfloat16 and generation < AMPERE):
        return _plain
    if any(number % lanes for number in (*widths, *steps)) or max(query.shape[:2]) > MOST_BLOCKS:
        return _plain
    is_flash = dtype in HALF and generation >= AMPERE and widths[0] == widths[1] <= FLASH_WIDTH
    return _by_flash if is_flash and not has_bias else _by_efficient


@torch.compiler.assume_constant_result
def _generation(index: int) -> int:
    """The major number of a CUDA device's compute capability."""
    return torch.cuda.get_device_capability(index)[0]


def _plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Any dtype, width, memory and device; keys of half types are copied to float32, as `sdpa`'s own fallback does.

    With a softcap they are not: the models that have one come with eager attention, and that rounds products.
    """
    dtype = query.dtype
    if softcap is None:
        query, key, value = (each.to(exact(dtype)) for each in (query, key, value))
    scores = (query @ key.mT).to(exact(dtype)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    found = scores.softmax(-1).to(value.dtype) @ value
    return found.to(dtype), scores.logsumexp(-1)


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: None
) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)


def _by_flash(
    query: Tensor, key: Tensor, value: Tensor, bias: None, scale: float, softcap: None
) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]


def _by_efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: None
) -> tuple[Tensor, Tensor]:
    if bias is not None:
        bias = bias.expand(*query.shape[:3], -1)
    found, weight = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)[:2]
    return found, weight[..., : query.shape[2]]  # padded to whole blocks of rows
