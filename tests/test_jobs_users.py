# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of users in windows, its rows as prompts, and prompts in batches."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gr import ConstraintIndex
from hf_gr.answering.batching import make_batches
from hf_gr.jobs.prompts import PromptMaker
from hf_gr.jobs.settings import UserColumns
from hf_gr.jobs.users import Users

INDEX = ConstraintIndex.from_sequences([[5, 7, 2], [5, 8, 2], [6, 2]], item_ids=[10, 11, 12], eos_token_id=2)
NAMED = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
ROWS = [
    {"who": 7, "seen": [10, 11], "not": [10], "only": None},
    {"who": 8, "seen": [12], "not": None, "only": [11, 12]},
    {"who": 9, "seen": [12, 12, 12, 10], "not": [], "only": []},
    {"who": 9, "seen": [11], "not": [999], "only": [10]},
    {"who": 5, "seen": [10], "not": [], "only": None},
]
COLUMNS = UserColumns(history="seen", user="who", exclude="not", filter="only")


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
    elif format == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n\n" for row in rows).encode()))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def requests(users: Users, index: ConstraintIndex = INDEX, size: int = 2, **options: Any) -> list[Any]:
    """(row of the table, prompt, exclusions, allowed) or a problem, for every row."""
    maker = PromptMaker(index.snapshot, users.columns, **options)
    found: dict[int, Any] = {}
    for window in users.windows(size):
        made = maker(window)
        for request in made.requests:
            assert window.first_row + request.row not in found
            found[window.first_row + request.row] = (request.tokens, request.exclude, request.allowed)
        for row, problem in made.problems.items():
            assert window.first_row + row not in found
            found[window.first_row + row] = problem
    assert sorted(found) == list(range(len(found)))
    return [found[row] for row in range(len(found))]


EXPECTED = [
    ([5, 7, 5, 8], (10,), None),
    ([6], (), (11, 12)),
    ([6, 6, 6, 5, 7], (), ()),
    ([5, 8], (999,), (10,)),
    ([5, 7], (), None),
]


