# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache of captured programs, without a model: keys, second use, eviction, copies, threads, failures.

`CudaGraphs` runs over a fake `torch.cuda` that logs what is asked of it, in order; its graphs record on the CPU.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import pytest
import torch
from cpu_graph import CpuGraph
from cpu_graphs import CpuGraphs
from torch import Tensor

from hf_gr.torch import graphs
from hf_gr.torch.graphs import CannotCapture, CudaGraphs, GraphCache, Recipe, Rehearsal
from hf_gr.torch.static import buffers_like, copy_into, num_bytes, put_together, take_apart

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


class Owner:
    """What programs belong to."""


class Calls:
    """Calls of one program, which doubles its input."""

    def __init__(self, cache: GraphCache, *, device: torch.device = CPU, run: Callable[[Tensor], Any] | None = None):
        self.cache = cache
        self.device = device
        self.run = run or (lambda given: (given * 2, given + 1))
        self.owner: Any = Owner()

    def __call__(self, value: float, *, key: Any = "key", size: int = 4, **kwargs: Any) -> Any:
        def make() -> Recipe:
            buffer = torch.zeros(size)
            return Recipe((buffer,), lambda given: buffer.copy_(given), lambda: self.run(buffer))

        given = torch.full((size,), value)
        how = {"device": self.device, "size": 4 * size, "make": make, "owners": (self.owner,)} | kwargs
        return self.cache.run((key, size), given, **how)


@pytest.fixture
def backend() -> CpuGraphs:
    return CpuGraphs()


def new_cache(backend: Any, **kwargs: Any) -> tuple[GraphCache, list[str]]:
    told: list[str] = []
    return GraphCache(report=told.append, backend=lambda device: backend, **kwargs), told


# The cache


def test_the_second_use_captures_and_later_ones_replay(backend: CpuGraphs) -> None:
    cache, told = new_cache(backend)
    call = Calls(cache)
    assert call(1.0) is None
    assert call(1.0, key="other") is None
    for value in (2.0, 3.0, 4.0):
        doubled, more = call(value)
        assert doubled.tolist() == [2 * value] * 4
        assert more.tolist() == [value + 1] * 4
    assert (backend.num_captures, cache.num_captures, cache.num_replays, told) == (1, 1, 3, [])
    assert call(1.0, key="third", at_once=True) is not None


def test_outputs_are_copies(backend: CpuGraphs) -> None:
    cache, _ = new_cache(backend)
    call = Calls(cache)
    call(1.0)
    first, _ = call(2.0)
    second, _ = call(3.0)
    assert first.tolist() == [4.0] * 4  # the replay after it wrote to the same memory
    second.fill_(0)
    assert call(5.0)[0].tolist() == [10.0] * 4


def test_planted_outputs_that_are_not_copied(backend: CpuGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "with_tensors", lambda outputs, function: outputs)
    with pytest.raises(AssertionError):
        test_outputs_are_copies(backend)


def test_the_least_recently_used_are_dropped(backend: CpuGraphs) -> None:
    cache, _ = new_cache(backend, limit=10 * 48)  # a buffer and two outputs of 4 numbers each
    call = Calls(cache)
    for key in range(10):
        call(1.0, key=key, at_once=True)
    assert cache.num_bytes == cache.limit
    call(1.0, key=0)  # used again
    call(1.0, key="new", at_once=True)
    kept = [entry.key[0] for entry in cache.entries]
    assert kept == [2, 3, 4, 5, 6, 7, 8, 9, 0, "new"]
    assert call(1.0, key=1) is None  # as if it were new
    cache.limit = 96
    call(1.0, key="newest", at_once=True)
    assert [entry.key[0] for entry in cache.entries] == ["new", "newest"]
    cache.clear()
    assert (cache.num_bytes, cache.entries) == (0, [])


