# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The NEZHA benchmark: what is trained on, how lists are judged, and that a short run goes through all its stages."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import BEAUTY, needs_beauty

ROOT = Path(__file__).resolve().parents[1]

USERS = [
    {"train": [0, 1, 2], "valid": [3], "test": [4]},
    {"train": [1, 0], "valid": [], "test": []},
    {"train": [], "valid": [2], "test": [3, 0]},
    {"train": [], "valid": [], "test": [1]},
    {"train": [4], "valid": [1], "test": []},
]
ITEMS = [[0, 1], [0, 2], [1, 0], [1, 1], [2, 2]]  # codes; 512 is padding
PAD = 512


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; what it imports is importable, as it is when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmark"))
    return import_module("nezha")


@pytest.fixture
def data(benchmark: Any, tmp_path: Path) -> Any:
    rows = ["item_id\tlevel_1\tlevel_2", *(f"{n}\t{a}\t{b}" for n, (a, b) in enumerate(ITEMS))]
    (tmp_path / "items.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "users.jsonl").write_text("".join(json.dumps(user) + "\n" for user in USERS), encoding="utf-8")
    return benchmark.read_data(tmp_path)


def rows_of(benchmark: Any, *items: int) -> list[Any]:
    return [benchmark.Row(np.array([0]), item) for item in items]


def test_every_item_of_a_period_is_a_row_with_what_its_user_bought_before_it(data: Any) -> None:
    rows = {period: sorted((row.history.tolist(), row.item) for row in rows) for period, rows in data.rows.items()}
    assert rows["valid"] == [([0, 1, 2], 3), ([4], 1)]
    assert rows["test"] == [([0, 1, 2, 3], 4), ([2], 3), ([2, 3], 0)]


def test_heads_learn_from_pairs_of_the_period_train_alone(benchmark: Any, data: Any) -> None:
    pairs = benchmark.pairs_of(data)
    found = [(pair["input_ids"].tolist(), pair["labels"].tolist()) for pair in (pairs[n] for n in range(len(pairs)))]
    tokens = data.tokens.tolist()
    assert found == [(tokens[0], tokens[1]), (tokens[0] + tokens[1], tokens[2]), (tokens[1], tokens[0])]


def test_labels_of_further_training_are_the_item_that_followed(benchmark: Any) -> None:
    pairs = [{"input_ids": np.array([7, 8]), "labels": np.array([3, 4])}]
    pairs.append({"input_ids": np.array([5, 6, 7, 8]), "labels": np.array([1, 2])})
    batch = benchmark.label_batch(pairs, pad_token_id=PAD)
    assert batch["input_ids"].tolist() == [[PAD, PAD, 7, 8, 3, 4], [5, 6, 7, 8, 1, 2]]
    assert batch["labels"].tolist() == [[-100] * 4 + [3, 4], [-100] * 4 + [1, 2]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_rows_of_random_items_teach_codes_and_not_which_item_follows(benchmark: Any, data: Any) -> None:
    settings = benchmark.replace(benchmark.TINY, mixed_rows=2, hidden_tokens=0.0)
    batch = next(benchmark.history_batches(data, settings))
    assert len(batch.labels) == 4 + 2 - 1  # one user bought nothing in train
    assert (batch.labels[-2:, ::2] == -100).all()
    assert (batch.labels[-2:, 1::2] == batch.input_ids[-2:, 1::2]).all()


def test_hits_and_gains_are_of_the_place(benchmark: Any) -> None:
    rows = rows_of(benchmark, 3, 4, 5, 9)
    found = benchmark.evaluate([[3, 0], [0, 4], [0, 1, 2, 3, 4, 5], [0]], rows)
    assert (found["H@5"], found["H@10"]) == (0.5, 0.75)
    assert found["N@5"] == pytest.approx((1 + 1 / math.log2(3)) / 4)
    assert found["N@10"] == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(7)) / 4)


