# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of semantic IDs: a JSON that people read and a safetensors that holds everything.

As with an index (`hf_gr.catalogue.storage`), the safetensors alone is complete, and its arrays have a digest. The
names differ, so that one folder may hold both.

Axes: N items, L levels, C codes of all levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors
import safetensors.numpy

from hf_gr.files import pairs

from .item_ids import ItemId, ItemIds, read_item_ids
from .storage import Arrays, arrays_digest

FORMAT_VERSION = 1
JSON_FILE = "semantic_ids.json"
ARRAYS_FILE = "semantic_ids.safetensors"
FILES = (JSON_FILE, ARRAYS_FILE)
DIGEST = "arrays_xxh3"


def save(directory: Path, level_sizes: tuple[int, ...], arrays: Arrays, item_ids: list[ItemId], *, card: str) -> None:
    """Write both files and, unless the folder has a card already, `card`.

    Args:
        directory: an existing folder.
        level_sizes: L codebook sizes.
        arrays: `codes`, `[N, L]`, and `tokens`, `[C]`.
        item_ids: N ids.
        card: a model card.

    Raises:
        OSError: a file that cannot be written, such as on a full disk.
    """
    ids = read_item_ids(item_ids, len(item_ids))
    assert ids is not None
    packed = ItemIds.pack(ids)
    arrays = {**arrays, "item_ids.values": packed.values}
    if packed.bounds is not None:
        arrays["item_ids.bounds"] = packed.bounds
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    description = {
        "format_version": FORMAT_VERSION,
        "num_items": len(item_ids),
        "level_sizes": list(level_sizes),
        "item_id_type": "string" if packed.are_strings else "integer",
        DIGEST: arrays_digest(arrays, DIGEST),
    }
    text = pairs.to_text(description)

    def write_arrays(path: Path) -> None:
        cast(Any, safetensors.numpy).save_file(arrays, path, metadata={"semantic_ids": text})

    pairs.write(directory, text, write_arrays, json_file=JSON_FILE, tensors_file=ARRAYS_FILE, card=card)


def load(directory: Path) -> tuple[list[int], Arrays, Any]:
    """Read what `save` wrote: level sizes, arrays, and item ids.

    Raises:
        ValueError: a file that is missing, cut short, altered, of a newer format, or not safetensors.
    """
    description, arrays = pairs.read(
        directory,
        _read_arrays,
        json_file=JSON_FILE,
        tensors_file=ARRAYS_FILE,
        newest=FORMAT_VERSION,
        fix="does the folder hold semantic IDs?",
    )
    if description.get(DIGEST) != arrays_digest(arrays, DIGEST):
        raise pairs.altered(directory / ARRAYS_FILE)
    sizes = cast("list[int]", description["level_sizes"])
    ids = ItemIds(arrays["item_ids.values"], arrays.get("item_ids.bounds"))
    return sizes, arrays, ids.select(np.arange(len(ids)))


def _read_arrays(path: Path) -> tuple[Mapping[str, str], Arrays]:
    with cast(Any, safetensors).safe_open(path, framework="np") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
