# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of users, streamed in windows of rows. Knows files and columns, nothing of models and items.

Parquet, CSV and JSON lines; rows are numbered from 0 through all files, in the given order.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from hf_gr.files.tables import (
    CODECS,
    INT64_MAX,
    INT64_MIN,
    SUFFIXES,
    Format,
    list_files,
    pa,
    pyarrow,
    read_csv,
    read_jsonl,
    read_object,
    read_parquet,
    shorten,
)

from .columns import UserColumns

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
# What pyarrow raises for a damaged file or another format.
READ_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)
SKIPPING = "drop the row, or skip such rows with on_error='skip' (--on-error skip)"


class Users:
    """A table of users.

    Args:
        paths: a file, several in order, or a folder, whose files are read in order of name.
        columns: what to read.
        are_strings: whether item ids are strings.
        format: `"parquet"`, `"csv"` or `"jsonl"`; by default from the first file's suffix.
        delimiter: between the columns of CSV; by default a tab in `.tsv` and a comma elsewhere.

    Raises:
        ValueError: a file is missing, damaged or of another format, a column is missing, or there is no row.
    """

    def __init__(
        self,
        paths: Paths,
        columns: UserColumns,
        *,
        are_strings: bool,
        format: Format | None = None,
        delimiter: str | None = None,
    ) -> None:
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
            raise ValueError(f"delimiter={delimiter!r}, expected one ASCII character: omit it for a tab or comma")
        self.columns, self.are_strings, self._delimiter = columns, are_strings, delimiter
        self.format: Format = format or _format_of(paths)
        self.files = list_files(paths, self.format)
        self._check_sizes()
        first = next(self.windows(1), None)  # also finds a missing column before a model is loaded
        if first is None:
            raise ValueError(f"{self.name} has no row, expected at least one: there is nobody to recommend to")
        self.schema = first.columns.schema
        self._check_types()

    @property
    def name(self) -> str:
        """The files, as messages name them."""
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def num_rows(self) -> int | None:
        """The number of rows if the files record it, as Parquet does."""
        if self.format != "parquet":
            return None
        return sum(pyarrow.parquet.read_metadata(file).num_rows for file in self.files)

    def fingerprint(self) -> list[list[Any]]:
        """By file: its name, its size, and when it was written."""
        stats = [(file, file.stat()) for file in self.files]
        return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in stats]

    def windows(self, size: int) -> Iterator[Window]:
        """All rows, `size` at a time; the last window may have fewer. Memory is that of a window.

        Raises:
            ValueError: a file cannot be read; names the first row affected.
        """
        schema: Any = None
        pending: list[Any] = []
        held, number, row = 0, 0, 0
        starts: list[tuple[int, Path]] = []
        for file in self.files:
            starts.append((row, file))
            try:
                for batch in self._read(file, batch_rows=size):
                    if schema is None:
                        schema = _plain(batch.schema)
                    batch = self._as(batch, schema, file)
                    row += batch.num_rows
                    start = 0
                    while batch.num_rows - start:
                        taken = min(size - held, batch.num_rows - start)
                        pending.append(batch.slice(start, taken))
                        held, start = held + taken, start + taken
                        if held == size:
                            yield Window(number, number * size, _join(pending, schema), tuple(starts))
                            pending, held, number = [], 0, number + 1
            except READ_ERRORS as error:
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"{file} cannot be read from row {row} on, expected complete {self.format}: {reason} "
                    "(write the file again)"
                ) from error
        if pending:
            yield Window(number, number * size, _join(pending, schema), tuple(starts))

    def _read(self, file: Path, *, batch_rows: int) -> Iterator[Any]:
        if self.format == "parquet":
            batches = read_parquet(file, self.columns, batch_rows=max(batch_rows, 64))
        elif self.format == "csv":
            batches = read_csv(file, self.columns, self._delimiter)
        else:
            batches = read_jsonl(file, lambda number, line: self._json_schema(file, number, line))
        for batch, _ in batches:
            if batch.num_rows:
                yield batch.select(self.columns.names)

    def _as(self, batch: Any, schema: Any, file: Path) -> Any:
        """A batch with the types of the first one."""
        if batch.schema.equals(schema):
            return batch
        for name, expected in zip(schema.names, schema.types, strict=True):
            found = batch.schema.field(name).type
            try:
                if found != expected:
                    batch.column(name).cast(expected)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise ValueError(
                    f"{file}, column {name!r} has type {found}, expected {expected} as in {self.files[0]}: convert it"
                ) from None
        return batch.cast(schema)

    def _json_schema(self, file: Path, number: int, line: bytes) -> Any:
        """The types that columns have by their meaning; else those of the first line."""
        item = pa.string() if self.are_strings else pa.int64()
        lists = dict.fromkeys(("history", "exclude", "filter"), pa.list_(item)) | {"tokens": pa.list_(pa.int64())}
        types: dict[str, Any] = {"text": pa.string(), "is_new": pa.bool_()} | lists
        roles = self.columns.by_role
        shown = pa.schema({name: types.get(role, item) for role, name in reversed(roles.items())})
        first = read_object(file, number, line, shown)
        self.columns.check(file, self.columns.names, list(first))
        found: dict[str, Any] = {}
        for role, name in roles.items():
            if role == "target":
                types[role] = pa.list_(item) if isinstance(first[name], list) else item
            elif role not in types:
                types[role] = pa.string() if first[name] is None else pa.scalar(first[name]).type
            found.setdefault(name, types[role])
        return pa.schema(found)

    def _check_types(self) -> None:
        """Refuse columns without lists of ids, or with other ids than the catalogue's kind; a text may be a list."""
        kind, is_id = ("texts", _is_text) if self.are_strings else ("integers", pa.types.is_integer)
        for role in ("history", "exclude", "filter"):
            name = getattr(self.columns, role)
            found = None if name is None else self.schema.field(name).type
            if found is None or _is_text(found) or pa.types.is_null(found):
                continue
            value = getattr(found, "value_type", None)
            if not (value is not None and (is_id(value) or pa.types.is_null(value) or pa.types.is_dictionary(value))):
                raise ValueError(
                    f"{self.files[0]}, column {name!r} has type {found}, expected lists of {kind}, as the catalogue's "
                    "ids are: convert the column"
                )

    def _check_sizes(self) -> None:
        """Refuse an empty file, for which pyarrow has many different errors."""
        empty = [file for file in self.files if file.is_file() and not file.stat().st_size]
        if empty:
            raise ValueError(f"{empty[0]} has no byte, expected a table of users: write it again")


