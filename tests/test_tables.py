# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Catalogues in tables: what is read equals what was written, and what is wrong is named."""

import csv
import gzip
import json
import re
import subprocess
import sys
import tempfile
import tracemalloc
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gr.classification.tables import read_texts
from hf_gr.jobs.reading import Users
from hf_gr.jobs.settings import Settings
from hf_gr.tables import cells, files
from hf_gr.tables.files import find_files
from hf_gr.tables.items import read_items
from hf_gr.tables.sequences import PADDING, read_sequences
from hf_gr.training import read_histories

Rows = list[list[int]]
ROWS: Rows = [[5, 7, 1], [5, 8], [6], [0, 0, 40_000]]
NUMBERS = [30, 10, -2, 2**40]
FORMATS = ("parquet", "csv", "jsonl")
LEVELS = ("c0", "c1", "c2", "c3", "c4")


Read = namedtuple("Read", ["sequences", "item_ids"])


def read_table(path: Any, **how: Any) -> Read:
    return Read(*read_sequences(path, **how))


def padded(rows: Rows) -> Rows:
    width = max(map(len, rows))
    return [row + [PADDING] * (width - len(row)) for row in rows]


def write_table(path: Path, rows: Rows, ids: list[Any] | None, *, levels: int | None = None) -> Path:
    """A table in the format that the name tells, with one column of lists or so many of integers."""
    data: dict[str, Any] = {} if ids is None else {"item_id": ids}
    if levels is None:
        data["sequence"] = rows
    else:
        columns = zip(*(row + [None] * (levels - len(row)) for row in rows), strict=True)
        data |= dict(zip(LEVELS, columns, strict=False))
    records = [dict(zip(data, cells, strict=True)) for cells in zip(*data.values(), strict=True)]
    opened = gzip.open if path.suffix == ".gz" else open
    if ".parquet" in path.name:
        types = {"sequence": pa.list_(pa.int64())}
        pq.write_table(pa.table({name: pa.array(cells, types.get(name)) for name, cells in data.items()}), path)
    elif ".jsonl" in path.name:
        with opened(path, "wt", encoding="utf-8") as file:
            for number, record in enumerate(records):
                kept = {name: cell for name, cell in record.items() if cell is not None or number % 2}
                file.write(json.dumps(kept, ensure_ascii=False) + "\n")
    else:
        with opened(path, "wt", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if ".tsv" in path.name else ",")
            writer.writerow(data)
            for number, record in enumerate(records):
                if levels is None:
                    style = (" ".join, ",".join, ", ".join, lambda tokens: f"[{', '.join(tokens)}]")[number % 4]
                    record["sequence"] = style(map(str, record["sequence"]))
                writer.writerow(record.values())
    return path


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


# Not in quoted cells of CSV: NUL, which pyarrow 18 misreads, nor \r, since pyarrow may lose the \n of a \r\n where two
# blocks meet (apache/arrow#51368).
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1, max_size=8
)
tokens = st.integers(0, 9) | st.sampled_from([2**15 - 1, 2**15, 2**31 - 1, 2**31, 2**63 - 1])
numbers = st.integers(-9, 9) | st.sampled_from([-(2**15), -(2**15) - 1, 2**31, -(2**63), 2**63 - 1])


