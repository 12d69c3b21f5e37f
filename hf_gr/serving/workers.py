# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Threads in which a model computes several batches at once: each uses one core of a CPU, or one stream of a GPU.

On two CPU cores two workers answer more requests than one call on both: a forward does not use two threads well.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

ON_A_GPU = 2  # workers, by default: one prepares its batch while the other computes

Result = TypeVar("Result")
_own = threading.local()  # of a worker


class GivenUp(Exception):
    """Nobody waits any more for what is computed."""


@contextmanager
def while_wanted(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """End a computation of this thread before the next layer, by `GivenUp`, once nobody wants it: see `watch`."""
    _own.is_wanted = is_wanted
    try:
        yield
    finally:
        del _own.is_wanted


def watch(model: torch.nn.Module) -> list[Any]:
    """Have a model look before each layer whether its forward is still wanted; handles to end that.

    So a deadline ends a prefill as well as a search. On a GPU layers are launched long before they are computed.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [module.register_forward_pre_hook(_look) for module in (model, *layers)]


def _look(*_: Any) -> None:
    is_wanted = None if torch.compiler.is_compiling() else getattr(_own, "is_wanted", None)
    if is_wanted is not None and not is_wanted():
        raise GivenUp


class Workers(ThreadPoolExecutor):
    """Worker threads, `count` of them or one a CPU core, and two on a GPU; `cores` are for all together."""

    def __init__(self, count: int | None, device: torch.device, *, cores: int | None = None) -> None:
        if cores is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = count or (cores if device.type == "cpu" else ON_A_GPU)
        self.device = device
        self._own = threading.local()
        # PyTorch keeps this number by thread: those of the program are not changed.
        self.threads = max(1, cores // self.count) if device.type == "cpu" else torch.get_num_threads()
        super().__init__(self.count, "hf_gr worker", torch.set_num_threads, (self.threads,))

    def submit(self, run: Callable[..., Result], /, *arguments: Any) -> Future[Result]:
        """Run a function in a worker, on a GPU in the worker's own stream."""
        return super().submit(self._run, run, *arguments)

    def _run(self, run: Callable[..., Result], *arguments: Any) -> Result:
        if self.device.type != "cuda":
            return run(*arguments)
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._own.stream):
            result = run(*arguments)
        self._own.stream.synchronize()
        return result

    def run_on_all(self, run: Callable[[], Result]) -> list[Result]:
        """What a function returns in every worker, all at the same time."""
        together, futures = threading.Barrier(self.count), []

        def run_together() -> Result:
            together.wait()
            return run()

        try:
            futures = [self.submit(run_together) for _ in range(self.count)]
        except RuntimeError:  # the workers are being closed: those that wait for others would wait forever
            together.abort()
            raise
        return [future.result() for future in futures]
