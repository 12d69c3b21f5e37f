# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Values with tensors inside, such as catalogues and plans, as static buffers. Knows none of them.

A captured program reads the same memory in every replay. `take_apart` says what of a value such a program has to be
captured for (its structure: types, Python numbers, shapes, which tensors are one and the same) and what may change
between replays (the tensors' numbers); `put_together` makes the value again over buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None))

Value = TypeVar("Value")


@dataclass(frozen=True)
class Parts:
    """A value taken apart.

    Attributes:
        structure: equal for values that one captured program may read.
        tensors: its tensors, each once, in a fixed order.
    """

    structure: Hashable
    tensors: tuple[Tensor, ...]


def take_apart(value: Any, *, stays: Iterable[Any] = ()) -> Parts:
    """The structure and the tensors of nested dataclasses, tuples, lists and mappings.

    Args:
        value: the value.
        stays: objects inside that are read where they are: their identity is part of the structure. Whoever keeps the
            structure must keep them, since another object may get the identity of one that is gone.

    Raises:
        TypeError: for an object that is none of these, by its type.

    Example:
        >>> one = take_apart((torch.zeros(2), 3))
        >>> one.structure == take_apart((torch.ones(2), 3)).structure
        True
        >>> one.structure == take_apart((torch.ones(2), 4)).structure
        False
    """
    same, places, found = {id(one) for one in stays}, {}, []

    def structure_of(part: Any) -> Hashable:
        if id(part) in same and not isinstance(part, CONSTANTS):
            return "same", id(part)
        if isinstance(part, CONSTANTS):
            return type(part), part
        if isinstance(part, Tensor):
            if id(part) not in places:
                places[id(part)] = len(found)
                found.append(part)
            return Tensor, places[id(part)], part.dtype, part.device, tuple(part.shape)
        if isinstance(part, tuple | list):
            return (type(part), *map(structure_of, part))
        if isinstance(part, Mapping):
            return (dict, *((name, structure_of(one)) for name, one in part.items()))
        if is_dataclass(part):
            return (type(part), *(structure_of(getattr(part, field.name)) for field in fields(part)))
        raise TypeError(f"a {type(part).__name__} cannot be read from static buffers")

    return Parts(structure_of(value), tuple(found))


def put_together(value: Value, tensors: Sequence[Tensor], *, stays: Iterable[Any] = ()) -> Value:
    """The same value over other tensors, which are in the order of `take_apart`."""
    places = {id(tensor): place for place, tensor in enumerate(take_apart(value, stays=stays).tensors)}
    return with_tensors(value, lambda tensor: tensors[places[id(tensor)]], stays=stays)


def with_tensors(value: Value, function: Callable[[Tensor], Any], *, stays: Iterable[Any] = ()) -> Value:
    """The same value with a function of every tensor in its place."""
    same = {id(one) for one in stays}

    def made(part: Any) -> Any:
        if isinstance(part, CONSTANTS) or id(part) in same:
            return part
        if isinstance(part, Tensor):
            return function(part)
        if isinstance(part, tuple | list):
            return type(part)(map(made, part))
        if isinstance(part, Mapping):
            return {name: made(one) for name, one in part.items()}
        return replace(part, **{field.name: made(getattr(part, field.name)) for field in fields(part)})

    return made(value)


def buffers_like(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Contiguous buffers for tensors, of zeros."""
    return tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors)


def copy_into(buffers: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into their buffers; the host does not wait."""
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.copy_(tensor, non_blocking=True)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory of contiguous tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
