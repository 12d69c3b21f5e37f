# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The two files of an index: a JSON that people read and a safetensors that holds everything.

The safetensors carries the JSON's text in its own header, so it alone is a complete index (`hf_gr.files.pairs`). The
text carries digests of the arrays: XXH3, which is compared at every load (20 million items in 0.15 s), and SHA-256,
which older files have alone. They tell damage, not forgery.

Arrays are mapped into memory. A mapped file may be replaced, as `save` does, but not overwritten in place.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import xxhash

from hf_gr.files import pairs

from .fanout import Fanout
from .item_ids import ItemIds
from .items import Items
from .trie import Trie

FORMAT_VERSION = 2
JSON_FILE = "constraint_index.json"
ARRAYS_FILE = "constraint_index.safetensors"
FILES = (JSON_FILE, ARRAYS_FILE)
# By the name in the description; the first one that is there is compared at every load.
DIGESTS: dict[str, Callable[[], Any]] = {"arrays_xxh3": xxhash.xxh3_128, "arrays_sha256": hashlib.sha256}
DTYPES = {"U8": np.uint8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F32": np.float32}

Arrays = dict[str, npt.NDArray[Any]]


def save(
    directory: Path,
    description: Mapping[str, Any],
    arrays: Arrays,
    *,
    card: str,
    files: tuple[str, str] = FILES,
    version: int = FORMAT_VERSION,
    digests: Iterable[str] = tuple(DIGESTS),
) -> None:
    """Write both files and, unless the folder has a card already, `card`."""
    found = {name: arrays_digest(arrays, name) for name in digests}
    text = pairs.to_text({"format_version": version, **description, **found})

    def write_arrays(path: Path) -> None:
        cast(Any, safetensors.numpy).save_file(arrays, path, metadata={path.stem: text})

    pairs.write(directory, text, write_arrays, json_file=files[0], tensors_file=files[1], card=card)


def load(
    directory: Path,
    *,
    verify: bool | None = None,  # with which digests arrays are compared: with none, all, or the fastest
    files: tuple[str, str] = FILES,
    newest: int = FORMAT_VERSION,
    fix: str = "is it an index's folder?",
) -> tuple[dict[str, Any], Arrays]:
    """Read the description and map the arrays."""
    description, arrays = pairs.read(
        directory, _map_arrays, json_file=files[0], tensors_file=files[1], newest=newest, fix=fix
    )
    names = [name for name in DIGESTS if name in description] or list(DIGESTS)
    compared = names[: {True: len(names), False: 0, None: 1}[verify]]
    if any(description.get(name) != arrays_digest(arrays, name) for name in compared):
        raise pairs.altered(directory / files[1])
    return description, arrays


def describe_items(items: Items) -> dict[str, Any]:
    """The facts that the arrays do not tell, or only after reading all of them."""
    fanouts = items.trie.fanouts
    return {
        "item_id_type": "string" if items.are_strings else "integer",
        "level_sizes": [fanout.num_children for fanout in fanouts],
        "branching": [fanout.largest for fanout in fanouts],
        "childless": [fanout.num_childless for fanout in fanouts],
        "token_bases": list(items.trie.token_bases),
        "items_of_a_sequence": items.at_leaf.largest,
    }


def read_items(description: Mapping[str, Any], arrays: Arrays) -> Items:
    """The items of a description and its arrays, as `load` returns them."""
    names = ("level_sizes", "branching", "childless", "token_bases")
    sizes, branching, childless, token_bases = (cast("list[int]", description[name]) for name in names)
    levels = zip((1, *sizes[:-1]), sizes, branching, childless, strict=True)
    fanouts = tuple(
        Fanout(*numbers, arrays[f"children.{level}.offsets"], arrays.get(f"children.{level}.exceptions"))
        for level, numbers in enumerate(levels)
    )
    trie = Trie(arrays["tokens"], tuple(token_bases), fanouts)
    numbers, most = arrays["items.numbers"], cast(int, description["items_of_a_sequence"])
    own = arrays["items.offsets"], arrays.get("items.exceptions")
    at_leaf = Fanout(trie.num_sequences, len(numbers), most, 0, *own)
    ids = None
    if "item_ids.values" in arrays:
        ids = ItemIds(arrays["item_ids.values"], arrays.get("item_ids.bounds"), arrays.get("item_ids.order"))
    return Items(trie, numbers, arrays["items.positions"], at_leaf, ids)


def _map_arrays(path: Path) -> tuple[dict[str, str], Arrays]:
    """The metadata and the arrays of a safetensors file, mapped into memory, copy-on-write."""
    with path.open("rb") as file:  # once: a save may replace the file in between
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        metadata = cast("dict[str, str]", header.pop("__metadata__", {}))
        if path.stem not in metadata:
            return metadata, {}  # another program's, of whatever types
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes, expected {8 + length + end}")
        data = np.memmap(file, dtype=np.uint8, mode="c", offset=8 + length) if end else np.zeros(0, dtype=np.uint8)
    arrays: Arrays = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        flat = np.asarray(data[start:stop])
        aligned = flat if flat.ctypes.data % dtype.itemsize == 0 else flat.copy()
        arrays[name] = aligned.view(dtype).reshape(entry["shape"])
    return metadata, arrays


def arrays_digest(arrays: Arrays, name: str) -> str:
    """One of `DIGESTS` over names, types, shapes and bytes, in the order of the names."""
    digest = DIGESTS[name]()
    for array_name, array in sorted(arrays.items()):
        digest.update(f"{array_name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
