# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A pretend CUDA device with true values: its tensors say `cuda:0`, their numbers are on the CPU. Knows no model.

Operations that mix devices raise as on a real one; what makes the host wait is recorded with its line, and so are
operations, dtypes and the memory that they make. Kernels are the CPU's: this says nothing of times.

It patches torch, for as long as `PretendCuda` is entered: nothing of it is left afterwards but its tensors, so no
process of its own is needed. Where there is a real device it refuses to start.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch
from host_syncs import Line, caller, map_tensors, operation, tensors_of, wait_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

CUDA = torch.device("cuda", 0)
COPIES = {"_to_copy", "copy_", "_copy_from", "_copy_from_and_resize"}
# Where a CPU tensor of one value is no plain number, but on the wrong device.
NO_NUMBERS = {
    "cat",
    "stack",
    "gather",
    "scatter",
    "scatter_",
    "scatter_add",
    "index_select",
    "index_add",
    "index_copy",
}


class DeviceMismatch(RuntimeError):
    """An operation on tensors of the host and of the device."""


class HostWaits(RuntimeError):
    """The host waits where it may not."""


@dataclass(frozen=True)
class Wait:
    """The host waited for the device."""

    why: str
    line: Line
    region: str | None


@dataclass(frozen=True)
class Made:
    """Memory that an operation made on the device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    line: Line
    region: str | None

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Log:
    """What happened on the device.

    Attributes:
        waits: what made the host wait.
        operations: how often each was called by each line, by region; views are none.
        dtypes: of the operands of each.
        made: new memory.
    """

    waits: list[Wait] = field(default_factory=list)
    operations: Counter[tuple[str, Line, str | None]] = field(default_factory=Counter)
    dtypes: set[tuple[str, torch.dtype]] = field(default_factory=set)
    made: list[Made] = field(default_factory=list)

    def number(self, region: str | None = None) -> int:
        """Operations of a region: at least as many kernels."""
        return sum(number for (_, _, where), number in self.operations.items() if where == region)


class PretendTensor(torch.Tensor):
    """A tensor of the device.

    Attributes:
        on_host: its numbers, a CPU tensor.
    """

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
            requires_grad=False,
        )
        made.on_host = on_host
        return made

    def __repr__(self) -> str:
        return f"PretendTensor({self.on_host})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendCuda:
    """Installs the device; `with PretendCuda() as cuda:`.

    Attributes:
        log: what happened since it was installed, or since the last `clear`.

    Example:
        >>> with PretendCuda() as cuda:
        ...     given = torch.arange(3, device="cuda")
        ...     found = given.sum().item()
        >>> found, [wait.why for wait in cuda.log.waits]
        (3, ['_local_scalar_dense'])
    """

    def __init__(self) -> None:
        self.log = Log()
        self._undo = ExitStack()

    def clear(self) -> Log:
        """Begin a new log."""
        self.log = STATE.log = Log()
        return self.log

    def begin(self, region: str | None) -> None:
        """Count what happens from now on under a name."""
        STATE.region = region

    @contextmanager
    def within(self, region: str) -> Iterator[None]:
        """Count what happens inside under a name."""
        before, STATE.region = STATE.region, region
        try:
            yield
        finally:
            STATE.region = before

    def __enter__(self) -> PretendCuda:
        if torch.cuda.is_available():
            raise RuntimeError("there is a real CUDA device, expected none: run `pytest -m gpu` instead")
        with self._undo as undo:
            undo.enter_context(_device_guard())
            undo.enter_context(_tensors_of_numbers_are_copied())
            undo.enter_context(mock.patch.multiple(torch.cuda, **_cuda_functions()))
            undo.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))  # NVIDIA's kernels
            # A module's parameters are replaced: tensors of the host do not become those of the device in place.
            overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
            undo.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            undo.callback(STATE.__dict__.update, dict(vars(STATE)))
            STATE.log, STATE.region, STATE.debug_mode = self.log, None, "default"
            undo.enter_context(_Functions())
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


@dataclass
class _State:
    """Of the process, as a device is; a log that nobody reads while none is installed."""

    log: Log = field(default_factory=Log)
    region: str | None = None
    debug_mode: str = "default"


STATE = _State()


class _Operations(TorchDispatchMode):
    """Operations without a tensor of the device that make one: `torch.zeros(3, device="cuda")`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that a CPU build cannot serve: pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.pin_memory, Tensor.is_pinned) and not isinstance(args[0], PretendTensor):
            if func is Tensor.is_pinned:
                return getattr(args[0], "is_pretend_pinned", False)
            pinned = args[0].clone()
            pinned.is_pretend_pinned = True
            return pinned
        return func(*args, **(kwargs or {}))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation: its devices are checked, what it does is recorded, the CPU computes it."""
    name, given = operation(func), tensors_of((args, kwargs))
    ours = [each for each in given if isinstance(each, PretendTensor)]
    others = [each for each in given if not isinstance(each, PretendTensor)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    is_ours = bool(ours) if asked is None else asked.type == CUDA.type
    if not ours and not is_ours:
        return func(*args, **kwargs)
    why = wait_of(func, args, kwargs, device=CUDA.type) or _copy_of(name, args, kwargs, asked, ours, others)
    if why is not None:
        _waits(why)
    elif ours and name not in COPIES and any(each.ndim or name in NO_NUMBERS for each in others):
        raise DeviceMismatch(f"{caller()}: {func} on tensors of {CUDA} and of the CPU")
    own_of = {id(each.on_host): each for each in ours}
    sizes = [each.shape for each in ours]
    host_args, host_kwargs = map_tensors(_on_host, (args, kwargs))
    if asked is not None:
        host_kwargs = host_kwargs | {"device": torch.device("cpu")}
    if "pin_memory" in host_kwargs:
        host_kwargs = host_kwargs | {"pin_memory": False}
    # A copy to the host is another tensor, as on a device, where `to` on the CPU would give the same one.
    kernel: Any = KERNELS.get(name, func)
    found = kernel(*host_args, **host_kwargs)
    assert [each.on_host.shape for each in ours] == sizes, f"{func} changed a tensor's shape in place"
    made = map_tensors(lambda each: own_of.get(id(each), each), found)
    if not is_ours:
        return made
    made = map_tensors(lambda each: each if isinstance(each, PretendTensor) else PretendTensor(each), made)
    _record(func, name, ours, made)
    return made


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.on_host if isinstance(tensor, PretendTensor) else tensor


def _copy_of(
    name: str, args: Any, kwargs: Any, asked: torch.device | None, ours: list[PretendTensor], others: list[Tensor]
) -> str | None:
    """What is copied between the host and the device; None if nothing is, or if it is copied without waiting."""
    if name == "_to_copy" and asked is not None and (asked.type == CUDA.type) != bool(ours):
        is_up, source, non_blocking = not ours, args[0], kwargs.get("non_blocking", False)
    elif name == "copy_" and ours and others:
        is_up, source = isinstance(args[0], PretendTensor), args[1]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    else:
        return None
    if not source.numel() or (is_up and non_blocking and getattr(source, "is_pretend_pinned", False)):
        return None
    return f"{'to' if is_up else 'from'} the device: {list(source.shape)}"


def _record(func: Any, name: str, ours: list[PretendTensor], made: Any) -> None:
    log, known = STATE.log, {each.on_host.untyped_storage().data_ptr() for each in ours}
    outputs = [each for each in tensors_of(made) if isinstance(each, PretendTensor)]
    new = [each for each in outputs if each.numel() and each.on_host.untyped_storage().data_ptr() not in known]
    writes = func._schema.is_mutable
    if not (new or writes):
        return  # a view
    line = caller()
    log.operations[name, line, STATE.region] += 1
    log.dtypes |= {(name, each.dtype) for each in ours}
    log.made += [Made(name, tuple(each.shape), each.dtype, line, STATE.region) for each in new]


def _waits(why: str) -> None:
    STATE.log.waits.append(Wait(why, line := caller(), STATE.region))
    if STATE.debug_mode == "error":
        raise HostWaits(f"{line}: {why} makes the host wait")


def _one_kernel(func: Any, args: Any, kwargs: Any) -> Tensor:
    """One kernel of the device, whatever it is on a CPU."""
    given = tensors_of((args, kwargs))
    if not all(isinstance(each, PretendTensor) for each in given):
        raise DeviceMismatch(f"{caller()}: {func.__name__} on tensors of {CUDA} and of the CPU")
    host_args, host_kwargs = map_tensors(_on_host, (args, kwargs))
    made = PretendTensor(func(*host_args, **host_kwargs))
    line = caller()
    STATE.log.operations[func.__name__, line, STATE.region] += 1
    STATE.log.dtypes |= {(func.__name__, each.dtype) for each in given}
    STATE.log.made.append(Made(func.__name__, tuple(made.shape), made.dtype, line, STATE.region))
    return made


def as_one_operation(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function as one kernel of the device, as a compiler makes it."""
    return lambda *args: _one_kernel(function, args, {})