def test_what_is_larger_than_the_limit_is_not_captured(backend: CpuGraphs) -> None:
    cache, told = new_cache(backend, limit=100)
    call = Calls(cache)
    for _ in range(4):
        assert call(1.0, size=26) is None  # 104 bytes of buffers
        assert call(1.0, size=9) is None  # 36 bytes, and 72 of outputs
    assert cache.num_bytes == 0
    assert ["104" in told[0], "108" in told[1], len(told)] == [True, True, 2]
    cache.limit = 200  # may be enough now
    call(1.0, size=9)
    assert call(1.0, size=9) is not None


def test_memory_is_given_back(backend: CpuGraphs) -> None:
    cache, _ = new_cache(backend, limit=480)
    seen = []

    def make() -> Recipe:
        buffer = torch.zeros(4)
        seen.append(ref(buffer))
        return Recipe((buffer,), lambda given: None, lambda: torch.zeros(4))

    for key in range(40):
        cache.run(key, None, device=CPU, size=16, make=make, at_once=True)
    gc.collect()
    assert sum(reference() is not None for reference in seen) == len(cache.entries)


def test_a_program_does_not_outlive_its_owner(backend: CpuGraphs) -> None:
    cache, _ = new_cache(backend)
    call, other = Calls(cache), Calls(cache)
    for _ in range(2):
        call(1.0)
    call.owner = None
    assert (cache.entries, cache.num_bytes) == ([], 0)  # at once
    assert other(1.0, key="unknown") is None
    call.owner = Owner()
    for _ in range(2):
        call(1.0)
    call.owner = Owner()  # the same key, and perhaps the same address
    assert call(1.0) is None


@pytest.mark.parametrize("busy", ["the cache", "the program"])
def test_an_owner_may_go_at_any_moment(busy: str, backend: CpuGraphs) -> None:
    cache, _ = new_cache(backend)
    call, other = Calls(cache), Calls(cache)
    for _ in range(2):
        call(1.0)
    (entry,) = cache.entries
    with cache._lock if busy == "the cache" else entry.lock:
        call.owner = None  # as when garbage is collected in the middle of a call; waits for nothing
    assert other(1.0, key="unknown") is None  # a miss looks for what is gone
    assert cache.entries == []


def test_failures_are_said_once_and_not_tried_again(backend: CpuGraphs) -> None:
    cache, told = new_cache(backend)
    tried = []

    def run(given: Tensor) -> Any:
        tried.append(given)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    call = Calls(cache, run=run)
    for _ in range(4):
        assert call(1.0) is None
    assert len(tried) == 1
    assert told == [
        "a decode cannot be captured (OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.): decoding "
        "without graphs"
    ]
    call.run = lambda given: given * 2
    assert call(1.0) is None
    cache.clear()
    assert call(1.0) is None
    assert call(1.0) is not None
    waits = Calls(cache, run=lambda given: given * float(given.sum()))
    for _ in range(3):
        assert waits(1.0, key="waits") is None
    assert "makes the host wait" in told[1]


def test_an_interrupted_capture_leaves_nothing(backend: CpuGraphs) -> None:
    cache, _ = new_cache(backend)

    def interrupted(given: Tensor) -> Any:
        raise KeyboardInterrupt

    call = Calls(cache, run=interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(1.0, at_once=True)
    call.run = lambda given: given * 2
    assert call(1.0, at_once=True).tolist() == [2.0] * 4


@pytest.mark.parametrize("waits", [True, False])
def test_threads_do_not_share_buffers(waits: bool) -> None:
    cache, told = new_cache(CpuGraphs(waits=waits))
    call = Calls(cache)
    call(1.0, at_once=True)
    wrong: list[Any] = []

    def work(first: int) -> None:
        for value in range(first, first + 200):
            answer = call(float(value))
            if answer is not None and answer[0].tolist() != [2.0 * value] * 4:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, told) == ([], [])
    assert (cache.num_replays == 801) if waits else (cache.num_replays > 1)