@given(data=st.data(), format=st.sampled_from(FORMATS))
def test_any_rows_in_any_files_and_batches(data: st.DataObject, format: Any) -> None:
    parts = data.draw(
        st.lists(st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=12), min_size=1)
    )
    rows = [row for part in parts for row in part]
    kind: Any = data.draw(st.sampled_from([texts, numbers, numbers.map(str)]))
    ids = data.draw(st.none() | st.lists(kind, min_size=len(rows), max_size=len(rows)))
    levels = data.draw(st.none() | st.just(max(map(len, rows))))
    suffix = data.draw(st.sampled_from(["", ".gz"])) if format != "parquet" else ""
    how = {"item_id": None if ids is None else "item_id"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(files, BATCH_ROWS=3, BLOCK_BYTES=256):
        left = iter(ids or ())
        for number, part in enumerate(parts):
            path = Path(folder, f"part-{number:02}.{format}{suffix}")
            write_table(path, part, None if ids is None else [next(left) for _ in part], levels=levels)
        table = read_table(folder, sequence="sequence" if levels is None else LEVELS[:levels], **how)
    if ids and format == "csv" and all(re.fullmatch("0|-?[1-9][0-9]*", str(item_id)) for item_id in ids):
        ids = [int(item_id) for item_id in ids]
    assert table.sequences.tolist() == padded(rows)
    assert table.sequences.dtype == next(
        t for t in (np.int16, np.int32, np.int64) if max(map(max, rows)) <= np.iinfo(t).max
    )
    assert (table.item_ids.tolist() if isinstance(table.item_ids, np.ndarray) else table.item_ids) == ids


LISTS = pa.array([[9, 9], [5, 7], None, [], [6, 8], [4, None]], pa.list_(pa.int32()))
PAIRS = pa.array([[9, 9], [5, 7], None, [6, 8], [4, None]], pa.list_(pa.uint8(), 2))


@pytest.mark.parametrize("lists", [LISTS, LISTS.cast(pa.large_list(pa.int64())), PAIRS], ids=str)
def test_a_slice_is_read_from_its_offset(lists: Any) -> None:
    def read(part: Any) -> Rows:
        return read_table(pa.table({"sequence": part}), item_id=None).sequences.tolist()

    assert read(lists[1:2]) == [[5, 7]]
    assert read(lists[-2:]) == [[6, 8], [4, PADDING]]
    with pytest.raises(ValueError, match="row 1 is None, expected at least one token"):
        read(lists[1:])


@pytest.mark.parametrize(
    ("ids", "list_type"),
    [
        (pa.array(["a", "b"], pa.large_string()), pa.large_list(pa.int16())),
        (pa.array(["a", "b"]).dictionary_encode(), pa.list_(pa.uint32(), 2)),
        (pa.array([300, 7], pa.uint64()), pa.list_(pa.uint64())),
        (pa.array([300, 7], pa.int32()).dictionary_encode(), pa.list_(pa.int8())),
    ],
)
def test_types_of_columns(tmp_path: Path, ids: Any, list_type: Any) -> None:
    path = parquet(tmp_path / "a.parquet", sequence=pa.array([[5, 7], [6, None]], list_type), item_id=ids)
    table = read_table(path)
    assert table.sequences.tolist() == [[5, 7], [6, PADDING]]
    assert list(table.item_ids) == ids.to_pylist()
    assert isinstance(table.item_ids, list) or table.item_ids.dtype == np.int16


def test_levels_of_different_types_and_an_empty_one(tmp_path: Path) -> None:
    columns = {"c0": pa.array([1, 2], pa.uint8()), "c1": pa.array([None, 70_000], pa.int64()), "c2": pa.nulls(2)}
    path = parquet(tmp_path / "a.parquet", **columns)
    table = read_table(path, format="parquet", sequence=LEVELS[:3], item_id=None)
    assert table.sequences.tolist() == [[1, PADDING], [2, 70_000]]


def test_an_id_that_is_no_integer_makes_text_of_all_in_csv(tmp_path: Path) -> None:
    first = written(tmp_path / "1.csv", "sequence,item_id\n1,10\n2,-3\n")
    second = written(tmp_path / "2.csv", "sequence,item_id\n3,B01\n")
    third = written(tmp_path / "3.csv", "sequence,item_id\n4,7\n")
    assert read_table([first, second, third], format="csv").item_ids == ["10", "-3", "B01", "7"]
    for item_id in ("007", "0x7", "-0", "9223372036854775808", "NA", " 7", "7.0"):
        written(second, f"sequence,item_id\n3,{item_id}\n")
        assert read_table([first, second], format="csv").item_ids == ["10", "-3", item_id]


def test_a_folder_is_its_files_of_the_format_by_name(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_table(tmp_path / f"part-{number:02}.csv", [[number]], [number])
    write_table(tmp_path / "part-03.tsv.gz", [[3, 5]], [3])
    write_table(tmp_path / "part-04.parquet", [[4]], [4])
    for name in ("_SUCCESS.csv", "._part-01.csv", "notes.txt"):
        written(tmp_path / name, "?")
    several = read_table([str(tmp_path), tmp_path / "part-10.csv"], format="csv")
    assert several.sequences.tolist() == [[1, -1], [2, -1], [3, 5], [10, -1], [10, -1]]
    assert several.item_ids.tolist() == [1, 2, 3, 10, 10]


@pytest.mark.parametrize("name", ["USERS.TSV", "t.tsv.csv", "t.parquet.csv", "a.csv.GZ", "A.JSON", "a.b.JSONL.gz"])
def test_the_last_suffix_tells_the_format_in_small_and_capital_letters(tmp_path: Path, name: str) -> None:
    kind = {"USERS.TSV": "tsv", "a.csv.GZ": "csv.gz", "A.JSON": "jsonl", "a.b.JSONL.gz": "jsonl.gz"}.get(name, "csv")
    path = write_table(tmp_path / f"x.{kind}", ROWS, NUMBERS).rename(tmp_path / name)
    assert read_table(path).sequences.tolist() == padded(ROWS)
    assert read_table(path).item_ids.tolist() == NUMBERS


def test_a_folder_of_spark_is_its_parts_for_every_reader(tmp_path: Path) -> None:
    rows = [{"item_id": 7, "sequence": [5], "user": "ann", "text": "tea", "history": [7]}]
    for name in ("_SUCCESS", "_committed_1.json", "_started_1.json", ".part-0.json.crc", "README.md"):
        written(tmp_path / name, '{"added": []}')
    written(tmp_path / "part-0.json", "".join(json.dumps(row) + "\n" for row in rows))
    assert find_files(tmp_path) == ([tmp_path / "part-0.json"], "jsonl")
    assert read_table(tmp_path).item_ids.tolist() == [7]
    assert read_histories(tmp_path, item="item_id") == {"ann": [7]}
    assert read_texts(tmp_path, text="text").column("text").to_pylist() == ["tea"]
    users = Users(tmp_path, Settings(history="history"), are_strings=False)
    assert [rows.cells("history") for rows in users.windows(5)] == [[[7]]]


@pytest.mark.parametrize(
    ("names", "format", "message"),
    [
        (["a.csv", "b.parquet"], None, "has files of csv and parquet, expected names that end in .*: pass format="),
        (["notes.txt", "_a.csv"], None, "does not say what it is, expected names that end in one of"),
        (["a.csv"], "jsonl", r"is a folder without jsonl files, expected some that end in \.jsonl or"),
    ],
)
def test_a_folder_without_one_format(tmp_path: Path, names: list[str], format: Any, message: str) -> None:
    for name in names:
        written(tmp_path / name, "?")
    with pytest.raises(ValueError, match=message):
        find_files(tmp_path, format)
    with pytest.raises(ValueError, match=r"path=\[\] names no file"):
        find_files([])


@pytest.mark.parametrize(
    ("text", "ids", "strings"),
    [
        ("[5, 7]", [5, 7], ["5", "7"]),
        ("('5', '7')", [5, 7], ["5", "7"]),
        ("[5.5]", None, ["5.5"]),
        ("[[5]]", None, ["[5]"]),
        ("1_000", None, ["1_000"]),  # int() reads these
        ("5 ٣", None, ["5", "٣"]),
        ('["rye bread", "jam, red"]', None, ["rye bread", "jam, red"]),
        ("['rye bread' 'jam, red']", None, ["rye bread", "jam, red"]),
        ("'rye bread' ham", None, ["rye bread", "ham"]),
        ("o'neil (x) é", None, ["o'neil", "(x)", "é"]),
        ('["caf\\u00e9"]', None, ["café"]),
        ("", [], []),
    ],
)
def test_lists_in_texts(text: str, ids: list[int] | None, strings: list[str]) -> None:
    assert cells.read_list(text, are_strings=False) == ids
    assert cells.read_list(text, are_strings=True) == strings


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.TSV", "a.jsonl.gz", "a.json", "a"])
def test_a_list_of_items_in_a_file(tmp_path: Path, name: str, bom: bytes) -> None:
    ids = [107, 7, 103]
    text = "\n107\n 7 \n103\n" if bom == b"" else "107\n7\n103"
    if name.lower().endswith("sv"):
        text = "".join(f"{number}\t{item}\n" for number, item in [("n", "item_id"), *enumerate(ids)])
    elif "json" in name:
        text = json.dumps(ids) if name == "a.json" else "".join(json.dumps({"item_id": item}) + "\n" for item in ids)
    data = bom + text.encode()
    written(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    assert [int(item) for item in read_items("fallback", tmp_path / name)] == ids


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "id\n7\n", "a.csv has no column 'item_id', expected one of 'id': rename the column"),
        ("a.csv", "n,item_id\n1,7\n2,\n", "fallback='.*a.csv', row 1 has no item_id: drop the row"),
        ("a.json", "{", "fallback='.*a.json' cannot be read .*, expected item ids: check the file"),
        ("a.json", "{}", 'has a dict, expected a list such as \\["B01", "B02"\\]'),
        ("a.parquet", "nothing", "a.parquet cannot be read from row 0 on, expected complete parquet"),
        ("a.txt", "item_id\n7\n", "fallback='.*a.txt' begins with 'item_id', expected an id: .* has no header"),
        ("a.txt", "\udcff", "cannot be read .*, expected item ids"),
    ],
)
def test_a_file_without_a_list_of_items(tmp_path: Path, name: str, text: str, message: str) -> None:
    written(tmp_path / name, text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_items("fallback", tmp_path / name)


def test_an_empty_part_file_is_no_error(tmp_path: Path) -> None:
    types = pa.schema([("sequence", pa.list_(pa.int64())), ("item_id", pa.string())])
    pq.write_table(types.empty_table(), tmp_path / "1.parquet")
    write_table(tmp_path / "2.parquet", [[1]], ["a"])
    assert read_table(tmp_path, format="parquet").item_ids == ["a"]
    for name, text in (("1.csv", "sequence,item_id\n"), ("1.jsonl", "\n\n")):
        written(tmp_path / name, text)
        write_table(tmp_path / name.replace("1", "2"), [[1]], ["a"])
        assert read_table(tmp_path, format=name[2:]).item_ids == ["a"]


def test_csv_with_lines_in_other_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 128)
    text = "".join(f'"title, {number}\n""in"" two lines",{number} 7\r\n' for number in range(99))
    path = written(tmp_path / "a.csv", "\ufefftitle,sequence\r\n" + text)
    assert read_table(path, format="csv", item_id=None).sequences.tolist() == [[number, 7] for number in range(99)]


