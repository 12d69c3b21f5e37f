# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of users that are in memory, and rows given back as the same kind of table. Knows no file and no model.

pandas, Polars, Arrow, `datasets`, and lists of histories. A library is imported only if a table of it is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xxhash import xxh3_128_hexdigest

from hf_gr.files.tables import first_failure, pa, shorten

from .columns import HISTORY, UserColumns, is_histories

NAME = "users"  # of such a table, in messages: the argument
EXPECTED = (
    "expected a file or several, a pandas, Polars or Arrow table, a datasets.Dataset, or a list of histories, each a "
    "list of item ids"
)


class InMemory:
    """A table in memory: what `Users` reads, and how rows become a table of the same kind.

    Args:
        table: a pandas or Polars data frame, an Arrow table or record batch, a `datasets.Dataset`, another table that
            offers Arrow's C stream (its rows come back as an Arrow table), or a list of histories (which come back as
            a list of lists of items).
        columns: what to read; no other column is looked at.

    Raises:
        ValueError: it is no such table, it lacks a column, or a column cannot be a column of Arrow.

    Example:
        >>> users = InMemory([["ham", "jam"], ["yam"]], UserColumns(history="history"))
        >>> users.num_rows
        2
        >>> users.like(pa.table({"row": [0, 1], "items": [["tea"], ["rye", "tea"]]}))
        [['tea'], ['rye', 'tea']]
    """

    def __init__(self, table: Any, columns: UserColumns) -> None:
        kind = next((kind for is_one, kind in KINDS if is_one(table)), None)
        if kind is None:
            raise ValueError(f"users is a {type(table).__name__}, {EXPECTED}{_fix(table)}")
        self._kind, self._user = kind(table), columns.user
        columns.check(NAME, columns.names, self._kind.names)
        self._rows: Any = pa.table({name: self._kind.read(name) for name in columns.names}).combine_chunks()

    @property
    def name(self) -> str:
        """What messages call it."""
        return NAME

    @property
    def num_rows(self) -> int:
        """The number of its rows."""
        return len(self._rows)

    def fingerprint(self) -> list[list[Any]]:
        """A digest of what is read: the same rows have the same one."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._rows.schema) as writer:
            writer.write_table(self._rows)
        return [[NAME, len(self._rows), xxh3_128_hexdigest(sink.getvalue())]]

    def batches(self, size: int) -> Iterator[tuple[str, Any]]:
        """The rows, and the name of what they are in."""
        for batch in self._rows.to_batches(max_chunksize=size):
            yield NAME, batch

    def like(self, rows: Any) -> Any:
        """An Arrow table of one row per user, in order, as the kind of table that was given."""
        return self._kind.give(rows, self._user)


class _Arrow:
    """An Arrow table; others become one by Arrow's C stream."""

    def __init__(self, table: Any) -> None:
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        elif not isinstance(table, pa.Table):
            table = pa.table(table)
        self._table = table

    @property
    def names(self) -> list[str]:
        return self._table.column_names

    def read(self, name: str) -> Any:
        return self._table.column(name)

    def give(self, rows: Any, user: str | None) -> Any:
        return rows


class _Polars(_Arrow):
    """A data frame of Polars."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    @property
    def names(self) -> list[str]:
        return self._frame.columns

    def read(self, name: str) -> Any:
        return self._frame.get_column(name).to_arrow()

    def give(self, rows: Any, user: str | None) -> Any:
        return sys.modules["polars"].from_arrow(rows)


class _Dataset(_Arrow):
    """A `datasets.Dataset`; its rows may be chosen ones of its table."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def names(self) -> list[str]:
        return self._dataset.column_names

    def read(self, name: str) -> Any:
        return self._dataset.select_columns([name]).with_format("arrow")[:].column(name)

    def give(self, rows: Any, user: str | None) -> Any:
        return sys.modules["datasets"].Dataset(rows)


