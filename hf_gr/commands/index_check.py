# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `hf-gr index check` verifies: all digests, and that the folder's files match. Prints nothing."""

from __future__ import annotations

import json
from typing import Any

from safetensors import safe_open

from hf_gr.catalogue import ConstraintIndex, storage
from hf_gr.files.hub import Source
from hf_gr.files.text import counted


def check_index(repo_or_dir: str, *, revision: str | None = None) -> tuple[ConstraintIndex, dict[str, str]]:
    """Read all of an index, and say what was checked; a `ValueError` names a damaged file, and how."""
    folder = Source(repo_or_dir, revision=revision).resolve_folder(storage.FILES)
    index = ConstraintIndex.from_pretrained(folder, verify=True)
    # Loading uses only the description in the arrays' file; people read the other one.
    shown: dict[str, Any] = json.loads((folder / storage.JSON_FILE).read_bytes())
    with safe_open(folder / storage.ARRAYS_FILE, "np") as file:
        inside: dict[str, Any] = json.loads(file.metadata()["constraint_index"])
    if shown != inside:
        differ = ", ".join(sorted(name for name in shown | inside if shown.get(name) != inside.get(name)))
        raise ValueError(
            f"{folder}: {storage.JSON_FILE} and {storage.ARRAYS_FILE} are of different saves ({differ} differ): "
            "a file was swapped or a save interrupted; download both or save it again"
        )
    return index, {
        "files": f"whole, of format version {inside['format_version']}, and of one catalogue",
        "digests": f"of the description and of {index.nbytes:,} bytes of arrays",
        "catalogue": f"{counted(len(index), 'sequence')}, {counted(index.max_length, 'level')}, "
        f"{counted(index.num_items, 'item')}",
    }


def check_vocabulary(index: ConstraintIndex, model: str) -> int:
    """The vocabulary that a model's config names; a `ValueError` if it is too small for an index, or unknown."""
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
    return vocabulary
