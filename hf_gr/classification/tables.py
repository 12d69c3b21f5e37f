# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts from tables, and their labels as a table of Parquet. Knows no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_gr.files.atomic import replaced_file
from hf_gr.tables.files import pa, pyarrow
from hf_gr.tables.table import Table, is_text

from .result import RankedLabels

OUTPUT_COLUMNS = ("labels", "probabilities", "parents", "parent_probabilities")
WINDOW_ROWS = 2**16


def read_texts(texts: Any, *, text: str, id: str | None = None, target: str | None = None, **how: Any) -> Any:
    """The rows of a table of texts, as one Arrow table.

    Columns: `text`, `target` (the right labels), and `id`, which names a row in the output in place of its number.
    """
    if id in OUTPUT_COLUMNS:
        raise ValueError(
            f"id={id!r} is also a column of the output, expected another than {', '.join(OUTPUT_COLUMNS)}: "
            "rename the column"
        )
    columns = {"id": id, "target": target, "text": text}  # one column may have several roles: errors name the last
    table = Table(texts, {name: role for role, name in columns.items() if name is not None}, name="texts", **how)
    windows: list[Any] = []
    for rows in table.windows(WINDOW_ROWS):
        for name in dict.fromkeys(name for name in (text, target) if name is not None):
            values = rows.columns.column(name)
            if not is_text(values.type):
                raise ValueError(rows.problem_of_type(name, "texts: name another column"))
            if values.null_count:
                row = rows.cells(name).index(None)
                raise ValueError(rows.problem(name, row, None, "a text: drop the row"))
        windows.append(rows.columns)
    if not windows:
        raise ValueError(f"{table.name} has no row, expected at least one text")
    return pa.concat_tables(windows)


def write_ranked(file: Path, table: Any, id: str | None, ranked: RankedLabels) -> None:
    """Write the labels of every row as Parquet: all of it, or nothing.

    Columns: the ids (`row`, their number, without any), `labels` and `probabilities` (lists, the most probable first;
    an answer of several labels is a list of labels), with a hierarchy also `parents` and `parent_probabilities`: the
    most probable one of every level, the topmost first.
    """
    ids = pa.array(range(table.num_rows), pa.int64()) if id is None else table.column(id)
    is_of_several = any(isinstance(label, tuple) for labels in ranked for label, _ in labels)
    kind: Any = pa.list_(pa.string()) if is_of_several else pa.string()
    made: dict[str, Any] = {
        id or "row": ids,
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
