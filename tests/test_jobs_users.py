# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of users in windows, its rows as prompts, and prompts in batches."""

from __future__ import annotations

import csv
import doctest
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gr import ConstraintIndex
from hf_gr.answering.batching import make_batches
from hf_gr.jobs import baselines, intervals, metrics
from hf_gr.jobs import settings as settings_module
from hf_gr.jobs.prompts import PromptMaker, Requests
from hf_gr.jobs.settings import Settings
from hf_gr.jobs.users import Users
from hf_gr.tables import cells, memory, sequences, shards
from hf_gr.tables import table as table_module

INDEX = ConstraintIndex.from_sequences([[5, 7, 2], [5, 8, 2], [6, 2]], item_ids=[10, 11, 12], eos_token_id=2)
NAMED = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
ROWS = [
    {"who": 7, "seen": [10, 11], "not": [10], "only": None},
    {"who": 8, "seen": [12], "not": None, "only": [11, 12]},
    {"who": 9, "seen": [12, 12, 12, 10], "not": [], "only": []},
    {"who": 9, "seen": [11], "not": [999], "only": [10]},
    {"who": 5, "seen": [10], "not": [], "only": None},
]
SEEN = Settings(history="seen")
ALL = Settings(history="seen", user="who", exclude="not", filter="only")
# By row the prompt, exclusions, and what is allowed.
EXPECTED = [
    ([5, 7, 5, 8], (10,), None),
    ([6], (), (11, 12)),
    ([6, 6, 6, 5, 7], (), ()),
    ([5, 8], (999,), (10,)),
    ([5, 7], (), None),
]


