# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of purchases, one interaction a row, as a history per user. Knows no tokens and no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_gr.catalogue import SemanticIds
from hf_gr.catalogue.item_ids import ItemId

Histories = dict[Any, list[ItemId]]


def read_histories(
    interactions: Any,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    items: SemanticIds | None = None,
    unknown_items: Literal["refuse", "drop"] = "refuse",
) -> Histories:
    """Read interactions, one a row, as a history per user.

    Args:
        interactions: a file of CSV, TSV, Parquet or JSON lines, several, or a folder of them; or a table in memory
            with columns by name (pandas, Polars, Arrow, a dictionary of lists).
        user: the column of users.
        item: the column of item ids.
        time: the column by which a user's rows are sorted: numbers, dates, or texts such as `2026-11-22`; without it
            they are in order. Equal times keep the order of rows.
        items: semantic IDs: item ids become of their kind (in CSV all is text), and unknown ones are noticed.
        unknown_items: `"drop"` omits items without a semantic ID, and users with no others.

    Returns:
        Lists of item ids by user, oldest first; users in the order of their first row.

    Raises:
        ValueError: a file cannot be read, a column is missing, a cell is empty, there is no row, an item has no
            semantic ID, or times cannot be sorted.
        ImportError: pyarrow is missing, for files: `pip install "hf-gr[tables]"`.

    Example:
        >>> rows = {"user": ["ann", "bob", "ann"], "item": ["tea", "jam", "ham"], "day": [2, 1, 1]}
        >>> read_histories(rows, time="day")
        {'ann': ['ham', 'tea'], 'bob': ['jam']}
    """
    if unknown_items not in ("refuse", "drop"):
        raise ValueError(f"unknown_items={unknown_items!r}, expected 'refuse' or 'drop'")
    names = {"user": user, "item": item} | ({} if time is None else {"time": time})
    if isinstance(interactions, (str, PathLike)) or _are_paths(interactions):
        columns, is_text = _read_files(interactions, names)
    else:
        columns, is_text = {name: _column(interactions, name, names) for name in names.values()}, False
    for argument, name in names.items():
        if len(columns[name]) != len(columns[user]):
            raise ValueError(f"{argument}={name!r} has {len(columns[name])} rows, expected {len(columns[user])}")
        if any(value is None or value != value for value in columns[name]):
            row = next(row for row, value in enumerate(columns[name]) if value is None or value != value)
            raise ValueError(f"{argument}={name!r} is empty in row {row}, expected a value: drop such rows")
    if not columns[user]:
        raise ValueError("interactions has no row, expected at least one: there is nothing to learn from")
    ids = _as_ids(columns[item], items, is_text=is_text)
    users = columns[user]
    if items is not None:
        known = set(items.item_ids)
        missing = [number for number, name in enumerate(ids) if name not in known]
        if missing and unknown_items == "refuse":
            raise ValueError(
                f"item={item!r} is {ids[missing[0]]!r} in row {missing[0]}, and {len(missing)} of {len(ids)} rows "
                "have items without a semantic ID, expected one for each: give them IDs, or pass unknown_items='drop'"
            )
    else:
        known = None
    order: Sequence[int] = range(len(ids))
    if time is not None:
        order = np.argsort(_as_times(columns[time], time), kind="stable").tolist()
    histories: Histories = {user: [] for user in users}
    for row in order:
        if known is None or ids[row] in known:
            histories[users[row]].append(ids[row])
    return {user: history for user, history in histories.items() if history}


def _are_paths(interactions: Any) -> bool:
    return isinstance(interactions, (list, tuple)) and all(isinstance(one, (str, PathLike)) for one in interactions)


def _column(table: Any, name: str, names: dict[str, str]) -> list[Any]:
    """A column of a table in memory, as Python's own values."""
    try:
        column = table[name]
    except Exception as error:  # each kind of table has its own
        there = getattr(table, "column_names", None) or getattr(table, "columns", None)
        there = list(table) if there is None and hasattr(table, "keys") else there
        raise _missing(f"a {type(table).__name__}", name, names, there) from error
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(column, method):
            return getattr(column, method)()
    return list(column)


