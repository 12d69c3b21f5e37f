# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A real catalogue: Amazon Beauty, 12,035 items of 4 codes out of 256. Skipped where its files are not at hand."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from data_sets import BEAUTY, needs_beauty

ROOT = Path(__file__).resolve().parents[1]

pytestmark = needs_beauty


@pytest.fixture
def beauty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; its neighbours are importable, as they are when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmark"))
    return import_module("beauty")


def test_histories_are_those_of_the_test_users(beauty: Any) -> None:
    histories, (item_ids, _) = beauty.read_histories(BEAUTY), beauty.read_items(BEAUTY)
    assert len(histories) == 3553
    assert {item for history in histories for item in history} <= set(item_ids)


def test_all_recommendations_are_real_and_distinct(beauty: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = beauty.recommend(beauty.parse(["--fast", "--data", str(BEAUTY)]))
    expected = {"users": 64, "sequences": 64 * 50, "num_beams": 50, "invalid": 0, "repeated": 0, "unnamed": 0}
    assert expected.items() <= result.items()
