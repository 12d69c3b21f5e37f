# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of a draft head, in NumPy: byte for byte those of `hf_gr.torch.head_storage`. Knows no head.

As with an index (`hf_gr.paired_files`): where an interrupted save left texts that differ, that of the tensors holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from hf_gr import paired_files

FORMAT_VERSION = 1
JSON_FILE = "draft_head_config.json"
TENSORS_FILE = "draft_head.safetensors"
FILES = (JSON_FILE, TENSORS_FILE)
PLACEHOLDERS = "placeholder_embeddings"  # `[L, E]`: rows of the model's embeddings, where they are known

Tensor = npt.NDArray[Any]


def save(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    placeholder_embeddings: Tensor | None = None,
    card: str | None = None,
) -> None:
    """Write both files and, unless the folder has one already, a card.

    Everything is written and on the disk before the first file is replaced; until then an older head is untouched.

    Raises:
        ValueError: a file in the folder's place.
        OSError: a file that cannot be written, such as on a full disk.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"save_directory={str(directory)!r} is a file, expected a folder: name another one")
    directory.mkdir(parents=True, exist_ok=True)
    given = dict(tensors) if placeholder_embeddings is None else {**tensors, PLACEHOLDERS: placeholder_embeddings}
    kept = {name: np.ascontiguousarray(tensor) for name, tensor in given.items()}
    fields = {"format_version": FORMAT_VERSION, **config, "tensors_sha256": _tensors_digest(kept)}
    text = paired_files.to_text(fields, sort_keys=True)

    def write_tensors(path: Path) -> None:
        # One entry: safetensors writes several in any order, and equal heads are to be equal files.
        safetensors.numpy.save_file(kept, path, metadata={"draft_head": text})

    paired_files.write(directory, text, write_tensors, json_file=JSON_FILE, tensors_file=TENSORS_FILE, card=card)


def load(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config's fields and the tensors.

    Raises:
        ValueError: a file that is missing, cut short, altered, of a newer format, or not safetensors.
    """
    for name in FILES:
        if not (directory / name).is_file():
            raise ValueError(
                f"{directory} has no {name}, expected both {JSON_FILE} and {TENSORS_FILE}: download the draft head or "
                "save it again"
            )
    _read((directory / JSON_FILE).read_bytes(), directory / JSON_FILE)
    path = directory / TENSORS_FILE
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # whatever is wrong with bytes that are no safetensors
        raise ValueError(
            f"{path} is no safetensors file or is cut short ({error}); hf_gr never unpickles: "
            "download it or save it again"
        ) from error
    if "draft_head" not in metadata:
        raise ValueError(
            f"{path} holds no draft head, expected what save_pretrained writes: download it or save it again"
        )
    fields = _read(metadata["draft_head"].encode(), path)
    if fields.pop("tensors_sha256", None) != _tensors_digest(tensors):
        raise paired_files.altered(path)
    return fields, tensors


def check_tensors(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of a head.

    Args:
        expected: shapes by name.
        given: what was read.

    Raises:
        ValueError: one that is missing, unknown, or of another shape or kind: codebooks alone are integers.
    """
    for name in sorted({*expected, *given}):
        if name not in given:
            raise ValueError(f"there is no {name}")
        if name not in expected:
            raise ValueError(f"there is {name}, which the config does not speak of")
        is_integer = np.issubdtype(given[name].dtype, np.integer)
        if given[name].shape != expected[name] or is_integer != name.startswith("codebook_"):
            raise ValueError(
                f"{name} is {given[name].dtype} of shape {list(given[name].shape)}, expected {list(expected[name])} "
                "as in the config"
            )


def _read(text: bytes, path: Path) -> dict[str, Any]:
    """The fields of a config."""
    description = paired_files.read_text(text, path, what="a draft head", newest=FORMAT_VERSION)
    return {name: value for name, value in description.items() if name not in ("format_version", "sha256")}


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Of types by PyTorch's names, in which the format was defined."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} torch.{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()
