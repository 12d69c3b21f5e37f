# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of users in files: Parquet, CSV and JSON lines, read in batches. Knows no window of rows and no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from hf_gr.files.tables import (
    Format,
    format_of,
    list_files,
    pa,
    pyarrow,
    read_csv,
    read_jsonl,
    read_object,
    read_parquet,
)

from .columns import UserColumns

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
# What pyarrow raises for a damaged file or another format.
READ_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)


class InFiles:
    """A table in files: what `Users` reads.

    Args:
        paths: a file, several in order, or a folder, whose files are read in order of name.
        columns: what to read.
        are_strings: whether item ids are strings.
        format: `"parquet"`, `"csv"` or `"jsonl"`; by default from the first file's suffix.
        delimiter: between the columns of CSV; by default a tab in `.tsv` and a comma elsewhere.

    Raises:
        ValueError: a file is missing or empty, or of an unknown format.
    """

    def __init__(
        self, paths: Paths, columns: UserColumns, *, are_strings: bool, format: Format | None, delimiter: str | None
    ) -> None:
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
            raise ValueError(f"delimiter={delimiter!r}, expected one ASCII character: omit it for a tab or comma")
        self._columns, self._are_strings, self._delimiter = columns, are_strings, delimiter
        self.format: Format = format or format_of(paths)
        self.files = list_files(paths, self.format)
        self._check_sizes()

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

    def batches(self, size: int) -> Iterator[tuple[str, Any]]:
        """The rows, and the file that they are in.

        Raises:
            ValueError: a file cannot be read; names the first row affected, from 0 through all files.
        """
        row = 0
        for file in self.files:
            try:
                for batch in self._read(file, batch_rows=size):
                    yield str(file), batch
                    row += batch.num_rows
            except READ_ERRORS as error:
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"{file} cannot be read from row {row} on, expected complete {self.format}: {reason} "
                    "(write the file again)"
                ) from error

    def _read(self, file: Path, *, batch_rows: int) -> Iterator[Any]:
        if self.format == "parquet":
            batches = read_parquet(file, self._columns, batch_rows=max(batch_rows, 64))
        elif self.format == "csv":
            batches = read_csv(file, self._columns, self._delimiter)
        else:
            batches = read_jsonl(file, lambda number, line: self._json_schema(file, number, line))
        for batch, _ in batches:
            if batch.num_rows:
                yield batch.select(self._columns.names)

    def _json_schema(self, file: Path, number: int, line: bytes) -> Any:
        """The types that columns have by their meaning; else those of the first line."""
        item = pa.string() if self._are_strings else pa.int64()
        lists = dict.fromkeys(("history", "exclude", "filter"), pa.list_(item)) | {"tokens": pa.list_(pa.int64())}
        types: dict[str, Any] = {"text": pa.string(), "is_new": pa.bool_()} | lists
        roles = self._columns.by_role
        shown = pa.schema({name: types.get(role, item) for role, name in reversed(roles.items())})
        first = read_object(file, number, line, shown)
        self._columns.check(file, self._columns.names, list(first))
        found: dict[str, Any] = {}
        for role, name in roles.items():
            if role == "target":
                types[role] = pa.list_(item) if isinstance(first[name], list) else item
            elif role not in types:
                types[role] = pa.string() if first[name] is None else pa.scalar(first[name]).type
            found.setdefault(name, types[role])
        return pa.schema(found)

    def _check_sizes(self) -> None:
        """Refuse an empty file, for which pyarrow has many different errors."""
        empty = [file for file in self.files if file.is_file() and not file.stat().st_size]
        if empty:
            raise ValueError(f"{empty[0]} has no byte, expected a table of users: write it again")
