# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts from tables, and their labels as a table of Parquet. Knows no model."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_gr.files.atomic import replaced_file
from hf_gr.tables.files import pa, pyarrow
from hf_gr.tables.table import Table, is_text

from .result import RankedLabels

OUTPUT_COLUMNS = (
    *("labels", "probabilities", "mass_left", "parents", "parent_probabilities", "each", "each_probabilities"),
    "error",
)
WINDOW_ROWS = 2**16


def read_texts(
    texts: Any, *, text: str, id: str | None = None, target: str | None = None, may_lack: bool = False, **how: Any
) -> Any:
    """The rows of a table of texts, as one Arrow table; some `may_lack` a text.

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
            if values.null_count and not (may_lack and name == text):
                row = rows.cells(name).index(None)
                raise ValueError(rows.problem(name, row, None, "a text: drop the row, or pass --on-error skip"))
        windows.append(rows.columns)
    if not windows:
        raise ValueError(f"{table.name} has no row, expected at least one text")
    return pa.concat_tables(windows)


def write_ranked(file: Path, table: Any, id: str | None, ranked: RankedLabels, rows: Sequence[int]) -> None:
    """Write the labels of every row as Parquet: all of it, or nothing. `rows` are those that were ranked.

    Columns: the ids (`row`, their number, without any), `labels` and `probabilities` (lists, the best first; an answer
    of several labels is a list of labels), `mass_left`; with a hierarchy `parents` and `parent_probabilities`, the
    most probable one of every level, the topmost first; with several labels `each` and `each_probabilities`, every
    label with the probability that the answer has it; and where rows were skipped, whose columns are null, `error`.
    """
    is_of_several = any(isinstance(label, tuple) for labels in ranked for label, _ in labels)
    kind: Any = pa.list_(pa.string()) if is_of_several else pa.string()

    def column(values: Iterable[Any], kind: Any) -> Any:
        by_row = dict(zip(rows, values, strict=True))
        return pa.array((by_row.get(row) for row in range(table.num_rows)), kind)

    made = {id or "row": pa.array(range(table.num_rows), pa.int64()) if id is None else table.column(id)}
    best = [[level[0] for level in levels if level] for levels in ranked.parents or ()]
    for names, lists, of in (
        (OUTPUT_COLUMNS[:2], list(ranked), kind),
        (OUTPUT_COLUMNS[3:5], None if ranked.parents is None else best, pa.string()),
        (OUTPUT_COLUMNS[5:7], ranked.each, pa.string()),
    ):
        if lists is not None:
            made[names[0]] = column(([_plain(name) for name, _ in labels] for labels in lists), pa.list_(of))
            made[names[1]] = column(([p for _, p in labels] for labels in lists), pa.list_(pa.float64()))
    made["mass_left"] = column(ranked.mass_left, pa.float64())
    if len(rows) < table.num_rows:
        known = set(rows)
        errors = (None if row in known else "no text" for row in range(table.num_rows))
        made["error"] = pa.array(errors, pa.string())
    with replaced_file(file) as stream:
        pyarrow.parquet.write_table(pa.table(made), stream)


def _plain(label: Any) -> Any:
    return list(label) if isinstance(label, tuple) else label
