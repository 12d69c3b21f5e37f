# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table, wherever its rows are: columns that are asked for by role, read in batches or windows of rows.

A role is the argument that names the column, which errors name, too.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128_hexdigest

from .cells import shorten
from .files import READ_ERRORS, Format, find_files, pa, pyarrow, read_csv, read_jsonl, read_parquet
from .memory import HISTORY, is_histories, is_in_memory, to_arrow


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a table."""

    first_row: int  # from 0 through all files
    columns: Any  # what was read, of Arrow
    starts: tuple[tuple[int, str], ...] = field(repr=False)  # of every file begun so far: its first row, its name
    number: int = 0  # of the window

    def __len__(self) -> int:
        return self.columns.num_rows

    def cells(self, name: str) -> list[Any]:
        """A column, as Python's values."""
        return self.columns.column(name).to_pylist()

    def problem(self, names: str | Sequence[str], row: int, value: object, expected: str) -> str:
        """The message for bad cells of a row, counted from the first of these; it names the row from 0 in its file."""
        place, number = self._place(row)
        where = f"column {names!r}" if isinstance(names, str) else f"columns {', '.join(map(repr, names))}"
        return f"{place}, {where}, row {number} is {shorten(value)}, expected {expected}"

    def problem_of_row(self, row: int, what: str, user: str | None = None) -> str:
        """The message for a bad row, without its cells; it names the row by column `user` if that is given."""
        place, number = self._place(row)
        who = f"row {number}" if user is None else f"user {shorten(self.columns.column(user)[row].as_py())}"
        return f"{place}, {who} {what}"

    def problem_of_type(self, name: str, expected: str) -> str:
        """The message for a column of another type."""
        return f"{self.starts[-1][1]}, column {name!r} has type {self.columns.column(name).type}, expected {expected}"

    def _place(self, row: int) -> tuple[str, int]:
        start, place = self.starts[bisect([start for start, _ in self.starts], self.first_row + row) - 1]
        return place, self.first_row + row - start