def test_json_that_other_programs_write(tmp_path: Path) -> None:
    lines = ['\ufeff{"sequence": [5, 7], "x": 1}', "", '  {"x": {"y": "z"}, "sequence" : [6]}\r', '{"sequence": [8]}']
    path = written(tmp_path / "a.jsonl", "\n".join(lines))
    assert read_table(path, format="jsonl", item_id=None).sequences.tolist() == [[5, 7], [6, -1], [8, -1]]
    long = written(tmp_path / "b.jsonl", json.dumps({"x": "y" * 3_000_000, "sequence": [5]}) + "\n" * 3)
    assert read_table([long, path], format="jsonl", item_id=None).sequences[0, 0] == 5


def test_a_token_may_be_the_id_and_a_delimiter_any_character(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", [[5, 7], [6], [5, 8]], None, levels=2)
    other = written(tmp_path / "b.txt", "sequence;item_id\n5,7;1\n")
    assert read_table(other, format="csv", delimiter=";").sequences.tolist() == [[5, 7]]
    table = read_table(path, sequence=LEVELS[:2], item_id="c0")
    assert table.sequences.tolist() == [[5, 7], [6, -1], [5, 8]]
    assert np.asarray(table.item_ids).tolist() == [5, 6, 5]


def table_of(**columns: Any) -> Any:
    return pa.table({"sequence": [[5, 7], [6, 8]], "item_id": [1, 2]} | columns)


def levels_of(*columns: Any) -> Any:
    return pa.table(dict(zip(LEVELS, columns, strict=False)) | {"item_id": [1, 2]})


C2, C3, NO_ID = {"sequence": LEVELS[:2]}, {"sequence": LEVELS[:3]}, {"item_id": None}
HEAD = "sequence,item_id\n5 7,1\n"
FIRST = '{"sequence": [5, 7], "item_id": 1}\n\n'
BIG = pa.array([[5], [2**63]], pa.list_(pa.uint64()))
GAP, NONE = "expected nulls at its end only", "expected at least one token: drop the row"
BROKEN = pa.array([b"a", b"\xff"]).view(pa.string())
BAD = [
    # kind of file, content, arguments, what the error says
    ("parquet", None, {}, "a.parquet is not there, expected a parquet file or a folder of them: check the path"),
    ("parquet", table_of(), {"sequence": "codes"}, "no column 'codes', expected one of 'sequence', .* with sequence="),
    ("parquet", table_of(), {"item_id": "sku"}, "has no column 'sku', .* with item_id=, or item_id=None"),
    ("parquet", table_of(), {"sequence": []}, r"sequence=\[\] names no column, expected one or more"),
    ("parquet", pa.table([[1], [2]], ["a", "a"]), {"sequence": ["a"]} | NO_ID, "has 2 columns 'a', expected one"),
    ("parquet", table_of(sequence=[5, 6]), {}, r"int64, expected lists of integers.* sequence=\[\"c0\", \"c1\"\]"),
    ("parquet", table_of(sequence=[[5.0], [6.5]]), {}, "type list<.*double>, expected integers: write integers"),
    ("parquet", levels_of([1, 2], [3.0, None]), C2, r"'c1' has type double, expected integers.*astype\(\"Int64\"\)"),
    ("parquet", table_of(sequence=[[5], [6, None, 7]]), {}, rf"row 1 is \[6, None, 7\], {GAP}"),
    ("parquet", levels_of([1, 2], [3, None], [None, 4]), C3, rf"'c0', 'c1', 'c2', row 1 is \[2, None, 4\], {GAP}"),
    ("parquet", table_of(sequence=[[5], []]), {}, rf"row 1 is \[\], {NONE}"),
    ("parquet", table_of(sequence=[[5], [6, -7]]), {}, r"row 1 is \[6, -7\], expected .* from 0 to \d+ and not -7"),
    ("parquet", levels_of([1, 2], [3, -7]), C2, "column 'c1', row 1 is -7, expected integers from 0 .* Padding is"),
    ("parquet", table_of(sequence=BIG), {}, rf"row 1 is \[{2**63}\], expected .* 0 to {2**63 - 1} and not {2**63}"),
    ("parquet", table_of(item_id=[1, None]), {}, "column 'item_id', row 1 is None, expected an id: give it one, or"),
    ("parquet", table_of(item_id=[1.0, 2.0]), {}, "column 'item_id' has type double, expected integers or strings"),
    ("parquet", table_of(item_id=pa.array([1, 2**64 - 1], pa.uint64())), {}, f"row 1 is {2**64 - 1}, .* to strings"),
    ("parquet", table_of(item_id=BROKEN), {}, "a.parquet cannot be read.* UTF8"),
    ("parquet", table_of()[:0], {}, "a.parquet has no row, expected at least one: a catalogue needs an item"),
    ("parquet", b"", {}, "a.parquet cannot be read from row 0 on, expected complete parquet: .* 0 bytes"),
    ("csv", HEAD, {"delimiter": ";;"}, "delimiter=';;', expected one ASCII character"),
    ("csv", "sequence;item_id\n5;1\n", {}, "no column 'sequence', .*: pass delimiter=';', if that separates"),
    ("csv", HEAD + "5 x,2\n", {}, "'sequence', row 1 is '5 x', expected integers of 64 bits and not 'x': write"),
    ("csv", HEAD + '"5, ,7",2\n', {}, "row 1 is '5, ,7', expected an integer between two commas: fill the gap"),
    ("csv", HEAD + f"{2**63},2\n", {}, f"row 1 is '{2**63}', expected integers of 64 bits"),
    ("csv", HEAD + "5,7,2\n", {}, "cannot be read.* Row #3: Expected 2 columns, got 3: 5,7,2 .quote cells"),
    ("csv", HEAD.encode() + b"5,\xff\n", {}, "a.csv cannot be read.* Row #3: .*invalid UTF8.* text is UTF-8"),
    ("csv", "c0,c1,item_id\n1,2,3\n,5,6\n", C2, rf"columns 'c0', 'c1', row 1 is \[None, '5'\], {GAP}"),
    ("csv.gz", gzip.compress(HEAD.encode() * 99)[:-9], {}, "a.csv.gz cannot be read.* Truncated"),
    ("jsonl", FIRST + '{"sequence": [5], "item_id": 2\n' + FIRST, {}, "line 3 is '{.*2', expected an object with 's"),
    ("jsonl", "\n[5, 7]", {}, r"line 2 is '\[5, 7\]', expected an object with .*it is no object.: correct it"),
    ("jsonl", b'{"sequence": [5], "item_id": "a"}\n{"sequence": [5], "item_id": "\xb2"}', {}, "line 2 is .*UTF8"),
    ("jsonl", FIRST + '{"sequence": [5]}', {}, "column 'item_id', row 1 is None, expected an id"),
    ("jsonl", '{"c0": 5}', C2 | NO_ID, "a.jsonl has 'c1' in no row, expected it in some: correct sequence="),
]


@pytest.mark.parametrize(("kind", "content", "arguments", "message"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_named(
    tmp_path: Path, kind: str, content: Any, arguments: dict[str, Any], message: str
) -> None:
    path = tmp_path / f"a.{kind}"
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    elif content is not None:
        written(path, content)
    with pytest.raises(ValueError, match=message):
        read_table(path, **arguments)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_ids_of_two_types(tmp_path: Path, format: Any) -> None:
    paths = [write_table(tmp_path / f"{item}.{format}", [[5]], [item]) for item in (1, "a")]
    for order, problem in ((paths, "type string, expected integers as in the"), (paths[::-1], "int64, expected str")):
        with pytest.raises(ValueError, match=rf"column 'item_id' has .*{problem}"):
            read_table(order, format=format)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Pyarrow takes OMP_NUM_THREADS=1 for one processor, and then does what it does not with more."""
    before = pa.cpu_count()
    pa.set_cpu_count(2)
    yield
    pa.set_cpu_count(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("format", FORMATS)
def test_the_row_of_an_error_counts_earlier_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any
) -> None:
    monkeypatch.setattr(files, "BATCH_ROWS", 10)
    monkeypatch.setattr(files, "BLOCK_BYTES", 256)
    rows = [[5, 7]] * 77 + [[5, -7]] + [[5]] * 20
    good = write_table(tmp_path / f"1.{format}", [[5]], [0])
    bad = write_table(tmp_path / f"2.{format}", rows, list(range(len(rows))))
    with pytest.raises(ValueError, match=rf"2\.{format}, column 'sequence', row 77 is "):
        read_table([good, bad], format=format)
    if format == "jsonl":
        lines = bad.read_text().splitlines()
        written(bad, "\n".join([*lines[:60], "", lines[60][:-1], *lines[61:]]))
        with pytest.raises(ValueError, match=r"2\.jsonl, line 62 is "):
            read_table(bad, format=format)
    if format == "csv":
        written(bad, bad.read_text().replace("-7", "7") + "5,6,7\n")
        with pytest.raises(ValueError, match=r"2\.csv cannot be read from row \d+ on, .* Row #100: Expected 2"):
            read_table(bad, format=format)


def test_a_parquet_file_that_is_cut_short_or_damaged(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", sequence=[[5, 7]] * 1000, item_id=np.arange(1000))
    data = path.read_bytes()
    for broken in (data[:-20], data[: len(data) // 2], data[:8] + bytes(40) + data[48:]):
        written(path, broken)
        with pytest.raises(ValueError, match=r"a\.parquet cannot be read from row .* on, .* \(write it again"):
            read_table(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv.gz", "a.jsonl"])
def test_progress_counts_the_bytes_of_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = write_table(tmp_path / name, ROWS * 50, None)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1024)
    with caplog.at_level("INFO", "hf_gr.progress"):
        read_table([path, path], item_id=None)
    assert re.match(rf"Reading {path} and 1 more: \S+ of \S+B \(100.0%\)", caplog.messages[-1])


def test_missing_pyarrow_names_the_extra() -> None:
    code = "import sys; sys.modules['pyarrow'] = None; import hf_gr.tables.files"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith('ImportError: reading tables needs pyarrow: pip install "hf-gr[tables]"\n')


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_memory_is_little_more_than_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any) -> None:
    num_rows, path = 1_000_000, tmp_path / f"a.{format}"
    tokens = np.random.default_rng(0).integers(0, 2**15, (num_rows, 8), dtype=np.int16)
    if format == "parquet":
        lists = pa.FixedSizeListArray.from_arrays(tokens.ravel(), 8).cast(pa.list_(pa.int16()))
        parquet(path, sequence=lists, item_id=np.arange(num_rows))
    else:
        with path.open("w") as file:
            file.writelines(f'{{"sequence": {row}, "item_id": {n}}}\n' for n, row in enumerate(tokens.tolist()))
    monkeypatch.setattr(files, "BATCH_ROWS", 2**14)
    monkeypatch.setattr(files, "BLOCK_BYTES", 2**20)
    tracemalloc.start()
    table = read_table(path, format=format)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(table.sequences, tokens)
    assert peak < 1.13 * num_rows * (8 * 2 + 4) + 8 * 2**20  # arrays grow by an eighth