def _missing(what: str, name: str, names: dict[str, str], there: Any) -> ValueError:
    argument = next(argument for argument, value in names.items() if value == name)
    listed = "" if there is None else f" among {', '.join(map(repr, there))}"
    return ValueError(f"{what} has no column {name!r}, expected one{listed}: name it with {argument}=")


def _read_files(paths: Any, names: dict[str, str]) -> tuple[dict[str, list[Any]], bool]:
    """Columns of files, and whether all cells are text."""
    from hf_gr.files import tables

    first = Path(paths if isinstance(paths, (str, PathLike)) else paths[0])
    sample = next((file for file in sorted(first.iterdir()) if file.suffix), first) if first.is_dir() else first
    suffixes = [suffix for suffix in sample.suffixes if suffix not in tables.CODECS]
    kinds: Any = tables.SUFFIXES.items()
    format = next((kind for kind, ends in kinds if suffixes and suffixes[-1].lower() in ends), None)
    if format is None:
        raise ValueError(f"{sample} is of no known kind, expected .csv, .tsv, .parquet or .jsonl: name it so")
    wanted = _Wanted(names)
    columns: dict[str, list[Any]] = {name: [] for name in wanted.names}
    for file in tables.list_files(paths, format):
        readers: dict[str, Callable[[], Any]] = {
            "parquet": lambda file=file: tables.read_parquet(file, wanted),
            "csv": lambda file=file: tables.read_csv(file, wanted, None),
            "jsonl": lambda file=file: tables.read_jsonl(file, lambda number, line: wanted.schema(file, number, line)),
        }
        try:
            for batch, _ in readers[format]():
                for name, values in columns.items():
                    values += batch.column(name).to_pylist()
        except (tables.pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} cannot be read, expected complete {format}: {reason}") from error
    return columns, format == "csv"


class _Wanted:
    """The columns to read, as `hf_gr.files.tables` asks for them."""

    def __init__(self, arguments: dict[str, str]) -> None:
        self.arguments = arguments
        self.names = list(dict.fromkeys(arguments.values()))

    def check(self, file: Path, names: Sequence[str], there: Sequence[str]) -> None:
        for name in names:
            if there.count(name) != 1:
                raise _missing(str(file), name, self.arguments, there)

    def schema(self, file: Path, number: int, line: bytes) -> Any:
        """The types of the first line of JSON."""
        from hf_gr.files import tables

        pa = tables.pa
        first = tables.read_object(file, number, line, pa.schema(dict.fromkeys(self.names, pa.string())))
        self.check(file, self.names, list(first))
        kinds = {int: pa.int64(), float: pa.float64()}
        return pa.schema({name: kinds.get(type(json.loads(line)[name]), pa.string()) for name in self.names})


def _as_ids(values: list[Any], items: SemanticIds | None, *, is_text: bool) -> list[ItemId]:
    """Item ids: of the kind that semantic IDs have, or integers if all texts of a CSV look like integers."""
    kind = None if items is None else type(items.item_ids[0])
    if kind is str:
        return [str(value) for value in values]
    looks = all(isinstance(value, int) or (is_text and _is_integer(value)) for value in values)
    if looks and (is_text or kind is int):
        return [int(value) for value in values]
    return values


def _is_integer(text: str) -> bool:
    """Whether a text is what an integer is written as: 7, and not 007."""
    return text.lstrip("-").isdecimal() and str(int(text)) == text


def _as_times(values: list[Any], name: str) -> np.ndarray:
    """Times in an order that can be sorted."""
    for convert in (lambda: np.asarray(values, dtype=np.float64), lambda: np.asarray(values, dtype="datetime64[us]")):
        try:
            return convert()
        except (TypeError, ValueError, OverflowError):
            continue
    raise ValueError(
        f"time={name!r} is {values[0]!r} in the first row, expected numbers, dates, or texts such as 2026-11-22T09:30"
    )
