# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions captured over static buffers: CUDA graphs on a CUDA device, the functions themselves elsewhere.

A call copies its inputs into the buffers, replays, and gets copies of the outputs, so no call sees the memory of
another one. All programs take turns, on the device too: those of one device share a pool of memory, and each may use
what another one has left there. A replay holds the turn only for as long as it takes to enqueue the work. Knows no
model.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; xGR, section 7 (graph dispatch).
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

WARM_UPS = 2  # runs before a capture: libraries allocate their workspaces, kernels are loaded
_TURN = threading.Lock()  # of replays and captures; a process captures one graph at a time, whatever the device
# Operations whose results the host reads, or whose shapes depend on values.
READS = frozenset(
    "_local_scalar_dense _unique _unique2 argwhere bincount equal is_nonzero masked_select nonzero "
    "unique_consecutive unique_dim".split()
)
INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])
# With a tensor of one value where a number would do: the host reads it.
BY_VALUE = {"masked_fill": 2, "masked_fill_": 2, "index_fill": 3, "index_fill_": 3}


class CannotCapture(RuntimeError):
    """A graph cannot contain this: the host waits for the device, or copies memory to it."""


class Uncaptured:
    """How functions are captured on a device: where there are no graphs a replay is a call."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside it no other program of the device runs, nor can run before the work that is enqueued inside."""
        with _TURN:
            yield

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
        """Warm a function up and capture it. To be called in one's turn, with its buffers filled.

        Returns:
            A function that computes the outputs again, maybe into the same memory every time; and the memory that it
            takes in addition to the function's buffers.
        """
        return function, 0


class CudaGraphs(Uncaptured):
    """Graphs of one CUDA device.

    All are captured on one stream, since only then do they share their pool. Nothing else uses that stream: other
    threads continue to work during a capture, which is why the error mode is "thread_local".
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: WeakSet[_Graph] = WeakSet()  # that have the pool
        self._last = torch.cuda.Event()  # after what was enqueued in the last turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `Uncaptured.turn`: threads may have streams of their own, which wait for each other on the device."""
        with _TURN:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._last)
            try:
                yield
            finally:
                self._last.record(stream)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
        """See `Uncaptured.capture`."""
        current = torch.cuda.current_stream(self.device)
        with _without_collection():
            self._stream.wait_stream(current)  # the buffers have been filled there
            with torch.cuda.stream(self._stream):
                with Rehearsal(self.device.type):
                    function()
                for _ in range(WARM_UPS - 1):
                    function()
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # or the graph's pool could not use the warm-ups' memory
            return self._captured(function)

    def _captured(self, function: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
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
        except BaseException as error:
            # The state of the pool after a failed capture is unknown. Graphs that already use it keep it.
            self._graphs.clear()
            if "graph capture" in str(error):  # what no operation of PyTorch's could tell before
                raise CannotCapture(f"{error} Experts: model.set_experts_implementation('batched_mm')") from error
            raise
        # As the device sees it: the pool's growth, and what the driver keeps of thousands of launches.
        used = max(free - torch.cuda.mem_get_info(self.device)[0], 0)
        captured = _Graph(graph, outputs, self._last)
        self._graphs.add(captured)
        return captured.replay, used


@dataclass(frozen=True, eq=False)
class _Graph:
    """A CUDA graph with the outputs that it writes."""

    graph: Any
    outputs: Any
    last: Any

    def replay(self) -> Any:
        self.graph.replay()
        return self.outputs

    def __del__(self) -> None:
        self.last.synchronize()  # it may still be running, and its memory is given back


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
    """In a warm-up, refuses operations that would abort a capture, which leaves the allocator in an unknown state."""

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


def backend_of(device: torch.device) -> Uncaptured:
    """The backend of a device; graphs of one device share theirs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Uncaptured()
    return _cuda_graphs(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_graphs(number: int) -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", number))


class Captured:
    """A function over static buffers, captured for inputs like those of one call: that took `seconds`.

    `fill` copies the inputs of a call into the buffers; what it does not write, `run` does not read, which
    computes outputs: nested tuples, lists, dictionaries and registered dataclasses.
    """

    def __init__(
        self,
        backend: Uncaptured,
        buffers: Sequence[Tensor],
        *,
        fill: Callable[[Any], None],
        run: Callable[[], Any],
        inputs: Any,
    ) -> None:
        began = time.perf_counter()
        self.backend, self.buffers, self.fill = backend, tuple(buffers), fill
        with backend.turn():
            fill(inputs)
            self.run, of_run = backend.capture(run)
        self.seconds = time.perf_counter() - began
        self.num_bytes = of_run + sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def replay(self, inputs: Any) -> Any:
        """The outputs for some inputs, copied."""
        with self.backend.turn():
            self.fill(inputs)
            return tree_map_only(Tensor, lambda tensor: tensor.clone(), self.run())
