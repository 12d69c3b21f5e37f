# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, from Accelerate. They communicate at its beginning and at its end, not in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env

# At its end a process waits for the slowest one; if a process dies, its peers see that at once (gloo), or the launcher
# ends them. Only a process group that is started here gets this timeout: an existing one keeps its own.
PATIENCE = timedelta(days=2)


class Processes:
    """This process and its peers; a single one is the usual case."""

    def __init__(self) -> None:
        # Accelerate's state does not read these itself, and would take every process for the only one.
        on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
        self._state = PartialState(**({} if PartialState._shared_state else {"cpu": on_cpu, "timeout": PATIENCE}))
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != self._state.num_processes:
            raise RuntimeError(
                f"{started} processes were started, and Accelerate's state knows {self._state.num_processes}: begin "
                "with Accelerator() or leave it to this function, and not with PartialState() alone"
            )

    @cached_property
    def count(self) -> int:
        """The number of processes."""
        return self._state.num_processes

    @cached_property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self._state.process_index

    @property
    def is_main(self) -> bool:
        """Whether this is the process that merges and reports."""
        return self.rank == 0

    @property
    def device(self) -> Any:
        """This process's own device."""
        return self._state.device

    def from_main(self, value: Any) -> Any:
        """The main process's value."""
        if self.count == 1:
            return value
        held = [value]
        with _loss_of_a_process():
            broadcast_object_list(held, from_process=0)
        return held[0]

    def by_main(self, work: Callable[[], Any], *, doing: str) -> Any:
        """The result of a function that only the main process calls.

        Raises:
            RuntimeError: in the other processes if it failed; `doing` says at what. The main one raises its own error.
        """
        value: Any = None
        failure: Exception | None = None
        if self.is_main:
            try:
                value = work()
            except Exception as error:  # sent to the others, and raised below
                failure = error
        value, message = self.from_main((value, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        if message is not None:
            raise RuntimeError(f"the first process {doing}: {message}")
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in order."""
        if self.count == 1:
            return [value]
        with _loss_of_a_process():
            return gather_object([value])


@contextmanager
def _loss_of_a_process() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"another process has ended before its rows were done ({' '.join(str(error).split())[:200]}); what is "
            "finished is kept: see its own message, and repeat the run"
        ) from error
