# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of item ids in files, one or one a user. Knows no catalogue: ids of text files are texts."""

import json
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from .cells import read_integer, read_list
from .files import READ_ERRORS, SUFFIXES, NoColumn, open_file, suffix_of
from .table import Table

COLUMN, SIMILAR = "item_id", "similar_items"
WINDOW_ROWS = 2**14


def read_lists(path: Path) -> dict[str, list[Any]] | None:
    """Items by user: of a JSON object of lists, or of lines (`.txt`) of a user and items; None if it is a table."""
    if path.is_dir() or (suffix := suffix_of(path)) not in (".json", ".txt"):
        return None
    lists: dict[str, list[Any]] = {}
    try:
        text = _text_in(path)
    except READ_ERRORS as error:
        raise ValueError(f"{path} cannot be read ({error}), expected items by user: check the path") from error
    if suffix == ".txt":
        for user, *items in filter(None, map(str.split, text.splitlines())):
            lists.setdefault(user, []).extend(items)
        return lists
    with suppress(ValueError):
        found = json.loads(text)  # which lines of JSON are not
        if isinstance(found, dict) and all(isinstance(items, list) for items in found.values()):
            return found
    return None


def read_items(argument: str, path: Path) -> list[Any]:
    """The item ids in a file that an argument names, in its order.

    They are the column `item_id` of a table (`.parquet`, `.csv`, `.tsv`, `.jsonl`), a JSON list (`.json`), or, in any
    other file, one per line.
    """
    suffix = suffix_of(path)
    if _is_table(path):
        items: list[Any] = []
        for rows, _ in Table(path, {COLUMN: ""}).batches():
            items += rows.cells(COLUMN)
            if None in items:
                raise ValueError(f"{argument}={str(path)!r}, row {items.index(None)} has no {COLUMN}: drop the row")
        return items
    try:
        text = _text_in(path)
        items = json.loads(text) if suffix == ".json" else [line.strip() for line in text.splitlines() if line.strip()]
    except (*READ_ERRORS, ValueError) as error:
        raise ValueError(
            f"{argument}={str(path)!r} cannot be read ({error}), expected item ids: check the file"
        ) from error
    if not isinstance(items, list):
        found = type(items).__name__
        raise ValueError(f'{argument}={str(path)!r} has a {found}, expected a list such as ["B01", "B02"]')
    if items[:1] == [COLUMN]:
        raise ValueError(
            f"{argument}={str(path)!r} begins with {COLUMN!r}, expected an id: a file of one id per line has no "
            "header; remove it, or name the file .csv"
        )
    return items


def read_similar(argument: str, table: Any) -> dict[Any, list[Any]]:
    """By the item ids of a table, their `similar_items`, the best first; by None those of a row without an id.

    In CSV these are JSON lists. A file without the column is a list of items, as `read_items` reads it: that of None.
    """
    found: dict[Any, list[Any]] = {}
    is_file = isinstance(table, (str, PathLike))
    if is_file and not Path(table).is_dir() and not _is_table(Path(table)):
        return {None: read_items(argument, Path(table))}
    try:
        for rows in Table(table, {COLUMN: "", SIMILAR: ""}, name=argument).windows(WINDOW_ROWS):
            for row, (item, similar) in enumerate(zip(rows.cells(COLUMN), rows.cells(SIMILAR), strict=True)):
                if isinstance(item, float) and item.is_integer():  # as pandas has integers beside a gap
                    item = int(item)
                item = None if item == "" else item
                similar = read_list(similar, are_strings=True) if isinstance(similar, str) else similar
                if item in found:
                    raise ValueError(rows.problem(COLUMN, row, item, f"each once in {argument}=: merge the rows"))
                if not similar or not isinstance(similar, list):
                    expected = f"a list of one item id or more in {argument}=: drop the row"
                    raise ValueError(rows.problem(SIMILAR, row, similar, expected))
                found[item] = similar
    except NoColumn:
        if not is_file:
            raise
        return {None: read_items(argument, Path(table))}
    if not found:
        raise ValueError(f"{argument}={'' if not is_file else repr(str(table))} has no row, expected one or more")
    return found


def read_values(path: str, argument: str, *, are_strings: bool) -> dict[Any, Any]:
    """By the item ids of a table, what its column says: `group` of `item_groups`, `bias` of `item_bias`."""
    column = {"item_groups": "group", "item_bias": "bias"}[argument]
    found: dict[Any, Any] = {}
    expected = f"{'a text' if are_strings else 'an integer'}, as the catalogue's ids are, and each once"
    for rows, _ in Table(path, {COLUMN: "", column: ""}).batches():
        for row, (item, value) in enumerate(zip(rows.cells(COLUMN), rows.cells(column), strict=True)):
            name = str(item) if are_strings else read_integer(str(item))
            if item is None or isinstance(item, float) or name is None or name in found:
                raise ValueError(rows.problem(COLUMN, row, item, expected))
            found[name] = value
    return found


def _is_table(path: Path) -> bool:
    """Whether a name is a table's; `.json` is a list's."""
    suffix = suffix_of(path)
    return suffix != ".json" and any(suffix in suffixes for suffixes in SUFFIXES.values())


def _text_in(path: Path) -> str:
    with open_file(path) as (_, stream):
        return stream.read().decode("utf-8-sig")  # Excel and PowerShell begin files with a mark