def write(folder: Path, format: str, rows: list[dict[str, Any]], name: str = "users") -> Path:
    path = folder / f"{name}.{format}"
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif format == "csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(rows[0])
            for row in rows:
                cells = [" ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in row.values()]
                writer.writerow(["[]" if cell == "" else cell for cell in cells])  # an empty cell is null
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n\n" for row in rows).encode()))
    return path


def made_of(table: Any, settings: Settings, index: ConstraintIndex = INDEX, **options: Any) -> Requests:
    """The requests of all rows, in one window."""
    users = Users(table, settings, are_strings=index.snapshot.are_strings)
    return PromptMaker(index.snapshot, settings, **options)(next(users.windows(100)))


def requests(table: Any, settings: Settings, index: ConstraintIndex = INDEX, size: int = 2, **options: Any) -> Any:
    """(prompt, exclusions, allowed) or a problem, for every row."""
    users = Users(table, settings, are_strings=index.snapshot.are_strings)
    found: list[Any] = []
    for window in users.windows(size):
        made = PromptMaker(index.snapshot, settings, **options)(window)
        rows = {request.row: (request.tokens, request.exclude, request.allowed) for request in made.requests}
        assert sorted([*rows, *made.problems]) == list(range(len(window)))
        assert window.first_row == len(found)
        found += [rows[row] if row in rows else made.problems[row] for row in range(len(window))]
    return found


@pytest.mark.parametrize("format", ["parquet", "csv", "jsonl.gz"])
@pytest.mark.parametrize("size", [1, 2, 100])
def test_formats_and_windows_give_the_same_requests(tmp_path: Path, format: str, size: int) -> None:
    path = write(tmp_path, format, ROWS)
    assert requests(path, ALL, size=size) == EXPECTED
    users = Users(path, ALL, are_strings=False)
    windows = list(users.windows(size))
    assert [len(window) for window in windows] == [size] * (5 // size) + ([5 % size] if 5 % size else [])
    assert [str(cell) for window in windows for cell in window.cells("who")] == ["7", "8", "9", "9", "5"]
    assert users.num_rows == (5 if format == "parquet" else None)


def test_several_files_are_one_table_of_the_types_of_the_first(tmp_path: Path) -> None:
    paths = [write(tmp_path, "parquet", ROWS[:2], "a"), write(tmp_path, "parquet", ROWS[2:], "b")]
    for source in (paths, tmp_path):
        assert requests(source, ALL, size=3) == EXPECTED
    narrow = {"who": pa.array([3], pa.int16()), "seen": pa.array([[1]], pa.list_(pa.int8()))}
    pq.write_table(pa.table(narrow), tmp_path / "c.parquet")
    problem = requests(tmp_path, Settings(history="seen", user="who"), size=4)[5]
    assert problem.startswith(
        f"{tmp_path / 'c.parquet'}, column 'seen', row 0 is [1], expected items of the catalogue, which has no 1"
    )
    pq.write_table(pa.table({"who": ["x"], "seen": [[12]]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"c.parquet, column 'who' has type string, expected int64 as in .*a.parquet"):
        requests(tmp_path, Settings(history="seen", user="who"))


def test_categories_are_read_as_what_they_stand_for() -> None:
    table = pa.table({"who": pa.array(["x", "y"]).dictionary_encode(), "seen": [["ham"], ["jam"]]})
    settings = Settings(history="seen", user="who")
    window = next(Users(table, settings, are_strings=True).windows(2))
    assert window.columns.schema.field("who").type == pa.string()
    assert requests(table, settings, NAMED) == [([5, 7], (), None), ([5, 8], (), None)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"seen": None}, "column 'seen', row 1 is None, expected a list of 1 or more item ids, which are integers"),
        ({"seen": []}, "column 'seen', row 1 is [], expected a list of 1 or more item ids"),
        ({"seen": [10, None]}, "column 'seen', row 1 is [10, None], expected a list of 1 or more item ids"),
        ({"seen": [10, 13]}, "row 1 is [10, 13], expected items of the catalogue, which has no 13: remove it"),
        ({"only": [10, 13]}, "column 'only', row 1 is [10, 13], expected items of the catalogue, which has no 13"),
        ({"not": [10, None]}, "column 'not', row 1 is [10, None], expected a list of item ids"),
    ],
)
def test_a_problem_is_of_its_row_alone(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    found = requests(write(tmp_path, "parquet", [ROWS[0], ROWS[1] | row, *ROWS[2:]]), ALL)
    assert problem in found[1]
    assert found[1].startswith(str(tmp_path))
    assert "on_error='skip'" in found[1]
    assert found[:1] + found[2:] == EXPECTED[:1] + EXPECTED[2:]


@pytest.mark.parametrize("cell", ["10 x", "10 99999999999999999999"])
def test_a_cell_of_csv_that_is_no_list_of_integers(tmp_path: Path, cell: str) -> None:
    (tmp_path / "a.csv").write_text(f'seen\n10\n"{cell}"\n')
    found = requests(tmp_path / "a.csv", SEEN)
    assert found[0] == ([5, 7], (), None)
    assert f"row 1 is {cell!r}, expected a list" in found[1]


def test_the_latest_items_that_fit_are_the_prompt() -> None:
    table = pa.Table.from_pylist(ROWS)
    prompts = requests(table, replace(ALL, prefix_tokens=(1,), suffix_tokens=(3,)), longest=5)
    assert prompts[0][0] == [1, 5, 8, 3]  # two items would take 4 of 3 tokens
    assert prompts[2][0] == [1, 6, 5, 7, 3]
    assert requests(table, replace(ALL, max_prompt_tokens=3), longest=9)[2][0] == [6, 5, 7]
    problem = requests(table, ALL, longest=1)[0]
    assert "row 0 is [10, 11], expected its latest item to fit a prompt of 1 tokens" in problem


def test_an_item_that_is_sold_out_still_tells_of_its_user() -> None:
    index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=[10, 11, 12])
    index.remove([10])
    index.add([[6, 8], [6, 9]], [11, 13])  # 11 keeps its first sequence
    table = pa.table({"seen": [[10, 11, 12, 13], [11]], "only": [[11], [10]]})
    found = requests(table, Settings(history="seen", filter="only"), index)
    assert found[0] == ([5, 7, 5, 8, 6, 7, 6, 9], (), (11,))
    assert "which has no 10" in found[1]
    index.remove([11])
    index.add([[6, 8]], [11])
    assert requests(table, SEEN, index)[1][0] == [6, 8]


def test_tokens_are_the_prompt_as_they_are() -> None:
    table, settings = pa.table({"t": [[1, 2, 3], [9], [1, -1], []]}), Settings(tokens="t")
    found = requests(table, settings, vocab_size=9)
    assert found[0] == ([1, 2, 3], (), None)
    assert all(f"row {row} is" in found[row] and "from 0 below the model's 9" in found[row] for row in (1, 2, 3))
    assert "at most 2 tokens and not 3" in requests(table, settings, longest=2)[0]
    assert requests(table, replace(settings, max_prompt_tokens=2), longest=5)[0][0] == [2, 3]


def test_texts_go_through_the_tokenizer() -> None:
    def tokenizer(texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[ord(letter) for letter in text if letter != "?"] for text in texts]}

    table = pa.table({"t": ["ab", "", "c", None, "?"]})
    found = requests(table, Settings(text="t"), size=5, tokenizer=tokenizer)
    assert [found[0][0], found[2][0]] == [[97, 98], [99]]
    assert ["expected a text" in str(found[row]) for row in range(5)] == [False, True, False, True, True]


