# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The catalogues that a call or a checkpoint names. Loads each once, and again when its folder has changed."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig

from hf_gr.catalogue import ConstraintIndex, SemanticIds
from hf_gr.catalogue.rules import BatchRules, combine_rules
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.storage import ARRAYS_FILE
from hf_gr.files.hub import Source

from .models import first_of

# By model and name: a checkpoint's catalogue lives as long as the checkpoint, or until its file changes.
_LOADED: WeakKeyDictionary[Any, dict[str, tuple[int | None, ConstraintIndex]]] = WeakKeyDictionary()
# By model: where its checkpoint was found.
_SOURCES: WeakKeyDictionary[Any, Source] = WeakKeyDictionary()


def remember_source(model: Any, source: Source) -> None:
    """Note where on the Hub a model came from, so that `"."` finds its catalogue there."""
    _SOURCES[model] = source


def index_of_call(model: Any, config: Any, given: Any) -> Any:
    """The catalogue, or the name of one, that a call gives or its configs name; None for none."""
    if not isinstance(config, GenerationConfig | None):
        what = type(config).__name__
        fix = "pass it as constraint_index=" if what == "ConstraintIndex" else "pass its fields as arguments"
        raise ValueError(f"generation_config is a {what}, expected a GenerationConfig: {fix}")
    if given is None:
        given = first_of("constraint_index", {}, config, model.generation_config)
    return None if given is False else given


def batch_rules(
    indexes: Sequence[ConstraintIndex] | ConstraintIndex, exclude_items: Any, *, num_prompts: int | None = None
) -> BatchRules:
    """The catalogue of every prompt, as it is now; a `ValueError` where indexes or exclusions do not fit."""
    if isinstance(indexes, ConstraintIndex) and exclude_items is None:
        return BatchRules((indexes.snapshot,))
    one_each = not isinstance(indexes, ConstraintIndex)
    every = indexes if one_each else [indexes]
    snapshots: dict[int, Snapshot] = {}
    for index in every:  # one given several times is one rule, even if it changes while this runs
        snapshots.setdefault(id(index), index.snapshot)
    return combine_rules(
        [snapshots[id(index)] for index in every], exclude_items, num_prompts=num_prompts, one_each=one_each
    )


def resolve_index(model: Any, index: Any, *, may_be_list: bool = False) -> Any:
    """An index as it is; one of a repository or folder loaded; `"."` from the checkpoint that the model came from.

    In a list, with one for each prompt, every entry is resolved. Catalogues are loaded with the token and the cache
    that the model was loaded with.
    """
    if isinstance(index, ConstraintIndex):
        return index
    if may_be_list and isinstance(index, list | tuple):
        return [resolve_index(model, one) for one in index]
    if not isinstance(index, (str, Path)) or not str(index):
        given = repr(index) if isinstance(index, str) else f"a {type(index).__name__}"
        makes = (
            "pass ids.constraint_index()"
            if isinstance(index, SemanticIds)
            else (
                "SemanticIds(...).constraint_index() makes it of codes, ConstraintIndex.from_sequences(...) of tokens"
            )
        )
        raise ValueError(f"constraint_index is {given}, expected a ConstraintIndex or the name of one: {makes}")
    name, source = str(index), _SOURCES.get(model, Source(""))
    if name == ".":
        name = model.config.name_or_path
        if not name:
            raise ValueError(
                'constraint_index="." means the checkpoint itself, but this model was not loaded from one'
            )
        source = replace(source, repo_or_dir=name)
    else:
        source = source.elsewhere(name)
    file = Path(name, source.subfolder, ARRAYS_FILE)
    saved = file.stat().st_mtime_ns if file.is_file() else None
    loaded = _LOADED.setdefault(model, {})
    if name not in loaded or loaded[name][0] != saved:
        loaded[name] = (saved, ConstraintIndex.from_pretrained(**asdict(source)))
    return loaded[name][1]
