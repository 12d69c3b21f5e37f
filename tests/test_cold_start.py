# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The cold-start example: what is left out, what counts as a hit, what chance gives. Few tests need the data."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import BEAUTY, needs_beauty

from hf_gr import ConstraintIndex

ROOT = Path(__file__).resolve().parents[1]


USERS = [
    {"train": [0, 1], "valid": [4], "test": [2, 5, 6]},
    {"train": [1, 2, 3], "valid": [], "test": []},
    {"train": [3], "valid": [], "test": [5]},
    {"train": [4], "valid": [6], "test": [0]},
]


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; what it imports is importable, as it is when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return import_module("cold_start")


@pytest.fixture(scope="module")
def beauty() -> tuple[int, list[dict[str, list[int]]]]:
    lines = (BEAUTY / "users.jsonl").read_text(encoding="utf-8").splitlines()
    return 12_035, [json.loads(line) for line in lines]


def test_newest_are_the_items_of_the_last_period_then_those_that_come_late_in_every_history(cold_start: Any) -> None:
    # First bought in test: 5; in valid: 6; in train: 2 (second of three), 3 (first of two), 1 and 4 (first of three),
    # 0 (first of six). Nobody has bought 7.
    assert cold_start.newest_first(USERS, 8).tolist() == [5, 6, 2, 3, 1, 4, 0]


def test_a_later_place_in_one_history_does_not_make_an_item_newer(cold_start: Any) -> None:
    users = [{"train": [0, 1, 2, 3], "valid": [], "test": []}, {"train": [3, 0], "valid": [], "test": []}]
    assert cold_start.newest_first(users, 4).tolist() == [2, 1, 3, 0]


@pytest.mark.parametrize("period", ["valid", "test"])
@pytest.mark.parametrize("cold", [[5, 6], [2, 5, 6], [0, 1, 4]])
def test_nothing_that_is_trained_on_or_asked_with_is_cold(cold_start: Any, period: str, cold: list[int]) -> None:
    split = cold_start.leave_out(USERS, np.array(cold), period)
    assert not set(cold) & {item for row in [*split.histories, *split.prompts] for item in row.tolist()}
    assert set(split.targets.tolist()) <= set(cold)
    assert all(len(row) for row in [*split.histories, *split.prompts])


def test_who_is_asked_for_and_with_what(cold_start: Any) -> None:
    split = cold_start.leave_out(USERS, np.array([6, 5]), "test")
    assert split.cold.tolist() == [5, 6]
    assert [row.tolist() for row in split.histories] == [[0, 1, 4], [1, 2, 3], [3], [4]]
    assert [row.tolist() for row in split.prompts] == [[0, 1, 4, 2], [3]]  # what came before, and nothing after
    assert split.targets.tolist() == [5, 5]  # a user's first cold item only


def test_a_period_is_not_trained_on(cold_start: Any) -> None:
    split = cold_start.leave_out(USERS, np.array([6]), "valid")
    assert [row.tolist() for row in split.histories] == [user["train"] for user in USERS]
    assert ([row.tolist() for row in split.prompts], split.targets.tolist()) == ([[4]], [6])


@needs_beauty
@pytest.mark.parametrize(("percent", "num_cold", "users"), [(2, 241, 885), (5, 602, 1108)])
def test_beauty_is_split_without_a_leak(
    cold_start: Any, beauty: tuple[int, list[dict[str, list[int]]]], percent: int, num_cold: int, users: int
) -> None:
    num_items, rows = beauty
    newest = cold_start.newest_first(rows, num_items)
    split = cold_start.leave_out(rows, newest[: round(num_items * percent / 100)], "test")
    assert (len(newest), len(split.cold), len(split.targets)) == (num_items, num_cold, users)
    seen = np.concatenate([*split.histories, *split.prompts])
    assert not np.isin(seen, split.cold).any()
    assert np.isin(split.targets, split.cold).all()
    # Nothing else is left out.
    everything = {item for row in rows for item in row["train"] + row["valid"]}
    assert set(np.concatenate(split.histories).tolist()) == everything - set(split.cold.tolist())


@needs_beauty
def test_places_in_histories_tell_new_items_from_old_ones(
    cold_start: Any, beauty: tuple[int, list[dict[str, list[int]]]]
) -> None:
    """The check that the module's docstring reports: train and valid as one period, of which the order is known."""
    num_items, rows = beauty
    merged = [{"train": row["train"] + row["valid"], "valid": [], "test": []} for row in rows]
    order = cold_start.newest_first(merged, num_items)
    is_old = np.isin(order, [item for row in rows for item in row["train"]])
    pairs_in_order = np.cumsum(~is_old)[is_old].sum()
    assert pairs_in_order / (is_old.sum() * (~is_old).sum()) == pytest.approx(0.97, abs=0.01)


def test_films_are_as_old_as_their_first_rating_and_their_ids_know_no_ratings(cold_start: Any) -> None:
    ids, users, newest = cold_start.read_movielens()
    assert sorted(newest.tolist()) == list(range(len(ids)))
    period_of: dict[int, int] = {}
    for user in users:
        for number, name in enumerate(cold_start.PERIODS):
            for film in user[name]:
                period_of[film] = min(number, period_of.get(film, number))
    firsts = [period_of[film] for film in newest.tolist()]
    assert firsts == sorted(firsts, reverse=True)  # first rated in test, then in valid, then in train
    assert firsts[0] == 2
    sizes = [sum(len(user[name]) for user in users) for name in cold_start.PERIODS]
    assert np.allclose(np.array(sizes) / sum(sizes), [0.8, 0.1, 0.1], atol=0.001)


