# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of users in memory: each kind gives the rows that the same table gives as a file, as the same kind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs_case import Case, make_users

from hf_gr import evaluate, recommend
from hf_gr.tables.table import Table

NUM_USERS = 40
OPTIONS = {"history": "seen", "user": "who", "exclude": "not", "filter": "only", "top_k": 6, "num_beams": 8}
OPTIONS |= {"window_rows": 16, "progress": False}


@pytest.fixture(scope="module")
def loaded(case: Case) -> Any:
    return case.load()


@pytest.fixture(scope="module")
def table(case: Case) -> pa.Table:
    return pa.Table.from_pylist(make_users(case, NUM_USERS))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, case: Case, table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a run over the table in a file."""
    path = tmp_path_factory.mktemp("rows") / "users.parquet"
    pq.write_table(table, path)
    made = recommend(case.model, path, path.with_name("recs.parquet"), constraint_index=case.index, **OPTIONS)
    return pq.read_table(made.output).to_pylist()


def to_pandas(table: pa.Table) -> Any:
    frame = table.to_pandas()
    frame.index = range(100, 100 + 3 * len(frame), 3)  # as of a frame that was filtered
    return frame


def to_polars(table: pa.Table) -> Any:
    return polars.from_arrow(table)


def to_dataset(table: pa.Table) -> Any:
    backwards = list(range(len(table)))[::-1]  # so that it is in order by its indices alone
    return pytest.importorskip("datasets").Dataset(table.take(backwards)).select(backwards)


class Stream:
    """A table of a library that is not known, such as DuckDB's."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)


