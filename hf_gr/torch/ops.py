# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf_gr.core.ops` in PyTorch, and numbers of the host on a device. None of these waits for one."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "along", "arange", "argmax", "argsort", "concat", "exp", "expand", "fill", "full", "largest", "log",
    "log_softmax", "pad", "pick", "put", "smallest", "topk", "topk_in_order", "where",
]  # fmt: skip

CPU_BLOCK, CPU_BLOCKS_FROM = 64, 30_000  # candidates of a row from which blocks of them are faster (measured)
# Candidates of all rows. A device's own top-k reads them some six times, in a dozen launches; reading so many once
# saves more than launching a second top-k costs. An estimate for 3 TB/s.
DEVICE_BLOCKS_FROM = 2**22

concat, exp, expand, log, where = torch.cat, torch.exp, Tensor.expand, torch.log, torch.where
log_softmax = partial(torch.log_softmax, dim=-1)
smallest, largest = partial(torch.amin, dim=-1, keepdim=True), partial(torch.amax, dim=-1, keepdim=True)
fill = torch.masked_fill  # `where` would move the number to the device


def full(shape: Sequence[int], value: bool | int | float, like: Tensor) -> Tensor:  # noqa: D103
    return torch.full(tuple(shape), value, device=like.device)


def arange(number: int, like: Tensor) -> Tensor:  # noqa: D103
    return torch.arange(number, device=like.device)


def along(values: Tensor, places: Tensor) -> Tensor:  # noqa: D103
    if places.ndim < values.ndim:
        places = places[..., None].expand(-1, -1, values.shape[-1])
    return values.gather(1, places)


def pick(values: Tensor, places: Tensor) -> Tensor:  # noqa: D103
    return values.gather(-1, places[..., None])[..., 0]


def pad(values: Tensor, number: int, fill: bool | int | float) -> Tensor:  # noqa: D103
    return F.pad(values, (0, number), value=fill)


def topk_in_order(keys: Tensor, numbers: Tensor, number: int) -> tuple[Tensor, Tensor]:  # noqa: D103
    bits = keys.view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as the floats are
    places = (ascending << 32 | (2**31 - 1 - numbers)).topk(number).indices
    return keys.gather(1, places), places


def argmax(values: Tensor) -> Tensor:  # noqa: D103
    return (values.int() if values.dtype == torch.bool else values).argmax(-1)


def argsort(values: Tensor) -> Tensor:  # noqa: D103
    return values.int().argsort(dim=-1, stable=True)


def put(values: Tensor, places: Tensor, number: float) -> Tensor:  # noqa: D103
    return values.scatter(1, places, number)


def topk(
    keys: Float[Tensor, "batch candidates"], number: int
) -> tuple[Float[Tensor, "batch number"], Int[Tensor, "batch number"]]:
    """The largest keys of every row, best first, and their places.

    Many candidates are first reduced to the `number` blocks with the largest maxima: all others hold only smaller
    keys, or keys equal to the last one chosen. This reads the candidates once and sorts few of them, and has no branch
    that depends on them.

    Source: xGR, section 6.2 (early sorting termination), where a heap stops reading a beam's sorted candidates at the
    first one that is too small. A device does the same for all blocks at once: those whose largest key is too small
    are not read again.
    """
    size = keys.shape[1]
    block = _block_size(keys.shape[0], size, number, keys.device)
    if block == 1:
        best = keys.topk(number)
        return best.values, best.indices
    in_blocks = size - size % block
    largest = keys[:, :in_blocks].unflatten(1, (-1, block)).amax(-1)
    first = largest.topk(number, sorted=False).indices * block
    places = (first[..., None] + torch.arange(block, device=keys.device)).flatten(1)
    if in_blocks < size:  # what fills no block competes with the best blocks
        rest = torch.arange(in_blocks, size, device=keys.device)
        places = torch.cat([places, rest.expand(len(keys), -1)], dim=1)
    best = keys.gather(1, places).topk(number)
    return best.values, places.gather(1, best.indices)


def _block_size(num_rows: int, size: int, number: int, device: torch.device) -> int:
    """How many candidates to treat as one at first; 1 if one top-k over all is faster."""
    if device.type == "cpu":
        block = CPU_BLOCK if size >= CPU_BLOCKS_FROM else 1
    elif num_rows * size >= DEVICE_BLOCKS_FROM:
        # With the root of size / number, as many maxima are sorted at first as candidates at last.
        block = 2 ** round(math.log2(size / number) / 2)
    else:
        block = 1
    return block if 2 * number * block <= size else 1


def to_device(numbers: npt.NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """Numbers of the host on a device, on a CPU maybe in one memory; lists become 64-bit integers.

    A plain copy to a CUDA device waits until it has done all it was given. One from pinned memory joins the queue.
    """
    array = numbers if isinstance(numbers, np.ndarray) else np.array(numbers, dtype=np.int64)
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # The allocator of pinned memory keeps it until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)
