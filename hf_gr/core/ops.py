# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The operations that the shared maths needs, in NumPy: the reference for `hf_gr.torch.ops` and `hf_gr.flax.ops`.

Everything else is written in operators and methods that all three kinds of arrays have. Places are within range.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any  # of NumPy, PyTorch or JAX


def full(shape: Sequence[int], value: bool | int | float, like: Array) -> Array:
    """An array of one number of its type, where `like` is."""
    return np.full(shape, value, {bool: bool, int: np.int64, float: np.float32}[type(value)])


def arange(number: int, like: Array) -> Array:
    """0, 1, ... where `like` is."""
    return np.arange(number)


def expand(values: Array, shape: Sequence[int]) -> Array:
    """The same numbers along new or longer axes."""
    return np.broadcast_to(values, shape)


def where(flags: Array, values: Array, others: Array) -> Array:
    """Values where a flag is true, the others elsewhere; both are arrays."""
    return np.where(flags, values, others)


def fill(values: Array, flags: Array, number: int | float) -> Array:
    """A number where a flag is true, the values elsewhere."""
    return np.where(flags, np.asarray(number, values.dtype), values)


def along(values: Array, places: Array) -> Array:
    """The values at places along axis 1; a last axis of `values` that places lack is taken whole."""
    return np.take_along_axis(values, places if places.ndim == values.ndim else places[..., None], axis=1)


def pick(values: Array, places: Array) -> Array:
    """The value at one place of each last axis."""
    return np.take_along_axis(values, places[..., None], axis=-1)[..., 0]


def concat(arrays: Sequence[Array], axis: int) -> Array:
    """Arrays one after the other."""
    return np.concatenate(arrays, axis=axis)


def pad(values: Array, number: int, fill: bool | int | float) -> Array:
    """The values, and after those of the last axis `number` more."""
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, number)], constant_values=fill)


def topk(keys: Array, number: int) -> tuple[Array, Array]:
    """The largest keys of each row, the largest first, and their places."""
    places = np.argsort(-keys, axis=-1, kind="stable")[..., :number]
    return np.take_along_axis(keys, places, axis=-1), places


def topk_in_order(keys: Array, numbers: Array, number: int) -> tuple[Array, Array]:
    """As `topk`; of equal keys those with the smallest numbers, which are 0 to less than 2 ** 31, come first."""
    places = np.lexsort((numbers, -keys), axis=-1)[..., :number]
    return np.take_along_axis(keys, places, axis=-1), places


def argmax(values: Array) -> Array:
    """The place of the largest of each last axis: the first true one, for flags."""
    return values.argmax(-1)


def argsort(values: Array) -> Array:
    """The places of each row's values in ascending order; equal ones stay in theirs. Flags: the false ones first."""
    return np.argsort(values, axis=-1, kind="stable")


def put(values: Array, places: Array, number: float) -> Array:
    """The values of each row with a number at some places."""
    values = values.copy()
    np.put_along_axis(values, places, np.asarray(number, values.dtype), axis=1)
    return values


def smallest(values: Array) -> Array:
    """The least of each row, as a column."""
    return values.min(axis=-1, keepdims=True)


def largest(values: Array) -> Array:
    """The largest of each row, as a column."""
    return values.max(axis=-1, keepdims=True)


def log_softmax(scores: Array) -> Array:
    """Log-probabilities along the last axis; NaN where all scores are `-inf`."""
    with np.errstate(invalid="ignore"):
        shifted = scores - scores.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def exp(values: Array) -> Array:
    """The exponential."""
    return np.exp(values)


def log(values: Array) -> Array:
    """The natural logarithm; `-inf` of 0."""
    with np.errstate(divide="ignore"):
        return np.log(values)