KINDS = {
    "pandas": (to_pandas, lambda found: found.to_dict("records")),
    "polars": (to_polars, lambda found: found.to_dicts()),
    "datasets": (to_dataset, lambda found: found.to_list()),
    "arrow": (lambda table: table, lambda found: found.to_pylist()),
    "batch": (lambda table: table.combine_chunks().to_batches()[0], lambda found: found.to_pylist()),
    "stream": (Stream, lambda found: found.to_pylist()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_in_memory_gives_the_same_kind(kind: str, loaded: Any, table: pa.Table, rows: Any) -> None:
    model, index = loaded
    make, read = KINDS[kind]
    given = make(table)
    found = recommend(model, given, constraint_index=index, **OPTIONS)
    assert read(found) == rows
    assert read(found) != rows[::-1]  # the comparison can fail
    assert type(found) is (pa.Table if kind in ("batch", "stream") else type(given))
    if kind == "pandas":  # what is assigned to a frame goes by its index
        assert list(found.index) == list(given.index)
        given["items"] = found["items"]
        assert list(given["items"]) == [row["items"] for row in rows]
        assert found["who"].dtype == given["who"].dtype


def test_histories_give_lists_of_items(loaded: Any, table: pa.Table, rows: Any) -> None:
    model, index = loaded
    histories = table.column("seen").to_pylist()
    options = {"constraint_index": index, "top_k": 6, "num_beams": 8, "progress": False}
    expected = recommend(model, table, history="seen", exclude="seen", **options).column("items").to_pylist()
    mixed = [kind(one) for kind, one in zip((list, tuple, np.array, torch.tensor) * 10, histories, strict=True)]
    for given in (histories, tuple(histories), mixed, table.to_pandas()["seen"]):
        found = recommend(model, given, exclude="history", **options)
        assert found == expected
    assert not any(set(items) & set(history) for items, history in zip(found, histories, strict=True))


def test_exact_items_are_those_of_beams_that_cut_nothing(loaded: Any, table: pa.Table) -> None:
    model, index = loaded
    options: dict[str, Any] = {"constraint_index": index, "history": "seen", "progress": False}
    wide = recommend(model, table, top_k=9, num_beams=len(index), exclude="seen", **options)
    found = recommend(model, table, top_k=9, exact=True, exclude="seen", **options)
    assert found.column("items").to_pylist() == wide.column("items").to_pylist()
    assert found.column_names == ["row", "items", "scores", "num_proven"]
    assert found.column("num_proven").to_pylist() == [len(items) for items in found.column("items").to_pylist()]
    how: dict[str, Any] = options | {"cutoffs": (2, 5), "sampled_users": 1, "baselines": False, "on_error": "skip"}
    (exact,), (beams,) = (evaluate(model, table, **how, **one).results for one in ({"exact": True}, {"num_beams": 5}))
    assert (exact.label, exact.proven) == ("model, exact", 1.0)
    assert beams.label == "model, 5 beams"
    assert beams.proven is not None
    assert beams.proven < 1.0
    assert "proven lists" in str(evaluate(model, table, **how, exact=True))


def test_a_table_in_memory_may_be_written_and_resumed(loaded: Any, table: pa.Table, rows: Any, tmp_path: Path) -> None:
    model, index = loaded
    frame, output = table.to_pandas(), tmp_path / "recs.parquet"
    options: dict[str, Any] = OPTIONS | {"constraint_index": index}
    made = recommend(model, frame, output, **options)
    assert pq.read_table(output).to_pylist() == rows
    assert recommend(model, frame, output, **options) == replace(made, already_finished=True)
    frame.at[3, "seen"] = [100]
    with pytest.raises(ValueError, match="is there already, of another run"):
        recommend(model, frame, output, **options)


def test_what_is_no_table_is_refused(case: Case, table: pa.Table) -> None:
    frame, seen, csv = table.to_pandas(), {"history": "seen"}, {"history": "seen", "format": "csv"}
    for users, options, message in (
        (7, seen, "users is a int, expected a file or several, a pandas, Polars or Arrow table"),
        (np.array([[100, 101]]), seen, r"users is a ndarray, .*: .*\.tolist\(\) an array"),
        ([100, 101], {}, r"users\[0\] is 100, expected a list of item ids: one user's history is a list in a list"),
        ("users.parquet", seen, "output=None with users='users.parquet' in files, expected a .parquet file"),
        ([[100], {101}], {}, r"users\[1\] is \{101\}, expected a list of item ids"),
        ([[100], ["B01"]], {}, "users, column 'history', row 1 is .'B01'., expected the type of the rows before it"),
        ([], {}, "users has no row, expected at least one"),
        (frame.assign(seen=[{100}] * len(frame)), seen, "row 0 is {.*, expected a list: a set has no o"),
        (frame["seen"], seen, "users has no column 'seen', expected one of 'history'"),
        ({"ann": [100]}, {}, r"no column is given, .*of histories by user, pass list\(users.values\(\)\)"),
        ([[100]], {"exclude": [[100]]}, r"exclude=\[\[100\]\], expected the name of a column"),
        (frame.rename(columns={"who": "seen"}), seen, "users has 2 columns 'seen', expected one of"),
        (frame.drop(columns="seen"), seen, "users has no column 'seen', expected one of 'who', 'not', 'only'"),
        (frame, csv, "format= or delimiter= with a table in memory, expected neither"),
        (frame, seen | {"overwrite": True}, "overwrite=True without output=, expected both"),
    ):
        with pytest.raises(ValueError, match=message):
            recommend(case.model, users, constraint_index=case.index, **options)


def test_columns_that_are_not_named_are_not_looked_at() -> None:
    frame = pandas.DataFrame({"seen": [[1], None, [2, 3]], "x": [1, "a", object()], 5: [1, 2, 3]})
    users = Table(frame, {"seen": "history"})
    assert [rows.columns.to_pylist() for rows, _ in users.batches(2)] == [
        [{"seen": [1]}, {"seen": None}],
        [{"seen": [2, 3]}],
    ]
    same, changed = (Table({"seen": [[1], None, [2, last]]}, {"seen": "history"}) for last in (3, 4))
    assert users.fingerprint() == same.fingerprint() != changed.fingerprint()
