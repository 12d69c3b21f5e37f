# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The input of `hf-gr index build`: what it holds, the options for that, and the part of the library that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_gr.catalogue import ConstraintIndex, SemanticIds
from hf_gr.files.text import named_in_errors

OF_TABLES = ("item_id", "delimiter")
OF_CODES = ("tokenizer", "offset", "level_sizes", "template")
# By what is read: the options that it has.
OPTIONS = {
    "a table of tokens": ("sequence", *OF_TABLES, "eos_token_id"),
    "an array of tokens": ("eos_token_id",),
    "a table of codes": ("codes", *OF_TABLES, *OF_CODES, "eos_token_id"),
    "a recipe's codes": (*OF_CODES, "eos_token_id"),
    "labels": ("tokenizer", "prefix"),
    "a table of labels": ("item_id", "delimiter", "tokenizer", "prefix"),
}
ALONE = {".npy": "npy", ".txt": "txt", ".json": "json"}  # what is one file and no table


def compile_index(
    paths: Sequence[Path], *, format: str | None, labels: bool, given: Mapping[str, Any]
) -> ConstraintIndex:
    """Read files and build the index; `given` are the options in `OPTIONS` that were given.

    A format of None is that of the files' names. A `ValueError` for options of another kind of input, or for input
    that the library refuses.
    """
    path, *others = paths
    for each in paths:
        if not each.exists():
            raise ValueError(f"INPUT {each} is not there, expected a file or a folder: check the path")
    if format is None and not path.is_dir():
        format = ALONE.get(path.suffix.lower())
    kind = _kind_of(path, format, labels, given)
    unknown = [name for name in given if name not in OPTIONS[kind]]
    if unknown:
        raise ValueError(
            f"{unknown[0]}= is no option for {kind}, and INPUT {path} holds that, expected of "
            f"{', '.join(OPTIONS[kind])}: omit it"
        )
    if "table" not in kind and (others or path.is_dir()):
        raise ValueError(f"INPUT {', '.join(map(str, paths))}, expected one file of {kind}: only tables have several")
    options: dict[str, Any] = dict(given)
    if "table" in kind:
        for name in ("sequence", "codes"):
            if len(given.get(name, ())) == 1:  # a column of lists
                options[name] = given[name][0]
        if format == "tsv":
            format, options = "csv", {"delimiter": "\t"} | options
        options["format"] = format
    with named_in_errors(paths):
        if "labels" in kind:
            return _labels(paths, is_table=kind != "labels", **options)
        if kind == "an array of tokens":
            return ConstraintIndex.from_sequences(_read_array(path), **options)
        if kind == "a table of tokens":
            return ConstraintIndex.from_table(paths, **options)
        return _codes(paths, **options)


def _kind_of(path: Path, format: str | None, labels: bool, given: Mapping[str, Any]) -> str:
    """What is read, a key of `OPTIONS`."""
    if labels and format not in ("json", "npy"):
        return "labels" if format == "txt" else "a table of labels"
    if labels or format == "txt":
        expected = "a text file of one label a line, or a table" if labels else "--labels, or another --format"
        raise ValueError(f"INPUT {path} is {format}, expected {expected}")
    if format in ALONE.values():
        return {"txt": "labels", "json": "a recipe's codes", "npy": "an array of tokens"}[str(format)]
    of_codes = [name for name in ("codes", *OF_CODES) if name in given]
    if "sequence" in given and of_codes:
        raise ValueError(
            f"sequence= and {of_codes[0]}= are given, expected one of them: --sequence names a column of tokens; "
            "codes, which --offset or --tokenizer turns into tokens, are named by --codes"
        )
    return "a table of codes" if of_codes else "a table of tokens"


def _codes(paths: Sequence[Path], *, eos_token_id: int | None = None, **given: Any) -> ConstraintIndex:
    if ("tokenizer" in given) == ("offset" in given):
        raise ValueError(
            f"INPUT {paths[0]} holds codes, expected either --tokenizer NAME, whose tokens they are, or --offset N, "
            "the token of the first code: pass the one that your model was trained with"
        )
    if "tokenizer" in given:
        given["tokenizer"] = _load_tokenizer(given["tokenizer"])
    ids = SemanticIds.from_table(paths, **given) if "format" in given else SemanticIds.from_json(paths[0], **given)
    return ids.constraint_index(eos_token_id=eos_token_id)


def _read_array(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)  # an archive of several arrays has none
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a header is Python, which fails in many ways; NumPy's own message suggests unpickling
        raise ValueError(
            f"{path} is no .npy file or is cut short, expected integers of np.save: write it again"
        ) from error


def _labels(
    paths: Sequence[Path],
    *,
    is_table: bool,
    tokenizer: str | None = None,
    item_id: str = "label",
    delimiter: str | None = None,
    format: Any = None,
    **given: Any,
) -> ConstraintIndex:
    if tokenizer is None:
        raise ValueError(f"INPUT {paths[0]} holds labels, expected --tokenizer NAME: that of the model that answers")
    loaded = _load_tokenizer(tokenizer)
    if paths[0].suffix.lower() == ".xlsx":
        lines = _read_excel(paths, item_id)
    elif is_table:
        from hf_gr.tables.table import Table

        table = Table(paths, {item_id: "labels"}, name="labels", format=format, delimiter=delimiter)
        lines = [
            str(value or "") for rows in table.windows(2**16) for value in rows.columns.column(item_id).to_pylist()
        ]
    else:
        try:
            lines = paths[0].read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"it is no UTF-8 text ({error}), expected one label a line: save it as UTF-8") from error
    labels = [line.strip() for line in lines if line.strip()]
    return ConstraintIndex.from_labels(list(dict.fromkeys(labels)) if is_table else labels, loaded, **given)


def _read_excel(paths: Sequence[Path], column: str) -> list[str]:
    """The cells of a column of the first sheets."""
    try:
        import openpyxl  # pyright: ignore[reportMissingModuleSource]
    except ImportError as error:
        raise ImportError("reading .xlsx needs openpyxl: pip install openpyxl") from error
    found: list[str] = []
    for path in paths:
        names, *rows = openpyxl.load_workbook(path, read_only=True, data_only=True).worksheets[0].values
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}, expected one of {names}: name it with --item-id")
        found += [str(row[names.index(column)] or "") for row in rows]
    return found


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer={name!r} cannot be read ({error}), expected a folder or repository with a tokenizer"
        ) from error
