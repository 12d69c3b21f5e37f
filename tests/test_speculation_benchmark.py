# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The speculation benchmark: what is trained on, counted and compared, and that no wrong answer gets a number."""

from __future__ import annotations

import copy
import json
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

from hf_gr import ConstraintIndex

ROOT = Path(__file__).resolve().parents[1]

USERS = [
    {"train": [0, 1, 2], "valid": [3], "test": [4]},
    {"train": [1, 0], "valid": [], "test": []},
    {"train": [], "valid": [2], "test": [3, 0]},
    {"train": [], "valid": [], "test": [1]},
    {"train": [4], "valid": [1], "test": []},
]
ITEMS = [[0, 1], [0, 2], [1, 0], [1, 1], [2, 2]]  # codes
PAD = 7


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; what it imports is importable, as it is when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmark"))
    return import_module("speculation")


@pytest.fixture
def counts(benchmark: Any) -> Any:
    return import_module("speculation_counts")


@pytest.fixture
def models(benchmark: Any) -> Any:
    return import_module("speculation_models")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ["item_id\tlevel_1\tlevel_2", *(f"{n}\t{a}\t{b}" for n, (a, b) in enumerate(ITEMS))]
    (tmp_path / "items.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "users.jsonl").write_text("".join(json.dumps(user) + "\n" for user in USERS), encoding="utf-8")
    return tmp_path


def answer(sequences: list[list[int]], scores: list[float], accepted: int | None = None) -> SimpleNamespace:
    """What `generate` returns; without a draft it says nothing of one."""
    output = SimpleNamespace(sequences=torch.tensor(sequences), sequences_scores=torch.tensor(scores))
    if accepted is not None:
        steps = torch.tensor([accepted])
        output.speculation = SimpleNamespace(accepted_steps=steps)
    return output


class Canned:
    """A target whose answers are given by what drafts for it."""

    device = torch.device("cpu")
    config = SimpleNamespace(pad_token_id=PAD)

    def __init__(self, answers: dict[Any, SimpleNamespace]) -> None:
        self.answers = answers
        self.calls: list[dict[str, Any]] = []

    def generate(self, **settings: Any) -> SimpleNamespace:
        self.calls.append(settings)
        return self.answers[settings.get("assistant_model")]


def rows_of(benchmark: Any, *drafts: str) -> list[Any]:
    return [
        benchmark.Row("strict", "plain", {}),
        *(benchmark.Row("strict", draft, {"assistant_model": draft}) for draft in drafts),
    ]


def measured(benchmark: Any, answers: dict[Any, SimpleNamespace], *, users: int = 3) -> list[Any]:
    index = ConstraintIndex.from_sequences([[1, 1, 1, 1], [1, 2, 1, 1]])
    rows = rows_of(benchmark, *(name for name in answers if name is not None))
    prompts = [{"input_ids": torch.tensor([[5]])}] * users
    benchmark.measure(Canned(answers), prompts, index, rows, num_beams=2)
    return rows


def test_nothing_of_valid_and_test_is_trained_on(benchmark: Any, folder: Path) -> None:
    data = benchmark.read_beauty(folder, window=3)
    assert [row.tolist() for row in data.histories] == [[0, 1, 2], [1, 0], [4]]
    # Asked with: what came before the test items, as much of it as leaves room for the answer in a window.
    assert [row.tolist() for row in data.prompts] == [[2, 3], [2]]
    assert data.answers == [{4}, {3, 0}]


def test_the_last_film_of_every_user_is_not_trained_on(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    histories = [np.array(row) for row in ([0, 1, 2, 3], [3, 1], [2, 0, 1])]
    films = SimpleNamespace(histories=histories)
    monkeypatch.setattr(models, "load_movielens", lambda: films)
    monkeypatch.setattr(models, "film_features", lambda films, train: np.zeros((sum(map(len, train)), 1)))
    monkeypatch.setattr(models, "residual_kmeans", lambda features, **sizes: np.arange(len(features))[:, None])
    data = models.read_movielens(window=3)
    assert [row.tolist() for row in data.histories] == [[0, 1, 2], [3], [2, 0]]
    assert [row.tolist() for row in data.prompts] == [[1, 2], [3], [2, 0]]
    assert data.answers == [{3}, {1}, {1}]
    assert len(data.tokens) == 6  # the features see no more than the training does


def test_the_label_of_a_teacher_prompt_is_the_last_item_and_not_in_it(
    models: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(models, "write_teacher_data", lambda *args, **kwargs: calls.append((args, kwargs)))
    data = models.read_beauty(folder, window=3)
    training = models.replace(models.TINY_BEAUTY, target=models.replace(models.TINY, window=2))
    models.write_teacher(folder / "teacher", data, "target", training)
    ((args, kwargs),) = calls
    assert [*args[1]] == [data.tokens[1].tolist(), data.tokens[1].tolist()]
    assert [*kwargs["labels"]] == [data.tokens[2].tolist(), data.tokens[0].tolist()]


def test_a_folder_is_made_once_and_not_taken_half_made(benchmark: Any, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError("stopped")

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "whole").touch()

    with pytest.raises(RuntimeError, match="stopped"):
        benchmark.make_once(tmp_path / "work" / "target", fail)
    made = benchmark.make_once(tmp_path / "work" / "target", make)
    assert [path.name for path in made.iterdir()] == ["whole"]
    assert benchmark.make_once(made, fail) == made


def test_counts_are_of_every_user_and_none_of_the_warm_up(benchmark: Any) -> None:
    sequences, scores = [[5, 1, 1, 1, 1], [5, 1, 2, 1, 1]], [-1.0, -2.0]
    plain, good = measured(benchmark, {None: answer(sequences, scores), "good": answer(sequences, scores, accepted=2)})
    assert (plain.accepted_steps, good.accepted_steps) == ([0] * 3, [2] * 3)
    assert len(plain.seconds) == len(good.seconds) == 3
    assert (good.not_equal, good.wrong) == (0, 0)


def test_every_row_is_the_first_of_some_user(benchmark: Any) -> None:
    index = ConstraintIndex.from_sequences([[1, 1], [1, 2]])
    same = answer([[5, 1, 1], [5, 1, 2]], [-1.0, -2.0])
    target = Canned({None: same, "a": same, "b": same})
    benchmark.measure(target, [{"input_ids": torch.tensor([[5]])}] * 3, index, rows_of(benchmark, "a", "b"), 2)
    firsts = [call.get("assistant_model") for call in target.calls][3::3]
    assert sorted(firsts, key=str) == [None, "a", "b"]
    assert {call["num_return_sequences"] for call in target.calls} == {2}


def test_another_order_of_equal_scores_is_counted_and_forgiven_and_anything_else_is_wrong(benchmark: Any) -> None:
    one, two, three = [5, 1, 1, 1, 1], [5, 1, 2, 1, 1], [5, 1, 2, 2, 2]
    plain = answer([one, two], [-1.0, -1.00001])
    tied = answer([two, one], [-1.0, -1.00001], accepted=0)
    lost = answer([three, one], [-0.5, -1.0], accepted=0)
    _, tied_row, lost_row = measured(benchmark, {None: plain, "tied": tied, "lost": lost})
    assert (tied_row.not_equal, tied_row.wrong) == (3, 0)
    assert (lost_row.not_equal, lost_row.wrong) == (3, 3)


def result_of(benchmark: Any, rows: list[Any]) -> dict[str, Any]:
    recall = {"num_beams": 2, "method": "plain", "recall": 0.5, "standard_error": 0.1, "users": 3}
    return {
        "users": 3,
        "prompt_tokens": 4,
        "target_parameters": 2,
        "draft_parameters": 1,
        "num_draft_beams": 40,
        "gamma": 4,
        "prefill_seconds": 0.001,
        "rows": [*benchmark.summarize(rows, 2, [0.001] * 3)],
        "recall": [recall],
    }


def test_a_wrong_answer_gets_no_time(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    right = answer([[5, 1, 1, 1, 1], [5, 1, 2, 1, 1]], [-1.0, -2.0])
    lost = answer([[5, 1, 1, 1, 1], [5, 2, 2, 2, 2]], [-1.0, -3.0], accepted=2)
    with pytest.raises(SystemExit, match="no time is worth reporting: lost at K = 2"):
        benchmark.show(result_of(benchmark, measured(benchmark, {None: right, "lost": lost})))
    assert "WS@2" not in capsys.readouterr().out
    right_too = answer(right.sequences.tolist(), [-1.0, -2.0], accepted=1)
    benchmark.show(result_of(benchmark, measured(benchmark, {None: right, "right": right_too})))
    assert "WS@2" in capsys.readouterr().out


def test_speed_ups_are_paired_and_relative_to_the_like(benchmark: Any) -> None:
    rows = [
        benchmark.Row("strict", "plain", {}, [4.0, 4.0, 9.0], [0] * 3),
        benchmark.Row("strict", "draft", {}, [2.0, 1.0, 9.0], [2, 1, 0]),
        benchmark.Row("relaxed", "own", {}, [8.0, 8.0, 8.0], [0] * 3),
        benchmark.Row("relaxed", "draft", {}, [2.0, 2.0, 2.0], [2] * 3),
    ]
    table = [*benchmark.summarize(rows, 5, [1.0, 1.0, 1.0])]
    assert [row["speedup"] for row in table] == [1.0, 2.0, 1.0, 4.0]
    assert [row["accepted_steps"] for row in table] == [0, 1, 0, 2]
    assert table[1]["prefill_share"] == 0.5


def test_relaxed_rows_draw_each_from_the_same_seed_and_strict_ones_do_not(benchmark: Any) -> None:
    drafts = dict.fromkeys([*benchmark.METHODS.values(), "random weights"], "draft")
    rows = benchmark.make_rows(drafts)
    assert [row.name for row in rows if row.verification == "relaxed"][1:] == [*drafts, "AtSpeed-R, N = K"]
    target = Canned({None: answer([[1]], [0.0]), "draft": answer([[1]], [0.0])})
    for row in rows:
        benchmark.ask_for(target, {}, None, row, num_beams=1, seed=3)
    for row, call in zip(rows, target.calls, strict=True):
        assert (call.get("verification") == "relaxed") == (row.verification == "relaxed") == ("generator" in call)
        if "generator" in call:
            assert call["generator"].initial_seed() == 3
    budgets = {call.get("draft_token_budget") for call in target.calls if call.get("assistant_model")}
    assert budgets == {1, benchmark.TRIE_BUDGET, None}  # None for auto, which plans by itself


@pytest.fixture
def world(models: Any) -> tuple[Any, dict[str, Any], Any]:
    """A target, its like, another draft and data, of weights so large that scores differ."""
    rng = np.random.default_rng(0)
    codes = np.unique(rng.integers(0, 12, (600, 4)), axis=0)
    ids = models.SemanticIds(codes)
    histories = [rng.integers(0, len(codes), 1 + number % 3) for number in range(10)]
    data = models.Data(ids.token_sequences(), ids.constraint_index(), histories, histories, [{0}] * 10)

    def model(seed: int) -> Any:
        made = models.build_model(data.tokens, models.TINY, seed=seed).eval()
        for weights in made.parameters():
            weights.data *= 2 if weights.ndim > 1 else 1
        return models.enable(made)

    target = model(0)
    return target, {"other": model(1), "same": copy.deepcopy(target)}, data


def counting(counts: Any, **changes: Any) -> Any:
    sizes = {"users": 3, "sample_users": 3, "num_beams": (3,), "sample_beams": (3,), "batch_beams": (3,)}
    return counts.replace(counts.FAST, **sizes | changes)


def by_name(rows: list[dict[str, Any]], what: str) -> dict[tuple[str, str], Any]:
    return {(row["draft"], row.get("rule", "")): row[what] for row in rows}


def test_counts_by_memory_are_those_of_the_targets_own_forwards(counts: Any, world: Any) -> None:
    target, drafts, data = world
    forward = target.forward
    result = counts.count(target, drafts["other"], data, counting(counts, checked=3))
    assert (result["users"], result["checked"], result["unlike"]) == (3, 3, 0)
    assert target.forward == forward
    steps = by_name(result["rows"], "accepted_steps")
    assert 0 < steps["N = 4 K", "new"][0] < 3  # some drafts fail, others do not
    for row in result["rows"]:
        accepted, forwards = row["accepted_steps"][0], row["target_forwards"][0]
        assert accepted + forwards == pytest.approx(4, abs=1e-3)


def test_an_answer_that_is_not_plain_searchs_ends_the_count(
    counts: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafts, data = world
    paths = counts.Memory._paths
    monkeypatch.setattr(counts.Memory, "_paths", lambda *args: paths(*args) // 7)  # mistakes nodes for one another
    with pytest.raises(SystemExit, match="another answer"):
        counts.count(target, drafts["other"], data, counting(counts, checked=0))


def test_a_draft_like_the_target_is_right_by_the_new_rule_alone(counts: Any, world: Any) -> None:
    target, drafts, data = world
    result = counts.count(target, drafts["same"], data, counting(counts, checked=0))
    forwards = by_name(result["rows"], "target_forwards")
    for width in ("N = K", "N = 2 K", "N = 4 K"):
        assert forwards[width, "new"] == (1, 1, 1)
    assert forwards["N = K", "old"] == (2, 2, 2)  # nothing is drafted in the prefill
    assert forwards["N = 2 K", "old"][0] > 2  # and the children of misses displace beams


def test_intervals_are_of_the_mean_over_users(counts: Any) -> None:
    values = np.random.default_rng(1).normal(size=(400, 1)) + np.array([[0.0, 5.0]])
    values[:, 1] = 5.0
    (mean, low, high), constant = counts.intervals(values)
    assert mean == pytest.approx(values[:, 0].mean(), abs=1e-4)
    assert (high - low) / 2 == pytest.approx(1.96 / np.sqrt(400), rel=0.1)
    assert constant == (5, 5, 5)


def test_work_of_a_batch_is_that_of_its_rows(counts: Any, world: Any) -> None:
    target, drafts, data = world
    result = counts.batch(target, drafts["other"], data, counting(counts))
    nodes, alone, ratio = (by_name(result["rows"], what) for what in ("nodes", "nodes_alone", "ratio"))
    assert nodes["none", ""] == alone["none", ""] == 8 * 3 * 3  # rows, beams, levels after the first
    assert ratio["N = 2 K", ""] <= 1.1
    assert not any(row["not_equal"] for row in result["rows"])
    forwards = by_name(result["rows"], "forwards")
    assert forwards["none", ""] == 4
    assert forwards["N = 2 K", ""] == by_name(result["rows"], "most_forwards_alone")["N = 2 K", ""]


def test_strict_samples_are_the_targets_own_and_relaxed_ones_are_not(counts: Any, world: Any) -> None:
    target, drafts, data = world
    result = counts.sample(target, drafts["other"], data, counting(counts, tv_draws=64))
    for row in result["rows"]:
        if row["draft"] == counts.TWICE:
            assert row["variation"]  # chance
        elif row["verification"] == "strict":
            assert (row["unlike"], row["variation"]) == (0, 0.0)
        else:
            assert row["unlike"]
            assert row["variation"]
    assert len(result["rows"]) == 2 + 3 * 3


def test_recall_is_the_mean_share_of_a_users_test_items(benchmark: Any, folder: Path) -> None:
    data = benchmark.read_beauty(folder, window=3)

    class Lists(Canned):
        def generate(self, *, input_ids: torch.Tensor, **settings: Any) -> SimpleNamespace:
            # Shorter histories come first: user 2 gets items 0 and 1, of 3 and 0; user 0 gets 2 and 3, not 4.
            rows = torch.from_numpy(data.tokens[[0, 1, 2, 3]])
            assert (input_ids[0, :2] == PAD).all()  # padded on the left
            return SimpleNamespace(sequences=torch.cat([input_ids.repeat_interleave(2, 0), rows], dim=1))

    row = benchmark.Row("strict", "plain", {})
    found = benchmark.recall(Lists({}), data, row, num_beams=2, num_users=None)
    assert (found["recall"], found["users"]) == (0.25, 2)
    assert found["standard_error"] == pytest.approx(np.std([0.5, 0.0], ddof=1) / np.sqrt(2))


def test_without_data_it_is_skipped_in_fast_mode_and_an_error_otherwise(
    benchmark: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark.main(["--data", str(tmp_path), "--fast"])
    assert "skipped: no items.tsv and users.jsonl" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="pass the folder of the Beauty data"):
        benchmark.main(["--data", str(tmp_path)])


@pytest.mark.slow  # trains ten small models
@needs_beauty
def test_fast_run_compares_all_and_stages_are_not_run_again(tmp_path: Path) -> None:
    script = ROOT / "examples" / "benchmark" / "speculation.py"
    command = [sys.executable, str(script), "--fast", "--data", str(BEAUTY), "--work", str(tmp_path / "work")]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout
    lines = [line for line in first.stdout.splitlines() if line.startswith("{")]
    reports = {(report["catalogue"], report["stage"]): report for report in map(json.loads, lines)}
    stages = ["count", "batch", "sample"]
    assert [*reports] == [("beauty", stage) for stage in [*stages, "measure"]] + [("movielens", s) for s in stages]
    assert all(report["versions"] and report["hardware"] for report in reports.values())
    times = reports["beauty", "measure"]["rows"]
    rows = [row for row in times if row["num_beams"] == 5]
    assert sum(row["verification"] == "strict" for row in rows) == 11
    assert sum(row["verification"] == "relaxed" for row in rows) == 7
    assert not any(row["wrong"] for row in times)
    assert all(0 <= row["accepted_steps"] <= 3 for row in times)
    assert not any(reports[catalogue, "count"]["unlike"] for catalogue in ("beauty", "movielens"))