@dataclass(frozen=True, eq=False)
class Window:
    """Some rows of a table.

    Attributes:
        number: of the window, from 0.
        first_row: the number of its first row in the whole table.
        columns: what was read.
        starts: the first row of every file begun so far, and the file.
    """

    number: int
    first_row: int
    columns: Any
    starts: tuple[tuple[int, Path], ...] = field(repr=False)

    def __len__(self) -> int:
        return self.columns.num_rows

    def cells(self, name: str) -> list[Any]:
        """A column, as Python's values."""
        return self.columns.column(name).to_pylist()

    def problem(self, name: str, row: int, value: object, expected: str) -> str:
        """The message for a bad cell; `row` is counted from the window's first."""
        file, number = self._place(row)
        return f"{file}, column {name!r}, row {number} is {shorten(value)}, expected {expected}"

    def problem_of_row(self, row: int, what: str) -> str:
        """The message for a bad row, without its cells."""
        file, number = self._place(row)
        return f"{file}, row {number} {what}"

    def _place(self, row: int) -> tuple[Path, int]:
        number = self.first_row + row
        return self.starts[bisect([start for start, _ in self.starts], number) - 1][1], number


def read_list(value: Any, *, are_strings: bool) -> list[Any] | None:
    """The ids in a cell: from a list or from a text; None for anything else.

    A text is JSON, or ids separated by spaces or commas, with or without brackets; ids with spaces or commas are in
    quotes.

    Example:
        >>> [read_list(text, are_strings=False) for text in ("5 7", "[5, 7]", "5,x")]
        [[5, 7], [5, 7], None]
        >>> read_list("['rye bread', 'jam']", are_strings=True)
        ['rye bread', 'jam']
    """
    if isinstance(value, str):
        value = _split(value.strip())
        if not are_strings:
            try:
                value = [int(part) for part in value]
            except ValueError:
                return None
    if not isinstance(value, list):
        return None
    if are_strings:
        return value if all(type(item) is str for item in value) else None
    return value if all(type(item) is int and INT64_MIN <= item <= INT64_MAX for item in value) else None


def _split(text: str) -> list[str]:
    """The ids in a text."""
    if text[:1] == "[":
        with suppress(ValueError):  # lists as Python or NumPy print them
            parts = json.loads(text)
            if all(type(part) is str for part in parts):
                return parts
    if (text[:1], text[-1:]) in (("[", "]"), ("(", ")")):
        text = text[1:-1]
    return [
        part[1:-1] if part[0] in "'\"" and len(part) > 1 and part[-1] == part[0] else part
        for part in re.findall(r"""'[^']*'|"[^"]*"|[^\s,]+""", text)
    ]


def _format_of(paths: Paths) -> Format:
    """The format, from the suffix of the first file."""
    first = Path(paths if isinstance(paths, (str, PathLike)) else next(iter(paths), ""))
    names = sorted(file.name for file in first.iterdir()) if first.is_dir() else [first.name]
    for name in names:
        endings = [ending for ending in Path(name.lower()).suffixes if ending not in CODECS]
        for format, suffixes in SUFFIXES.items():
            if endings and endings[-1] in suffixes and not name.startswith((".", "_")):
                return format  # pyright: ignore[reportReturnType]
    expected = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    raise ValueError(f"{first} does not say what it is, expected a name that ends in one of {expected}: pass format=")


def _plain(schema: Any) -> Any:
    """A schema without metadata and without categories, which differ from file to file."""
    return pa.schema(
        [(field.name, field.type.value_type if pa.types.is_dictionary(field.type) else field.type) for field in schema]
    )


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _join(batches: list[Any], schema: Any) -> Any:
    return pa.Table.from_batches(batches, schema=schema).combine_chunks()
