# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run can refuse before PyTorch is imported, which takes seconds: most of what is mistyped. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_gr.answering.fallback import living_fallback
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.storage import JSON_FILE
from hf_gr.files.hub import Source, check_revision
from hf_gr.tables.table import Table

from .options import EVALUATE
from .parts import check_output
from .settings import Settings, cutoffs_and_beams
from .users import Users

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"  # of models, and of adapters


def check_early(
    function: str, model: Any, users: Any, given: Mapping[str, Any], *, output: Path | None = None
) -> dict[str, Any]:
    """Refuse a call of `recommend` or `evaluate` if its settings, output, catalogue, users or model are wrong.

    Args:
        function: its name.
        model: a name, or a dictionary with several; loaded models are not looked at.
        users: files.
        given: keyword arguments; `constraint_index` is a name, None, or a dictionary of names.
        output: of `recommend`.

    Returns:
        The keyword arguments; the catalogues among them are loaded.

    Raises:
        ValueError: as the function itself.
    """
    settings = Settings.read(function, given, users=users)
    if function == EVALUATE:  # which takes several numbers of beams
        cutoffs_and_beams(settings)
        settings = replace(settings, num_beams=None, leave_one_out=settings.target is None)
    settings = replace(settings, constraint_index=None).checked()
    if output is not None:
        check_output(output, users)
    models: list[Any] = list(model.values()) if isinstance(model, Mapping) else [model]
    for name in models:
        if isinstance(name, (str, Path)):
            _check_model(name, settings)
    named = given.get("constraint_index")
    names: dict[Any, Any] = dict(named) if isinstance(named, Mapping) else {None: named}
    indexes = {name: load_named(index) for name, index in names.items()}
    known = [index for index in indexes.values() if isinstance(index, ConstraintIndex)]
    known = known or [index for name in models if (index := _named_by(name)) is not None]
    if known:
        read_users(users, settings, known[0])
    else:
        Table(users, settings.columns.roles, format=settings.format, delimiter=settings.delimiter)
    if named is None:
        return dict(given)
    return {**given, "constraint_index": indexes if isinstance(named, Mapping) else indexes[None]}


def _check_model(name: str | Path, settings: Settings) -> None:
    """Refuse a name without the configuration of a model."""
    source = Source(name, revision=settings.revision)
    if source.is_folder:
        check_revision(name, settings.revision)
        if not Path(name, CONFIG).is_file() and not Path(name, ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"model={str(name)!r} has no {CONFIG}, expected the folder of a saved model: check the path"
            )
        return
    with _naming("model"):
        source.resolve_folder([CONFIG])


def load_named(index: Any) -> Any:
    """A catalogue by name, unless the name is the checkpoint itself."""
    if not isinstance(index, (str, Path)) or str(index) == ".":
        return index
    with _naming("constraint_index"):
        return ConstraintIndex.from_pretrained(index)


def _named_by(model: Any) -> ConstraintIndex | None:
    """The catalogue in a model's folder, if that is the one that the model names."""
    if not isinstance(model, (str, Path)) or not Path(model, JSON_FILE).is_file():
        return None
    try:
        found = json.loads(Path(model, "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    ours = found.get("hf_gr", found) if isinstance(found, dict) else {}  # flat in the files of 0.1.0.dev0
    is_named = isinstance(found, dict) and ours.get("constraint_index") in (None, ".")
    return ConstraintIndex.from_pretrained(model) if is_named else None


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """Begin an error with the argument whose value it is about."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(f"{argument}={text}" if text.startswith(("'", '"')) else text) from error


def read_users(users: Any, settings: Settings, index: ConstraintIndex) -> Users:
    """The table of users, whose ids are of the catalogue's kind; also checks the fallback.

    Raises:
        ValueError: no such table, or no item of the fallback is the catalogue's.
    """
    living_fallback(settings.fallback, index)
    are_strings, how = index.snapshot.are_strings, settings.format
    return Users(users, settings.columns, are_strings=are_strings, format=how, delimiter=settings.delimiter)
