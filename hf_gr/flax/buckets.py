# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes that programs are compiled for: a few, each of which serves all smaller ones. Knows no arrays' meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def bucket(number: int, *, least: int = 1, steps: int = 1) -> int:
    """The smallest size, from `least` on, that is not below `number`; every doubling has `steps` sizes.

    Args:
        number: what must fit.
        least: the first size.
        steps: sizes from one power of two (included) to the next (excluded); a power of two itself. At most one part
            in `steps + 1` of a size above `steps` is left empty.

    Example:
        >>> [bucket(number) for number in (0, 1, 3, 5)]
        [1, 1, 4, 8]
        >>> [bucket(number, least=16, steps=2) for number in (5, 17, 24, 25, 40)]
        [16, 24, 24, 32, 48]
    """
    number = max(number, least)
    step = 1 << max((number - 1).bit_length() - steps.bit_length(), 0)
    return -(-number // step) * step


def padded(array: npt.NDArray[Any], size: int, fill: Any = 0, *, axis: int = 0, in_front: bool = False) -> Any:
    """An array padded to a size along an axis, at its end or `in_front`; the array itself if nothing is missing."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    shape = list(array.shape)
    shape[axis] = missing
    filling = np.full(shape, fill, dtype=array.dtype)
    return np.concatenate([filling, array] if in_front else [array, filling], axis=axis)
