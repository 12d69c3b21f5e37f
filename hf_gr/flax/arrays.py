# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""How the Flax side writes and reads arrays. Does not know what they mean."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer

# Where arrays live: a device, a sharding over several, or None for JAX's own choice.
Device = Any
# NumPy's before and after a program, which moves its arguments; inside it, JAX's.
HostOrDevice = jax.Array | np.ndarray
# Numbers that change from call to call without another program: NumPy's before it, arrays inside it.
Number = float | np.floating | Float[Array, ""]
WholeNumber = int | np.integer | Int[Array, ""]


def is_on_host(array: Any) -> bool:
    """Whether an array's numbers are in the host's memory."""
    if isinstance(array, np.ndarray):
        return True
    return not isinstance(array, Tracer) and {device.platform for device in array.devices()} == {"cpu"}


def stacked(arrays: Sequence[Any]) -> Any:
    """Arrays of one shape along a new first axis; in NumPy if they are in the host's memory."""
    if all(is_on_host(array) for array in arrays):  # compiles no program for every shape
        return np.stack([np.asarray(array) for array in arrays])
    return jnp.stack(arrays)


def view(array: Any) -> Any:
    """NumPy's view of an array in the host's memory, of which parts are taken without a program; else the array."""
    return np.asarray(array) if is_on_host(array) else array


def padded(array: npt.NDArray[Any], size: int, fill: Any = 0, *, axis: int = 0, in_front: bool = False) -> Any:
    """An array padded to a size along an axis, at its end or `in_front`; the array itself if nothing is missing."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    shape = list(array.shape)
    shape[axis] = missing
    filling = np.full(shape, fill, dtype=array.dtype)
    return np.concatenate([filling, array] if in_front else [array, filling], axis=axis)


def along(values: Array, places: Array, *, axis: int = 1) -> Array:
    """`jnp.take_along_axis` of places that are within range, which saves the checks."""
    return jnp.take_along_axis(values, places, axis=axis, mode="promise_in_bounds")


def windows(values: Integer[Array, " _"], starts: Int[Array, "*shape"], *, size: int) -> Integer[Array, "*shape size"]:
    """`size` consecutive values from each start on; the first or the last ones for windows out of range.

    On a CPU copying whole windows is up to ten times faster than one index for every value.
    """
    how = lax.GatherDimensionNumbers(offset_dims=(starts.ndim,), collapsed_slice_dims=(), start_index_map=(0,))
    return lax.gather(values, starts[..., None], how, (size,), mode="clip")


def where_rows(rows: Bool[Array, " batch"], new: Any, old: Any) -> Any:
    """New values for some rows."""
    return jax.tree.map(
        lambda new, old: jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old.astype(new.dtype)), new, old
    )
