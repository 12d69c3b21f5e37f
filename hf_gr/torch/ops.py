# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf_gr.core.ops` in PyTorch. None of these waits for a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .top_keys import top_keys as topk

__all__ = [
    "along", "arange", "argmax", "concat", "exp", "expand", "fill", "first_false", "full", "log", "log_softmax", "pad",
    "pick", "put", "smallest", "topk", "where",
]  # fmt: skip

exp, log, where = torch.exp, torch.log, torch.where


def full(shape: Sequence[int], value: bool | int | float, like: Tensor) -> Tensor:  # noqa: D103
    return torch.full(tuple(shape), value, device=like.device)


def arange(number: int, like: Tensor) -> Tensor:  # noqa: D103
    return torch.arange(number, device=like.device)


def expand(values: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: D103
    return values.expand(*shape)


def fill(values: Tensor, flags: Tensor, number: int | float) -> Tensor:  # noqa: D103
    return values.masked_fill(flags, number)  # `where` would move the number to the device


def along(values: Tensor, places: Tensor) -> Tensor:  # noqa: D103
    if places.ndim < values.ndim:
        places = places[..., None].expand(-1, -1, values.shape[-1])
    return values.gather(1, places)


def pick(values: Tensor, places: Tensor) -> Tensor:  # noqa: D103
    return values.gather(-1, places[..., None])[..., 0]


def concat(arrays: Sequence[Tensor], axis: int) -> Tensor:  # noqa: D103
    return torch.cat(tuple(arrays), dim=axis)


def pad(values: Tensor, number: int, fill: bool | int | float) -> Tensor:  # noqa: D103
    return F.pad(values, (0, number), value=fill)


def argmax(values: Tensor) -> Tensor:  # noqa: D103
    return (values.int() if values.dtype == torch.bool else values).argmax(-1)


def first_false(flags: Tensor, number: int) -> Tensor:  # noqa: D103
    return flags.int().argsort(dim=-1, stable=True)[..., :number]


def put(values: Tensor, places: Tensor, number: float) -> Tensor:  # noqa: D103
    return values.scatter(1, places, number)


def smallest(values: Tensor) -> Tensor:  # noqa: D103
    return values.amin(-1, keepdim=True)


def log_softmax(scores: Tensor) -> Tensor:  # noqa: D103
    return scores.log_softmax(-1)
