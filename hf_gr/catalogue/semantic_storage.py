# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of semantic IDs: a JSON that people read and a safetensors that holds everything.

As with an index (`hf_gr.catalogue.storage`), the safetensors alone is complete, and its arrays have a digest. The
names differ, so that one folder may hold both.

Axes: N items, L levels, C codes of all levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from . import storage
from .item_ids import ItemId, ItemIds, read_item_ids
from .storage import Arrays

FORMAT_VERSION = 1
JSON_FILE = "semantic_ids.json"
ARRAYS_FILE = "semantic_ids.safetensors"
FILES = (JSON_FILE, ARRAYS_FILE)


def save(
    directory: Path,  # an existing folder
    level_sizes: tuple[int, ...],
    arrays: Arrays,  # `codes`, `[N, L]`, and `tokens`, `[C]`
    item_ids: list[ItemId],
    *,
    card: str,
) -> None:
    """Write both files and, unless the folder has a card already, `card`."""
    ids = read_item_ids(item_ids, len(item_ids))
    assert ids is not None
    packed = ItemIds.pack(ids)
    arrays = {**arrays, "item_ids.values": packed.values}
    if packed.bounds is not None:
        arrays["item_ids.bounds"] = packed.bounds
    description = {
        "num_items": len(item_ids),
        "level_sizes": list(level_sizes),
        "item_id_type": "string" if packed.are_strings else "integer",
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    how: Any = {"version": FORMAT_VERSION, "digests": ["arrays_xxh3"]}
    storage.save(directory, description, arrays, card=card, files=FILES, **how)


def load(directory: Path) -> tuple[list[int], Arrays, Any]:
    """Read what `save` wrote: level sizes, arrays, and item ids."""
    fix = "does the folder hold semantic IDs?"
    description, arrays = storage.load(directory, files=FILES, newest=FORMAT_VERSION, fix=fix)
    ids = ItemIds(arrays["item_ids.values"], arrays.get("item_ids.bounds"))
    return cast("list[int]", description["level_sizes"]), arrays, ids.select(np.arange(len(ids)))
