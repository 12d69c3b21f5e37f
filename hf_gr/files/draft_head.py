# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of a draft head: a JSON that people read and a safetensors that holds everything. Knows no head.

It knows no framework either: backends bring safetensors' module for their tensors, and make tensors of bytes. As with
an index (`hf_gr.files.pairs`), if an interrupted save left two different texts, the one in the tensors' file holds.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
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
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
# By type: integers of as many bits, and those of the exponent, which are all set in NaN and infinity.
EXPONENTS = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0xFF << 23), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}

NUM_BLOCKS, BLOCK = 64, 4096  # of a file of weights, which tell it from that of another save

Tensor = Any  # of a framework
Raw = dict[str, dict[str, Any]]  # type, shape and bytes by name, as `safetensors.deserialize` has them
Head = TypeVar("Head")


def save(
    module: Any, directory: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], *, card: str | None
) -> None:
    """Write both files and, unless the folder has one already, a card: the same bytes for every framework.

    In the folder of a model, whose weights are written before, the head names them, and loads with no others.
    `module` is safetensors' own for these tensors, which are contiguous and in host memory. An `OSError` for a full
    disk: until everything is written, an older head is untouched.
    """
    make_folder(directory)
    fields = {"format_version": FORMAT_VERSION, **config}
    fields["tensors_sha256"] = _digest(safetensors.deserialize(module.save(tensors)))
    if weights := _probe_weights(directory):
        fields["weights"] = weights
    text = pairs.to_text(fields, sort_keys=True)

    def write_tensors(path: Path) -> None:
        # One entry: safetensors writes several in any order, and equal heads must give equal files.
        module.save_file(tensors, path, metadata={"draft_head": text})

    pairs.write(directory, text, write_tensors, json_file=JSON_FILE, tensors_file=TENSORS_FILE, card=card)


def load(directory: Path) -> tuple[dict[str, Any], Raw]:
    """Read the config's fields and the tensors; a `ValueError` names a file that is damaged."""
    description, raw = pairs.read(
        directory,
        _read_tensors,
        json_file=JSON_FILE,
        tensors_file=TENSORS_FILE,
        newest=FORMAT_VERSION,
        fix="download the draft head or save it again",
    )
    if description.get("tensors_sha256") != _digest(raw.items()):
        raise pairs.altered(directory / TENSORS_FILE)
    found = _probe_weights(directory)
    for name, digest in description.get("weights", {}).items():  # heads of before 0.2 name none
        if found.get(name, digest) != digest:
            raise ValueError(
                f"{directory / TENSORS_FILE} was saved with other weights than those in {name}, expected those of one "
                f"save: an interrupted one left both, or a file was copied; save the model with its head again, or "
                f"delete {' and '.join(FILES)} to load the model without it"
            )
    ours = ("format_version", "sha256", "tensors_sha256", "weights")
    return {name: value for name, value in description.items() if name not in ours}, raw


def load_head(
    directory: Path,
    to_tensor: Callable[[str, list[int], bytes], Tensor],
    make: Callable[[DraftHeadConfig, dict[str, Tensor], Tensor | None], Head],
) -> Head:
    """Let a backend build a head from the config, the tensors and the placeholders' embeddings (None if unknown).

    `to_tensor` takes a type such as `"float32"`, a shape and bytes. A `ValueError` for damaged files, and for a config
    or tensors that make no usable head.
    """
    description, raw = load(directory)
    try:
        for name, each in raw.items():
            kind, exponent = EXPONENTS.get(each["dtype"], ("<u1", 0))
            if exponent and (np.frombuffer(each["data"], kind) & exponent == exponent).any():
                raise ValueError(f"{name} has NaN or infinity, as if its training diverged")
        given = {"code_book": {}, **description}
        config = DraftHeadConfig(**{field.name: given[field.name] for field in fields(DraftHeadConfig)})
        tensors = {
            name: to_tensor(TYPES[each["dtype"]], each["shape"], bytes(each["data"])) for name, each in raw.items()
        }
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

    A `ValueError` if one of them is missing; a `ConnectionError` if the Hub does not say whether there is a head.
    """
    found = source.find_files(FILES, force_download=force_download)
    there = next((path for path in found if path is not None), None)
    if there is not None and None in found:
        missing = FILES[found.index(None)]
        raise ValueError(
            f"{str(source.repo_or_dir)!r} has {there.name} and no {missing}, expected both or neither: save the "
            f"checkpoint again, download {missing}, or delete {there.name} to load the model without its draft head"
        )
    return None if there is None else there.parent


def check_codebooks(config: DraftHeadConfig, codebooks: Sequence[Any]) -> None:
    """Refuse codebooks that are not those of a config."""
    sizes = tuple(len(set(tokens)) for tokens in codebooks)
    if sizes != config.codebook_sizes or sizes != tuple(map(len, codebooks)):
        raise ValueError(
            f"codebooks have {sizes} distinct tokens, expected {config.codebook_sizes} as in the config, each once"
        )
    if any(min(tokens) < 0 for tokens in codebooks):
        raise ValueError("codebooks have a token below 0, expected token ids of the model's vocabulary")


def check_tensors(expected: Mapping[str, Sequence[int]], given: Mapping[str, Tensor]) -> None:
    """Refuse a tensor that is missing, unknown, or of another shape or kind: only codebooks are integers."""
    for name in sorted({*expected, *given}):
        if name not in given:
            raise ValueError(f"there is no {name}")
        if name not in expected:
            raise ValueError(f"there is {name}, which the config does not have")
        shape, have = list(expected[name]), given[name]
        if list(have.shape) != shape or ("int" in str(have.dtype)) != name.startswith("codebook_"):
            raise ValueError(f"{name} is {have.dtype} of shape {list(have.shape)}, expected {shape} as in the config")


def _probe_weights(directory: Path) -> dict[str, str]:
    """By file of a model's weights: a digest of its size and of some blocks, in no time for any size."""
    found: dict[str, str] = {}
    for path in sorted({*directory.glob("*model*.safetensors"), *directory.glob("*model*.bin")}):
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for place in range(NUM_BLOCKS):
                file.seek(place * max(0, size - BLOCK) // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK))
        found[path.name] = digest.hexdigest()
    return found


def _read_tensors(path: Path) -> tuple[dict[str, str], Raw]:
    data = path.read_bytes()  # once: a save may replace the file while the head is read
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__", {}), dict(safetensors.deserialize(data))


def _digest(tensors: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """SHA-256 of all tensors, with PyTorch's names of types: the format was defined there."""
    digest = hashlib.sha256()
    for name, each in sorted(tensors, key=lambda entry: entry[0]):
        kind = TYPES.get(each["dtype"], each["dtype"])
        digest.update(f"{name} torch.{kind} {list(each['shape'])}".encode())
        digest.update(each["data"])
    return digest.hexdigest()
