# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The speculation benchmark: what is trained on, counted and compared, and that no wrong answer gets a number."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import BEAUTY, needs_beauty

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.training import small_recommender

ROOT = Path(__file__).resolve().parents[1]

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
def samples(benchmark: Any) -> Any:
    return import_module("speculation_samples")


@pytest.fixture
def models(benchmark: Any) -> Any:
    return import_module("speculation_models")


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


def study_of(histories: list[list[int]], align: list[list[int]]) -> Any:
    """A study of eight items."""
    data = import_module("backbone_data")
    ids = SemanticIds([[a, b] for a in range(4) for b in range(2)])
    rows = [data.Row(np.array(row[:-1]), row[-1], user) for user, row in enumerate(histories)]
    return data.Study("beauty", ids, [np.array(row[:-2]) for row in histories], list(map(np.array, align)), [], rows)


def test_users_of_teacher_prompts_are_not_counted(models: Any) -> None:
    study = study_of([[0, 1, 2, 3], [4, 5, 6], [7, 1, 5, 2]], align=[[7, 1]])
    data = models.data_of(study, fast=True)
    assert [row.tolist() for row in data.prompts] == [[0, 1, 2], [4, 5]]
    assert data.answers == [{3}, {6}]
    assert data.users == [0, 1]
    rows = [import_module("backbone_data").Row(np.array([0, 1]), 2, user) for user in (0, 1, 2)]
    assert models.data_of(study, fast=True, rows=rows, without=[0]).users == [1]


def test_the_label_of_a_teacher_prompt_follows_it(models: Any) -> None:
    study = study_of([[0, 1, 2]], align=[[3, 4, 5, 6], [1], [2, 7], [0, 6, 2]])
    prompts, labels = models.teacher_pairs(study, 10, max_length=2)
    found = {(tuple(prompt), tuple(label)) for prompt, label in zip(prompts, labels, strict=True)}
    tokens = study.tokens
    expected = [([3, 4], 5), ([4, 5], 6), ([0, 6], 2)]  # the last two of two items or more, and what came next
    assert found == {(tuple(tokens[before].ravel()), tuple(tokens[after])) for before, after in expected}
    assert len(models.teacher_pairs(study, 2, max_length=2)[0]) == 2


