# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Several devices: the rows of a batch over the axis "data", the model over "model". Knows no trie and no beams.

Over "data" every device runs the one-device program on its own rows, with the catalogue and the model in its memory:
nothing is exchanged. Over "model" the weights are sharded, and XLA's partitioner adds the exchanges.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hf_gr.core.widths import bucket

from .best_first import best_first
from .decode import Decoded, decode
from .noise import Noise
from .scorers import Params, Prompt, Scorer
from .scores import DecodePlan
from .transition import DeviceCatalogue

DATA, MODEL = "data", "model"
# The axis of a parameter `[*layers, out, in]` that is sharded over "model": outputs or inputs; a parameter that fits
# neither pattern is on every device. Two products, one of each kind, then need one exchange: Megatron-LM, section 3.
OUTPUTS = re.compile(
    r"((q|k|v|gate|up)_proj|(Self|EncDec)Attention\.[qkv]|wi(_[01])?|c_fc|fc1|embed_tokens|shared|lm_head)\.(weight|bias)$"
)
INPUTS = re.compile(r"((o|out|down|c)_proj|(Self|EncDec)Attention\.o|wo|fc2)\.weight$")


def to_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh `[data, model]` of a call, by default over all local devices; None for a single one."""
    if mesh is None:
        return _all_local_devices()
    if not isinstance(mesh, Mesh):
        raise ValueError(f'mesh is a {type(mesh).__name__}, expected jax.make_mesh((4, 2), ("{DATA}", "{MODEL}"))')
    if not mesh.axis_names or not set(mesh.axis_names) <= {DATA, MODEL}:
        raise ValueError(f'mesh has the axes {mesh.axis_names}, expected "{DATA}", "{MODEL}" or both')
    if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise ValueError("mesh has devices of other processes, expected local ones: have each decode its own rows")
    devices = mesh.devices.T if mesh.axis_names == (MODEL, DATA) else mesh.devices
    return _mesh(tuple(devices.flat), mesh.shape.get(MODEL, 1))


def num_rows_on(mesh: Mesh | None, num_rows: int) -> int:
    """The rows of a program for `num_rows`: a power of two for each device along "data"."""
    devices = 1 if mesh is None else mesh.shape[DATA]
    return devices * bucket(-(-num_rows // devices))


@contextmanager
def settings_of_ours(mesh: Mesh | None) -> Iterator[None]:
    """JAX's settings as our programs need them, whatever the caller has set: context mesh, promotions, transfers."""
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
        nullcontext() if mesh is None else jax.set_mesh(mesh),
    ):
        yield


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """On every device of a mesh; JAX's default device without one."""
    return None if mesh is None else NamedSharding(mesh, P())


def parameter_sharding(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Where a parameter `[*layers, out, in]`, or a bias `[*layers, out]`, is on a mesh.

    An axis that the number of devices along "model" does not divide stays whole.
    """
    axis = None
    if OUTPUTS.search(name):
        axis = len(shape) - (1 if name.endswith(".bias") else 2)
    elif INPUTS.search(name):
        axis = len(shape) - 1
    if axis is None or shape[axis] % mesh.shape[MODEL]:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*[MODEL if place == axis else None for place in range(len(shape))]))


@partial(jax.jit, static_argnames=("mesh", "scorer"))
def decode_on_mesh(
    mesh: Mesh,
    scorer: Scorer,
    params: Params,
    catalogue: DeviceCatalogue,
    prompt: Prompt,
    plan: DecodePlan,
    noise: Noise | None = None,
    draft_params: Params | None = None,
) -> Decoded:
    """`decode`, or `best_first`, on several devices: parameters and catalogue are there, "data" divides the rows."""
    loop: Any = best_first if plan.max_nodes else decode
    if mesh.shape[MODEL] > 1:
        prompt, noise = lax.with_sharding_constraint((prompt, noise), NamedSharding(mesh, P(DATA)))
        return loop(scorer, params, catalogue, prompt, plan, noise, draft_params)
    if plan.output_scores or plan.output_logits:  # of every level that any row needs
        plan = replace(plan, rows_axis=DATA)
    given = (params, catalogue, prompt, plan, noise, draft_params)
    rows = P(DATA)
    where = dict.fromkeys(("trie", "alive", "bias", "groups"), P()) | dict.fromkeys(("rule_of_row", "hidden"), rows)
    of_catalogue = replace(
        catalogue, **{name: None if getattr(catalogue, name) is None else at for name, at in where.items()}
    )
    specs = (P(), of_catalogue, rows, P(), None if noise is None else rows, P())  # pyright: ignore
    run = jax.shard_map(partial(loop, scorer), mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return run(*given)


@cache
def _all_local_devices() -> Mesh | None:
    devices = tuple(jax.local_devices())
    return _mesh(devices, 1) if len(devices) > 1 else None


def _mesh(devices: tuple[Any, ...], num_model: int) -> Mesh:
    grid = np.array(devices).reshape(-1, num_model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))
