# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`examples/benchmark/tpu.py` is tried here, so that it runs on the day a TPU is at hand."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("tpu")


@pytest.mark.script("benchmark/tpu.py")
def test_every_part_is_measured_and_kept(tpu: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "tpu.jsonl"
    arguments = [
        "--fast",
        "--models",
        "Qwen3-0.6B",
        "--programs",
        "beams",
        "trie",
        "--repeats",
        "1",
        "--out",
        str(out),
    ]
    tpu.main([*arguments, "--traces", str(tmp_path / "traces")])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["part"] for row in rows} == set(tpu.PARTS) - {"meshes"}  # whose programs have other names
    assert not any("wrong" in row or "out_of_memory" in row for row in rows)
    assert all(row["ms"] > row["least_ms"] > 0 for row in rows if row["part"] == "times")
    counted = [row for row in rows if row["part"] == "costs"]
    # The closed form has the last layer compute all of a prompt, of which a program needs the end: here, half of it.
    assert all(row["call_gflop"] > 0.5 * row["needed_gflop"] > 0 for row in counted)
    assert [*(tmp_path / "traces").rglob("*.xplane.pb")]
    # What stopped after some rows goes on with the others.
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == len(rows)
    out.write_text("".join(lines[:-1]), encoding="utf-8")
    tpu.main([*arguments, "--parts", "answers", "costs"])
    assert len(out.read_text(encoding="utf-8").splitlines()) == len(rows) - 1


def test_answers_that_differ_are_wrong(tpu: Any) -> None:
    def answer(tokens: Any, scores: Any) -> Any:
        return SimpleNamespace(sequences=np.array(tokens), sequences_scores=np.array(scores))

    right = answer([[1, 2], [3, 4]], [-1.0, -np.inf])
    assert tpu.difference(right, right) == 0
    assert tpu.difference(answer([[1, 2], [3, 4]], [-1.0005, -np.inf]), right) == pytest.approx(0.0005)
    for wrong in (answer([[1, 2], [3, 5]], [-1.0, -np.inf]), answer([[1, 2], [3, 4]], [-1.1, -np.inf])):
        with pytest.raises(tpu.Wrong):
            tpu.difference(wrong, right)
    row = tpu.run_row({"part": "answers"}, lambda: tpu.difference(answer([[7]], [0.0]), right))
    assert row["wrong"] == "other sequences in rows all"


def test_without_a_tpu_it_says_what_runs(tpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "JAX has no TPU, only cpu"), (["--fast", "--programs", "beam"], "['beam']")):
        with pytest.raises(SystemExit):
            tpu.parse(arguments)
        assert message in capsys.readouterr().err


def test_what_a_call_needs_is_the_rooflines(tpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, operations and bytes: the longer of both is the least time, part by part."""
    costs, size = import_module("tpu_costs"), tpu.Size(import_module("roofline").QWEN3["Qwen3-0.6B"])
    size = replace(size, batch=1, prompt=1000, beams=128, length=4)
    device = costs.CHIPS["v5e"]
    needed, least = costs.needed(size), costs.least_seconds(size, device)
    assert needed.flops > 2 * 1000 * size.shape.weights
    assert needed.num_bytes > 4 * 2 * size.shape.weights
    assert device.seconds(needed.flops, needed.num_bytes) <= least
    assert least <= needed.flops / device.flops + needed.num_bytes / device.bandwidth
    assert costs.Cost(2, 3).plus(costs.Cost(10, 20), 2) == costs.Cost(22, 43)


def test_layers_and_forwards_are_counted_one_by_one(tpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every level has 2, a prompt 1, and a program knows no loops."""
    costs = import_module("tpu_costs")

    class Compiled:
        def __init__(self, flops: float) -> None:
            self.flops = flops

        def cost_analysis(self) -> dict[str, float]:
            return {"flops": self.flops, "bytes accessed": 10 * self.flops}

        def memory_analysis(self) -> Any:
            return SimpleNamespace(temp_size_in_bytes=100 * self.flops)

    def take(bench: Any, program: Any) -> Any:
        layers = bench.size.shape.layers
        return SimpleNamespace(compiled=lambda devices: Compiled(3 * layers + 5), layers=layers)

    monkeypatch.setattr(costs.Bench, "take", take)
    prefill = lambda taken: SimpleNamespace(compiled=lambda devices: Compiled(taken.layers + 4))  # noqa: E731
    monkeypatch.setattr(costs, "_prefill", prefill)
    found = costs.count(tpu.Size(replace(tpu.Size().shape, layers=10)), tpu.PROGRAMS["beams"], dtype="float32")
    assert found.prefill == costs.Cost(14, 140)
    assert found.forward == costs.Cost(21, 210)
    assert found.call(3) == costs.Cost(77, 770)
    assert found.temporary_bytes == 3500
