# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A CUDA graph on the CPU: records the operations of one run, and replays them on the same memory. Knows no model.

What the host decided while recording stays decided, as it would in a graph. As there, too: recording computes nothing
that may be kept, and the host may not look at a value meanwhile.

Source: `torch.cuda.CUDAGraph`; here a `TorchDispatchMode` stands for the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from host_syncs import caller, map_tensors, operation, read_of, tensors_of, wait_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Large, but finite in every dtype, and so are its products with activations: what is masked gets the weight 0, and
# zero times infinity is no number.
POISON = 3e4
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
MOVES_MEMORY = {"set_", "resize_", "resize_as_", "_resize_output_"}
# With `device=` a blocking copy.
MADE_OF_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


class CaptureError(RuntimeError):
    """What a CUDA graph cannot record."""


def poison(tensors: Any) -> None:
    """Fill all tensors of a structure with large finite values, in place."""
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, Tensor):
            tensor.fill_(_poison_of(tensor.dtype))


@dataclass(frozen=True)
class Launch:
    """One recorded operation, on tensors of its own that share the memory of those that it was called with.

    Attributes:
        func: the operation.
        args: its arguments.
        kwargs: its arguments by name.
        outputs: the tensors that it made; empty if it only writes into its arguments.
    """

    func: Any
    args: Any
    kwargs: Any
    outputs: list[Tensor | None]

    def run(self) -> None:
        """Compute it again, into the same memory."""
        computed = tensors_of(self.func(*self.args, **self.kwargs))
        for output, new in zip(self.outputs, computed, strict=bool(self.outputs)):
            if output is not None:
                output.copy_(new)


class CpuGraph:
    """A graph: one `capture`, then any number of `replay`.

    As with a real graph, nothing is computed by the capture: its tensors hold poison until the first replay, and
    tensors from outside that it writes to are put back. Unlike with one, memory that is freed while capturing is not
    used again.

    Args:
        device: the type of device that is recorded; operations on others are the host's, which happen once.

    Example:
        >>> graph, given = CpuGraph(), torch.tensor([1.0, 2.0])
        >>> with graph.capture():
        ...     doubled = given * 2
        >>> given.fill_(4.0)
        tensor([4., 4.])
        >>> graph.replay()
        >>> doubled
        tensor([8., 8.])
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.recorded: list[Launch] = []
        self.memory: dict[int, Tensor] = {}  # by address, a view of every block that the graph made
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # blocks from outside that it writes to, as they were

    @property
    def launches(self) -> int:
        """Recorded operations: each is at least one kernel."""
        return len(self.recorded)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what is called inside.

        Raises:
            CaptureError: for what a CUDA graph cannot record, with the line: the host waits, memory is copied from or
                to it, or a tensor changes its memory. The graph is empty then.
        """
        if self.recorded:
            raise CaptureError("this graph has been captured, expected a new one: make one graph for each capture")
        done = False
        try:
            with _Reads(self), _Recorder(self):
                yield
            done = True
        finally:
            for block, values in self.before.values():
                block.copy_(values)
            self.before.clear()
            if done:
                self.poison()
            else:
                self.recorded.clear()
                self.memory.clear()

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the operations again on the memory that they were recorded with."""
        if not self.recorded:
            raise CaptureError("this graph is empty, expected one that has been captured: with graph.capture(): ...")
        for launch in self.recorded:
            launch.run()

    def poison(self) -> None:
        """Fill all memory of the graph, results included, as if another graph of its pool had run."""
        with torch.inference_mode():
            poison(list(self.memory.values()))

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = operation(func)
        given = tensors_of((args, kwargs))
        self._refuse(func, name, given, args, kwargs)
        written = [each for each in _written(func, args, kwargs) if each.device.type == self.device]
        for each in written:
            block = _block(each)
            if each.numel() and _address(each) not in self.memory.keys() | self.before.keys():
                self.before[_address(each)] = block, block.clone()
        computed = func(*args, **kwargs)
        known = {_address(each) for each in given}
        outputs = [
            _alias(each) if _is_new(each, known) and each.device.type == self.device else None
            for each in tensors_of(computed)
        ]
        for each in outputs:
            if each is not None:
                self.memory.setdefault(_address(each), _block(each))
        is_new = any(each is not None for each in outputs)
        if (is_new or written) and name not in NO_LAUNCH:
            own_args, own_kwargs = map_tensors(_alias, (args, kwargs))
            self.recorded.append(Launch(func, own_args, own_kwargs, outputs if is_new else []))
        return computed

    def _refuse(self, func: Any, name: str, given: list[Tensor], args: Any, kwargs: Any) -> None:
        why = wait_of(func, args, kwargs, device=self.device)
        if why is not None:
            raise CaptureError(f"{caller()}: {why} makes the host wait while capturing")
        if name in MOVES_MEMORY and any(each.device.type == self.device for each in given):
            raise CaptureError(f"{caller()}: {name} changes a tensor's memory while capturing")
        made_on = kwargs.get("device")
        types = {each.device.type for each in given} | ({torch.device(made_on).type} if made_on is not None else set())
        copies = name in ("_to_copy", "copy_", "_copy_from", "_copy_from_and_resize")
        if copies and len(types) > 1 and self.device in types:
            raise CaptureError(f"{caller()}: {name} between the host and the device while capturing")


class _Recorder(TorchDispatchMode):
    """Gives every operation to a graph."""

    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.graph._record(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    """Refuses functions that move numbers between the host and the device without an operation on a CPU."""

    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = read_of(func)
        if name is not None and isinstance(args[0], Tensor) and args[0].device.type == self.graph.device:
            raise CaptureError(f"{caller()}: Tensor.{name} makes the host wait while capturing")
        if func in MADE_OF_NUMBERS and self.graph.device == "cpu":
            raise CaptureError(f"{caller()}: a tensor of the host's numbers while capturing")
        return func(*args, **(kwargs or {}))


def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return min(POISON, torch.finfo(dtype).max)
    return min(torch.iinfo(dtype).max // 2, 2**30)


def _values(tensor: Tensor) -> Tensor:
    """A tensor with memory: what a tensor of the pretend device keeps its numbers in."""
    return getattr(tensor, "on_host", tensor)


def _address(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is in."""
    return _values(tensor).untyped_storage().data_ptr()


def _block(tensor: Tensor) -> Tensor:
    """All memory that a tensor is in, in its dtype."""
    values = _values(tensor).detach()
    memory = values.untyped_storage()
    return values.as_strided((memory.nbytes() // values.element_size(),), (1,), 0)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: `tensor.data = other` leaves it as it is."""
    return torch.ops.aten.alias.default(tensor.detach())


def _is_new(made: Any, known: set[int]) -> bool:
    """Whether an output has memory of its own: not a view of an argument, nor an argument."""
    return isinstance(made, Tensor) and made.numel() > 0 and _address(made) not in known


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes into."""
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_of(args[number] if number < len(args) else kwargs.get(argument.name))
    return found
