# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Kills at random moments: whatever is saved is the old state or the new, the next save succeeds, nothing is left.

The process that is killed saves state after state, so that every moment lies in a save. It is forked from a server
that has the libraries.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import jobs_case
import numpy as np
import pytest
from savers import SAVERS, save_on

from hf_gr.jobs.parts import folder_of

pytestmark = pytest.mark.slow

KILLS = 8  # in one folder, one after the other: each begins with what the one before has left
SECONDS = 0.03  # to the kill, at most, from a first save on: a save takes 3 to 15 ms
STARTED = 60.0  # a process that has not begun by then never will

jobs_case.SERVER.set_forkserver_preload(["jobs_case", "pytest", "savers", "transformers.models.llama.modeling_llama"])


def check_kills(rng: np.random.Generator, kind: str, folder: Path) -> int:
    """Kill savers in one folder; return how many kills came between the first and the last file of a save."""
    saver = SAVERS[kind]
    saver.save(folder, 1)
    last, num_between = 1, 0
    for _ in range(KILLS):
        begun = jobs_case.SERVER.Value("q", last, lock=False)
        process = jobs_case.in_another_process(save_on, kind, folder, begun, last + 1)
        end = time.monotonic() + STARTED
        while begun.value == last:
            assert process.is_alive(), "the saver has failed"
            assert time.monotonic() < end, "the saver does not begin"
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, SECONDS))
        process.kill()
        process.join()
        states = saver.load(folder)
        assert states, "nothing is there"
        assert set(states) <= {begun.value - 1, begun.value}, f"state {states}, expected {begun.value} or the last one"
        num_between += states[-1] != begun.value
        last = begun.value + 1
        saver.save(folder, last)
        assert set(saver.load(folder)) == {last}
        assert {path.name for path in folder.iterdir()} == saver.names, "something is left of a killed save"
    return num_between


def test_saves(fuzz: Any) -> None:
    kinds = [kind for kind in SAVERS if kind != "torn"]
    for case in fuzz:
        kind = kinds[case.number % len(kinds)]
        with tempfile.TemporaryDirectory() as name:
            between = check_kills(case.rng, kind, Path(name))
        fuzz.count(**{"kills": KILLS, f"kills of {kind}": KILLS, "with the old state": between})


def test_a_torn_write_is_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError, match="torn|expected|left"):
        [check_kills(rng, "torn", tmp_path) for _ in range(20)]


@pytest.fixture(scope="module")
def users_of(tmp_path_factory: pytest.TempPathFactory) -> tuple[jobs_case.Case, Path, bytes]:
    """A recommender, users, and the rows of an undisturbed run."""
    folder = tmp_path_factory.mktemp("case")
    case = jobs_case.make_case(folder)
    users = jobs_case.write_users(folder / "users.parquet", jobs_case.make_users(case, 100))
    return case, users, jobs_case.run(case, users, folder / "whole.parquet").output.read_bytes()


def test_runs(fuzz: Any, users_of: Any) -> None:
    model, users, whole = users_of
    for case in fuzz:
        with tempfile.TemporaryDirectory() as name:
            output = Path(name, "answers.parquet")
            for _ in range(int(case.rng.integers(1, 4))):
                process = jobs_case.in_another_process(jobs_case.run_quietly, model, users, output, {})
                enough = int(case.rng.integers(0, 7))  # of 7 windows
                while process.is_alive() and len(list(folder_of(output).glob("part-*"))) < enough:
                    time.sleep(0.001)
                time.sleep(case.rng.uniform(0, SECONDS))
                process.kill()
                process.join()
                assert not output.exists() or output.read_bytes() == whole
                fuzz.count(kills=1)
            made = jobs_case.run(model, users, output)
            assert output.read_bytes() == whole
            assert [path.name for path in Path(name).iterdir()] == [output.name]
            fuzz.count(resumed_windows=made.num_resumed)
