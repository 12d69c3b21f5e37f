# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`examples/benchmark/xgr.py`: contenders agree before anything is measured, and what is left out says so."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"
SMALL = ["--fast", "--beams", "4", "32", "--prompts", "256", "--at-beams", "32", "--at-prompt", "256"]


@pytest.fixture
def xgr(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("xgr")


def test_copies_cost_what_they_are_said_to(xgr: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys of every beam: 2 layers, keys and values, 32 numbers of 4 bytes each, 256 tokens."""
    options = xgr.parse([*SMALL, "--skip-transformers"])
    rows = {(row["name"], row["beams"]): row["allocated"] for row in xgr.run(options)}
    a_beam = 2 * 2 * 32 * 4 * 256
    more = rows[xgr.COPIES, 32] - rows[xgr.COPIES, 4]
    assert more > 28 * a_beam
    assert rows[xgr.OURS, 32] - rows[xgr.OURS, 4] < 0.2 * more


def test_no_figure_is_taken_of_a_wrong_answer(xgr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        xgr, "with_copies", lambda bench: xgr.generate.make_bench(xgr.parse(["--fast", "--seed", "1"]))
    )
    with pytest.raises(SystemExit, match="ours against our processor"):
        xgr.run(xgr.parse([*SMALL, "--skip-transformers"]))


def test_rows_that_would_not_fit_are_left_out_and_say_so(xgr: Any, capsys: pytest.CaptureFixture[str]) -> None:
    limits = xgr.Limits(gib=1.0, seconds=10.0)
    first, second = xgr.Setting(1, 128, 8), xgr.Setting(1, 128, 32)
    assert limits.reason(xgr.COPIES, first) is None
    limits.keep(xgr.COPIES, first, {"allocated": 2**29, "seconds": 1.0})
    limits.keep(xgr.CONSTRAINED, first, {"allocated": 2**20, "seconds": 5.0})
    limits.keep(xgr.OURS, first, {"allocated": 2**40, "seconds": 1e6})
    assert limits.reason(xgr.COPIES, second) == "would need 2 GiB"
    assert limits.reason(xgr.CONSTRAINED, second) == "would take 20 s"
    assert limits.reason(xgr.OURS, second) is None
    options = xgr.parse(["--fast", "--beams", "8", "32", "--at-prompt", "128"])
    measured = {"allocated": 2**20, "seconds": 0.5}
    rows = [
        {"name": name, "prompt": 128, "beams": beams, **measured}
        for beams in (8, 32)
        for name in xgr.CONTENDERS
        if (name, beams) != (xgr.COPIES, 32)
    ]
    rows.append({"name": xgr.COPIES, "prompt": 128, "beams": 32, "left_out": "would need 2 GiB"})
    xgr.print_sweep(rows, "beams", options)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed if "would need 2 GiB" in line] == ["32", "32"]


@pytest.mark.script("benchmark/xgr.py")
def test_every_contender_is_measured() -> None:
    command = [sys.executable, str(BENCHMARKS / "xgr.py"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["xgr"]
    assert {(row["beams"], row["prompt"]) for row in rows} == {(4, 256), (32, 256)}
    assert {row["name"] for row in rows} == {
        "prefill",
        "ours",
        "our processor",
        "transformers, constrained",
        "transformers, unconstrained",
    }
    found = {row["name"]: row["allocated"] for row in rows if row["beams"] == 32}
    assert found["prefill"] <= found["ours"] < found["our processor"] <= found["transformers, constrained"]
