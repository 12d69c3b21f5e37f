# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The step benchmark's baselines give the slow search's answers, and no time is printed for a wrong one of ours."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import reference_beam_search

from hf_gr import ConstraintIndex

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"
SCORE_TOL = 1e-5  # fp32, at most 4 additions
BATCH, BEAMS, VOCAB, LENGTH = 2, 6, 9, 4
TINY = ["--fast", "--items", "300", "900", "--vocab", "--skewed-items", "0"]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; its neighbours are importable, as they are when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("step")


@pytest.fixture
def baselines(step: Any) -> Any:
    return import_module("baselines")


@pytest.fixture
def rows(step: Any) -> np.ndarray:
    drawn = np.random.default_rng(0).integers(VOCAB, size=(70, LENGTH)).astype(np.int16)
    return step.sorted_distinct(drawn, VOCAB)


@pytest.fixture
def tables(step: Any) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (step.FromLastToken.KEYS + BATCH, VOCAB)
    return [3 * torch.randn(shape, generator=random) for _ in range(LENGTH)]


def slow_answer(
    step: Any, tables: list[torch.Tensor], sequences: list[list[int]]
) -> list[list[tuple[tuple[int, ...], float]]]:
    """What the oracle finds for every row of the batch."""

    def search(row: int) -> list[tuple[tuple[int, ...], float]]:
        def log_probs(prefix: tuple[int, ...]) -> np.ndarray:
            key = (prefix[-1] + 7 * row) % step.FromLastToken.KEYS if prefix else row
            return tables[len(prefix)][key].double().log_softmax(-1).numpy()

        return reference_beam_search(log_probs, sequences, BEAMS, length_penalty=0.0)

    return [search(row) for row in range(BATCH)]


def assert_same(sequences: torch.Tensor, scores: torch.Tensor, expected: Any) -> None:
    for row, found in enumerate(expected):
        assert [tuple(sequence) for sequence in sequences[row].tolist()] == [sequence for sequence, _ in found]
        assert scores[row].tolist() == pytest.approx([score for _, score in found], abs=SCORE_TOL)


def static(baselines: Any, rows: np.ndarray, dense_levels: int) -> Any:
    trie = ConstraintIndex.from_sequences(rows).snapshot.trie
    return baselines.Static(trie, VOCAB, torch.device("cpu"), dense_levels)


@pytest.mark.parametrize("name", ["CpuTrie", "Ppv", "all logits", "HashBitmap", "STATIC", "STATIC, one dense level"])
def test_exact_baselines_give_the_slow_searchs_answers(
    step: Any, baselines: Any, rows: np.ndarray, tables: list[torch.Tensor], name: str
) -> None:
    device = torch.device("cpu")
    method = {
        "CpuTrie": lambda: baselines.CpuTrie(rows, VOCAB),
        "Ppv": lambda: baselines.Ppv(rows, device),
        "all logits": lambda: baselines.Ppv(rows, device).approximate(VOCAB),
        "HashBitmap": lambda: baselines.HashBitmap(rows, device, 24),  # too roomy for a false positive
        "STATIC": lambda: static(baselines, rows, 2),
        "STATIC, one dense level": lambda: static(baselines, rows, 1),
    }[name]()
    beams = baselines.search(method, step.FromLastToken(tables, BATCH), BEAMS, LENGTH)
    assert_same(beams.sequences, beams.scores, slow_answer(step, tables, rows.tolist()))


def test_ours_gives_the_slow_searchs_answers(step: Any, rows: np.ndarray, tables: list[torch.Tensor]) -> None:
    answer = step.ours(step.load(rows, torch.device("cpu")), step.FromLastToken(tables, BATCH), BEAMS)
    assert_same(answer.sequences, answer.scores, slow_answer(step, tables, rows.tolist()))


def test_unconstrained_is_the_slow_search_over_everything(
    step: Any, baselines: Any, tables: list[torch.Tensor]
) -> None:
    everything = [list(sequence) for sequence in itertools.product(range(VOCAB), repeat=LENGTH)]
    beams = baselines.search(baselines.Method(), step.FromLastToken(tables, BATCH), BEAMS, LENGTH)
    assert_same(beams.sequences, beams.scores, slow_answer(step, tables, everything))


def test_few_logits_miss_answers_but_give_no_invalid_ones(
    step: Any, baselines: Any, rows: np.ndarray, tables: list[torch.Tensor]
) -> None:
    ppv = baselines.Ppv(rows, torch.device("cpu"))
    exact, some = (
        baselines.search(method, step.FromLastToken(tables, BATCH), BEAMS, LENGTH)
        for method in (ppv, ppv.approximate(2))
    )
    known = {tuple(row) for row in rows.tolist()}
    assert all(tuple(sequence) in known for sequence in some.sequences[some.scores > baselines.DEAD].tolist())
    assert 0 < step.share_found(step.Answer(some.sequences, some.scores), exact.sequences) < 1