def test_validation_histories_are_not_trained_to_their_end(cold_start: Any) -> None:
    histories = [np.arange(number) for number in range(1, 6)]
    known, validation = cold_start.hold_out(histories, 3)
    assert len(known) == 5
    assert [len(history) for history in validation] == [len(known[len(history) - 1]) + 1 for history in validation]
    assert sum(map(len, known)) == sum(map(len, histories)) - 3
    assert len(known[0]) == 1  # nothing would be left of it


def test_an_interval_is_wilsons(cold_start: Any) -> None:
    assert cold_start.interval(0.1, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert cold_start.interval(0.0, 10)[0] == pytest.approx(0.0)


def test_hits_are_counted_once_a_user_and_up_to_a_place(cold_start: Any) -> None:
    lists = [[3, 1, 2], [None, 7, 8], [5, 5, 4], []]
    targets = np.array([3, 7, 4, 1])
    assert [cold_start.count_hits(lists, targets, count) for count in (1, 2, 3)] == [1, 2, 3]


def test_measure_counts_what_is_no_item_as_a_place(cold_start: Any) -> None:
    row = cold_start.measure("name", [[None, 7], [None, None]], np.array([7, 7]))
    assert row == {"method": "name", "real": 0.25, "hits@1": 0, "recall@1": 0.0, "hits@10": 1, "recall@10": 0.5}


@pytest.mark.parametrize("num_cold", [4, 10, 37])
def test_expected_recall_is_what_many_random_lists_give(cold_start: Any, num_cold: int) -> None:
    rng = np.random.default_rng(0)
    num_users = 4000
    cold = np.arange(100, 100 + num_cold)
    lists = cold_start.draw_lists(cold, num_users, rng)
    assert all(len(set(items)) == min(10, num_cold) for items in lists)
    # Targets that are far from uniform: chance does not care which they are.
    targets = cold[np.minimum(rng.geometric(0.3, num_users) - 1, num_cold - 1)]
    for count in (1, 10):
        expected = cold_start.expected_recall(count, num_cold)
        spread = np.sqrt(expected * (1 - expected) / num_users)
        measured = cold_start.count_hits(lists, targets, count) / num_users
        assert measured == pytest.approx(expected, abs=4 * spread + 1e-12)


def test_items_of_like_id_share_the_longest_prefix_and_the_latest_history(cold_start: Any) -> None:
    codes = np.array([[0, 0, 0], [1, 1, 1], [0, 0, 5], [1, 7, 1], [0, 4, 0], [9, 0, 0]])
    cold = np.array([2, 3, 4, 5])
    rng = np.random.default_rng(0)
    # Item 2 shares two codes with item 0; 3 shares one with item 1, which is later than the one that 4 shares with 0.
    assert cold_start.lists_by_prefix(cold, codes, [np.array([0, 1])], rng) == [[2, 3, 4, 5]]
    assert cold_start.lists_by_prefix(cold, codes, [np.array([1, 0])], rng) == [[2, 4, 3, 5]]


class Canned:
    """A model whose answers are given, ten rows for each prompt."""

    def __init__(self, answers: list[list[list[int]]]) -> None:
        self.answers = answers
        self.calls: list[dict[str, Any]] = []

    def generate(self, *, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        self.calls.append(settings)
        rows = [row for prompt in input_ids[:, -1].tolist() for row in self.answers[prompt]]
        return torch.cat([input_ids.repeat_interleave(10, 0), torch.tensor(rows)], 1)


def test_lists_keep_the_place_of_what_is_no_item_and_have_ten_entries(cold_start: Any) -> None:
    index = ConstraintIndex.from_sequences([[1, 1], [1, 2], [1, 2]], item_ids=[10, 20, 30])
    model = Canned([[[9, 9], [1, 1], [1, 2], *[[9, 9]] * 7], [[1, 2], *[[1, 1]] * 9], [[9, 9]] * 10])
    options = cold_start.parse(["--batch-size", "2"])
    prompts = {"input_ids": torch.tensor([[5, 0], [5, 1], [5, 2]])}
    lists = cold_start.recommend(model, prompts, index, options, constraint_index=index)
    assert lists == [[None, 10, 20, 30, *[None] * 6], [20, 30, *[10] * 8], [None] * 10]
    assert [call["constraint_index"] for call in model.calls] == [index, index]


def test_without_data_it_is_skipped_in_fast_mode_and_an_error_otherwise(
    cold_start: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cold_start.main(["--data", str(tmp_path), "--fast", "--data-sets", "beauty"])
    assert "skipped: no items.tsv and users.jsonl" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="pass the folder of the Beauty data"):
        cold_start.main(["--data", str(tmp_path)])


@pytest.mark.slow  # trains four small models
@needs_beauty
def test_fast_run_prints_all_tables_and_one_json_line() -> None:
    command = [sys.executable, str(ROOT / "examples" / "cold_start.py"), "--fast", "--json", "--data", str(BEAUTY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    sizes = [(result["data"], result["percent"], result["cold_items"]) for result in report["results"]]
    assert sizes == [("beauty", 2, 241), ("beauty", 5, 602), ("movielens", 10, 907), ("movielens", 20, 1813)]
    for result in report["results"]:
        rows = {row["method"]: row for row in result["rows"]}
        assert len(rows) == 7
        assert all(row["real"] == 1 for method, row in rows.items() if method != "unconstrained")
        assert rows["random cold items, on average"]["recall@10"] == 10 / result["cold_items"]