def test_nobody_waits_for_a_capture_or_an_uncaptured_program() -> None:
    cache, _ = new_cache(graphs.Uncaptured())
    inside, leave = threading.Event(), threading.Event()

    def run(given: Tensor) -> Any:
        inside.set()
        assert leave.wait(10)
        return given * 2

    call = Calls(cache, run=run)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call(1.0, at_once=True)))
    thread.start()
    assert inside.wait(10)
    assert call(2.0) is None
    cache.clear()  # leaves alone what is in use
    leave.set()
    thread.join()
    assert answers[0].tolist() == [2.0] * 4
    assert call(3.0).tolist() == [6.0] * 4


def test_keys_that_come_once_are_not_remembered_for_ever(backend: CpuGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_KEYS", 3)
    cache, _ = new_cache(backend)
    call = Calls(cache)
    for key in range(5):
        call(1.0, key=key)
    assert call(1.0, key=4) is not None
    assert call(1.0, key=0) is None


# Values as buffers


def test_values_are_taken_apart_and_put_together() -> None:
    shared, stays = torch.arange(3), torch.ones(2)
    value = {"a": (shared, [shared, 1.5]), None: stays, "c": None}
    parts = take_apart(value, stays=[stays])
    assert [tensor is shared for tensor in parts.tensors] == [True]
    buffers = buffers_like(parts.tensors)
    assert num_bytes(buffers) == 24
    made = put_together(value, buffers, stays=[stays])
    copy_into(buffers, parts.tensors)
    assert made["a"][0] is made["a"][1][0] is buffers[0]
    assert made["a"][0].tolist() == [0, 1, 2]
    assert made[None] is stays
    others: list[Any] = [
        {"a": (shared, [shared.clone(), 1.5]), None: stays, "c": None},  # two tensors, not one twice
        {"a": (shared, [shared, 1.0]), None: stays, "c": None},
        {"a": (shared.int(), [shared.int(), 1.5]), None: stays, "c": None},
        {"a": (shared, (shared, 1.5)), None: stays, "c": None},
        {"a": (shared, [shared, 1.5]), None: stays.clone(), "c": None},
        {"a": (shared, [shared, 1.5]), None: stays, "c": False},
    ]
    assert all(take_apart(other, stays=[stays]).structure != parts.structure for other in others)
    assert take_apart({"a": (shared + 1,)}).structure == take_apart({"a": (shared,)}).structure
    assert take_apart((True,)).structure != take_apart((1,)).structure
    with pytest.raises(TypeError, match="a object cannot be read from static buffers"):
        take_apart([object()])


# CudaGraphs, over a fake torch.cuda


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

        class Graph:
            def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
                log.append(("begin", cuda.current().name, pool, capture_error_mode))
                self.graph = CpuGraph()
                self.context = self.graph.capture()
                self.context.__enter__()

            def capture_end(self) -> None:
                self.context.__exit__(None, None, None)
                log.append(("end", cuda.current().name))
                cuda.free -= 1000
                if cuda.fails_to_end:
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                log.append(("replay", cuda.current().name))
                self.graph.poison()
                self.graph.replay()

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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(graphs, "_BACKENDS", {})
    return FakeCuda(monkeypatch)


def test_cuda_graphs_are_captured_as_torch_asks(cuda: FakeCuda) -> None:
    cache, ran_on = GraphCache(), []

    def run(given: Tensor) -> Any:
        ran_on.append((cuda.current().name, gc.isenabled()))
        return given * 2

    call = Calls(cache, device=CUDA, run=run)
    call(1.0)
    assert call(2.0).tolist() == [4.0] * 4
    (pool,) = [entry[2] for entry in cuda.log if entry[0] == "begin"]
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
    assert cache.entries[0].num_bytes == 1016
    assert graphs.backend_of(CUDA) is graphs.backend_of(CUDA)
    assert graphs.backend_of(torch.device("cuda", 1)) is not graphs.backend_of(CUDA)


def test_streams_take_turns(cuda: FakeCuda) -> None:
    """Programs share memory: one on another stream runs after what the last one enqueued, its copies included."""
    call = Calls(GraphCache(), device=CUDA)
    call(1.0, at_once=True)
    cuda.log.clear()
    for name in ("one", "two", "one"):
        with cuda.stream(cuda.Stream(name=name)):
            call(2.0)
    assert cuda.log == [
        *(("wait", "one", "event of main"), ("replay", "one"), ("record", "one")),
        *(("wait", "two", "event of one"), ("replay", "two"), ("record", "two")),
        *(("wait", "one", "event of two"), ("replay", "one"), ("record", "one")),
    ]


def test_memory_is_freed_when_no_replay_reads_it(cuda: FakeCuda) -> None:
    cache = GraphCache()
    call = Calls(cache, device=CUDA)
    call(1.0, at_once=True)
    cuda.log.clear()
    cache.clear()
    assert cuda.log == [("synchronize", "event of main")]


def test_graphs_share_a_pool_as_long_as_one_of_them_lives(cuda: FakeCuda) -> None:
    cache = GraphCache()
    call = Calls(cache, device=CUDA)
    for key in range(3):
        call(1.0, key=key, at_once=True)
    pools = {entry[2] for entry in cuda.log if entry[0] == "begin"}
    assert len(pools) == 1
    cache.clear()  # the pool is freed with its last graph
    call(1.0, at_once=True)
    assert len({entry[2] for entry in cuda.log if entry[0] == "begin"}) == 2


@pytest.mark.parametrize("fails_to_end", [False, True])
def test_a_capture_that_breaks_off_leaves_the_thread_on_its_stream(fails_to_end: bool, cuda: FakeCuda) -> None:
    told: list[str] = []
    cache, count = GraphCache(report=told.append), []

    def run(given: Tensor) -> Any:
        count.append(1)
        if len(count) > graphs.WARM_UPS and not fails_to_end:
            raise torch.OutOfMemoryError("out of memory")
        return given * 2

    cuda.fails_to_end = fails_to_end
    call = Calls(cache, device=CUDA, run=run)
    assert call(1.0, at_once=True) is None
    assert cuda.current().name == "main"
    assert ("end", "side") in cuda.log
    assert cuda.log[-1] == ("record", "main")
    assert gc.isenabled()
    assert len(told) == 1
    cuda.fails_to_end, call.run = False, lambda given: given * 2
    assert call(2.0, key="next", at_once=True).tolist() == [4.0] * 4
    assert len({entry[2] for entry in cuda.log if entry[0] == "begin"}) == 2  # not the pool that broke


def test_others_decode_without_graphs_during_a_capture(cuda: FakeCuda) -> None:
    cache = GraphCache()
    inside, leave = threading.Event(), threading.Event()

    def run(given: Tensor) -> Any:
        inside.set()
        assert leave.wait(10)
        return given * 2

    slow, quick = Calls(cache, device=CUDA, run=run), Calls(cache, device=CUDA)
    quick(1.0, key="quick", at_once=True)
    thread = threading.Thread(target=slow, args=(1.0,), kwargs={"at_once": True})
    thread.start()
    assert inside.wait(10)
    assert quick(2.0, key="quick") is None
    leave.set()
    thread.join()
    assert quick(2.0, key="quick") is not None
    assert isinstance(graphs.backend_of(CUDA), CudaGraphs)


# The rehearsal


@pytest.mark.parametrize(
    ("why", "run"),
    {
        "item": ("waits", lambda x: x.sum().item()),
        "bool": ("waits", lambda x: bool(x.any())),
        "tolist": ("waits", lambda x: x.nonzero()),
        "unique": ("waits", lambda x: x.unique()),
        "mask": ("mask", lambda x: x[x > 0]),
        "write by mask": ("mask", lambda x: x.index_put((x > 0,), torch.zeros(()))),
        "repeats": ("waits", lambda x: x.repeat_interleave(x.long())),
        "tensor": ("copies", lambda x: torch.tensor([1.0, 2.0])),
        "histogram": ("waits", lambda x: x.histc(4)),
        "fill": ("waits", lambda x: x.masked_fill(x > 0, torch.zeros(()))),
    }.values(),
)
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
