# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`examples/benchmark/memory.py` counts every byte, and says what it leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"
MIB = 2**20


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("memory")


def mebibyte() -> torch.Tensor:
    return torch.empty(MIB, dtype=torch.uint8)


def test_the_peak_is_of_what_is_there_at_once(memory: Any) -> None:
    before = mebibyte()  # the model's: not counted

    def one_after_the_other() -> None:
        for _ in range(5):
            mebibyte().add_(1)

    def together() -> None:
        _ = [mebibyte() for _ in range(5)]

    def rounded(call: Any) -> int:
        return memory.peak_allocated(call) // 1024 * 1024  # numbers are tensors of a few bytes

    assert rounded(one_after_the_other) == MIB
    assert rounded(together) == 5 * MIB
    assert rounded(lambda: before.float().add(1.0)) == 8 * MIB
    assert rounded(lambda: torch.stack([before] * 3).float().sum()) == 15 * MIB  # what is gone again, too


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak, and resets it")
def test_the_peak_of_a_process_is_reset(memory: Any) -> None:
    """Planted: an older, larger peak."""
    _ = torch.ones(400 * MIB, dtype=torch.uint8)
    del _
    peak = memory.peak_resident(lambda: torch.ones(100 * MIB, dtype=torch.uint8))
    assert peak is None or 90 * MIB < peak < 200 * MIB


def test_rows_that_do_not_fit_are_left_out_and_say_so(
    memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[str, Any]] = []

    def row(options: Any, name: str, setting: Any) -> dict[str, Any]:
        measured.append((name, setting))
        if name == memory.OURS and setting.beams == 512:
            return {"left_out": "out of memory"}
        size = 2**30 * setting.prompt * setting.beams // (1024 * 128) if name == memory.CONSTRAINED else 2**20
        return {"allocated": size, "resident": None, "seconds": 100.0}

    monkeypatch.setattr(memory, "run_row", row)
    settings = ["1,1024,128", "1,1024,256", "1,2048,256", "1,1024,512"]
    options = memory.parse(["--settings", *settings, "--limit", "3", "--seconds", "350"])
    rows = list(memory.run(options))
    of_transformers = [r.get("left_out") for r in rows if r["name"] == memory.CONSTRAINED]
    assert of_transformers == [None, None, "would need 4 GiB", "would need 4 GiB"]
    assert [s.prompt for name, s in measured if name == memory.PREFILL] == [1024, 2048]  # once a prompt
    assert [r.get("allocated_ratio") for r in rows if r["name"] == memory.OURS] == [1.0, 1.0, 1.0, None]
    memory.print_rows(rows)
    printed = capsys.readouterr().out
    assert "left out: would need 4 GiB" in printed
    assert "left out: out of memory" in printed
    assert "goal at (1, 1024, 256): at most 1.3 times the prefill's own; 1.00" in printed
    options.limit = 100
    reasons = [r.get("left_out") for r in memory.run(options) if r["name"] == memory.CONSTRAINED]
    assert reasons == [None, None, "would take 400 s", "would take 400 s"]


@pytest.mark.parametrize(
    ("status", "says", "left_out"),
    [
        (-9, "", True),
        (1, "RuntimeError: not enough memory: you tried", True),
        (1, "KeyError: 3", False),
    ],
)
def test_only_memory_is_left_out(
    status: int, says: str, left_out: bool, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(returncode=status, stderr=says, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    options = memory.parse(["--fast"])
    if left_out:
        assert memory.run_row(options, memory.OURS, options.settings[0]) == {"left_out": "out of memory"}
        return
    with pytest.raises(SystemExit, match="KeyError: 3"):
        memory.run_row(options, memory.OURS, options.settings[0])


def test_before_is_a_checkout(memory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memory.parse(["--before", str(tmp_path)])
    assert "expected a checkout of hf_gr: git worktree add" in capsys.readouterr().err


@pytest.mark.slow  # four processes that each import torch
def test_every_contender_is_measured() -> None:
    command = [sys.executable, str(BENCHMARKS / "memory.py"), "--fast"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["memory"]
    assert [row["name"] for row in rows] == ["prefill", "ours", "ours with output_scores", "transformers, constrained"]
    assert all(row["allocated"] > 0 for row in rows)
    assert rows[0]["allocated_ratio"] == 1
    assert rows[-1]["allocated_ratio"] > 2 * rows[1]["allocated_ratio"]
