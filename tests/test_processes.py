# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of processes: how they end, and a launcher that starts one process of several."""

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hf_gr.torch import processes

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}  # by `accelerate launch --cpu`


def workers() -> list[str]:
    """The threads of gloo in this process."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="tells of threads on Linux alone")
def test_a_group_ends_with_its_workers_also_if_a_model_holds_it() -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    held = DistributedDataParallel(torch.nn.Linear(2, 2))
    held(torch.ones(1, 2)).sum().backward()
    assert workers()
    processes._end_group()
    assert not torch.distributed.is_initialized()
    assert not workers()
    processes._end_group()  # there is none


def test_one_process_of_several_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for environment, is_told in (
        (LAUNCHED | {"MASTER_ADDR": "127.0.0.1"}, True),  # --num_processes 2
        (LAUNCHED, False),  # --num_processes 1
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        (LAUNCHED | {"MASTER_ADDR": "127.0.0.1", "PMI_SIZE": "1"}, False),
    ):
        for name in (*processes.WORLD_SIZES, "MASTER_ADDR", *LAUNCHED):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        caplog.clear()
        processes.look_after_group(1)
        assert ("has started one" in caplog.text and "--nproc_per_node" in caplog.text) == is_told


def test_a_group_of_several_is_ended_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[object] = []
    monkeypatch.setattr(processes.atexit, "register", at_exit.append)
    processes._end_group_at_exit.cache_clear()
    for _ in range(2):
        processes.look_after_group(2)
    assert at_exit == [processes._end_group]
    processes._end_group_at_exit.cache_clear()