def test_leave_one_out_hides_the_last_item() -> None:
    table = pa.table({"seen": [[10, 11], [12], [10, 13]]})
    made = made_of(table, Settings(history="seen", exclude="seen", leave_one_out=True))
    assert [(request.tokens, request.exclude) for request in made.requests] == [([5, 7], (10,))]
    assert made.targets == {0: [11]}
    assert "expected a list of 2 or more item ids" in made.problems[1]
    assert "which has no 13" in made.problems[2]


def test_targets_may_be_one_or_several() -> None:
    for column, targets in (([10, 99, None], {0: [10], 1: [99]}), ([[10, 11], [], [12]], {0: [10, 11], 2: [12]})):
        made = made_of(pa.table({"seen": [[12]] * 3, "next": column}), Settings(history="seen", target="next"))
        assert (made.targets, {*made.problems}) == (targets, {0, 1, 2} - {*targets})


def test_an_empty_prompt_of_any_kind_gets_the_fallback() -> None:
    table = pa.table({"t": [[5, 7], None, []], "x": ["a", None, ""], "seen": [[10], None, []]})
    options: dict[str, Any] = {"tokenizer": lambda texts, verbose: {"input_ids": [[5] for _ in texts]}}
    for settings in (Settings(tokens="t"), Settings(text="x"), SEEN):
        made = made_of(table, settings, fallback=[12, 10], **options)
        assert ([request.row for request in made.requests], made.problems) == ([0], {})
        assert made.fallbacks == {1: [12, 10], 2: [12, 10]}
        assert set(made_of(table, settings, **options).problems) == {1, 2}


def test_what_is_no_table_of_users(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.\w+ has no column 'seen', expected one of .*'who'.*with history="):
        Users(write(tmp_path, "parquet", [{"who": 1}], "a"), SEEN, are_strings=False)
    (tmp_path / "a.csv").write_text("seen\n")
    with pytest.raises(ValueError, match="has no row, expected"):
        Users(tmp_path / "a.csv", SEEN, are_strings=False)


def test_examples_run() -> None:
    modules = (baselines, cells, intervals, memory, metrics, sequences, settings_module, shards, table_module)
    for module in modules:
        failed, attempted = doctest.testmod(module)
        assert (failed, attempted > 0) == (0, True)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 500), st.integers(0, 50))
def test_batches_hold_every_prompt_once_within_the_budget(lengths: list[int], budget: int, ahead: int) -> None:
    batches = make_batches(lengths, token_budget=budget, tokens_ahead=ahead)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    longest = [max(lengths[row] for row in batch) for batch in batches]
    for batch, length in zip(batches, longest, strict=True):
        assert len(batch) == 1 or len(batch) * (length + ahead) <= budget
    assert longest == sorted(longest, reverse=True)  # similar lengths are together: little padding
    for batch, length in zip(batches[:-1], longest, strict=False):
        assert (len(batch) + 1) * (length + ahead) > budget  # no room was left
