# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes that programs are compiled for: a few, each of which serves all smaller ones. Knows no arrays' meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def padded(array: npt.NDArray[Any], size: int, fill: Any = 0, *, axis: int = 0, in_front: bool = False) -> Any:
    """An array padded to a size along an axis, at its end or `in_front`; the array itself if nothing is missing."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    shape = list(array.shape)
    shape[axis] = missing
    filling = np.full(shape, fill, dtype=array.dtype)
    return np.concatenate([filling, array] if in_front else [array, filling], axis=axis)