class _Pandas:
    """A data frame of pandas. Its index is kept: what is assigned to the frame goes to the right rows."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    @property
    def names(self) -> list[str]:
        return list(self._frame.columns)

    def read(self, name: str) -> Any:
        return _to_arrow(self._frame[name], name)

    def give(self, rows: Any, user: str | None) -> Any:
        columns = {}
        for name in rows.column_names:
            if name == user:
                columns[name] = self._frame[name]  # with its own type
            else:
                is_list = pa.types.is_list(rows.schema.field(name).type)  # which pandas would make arrays of NumPy
                columns[name] = rows[name].to_pylist() if is_list else rows[name].to_numpy()
        return sys.modules["pandas"].DataFrame(columns, index=self._frame.index)


class _Histories:
    """Histories without a table: a list of lists of item ids."""

    names = (HISTORY,)

    def __init__(self, histories: Sequence[Any]) -> None:
        self._histories: list[Any] = []
        for number, history in enumerate(histories):
            found = history.tolist() if hasattr(history, "tolist") else history  # NumPy and PyTorch
            if isinstance(found, tuple):
                found = list(found)
            if not isinstance(found, list | None):
                raise ValueError(
                    f"users[{number}] is {shorten(history)}, expected a list of item ids: one user's history is a "
                    "list in a list"
                )
            self._histories.append(found)

    def read(self, name: str) -> Any:
        return _to_arrow(self._histories, name)

    def give(self, rows: Any, user: str | None) -> Any:
        return rows.column("items").to_pylist()


def _of(library: str, *names: str) -> Callable[[Any], bool]:
    """Whether something is of a class of a library: never, if nobody has imported that."""

    def is_one(table: Any) -> bool:
        module = sys.modules.get(library)
        classes = tuple(found for name in names if isinstance(found := getattr(module, name, None), type))
        return isinstance(table, classes)

    return is_one


KINDS: tuple[tuple[Callable[[Any], bool], Any], ...] = (
    (is_histories, _Histories),
    (_of("pandas", "DataFrame"), _Pandas),
    (_of("polars", "DataFrame"), _Polars),
    (_of("datasets", "Dataset"), _Dataset),
    (_of("pyarrow", "Table", "RecordBatch"), _Arrow),
    (lambda table: hasattr(table, "__arrow_c_stream__") and not hasattr(table, "dtype"), _Arrow),  # no series
)
# What is near to one of these, and what makes it one.
NEAR = (
    (
        _of("pandas", "Series"),
        ".tolist() makes a list of histories of it, and .reset_index() makes a data frame of it",
    ),
    (_of("polars", "LazyFrame"), ".collect() it"),
    (_of("polars", "Series"), ".to_frame() makes a data frame of it"),
    (_of("datasets", "DatasetDict", "IterableDatasetDict"), "choose one of its splits"),
    (_of("datasets", "IterableDataset"), "write it to Parquet, and pass the file and output="),
    (
        lambda table: isinstance(table, dict),
        "pass list(users.values()) if it has a history for each user, or pandas.DataFrame(users) if it has columns",
    ),
    (lambda table: hasattr(table, "tolist"), ".tolist() makes a list of it"),
)


def _fix(table: Any) -> str:
    return next((f": {fix}" for is_one, fix in NEAR if is_one(table)), "")


def _to_arrow(values: Any, name: str) -> Any:
    """A column of Arrow.

    Raises:
        ValueError: its values are of several types (names the first row that does not fit those before it), or sets.
    """
    for row, value in enumerate(values):
        if isinstance(value, (set, frozenset)):
            raise ValueError(
                f"{NAME}, column {name!r}, row {row} is {shorten(value)}, expected a list: a set has no order"
            )

    def convert(some: Any) -> Any:
        return pa.array(some, from_pandas=True)

    try:
        return convert(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        listed = list(values)
        row = first_failure(listed, lambda some: _as_value_error(convert, some))
        raise ValueError(
            f"{NAME}, column {name!r}, row {row} is {shorten(listed[row])}, expected the type of the rows before it "
            f"({' '.join(str(error.args[0]).split())}): convert the column"
        ) from error


def _as_value_error(convert: Callable[[Any], object], some: Any) -> None:
    try:
        convert(some)
    except (pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ValueError from error
