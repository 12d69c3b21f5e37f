# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Kills at random moments: whatever is saved is the old state or the new, the next save succeeds, nothing is left.

The process that is killed saves state after state, so that every moment lies in a save. It is forked from a server
that has the libraries.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import jobs_case
import numpy as np
import pytest
from savers import SAVERS, save_on

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
    kinds = list(SAVERS)
    for case in fuzz:
        kind = kinds[case.number % len(kinds)]
        with tempfile.TemporaryDirectory() as name:
            between = check_kills(case.rng, kind, Path(name))
        fuzz.count(**{"kills": KILLS, f"kills of {kind}": KILLS, "with the old state": between})
