# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of a draft head: a JSON that people read and a safetensors that holds everything. Knows no head.

As with an index, the safetensors carries the JSON's text in its own header, and each file is replaced in one step:
whatever is interrupted, what is loaded is the old head or the new one. Where the texts differ, that of the tensors
holds; a text that was altered is told from an older one by its digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

FORMAT_VERSION = 1
JSON_FILE = "draft_head_config.json"
TENSORS_FILE = "draft_head.safetensors"
CARD_FILE = "README.md"
FILES = (JSON_FILE, TENSORS_FILE)
PLACEHOLDERS = "placeholder_embeddings"  # `[L, E]`: rows of the model's embeddings, where they are known


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
    # Copies: tensors of a model may share memory, which safetensors refuses.
    kept = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in given.items()}
    fields = {"format_version": FORMAT_VERSION, **config, "tensors_sha256": _tensors_digest(kept)}
    text = json.dumps({**fields, "sha256": _digest(fields)}, indent=2, sort_keys=True) + "\n"
    with tempfile.TemporaryDirectory(prefix=".draft_head-", dir=directory) as folder:
        work = Path(folder)
        try:
            # One entry: safetensors writes several in any order, and equal heads are to be equal files.
            safetensors.torch.save_file(kept, work / TENSORS_FILE, metadata={"draft_head": text})
        except safetensors.SafetensorError as error:  # a full disk, for one
            raise OSError(f"{directory / TENSORS_FILE} cannot be written: {error}") from error
        (work / JSON_FILE).write_text(text, encoding="utf-8", newline="\n")
        (work / TENSORS_FILE).chmod((work / JSON_FILE).stat().st_mode)  # safetensors makes files for their owner alone
        names = [TENSORS_FILE, JSON_FILE]
        if card is not None and not (directory / CARD_FILE).exists():  # it may be a model's
            (work / CARD_FILE).write_text(card, encoding="utf-8", newline="\n")
            names.append(CARD_FILE)
        for name in names:
            with (work / name).open("rb+") as file:
                os.fsync(file.fileno())
        for name in names:
            (work / name).replace(directory / name)


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
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            # Copies, so that the file may be replaced while the head is in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
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
        raise _altered(path)
    return fields, tensors


def check_tensors(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of a module.

    Raises:
        ValueError: one that is missing, unknown, or of another shape or kind.
    """
    for name in sorted({*expected, *given}):
        if name not in given:
            raise ValueError(f"there is no {name}")
        if name not in expected:
            raise ValueError(f"there is {name}, which the config does not speak of")
        want, have = expected[name], given[name]
        if want.shape != have.shape or want.is_floating_point() != have.is_floating_point():
            raise ValueError(
                f"{name} is {have.dtype} of shape {list(have.shape)}, expected {list(want.shape)} as in the config"
            )


def _read(text: bytes, path: Path) -> dict[str, Any]:
    try:
        description = json.loads(text)
        version = description["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no description of a draft head: download it or save it again") from error
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version}, expected at most {FORMAT_VERSION}: a newer hf_gr wrote it; "
            'pip install -U "hf-gr"'
        )
    fields = {name: value for name, value in description.items() if name != "sha256"}
    if description.get("sha256") != _digest(fields):
        raise _altered(path)
    del fields["format_version"]
    return fields


def _altered(path: Path) -> ValueError:
    return ValueError(f"{path} was altered after it was saved, expected its own digest: download it or save it again")


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
