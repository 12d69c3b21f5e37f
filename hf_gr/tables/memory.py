# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables in memory as Arrow tables, and rows as the same kind of table: pandas, Polars, Arrow, `datasets`, lists.

A library is imported only if one of its tables is given.
"""

import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from .cells import shorten
from .files import check_columns, first_failure, pa

HISTORY = "history"  # the only column of a list of histories
EXPECTED = (
    "expected a file or several, a pandas, Polars or Arrow table, a datasets.Dataset, a dictionary of columns, or a "
    "list of histories, each a list of item ids: .collect() a LazyFrame, choose a split of a DatasetDict, write an "
    "IterableDataset to Parquet, .tolist() an array"
)


def is_histories(table: Any) -> bool:
    """Whether it is a list of histories, and no table, file or list of files."""
    is_list = isinstance(table, (list, tuple)) or _is(table, "pandas", "Series")
    return is_list and not (len(table) and all(isinstance(one, (str, PathLike)) for one in table))


def is_in_memory(table: Any) -> bool:
    """Whether it is a table or histories in memory, and no file, folder, or list of them."""
    return is_histories(table) or not isinstance(table, (str, PathLike, list, tuple))


def paths_of(table: Any) -> list[Any]:
    """The files and folders that a table is in; none, if it is in memory."""
    if is_in_memory(table):
        return []
    return [table] if isinstance(table, (str, PathLike)) else list(table)


def to_arrow(table: Any, roles: Mapping[str, str], name: str) -> Any:
    """Some columns, named by their roles, as an Arrow table; no other column is looked at."""
    names = list(roles)
    if is_histories(table):
        table = {HISTORY: _read_histories(table, name)}
    if _is(table, "pandas", "DataFrame") or isinstance(table, Mapping):
        check_columns(name, roles, list(table))  # the columns of both
        return pa.table({column: _to_column(table[column], f"{name}, column {column!r}") for column in names})
    if _is(table, "polars", "DataFrame"):
        check_columns(name, roles, table.columns)
        return table.select(names).to_arrow()
    if _is(table, "datasets", "Dataset"):  # its rows may be chosen ones of its table
        check_columns(name, roles, table.column_names)
        return table.select_columns(names).with_format("arrow")[:].select(names)
    if not hasattr(table, "__arrow_c_stream__") or hasattr(table, "dtype"):  # a series has both
        if not isinstance(table, pa.RecordBatch):
            raise ValueError(f"{name} is a {type(table).__name__}, {EXPECTED}")
        table = pa.Table.from_batches([table])
    table = pa.table(table)
    check_columns(name, roles, table.column_names)
    return table.select(names)


def give_back(rows: Any, table: Any, user: str | None, *, is_made: bool = False) -> Any:
    """An Arrow table of one row per user as the kind of table that was given: of its rows, unless users were made.

    Example:
        >>> rows = pa.table({"row": [0, 1], "items": [["tea"], ["rye", "tea"]]})
        >>> give_back(rows, [["ham", "jam"], ["yam"]], None)
        [['tea'], ['rye', 'tea']]
    """
    if is_histories(table):
        return rows.column("items").to_pylist()
    if _is(table, "polars", "DataFrame"):
        return sys.modules["polars"].from_arrow(rows)
    if _is(table, "datasets", "Dataset"):
        return sys.modules["datasets"].Dataset(rows)
    if not _is(table, "pandas", "DataFrame"):
        return rows
    columns = {}
    for name in rows.column_names:
        is_list = pa.types.is_list(rows.schema.field(name).type)  # which pandas would make arrays of NumPy
        columns[name] = rows[name].to_pylist() if is_list else rows[name].to_numpy()
    if user is not None and not is_made:
        columns[user] = table[user]  # with its own type
    return sys.modules["pandas"].DataFrame(columns, index=None if is_made else table.index)


def _is(table: Any, library: str, name: str) -> bool:
    """Whether something is of a class of a library: never, if that is not imported."""
    found = getattr(sys.modules.get(library), name, None)
    return isinstance(found, type) and isinstance(table, found)


def _read_histories(histories: Sequence[Any], name: str) -> list[Any]:
    read = [one.tolist() if hasattr(one, "tolist") else one for one in histories]  # NumPy and PyTorch
    for number, history in enumerate(read):
        if not isinstance(history, list | tuple | None):
            raise ValueError(
                f"{name}[{number}] is {shorten(history)}, expected a list of item ids: one user's history is a list "
                "in a list"
            )
    return read


def _to_column(values: Any, what: str) -> Any:
    for row, value in enumerate(values):
        if isinstance(value, (set, frozenset)):
            raise ValueError(f"{what}, row {row} is {shorten(value)}, expected a list: a set has no order")

    def convert(some: Any) -> Any:
        return pa.array(some, from_pandas=True)

    try:
        return convert(values)
    except pa.ArrowException as error:
        listed = list(values)
        row = first_failure(listed, convert)
        raise ValueError(
            f"{what}, row {row} is {shorten(listed[row])}, expected the type of the rows before it "
            f"({' '.join(str(error.args[0]).split())}): convert the column"
        ) from error