def _tolist(func: Any, args: Any, kwargs: Any) -> Any:
    _waits("tolist")
    return args[0].on_host.tolist()


def _refuse_numpy(func: Any, args: Any, kwargs: Any) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")


def _of_values(func: Any, args: Any, kwargs: Any) -> Any:
    """What is asked of a tensor's memory."""
    return func(args[0].on_host, *args[1:], **kwargs)


@torch.library.custom_op("pretend_cuda::scaled_dot_product_attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor],  # noqa: UP045
    dropout_p: float,
    is_causal: bool,
    scale: Optional[float],  # noqa: UP045
    enable_gqa: bool,
) -> Tensor:
    how = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **how, enable_gqa=enable_gqa)


def _one_attention(func: Any, args: Any, kwargs: Any) -> Tensor:
    """One operation of the device, which a graph records; the CPU's own choice of kernels is made below."""

    def call(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    with torch._C.DisableTorchFunctionSubclass():
        return call(*args, **kwargs)


SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.nn.functional.scaled_dot_product_attention: _one_attention,
    Tensor.tolist: _tolist,
    Tensor.numpy: _refuse_numpy,
    Tensor.__array__: _refuse_numpy,
    Tensor.data_ptr: _of_values,
    Tensor.untyped_storage: _of_values,
}


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.histc(values.double(), *args, **kwargs).to(values.dtype)  # the CPU's takes no integers


