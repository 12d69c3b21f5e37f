# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a CPU, for `hf_gr.torch.graphs`: the operations of one run, replayed on the same memory.

What the host decided meanwhile stays decided, and what a rehearsal refuses cannot be recorded. Memory of a graph holds
poison before each replay, as another graph of the pool would leave it. Knows no model but in `capture`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretend_cuda import mapped, tensors_of
from torch import Tensor

from hf_gr.generation.torch import captured
from hf_gr.torch.graphs import Rehearsal, Uncaptured

# Large, but finite in every dtype, and so are its products with activations: what is masked gets the weight 0, and
# zero times infinity is no number.
POISON = 3e4


@torch.inference_mode()
def poison(tensors: Any) -> None:
    """Fill all tensors of a structure with large finite values, in place."""
    for tensor in tensors_of(tensors):
        if tensor.dtype.is_floating_point:
            tensor.fill_(POISON)
        else:
            tensor.fill_(True if tensor.dtype == torch.bool else min(torch.iinfo(tensor.dtype).max // 2, 2**30))


class CpuGraph(Rehearsal):
    """A graph: what is called while it is entered is recorded; then any number of `replay`.

    Example:
        >>> graph, given = CpuGraph(), torch.tensor([1.0, 2.0])
        >>> with graph:
        ...     doubled = given * 2
        >>> given.fill_(4.0)
        tensor([4., 4.])
        >>> graph.replay()
        >>> doubled
        tensor([8., 8.])
    """

    def __init__(self) -> None:
        super().__init__("cpu")
        self.recorded: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.memory: dict[int, Tensor] = {}  # by address, all blocks that it made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default and not args[0].ndim:  # `scores[:2] = 0`, which a device fills in
            return func(*args)
        found = super().__torch_dispatch__(func, types, args, kwargs)
        known = {_address(each) for each in tensors_of((args, kwargs))}
        made = [each for each in tensors_of(found) if _address(each) not in known]
        for each in made:
            size = each.untyped_storage().nbytes() // each.element_size()
            self.memory.setdefault(_address(each), each.detach().as_strided((size,), (1,), 0))
        if made or func._schema.is_mutable:  # else a view
            # `tensor.data = other` leaves a tensor of its own where it is.
            own = mapped(Tensor.detach, (args, kwargs or {}))
            self.recorded.append((func, *own, [each.detach() for each in made]))
        return found

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the operations again on the memory that they were recorded with."""
        poison(list(self.memory.values()))
        for func, args, kwargs, outputs in self.recorded:
            computed = tensors_of(func(*args, **kwargs))
            for output, new in zip(outputs, computed, strict=bool(outputs)):
                output.copy_(new)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CpuGraphs(Uncaptured):
    """A backend that captures by `CpuGraph`."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0
        self._lock = threading.Lock()

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> CpuGraphs:
        """The backend of all decodes that are captured."""
        backend = cls()
        monkeypatch.setattr(captured, "backend_of", lambda device: backend)
        return backend

    def turn(self) -> Any:
        return self._lock

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
        function()
        with (graph := CpuGraph()):
            outputs = function()
        poison(list(graph.memory.values()))  # a capture computes nothing
        self.num_captures += 1

        def replay() -> Any:
            graph.replay()
            self.num_replays += 1
            return outputs

        return replay, sum(block.nbytes for block in graph.memory.values())


def capture(model: Any, inputs: dict[str, Any], **options: Any) -> captured.Program:
    """Capture the decode of such calls, as `model.warm_up` does."""
    with captured.capturing() as found:
        model.generate(**inputs, cache_implementation="static", **options)
    (program,) = found
    return program


def poison_buffers(model: Any) -> list[captured.Program]:
    """Fill the static buffers of all programs with large finite values."""
    programs = captured.PROGRAMS.get(model, [])
    for program in programs:
        poison(program.captured.buffers)
    return programs
