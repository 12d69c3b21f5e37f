# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes of items, from a table, and filters by them. Knows no catalogue and no model."""

import math
from collections.abc import Mapping
from operator import itemgetter
from os import PathLike
from typing import Any

from .requests import shown

ITEM = "item_id"
# By column: the values of which an item must have one, or the least and the largest number.
Filter = tuple[tuple[str, frozenset[Any] | tuple[float, float]], ...]
KINDS = {  # of columns: the types of a filter's values, what errors call them, and an example
    "bool": ((bool,), "a list of true or false", "[true]"),
    "number": ((int, float), "a list of numbers, or an object of min and max", '{"max": 20}'),
    "text": ((str,), "a list of texts", '["tea"]'),
}
CODES = r"^[+-]?0[0-9]|^[0-9]{16}"  # digits that a number would lose: zip codes, long ids
LARGEST = 2**1023  # of a number that a float holds


class Attributes:
    """Columns of texts, numbers and truth values, a row for each item; columns of anything else are ignored.

    Args:
        table: a file (Parquet, CSV, JSON lines), or a table in memory (a dictionary of columns, pandas, Arrow), with a
            column `item_id`. It may have items that the catalogue does not have yet.
        are_strings: whether ids are texts; else they are integers.

    Raises:
        ValueError: there is no such file, no column `item_id`, or ids are of another type, missing, or there twice.
        ImportError: pyarrow is missing.

    Example:
        >>> table = {"item_id": ["ham", "jam", "tea"], "kind": ["meat", "fruit", "drink"], "price": [9, 4, None]}
        >>> attributes = Attributes(table, are_strings=True)
        >>> attributes.items(attributes.read({"price": {"max": 10}, "kind": ["meat", "drink"]}))
        ['ham']
    """

    def __init__(self, table: Any, *, are_strings: bool) -> None:
        from hf_gr.tables.files import check_columns, pa

        is_path = isinstance(table, (str, PathLike))
        place, columns = (str(table), _read(table)) if is_path else ("attributes", pa.table(table))
        check_columns(place, {ITEM: ""}, columns.column_names)
        try:
            self._ids = columns[ITEM].cast(pa.string() if are_strings else pa.int64())
        except pa.ArrowInvalid as error:
            kind = "texts" if are_strings else "integers"
            raise ValueError(
                f"{place} has item ids of another type ({error}), expected {kind}: convert them"
            ) from None
        if self._ids.null_count or len(self._ids.unique()) < len(self._ids):
            raise ValueError(f"{place} has an {ITEM} twice, or a row without, expected one row an item: drop others")
        self._columns: dict[str, tuple[str, Any]] = {}  # by name, the kind and the values
        columns = columns.drop([ITEM])
        for name, column in zip(columns.column_names, columns.columns, strict=True):
            written = str(column.type)
            if written == "bool":
                self._columns[name] = "bool", column
            elif written.startswith(("int", "uint", "halffloat", "float", "double", "decimal")):
                self._columns[name] = "number", column.cast(pa.float64(), safe=False)
            elif written.startswith(("string", "large_string", "dictionary")):
                self._columns[name] = "text", column.cast(pa.string())

    def read(self, given: Mapping[str, Any]) -> Filter:
        """A filter: by column a list of values, or for numbers `{"min": 5, "max": 20}` or one of these.

        Raises:
            ValueError: a column that is not there, or values of another type.
        """
        return tuple(sorted(((str(name), self._part(name, given[name])) for name in given), key=itemgetter(0)))

    def items(self, given: Filter) -> list[Any]:
        """The items that pass all parts of a filter; one without a value in a column does not pass its part."""
        from hf_gr.tables.files import pa, pc

        passed: Any = None
        for name, wanted in given:
            column = self._columns[name][1]
            if isinstance(wanted, frozenset):
                part = pc.is_in(column, value_set=pa.array(list(wanted), column.type))
            else:
                part = pc.and_(pc.greater_equal(column, wanted[0]), pc.less_equal(column, wanted[1]))
            passed = part if passed is None else pc.and_(passed, part)
        return self._ids.filter(passed).to_pylist()

    def _part(self, name: Any, wanted: Any) -> frozenset[Any] | tuple[float, float]:
        if name not in self._columns:
            raise ValueError(
                f"filter has {shown(name)}, expected some of {', '.join(self._columns) or 'none'}: omit it"
            )
        kind = self._columns[name][0]
        types, expected, example = KINDS[kind]
        is_range = kind == "number" and isinstance(wanted, Mapping) and wanted.keys() <= {"min", "max"}
        bounds: dict[str, float] = dict(wanted) if is_range else {}
        values: Any = bounds.values() if is_range else wanted
        is_fit = is_range or isinstance(wanted, (list, tuple))
        if is_fit:
            is_fit = all(type(value) in types and (kind != "number" or abs(value) < LARGEST) for value in values)
        if not is_fit:
            raise ValueError(f"filter[{name!r}]={shown(wanted)}, expected {expected}: write it as {example}")
        if not is_range:
            return frozenset(map(float, values) if kind == "number" else values)
        return float(bounds.get("min", -math.inf)), float(bounds.get("max", math.inf))


def _read(path: Any, *texts: str) -> Any:
    """All columns of a file, or of those in a folder, with types that fit all rows; ids of text files are texts.

    So are columns of CSV with digits that numbers would lose.
    """
    from hf_gr.tables.files import READ_ERRORS, TABBED, find_files, open_file, pa, pc, pyarrow, suffix_of

    files, kind = find_files(path)
    if len(files) > 1:
        tables = [_read(file) for file in files]
        if kind == "csv":  # what is text in one is text in all
            texts = tuple({each.name for one in tables for each in one.schema if each.type == pa.string()})
            tables = [_read(file, *texts) for file in files]
        return pa.concat_tables(tables, promote_options="permissive")
    (file,) = files
    try:
        with open_file(file) as (_, stream):
            content = stream.read()
        source, size = pa.BufferReader(content), len(content) + 1
        if kind == "parquet":
            return pyarrow.parquet.read_table(source)
        if kind == "jsonl":
            return pyarrow.json.read_json(source, pyarrow.json.ReadOptions(block_size=size))
        read = pyarrow.csv.ReadOptions(block_size=size)
        parse = pyarrow.csv.ParseOptions(delimiter="\t" if suffix_of(file) in TABBED else ",", newlines_in_values=True)

        def table(*more: str) -> Any:
            types = dict.fromkeys((ITEM, *texts, *more), pa.string())
            how: dict[str, Any] = {"column_types": types, "null_values": [""], "strings_can_be_null": True}
            return pyarrow.csv.read_csv(pa.BufferReader(content), read, parse, pyarrow.csv.ConvertOptions(**how))

        typed = table()
        numbers = [each.name for each in typed.schema if str(each.type) in ("int64", "double")]
        written = table(*numbers)
        codes = [name for name in numbers if pc.any(pc.match_substring_regex(written[name], CODES)).as_py()]
        return table(*codes) if codes else typed
    except READ_ERRORS as error:
        raise ValueError(f"{file} cannot be read ({error}), expected complete {kind}: write it again") from error
