# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Captured functions, without a model: copies, threads, failures.

`CudaGraphs` runs over a fake `torch.cuda` that logs what is asked of it, in order; its graphs record on the CPU.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cpu_graphs import CpuGraph, CpuGraphs
from torch import Tensor

from hf_gr.torch import graphs
from hf_gr.torch.graphs import CannotCapture, Captured, Rehearsal, Uncaptured

CUDA = torch.device("cuda", 0)


def captured_by(backend: Any, run: Callable[[Tensor], Any] | None = None) -> Captured:
    """A function that doubles its input, captured."""
    buffer, run = torch.zeros(4), run or (lambda given: (given * 2, given + 1))
    return Captured(backend, [buffer], fill=buffer.copy_, run=lambda: run(buffer), inputs=torch.ones(4))


def ask(program: Captured, value: float) -> Any:
    return program.replay(torch.full((4,), value))


def test_outputs_are_copies() -> None:
    program = captured_by(CpuGraphs())
    first, _ = ask(program, 2.0)
    second, more = ask(program, 3.0)
    assert first.tolist() == [4.0] * 4  # the replay after it wrote to the same memory
    assert (second.tolist(), more.tolist()) == ([6.0] * 4, [4.0] * 4)
    second.fill_(0)
    assert ask(program, 5.0)[0].tolist() == [10.0] * 4
    assert program.num_bytes == 3 * 16


@pytest.mark.parametrize("backend", [CpuGraphs(), Uncaptured()])
def test_threads_do_not_share_buffers(backend: Any) -> None:
    program = captured_by(backend)
    with ThreadPoolExecutor(4) as pool:
        for value, (doubled, _) in enumerate(pool.map(lambda value: ask(program, float(value)), range(400))):
            assert doubled.tolist() == [2.0 * value] * 4


