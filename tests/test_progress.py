# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Progress: a bar on terminals and in notebooks, a line for each window in logs, nothing else."""

import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs_case import Case, command, options_of, run
from tqdm.auto import tqdm

from hf_gr.files.progress import progress_bar

NUM_USERS = 40  # 3 windows of 16


def test_a_bar_is_for_terminals_and_notebooks(
    tmp_path: Path, case: Case, users: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(name: str, *, progress: bool = True) -> str:
        run(case, users, tmp_path / f"{name}.parquet", progress=progress)
        return capsys.readouterr().err

    shell: Any = SimpleNamespace()  # IPython in a terminal that is not one
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # pyright: ignore
    assert "Recommending" not in shown("file")
    with monkeypatch.context() as patched:
        patched.setattr(sys.stderr, "isatty", lambda: True)
        assert re.search(rf"Recommending: 100%.* {NUM_USERS}/{NUM_USERS} ", shown("terminal"))
        assert "Recommending" not in shown("quiet", progress=False)
    shell = SimpleNamespace(kernel=None)
    assert re.search(rf"Recommending: 100%.* {NUM_USERS}/{NUM_USERS} ", shown("notebook"))


def test_a_resumed_bar_begins_where_the_run_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, bars = 30, []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **how: bars.append(tqdm(**how)) or bars[-1])
    with progress_bar("Work", lambda: 100, unit="users", shown=True, finished=lambda: there) as advance:
        (bar,) = bars
        assert bar.n == 30
        advance(5)
        advance(5)
        assert bar.n == 40
        there = 50  # another process has finished a part, too
        advance(0)
        assert bar.n == 50
        there = 120  # the last window is not full
        advance(0)
        assert bar.n == 100
    assert "Work: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(("total", "of_total", "left"), [(None, "", ""), (8000, " of 8,000", ", 00:20 left")])
def test_work_without_parts_logs_a_line_a_minute_and_one_at_the_end(
    total: int | None, of_total: str, left: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with (
        caplog.at_level(logging.INFO, "hf_gr.progress"),
        progress_bar("Reading", lambda: total, unit="users", shown=True) as advance,
    ):
        for _ in range(7):
            now += 20
            advance(1000)
    lines = [line.replace(" (87.5%)", "") for line in caplog.messages]
    assert [line.partition(" users")[0] for line in lines] == [f"Reading: {n},000{of_total}" for n in (3, 6, 7)]
    assert lines[-1] == f"Reading: 7,000{of_total} users, 50.00 users/s{left}"


def test_the_command_logs_a_line_for_each_window(tmp_path: Path, case: Case, users: Path) -> None:
    done = command("recommend", *options_of(case, users, tmp_path / "a.parquet"), "--window-rows", 16, progress=True)
    parts = ["16 of 40 users (40.0%)", "32 of 40 users (80.0%)", "40 of 40 users (100.0%)"]
    for line, part in zip(done.stderr.splitlines(), parts, strict=True):
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d Recommending: " + re.escape(part) + ", ", line)
        assert re.search(r", [\d.]+ users/s, \d\d:\d\d left$", line)
    quiet = command("recommend", *options_of(case, users, tmp_path / "b.parquet"))
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    assert not logging.getLogger("hf_gr.progress").handlers
