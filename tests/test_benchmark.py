# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run in their fast modes, say what they measured, and report no time for a wrong answer."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; its neighbours are importable, as they are when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("generate")


@pytest.fixture
def answer(generate: Any) -> Any:
    sequences = torch.tensor([[[1, 2], [1, 3], [4, 2]]])
    return generate.Answer(sequences, torch.tensor([[-1.0, -2.0, -3.0]]))


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.script("benchmark/generate.py")
def test_generate_reports_every_contender_and_where_it_ran() -> None:
    report = run("generate.py", "--fast", "--settings", "1,16,1", "2,16,20")
    assert [(r["batch"], r["prompt"], r["beams"]) for r in report["results"]] == [(1, 16, 1), (2, 16, 20)]
    for result in report["results"]:
        assert set(result["seconds"]) == {
            "ours",
            "ours with output_scores",
            "raw forwards",
            "transformers, constrained",
            "transformers, unconstrained",
        }
        assert all(seconds > 0 for seconds in result["median_seconds"].values())
    assert {"torch", "transformers", "python"} <= set(report["versions"])
    assert report["commit"]
    assert report["hardware"]["cpu"]


@pytest.mark.script("benchmark/kept_keys.py")
def test_kept_keys_report_gains_and_what_they_cost() -> None:
    results = run("kept_keys.py", "--fast", "--batches", "2", "--beams", "8", "--repeats", "1")["results"]
    assert [round(result["num_missing"]) for result in results] == [8, 4, 32]
    assert all(seconds > 0 for result in results for seconds in result["median"].values())


def test_beauty_without_data_is_skipped_in_fast_mode_and_an_error_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    beauty = import_module("beauty")
    beauty.main(["--data", str(tmp_path), "--fast"])
    assert "skipped: no items.tsv and users.jsonl" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="pass the folder of the Beauty data"):
        beauty.main(["--data", str(tmp_path)])


def test_equal_answers_do_not_differ(generate: Any, answer: Any) -> None:
    assert generate.difference(answer, answer, 1e-4, exact=True) is None


def test_near_ties_may_change_places(generate: Any, answer: Any) -> None:
    tied = replace(answer, scores=torch.tensor([[-1.0, -2.0, -2.00001]]))
    swapped = replace(tied, sequences=answer.sequences[:, [0, 2, 1]])
    assert generate.difference(swapped, tied, 1e-4, exact=True) is None
    left_out = replace(tied, sequences=torch.tensor([[[1, 2], [1, 3], [9, 9]]]))
    assert generate.difference(left_out, tied, 1e-4, exact=True) is None


@pytest.mark.parametrize(
    ("sequences", "scores", "message"),
    [
        ([[1, 2], [1, 3], [4, 2]], [-1.0, -2.0, -3.001], "scores differ"),
        ([[1, 2], [1, 3], [4, 2]], [-1.0, -2.0, float("nan")], "scores differ"),
        ([[1, 3], [1, 2], [4, 2]], [-1.0, -2.0, -3.0], "sequence"),
        ([[1, 2], [9, 9], [4, 2]], [-1.0, -2.0, -3.0], "sequence"),
        ([[1, 2], [1, 2], [4, 2]], [-1.0, -2.0, -3.0], "twice"),
    ],
)
def test_wrong_answers_differ(generate: Any, answer: Any, sequences: Any, scores: Any, message: str) -> None:
    wrong = generate.Answer(torch.tensor([sequences]), torch.tensor([scores]))
    problem = generate.difference(wrong, answer, 1e-4, exact=True)
    assert problem is not None
    assert message in problem


def test_a_wrong_answer_ends_the_run_before_any_time_is_printed(
    generate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = generate.ours

    def wrong(*arguments: Any, **options: Any) -> Any:
        output = right(*arguments, **options)
        if options.get("scores"):
            output.sequences_scores[0] += 1e-2
        return output

    monkeypatch.setattr(generate, "ours", wrong)
    with pytest.raises(SystemExit, match="MISMATCH at"):
        generate.main(["--fast", "--settings", "1,16,8"])
    assert "baseline" not in capsys.readouterr().out


def test_drafting_reports_forwards_and_no_time_for_a_wrong_answer(
    generate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_gr.torch.drafters import TreeDrafter

    drafting = import_module("drafting")
    options = ["--fast", "--settings", "1,16,8"]
    drafting.main(options)
    [catalogue] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    forwards = {row["contender"]: row["target_forwards"] for row in catalogue["rows"]}
    assert forwards["plain"] == 5
    assert forwards["trie, 512"] < 5

    def misplaced(self: Any, frontier: Any) -> Any:
        return [
            (part, [replace(nodes, tokens=nodes.tokens.roll(1, dims=-1)) for nodes in drafted])
            for part, drafted in draft(self, frontier)
        ]

    draft = TreeDrafter.draft
    monkeypatch.setattr(TreeDrafter, "draft", misplaced)
    with pytest.raises(SystemExit, match="does not answer what plain search answers"):
        drafting.main(options)
