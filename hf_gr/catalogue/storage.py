# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of an index: a JSON that people read and a safetensors that holds everything. Knows no trie.

The safetensors carries the JSON's text in its own header, so it alone is a complete index. Each file is replaced in
one step; whatever is interrupted, the safetensors is the old index or the new one. The text carries digests of itself
and of the arrays: a file that was altered is told from one that an interrupted save left behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import safetensors.numpy

FORMAT_VERSION = 1
JSON_FILE = "constraint_index.json"
ARRAYS_FILE = "constraint_index.safetensors"
CARD_FILE = "README.md"
FILES = (JSON_FILE, ARRAYS_FILE)

Arrays = dict[str, npt.NDArray[Any]]


def save(directory: Path, description: Mapping[str, Any], arrays: Arrays, *, card: str) -> None:
    """Write both files and, unless the folder has a card already, `card`.

    Everything is written and on the disk before the first file is replaced; until then an older index is untouched.
    """
    fields = {"format_version": FORMAT_VERSION, **description, "arrays_sha256": _arrays_digest(arrays)}
    text = json.dumps({**fields, "sha256": _description_digest(fields)}, indent=2) + "\n"
    with tempfile.TemporaryDirectory(prefix=".constraint_index-", dir=directory) as folder:
        work = Path(folder)
        cast(Any, safetensors.numpy).save_file(arrays, work / ARRAYS_FILE, metadata={"constraint_index": text})
        (work / JSON_FILE).write_text(text, encoding="utf-8", newline="\n")
        (work / ARRAYS_FILE).chmod((work / JSON_FILE).stat().st_mode)  # safetensors makes files for their owner alone
        names = [ARRAYS_FILE, JSON_FILE]
        if not (directory / CARD_FILE).exists():  # it may be a model's
            (work / CARD_FILE).write_text(card, encoding="utf-8", newline="\n")
            names.append(CARD_FILE)
        for name in names:
            with (work / name).open("rb+") as file:
                os.fsync(file.fileno())
        for name in names:
            (work / name).replace(directory / name)


def load(directory: Path) -> tuple[dict[str, Any], Arrays]:
    """Read both files, checked against their digests.

    Raises:
        ValueError: a file that is missing, cut short, altered, of a newer format, or not safetensors.
    """
    for name in FILES:
        if not (directory / name).is_file():
            raise ValueError(
                f"{directory} has no {name}, expected both {JSON_FILE} and {ARRAYS_FILE}: is it an index's folder?"
            )
    _read_description((directory / JSON_FILE).read_bytes(), directory / JSON_FILE)
    path = directory / ARRAYS_FILE
    try:
        with cast(Any, safetensors).safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            arrays: Arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # whatever the parser says about bytes that are no safetensors
        raise ValueError(
            f"{path} is no safetensors file or is cut short ({error}); hf_gr never unpickles: "
            "download it or save it again"
        ) from error
    if "constraint_index" not in metadata:
        raise ValueError(
            f"{path} holds no constraint index, expected what save_pretrained writes: download it or save it again"
        )
    # Where the two differ, a save was interrupted between the files: the one that came with the arrays holds.
    description = _read_description(metadata["constraint_index"].encode(), path)
    if description.get("arrays_sha256") != _arrays_digest(arrays):
        raise _altered(path)
    return description, arrays


def _read_description(text: bytes, path: Path) -> dict[str, Any]:
    try:
        description = json.loads(text)
        version = description["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no description of a constraint index: download it or save it again") from error
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version}, expected at most {FORMAT_VERSION}: a newer hf_gr wrote it; "
            'pip install -U "hf-gr"'
        )
    fields = {name: value for name, value in description.items() if name != "sha256"}
    if description.get("sha256") != _description_digest(fields):
        raise _altered(path)
    return description


def _altered(path: Path) -> ValueError:
    return ValueError(f"{path} was altered after it was saved, expected its own digest: download it or save it again")


def _description_digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _arrays_digest(arrays: Arrays) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
