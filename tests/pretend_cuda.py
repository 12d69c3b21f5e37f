# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A pretend CUDA device with true values: its tensors say `cuda:0`, their numbers are on the CPU. Knows no model.

Operations that mix devices raise as on a real one. What makes the host wait is recorded with its line, and so are
operations and the memory that they make. Kernels are the CPU's: this says nothing of times. torch is patched for as
long as `PretendCuda` is entered, and nothing of it is left afterwards.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.__future__ import get_overwrite_module_params_on_conversion, set_overwrite_module_params_on_conversion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

CUDA = torch.device("cuda", 0)
COPIES = {"_to_copy", "copy_", "_copy_from", "_copy_from_and_resize"}
# Where a CPU tensor of one value is no plain number, but on the wrong device.
NO_NUMBERS = set("cat stack gather scatter scatter_ scatter_add index_select index_add index_copy".split())
OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DeviceMismatch(RuntimeError):
    """An operation on tensors of the host and of the device."""


class HostWaits(RuntimeError):
    """The host waits where it may not."""


class Line(NamedTuple):
    module: str
    function: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}:{self.number}"


class Wait(NamedTuple):
    """The host waited for the device."""

    why: str
    line: Line
    region: str | None


class Made(NamedTuple):
    """Memory that an operation made on the device."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    line: Line
    region: str | None

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class Log:
    """What made the host wait, the number of operations (no views) by region, and new memory."""

    waits: list[Wait] = field(default_factory=list)
    operations: Counter[str | None] = field(default_factory=Counter)
    made: list[Made] = field(default_factory=list)


class PretendTensor(torch.Tensor):
    """A tensor of the device; `on_host` are its numbers, a CPU tensor."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, on_host: Tensor) -> PretendTensor:  # noqa: D102
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            on_host.size(),
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device=CUDA,
        )
        made.on_host = on_host
        return made

    def __repr__(self) -> str:
        return f"PretendTensor({self.on_host})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (special := SPECIAL.get(func)) is not None:
            return special(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Operations without a tensor of the device that make one: `torch.zeros(3, device="cuda")`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendCuda:
    """Installs the device; `log` has what happened since, or since the last `clear`.

    Example:
        >>> with PretendCuda() as cuda:
        ...     given = torch.arange(3, device="cuda")
        ...     found = given.sum().item()
        >>> found, [wait.why for wait in cuda.log.waits]
        (3, ['_local_scalar_dense'])
    """

    current: PretendCuda

    def __init__(self) -> None:
        self.log, self.region, self.debug_mode = Log(), None, "default"
        self._undo = ExitStack()

    def clear(self) -> Log:
        self.log = Log()
        return self.log

    @contextmanager
    def within(self, region: str) -> Iterator[None]:
        """Count what happens inside under a name."""
        before, self.region = self.region, region
        try:
            yield
        finally:
            self.region = before

    def waits(self, why: str) -> None:
        self.log.waits.append(Wait(why, line := _line(), self.region))
        if self.debug_mode == "error":
            raise HostWaits(f"{line}: {why} makes the host wait")

    def record(self, name: str, new: list[Any]) -> None:
        """An operation, and its results in memory of their own."""
        self.log.operations[self.region] += 1
        self.log.made += [Made(name, each.shape, each.dtype, _line(), self.region) for each in new]

    def __enter__(self) -> PretendCuda:
        if torch.cuda.is_available():
            raise RuntimeError("there is a real CUDA device, expected none: run `pytest -m gpu` instead")
        PretendCuda.current = self
        functions = {
            "_lazy_init": lambda: None,
            "synchronize": lambda device=None: self.waits("synchronize"),
            "set_sync_debug_mode": lambda mode: setattr(self, "debug_mode", mode),
            "current_device": lambda: 0,
            "device_count": lambda: 1,
        }
        with self._undo as undo:
            undo.enter_context(_device_guard())
            undo.enter_context(mock.patch.multiple(torch.cuda, **functions))
            undo.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))  # NVIDIA's kernels
            undo.enter_context(mock.patch.object(Tensor, "pin_memory", _pinned))
            # A module's parameters are replaced: tensors of the host do not become those of the device in place.
            undo.callback(set_overwrite_module_params_on_conversion, get_overwrite_module_params_on_conversion())
            set_overwrite_module_params_on_conversion(True)
            # `torch.tensor(numbers, device=...)` makes a tensor of the CPU and copies it, as on a device.
            undo.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())  # pyright: ignore
            torch._C._set_only_lift_cpu_tensors(True)  # pyright: ignore
            undo.enter_context(_Operations())
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()


def values(given: Any) -> Any:
    """The same structure with the numbers of the device's tensors; waits for nothing."""
    return tree_map_only(PretendTensor, lambda tensor: tensor.on_host, given)


def on_device(given: Any) -> Any:
    """The same structure with copies of its tensors on the device; waits for nothing."""
    return tree_map_only(Tensor, lambda tensor: PretendTensor(values(tensor).clone()), given)