def test_a_folder_is_made_once_and_not_taken_half_made(models: Any, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError("stopped")

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "whole").touch()

    with pytest.raises(RuntimeError, match="stopped"):
        models.make_once(tmp_path / "work" / "target", fail)
    made = models.make_once(tmp_path / "work" / "target", make)
    assert [path.name for path in made.iterdir()] == ["whole"]
    assert models.make_once(made, fail) == made


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
    return {
        "users": 3,
        "prompt_tokens": 4,
        "target_parameters": 2,
        "draft_parameters": 1,
        "num_draft_beams": 40,
        "gamma": 4,
        "prefill_seconds": 0.001,
        "rows": [*benchmark.summarize(rows, 2, [0.001] * 3)],
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
    drafts = dict.fromkeys([*benchmark.TIMED, "random weights"], "draft")
    rows = benchmark.make_rows(drafts)
    assert [row.name for row in rows if row.verification == "relaxed"][1:] == [*drafts, f"{benchmark.BEST}, N = K"]
    target = Canned({None: answer([[1]], [0.0]), "draft": answer([[1]], [0.0])})
    for row in rows:
        benchmark.ask_for(target, {}, None, row, num_beams=1, seed=3)
    for row, call in zip(rows, target.calls, strict=True):
        assert (call.get("verification") == "relaxed") == (row.verification == "relaxed") == ("generator" in call)
        if "generator" in call:
            assert call["generator"].initial_seed() == 3
    budgets = {call.get("draft_token_budget") for call in target.calls if call.get("assistant_model")}
    assert budgets == {1, benchmark.TRIE_BUDGET}


@pytest.fixture
def world(models: Any) -> tuple[Any, dict[str, Any], Any]:
    """A target, its like, another draft and data, of weights so large that scores differ."""
    rng = np.random.default_rng(0)
    codes = np.unique(rng.integers(0, 12, (600, 4)), axis=0)
    ids = SemanticIds(codes)
    histories = [rng.integers(0, len(codes), 1 + number % 3) for number in range(10)]
    data = models.Data(ids.token_sequences(), ids.constraint_index(), histories, [{0}] * 10, [*range(10)])

    def model(seed: int) -> Any:
        made = small_recommender(ids, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, seed=seed).eval()
        for weights in made.parameters():
            weights.data *= 2 if weights.ndim > 1 else 1
        return made

    target = model(0)
    return target, {"other": model(1), "same": copy.deepcopy(target)}, data


def counting(counts: Any, **changes: Any) -> Any:
    sizes = {"users": 3, "sample_users": 3, "num_beams": (3,), "sample_beams": (3,), "batch_beams": (3,)}
    return replace(counts.FAST, **sizes | changes)


def by_name(rows: list[dict[str, Any]], what: str) -> dict[str, Any]:
    return {row["draft"]: row[what] for row in rows}


def test_counts_by_memory_are_those_of_users_alone(counts: Any, world: Any) -> None:
    target, drafts, data = world
    forward = target.forward
    batches = counts.in_batches(data, range(10), 4)
    searches = counts.search_all(target, data, batches, (3,))
    assert target.forward == forward
    settings = counts.ASSISTANT | {"assistant_model": drafts["other"], "num_draft_beams": 12}
    steps = counts.accepted_steps(target, data, searches, settings, num_beams=3, checked=3)
    alone = [
        counts.ask(target, counts.prompts_of(target, data, [user]), data.index, settings, num_beams=3)
        for batch in batches
        for user in batch
    ]
    assert steps.tolist() == [int(output.speculation.accepted_steps) for output in alone]
    assert 0 < steps.mean() < 3  # some drafts fail, others do not
    some = counts.accepted_steps(target, data, searches, settings, num_beams=3, batches=slice(1, None, 2))
    assert some.tolist() == steps[4:8].tolist()


def test_an_answer_that_is_not_plain_searchs_ends_the_count(
    counts: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafts, data = world
    paths = counts.Memory._paths
    monkeypatch.setattr(counts.Memory, "_paths", lambda *args: paths(*args) // 7)  # mistakes nodes for one another
    with pytest.raises(SystemExit, match="another answer"):
        counts.count(target, drafts["other"], data, counting(counts, checked=0))


def test_counts_that_own_forwards_do_not_give_end_the_count(
    counts: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafts, data = world
    ask = counts.ask

    def wrong(target: Any, *args: Any, **kwargs: Any) -> Any:
        output = ask(target, *args, **kwargs)
        if "forward" in vars(target) and hasattr(output, "speculation"):  # by memory
            output.speculation.accepted_steps.add_(1)
        return output

    monkeypatch.setattr(counts, "ask", wrong)
    with pytest.raises(SystemExit, match="other counts by own forwards"):
        counts.count(target, drafts["other"], data, counting(counts, checked=1))


def test_a_draft_like_the_target_is_right(counts: Any, world: Any) -> None:
    target, drafts, data = world
    result = counts.count(target, drafts["same"], data, counting(counts, users=10))
    steps = by_name(result["rows"], "accepted_steps")
    assert steps["N = K"] == (3, 3, 3)
    assert 2 < steps["N = 2 K"][0] <= 3  # children of misses may displace beams


def test_intervals_are_of_the_mean_over_users(counts: Any) -> None:
    values = np.random.default_rng(1).normal(size=(400, 1)) + np.array([[0.0, 5.0]])
    values[:, 1] = 5.0
    (mean, low, high), constant = counts.intervals(values)
    assert mean == pytest.approx(values[:, 0].mean(), abs=1e-4)
    assert (high - low) / 2 == pytest.approx(1.96 / np.sqrt(400), rel=0.1)
    assert constant == (5, 5, 5)


def test_work_of_a_batch_is_that_of_its_rows(counts: Any, samples: Any, world: Any) -> None:
    target, drafts, data = world
    result = samples.batch(target, drafts["other"], data, counting(counts))
    nodes, alone, ratio = (by_name(result["rows"], what) for what in ("nodes", "nodes_alone", "ratio"))
    assert nodes["none"] == alone["none"] == 8 * 3 * 3  # rows, beams, levels after the first
    assert ratio["N = 2 K"] <= 1.1
    assert not any(row["not_equal"] for row in result["rows"])
    forwards = by_name(result["rows"], "forwards")
    assert forwards["none"] == 4
    assert forwards["N = 2 K"] == by_name(result["rows"], "most_forwards_alone")["N = 2 K"]


def test_strict_samples_are_the_targets_own_and_relaxed_ones_are_not(counts: Any, samples: Any, world: Any) -> None:
    target, drafts, data = world
    result = samples.sample(target, drafts["other"], data, counting(counts, tv_draws=64))
    for row in result["rows"]:
        if row["draft"] == counts.TWICE:
            assert row["variation"]  # chance
        elif row["verification"] == "strict":
            assert (row["unlike"], row["variation"]) == (0, 0.0)
        else:
            assert row["unlike"]
            assert row["variation"]
    assert len(result["rows"]) == 2 + 2 * 3


@pytest.fixture
def atspeed(benchmark: Any) -> Any:
    return import_module("atspeed")


def test_recall_is_the_share_of_test_items_among_those_recommended(
    atspeed: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, data = world
    kept = import_module("atspeed_counts")
    counting_of = kept.Counter
    items = {0: [5, 6], 1: [7, 3], 2: [0, 1], 3: [4, 2]}
    data = atspeed.replace(data, prompts=data.prompts[:4], answers=[{6}, {2}, {0}, {9}])
    counter = counting_of(SimpleNamespace(target=Canned({})), data, atspeed.FAST_SCALE, 6, Path())

    def ask(target: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        users = prompt["users"]
        rows = torch.from_numpy(data.tokens[[item for user in users for item in items[user]]])
        start = prompt["input_ids"].repeat_interleave(2, 0)
        return SimpleNamespace(sequences=torch.cat([start, rows], dim=1))

    def prompts_of(model: Any, data: Any, users: list[int]) -> dict[str, Any]:
        return {"users": users, "input_ids": torch.full((len(users), 3), PAD)}

    monkeypatch.setattr(kept.counts, "ask", ask)
    monkeypatch.setattr(kept, "prompts_of", prompts_of)
    users = [user for batch in counter.batches(6) for user in batch]
    hits = dict(zip(users, counter.recall({}, 2), strict=True))
    assert hits == {0: 1, 1: 0, 2: 1, 3: 0}


def test_intervals_are_of_users_and_of_seeds(atspeed: Any) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1, 900))
    mean, low, high = atspeed.Steps(values).interval
    assert mean == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(1.96 / 30, rel=0.1)
    alike = atspeed.Steps(values.repeat(3, axis=0)).interval
    assert alike == pytest.approx((mean, low, high))
    apart = values + np.array([[0.0], [1.0], [2.0]])  # the means of seeds have a deviation of 1
    _, low, high = atspeed.Steps(apart).interval
    assert (high - low) / 2 == pytest.approx(np.hypot(1.96 / 30, 4.30 / np.sqrt(3)), rel=0.02)


def test_differences_keep_the_seeds_of_either_side(atspeed: Any) -> None:
    one, three = atspeed.Steps(np.array([[1, 2]])), atspeed.Steps(np.array([[0, 0], [1, 1], [2, 2]]))
    assert one.less(three).values.tolist() == [[1, 2], [0, 1], [-1, 0]]
    assert three.less(one).row(method="m")["by_seed"] == [-1.5, -0.5, 0.5]


def test_counts_are_kept_by_how_they_are_made_with_the_commit(atspeed: Any, world: Any, tmp_path: Path) -> None:
    _, _, data = world
    counter = import_module("atspeed_counts").Counter(None, data, atspeed.FAST_SCALE, 3, tmp_path)
    assert counter.kept("some name", ["strict", 10, {"alpha": 0.5}], lambda: [1]) == [1]
    assert counter.kept("some name", ["strict", 10, {"alpha": 0.5}], lambda: [2]) == [1]
    assert counter.kept("some name", ["strict", 10, {"alpha": 0.7}], lambda: [3]) == [3]
    (file, _) = sorted(tmp_path.iterdir())
    kept = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(kept | {"commit": "another"}), encoding="utf-8")
    for alpha in (0.5, 0.7):
        counter.kept("some name", ["strict", 10, {"alpha": alpha}], lambda: [4])
    assert "another" in counter.commits


def test_a_workshop_of_another_plan_has_another_folder(models: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(models, "backbone_folder", lambda *args, **kwargs: tmp_path)
    monkeypatch.setattr(models, "load", lambda folder: None)
    study = SimpleNamespace(name="beauty")
    plans = [models.FAST, replace(models.FAST, epochs=5), models.PLANS["beauty"]]
    folders = {models.Workshop(study, plan, tmp_path).folder for plan in plans}
    assert len(folders) == 3
    shop = models.Workshop(study, models.FAST, tmp_path)
    made: list[Path] = []
    monkeypatch.setattr(shop, "_made", lambda folder, make: made.append(folder))
    shop.aligned("SeqKD", models.METHODS["SeqKD"], seed=0)
    shop.aligned("SeqKD", replace(models.METHODS["SeqKD"], epochs=20), seed=0)
    shop.aligned("SeqKD", models.METHODS["SeqKD"], seed=1)
    assert len({*made}) == 3


def test_the_alpha_that_accepts_most_is_taken_by_method_at_the_first_k(atspeed: Any) -> None:
    def row(method: str, value: float, width: int, steps: float) -> dict[str, Any]:
        return {"method": method, "value": value, "num_beams": width, "accepted_steps": [steps, 0, 9]}

    rows = [row("SeqKD", 0.1, 10, 1.0), row("SeqKD", 0.7, 10, 1.2), row("SeqKD", 0.1, 20, 3.0)]
    rows += [row("BeamKD", 0.5, 10, 2.0), row("BeamKD", 1.0, 10, 1.9)]
    assert atspeed.best_alphas(rows) == {
        "SeqKD, tuned: 0.7": atspeed.ALPHAS["SeqKD"][0.7],
        "BeamKD, tuned: 0.5": atspeed.ALPHAS["BeamKD"][0.5],
    }


def test_validation_rows_are_of_users_who_are_not_counted(atspeed: Any, tmp_path: Path) -> None:
    histories = np.random.default_rng(0).integers(0, 8, (40, 5))
    study = study_of(histories.tolist(), align=[])
    row = import_module("backbone_data").Row
    study = atspeed.replace(study, valid=[row(history[:-2], history[-2], n) for n, history in enumerate(histories)])
    shop = SimpleNamespace(study=study, plan=SimpleNamespace(is_fast=True), folder=tmp_path)
    bench = atspeed.make_bench(shop, atspeed.FAST_SCALE, {})
    counted = {bench.test.data.users[row] for batch in bench.test.batches(12) for row in batch}
    assert len(counted) == 12
    assert not counted & {*bench.valid.data.users}
    assert len(bench.valid.data.users) == 28


def test_ablations_change_one_thing(atspeed: Any) -> None:
    for name, variant in atspeed.TERMS.items():
        method = atspeed.METHODS[name.split(",")[0]]
        assert variant.loss == method.loss
        changes = [key for key in ("data", "share", "epochs") if getattr(variant, key) != getattr(method, key)]
        changes += [key for key, value in variant.options.items() if method.options.get(key) != value]
        assert len(changes) == name.count(",") + ("w/o CA" in name) + ("of fewer" in name), name


def test_sweeps_are_drawn_with_a_line_for_every_method_and_k(
    atspeed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(import_module("report"), "PLOTS", tmp_path)
    names = {"verification": "strict", "accepted_steps": [1.0, 0.9, 1.1]}
    rows = [
        names | {"sweep": sweep, "value": value, "method": method, "num_beams": 10}
        for sweep in ("N", "gamma", "alpha")
        for value in (3, 1, 2)
        for method in ("AtSpeed-S", "BeamKD")
    ]
    atspeed.draw("beauty", rows)
    drawn = (tmp_path / "atspeed-beauty.svg").read_text(encoding="utf-8")
    assert all(
        text in drawn for text in ("draft beams N", "alpha, validation rows", "accepted steps", "BeamKD, K = 10")
    )


def test_without_data_fast_mode_is_skipped(
    benchmark: Any, atspeed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_module("speculation_models"), "has_study", lambda name: False)
    for script in (benchmark, atspeed):
        script.main(["--fast", "--studies", "beauty"])
    assert "skipped: no data of beauty" in capsys.readouterr().out


@pytest.mark.slow  # trains some small models
@pytest.mark.script("benchmark/atspeed.py")
@pytest.mark.script("benchmark/speculation.py")
@needs_beauty
def test_fast_run_compares_all_and_stages_are_not_run_again(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "benchmark"
    environment = os.environ | {"HF_GR_DATA": str(BEAUTY.parent)}

    def run(script: str, *options: str) -> tuple[str, list[dict[str, Any]]]:
        command = [sys.executable, str(folder / script), "--fast", "--studies", "beauty", "--work", str(tmp_path)]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    stages = ["--stages", "alpha", "table 1", "table 2", "terms"]
    first, (result,) = run("atspeed.py", *stages)
    tables = result["beauty"]
    methods = {row["method"] for row in tables["table 1"] if row["verification"] == "strict"}
    assert {"SFT", "AtSpeed-S", "BeamKD", "trie", "random weights"} <= methods
    assert all(0 <= row["accepted_steps"][0] <= 3 for row in tables["table 1"] if "less" not in row["verification"])
    models = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors"))
    again, _ = run("atspeed.py", *stages)
    assert [line for line in first.splitlines() if line[:1] != "{"] == [
        line for line in again.splitlines() if line[:1] != "{"
    ]
    first, reports = run("speculation.py")
    assert [report["stage"] for report in reports] == ["count", "batch", "sample", "measure"]
    assert all(report["versions"] and report["hardware"] for report in reports)
    assert first == run("speculation.py")[0]
    assert not any(row["wrong"] for row in reports[-1]["rows"])
    assert models == sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors"))
