# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock jumps to the next event, and workers that compute in its time: no test waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from functools import wraps
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits for nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is not None:
            self.loop.now += max(timeout, 0.0)
        return found or (super().select(1.0) if timeout is None else [])


class VirtualWorkers(Executor):
    """Computes a batch in `seconds(batch)` of the loop's time."""

    def __init__(self, seconds: Callable[[Sequence[Any]], float]) -> None:
        self.seconds = seconds
        self.batches: list[list[Any]] = []
        self.busy = self.most_busy = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.batches.append(list(args[0]))
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)

        def end() -> None:
            self.busy -= 1
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        asyncio.get_running_loop().call_later(self.seconds(args[0]), end)
        return future


def in_loop(test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """A test that is a coroutine, in virtual time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(test(*args, **kwargs))

    return run
