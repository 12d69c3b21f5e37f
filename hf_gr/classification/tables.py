# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts from tables, and their labels as a table: Parquet, CSV and JSON lines. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_gr.files.atomic import replaced_file
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

from .result import RankedLabels

OUTPUT_COLUMNS = ("labels", "probabilities", "parents", "parent_probabilities")


@dataclass(frozen=True)
class TextColumns:
    """The columns to read; None for those that do not exist.

    Attributes:
        text: the texts.
        id: what names a row in the output; by default its number.
        target: the right labels.
    """

    text: str
    id: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if self.id in OUTPUT_COLUMNS:
            raise ValueError(
                f"id={self.id!r} is also a column of the output, expected another than {', '.join(OUTPUT_COLUMNS)}: "
                "rename the column"
            )

    @property
    def names(self) -> list[str]:
        """The columns, each once."""
        return list(dict.fromkeys(name for name in (self.text, self.id, self.target) if name is not None))

    def check(self, file: Path, names: Sequence[str], there: Sequence[str]) -> None:
        """Raise unless a file has each of these columns exactly once."""
        for name in names:
            if there.count(name) != 1:
                role = next(role for role in ("text", "id", "target") if getattr(self, role) == name)
                how_many = f"{there.count(name)} columns" if name in there else "no column"
                listed = ", ".join(map(repr, there)) or "(there are none)"
                raise ValueError(f"{file} has {how_many} {name!r}, expected one of {listed}: name it with --{role}")


def read_texts(
    paths: Sequence[Path], columns: TextColumns, *, format: Format | None = None, delimiter: str | None = None
) -> Any:
    """The rows of all files as one Arrow table.

    Args:
        paths: files, or folders of them.
        columns: what to read.
        format: `"parquet"`, `"csv"` or `"jsonl"`; by default from the first file's suffix.
        delimiter: between the columns of CSV; by default a tab in `.tsv` and a comma elsewhere.

    Raises:
        ValueError: a file is missing, damaged or of another format; a column is missing; a text or a target is missing
            or no text; there is no row.
    """
    found: Format = format or format_of(paths)
    batches: list[Any] = []
    for file in list_files(paths, found):
        number = 0
        try:
            for batch, _ in _batches(file, columns, found, delimiter):
                for role in ("text", "target"):
                    _check_texts(batch, getattr(columns, role), file, number)
                number += batch.num_rows
                batches.append(batch)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is no whole {found} file ({error}), expected one: write it again") from error
    table: Any = pa.Table.from_batches(batches) if batches else None
    if table is None or not table.num_rows:
        raise ValueError(f"{paths[0]} has no row, expected at least one text")
    return table


def write_ranked(file: Path, table: Any, columns: TextColumns, ranked: RankedLabels) -> None:
    """Write the labels of every row as Parquet: all of it, or nothing.

    Columns: the ids (`row`, their number, without any), `labels` and `probabilities` (lists, the most probable first;
    an answer of several labels is a list of labels), with a hierarchy also `parents` and `parent_probabilities`: the
    most probable one of every level, the topmost first.
    """
    name = columns.id or "row"
    ids = pa.array(range(table.num_rows), pa.int64()) if columns.id is None else table.column(columns.id)
    is_of_several = any(isinstance(label, tuple) for labels in ranked for label, _ in labels)
    kind: Any = pa.list_(pa.string()) if is_of_several else pa.string()
    made: dict[str, Any] = {
        name: ids,
        "labels": pa.array(([_plain(label) for label, _ in labels] for labels in ranked), pa.list_(kind)),
        "probabilities": pa.array(([p for _, p in labels] for labels in ranked), pa.list_(pa.float64())),
    }
    if ranked.parents is not None:
        best = [[level[0] for level in levels if level] for levels in ranked.parents]
        made["parents"] = pa.array(([name for name, _ in of_text] for of_text in best), pa.list_(pa.string()))
        made["parent_probabilities"] = pa.array(([p for _, p in of_text] for of_text in best), pa.list_(pa.float64()))
    with replaced_file(file) as stream:
        pyarrow.parquet.write_table(pa.table(made), stream)


def _plain(label: Any) -> Any:
    return list(label) if isinstance(label, tuple) else label


def _batches(file: Path, columns: TextColumns, format: Format, delimiter: str | None) -> Iterator[tuple[Any, int]]:
    if format == "parquet":
        return read_parquet(file, columns)
    if format == "csv":
        return read_csv(file, columns, delimiter)

    def schema(number: int, line: bytes) -> Any:
        there = read_object(file, number, line, pa.schema([]))
        columns.check(file, columns.names, list(there))
        kinds = {name: pa.string() for name in (columns.text, columns.target) if name is not None}
        own = {} if columns.id is None else {columns.id: pa.array([there[columns.id]]).type}
        return pa.schema(list((own | kinds).items()))

    return read_jsonl(file, schema)


def _check_texts(batch: Any, name: str | None, file: Path, start: int) -> None:
    """Raise for a column that is no text, or has gaps."""
    if name is None:
        return
    values = batch.column(name)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise ValueError(f"{file} has {values.type} in column {name!r}, expected texts: name another column")
    if values.null_count:
        row = start + values.is_null().to_pylist().index(True)
        raise ValueError(f"{file} has no text in row {row} of column {name!r}, expected one: drop the row")