# Kernels that no CPU has, with what they require and how they write.
KERNELS: dict[str, Callable[..., Any]] = {
    "histc": _histc,
}


class _Event:
    """An event on the only stream, by the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at: float | None = None

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _waits("Event.synchronize")

    def elapsed_time(self, other: _Event) -> float:
        assert self.at is not None and other.at is not None  # noqa: PT018
        return 1e3 * (other.at - self.at)


def _cuda_functions() -> dict[str, Any]:
    """What replaces functions of `torch.cuda`, those that this project or a test of it calls."""
    return {
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: _waits("synchronize"),
        "Event": _Event,
        "set_sync_debug_mode": lambda mode: setattr(STATE, "debug_mode", mode),
        "get_sync_debug_mode": lambda: ["default", "warn", "error"].index(STATE.debug_mode),
        "current_stream": lambda device=None: None,  # there is only one
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),  # an H100
    }


@contextmanager
def _device_guard() -> Iterator[None]:
    """torch's switch between devices of this kind, which a CPU build lacks: its own fake one.

    `FakeTensorMode` installs that in a CUDA build whose guard counts no device, so one that counts none comes first.
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


@contextmanager
def _tensors_of_numbers_are_copied() -> Iterator[None]:
    """`torch.tensor(numbers, device=...)` makes a tensor of the CPU and copies it, as on a device."""
    before = torch._C._only_lift_cpu_tensors()  # pyright: ignore
    torch._C._set_only_lift_cpu_tensors(True)  # pyright: ignore
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)  # pyright: ignore
