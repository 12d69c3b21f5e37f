# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The catalogue that a call or a checkpoint names. Loads each once, and again when its folder has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.storage import ARRAYS_FILE

# By model: a checkpoint's catalogue lives as long as the checkpoint.
_LOADED: WeakKeyDictionary[Any, dict[tuple[Any, ...], ConstraintIndex]] = WeakKeyDictionary()
# By model: the arguments that its checkpoint was found by.
_SOURCES: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

SOURCE_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")


def remember_source(model: Any, **arguments: Any) -> None:
    """Note where on the Hub a model came from, so that `"."` finds its catalogue there."""
    _SOURCES[model] = {name: arguments[name] for name in SOURCE_ARGUMENTS if arguments.get(name) is not None}


def resolve_index(model: Any, index: Any) -> ConstraintIndex:
    """An index object as it is; a repository id or folder loaded; `"."` from the checkpoint that the model came from.

    Raises:
        ValueError: anything else, or nothing there.
    """
    if isinstance(index, ConstraintIndex):
        return index
    if not isinstance(index, (str, Path)) or not str(index):
        given = repr(index) if isinstance(index, str) else f"a {type(index).__name__}"
        raise ValueError(
            f"constraint_index is {given}, expected a ConstraintIndex or the name of one: "
            "ConstraintIndex.from_sequences(...) makes it"
        )
    name, source = str(index), {}
    if name == ".":
        name, source = model.config._name_or_path, _SOURCES.get(model, {})
        if not name:
            raise ValueError(
                'constraint_index="." means the checkpoint itself, but this model was not loaded from one'
            )
    file = Path(name, source.get("subfolder", ""), ARRAYS_FILE)
    key = (name, file.stat().st_mtime_ns if file.is_file() else None)
    loaded = _LOADED.setdefault(model, {})
    if key not in loaded:
        loaded[key] = ConstraintIndex.from_pretrained(name, **source)
    return loaded[key]
