# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Large arrays in pieces that fit a cache, in two threads. Knows no catalogue."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

AT_ONCE = 2**17  # entries of a piece: an array of eight bytes each fits a core's cache
THREADS = 2
ROWS_AS_ONE = 64
MOSTLY = 16  # all but one in so many


def in_pieces(work: Callable[[slice], object], size: int) -> None:
    """Do some work on every piece of `size` entries; pieces are independent of each other."""
    pieces = [slice(start, min(start + AT_ONCE, size)) for start in range(0, size, AT_ONCE)]
    if len(pieces) < 2 * THREADS:
        for piece in pieces:
            work(piece)
        return

    def do_every_other(first: int) -> None:
        for piece in pieces[first::THREADS]:
            work(piece)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(do_every_other, range(THREADS)))  # raises what a thread raised


def take(values: npt.NDArray[Any], places: npt.NDArray[np.integer], *, out: npt.NDArray[Any] | None = None) -> Any:
    """`values[places]`: millions of random reads wait for memory, not for a processor."""
    taken = np.empty(len(places), dtype=values.dtype) if out is None else out
    in_pieces(lambda piece: np.take(values, places[piece], out=taken[piece], mode="clip"), len(places))
    return taken


def select(values: npt.NDArray[Any], flags: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """`values[flags]`, by the faster of NumPy's two ways: it copies runs, or entry by entry."""
    chosen = np.count_nonzero(flags)
    return values[flags] if chosen * MOSTLY > len(flags) * (MOSTLY - 1) else np.compress(flags, values)


def sort(keys: npt.NDArray[np.int64]) -> None:
    """Sort in place, in two threads: partition around the median, then sort one half in each thread."""
    if len(keys) < 2 * THREADS * AT_ONCE:
        keys.sort()
        return
    middle = len(keys) // 2
    keys.partition(middle)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(np.ndarray.sort, (keys[:middle], keys[middle:])))


def range_of_columns(rows: npt.NDArray[Any]) -> tuple[list[int], list[int]]:
    """The least and the largest number of every column of `[N, L]` contiguous rows."""
    many = len(rows) // ROWS_AS_ONE * ROWS_AS_ONE
    # NumPy reduces long rows at the speed of memory, and short ones entry by entry.
    wide = rows[:many].reshape(-1, ROWS_AS_ONE * rows.shape[1])
    both: list[list[int]] = []
    for reduce in (np.minimum.reduce, np.maximum.reduce):
        parts = [rows[many:]] if many < len(rows) else []
        if many:
            parts.append(reduce(wide, axis=0).reshape(ROWS_AS_ONE, -1))
        both.append(reduce(np.concatenate(parts), axis=0).tolist())
    return both[0], both[1]
