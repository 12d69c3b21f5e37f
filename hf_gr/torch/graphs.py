# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Captured programs, kept by key: CUDA graphs on a CUDA device, the functions themselves elsewhere. Knows no model.

A program is a function over static buffers. A call copies its inputs into them, replays the program and gets copies of
its outputs, so no call sees the memory of another one. The first call with a key gets nothing and runs by other means:
most shapes come once. The second one captures.

Programs of one device share a pool of memory: each may use what another one has left there, so they take turns, on the
device too. A thread waits for its turn while another one replays: it holds the turn only for as long as it takes to
enqueue the work, far less than a decode without a graph takes. It does not wait for a capture, which takes
seconds, nor for a program that runs uncaptured: then the caller runs by other means.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; xGR, section 7 (graph dispatch).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .static import num_bytes, with_tensors

LIMIT = 4 * 2**30  # bytes of buffers and graphs, by default
MOST_KEYS = 1024  # that are remembered without a program
WARM_UPS = 2  # runs before a capture: libraries allocate their workspaces, kernels are loaded
# Operations whose results the host reads, or whose shapes depend on values.
READS = frozenset(
    "_local_scalar_dense _unique _unique2 argwhere bincount equal is_nonzero masked_select nonzero "
    "unique_consecutive unique_dim".split()
)
INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])
# With a tensor of one value where a number would do: the host reads it.
BY_VALUE = {"masked_fill": 2, "masked_fill_": 2, "index_fill": 3, "index_fill_": 3}


class CannotCapture(RuntimeError):
    """What a graph cannot contain: the host waits for the device, or copies memory to it."""


class Program(Protocol):
    """A captured function."""

    @property
    def num_bytes(self) -> int:
        """Memory besides its buffers."""
        ...

    def replay(self) -> Any:
        """Compute the outputs again, which may be in the same memory every time."""
        ...


class Backend(Protocol):
    """How functions are captured on a device."""

    @property
    def waits(self) -> bool:
        """Whether a replay is over soon for the host, so that waiting for it pays."""
        ...

    @property
    def is_capturing(self) -> bool:
        """Whether another thread captures: that takes seconds."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """While it is entered no other program of the device runs, or will run before what is enqueued meanwhile."""
        ...

    def capture(self, function: Callable[[], Any]) -> Program:
        """Warm a function up and capture it. To be called in one's turn, with its buffers filled."""
        ...

    def settle(self) -> None:
        """Wait until no program is running on the device: memory can be given back."""
        ...


class Uncaptured:
    """The backend of devices without graphs: a replay is a call."""

    waits = False
    is_capturing = False

    def turn(self) -> AbstractContextManager[None]:
        """See `Backend.turn`: functions share no memory."""
        return nullcontext()

    def capture(self, function: Callable[[], Any]) -> Program:
        """See `Backend.capture`."""
        return _Function(function)

    def settle(self) -> None:
        """See `Backend.settle`: a call is over when it returns."""


@dataclass(frozen=True)
class _Function:
    """A function as a program."""

    function: Callable[[], Any]
    num_bytes: int = 0

    def replay(self) -> Any:
        return self.function()


