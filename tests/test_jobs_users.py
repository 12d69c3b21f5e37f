# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of users in windows, its rows as prompts, and prompts in batches."""

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
from hf_gr.answering.batching import make_batches, make_even_batches
from hf_gr.answering.recommender import Recommender
from hf_gr.answering.requests import Request
from hf_gr.commands import failures
from hf_gr.jobs import baselines, intervals, metrics
from hf_gr.jobs.reading import UserRow, Users, read_rows
from hf_gr.jobs.settings import Settings
from hf_gr.tables import cells, memory, sequences
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


def rows_of(
    table: Any, settings: Settings, index: ConstraintIndex = INDEX, size: int = 2, **how: Any
) -> list[UserRow]:
    how = {"prefix_tokens": settings.prefix_tokens, "suffix_tokens": settings.suffix_tokens} | how
    recommender = Recommender(None, index, unknown_items=settings.unknown_items, **how)
    found: list[UserRow] = []
    for window in Users(table, settings, are_strings=index.snapshot.are_strings).windows(size):
        assert window.first_row == len(found)
        found += read_rows(window, recommender, settings)
    return found


def requests(*arguments: Any, **how: Any) -> Any:
    """(prompt, exclusions, allowed) or a problem, for every row."""
    requests = [row.request or row.problem for row in rows_of(*arguments, **how)]
    return [one if isinstance(one, str) else (one.tokens, one.exclude, one.allowed) for one in requests]


@pytest.mark.parametrize("format", ["parquet", "csv", "jsonl.gz"])
def test_formats_and_windows_give_the_same_requests(tmp_path: Path, format: str) -> None:
    path = write(tmp_path, format, ROWS)
    users = Users(path, ALL, are_strings=False)
    for size, lengths in ((1, [1] * 5), (2, [2, 2, 1]), (100, [5])):
        assert requests(path, ALL, size=size) == EXPECTED
        windows = list(users.windows(size))
        assert [len(window) for window in windows] == lengths
        assert [str(cell) for window in windows for cell in window.cells("who")] == ["7", "8", "9", "9", "5"]
    assert users.num_rows == (5 if format == "parquet" else None)


def test_several_files_are_one_table_of_the_types_of_the_first(tmp_path: Path) -> None:
    paths = [write(tmp_path, "parquet", ROWS[:2], "a"), write(tmp_path, "parquet", ROWS[2:], "b")]
    for source in (paths, tmp_path):
        assert requests(source, ALL, size=3) == EXPECTED
    narrow = {"who": pa.array([3], pa.int16()), "seen": pa.array([[1]], pa.list_(pa.int8()))}
    pq.write_table(pa.table(narrow), tmp_path / "c.parquet")
    problem = requests(tmp_path, Settings(history="seen", user="who"), size=4)[5]
    assert problem.startswith(f"{tmp_path / 'c.parquet'}, row 0 cannot be answered: history has 1, expected items of")
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
        ({"seen": None}, "history is empty, expected one item or more"),
        ({"seen": []}, "history is empty, expected one item or more"),
        ({"seen": [10, None]}, "history has None, expected integers: the catalogue's item ids are integers"),
        ({"seen": [10, 13]}, "history has 13, expected items of the catalogue: remove it, or drop such items"),
        ({"only": [10, 13]}, "filter has 13, expected items of the catalogue: remove it"),
        ({"not": [10, None]}, "exclude has None, expected integers"),
    ],
)
def test_a_problem_is_of_its_row_alone(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    found = requests(write(tmp_path, "parquet", [ROWS[0], ROWS[1] | row, *ROWS[2:]]), ALL)
    assert f"row 1 cannot be answered: {problem}" in found[1]
    assert found[1].startswith(str(tmp_path))
    assert "on_error='skip'" in found[1]
    assert found[:1] + found[2:] == EXPECTED[:1] + EXPECTED[2:]


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("10 x", "history='10 x', expected a list of integers"),
        ("10 99999999999999999999", "history has 99999999999999"),
    ],
)
def test_a_cell_of_csv_that_is_no_list_of_integers(tmp_path: Path, cell: str, problem: str) -> None:
    (tmp_path / "a.csv").write_text(f'seen\n10\n"{cell}"\n')
    found = requests(tmp_path / "a.csv", SEEN)
    assert found[0] == ([5, 7], (), None)
    assert problem in found[1]


def test_the_latest_items_that_fit_are_the_prompt() -> None:
    table = pa.Table.from_pylist(ROWS)
    prompts = requests(table, replace(ALL, prefix_tokens=(1,), suffix_tokens=(3,)), max_prompt_tokens=5)
    assert prompts[0][0] == [1, 5, 8, 3]  # two items would take 4 of 3 tokens
    assert prompts[2][0] == [1, 6, 5, 7, 3]
    assert (
        "history ends with 11 of 2 tokens, expected an item that fits" in requests(table, ALL, max_prompt_tokens=1)[0]
    )


def test_an_item_that_is_sold_out_still_tells_of_its_user() -> None:
    index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=[10, 11, 12])
    index.remove([10])
    index.add([[6, 8], [6, 9]], [11, 13])  # 11 keeps its first sequence
    table = pa.table({"seen": [[10, 11, 12, 13], [11]], "only": [[11], [10]]})
    found = requests(table, Settings(history="seen", filter="only"), index)
    assert found[0] == ([5, 7, 5, 8, 6, 7, 6, 9], (), (11,))
    assert "filter has 10, expected items of the catalogue" in found[1]
    index.remove([11])
    index.add([[6, 8]], [11])
    assert requests(table, SEEN, index)[1][0] == [6, 8]


