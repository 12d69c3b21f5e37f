# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `hf-gr index check` verifies: all that loading can, and whether the folder's files match. Prints nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hf_gr.catalogue import ConstraintIndex, storage
from hf_gr.files.hub import Source
from hf_gr.files.text import counted

Checked = list[tuple[str, str]]  # what was checked, and what was found


def check_index(repo_or_dir: str, *, revision: str | None = None) -> tuple[ConstraintIndex, Checked]:
    """Read all of an index.

    Raises:
        ValueError: a file is damaged; names it, and how.
    """
    folder = Source(repo_or_dir, revision=revision).resolve_folder(storage.FILES)
    index = ConstraintIndex.from_pretrained(folder, verify=True)
    description = _check_descriptions(folder)
    size = f"{counted(len(index), 'sequence')} in {counted(index.max_length, 'level')}"
    ids = "row numbers are their ids" if index.snapshot.items.ids is None else "their ids can be looked up"
    return index, [
        ("files", f"whole, of format version {description['format_version']}, and of one catalogue"),
        ("digests", f"of the description and of {index.nbytes:,} bytes of arrays"),
        ("catalogue", f"{size}; {counted(index.num_items, 'item')}, {ids}"),
    ]


def check_vocabulary(index: ConstraintIndex, model: str) -> tuple[int, Checked]:
    """Compare the largest token with the vocabulary that a model's config names, and return that.

    Raises:
        ValueError: the vocabulary is too small, the config names none, or there is no such model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"the config of {model} cannot be read ({error}): check --model") from error
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if vocabulary is None:
        raise ValueError(f"the config of {model} has no vocab_size, expected that of a language model")
    if index.max_token_id >= vocabulary:
        raise ValueError(
            f"the catalogue has token {index.max_token_id}, expected less than the vocabulary of {model}, "
            f"{vocabulary}: is it another model's catalogue, or were the model's embeddings not resized?"
        )
    found = f"{vocabulary:,} tokens of {model}; the largest in the catalogue is {index.max_token_id:,}"
    return vocabulary, [("vocabulary", found)]


def _check_descriptions(folder: Path) -> dict[str, Any]:
    """Check the JSON for people: loading uses only the description in the arrays' file."""
    beside: dict[str, Any] = json.loads((folder / storage.JSON_FILE).read_bytes())
    with safe_open(folder / storage.ARRAYS_FILE, "np") as file:
        inside: dict[str, Any] = json.loads(file.metadata()["constraint_index"])
    if beside != inside:
        differ = ", ".join(sorted(name for name in beside | inside if beside.get(name) != inside.get(name)))
        raise ValueError(
            f"{folder / storage.JSON_FILE} is not of one save with {storage.ARRAYS_FILE} (they differ in {differ}), "
            "expected so: a file was swapped or a save interrupted; download both or save it again"
        )
    return inside
