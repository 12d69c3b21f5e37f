# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, from Accelerate. They communicate at its beginning and at its end, not in between.

Knows neither what they do nor transformers.
"""

import atexit
import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed.nn.functional  # noqa: F401, before a group begins: see _end_group_at_exit
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
from torch.nn.parallel import DistributedDataParallel

# At its end a process waits for the slowest one; if a process dies, its peers see that at once (gloo), or the launcher
# ends them. Only a process group that is started here gets this timeout: an existing one keeps its own.
PATIENCE = timedelta(days=2)
# What several processes have, whoever starts them: torch's launchers, and those of MPI that Accelerate reads.
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

logger = logging.getLogger("hf_gr.processes")


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
        look_after_group(self.count)

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
        """What only the main process computes; or its error, of which others get a `RuntimeError` with `doing`."""
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

    def by_all(self, work: Callable[[], Any], *, after_failure: Callable[[], None] = lambda: None) -> list[Any]:
        """The results of a function that every process calls, in order; if one fails, all raise, it its own error.

        `after_failure` is then called by the main process, once no process is working.
        """
        value: Any = None
        failure: Exception | None = None
        try:
            value = work()
        except Exception as error:  # sent to the others, and raised below
            failure = error
        found = self.gather((value, None if failure is None else str(failure)))
        first = next((rank for rank, (_, message) in enumerate(found) if message is not None), None)
        if first is not None and self.is_main:
            after_failure()
        if failure is not None:
            raise failure
        if first is not None:
            raise RuntimeError(f"process {first} has stopped: {found[first][1]}")
        return [value for value, _ in found]


def look_after_group(num_processes: int) -> None:
    """End the process group of several processes at exit, or tell of a launcher that began only one of several."""
    if num_processes > 1:
        _end_group_at_exit()
    elif _should_have_peers():
        logger.warning(
            "accelerate launch was to start several processes and has started one, as it does with --cpu: this one "
            "does all the work. To start N on CPUs: python -m torch.distributed.run --standalone --nproc_per_node N; "
            "on GPUs: accelerate launch --multi_gpu --num_processes N"
        )


@cache
def _end_group_at_exit() -> None:
    """End the process group, whoever began it, when the interpreter exits.

    Without this, some runs die after their last line: "terminate called without an active exception", SIGABRT. The
    workers of gloo are threads of C++. After a collective the caller continues at once, and a worker drops the tensors
    later: on a busy machine, maybe only when the interpreter finalizes. If Python is done with a tensor, its object
    dies in the worker, which needs the GIL for that (`AsyncWork::~AsyncWork` -> `THPVariable_clear` ->
    `PyEval_RestoreThread`). Python before 3.14 ends threads that ask for the GIL then by `pthread_exit`, which must
    not unwind a destructor.

    Destroying the group joins its workers, if nothing else holds the group. `torch.distributed.nn.functional` has it
    in its default arguments if it is imported (as by DDP) after the group began: hence the import above. A model in
    DDP holds it, too, and a script's variables hold that model to the end. The group does not end with a call: a
    script continues to use `PartialState()`, and may call again.
    """
    atexit.register(_end_group)


def _end_group() -> None:
    # NCCL has no such workers, and its end may wait for a peer that failed.
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        for wrapped in [one for one in gc.get_objects() if type(one) is DistributedDataParallel]:
            for name in ("process_group", "reducer", "logger"):
                vars(wrapped).pop(name, None)
        gc.collect()  # cycles may hold the group, too
        torch.distributed.destroy_process_group()


def _should_have_peers() -> bool:
    """Whether `accelerate launch` was to start several processes, and has started this one only."""
    names = os.environ.keys()
    # Its launcher of one process (Accelerate 1.15, simple_launcher) sets an address for peers if N is more than 1, and
    # leaves it to mpirun to start them.
    return {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= names and names.isdisjoint(WORLD_SIZES)


@contextmanager
def _loss_of_a_process() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"another process has ended before its rows were done ({' '.join(str(error).split())[:200]}); what is "
            "finished is kept: see its own message, and repeat the run"
        ) from error
