# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of a draft head: a JSON that people read and a safetensors that holds everything. Knows no head.

It knows no framework either: each backend passes in what the files need of its own. As with an index
(`hf_gr.files.pairs`), if an interrupted save left two different texts, the one in the tensors' file holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import safetensors

from . import pairs
from .atomic import make_folder
from .draft_head_config import DraftHeadConfig
from .hub import Source

FORMAT_VERSION = 1
JSON_FILE = "draft_head_config.json"
TENSORS_FILE = "draft_head.safetensors"
FILES = (JSON_FILE, TENSORS_FILE)
PLACEHOLDERS = "placeholder_embeddings"  # `[L, E]`: rows of the model's embeddings, if known

Tensor = Any  # of a framework
Head = TypeVar("Head")


@dataclass(frozen=True)
class Framework:
    """What the files need of PyTorch, or of NumPy.

    Attributes:
        name: the framework's, as safetensors spells it.
        to_host: copies to a contiguous tensor in host memory that shares no memory with others.
        save_file: safetensors' own; takes tensors by name.
        type_name: PyTorch's name of a tensor's type: the format was defined there.
        to_bytes: the bytes of a contiguous tensor.
        is_finite: whether a tensor has neither NaN nor infinity.
    """

    name: str
    to_host: Callable[[Tensor], Tensor]
    save_file: Callable[..., None]
    type_name: Callable[[Tensor], str]
    to_bytes: Callable[[Tensor], bytes]
    is_finite: Callable[[Tensor], bool]


def save(
    framework: Framework,
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    placeholder_embeddings: Tensor | None = None,
    card: str | None = None,
) -> None:
    """Write both files and, unless the folder has one already, a card: the same bytes for every framework.

    Everything is on disk before the first file is replaced; until then an older head is untouched.

    Raises:
        ValueError: a file has the folder's name.
        OSError: a file cannot be written, for example on a full disk.
    """
    make_folder(directory)
    given = dict(tensors) if placeholder_embeddings is None else {**tensors, PLACEHOLDERS: placeholder_embeddings}
    kept = {name: framework.to_host(tensor) for name, tensor in given.items()}
    description = {"format_version": FORMAT_VERSION, **config, "tensors_sha256": _tensors_digest(framework, kept)}
    text = pairs.to_text(description, sort_keys=True)

    def write_tensors(path: Path) -> None:
        # One entry: safetensors writes several in any order, and equal heads must give equal files.
        framework.save_file(kept, path, metadata={"draft_head": text})

    pairs.write(directory, text, write_tensors, json_file=JSON_FILE, tensors_file=TENSORS_FILE, card=card)


def load(framework: Framework, directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config's fields and the tensors.

    Raises:
        ValueError: a file is missing, truncated, altered, of a newer format, or not safetensors.
    """

    def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
        with safetensors.safe_open(path, framework=framework.name) as file:
            # Copies, so that a save can replace the file while the head is in use.
            tensors = {name: framework.to_host(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors

    description, tensors = pairs.read(
        directory,
        read_tensors,
        json_file=JSON_FILE,
        tensors_file=TENSORS_FILE,
        newest=FORMAT_VERSION,
        fix="download the draft head or save it again",
    )
    if description.get("tensors_sha256") != _tensors_digest(framework, tensors):
        raise pairs.altered(directory / TENSORS_FILE)
    ours = ("format_version", "sha256", "tensors_sha256")
    return {name: value for name, value in description.items() if name not in ours}, tensors


def load_head(
    framework: Framework,
    directory: Path,
    make: Callable[[DraftHeadConfig, dict[str, Tensor], Tensor | None], Head],
) -> Head:
    """Let a backend build a head from the config, the tensors and the placeholders' embeddings (None if unknown).

    Raises:
        ValueError: as `load`; or the config or the tensors are not those of a head that can rank anything.
    """
    description, tensors = load(framework, directory)
    try:
        for name, tensor in tensors.items():
            if not framework.is_finite(tensor):
                raise ValueError(f"{name} has NaN or infinity, as after a training that diverged")
        config = DraftHeadConfig(**{field.name: description[field.name] for field in fields(DraftHeadConfig)})
        rows = tensors.pop(PLACEHOLDERS, None)
        if rows is not None and (rows.ndim != 2 or len(rows) != config.num_placeholders):
            raise ValueError(
                f"{PLACEHOLDERS} has shape {list(rows.shape)}, expected a row for each of {config.num_placeholders} "
                "placeholders"
            )
        return make(config, tensors, rows)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{directory / TENSORS_FILE} holds no draft head ({error}): download it or save it again"
        ) from error


def find(source: Source, *, force_download: bool = False) -> Path | None:
    """The folder of a checkpoint's draft head; None if the checkpoint has neither of the two files.

    Args:
        source: the checkpoint.
        force_download: download even what is cached.

    Raises:
        ValueError: one of the two files is missing.
        ConnectionError: the Hub does not answer whether there is a head.
    """
    found = dict(zip(FILES, source.find_files(FILES, force_download=force_download), strict=True))
    paths = [path for path in found.values() if path is not None]
    if not paths:
        return None
    if len(paths) < len(found):
        missing = next(name for name, path in found.items() if path is None)
        raise ValueError(
            f"{str(source.repo_or_dir)!r} has {paths[0].name} and no {missing}, expected both or neither: save the "
            f"checkpoint again, download {missing}, or delete {paths[0].name} to load the model without its draft head"
        )
    return paths[0].parent


def check_tensors(expected: Mapping[str, Sequence[int]], given: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of a head.

    Args:
        expected: shapes by name.
        given: what was read.

    Raises:
        ValueError: one is missing, unknown, or of another shape or kind: only codebooks are integers.
    """
    for name in sorted({*expected, *given}):
        if name not in given:
            raise ValueError(f"there is no {name}")
        if name not in expected:
            raise ValueError(f"there is {name}, which the config does not speak of")
        shape, have = list(expected[name]), given[name]
        if list(have.shape) != shape or ("int" in str(have.dtype)) != name.startswith("codebook_"):
            raise ValueError(f"{name} is {have.dtype} of shape {list(have.shape)}, expected {shape} as in the config")


def _tensors_digest(framework: Framework, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {framework.type_name(tensor)} {list(tensor.shape)}".encode())
        digest.update(framework.to_bytes(tensor))
    return digest.hexdigest()
