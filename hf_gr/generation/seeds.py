# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The seeds of a call's prompts. Knows NumPy alone; what is drawn from a seed is the engines' `noise`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_gr.catalogue.sequences import is_integer, to_host

SMALLEST, LARGEST = -(2**63), 2**63 - 1
FIX = "pass seed=7, or one integer for each prompt"


def row_seeds(seed: Any, num_prompts: int) -> npt.NDArray[np.int64]:
    """A seed of 64 bits for every prompt, given, or derived from one.

    Of one, the first prompt gets itself, prompt i the upper 63 bits of output i + 1 of SplitMix64 that begins with
    it.

    Example:
        >>> row_seeds(7, 3).tolist()
        [7, 154844686297477902, 8308050873407804673]
        >>> row_seeds([7, 8], 2).tolist()
        [7, 8]
    """
    values = to_host(seed)
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu" or values.ndim > 1:
            raise ValueError(f"seed is {list(values.shape)} of {values.dtype}, expected integers [prompts]: {FIX}")
        values = values.tolist()
    if is_integer(values):
        first = _checked(values, "seed")
        return np.concatenate([[first], _derived(first, np.arange(1, num_prompts))])
    if not isinstance(values, (list, tuple, range)):
        raise ValueError(f"seed={seed!r}, expected an integer: {FIX}")
    if len(values) != num_prompts:
        raise ValueError(f"seed has {len(values)} entries, expected {num_prompts}, one for each prompt: {FIX}")
    return np.array([_checked(one, f"seed[{number}]") for number, one in enumerate(values)], dtype=np.int64)


def _checked(value: Any, name: str) -> np.int64:
    if not is_integer(value):
        raise ValueError(f"{name}={value!r}, expected an integer: {FIX}")
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{name}={value}, expected {SMALLEST} to {LARGEST}: take it modulo 2**63")
    return np.int64(value)


def _derived(seed: np.int64, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Outputs of SplitMix64, `numbers` counted from 0, without their lowest bit.

    Source: Steele, Lea and Flood 2014, figure 17; the constants are Stafford's (mix 13).
    """
    steps = (numbers + 1).astype(np.uint64)
    z = np.uint64(int(seed) % 2**64) + steps * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
