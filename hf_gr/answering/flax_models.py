# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Models in Flax that answer: loaded, told apart, and given prompts. Knows no users. `torch_models` is its twin."""

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hf_gr.catalogue.sequences import is_integer
from hf_gr.files.hub import check_revision, naming_model
from hf_gr.flax.devices import DATA, MODEL
from hf_gr.flax.devices import to_mesh as on_devices
from hf_gr.flax.families import to_spec
from hf_gr.flax.model import FlaxModel
from hf_gr.generation.flax.loading import enable, load
from hf_gr.generation.flax.prompts import prompt_bucket
from hf_gr.generation.models import UNDECIDING

from .backends import Alone, refuse
from .batching import make_even_batches
from .loading import check_name, padded

name = "flax"
foreign = {
    "device": "pass mesh=, or choose the platform by the environment's JAX_PLATFORMS",
    "device_map": "pass mesh=(devices of rows, devices of weights)",
}
is_compiled = True


def why_not(model: str | Path, given: Mapping[str, Any]) -> str | None:
    """Why JAX cannot run a model by name with these options; None if it can, as far as is known."""
    from transformers import AutoConfig

    try:
        to_spec(AutoConfig.from_pretrained(model, revision=given.get("revision") or "main"))
    except NotImplementedError as error:
        return str(error)
    except (OSError, ValueError):
        pass  # loading says it better
    return next((f"{option}={given[option]!r}" for option in foreign if given.get(option) is not None), None)


def processes() -> Any:
    """See `torch_models.processes`."""
    number = os.environ.get("WORLD_SIZE", "1")
    if number != "1":
        raise ValueError(
            f"{number} processes were started, expected one for a model in Flax, which runs on all local devices: "
            "start it without a launcher, with mesh= for some devices only"
        )
    return Alone()


def load_model(model: Any, *, dtype: Any, device: Any, device_map: Any, revision: str | None, processes: Any) -> Any:
    """See `torch_models.load_model`."""
    refuse(name, foreign, {"device": device, "device_map": device_map})
    if not isinstance(model, (str, Path)):
        for option, value in (("dtype", None if dtype == "auto" else dtype), ("revision", revision)):
            if value is not None:
                raise ValueError(f"{option}= with a loaded model, expected none: load it with that, or pass its name")
        return enable(model)
    check_name(model)
    check_revision(model, revision)
    given = {} if revision is None else {"revision": revision}
    with naming_model(model, "model"):
        return load(model, dtype=dtype, **given)


def load_draft_model(draft_model: Any, model: Any) -> Any:
    """See `torch_models.load_draft_model`."""
    if not isinstance(draft_model, (str, Path)):
        return draft_model
    check_name(draft_model, argument="assistant_model")
    return load(draft_model, dtype=model.dtype)


def num_embeddings(model: FlaxModel) -> int | None:
    """See `torch_models.num_embeddings`."""
    return model.config.vocab_size


def fingerprint(model: FlaxModel) -> str:
    """See `torch_models.fingerprint`."""
    config = model.config.to_dict()
    digest = hashlib.sha256(type(model).__name__.encode())
    for name in sorted(set(config) - UNDECIDING):
        digest.update(f"{name} {config[name]!r}".encode())
    for name, parameter in sorted(model.named_arrays().items()):
        array = np.ascontiguousarray(parameter)
        digest.update(f"{name} {list(array.shape)} {array.dtype}".encode())
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


def hardware(model: FlaxModel, *, num_processes: int, mesh: Any) -> str:
    """See `torch_models.hardware`."""
    on = on_devices(mesh)
    devices = jax.local_devices()[:1] if on is None else list(on.devices.flat)
    return f"{len(devices)} x {devices[0].device_kind}, {model.dtype}, jax {jax.__version__}"


def to_mesh(mesh: Any) -> Mesh | None:
    """See `torch_models.to_mesh`: a mesh, or its numbers of devices `(data, model)`."""
    if mesh is None:
        return None
    if isinstance(mesh, Mesh):
        return on_devices(mesh)
    sizes = list(mesh) if isinstance(mesh, (list, tuple)) else []
    if len(sizes) != 2 or not all(is_integer(size) and size > 0 for size in sizes):
        raise ValueError(
            f"mesh={mesh!r}, expected a jax.sharding.Mesh, or devices of rows and of weights, such as (4, 2)"
        )
    number, there = sizes[0] * sizes[1], jax.local_devices()
    if number > len(there):
        raise ValueError(f"mesh={mesh!r} has {number} devices, expected at most {len(there)}, which are here")
    return on_devices(jax.make_mesh(tuple(sizes), (DATA, MODEL), devices=there[:number]))


def prompts(model: FlaxModel, batch: Sequence[Sequence[int]]) -> dict[str, Any]:
    """See `torch_models.prompts`: `generate` moves them."""
    return padded(model, batch)


def draw_seeds(number: int) -> list[int]:
    """See `torch_models.draw_seeds`: from the system, as `generate` does without a key."""
    return [secrets.randbits(63) for _ in range(number)]


def make_batches(lengths: Sequence[int], *, token_budget: int, tokens_ahead: int, mesh: Any) -> list[list[int]]:
    """See `torch_models.make_batches`: of as few shapes as there are buckets of prompts."""
    on = on_devices(mesh)
    return make_even_batches(
        lengths,
        token_budget=token_budget,
        tokens_ahead=tokens_ahead,
        padded_length=prompt_bucket,
        num_devices=1 if on is None else on.shape[DATA],
    )
