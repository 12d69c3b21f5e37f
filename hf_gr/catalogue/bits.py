# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Flags as bits, the least significant bit of a byte first. Knows no trie."""

import numpy as np
import numpy.typing as npt

from .fanout import Array, Bools, Longs, spans

Bits = npt.NDArray[np.uint8]

BITS_SET = np.array([number.bit_count() for number in range(256)], dtype=np.int64)


def pack(flags: Bools) -> Bits:
    """One bit for each flag."""
    return np.packbits(flags, bitorder="little")


def unpack(bits: Bits, size: int) -> Bools:
    """The first flags that were packed."""
    return np.unpackbits(bits, count=size, bitorder="little").view(bool)


def test(bits: Bits, places: Array) -> Bools:
    """The flags at some places."""
    return (bits[places >> 3] >> (places & 7).astype(np.uint8) & 1).astype(bool)


def clear(bits: Bits, places: Longs) -> Bits:
    """A copy with the flags at some places cleared."""
    if not len(places):
        return bits
    bits = bits.copy()
    np.bitwise_and.at(bits, places >> 3, ~(np.uint8(1) << (places & 7).astype(np.uint8)))
    return bits


def count(bits: Bits, first: Longs, last: Longs) -> Longs:
    """How many flags are set in `[first, last)`, for every pair of them."""
    filled = np.flatnonzero(last > first)
    counts = np.zeros(len(first), dtype=np.int64)
    if len(filled):
        first, last = first[filled], last[filled] - 1  # the last one itself
        start, end = first >> 3, last >> 3
        head = (255 << (first & 7) & 255).astype(np.uint8)
        tail = (255 >> (7 - (last & 7))).astype(np.uint8)
        of = np.cumsum(end - start + 1)
        found = bits[spans(start, end + 1)]
        found[np.append(0, of[:-1])] &= head
        found[of - 1] &= tail
        counts[filled] = np.add.reduceat(BITS_SET[found], np.append(0, of[:-1]))
    return counts