def test_what_is_no_item_keeps_its_place(benchmark: Any, data: Any) -> None:
    class Canned:
        def generate(self, *, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
            assert settings == {"attention_mask": settings["attention_mask"], "constraint_index": data.index} | {
                "num_beams": 3,
                "num_return_sequences": 3,
                "do_sample": False,
            }
            no_item = [data.tokens[0][0], data.tokens[2][1]]
            answers = torch.tensor(np.array([data.tokens[4], no_item, data.tokens[3]]))
            return torch.cat([input_ids.repeat_interleave(3, 0), answers.repeat(len(input_ids), 1)], dim=1)

    found = benchmark.recommend(Canned(), data.rows["test"], data, num_beams=3)
    assert found == [[4, benchmark.NO_ITEM, 3]] * 3


def test_a_ratio_is_of_the_same_rows(benchmark: Any) -> None:
    rng = np.random.default_rng(0)
    theirs = (rng.random(2000) < 0.1).astype(float)
    assert benchmark.bootstrap_ratio(theirs, theirs) == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    ours = theirs * (rng.random(2000) < 0.8)
    found = benchmark.bootstrap_ratio(ours, theirs)
    assert found["ratio"] == ours.sum() / theirs.sum()
    # Of those hit by beam search 80% are hit: a binomial share.
    width = 1.96 * math.sqrt(found["ratio"] * (1 - found["ratio"]) / theirs.sum())
    assert found["low"] == pytest.approx(found["ratio"] - width, abs=0.03)
    assert found["high"] == pytest.approx(found["ratio"] + width, abs=0.03)


def strict_against(benchmark: Any, data: Any, scores: list[float], others: list[float], swapped: bool) -> Any:
    def output(order: list[int], scores: list[float], rows: int, width: int) -> Any:
        sequences = torch.cat([torch.zeros(2, width, dtype=torch.long), torch.from_numpy(data.tokens[order])], dim=1)
        happened = SimpleNamespace(accepted_steps=torch.ones(rows), target_forwards=1)
        return SimpleNamespace(
            sequences=sequences.repeat(rows, 1), sequences_scores=torch.tensor(scores * rows), speculation=happened
        )

    class Canned:
        def generate(self, *, input_ids: torch.Tensor, **settings: Any) -> Any:
            is_strict = settings.get("verification") == "strict"
            order = [1, 0] if is_strict and swapped else [0, 1]
            return output(order, others if is_strict else scores, *input_ids.shape)

    return benchmark.compare_strict(Canned(), data.rows["test"], data, 2)


def test_strict_answers_that_differ_are_counted_and_forgiven_only_for_rounding(benchmark: Any, data: Any) -> None:
    same = strict_against(benchmark, data, [-1.0, -2.0], [-1.0, -2.0], swapped=False)
    assert same["ranked"] == dict.fromkeys(same["ranked"], [[0, 1]] * 3)
    assert (same["rows"], same["not_equal"], same["wrong"], same["accepted_steps"]) == (3, 0, 0, 1)
    tied = strict_against(benchmark, data, [-1.0, -1.00001], [-1.0, -1.00001], swapped=True)
    assert (tied["not_equal"], tied["wrong"]) == (3, 0)
    lost = strict_against(benchmark, data, [-1.0, -2.0], [-1.0, -2.0], swapped=True)
    assert (lost["not_equal"], lost["wrong"]) == (3, 3)


def test_without_data_it_is_skipped_in_fast_mode_and_an_error_otherwise(
    benchmark: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark.main(["--data", str(tmp_path), "--fast"])
    assert "skipped: no items.tsv and users.jsonl" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="pass the folder of the Beauty data"):
        benchmark.main(["--data", str(tmp_path)])


@pytest.mark.slow  # trains nine tiny models
@needs_beauty
def test_fast_run_compares_all_and_stages_are_not_run_again(tmp_path: Path) -> None:
    script = ROOT / "examples" / "benchmark" / "nezha.py"
    command = [sys.executable, str(script), "--fast", "--data", str(BEAUTY), "--work", str(tmp_path / "work")]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout
    report = json.loads(first.stdout.splitlines()[-1])
    assert report["versions"]
    assert report["hardware"]
    for num_beams in (10, 12):
        rows = {row["method"]: row for row in report["rows"] if row["num_beams"] == num_beams}
        assert len(rows) == 14  # with NEZHA by a second seed
        unchecked = {"unconstrained beam search", "NEZHA-4 (no verification)", "NEZHA, last level (paper)"}
        assert all(row["valid"] == 1.0 for name, row in rows.items() if name not in unchecked)
        assert {name for name, row in rows.items() if row["rows"] != 32} == {
            "unconstrained beam search",
            "constrained, on as few rows",
        }
    assert [(row["rows"], row["wrong"]) for row in report["strict"]] == [(32, 0)] * 2
    assert [(times["batch_size"], times["num_beams"]) for times in report["times"]] == [
        (size, num_beams) for size in (1, 4) for num_beams in (10, 12)
    ]
    for times in report["times"]:
        assert len(times["methods"]) == 13
        assert all(row["call"] > 0 for row in times["methods"].values())
