# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes that programs are compiled for: a few, each of which serves all smaller ones. Knows no arrays."""

from __future__ import annotations


def bucket(number: int, *, least: int = 1, steps: int = 1) -> int:
    """The smallest size, from `least` on, that is not below `number`; a doubling has `steps` sizes, a power of two.

    At most one part in `steps + 1` of a size above `steps` is left empty.

    Example:
        >>> [bucket(number) for number in (0, 1, 3, 5)]
        [1, 1, 4, 8]
        >>> [bucket(number, least=16, steps=2) for number in (5, 17, 24, 25, 40)]
        [16, 24, 24, 32, 48]
    """
    number = max(number, least)
    step = 1 << max((number - 1).bit_length() - steps.bit_length(), 0)
    return -(-number // step) * step