def as_one_operation(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function as one kernel of the device, as a compiler makes it."""
    return lambda *args: _one_kernel(function, args, {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation: its devices are checked, what it does is recorded, the CPU computes it."""
    name, given = func._schema.name.split("::")[1], tensors_of((args, kwargs))
    ours = [each for each in given if isinstance(each, PretendTensor)]
    others = [each for each in given if not isinstance(each, PretendTensor)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    is_ours = bool(ours) if asked is None else asked.type == CUDA.type
    if not ours and not is_ours:
        return func(*args, **kwargs)
    why = _read_of(func, name, args, kwargs) if ours else None
    why = why or _copy_of(name, args, kwargs, asked, ours, others)
    if why is not None:
        PretendCuda.current.waits(why)
    elif ours and name not in COPIES and any(each.ndim or name in NO_NUMBERS for each in others):
        raise DeviceMismatch(f"{_line()}: {func} on tensors of {CUDA} and of the CPU")
    own_of = {id(each.on_host): each for each in ours}
    host_args, host_kwargs = mapped(_on_host, (args, kwargs))
    if asked is not None:
        host_kwargs = host_kwargs | {"device": torch.device("cpu")}
    found = mapped(lambda each: own_of.get(id(each), each), func(*host_args, **host_kwargs))
    if not is_ours:
        return found
    made = mapped(lambda each: each if isinstance(each, PretendTensor) else PretendTensor(each), found)
    known = {_address(each) for each in ours}
    new = [each for each in tensors_of(made) if each.numel() and _address(each) not in known]
    if new or func._schema.is_mutable:  # else a view
        PretendCuda.current.record(name, new)
    return made


def _read_of(func: Any, name: str, args: Any, kwargs: Any) -> str | None:
    """What of an operation's values the host reads; None for nothing. After torch 2.13's kernels."""
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        places = [place for place in args[1] if isinstance(place, Tensor)]
        if any(place.dtype in (torch.bool, torch.uint8) for place in places):
            return f"{name} by a mask"
        return f"{name} by places on the cpu" if any(not _is_ours(place) for place in places) else None
    if name in ("masked_fill", "masked_fill_", "index_fill", "index_fill_") and _is_ours(args[-1]):
        return f"{name} by a tensor's value"  # the last argument is what is filled in
    if OF_VALUES & {*func.tags} or name == "is_nonzero":
        return None if kwargs.get("output_size") is not None else name
    return None


def _copy_of(name: str, args: Any, kwargs: Any, asked: Any, ours: list[Any], others: list[Tensor]) -> str | None:
    """What is copied between the host and the device; None if nothing is, or if it is copied without waiting."""
    if name == "_to_copy" and asked is not None and (asked.type == CUDA.type) != bool(ours):
        is_up, source, non_blocking = not ours, args[0], kwargs.get("non_blocking", False)
    elif name == "copy_" and ours and others:
        is_up, source = _is_ours(args[0]), args[1]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    else:
        return None
    if not source.numel() or (is_up and non_blocking and getattr(source, "is_pretend_pinned", False)):
        return None
    return f"{'to' if is_up else 'from'} the device: {list(source.shape)}"


def _one_kernel(func: Any, args: Any, kwargs: Any) -> Tensor:
    if not all(_is_ours(each) for each in tensors_of((args, kwargs))):
        raise DeviceMismatch(f"{_line()}: {func.__name__} on tensors of {CUDA} and of the CPU")
    host_args, host_kwargs = mapped(_on_host, (args, kwargs))
    made = PretendTensor(func(*host_args, **host_kwargs))
    PretendCuda.current.record(func.__name__, [made])
    return made


def _tolist(func: Any, args: Any, kwargs: Any) -> Any:
    PretendCuda.current.waits("tolist")
    return args[0].on_host.tolist()


def _refuse_numpy(func: Any, args: Any, kwargs: Any) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")


# What is no operation, and attention, whose kernels a CPU does not have.
SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.nn.functional.scaled_dot_product_attention: _one_kernel,
    Tensor.tolist: _tolist,
    Tensor.numpy: _refuse_numpy,
    Tensor.__array__: _refuse_numpy,
    Tensor.data_ptr: lambda func, args, kwargs: func(args[0].on_host),
    Tensor.untyped_storage: lambda func, args, kwargs: func(args[0].on_host),
}


def _pinned(tensor: Tensor) -> Tensor:
    pinned: Any = tensor.clone()
    pinned.is_pretend_pinned = True
    return pinned


def _is_ours(given: Any) -> bool:
    return isinstance(given, PretendTensor)


def _on_host(tensor: Any) -> Tensor:
    return tensor.on_host if isinstance(tensor, PretendTensor) else tensor


def _address(tensor: Any) -> int:
    return tensor.on_host.untyped_storage().data_ptr()


def mapped(function: Callable[[Any], Any], given: Any) -> Any:
    """An operation's arguments or results with other tensors; much faster than a tree of any kind."""
    if isinstance(given, Tensor):
        return function(given)
    if isinstance(given, dict):
        return {name: mapped(function, each) for name, each in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)([mapped(function, each) for each in given])
    return given


def tensors_of(given: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, given)
    return found


def _line() -> Line:
    """The innermost line outside torch and this module."""
    frame: Any = sys._getframe(1)
    while (module := frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", __name__):
        frame = frame.f_back
    return Line(module, frame.f_code.co_name, frame.f_lineno)


@contextmanager
def _device_guard() -> Iterator[None]:
    """torch's switch between devices of this kind, which a CPU build lacks: its own fake one.

    It is installed in the place of a guard that counts no device, so one that counts none comes first.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    place = 1  # c10::DeviceType::CUDA
    before = guards[place]
    count = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: 0)
    methods = (ctypes.c_void_p * 64)(*[ctypes.cast(count, ctypes.c_void_p)] * 64)
    none = ctypes.c_void_p(ctypes.addressof(methods))
    guards[place] = ctypes.addressof(none)
    torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore
    assert guards[place] != ctypes.addressof(none), "torch has another fake guard"
    try:
        yield
    finally:
        guards[place] = before