def test_tokens_are_the_prompt_as_they_are() -> None:
    table, settings = pa.table({"t": [[1, 2, 3], [9], [1, -1], []]}), Settings(tokens="t")
    found = requests(table, settings, vocab_size=9)
    assert found[0] == ([1, 2, 3], (), None)
    assert ["expected 0 to 8" in found[row] for row in (1, 2, 3)] == [True, True, False]
    assert "tokens is empty" in found[3]
    assert "1 tokens more than the 2 that the model has room for" in requests(table, settings, max_prompt_tokens=2)[0]
    assert requests(table, replace(settings, max_prompt_tokens=2), max_prompt_tokens=2)[0][0] == [2, 3]


def test_texts_go_through_the_tokenizer() -> None:
    def tokenizer(text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": [ord(letter) for letter in text if letter != "?"]}

    table = pa.table({"t": ["ab", "", "c", None, "?"]})
    found = requests(table, Settings(text="t"), size=5, tokenizer=tokenizer)
    assert [found[0][0], found[2][0]] == [[97, 98], [99]]
    assert ["text is empty" in str(found[row]) for row in range(5)] == [False, True, False, True, True]


def test_leave_one_out_hides_the_last_item() -> None:
    table = pa.table({"seen": [[10, 11], [12], [10, 13]]})
    settings = Settings(history="seen", exclude="seen", leave_one_out=True)
    first, *others = rows_of(table, settings)
    assert first == UserRow(request=Request([5, 7], (10,), num_results=10, num_beams=20, history=(10,)), targets=[11])
    assert "history=[12], expected 2 items or more" in str(others[0].problem)
    assert "history has 13" in str(others[1].problem)
    dropping = rows_of(table, replace(settings, unknown_items="drop"), fallback=[12])
    assert [row.targets for row in dropping] == [[11], [12], [13]]  # what the catalogue does not have is a miss


def test_targets_may_be_one_or_several() -> None:
    for column, targets in (([10, 99, None], {0: [10], 1: [99]}), ([[10, 11], [], [12]], {0: [10, 11], 2: [12]})):
        rows = rows_of(pa.table({"seen": [[12]] * 3, "next": column}), Settings(history="seen", target="next"))
        assert {number: row.targets for number, row in enumerate(rows) if not row.problem} == targets


def test_an_empty_prompt_of_any_kind_gets_the_fallback() -> None:
    table = pa.table({"t": [[5, 7], None, []], "x": ["a", None, ""], "seen": [[10], None, []]})
    options: dict[str, Any] = {"tokenizer": lambda text, verbose: {"input_ids": [5]}}
    for settings in (Settings(tokens="t"), Settings(text="x"), SEEN):
        rows = rows_of(table, settings, fallback=[12, 10], **options)
        assert [(row.problem, row.is_cold) for row in rows] == [(None, False), (None, True), (None, True)]
        assert [row.problem is None for row in rows_of(table, settings, **options)] == [True, False, False]
    (row,) = rows_of(pa.table({"seen": [[13]]}), replace(SEEN, unknown_items="drop"))
    assert "history has 13, expected at least one item of the catalogue" in str(row.problem)


def test_what_is_no_table_of_users(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.\w+ has no column 'seen', expected one of .*'who'.*with history="):
        Users(write(tmp_path, "parquet", [{"who": 1}], "a"), SEEN, are_strings=False)
    (tmp_path / "a.csv").write_text("seen\n")
    with pytest.raises(ValueError, match="has no row, expected"):
        Users(tmp_path / "a.csv", SEEN, are_strings=False)


def test_examples_run() -> None:
    for module in (baselines, cells, failures, intervals, memory, metrics, sequences, table_module):
        failed, attempted = doctest.testmod(module)
        assert (failed, attempted > 0) == (0, True)


lengths_of_prompts = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(lengths_of_prompts, st.integers(1, 500), st.integers(0, 50))
def test_batches_hold_every_prompt_once_within_the_budget(lengths: list[int], budget: int, ahead: int) -> None:
    batches = make_batches(lengths, token_budget=budget, tokens_ahead=ahead)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    longest = [max(lengths[row] for row in batch) for batch in batches]
    for batch, length in zip(batches, longest, strict=True):
        assert len(batch) == 1 or len(batch) * (length + ahead) <= budget
    assert longest == sorted(longest, reverse=True)  # similar lengths are together: little padding
    for batch, length in zip(batches[:-1], longest, strict=False):
        assert (len(batch) + 1) * (length + ahead) > budget  # no room was left


@given(lengths_of_prompts, st.integers(1, 500), st.sampled_from([1, 4]))
def test_batches_of_compiled_programs_have_few_shapes(lengths: list[int], budget: int, num_devices: int) -> None:
    def shape(length: int) -> int:
        return -(-length // 16) * 16

    how: dict[str, Any] = {"padded_length": shape, "num_devices": num_devices}
    batches = make_even_batches(lengths, token_budget=budget, tokens_ahead=8, **how)
    assert set().union(*batches) == set(range(len(lengths)))
    assert sum(map(len, batches[:-1])) + len(set(batches[-1])) == len(lengths)  # the last one alone is filled
    longest = [shape(lengths[batch[0]]) for batch in batches]  # the longest first
    for batch, length in zip(batches, longest, strict=True):
        each, left = divmod(len(batch), num_devices)
        assert (left, each.bit_count(), max(lengths[row] for row in batch) <= length) == (0, 1, True)
        assert each == 1 or each * (length + 8) <= budget
    assert len(set(zip(map(len, batches), longest, strict=True))) == len(set(longest))
