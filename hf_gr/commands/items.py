# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists of item ids in files that options name. Knows no catalogue: ids of text files are texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMN = "item_id"
EXAMPLE = '["B01", "B02"]'


class ItemColumn:
    """The column of the ids, as readers of tables want it."""

    def __init__(self, flag: str) -> None:
        self.names, self._flag = [COLUMN], flag

    def check(self, file: object, names: Sequence[str], there: Sequence[str]) -> None:
        """Raise unless a file has the column exactly once."""
        if list(there).count(COLUMN) != 1:
            raise ValueError(
                f"{self._flag} {str(file)!r} has the columns {', '.join(map(repr, there))}, expected one {COLUMN!r}: "
                "rename the column of item ids"
            )


def read_items(flag: str, path: Path) -> list[Any]:
    """The item ids in a file, in its order.

    They are the column `item_id` of a table (`.parquet`, `.csv`, `.tsv`, `.jsonl`), a JSON list (`.json`), or, in any
    other file, one per line.

    Raises:
        ValueError: the file is damaged, has no such column or list, or has a header though it is no table.
    """
    endings = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".bz2", ".zst")]
    kind = endings[-1] if endings else ""
    try:
        if kind == ".json":
            return _read_list(flag, path)
        if kind in (".parquet", ".pq", ".csv", ".tsv", ".jsonl", ".ndjson"):
            return _read_column(flag, path, kind)
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{flag} {str(path)!r} cannot be read ({error}), expected item ids: check the file"
        ) from error
    if lines[:1] == [COLUMN]:
        raise ValueError(
            f"{flag} {str(path)!r} begins with {COLUMN!r}, expected an id: a file of one id per line has no header; "
            "remove it, or name the file .csv"
        )
    return lines


def _read_column(flag: str, path: Path, kind: str) -> list[Any]:
    from hf_gr.files.tables import pa, read_csv, read_jsonl, read_object, read_parquet

    column = ItemColumn(flag)

    def schema_of(number: int, line: bytes) -> Any:
        first = read_object(path, number, line, pa.schema([(COLUMN, pa.string())]))
        column.check(path, column.names, list(first))
        return pa.schema([(COLUMN, pa.scalar(first[COLUMN]).type)])

    try:
        if kind in (".parquet", ".pq"):
            batches = read_parquet(path, column)
        elif kind in (".csv", ".tsv"):
            batches = read_csv(path, column, None)
        else:
            batches = read_jsonl(path, schema_of)
        items = [item for batch, _ in batches for item in batch.column(COLUMN).to_pylist()]
    except pa.ArrowException as error:
        raise ValueError(
            f"{flag} {str(path)!r} cannot be read ({error}), expected a table with the column {COLUMN!r}: check it"
        ) from error
    if None in items:
        row = items.index(None)
        raise ValueError(f"{flag} {str(path)!r}, row {row} has no {COLUMN}, expected an id: drop the row")
    return items


def _read_list(flag: str, path: Path) -> list[Any]:
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{flag} {str(path)!r} is no JSON ({error}), expected {EXAMPLE}: check the file") from error
    if not isinstance(items, list):
        raise ValueError(f"{flag} {str(path)!r} has a {type(items).__name__}, expected {EXAMPLE}: check the file")
    return items