def test_a_crowded_bitmap_has_the_false_positives_that_are_reported(
    step: Any, baselines: Any, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    bitmap, ppv = baselines.HashBitmap(rows, device, 9), baselines.Ppv(rows, device)
    monkeypatch.setattr(step, "LENGTH", LENGTH)
    sequences = torch.from_numpy(rows[:BEAMS].astype(np.int64))[None]
    prefixes = {tuple(row[:length]) for row in rows.tolist() for length in range(LENGTH + 1)}
    passed = illegal = 0
    for row in rows[:BEAMS].tolist():
        for length in range(LENGTH):
            state = bitmap.start(1, device)
            for token in row[:length]:
                state = bitmap.extend(state, torch.tensor([[token]]), 0)
            found = bitmap.legal(torch.Size((1, 1, VOCAB)), state, length).flatten().tolist()
            legal = [(*row[:length], token) in prefixes for token in range(VOCAB)]
            assert all(f for f, known in zip(found, legal, strict=True) if known)
            passed += sum(f and not known for f, known in zip(found, legal, strict=True))
            illegal += legal.count(False)
    assert passed > 0
    assert step.false_positive_rate(bitmap, ppv, sequences, VOCAB) == pytest.approx(passed / illegal)


def test_what_is_no_item_is_counted(step: Any, baselines: Any, rows: np.ndarray, monkeypatch: Any) -> None:
    monkeypatch.setattr(step, "LENGTH", LENGTH)
    sequences = torch.from_numpy(rows[:4].astype(np.int64))[None].clone()
    absent = next(c for c in itertools.product(range(VOCAB), repeat=LENGTH) if list(c) not in rows.tolist())
    sequences[0, 1] = torch.tensor(absent)
    answer = step.Answer(sequences, torch.tensor([[0.0, 0.0, 0.0, baselines.DEAD]]))
    assert step.share_valid(baselines.Ppv(rows, torch.device("cpu")), answer) == 0.5


@pytest.mark.parametrize("codes", ["uniform", "zipf"])
def test_catalogues_are_sorted_distinct_and_described(step: Any, baselines: Any, codes: str) -> None:
    rows = step.make_rows(step.Setting(codes, 3000, 300), 0)
    assert rows.tolist() == sorted({tuple(row): list(row) for row in rows.tolist()}.values())
    assert 2900 < len(rows) <= 3000
    assert (0 <= rows).all()
    assert (rows < 300).all()
    for level, (most, mean) in enumerate(step.branching(rows)):
        parents = np.unique(np.unique(rows[:, : level + 1], axis=0)[:, :level], axis=0, return_counts=True)[1]
        assert (most, mean) == (parents.max(), pytest.approx(parents.mean()))
    runs = [np.unique(rows[:, :level], axis=0, return_counts=True)[1].max() for level in range(rows.shape[1])]
    assert baselines.longest_runs(rows) == runs


@pytest.mark.script("benchmark/step.py")
def test_fast_reports_every_contender_and_where_it_ran() -> None:
    command = [sys.executable, str(BENCHMARKS / "step.py"), *TINY, "--trie-items", "500"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CPU trie left out at uniform, 9e2 items" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    few, many = report["results"]
    assert set(few["step_seconds"]) - set(many["step_seconds"]) == {"CPU trie"}
    contenders = {"ours", "ours, a rule", "ours, exclusions", "unconstrained", "STATIC", "PPV exact", "hash bitmap"}
    assert contenders < set(many["step_seconds"])
    for result in report["results"]:
        assert all(seconds > 0 for seconds in result["step_seconds"].values())
        assert result["ratio"]["unconstrained"] == 1
        assert len(result["level_seconds"]["ours"]) == 8
    assert len(report["goals"]) == 7
    assert report["hardware"]["threads"] == 1


@pytest.mark.script("benchmark/step_branching.py")
def test_fast_branching_reports_every_contender_once_children_agree(
    step: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, str(BENCHMARKS / "step_branching.py"), "--fast"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [result["branching"] for result in report["results"]] == [2, 4, 8, 16, 32, 64]
    assert all(set(result["seconds"]) == {"ours", "STATIC"} for result in report["results"])
    branching = import_module("step_branching")
    right = branching.Static.candidates
    monkeypatch.setattr(
        branching.Static, "candidates", lambda self, scores, *how: right(self, scores.roll(1, -1), *how)
    )
    monkeypatch.setattr(branching.torch, "set_num_threads", lambda number: None)
    with pytest.raises(SystemExit, match="MISMATCH at 2 children"):
        branching.main(["--fast"])
    assert "children  ours" not in capsys.readouterr().out


@pytest.mark.parametrize("error", ["score", "sequence", "trie", "rule", "exclusion"])
def test_a_wrong_answer_ends_the_run_before_any_time_is_printed(
    step: Any, baselines: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: str
) -> None:
    right, right_trie, rules = step.ours, baselines.dict_trie, step.load_rules

    def without(of_name: Any) -> Any:
        catalogue, left = of_name
        return replace(catalogue, alive=None, hidden=None), left

    def wrong(*arguments: Any) -> Any:
        answer = right(*arguments)
        if error == "score":
            return replace(answer, scores=answer.scores + torch.tensor([0.0, 1e-2])[:, None])
        sequences = answer.sequences.clone()
        sequences[1, 0, -1] ^= 1
        return replace(answer, sequences=sequences)

    monkeypatch.setattr(step.torch, "set_num_threads", lambda number: None)
    if error in ("rule", "exclusion"):
        name = {"rule": step.WITH_RULE, "exclusion": step.WITH_EXCLUSIONS}[error]
        monkeypatch.setattr(step, "load_rules", lambda *args: {**(found := rules(*args)), name: without(found[name])})
    elif error == "trie":
        monkeypatch.setattr(baselines, "dict_trie", lambda rows: right_trie(rows[::2]))
    else:
        monkeypatch.setattr(step, "ours", wrong)
    with pytest.raises(SystemExit, match="MISMATCH at uniform, 3e2 items"):
        step.main(TINY)
    assert "ms per step" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab", "65536"], "expected 2 to 32768"),
        (["--items", "5"], "no fewer than the 70 beams"),
        (["--cpu-time", "--threads", "2"], "that of one thread"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    step: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        step.parse(arguments)
    assert message in capsys.readouterr().err