class FakeCuda:
    """What `CudaGraphs` uses of `torch.cuda`; logs it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.own = threading.local()
        self.free = 10**9
        self.fails_to_end = False
        cuda, log = self, self.log

        class Stream:
            def __init__(self, device: Any = None, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                log.append(("wait", self.name, other.name))

            def wait_event(self, event: Event) -> None:
                log.append(("wait", self.name, event.after))

        class Event:
            after: Any = None

            def record(self, stream: Stream) -> None:
                self.after = f"event of {stream.name}"
                log.append(("record", stream.name))

            def synchronize(self) -> None:
                log.append(("synchronize", self.after))

        class Graph(CpuGraph):
            def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
                log.append(("begin", cuda.current().name, pool, capture_error_mode))
                self.__enter__()

            def capture_end(self) -> None:
                self.__exit__(None, None, None)
                log.append(("end", cuda.current().name))
                cuda.free -= 1000
                if cuda.fails_to_end:
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                log.append(("replay", cuda.current().name))
                super().replay()

        @contextmanager
        def stream(new: Stream) -> Iterator[None]:
            before, self.own.stream = self.current(), new
            try:
                yield
            finally:
                self.own.stream = before

        self.Stream, self.stream = Stream, stream
        fakes: dict[str, Any] = {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "stream": stream,
            "current_stream": lambda device=None: self.current(),
            "graph_pool_handle": lambda: (log.append(("pool",)), ("pool", len(log)))[1],
            "synchronize": lambda device=None: log.append(("synchronize all",)),
            "empty_cache": lambda: log.append(("empty",)),
            "mem_get_info": lambda device=None: (self.free, 10**10),
            "is_available": lambda: True,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def current(self) -> Any:
        if not hasattr(self.own, "stream"):
            self.own.stream = self.Stream(name="main")
        return self.own.stream

    def pools(self) -> set[Any]:
        return {entry[2] for entry in self.log if entry[0] == "begin"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    graphs._cuda_graphs.cache_clear()
    return FakeCuda(monkeypatch)


def test_cuda_graphs_are_captured_as_torch_asks(cuda: FakeCuda) -> None:
    ran_on = []

    def run(given: Tensor) -> Any:
        ran_on.append((cuda.current().name, gc.isenabled()))
        return given * 2

    program = captured_by(graphs.backend_of(CUDA), run)
    assert ask(program, 2.0).tolist() == [4.0] * 4
    (pool,) = cuda.pools()
    assert cuda.log == [
        ("wait", "main", None),
        ("wait", "side", "main"),
        ("wait", "main", "side"),
        ("synchronize all",),
        ("empty",),
        ("pool",),
        ("begin", "side", pool, "thread_local"),
        ("end", "side"),
        ("record", "main"),
        ("wait", "main", "event of main"),
        ("replay", "main"),
        ("record", "main"),
    ]
    assert ran_on == [("side", False)] * 3  # warm-ups and the capture, while no garbage is collected
    assert gc.isenabled()
    assert cuda.current().name == "main"
    assert program.num_bytes == 1016
    assert graphs.backend_of(CUDA) is graphs.backend_of(CUDA)
    assert graphs.backend_of(torch.device("cuda", 1)) is not graphs.backend_of(CUDA)


def test_streams_take_turns(cuda: FakeCuda) -> None:
    """Programs share memory: one on another stream runs after what the last one enqueued, its copies included."""
    program = captured_by(graphs.backend_of(CUDA))
    cuda.log.clear()
    for name in ("one", "two"):
        with cuda.stream(cuda.Stream(name=name)):
            ask(program, 2.0)
    assert cuda.log == [
        *(("wait", "one", "event of main"), ("replay", "one"), ("record", "one")),
        *(("wait", "two", "event of one"), ("replay", "two"), ("record", "two")),
    ]


def test_graphs_share_a_pool_as_long_as_one_of_them_lives(cuda: FakeCuda) -> None:
    programs = [captured_by(graphs.backend_of(CUDA)) for _ in range(3)]
    assert len(cuda.pools()) == 1
    cuda.log.clear()
    programs.pop()  # is freed when no replay reads it
    gc.collect()
    assert cuda.log == [("synchronize", "event of main")]
    programs.clear()  # the pool is freed with its last graph
    gc.collect()
    captured_by(graphs.backend_of(CUDA))
    assert cuda.log.count(("pool",)) == 1


@pytest.mark.parametrize("fails_to_end", [False, True])
def test_a_capture_that_breaks_off_leaves_the_thread_on_its_stream(fails_to_end: bool, cuda: FakeCuda) -> None:
    count: list[int] = []

    def run(given: Tensor) -> Any:
        count.append(1)
        if len(count) > graphs.WARM_UPS and not fails_to_end:
            raise torch.OutOfMemoryError("out of memory")
        return given * 2

    one = captured_by(graphs.backend_of(CUDA))
    cuda.fails_to_end = fails_to_end
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)):
        captured_by(graphs.backend_of(CUDA), run)
    assert cuda.current().name == "main"
    assert ("end", "side") in cuda.log
    assert cuda.log[-1] == ("record", "main")
    assert gc.isenabled()
    cuda.fails_to_end = False
    assert ask(captured_by(graphs.backend_of(CUDA)), 2.0)[0].tolist() == [4.0] * 4
    assert len(cuda.pools()) == 2  # not the pool that broke
    assert ask(one, 3.0)[0].tolist() == [6.0] * 4


REFUSED: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "item": ("waits", lambda x: x.sum().item()),
    "bool": ("waits", lambda x: bool(x.any())),
    "nonzero": ("waits", lambda x: x.nonzero()),
    "unique": ("waits", lambda x: x.unique()),
    "mask": ("mask", lambda x: x[x > 0]),
    "write by mask": ("mask", lambda x: x.index_put((x > 0,), torch.zeros(()))),
    "repeats": ("waits", lambda x: x.repeat_interleave(x.long())),
    "tensor": ("copies", lambda x: torch.tensor([1.0, 2.0])),
    "histogram": ("waits", lambda x: x.histc(4)),
    "fill": ("waits", lambda x: x.masked_fill(x > 0, torch.zeros(()))),
}


@pytest.mark.parametrize(("why", "run"), REFUSED.values(), ids=REFUSED)
def test_a_rehearsal_refuses_what_breaks_a_capture(why: str, run: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CannotCapture, match=why), Rehearsal("cpu"):
        run(torch.ones(3))


def test_a_rehearsal_lets_everything_else_pass() -> None:
    given = torch.ones(3)
    with Rehearsal("cpu"):
        out = given[torch.zeros(2, dtype=torch.long)] + torch.full((2,), 2.0)
        given.masked_fill(given > 0, 0.0).histc(4, 0, 1)
        given.repeat_interleave(given.long(), output_size=3)
        torch.tensor([])
    assert out.tolist() == [3.0, 3.0]
    with Rehearsal("cuda"):  # the host's own tensors are its own business
        assert given.sum().item() == 3.0
        torch.tensor([1.0])
