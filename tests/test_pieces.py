# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Work in pieces and in two threads gives what NumPy gives at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_gr.catalogue import pieces

SIZES = [0, 1, 2, 3, 4, 11, 12, 13, 50, 127, 128, 200]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 3)


@pytest.mark.parametrize("size", SIZES)
def test_every_entry_is_in_one_piece(size: int) -> None:
    times = np.zeros(size, dtype=int)

    def count(piece: slice) -> None:
        assert 0 < piece.stop - piece.start <= 3
        times[piece] += 1

    pieces.in_pieces(count, size)
    assert (times == 1).all()


def test_what_a_thread_raises_is_raised() -> None:
    def work(piece: slice) -> None:
        if piece.start == 33:
            raise ValueError("piece 11 is broken")

    with pytest.raises(ValueError, match="piece 11"):
        pieces.in_pieces(work, 100)


@pytest.mark.parametrize("size", SIZES)
def test_sorted_keys_are_those_of_numpy(size: int) -> None:
    for keys in (
        np.random.default_rng(size).integers(0, 2**62, size),
        np.arange(size)[::-1] // 3,
        np.zeros(size, int),
    ):
        expected = np.sort(keys)
        ours = keys.copy()
        pieces.sort(ours)
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 63, 64, 65, 200, 333])
def test_columns_have_their_range(size: int) -> None:
    rows = np.random.default_rng(size).integers(-5, 2000, (size, 3)).astype(np.int16)
    assert pieces.range_of_columns(rows) == (rows.min(axis=0).tolist(), rows.max(axis=0).tolist())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0, 0.1, 0.9, 0.99, 1])
def test_selected_entries_are_those_of_numpy(size: int, share: float) -> None:
    rng = np.random.default_rng(size)
    values, flags = rng.integers(0, 99, size).astype(np.int16), rng.random(size) < share
    ours = pieces.select(values, flags)
    np.testing.assert_array_equal(ours, values[flags])
    assert ours.dtype == values.dtype
    assert not np.shares_memory(ours, values)


@pytest.mark.parametrize("dtype", [bool, np.int16, np.int64, "V6"])
def test_taken_entries_are_those_of_numpy(dtype: Any) -> None:
    values = np.random.default_rng(1).integers(0, 2, 50 * np.dtype(dtype).itemsize).astype(np.uint8).view(dtype)
    places = np.random.default_rng(0).integers(0, 50, 90)
    assert pieces.take(values, places).tobytes() == values[places].tobytes()
