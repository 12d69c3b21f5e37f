# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr recommend` under real launchers: a worker that dies, an interrupted command."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs_case import Case, make_users, options_of, run, write_users

from hf_gr.jobs.parts import folder_of

PYTHON = [sys.executable, "-m"]
# Accelerate has no flag for several processes on CPUs; ACCELERATE_USE_CPU keeps these from devices.
ACCELERATE = [*PYTHON, "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m"]
LAUNCHERS = {
    "torch": [*PYTHON, "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"],
    "accelerate": ACCELERATE,
}
# What the second process runs in the place of `hf_gr.cli`: it dies at its second part.
DYING = """
import os, signal
from hf_gr import cli
from hf_gr.jobs.parts import Parts

write, written = Parts.write, []

def dying(self, number, table):
    written.append(number)
    if os.environ["RANK"] == "1" and len(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, number, table)

Parts.write = dying
cli.main()
"""


def start(folder: Path, launcher: Sequence[str], module: str, arguments: Sequence[object]) -> subprocess.Popen[str]:
    """A command in a group of processes of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), str(folder)])
    command = [*launcher, module, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=240)
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_a_worker_that_dies_ends_the_launcher_and_the_run_goes_on(tmp_path: Path, case: Case, launcher: str) -> None:
    users, output = write_users(tmp_path / "u.parquet", make_users(case, 100)), tmp_path / "recs.parquet"
    (tmp_path / "dying_cli.py").write_text(DYING)
    arguments = ["recommend", *options_of(case, users, output), "--window-rows", 16]
    code, said = finish(start(tmp_path, LAUNCHERS[launcher], "dying_cli", arguments))
    assert code == 1, said  # the launcher's own, whatever the worker's
    assert not output.exists()
    finished = {part.name: part.read_bytes() for part in folder_of(output).glob("part-*")}
    assert "part-00000001.parquet" in finished  # of the process that died
    code, said = finish(start(tmp_path, LAUNCHERS[launcher], "hf_gr.cli", arguments))
    assert code == 0, said
    assert f"{len(finished)} windows were finished by an earlier run" in said
    assert output.read_bytes() == run(case, users, tmp_path / "whole.parquet").output.read_bytes()


@pytest.mark.slow
def test_an_interrupted_command_keeps_what_is_finished(tmp_path: Path, case: Case) -> None:
    users, output = write_users(tmp_path / "u.parquet", make_users(case, 3_000)), tmp_path / "recs.parquet"
    arguments = ["recommend", *options_of(case, users, output), "--window-rows", 16]
    process = start(tmp_path, PYTHON, "hf_gr.cli", arguments)
    while process.poll() is None and not list(folder_of(output).glob("part-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, said = finish(process)
    assert code == 130, said
    assert said.splitlines()[-1] == "hf-gr recommend: interrupted; what is finished is kept: repeat the command"
    assert "Traceback" not in said
    assert list(folder_of(output).glob("part-*"))
    assert not list(folder_of(output).glob("*.tmp"))
    assert run(case, users, output).num_resumed > 0
