# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A JSON for people beside a safetensors that holds everything. Knows neither arrays nor what they mean.

The safetensors carries the JSON's text in its own header, and each file is replaced in one step: after any
interruption, loading gives the old pair or the new one. The text carries a digest of itself, which tells an altered
file from one of an interrupted save.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .atomic import os_errors, replaced_files

CARD_FILE = "README.md"

Tensors = TypeVar("Tensors")


def to_text(fields: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """A description as JSON, with its digest."""
    return json.dumps({**fields, "sha256": digest(fields)}, indent=2, sort_keys=sort_keys) + "\n"


def read(
    directory: Path,
    read_tensors: Callable[[Path], tuple[Mapping[str, str], Tensors]],
    *,
    json_file: str,
    tensors_file: str,
    newest: int,
    fix: str,
) -> tuple[dict[str, Any], Tensors]:
    """Read the description and the tensors; if a save was interrupted between the two files, the tensors' description.

    `tensors_file` without its suffix is the metadata key of the description, and what the files hold; `fix` is for a
    missing file. A `ValueError` names a file that is missing, truncated, altered, of a newer format or another kind.
    """
    for name in (json_file, tensors_file):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} has no {name}, expected both {json_file} and {tensors_file}: {fix}")
    entry = Path(tensors_file).stem
    what, path = entry.replace("_", " "), directory / tensors_file
    _read_text((directory / json_file).read_bytes(), directory / json_file, what=what, newest=newest)
    try:
        metadata, tensors = read_tensors(path)
    except Exception as error:  # bytes that are not safetensors fail in many ways
        raise ValueError(
            f"{path} is no safetensors file or is cut short ({error}); hf_gr never unpickles: "
            "download it or save it again"
        ) from error
    text = metadata.get(entry) if isinstance(metadata, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f"{path} holds no {what}, expected what save_pretrained writes: download it or save it again")
    return _read_text(text, path, what=what, newest=newest), tensors


def _read_text(text: str | bytes, path: Path, *, what: str, newest: int) -> dict[str, Any]:
    """The description of `what`, such as "draft head", that `to_text` wrote, its digest included."""
    try:
        description = json.loads(text)
        version = description["format_version"]
        fields = {name: value for name, value in description.items() if name != "sha256"}
        is_altered = description.get("sha256") != digest(fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no description of a {what}: download it or save it again") from error
    if isinstance(version, int) and version > newest:
        raise ValueError(
            f"{path} has format_version {version}, expected at most {newest}: a newer hf_gr wrote it; "
            'pip install -U "hf-gr"'
        )
    if is_altered:
        raise altered(path)
    return description


def write(
    directory: Path,
    text: str,
    write_tensors: Callable[[Path], None],
    *,
    json_file: str,
    tensors_file: str,
    card: str | None = None,
) -> None:
    """Write both files and, unless the folder has one already, a card; `write_tensors` puts the text into the header.

    Everything is on disk before the first file is replaced; until then an older pair is untouched.
    """
    with replaced_files(directory, first=(tensors_file, json_file)) as work:
        with os_errors(directory / tensors_file):
            write_tensors(work / tensors_file)
        (work / json_file).write_text(text, encoding="utf-8", newline="\n")
        if card is not None and not (directory / CARD_FILE).exists():  # it may be a model's
            (work / CARD_FILE).write_text(card, encoding="utf-8", newline="\n")


def altered(path: Path) -> ValueError:
    """The error for a file that does not match its own digest."""
    return ValueError(f"{path} was altered after it was saved, expected its own digest: download it or save it again")


def digest(fields: Mapping[str, Any]) -> str:
    """SHA-256 of a description."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
