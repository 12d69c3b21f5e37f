# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in transformers' format: config.json and one or several safetensors files. Knows no forward.

Names and shapes are Hugging Face's, so that reading and writing is the identity. Headers are checked before the first
tensor is read; files are replaced after the last one is written.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from huggingface_hub import split_state_dict_into_shards_factory
from jaxtyping import Array

from hf_gr.files.atomic import make_folder, os_errors, replaced_files
from hf_gr.files.hub import Source, commit_of
from hf_gr.files.pairs import CARD_FILE

from .families import check_family
from .spec import HEAD, Spec

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")
# By safetensors' names; anything else is a quantised checkpoint.
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Tensors of older checkpoints that transformers omits, too: buffers, and a bias that T5 never used.
_LEFT_OUT = re.compile(
    r"\.rotary_emb\.inv_freq$|^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\."
    r"|h\.\d+\.attn\.(masked_)?bias$|^(model\.)?(en|de)coder\.version$"
)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def find(source: Source) -> Path:
    """The local folder of a checkpoint, downloaded if need be: all of one commit, even if another is pushed now."""
    folder = source.resolve_folder([CONFIG])
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}, expected a checkpoint of transformers: check the path")
    check_family(_read_json(folder / CONFIG).get("model_type"))  # before gigabytes are downloaded
    if source.is_folder:
        return folder
    source = source.at(commit_of(folder / CONFIG))
    single, index, _ = source.find_files([SINGLE, INDEX, GENERATION_CONFIG])
    if single is None and index is not None:
        source.resolve_folder(sorted(set(_weight_map(folder).values())))
    return folder


def load(folder: Path, spec: Spec, *, dtype: str | None) -> dict[str, Array]:
    """Read a checkpoint's parameters, on an accelerator into the host's memory.

    A head that differs from embeddings to which the config ties it is among them: as in transformers, the file wins.
    """
    files = _tensor_files(folder)
    shapes = {name: _header(file, name) for name, file in files.items() if not _LEFT_OUT.search(name)}
    spec, sources = _resolve_aliases(spec, shapes, files)
    expected = spec.shapes()
    found: dict[str, str | None] = {}
    for name, source in sources.items():
        if source is None and name not in spec.optional:
            raise ValueError(
                f"{folder} has no tensor {name}, expected one of shape {list(expected[name])}: the checkpoint and its "
                f"{CONFIG} do not belong together, or it is one without a language-modelling head"
            )
        if source is not None and shapes[source] != expected[name]:
            raise ValueError(
                f"tensor {source} of {folder} has shape {list(shapes[source])}, expected {list(expected[name])}: the "
                f"checkpoint and its {CONFIG} do not belong together"
            )
        found[name] = source
    known = {*found.values(), *spec.aliases}
    if unknown := sorted(name for name in shapes if name not in known):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"{folder} has a tensor {unknown[0]}{more}, expected only those that a model of its config has: the "
            f"checkpoint and its {CONFIG} do not belong together, or it has an adapter, which is to be merged first"
        )
    arrays: dict[str, Array] = {}
    with jax.default_device(_host()):
        for name, source in found.items():
            # An optional one that is missing is zero.
            array = np.zeros(expected[name], np.float32) if source is None else _read(files[source], source)
            dtype = dtype or str(array.dtype if array.dtype != np.float64 else np.dtype(np.float32))
            arrays[name] = jnp.asarray(array.astype(jnp.dtype(dtype), copy=False))
    return arrays


def save(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    write_configs: Callable[[Path], None],
    *,
    max_shard_size: int | str,
    card: str | None = None,
) -> None:
    """Write a checkpoint that transformers loads. An older one in the folder is replaced when all is written."""
    make_folder(folder)
    split = split_state_dict_into_shards_factory(
        dict(arrays),
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    with replaced_files(folder) as work:
        write_configs(work)
        for name, tensors in split.filename_to_tensors.items():
            kept = {tensor: np.ascontiguousarray(arrays[tensor]) for tensor in tensors}
            with os_errors(folder / name):
                safetensors.numpy.save_file(kept, work / name, metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (work / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if card is not None and not (folder / CARD_FILE).exists():
            (work / CARD_FILE).write_text(card, encoding="utf-8", newline="\n")
        written = {path.name for path in work.iterdir()}
    for path in folder.iterdir():  # of an older checkpoint: another number of files
        is_weights = path.name in (SINGLE, INDEX) or _SHARD.fullmatch(path.name)
        if is_weights and path.name not in written:
            path.unlink()


def check_dtype(dtype: Any) -> str | None:
    """The name of a type of parameters; None for "the checkpoint's own"."""
    if dtype is None or dtype == "auto":
        return None
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(
            f"dtype={dtype!r}, expected 'auto' or one of {', '.join(DTYPES)}, as a name or as jax.numpy's"
        )
    return name


def _resolve_aliases(
    spec: Spec, shapes: Mapping[str, tuple[int, ...]], files: Mapping[str, Path]
) -> tuple[Spec, dict[str, str | None]]:
    """From every parameter to the tensor that it is read from, None if there is none; transformers' rules for ties."""
    for alias, name in spec.aliases.items():
        if alias not in shapes or name not in shapes:
            continue
        if shapes[alias] == shapes[name] and np.array_equal(_read(files[alias], alias), _read(files[name], name)):
            continue
        if alias != HEAD:
            raise NotImplementedError(
                f"tensor {alias} differs from {name}, expected the same: embeddings of their own are not implemented "
                "in Flax; use backend='torch'"
            )
        spec = spec.untie()
    sources: dict[str, str | None] = {name: name if name in shapes else None for name in spec.shapes()}
    for alias, name in spec.aliases.items():
        if sources[name] is None and alias in shapes:
            sources[name] = alias
    return spec, sources


def _tensor_files(folder: Path) -> dict[str, Path]:
    """From every tensor's name to its file."""
    has_one = (folder / SINGLE).is_file()
    if not has_one and not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has no {SINGLE} and no {INDEX}, expected one of them: save the checkpoint as safetensors, "
            "with save_pretrained"
        )
    files: dict[str, Path] = {}
    for shard in [SINGLE] if has_one else sorted(set(_weight_map(folder).values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise ValueError(f"{folder} has no {shard}, which {INDEX} names: download or save the checkpoint again")
        with _open(folder / shard) as file:
            files |= {name: folder / shard for name in file.keys()}  # noqa: SIM118
    return files


def _weight_map(folder: Path) -> dict[str, str]:
    found = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(shard, str) for shard in found.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map, expected the file of every tensor: download it again")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: download it or save it again") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no JSON object: download it or save it again")
    return fields


def _header(path: Path, name: str) -> tuple[int, ...]:
    """A tensor's shape."""
    with _open(path) as file:
        found = file.get_slice(name)
        if found.get_dtype() not in _FLOATS:
            raise ValueError(
                f"tensor {name} of {path} has type {found.get_dtype()}, expected one of {', '.join(sorted(_FLOATS))}: "
                "quantised checkpoints are not implemented in Flax; use backend='torch'"
            )
        return tuple(found.get_shape())


def _read(path: Path, name: str) -> np.ndarray:
    with _open(path) as file:
        return file.get_tensor(name)


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}): download it or save it again") from error


def _host() -> Any:
    """The host, so that an accelerator holds no copy but the one that it decodes with; None if JAX may not use it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