@pytest.mark.parametrize("format", ["parquet", "csv", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_formats_and_windows_give_the_same_requests(tmp_path: Path, format: str, size: int) -> None:
    users = Users(write(tmp_path, format, ROWS), COLUMNS, are_strings=False)
    assert requests(users, size=size) == EXPECTED
    windows = list(users.windows(size))
    assert [len(window) for window in windows] == [size] * (5 // size) + ([5 % size] if 5 % size else [])
    who = [str(cell) for window in windows for cell in window.cells("who")]
    assert who == ["7", "8", "9", "9", "5"]
    assert users.num_rows == (5 if format == "parquet" else None)


def test_several_files_are_one_table_whose_rows_count_on(tmp_path: Path) -> None:
    paths = [write(tmp_path, "parquet", ROWS[:2], "a"), write(tmp_path, "parquet", ROWS[2:], "b")]
    for source in (paths, tmp_path):
        assert requests(Users(source, COLUMNS, are_strings=False), size=3) == EXPECTED
    pq.write_table(pa.Table.from_pylist([ROWS[4] | {"seen": [1]}]), tmp_path / "c.parquet")
    problem = requests(Users(tmp_path, COLUMNS, are_strings=False), size=4)[5]
    assert problem.startswith(
        f"{tmp_path / 'c.parquet'}, column 'seen', row 0 is [1], expected items of the catalogue"
    )
    assert "which has no 1" in problem


def test_types_of_later_files_are_those_of_the_first(tmp_path: Path) -> None:
    write(tmp_path, "parquet", ROWS[:2], "a")
    narrow = pa.table({"who": pa.array([3], pa.int16()), "seen": pa.array([[12]], pa.list_(pa.int8()))})
    pq.write_table(narrow, tmp_path / "b.parquet")
    columns = UserColumns(history="seen", user="who")
    assert requests(Users(tmp_path, columns, are_strings=False))[2] == ([6], (), None)
    pq.write_table(pa.table({"who": ["x"], "seen": [[12]]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"c.parquet, column 'who' has type string, expected int64 as in .*a.parquet"):
        requests(Users(tmp_path, columns, are_strings=False))


def test_categories_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    table = pa.table({"who": pa.array(["x", "y"]).dictionary_encode(), "seen": [["ham"], ["jam"]]})
    pq.write_table(table, tmp_path / "a.parquet")
    users = Users(tmp_path, UserColumns(history="seen", user="who"), are_strings=True)
    assert users.schema.field("who").type == pa.string()
    assert requests(users, NAMED) == [([5, 7], (), None), ([5, 8], (), None)]


@pytest.mark.parametrize("cell", ["ham jam", "ham,jam", "['ham', 'jam']", '["ham" "jam"]', " ham  jam "])
def test_lists_of_names_in_csv(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "a.tsv"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([["seen"], [cell]])
    assert requests(Users(path, UserColumns(history="seen"), are_strings=True), NAMED) == [([5, 7, 5, 8], (), None)]


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
    rows = [ROWS[0], ROWS[1] | row, *ROWS[2:]]
    found = requests(Users(write(tmp_path, "parquet", rows), COLUMNS, are_strings=False))
    assert problem in found[1]
    assert found[1].startswith(str(tmp_path))
    assert "on_error='skip'" in found[1]
    assert found[:1] + found[2:] == EXPECTED[:1] + EXPECTED[2:]


@pytest.mark.parametrize("cell", ["10 x", "10 99999999999999999999", "1.5", "1_0", "1٣"])
def test_a_cell_of_csv_that_is_no_list_of_integers(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'seen\n10\n"{cell}"\n')
    found = requests(Users(path, UserColumns(history="seen"), are_strings=False))
    assert found[0] == ([5, 7], (), None)
    assert f"row 1 is {cell!r}, expected a list" in found[1]


def test_the_latest_items_that_fit_are_the_prompt(tmp_path: Path) -> None:
    users = Users(write(tmp_path, "parquet", ROWS), COLUMNS, are_strings=False)
    prompts = [tokens for tokens, _, _ in requests(users, longest=5, prefix_tokens=(1,), suffix_tokens=(3,))]
    assert prompts[0] == [1, 5, 8, 3]  # two items would take 4 of 3 tokens
    assert prompts[2] == [1, 6, 5, 7, 3]
    assert requests(users, longest=9, max_prompt_tokens=3)[2][0] == [6, 5, 7]
    problem = requests(users, longest=1)[0]
    assert "row 0 is [10, 11], expected its latest item to fit a prompt of 1 tokens" in problem


def test_an_item_that_is_sold_out_still_tells_of_its_user(tmp_path: Path) -> None:
    index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=[10, 11, 12])
    index.remove([10])
    index.add([[6, 8], [6, 9]], [11, 13])  # 11 keeps its first sequence
    rows = [{"seen": [10, 11, 12, 13], "only": [11]}, {"seen": [11], "only": [10]}]
    path = write(tmp_path, "parquet", rows)
    found = requests(Users(path, UserColumns(history="seen", filter="only"), are_strings=False), index)
    assert found[0] == ([5, 7, 5, 8, 6, 7, 6, 9], (), (11,))
    assert "which has no 10" in found[1]
    index.remove([11])
    index.add([[6, 8]], [11])
    assert requests(Users(path, UserColumns(history="seen"), are_strings=False), index)[1][0] == [6, 8]


def test_tokens_are_the_prompt_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", [{"t": [1, 2, 3]}, {"t": [9]}, {"t": [1, -1]}, {"t": []}])
    users = Users(path, UserColumns(tokens="t"), are_strings=False)
    found = requests(users, vocab_size=9)
    assert found[0] == ([1, 2, 3], (), None)
    assert all(
        f"row {row} is" in found[row] and "token ids from 0 below the model's 9" in found[row] for row in (1, 2, 3)
    )
    assert "at most 2 tokens and not 3" in requests(users, longest=2)[0]
    assert requests(users, longest=5, max_prompt_tokens=2)[0][0] == [2, 3]


def test_texts_go_through_the_tokenizer(tmp_path: Path) -> None:
    def tokenizer(texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[ord(letter) for letter in text if letter != "?"] for text in texts]}

    path = write(tmp_path, "jsonl", [{"t": "ab"}, {"t": ""}, {"t": "c"}, {"t": None}, {"t": "?"}])
    found = requests(Users(path, UserColumns(text="t"), are_strings=False), size=5, tokenizer=tokenizer)
    assert [found[0][0], found[2][0]] == [[97, 98], [99]]
    assert ["expected a text" in str(found[row]) for row in range(5)] == [False, True, False, True, True]


def test_leave_one_out_hides_the_last_item(tmp_path: Path) -> None:
    rows = [{"seen": [10, 11]}, {"seen": [12]}, {"seen": [10, 13]}]
    columns = UserColumns(history="seen", exclude="seen")
    users = Users(write(tmp_path, "parquet", rows), columns, are_strings=False)
    window = next(users.windows(3))
    made = PromptMaker(INDEX.snapshot, columns, leave_one_out=True)(window)
    assert [(request.tokens, request.exclude) for request in made.requests] == [([5, 7], (10,))]
    assert made.targets == {0: [11]}
    assert "expected a list of 2 or more item ids" in made.problems[1]
    assert "which has no 13" in made.problems[2]


def test_targets_may_be_one_or_several(tmp_path: Path) -> None:
    columns = UserColumns(history="seen", target="next")
    for name, cells in {"a": [10, 99, None], "b": [[10, 11], [], [12]]}.items():
        rows = [{"seen": [12], "next": cell} for cell in cells]
        users = Users(write(tmp_path, "jsonl", rows, name), columns, are_strings=False)
        made = PromptMaker(INDEX.snapshot, columns)(next(users.windows(3)))
        expected = {0: [10], 1: [99]} if name == "a" else {0: [10, 11], 2: [12]}
        assert made.targets == expected
        assert list(made.problems) == ([2] if name == "a" else [1])


# Files that are no table of users


@pytest.mark.parametrize("format", ["parquet", "csv", "jsonl"])
def test_a_missing_column_is_named(tmp_path: Path, format: str) -> None:
    path = write(tmp_path, format, ROWS)
    with pytest.raises(ValueError, match=r"users\.\w+ has no column 'item', expected one of .*'seen'.*with history="):
        Users(path, UserColumns(history="item"), are_strings=False)


def test_a_file_without_rows(tmp_path: Path) -> None:
    for name, text in {"a.csv": "seen\n", "b.jsonl": "\n\n", "c.jsonl": ""}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=r"has no (row|byte), expected"):
            Users(tmp_path / name, UserColumns(history="seen"), are_strings=False)
    with pytest.raises(ValueError, match="gone.csv is not there"):
        Users(tmp_path / "gone.csv", COLUMNS, are_strings=False)
    with pytest.raises(ValueError, match=r"users.txt does not say what it is, expected .*\.parquet"):
        Users(tmp_path / "users.txt", COLUMNS, are_strings=False)


@pytest.mark.parametrize("given", [{}, {"history": "a", "text": "b"}])
def test_one_column_makes_the_prompt(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected one of history=, tokens= and text="):
        UserColumns(**given)


def test_a_corrupt_row_group_is_named_by_its_rows(tmp_path: Path) -> None:
    rows = [{"seen": [10, 11, 12] * (number % 5 + 1)} for number in range(3000)]
    path = tmp_path / "users.parquet"
    pq.write_table(
        pa.Table.from_pylist(rows), path, row_group_size=1000, write_page_checksum=True, use_dictionary=False
    )
    where = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    middle = where.data_page_offset + where.total_compressed_size // 2
    data[middle : middle + 8] = bytes(8 * [0xAA])
    path.write_bytes(data)
    users = Users(path, UserColumns(history="seen"), are_strings=False)
    seen: list[int] = []
    message = r"users.parquet cannot be read from row (\d+) on, expected complete parquet"
    with pytest.raises(ValueError, match=message):
        seen.extend(window.first_row for window in users.windows(500))
    assert seen == [0, 500, 1000, 1500]


# Batches


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 500), st.integers(0, 50))
def test_batches_hold_every_prompt_once_within_the_budget(lengths: list[int], budget: int, ahead: int) -> None:
    batches = make_batches(lengths, token_budget=budget, tokens_ahead=ahead)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    longest = [max(lengths[row] for row in batch) for batch in batches]
    for batch, length in zip(batches, longest, strict=True):
        assert len(batch) == 1 or len(batch) * (length + ahead) <= budget
    assert longest == sorted(longest, reverse=True)
    for batch, length in zip(batches[:-1], longest, strict=False):
        assert (len(batch) + 1) * (length + ahead) > budget  # no room was left


def test_sorted_batches_pad_little() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, size=2000).tolist()
    batches = make_batches(lengths, token_budget=4000, tokens_ahead=0)
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
    assert padded < 1.1 * sum(lengths)
    file_order = sum(40 * max(lengths[start : start + 40]) for start in range(0, 2000, 40))
    assert file_order > 1.8 * sum(lengths)