class CudaGraphs:
    """Graphs of one CUDA device.

    All are captured on one stream, since only then do they share their pool. That stream is nobody else's: work of
    other threads goes on during a capture, which is why the error mode is "thread_local".

    Args:
        device: the device.
    """

    waits = True
    _any_capture = threading.Lock()  # a process captures one graph at a time, whatever the device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_capturing = False
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: WeakSet[_Graph] = WeakSet()  # that have the pool
        self._last = torch.cuda.Event()  # after what was enqueued in the last turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `Backend.turn`: threads may have streams of their own, which wait for each other on the device."""
        with self._lock:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._last)
            try:
                yield
            finally:
                self._last.record(stream)

    def capture(self, function: Callable[[], Any]) -> Program:
        """See `Backend.capture`."""
        current = torch.cuda.current_stream(self.device)
        self.is_capturing = True
        try:
            with self._any_capture, _without_collection():
                self._stream.wait_stream(current)  # the buffers have been filled there
                with torch.cuda.stream(self._stream):
                    with Rehearsal(self.device.type):
                        function()
                    for _ in range(WARM_UPS - 1):
                        function()
                current.wait_stream(self._stream)
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()  # what the warm-ups leave is not for the graph's pool otherwise
                return self._captured(function)
        finally:
            self.is_capturing = False

    def _captured(self, function: Callable[[], Any]) -> Program:
        if not self._graphs:  # a pool that all its graphs have left is about to be freed, and must not be used again
            self._pool = torch.cuda.graph_pool_handle()
        free = torch.cuda.mem_get_info(self.device)[0]
        graph = torch.cuda.CUDAGraph()
        try:
            # Not torch.cuda.graph: if the capture fails, that leaves this thread on the capture's stream.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = function()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            # What a failed capture leaves of its pool is unknown. Graphs that have it keep it.
            self._graphs.clear()
            raise
        # As the device sees it: the pool's growth, and what the driver keeps of thousands of launches.
        used = max(free - torch.cuda.mem_get_info(self.device)[0], 0)
        captured = _Graph(graph, outputs, used)
        self._graphs.add(captured)
        return captured

    def settle(self) -> None:
        """See `Backend.settle`."""
        self._last.synchronize()


@dataclass(frozen=True, eq=False)
class _Graph:
    """A CUDA graph with the outputs that it writes."""

    graph: Any
    outputs: Any
    num_bytes: int

    def replay(self) -> Any:
        self.graph.replay()
        return self.outputs


