# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of an index: a JSON that people read and a safetensors that holds everything. Knows no trie.

The safetensors carries the JSON's text in its own header, and both carry a digest of the arrays. Each file is replaced in one
step, the safetensors first; so whatever is interrupted, it alone is a complete index, old or new, and what was altered by hand
is told from what was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

FORMAT_VERSION = 1
JSON_FILE = "constraint_index.json"
ARRAYS_FILE = "constraint_index.safetensors"
FILES = (JSON_FILE, ARRAYS_FILE)

Arrays = dict[str, npt.NDArray[Any]]


def save(directory: Path, description: Mapping[str, Any], arrays: Arrays) -> None:
    """Write both files; until the moment of replacement an older index in the folder is untouched."""
    text = json.dumps({"format_version": FORMAT_VERSION, **description, "sha256": _digest(arrays)}, indent=2) + "\n"
    with tempfile.TemporaryDirectory(prefix=".constraint_index-", dir=directory) as work:
        new_arrays, new_json = Path(work, ARRAYS_FILE), Path(work, JSON_FILE)
        save_file(arrays, new_arrays, metadata={"constraint_index": text})
        new_json.write_text(text, encoding="utf-8")
        for path in (new_arrays, new_json):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(new_arrays, directory / ARRAYS_FILE)
        os.replace(new_json, directory / JSON_FILE)


def load(directory: Path) -> tuple[dict[str, Any], Arrays]:
    """Read both files, checked against each other.

    Raises:
        ValueError: a file that is missing, cut short, altered, of a newer format, or not safetensors.
    """
    for name in FILES:
        if not (directory / name).is_file():
            raise ValueError(
                f"{directory} has no {name}, expected both {JSON_FILE} and {ARRAYS_FILE}: is it an index's folder?"
            )
    described = _read_description((directory / JSON_FILE).read_bytes(), directory / JSON_FILE)
    path = directory / ARRAYS_FILE
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            arrays: Arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is no safetensors file or is cut short ({error}); hf_gr never unpickles: download it or save it again"
        ) from error
    if "constraint_index" not in metadata:
        raise ValueError(f"{path} holds no constraint index, expected what ConstraintIndex.save_pretrained writes")
    embedded = _read_description(metadata["constraint_index"].encode(), path)
    altered = described != embedded and described.get("sha256") == embedded.get("sha256")
    if altered or _digest(arrays) != embedded.get("sha256"):
        altered_path = directory / JSON_FILE if altered else path
        raise ValueError(f"{altered_path} was altered after it was saved: download it or save it again")
    return embedded, arrays


def _read_description(text: bytes, path: Path) -> dict[str, Any]:
    try:
        description = json.loads(text)
        version = description["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no description of a constraint index: download it or save it again") from error
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version!r}, expected 1 to {FORMAT_VERSION}: "
            'a newer hf_gr wrote it; pip install -U "hf-gr"'
        )
    return description


def _digest(arrays: Arrays) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
