# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The largest keys of every row, faster than PyTorch's own top-k where there are many. Knows no beams."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

CPU_BLOCK, CPU_BLOCKS_FROM = 64, 30_000  # candidates of a row from which blocks of them are faster (measured)
# Candidates of all rows. A device's own top-k reads them some six times, in a dozen launches; reading so many once
# saves more than launching a second top-k costs. An estimate for 3 TB/s.
DEVICE_BLOCKS_FROM = 2**22


def top_keys(
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
