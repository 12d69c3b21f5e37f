# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of users, in windows of rows. Knows columns; where rows come from, `files` and `in_memory` know.

Rows are numbered from 0 through the whole table.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from hf_gr.files.tables import INT64_MAX, INT64_MIN, Format, pa, shorten

from .columns import UserColumns, is_histories
from .files import InFiles
from .in_memory import InMemory

SKIPPING = "drop the row, or skip such rows with on_error='skip' (--on-error skip)"


class Users:
    """A table of users.

    Args:
        users: a file, several in order, or a folder, whose files are read in order of name; or a table in memory: see
            `InMemory`.
        columns: what to read.
        are_strings: whether item ids are strings.
        format: of files: `"parquet"`, `"csv"` or `"jsonl"`; by default from the first one's suffix.
        delimiter: between the columns of CSV; by default a tab in `.tsv` and a comma elsewhere.

    Attributes:
        source: the files, or the table in memory.
        schema: of the columns that are read.

    Raises:
        ValueError: a file is missing, damaged or of another format, a column is missing, or there is no row.
    """

    def __init__(
        self,
        users: Any,
        columns: UserColumns,
        *,
        are_strings: bool,
        format: Format | None = None,
        delimiter: str | None = None,
    ) -> None:
        self.columns, self.are_strings = columns, are_strings
        self.source: InFiles | InMemory
        if is_in_memory(users):
            if format is not None or delimiter is not None:
                raise ValueError("format= or delimiter= with a table in memory, expected neither: they are of files")
            self.source = InMemory(users, columns)
        else:
            self.source = InFiles(users, columns, are_strings=are_strings, format=format, delimiter=delimiter)
        first = next(self.windows(1), None)  # also finds a missing column before a model is loaded
        if first is None:
            raise ValueError(f"{self.name} has no row, expected at least one: there is nobody to recommend to")
        self.schema = first.columns.schema
        self._check_types(first.starts[0][1])

    @property
    def name(self) -> str:
        """The files, or the table in memory, as messages name them."""
        return self.source.name

    @property
    def num_rows(self) -> int | None:
        """The number of rows if it is known without reading all."""
        return self.source.num_rows

    def windows(self, size: int) -> Iterator[Window]:
        """All rows, `size` at a time; the last window may have fewer. Memory is that of a window.

        Raises:
            ValueError: a file cannot be read; names the first row affected.
        """
        schema: Any = None
        pending: list[Any] = []
        held, number, row = 0, 0, 0
        starts: list[tuple[int, str]] = []
        for place, batch in self.source.batches(size):
            if not starts or starts[-1][1] != place:
                starts.append((row, place))
            if schema is None:
                schema = _plain(batch.schema)
            batch = _as(batch, schema, place, first=starts[0][1])
            row += batch.num_rows
            start = 0
            while batch.num_rows - start:
                taken = min(size - held, batch.num_rows - start)
                pending.append(batch.slice(start, taken))
                held, start = held + taken, start + taken
                if held == size:
                    yield Window(number, number * size, _join(pending, schema), tuple(starts))
                    pending, held, number = [], 0, number + 1
        if pending:
            yield Window(number, number * size, _join(pending, schema), tuple(starts))

    def _check_types(self, place: str) -> None:
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
                    f"{place}, column {name!r} has type {found}, expected lists of {kind}, as the catalogue's "
                    "ids are: convert the column"
                )


@dataclass(frozen=True, eq=False)
class Window:
    """Some rows of a table.

    Attributes:
        number: of the window, from 0.
        first_row: the number of its first row in the whole table.
        columns: what was read.
        starts: the first row of every file begun so far, and the file's name.
    """

    number: int
    first_row: int
    columns: Any
    starts: tuple[tuple[int, str], ...] = field(repr=False)

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

    def _place(self, row: int) -> tuple[str, int]:
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


def _as(batch: Any, schema: Any, place: str, *, first: str) -> Any:
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
                f"{place}, column {name!r} has type {found}, expected {expected} as in {first}: convert it"
            ) from None
    return batch.cast(schema)


def is_in_memory(users: Any) -> bool:
    """Whether users are given as a table or histories in memory, and not as a file, a folder, or a list of them."""
    return is_histories(users) or not isinstance(users, (str, PathLike, list, tuple))


def _plain(schema: Any) -> Any:
    """A schema without metadata and without categories, which differ from file to file."""
    return pa.schema(
        [(field.name, field.type.value_type if pa.types.is_dictionary(field.type) else field.type) for field in schema]
    )


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _join(batches: list[Any], schema: Any) -> Any:
    return pa.Table.from_batches(batches, schema=schema).combine_chunks()
