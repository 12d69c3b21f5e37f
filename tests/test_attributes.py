# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes of items from tables of each kind, and filters by them, against a loop in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from hf_gr.answering.attributes import Attributes

ROWS: dict[str, list[Any]] = {
    "item_id": ["007", "B1", "B2", "B3", "B4"],
    "kind": ["tea", "jam", None, "tea, green", "tea"],
    "price": [4, 20.5, 5, None, 1e3],
    "count": [1, 2, 3, 4, None],
    "is_new": [True, False, True, None, True],
    "tags": [["a"], [], None, ["b"], ["a", "b"]],
}
FILTERS: list[dict[str, Any]] = [
    {"kind": ["tea"]},
    {"kind": ("tea, green", "jam"), "price": {"max": 30}},
    {"price": {"min": 4, "max": 20}},
    {"price": {"min": 5.5}, "is_new": [True]},
    {"count": [2, 3.0, 9]},
    {"kind": []},
    {"count": {}},
]


def passes(row: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(
        row[name] is not None
        and (one.get("min", -1e9) <= row[name] <= one.get("max", 1e9) if isinstance(one, dict) else row[name] in one)
        for name, one in wanted.items()
    )


@pytest.mark.parametrize("form", ["columns", "arrow", "table.parquet", "table.csv", "table.jsonl", "folder"])
def test_items_pass_filters_as_in_a_loop(form: str, tmp_path: Path) -> None:
    table, path, rows = pa.table(ROWS), tmp_path / form, pa.table(ROWS).to_pylist()
    plain = table.drop(["tags"])
    if form.endswith(".parquet"):
        pyarrow.parquet.write_table(table.set_column(1, "kind", table["kind"].dictionary_encode()), path)
    elif form.endswith(".csv"):
        pyarrow.csv.write_csv(plain, path)
    elif form == "folder":
        path.mkdir()
        for start in range(0, len(rows), 2):
            pyarrow.parquet.write_table(table.slice(start, 2), path / f"part-{start}.parquet")
    elif form.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    attributes = Attributes({"columns": ROWS, "arrow": table}.get(form, path), are_strings=True)
    for wanted in FILTERS:
        found = attributes.items(attributes.read(wanted))
        assert found == [row["item_id"] for row in rows if passes(row, wanted)]


@pytest.mark.parametrize("num_files", [1, 2])
def test_digits_that_numbers_would_lose_stay_text(num_files: int, tmp_path: Path) -> None:
    rows = ["01,01234,12345678901234567,1.50\n", "02,90210,7,0.5\n03,,12345678901234568,0\n"]
    for number in range(num_files):
        content = rows[number] if num_files == 2 else "".join(rows)
        (tmp_path / f"{number}.csv").write_text(f"item_id,zip,ean,price\n{content}")
    attributes = Attributes(tmp_path, are_strings=True)
    for wanted in ({"zip": ["01234"]}, {"ean": ["12345678901234567"]}, {"price": {"min": 1}}):
        assert attributes.items(attributes.read(wanted)) == ["01"]
    assert attributes.items(attributes.read({"zip": ["90210"]})) == ["02"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"colour": ["red"]}, "filter has 'colour', expected some of kind, price, count, is_new: omit it"),
        ({"tags": ["a"]}, "filter has 'tags'"),
        ({"kind": "tea"}, r"""filter\['kind'\]='tea', expected a list of texts: write it as \["tea"\]"""),
        ({"kind": {"max": 5}}, r"filter\['kind'\]={'max': 5}, expected a list of texts"),
        ({"price": ["5"]}, r"filter\['price'\]=\['5'\], expected a list of numbers, or an object of min and max"),
        ({"price": {"most": 5}}, "expected a list of numbers"),
        ({"price": {"max": None}}, "expected a list of numbers"),
        ({"price": [True]}, "expected a list of numbers"),
        ({"price": [10**400]}, "expected a list of numbers"),
        ({"count": {"max": 10**400}}, "expected a list of numbers"),
        ({"is_new": [1]}, "expected a list of true or false"),
    ],
)
def test_filters_that_are_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attributes(ROWS, are_strings=True).read(wanted)


@pytest.mark.parametrize(
    ("table", "are_strings", "message"),
    [
        ({"id": ["a"]}, True, "attributes has no column 'item_id', expected one of 'id'"),
        ({"item_id": ["a", "a"]}, True, "has an item_id twice, or a row without"),
        ({"item_id": ["a", None]}, True, "has an item_id twice, or a row without"),
        (ROWS, False, "has item ids of another type .*, expected integers"),
        ("no.csv", True, "no.csv is not there"),
        ("bad.jsonl", True, "bad.jsonl cannot be read .*, expected complete jsonl"),
    ],
)
def test_tables_that_are_refused(
    table: Any, are_strings: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"item_id": ')
    with pytest.raises(ValueError, match=message):
        Attributes(table, are_strings=are_strings)