class Table:
    """A table in memory, or in a file, several in order, or a folder, whose files are read in order of name.

    Files are Parquet, CSV or JSON lines, the latter two also compressed (`.gz`, `.bz2`, `.zst`). `roles` are the
    columns to read, and the argument that names each; `name` is what errors call a table in memory; `types` are, by
    role, those of columns that are null in the first line of JSON lines.

    Example:
        >>> table = Table({"who": ["ann", "bob"], "seen": [[5], [7, 8]]}, {"seen": "history"})
        >>> [rows.cells("seen") for rows in table.windows(1)]
        [[[5]], [[7, 8]]]
    """

    def __init__(
        self,
        data: Any,
        roles: Mapping[str, str],
        *,
        name: str = "the table",
        format: Format | None = None,
        delimiter: str | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> None:
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
            raise ValueError(f"delimiter={delimiter!r}, expected one ASCII character: omit it for a tab or comma")
        self.roles, self._delimiter, self._types = dict(roles), delimiter, types or {}
        self.files, self.format, self.name = None, format, name  # no files: it is in memory
        self._rows: Any = None
        if is_in_memory(data) and (HISTORY in self.roles.values() or not is_histories(data)):
            if format is not None or delimiter is not None:
                raise ValueError("format= or delimiter= with a table in memory, expected neither: they are of files")
            self._rows = to_arrow(data, roles, name).combine_chunks()
        elif data and is_histories(data):
            raise ValueError(
                f"{name} is {shorten(data)}, expected files, or a table whose columns have names: pass a dictionary "
                "of columns, or a data frame"
            )
        else:
            self.files, self.format = find_files(data, format)
            if delimiter is not None and self.format != "csv":
                raise ValueError(f"delimiter={delimiter!r} is given and {self.format} has none: omit it")
            more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
            self.name = f"{self.files[0]}{more}"
        self.is_text = self.format == "csv"  # all cells are texts or null

    @property
    def num_rows(self) -> int | None:
        """The number of rows if it is known without reading all, as in memory and in Parquet."""
        if self.files is None:
            return len(self._rows)
        is_known = self.format == "parquet"
        return sum(pyarrow.parquet.read_metadata(file).num_rows for file in self.files) if is_known else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.stat().st_size for file in self.files or ())

    def fingerprint(self) -> list[list[Any]]:
        """By file, its name, its size, and when it was written; of a table in memory, a digest of what is read."""
        if self.files is not None:
            return [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in self.files]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._rows.schema) as writer:
            writer.write_table(self._rows)
        return [[self.name, len(self._rows), xxh3_128_hexdigest(sink.getvalue())]]

    def batches(self, size: int | None = None) -> Iterator[tuple[Rows, int]]:
        """The rows of each file, and the byte in all files where they end. Batches of text may have another size."""
        row, before = 0, 0
        if self.files is None:
            for batch in self._rows.to_batches(max_chunksize=size):
                if batch.num_rows:
                    yield Rows(row, _plain(batch), ((0, self.name),)), 0
                row += batch.num_rows
        for file in self.files or ():
            start, end = row, 0
            try:
                for batch, end in self._read(file, size):
                    if batch.num_rows:
                        yield Rows(row, _plain(batch), ((start, str(file)),)), before + end
                    row += batch.num_rows
            except READ_ERRORS as error:
                fix = "quote cells that hold the delimiter, or pass delimiter=; text is UTF-8"
                raise ValueError(
                    f"{file} cannot be read from row {row - start} on, expected complete {self.format}: "
                    f"{' '.join(str(error).split())} ({fix if self.is_text else 'write it again'})"
                ) from error
            before += file.stat().st_size

    def windows(self, size: int) -> Iterator[Rows]:
        """All rows with the types of the first, `size` at a time and no more in memory; the last may have fewer."""
        schema: Any = None
        pending: list[Any] = []
        starts: list[tuple[int, str]] = []
        held = number = 0
        for rows, _ in self.batches(size):
            starts += [start for start in rows.starts if start not in starts[-1:]]
            schema = schema or rows.columns.schema.remove_metadata()
            batch = _cast(rows, schema, first=starts[0][1])
            while batch.num_rows:
                pending.append(batch.slice(0, size - held))
                batch, held = batch.slice(len(pending[-1])), held + len(pending[-1])
                if held == size:
                    yield Rows(number * size, _join(pending, schema), tuple(starts), number)
                    pending, held, number = [], 0, number + 1
        if pending:
            yield Rows(number * size, _join(pending, schema), tuple(starts), number)

    def _read(self, file: Any, size: int | None) -> Any:
        if self.format == "parquet":
            return read_parquet(file, self.roles, size and max(size, 64))
        if self.format == "csv":
            return read_csv(file, self.roles, self._delimiter)
        return read_jsonl(file, self.roles, self._types)


def is_text(kind: Any) -> bool:
    """Whether a type of Arrow is text."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _plain(batch: Any) -> Any:
    """A batch without categories and views, which differ from file to file and which few functions of Arrow take."""
    schema = pa.schema([(field.name, _plain_type(field.type)) for field in batch.schema])
    return batch if schema.types == batch.schema.types else batch.cast(schema)


def _plain_type(kind: Any) -> Any:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        value = _plain_type(kind.value_type)
        made = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return kind if value == kind.value_type else made(value)
    return kind


def _cast(rows: Rows, schema: Any, *, first: str) -> Any:
    batch = rows.columns
    if batch.schema.equals(schema):
        return batch
    for name, expected in zip(schema.names, schema.types, strict=True):
        try:
            batch.column(name).cast(expected)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ValueError(rows.problem_of_type(name, f"{expected} as in {first}: convert it")) from None
    return batch.cast(schema)


def _join(batches: Sequence[Any], schema: Any) -> Any:
    return pa.Table.from_batches(batches, schema=schema).combine_chunks()
