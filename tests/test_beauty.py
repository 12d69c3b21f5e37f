# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A real catalogue: Amazon Beauty, 12,035 items of 4 codes out of 256. Skipped where its files are not at hand."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import BEAUTY, needs_beauty

from hf_gr import ConstraintIndex, SemanticIds

ROOT = Path(__file__).resolve().parents[1]

pytestmark = needs_beauty


@pytest.fixture
def beauty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; its neighbours are importable, as they are when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmark"))
    return import_module("beauty")


@pytest.fixture
def ids(beauty: Any) -> SemanticIds:
    item_ids, codes = beauty.read_items(BEAUTY)
    return SemanticIds(codes, item_ids=item_ids, level_sizes=[256] * 4, offset=1)


@pytest.fixture
def index(ids: SemanticIds) -> ConstraintIndex:
    return ids.constraint_index()


def test_mean_children_of_a_level(index: ConstraintIndex) -> None:
    nodes = np.diff(index.snapshot.trie.level_starts)
    np.testing.assert_allclose(nodes[1:] / nodes[:-1], [91, 72, 1.7, 1.08], rtol=0.01)


def test_histories_are_those_of_the_test_users(beauty: Any, ids: SemanticIds) -> None:
    histories = beauty.read_histories(BEAUTY)
    assert len(histories) == 3553
    assert {item for history in histories for item in history} <= set(ids.item_ids)


def test_all_recommendations_are_real_and_distinct(beauty: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = beauty.recommend(beauty.parse(["--fast", "--data", str(BEAUTY)]))
    expected = {"users": 64, "sequences": 64 * 50, "num_beams": 50, "invalid": 0, "repeated": 0, "unnamed": 0}
    assert expected.items() <= result.items()
