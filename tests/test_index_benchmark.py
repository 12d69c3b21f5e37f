# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of catalogues checks what it times: every kind is measured, and wrong answers are found."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"
ITEMS = 3000


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = import_module("index")
    for name, number in {"UPDATE": 20, "REQUESTS": 3, "SEEN": 5}.items():
        monkeypatch.setattr(module, name, number)
    return module


@pytest.fixture
def mapped(index: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = import_module("index_mapped")
    monkeypatch.setattr(module, "SMALL", 200)
    return module


@pytest.mark.parametrize("kind", ["uniform", "skewed", "ragged"])
def test_every_kind_is_measured(kind: str, index: Any) -> None:
    figures = index.measure(kind, ITEMS, 0, 2)
    assert set(index.GOALS) <= set(figures)
    assert all(figure >= 0 for figure in figures.values())


def test_a_catalogue_is_built_from_a_mapped_file_and_served_from_another(mapped: Any, tmp_path: Path) -> None:
    figures = mapped._build(tmp_path, ITEMS, 0, 1, 2) | mapped._serve(tmp_path, ITEMS, 0, 1, 2)
    assert set(mapped.NAMES) == set(figures)
    rows = np.load(tmp_path / "rows.npy")
    assert figures["input"] == rows.nbytes / 1e9
    assert rows.shape == (ITEMS, 8)
    assert len(np.unique(rows[:, 0])) > 1000, "every piece is random"


def test_rows_are_random_in_every_piece(mapped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "ROWS_AT_ONCE", 7)
    mapped.write_rows(tmp_path / "rows.npy", 30, 0)
    assert len(np.unique(np.load(tmp_path / "rows.npy"), axis=0)) == 30


def test_an_answer_that_is_no_item_is_found(mapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "ROWS_AT_ONCE", 7)
    rows = np.random.default_rng(0).integers(0, 2048, (30, 8)).astype(np.int16)
    mapped.check_answers(rows[[3, 29, 3]].astype(np.int64), rows)
    for place in (0, 7):
        wrong = rows[[3, 29]].astype(np.int64)
        wrong[1, place] += 1
        with pytest.raises(AssertionError, match="1 of 2 answers are no items"):
            mapped.check_answers(wrong, rows)
