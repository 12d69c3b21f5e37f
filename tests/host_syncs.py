# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which operations make the host wait for a CUDA device, and the line that asked. Knows no model and runs nothing.

Written after torch 2.13's kernels: an operation is listed if its CUDA kernel reads a value on the host. Shared by the
pretend CUDA device (which records them) and by the graph on the CPU (which refuses them).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import resolve_name

# The host needs a value, or the size of the result depends on values.
WAIT = {
    "_local_scalar_dense",  # item, tolist of one number, int(), bool(), `if tensor`
    *("nonzero", "argwhere", "masked_select", "is_nonzero", "equal", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# These read a tensor of one value on the host: a plain number does not wait.
WITH_A_VALUE = {"masked_fill": 2, "masked_fill_": 2, "index_fill": 3, "index_fill_": 3}
# Methods that read memory without an operation.
READS = {"tolist", "numpy", "__array__", "__dlpack__", "cpu", "pin_memory"}
# Frames that are nobody's own line.
MACHINERY = ("/cpu_graph.py", "/pretend_cuda.py", "/host_syncs.py")
TORCH = str(Path(torch.__file__).parent)


def operation(func: Any) -> str:
    """The name of an aten operation without its overload: `masked_fill`."""
    return func._schema.name.split("::")[1]


def wait_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, device: str) -> str | None:
    """Why an operation on tensors of a type of device makes the host wait; None if it does not."""
    name = operation(func)
    if name in WAIT and _is_there(args, device):
        return name
    if name in INDEXED:
        for place in args[1]:
            if isinstance(place, torch.Tensor) and place.device.type == device:
                if place.dtype in (torch.bool, torch.uint8):
                    return f"{name} by a mask"
            elif isinstance(place, torch.Tensor) and place.ndim and args[0].device.type == device:
                return f"{name} by places on the {place.device.type}"
    if name == "repeat_interleave" and kwargs.get("output_size") is None and _is_there(args, device):
        return f"{name} without output_size"
    if name == "histc" and _is_there(args, device) and len({*args[2:], 0}) == 1:  # it looks for the bounds
        return "histc without bounds"
    if name in WITH_A_VALUE and _is_there(args[WITH_A_VALUE[name] :], device):
        return f"{name} by a tensor's value"
    return None


def tensors_of(given: Any) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results; much faster than a tree of any kind."""
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (list, tuple)):
        return []
    return [tensor for each in given for tensor in tensors_of(each)]


def map_tensors(function: Callable[[torch.Tensor], Any], given: Any) -> Any:
    """An operation's arguments or results with other tensors."""
    if isinstance(given, torch.Tensor):
        return function(given)
    if isinstance(given, dict):
        return {name: map_tensors(function, each) for name, each in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)([map_tensors(function, each) for each in given])
    return given


def read_of(func: Any) -> str | None:
    """The method's name if it reads a tensor's memory without an operation."""
    name = (resolve_name(func) or "").rpartition(".")[2]
    return name if name in READS else None


class Line(NamedTuple):
    """A line of a program: `hf_gr/torch/decode.py:142`, in a function."""

    path: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


def caller() -> Line:
    """The innermost line outside torch and these tools."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH, "<")) and not name.endswith(MACHINERY):
            return Line(_short(name), frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return Line("?", 0, "?")


@cache
def _short(name: str) -> str:
    """A path from its package on; the folder above may have any name, and hold the environment."""
    parts = Path(name.rpartition("/site-packages/")[2]).parts
    homes = [place for place, part in enumerate(parts) if part in ("hf_gr", "transformers", "tests")]
    return "/".join(parts[homes[-1] :]) if homes else parts[-1]


def _is_there(args: Any, device: str) -> bool:
    return any(isinstance(each, torch.Tensor) and each.device.type == device for each in args)