@contextmanager
def _without_collection() -> Iterator[None]:
    """Within this context no garbage is collected: it may hold graphs and events, which a capture must not meet."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Rehearsal(TorchDispatchMode):
    """Refuses, in a warm-up, what would break a capture off: a broken one leaves the allocator in an unknown state.

    Args:
        device: the type of device that is captured.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (why := self._refuses(func, args, kwargs)) is not None:
            raise CannotCapture(f"{func} {why}")
        return func(*args, **kwargs)

    def _refuses(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
        name = func._schema.name.split("::")[-1]
        given = [one for one in [*args, *kwargs.values()] if isinstance(one, Tensor)]
        on_device = [one.device.type == self.device for one in given]
        if not any(on_device) and name != "_to_copy":
            return None
        if name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            return "has a result that the host waits for"
        if name == "histc" and len({*args[2:], 0}) == 1:  # without bounds it looks for them
            return "has bounds that the host waits for"
        if (
            name in BY_VALUE
            and isinstance(args[BY_VALUE[name]], Tensor)
            and args[BY_VALUE[name]].device.type == self.device
        ):
            return "has a value that the host waits for"
        indices = [index for index in args[1] if isinstance(index, Tensor)] if name in INDEXING else []
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "selects by a mask: the host waits for the size of the result"
        if any(index.device.type != self.device for index in indices):
            return "copies places from the host"
        if name == "lift_fresh" and given[0].numel():
            return "copies numbers of the host"
        if name == "copy_" and not all(on_device):
            return "copies between the host and the device"
        if name == "_to_copy" and (to := kwargs.get("device")) is not None:
            types = {torch.device(to).type, given[0].device.type}
            if self.device in types and len(types) > 1:
                return "copies between the host and the device"
        return None


def backend_of(device: torch.device) -> Backend:
    """The backend of a device; graphs of one device share theirs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _UNCAPTURED
    number = torch.cuda.current_device() if device.index is None else device.index
    with _BACKENDS_LOCK:
        if number not in _BACKENDS:
            _BACKENDS[number] = CudaGraphs(torch.device("cuda", number))
        return _BACKENDS[number]


_UNCAPTURED = Uncaptured()
_BACKENDS: dict[int, Backend] = {}
_BACKENDS_LOCK = threading.Lock()


@dataclass(frozen=True)
class Recipe:
    """What can be captured.

    Attributes:
        buffers: the static ones.
        fill: copies the inputs of a call into them; what it does not write, `run` does not read.
        run: computes outputs from them.
    """

    buffers: tuple[Tensor, ...]
    fill: Callable[[Any], None]
    run: Callable[[], Any]

    @property
    def num_bytes(self) -> int:
        """Of the buffers."""
        return num_bytes(self.buffers)


@dataclass
class Entry:
    """A captured program, or one about to be.

    Attributes:
        key: what it was captured for.
        owners: weak references to what it cannot outlive, such as its model.
        lock: held by the thread whose inputs are in the buffers.
        recipe: None before its capture, and after it was dropped.
        program: likewise.
        backend: likewise.
        seconds: that the capture took.
        is_gone: whether it was dropped.
    """

    key: Hashable
    owners: tuple[ref[Any], ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    recipe: Recipe | None = None
    program: Program | None = None
    backend: Backend | None = None
    seconds: float = 0.0
    is_gone: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of its buffers and its program."""
        if self.recipe is None:
            return 0
        return self.recipe.num_bytes + (0 if self.program is None else self.program.num_bytes)

    @property
    def is_alive(self) -> bool:
        """Whether all that it cannot outlive lives."""
        return all(owner() is not None for owner in self.owners)


class GraphCache:
    """Captured programs by key; the least recently used are dropped when they take too much memory.

    Args:
        limit: bytes of all programs and their buffers.
        report: told, in words, that something cannot be captured.
        backend: of a device.

    Attributes:
        num_captures: so far.
        num_replays: so far.
    """

    def __init__(
        self,
        limit: int = LIMIT,
        *,
        report: Callable[[str], None] = lambda message: None,
        backend: Callable[[torch.device], Backend] = backend_of,
    ) -> None:
        self._limit = limit
        self.report = report
        self.backend = backend
        self.num_captures = self.num_replays = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._seen: OrderedDict[Hashable, str] = OrderedDict()
        self._refused: OrderedDict[Hashable, str] = OrderedDict()

    @property
    def limit(self) -> int:
        """Bytes of all programs and their buffers; once it is set, what was refused may be tried again."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            self._refused.clear()

    @property
    def entries(self) -> list[Entry]:
        """The captured programs, the least recently used first."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.program is not None]

    @property
    def num_bytes(self) -> int:
        """Memory of all programs and their buffers."""
        return sum(entry.num_bytes for entry in self.entries)

    def run(
        self,
        key: Hashable,
        inputs: Any,
        *,
        device: torch.device,
        size: int,
        make: Callable[[], Recipe],
        owners: Iterable[Any] = (),
        at_once: bool = False,
    ) -> Any:
        """The outputs of a captured program for some inputs, copied; None if the caller has to compute them itself.

        Args:
            key: all that the program depends on besides the inputs, addresses that it reads included.
            inputs: handed to `Recipe.fill`.
            device: where it runs.
            size: bytes of the buffers that `make` will allocate.
            make: allocates the buffers.
            owners: objects whose end is the program's, too; it must not hold them.
            at_once: whether to capture on the first use.
        """
        backend = self.backend(device)
        if backend.is_capturing:
            return None
        entry = self._entry(key, owners, at_once=at_once)
        if entry is None or not entry.lock.acquire(blocking=entry.program is not None and backend.waits):
            return None
        try:
            if entry.is_gone:
                return None
            if entry.program is None and not self._capture(entry, inputs, backend, make, size):
                return None
            assert entry.recipe is not None
            assert entry.program is not None
            with backend.turn():
                entry.recipe.fill(inputs)
                outputs = with_tensors(entry.program.replay(), lambda tensor: tensor.clone())
        finally:
            entry.lock.release()
        with self._lock:
            self.num_replays += 1
        return outputs

    def refusal(self, key: Hashable) -> str | None:
        """Why there will be no program of a key; None if nothing is known against it."""
        with self._lock:
            return self._refused.get(key)

    def clear(self) -> None:
        """Drop all programs that no thread is using, and forget what could not be captured."""
        with self._lock:
            entries = list(self._entries.values())
            self._seen.clear()
            self._refused.clear()
        for entry in entries:
            self._drop(entry)

    def _entry(self, key: Hashable, owners: Iterable[Any], *, at_once: bool) -> Entry | None:
        """The entry of a key, new on its second use; None if the caller has to do without."""
        with self._lock:
            if key in self._refused:
                return None
            entry = self._entries.get(key)
            if entry is not None and entry.is_alive:
                self._entries.move_to_end(key)
                return entry
            dead = [one for one in self._entries.values() if not one.is_alive]
        for one in dead:
            self._drop(one)
        with self._lock:
            if key in self._entries:  # by another thread, meanwhile; or it is dead and in use
                return self._entries[key] if self._entries[key].is_alive else None
            if not at_once and key not in self._seen:
                _remember(self._seen, key, "")
                return None
            self._seen.pop(key, None)
            entry = self._entries[key] = Entry(key)
            entry.owners = tuple(ref(owner, _told(ref(entry), self._drop_dead)) for owner in owners)
            return entry

    def _capture(self, entry: Entry, inputs: Any, backend: Backend, make: Callable[[], Recipe], size: int) -> bool:
        """Give an entry its program; says why not if that fails, whatever the reason: the caller has other means."""
        began = time.perf_counter()
        try:
            if self._has_room(size):
                # Buffers of an inference could not be written to after it.
                with backend.turn(), torch.inference_mode(False), torch.no_grad():
                    recipe = make()
                    recipe.fill(inputs)
                    program = backend.capture(recipe.run)
                if self._has_room(recipe.num_bytes + program.num_bytes):
                    entry.recipe, entry.program, entry.backend = recipe, program, backend
        except Exception as error:  # out of memory, a model that the host has to wait for, ...
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            with self._lock:
                _remember(self._refused, entry.key, why)
            self.report(f"a decode cannot be captured ({why}): decoding without graphs")
        finally:
            if entry.program is None:  # interrupted, too
                entry.is_gone = True
                with self._lock:
                    self._entries.pop(entry.key, None)
        if entry.program is None:
            return False
        entry.seconds = time.perf_counter() - began
        with self._lock:
            self.num_captures += 1
        return True

    def _has_room(self, wanted: int) -> bool:
        """Drop the least recently used programs until so many bytes are free; not if the others are all in use.

        Raises:
            CannotCapture: there never will be.
        """
        if wanted > self.limit:
            raise CannotCapture(f"it takes {wanted:,} bytes, expected at most {self.limit:,}: raise the limit")
        for entry in self.entries:
            if self.num_bytes + wanted <= self.limit:
                break
            self._drop(entry)
        return self.num_bytes + wanted <= self.limit

    def _drop_dead(self, entry: Entry) -> None:
        """Give memory back as soon as an owner is gone.

        That may be at any moment, in a thread that holds any lock: what cannot be dropped at once, the next call with
        a new key drops.
        """
        if entry.is_gone or (entry.backend is not None and entry.backend.is_capturing):
            return
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        """Forget an entry and its memory, unless a thread is using it."""
        if not entry.lock.acquire(blocking=False):
            return
        try:
            if entry.backend is not None:
                entry.backend.settle()
            entry.recipe = entry.program = entry.backend = None
            entry.is_gone = True
            with self._lock:
                if self._entries.get(entry.key) is entry:
                    del self._entries[entry.key]
        finally:
            entry.lock.release()


def _told(entry: ref[Entry], drop: Callable[[Entry], None]) -> Callable[[Any], None]:
    """To be called with a weak reference to an owner that is gone."""

    def callback(owner: Any) -> None:
        if (found := entry()) is not None:
            drop(found)

    return callback


def _remember(keys: OrderedDict[Hashable, str], key: Hashable, why: str) -> None:
    keys[key] = why
    if len(keys) > MOST_KEYS:
        keys.popitem(last=False)
