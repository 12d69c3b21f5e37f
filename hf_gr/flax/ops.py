# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf_gr.core.ops` in JAX; and what is made of these arrays, as arguments of programs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from hf_gr.core import beam
from hf_gr.core.best_first import Prefixes

from .arrays import along as take_along

exp, log, where, expand, concat = jnp.exp, jnp.log, jnp.where, jnp.broadcast_to, jnp.concatenate
log_softmax, argsort = partial(jax.nn.log_softmax, axis=-1), partial(jnp.argsort, axis=-1, stable=True)
smallest, largest = partial(jnp.min, axis=-1, keepdims=True), partial(jnp.max, axis=-1, keepdims=True)


def full(shape: Sequence[int], value: bool | int | float, like: Any) -> Array:  # noqa: D103
    return jnp.full(shape, value, {bool: jnp.bool_, int: jnp.int32, float: jnp.float32}[type(value)])


def arange(number: int, like: Any) -> Array:  # noqa: D103
    return jnp.arange(number, dtype=jnp.int32)


def fill(values: Array, flags: Array, number: int | float | Array) -> Array:  # noqa: D103
    return jnp.where(flags, number, values)


def along(values: Array, places: Array) -> Array:  # noqa: D103
    return take_along(values, places if places.ndim == values.ndim else places[..., None])


def pick(values: Array, places: Array) -> Array:  # noqa: D103
    return take_along(values, places[..., None], axis=-1)[..., 0]


def pad(values: Array, number: int, fill: bool | int | float) -> Array:  # noqa: D103
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, number)], constant_values=fill)


def topk(keys: Array, number: int) -> tuple[Array, Array]:  # noqa: D103
    # Not in blocks as in PyTorch: XLA's own top-k of 34,000 candidates is faster (0.1 ms on a CPU).
    # The barrier: where a program takes a slice of the result, XLA would sort all (80 ms instead of 0.5).
    values, places = map(lax.optimization_barrier, lax.top_k(keys, number))
    return values, places


def topk_in_order(keys: Array, numbers: Array, number: int) -> tuple[Array, Array]:  # noqa: D103
    # Sorting all is a hundred times slower on a CPU, and so is a top-k of integers: these are floats of one order.
    signed = numbers - 2**30
    size = lax.bitcast_convert_type(abs(signed) + 2**23, jnp.float32)
    worst = topk(keys, number)[0][:, -1:]
    above = jnp.where(keys > worst, jnp.inf, jnp.where(signed < 0, size, -size))
    places = topk(jnp.where(keys >= worst, above, -jnp.inf), number)[1]
    falling, _, places = lax.sort((-along(keys, places), along(numbers, places), places), num_keys=2)
    return -falling, places


def argmax(values: Array) -> Array:  # noqa: D103
    return values.argmax(-1).astype(jnp.int32)


def put(values: Array, places: Array, number: float) -> Array:  # noqa: D103
    rows = jnp.arange(len(values))[:, None]
    return values.at[rows, places].set(number, mode="promise_in_bounds")


for _made in (beam.Beams, beam.Finished):
    _names = tuple(_made.__dataclass_fields__)
    jax.tree_util.register_dataclass(_made, data_fields=_names[1:], meta_fields=_names[:1])
jax.tree_util.register_dataclass(Prefixes, data_fields=("keys", "scores", "facts"), meta_fields=("ops", "max_length"))
