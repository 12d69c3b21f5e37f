# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr index build | show | check | push`, and the numbers of `show` against a slow twin."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from test_index import FakeApi
from typer.testing import CliRunner

from hf_gr import ConstraintIndex
from hf_gr.catalogue.storage import ARRAYS_FILE, JSON_FILE
from hf_gr.catalogue.summary import summarise
from hf_gr.commands import app as cli
from hf_gr.commands import index_input, index_report
from hf_gr.files import pairs as paired_files

ROWS = [[5, 7, 9], [5, 7, 8], [5, 6, 8], [6, 6, 8], [6, 6, 8]]
RECIPE = {"17": ["<a_0>", "<b_1>"], "23": ["<a_2>", "<b_0>"], "5": ["<a_2>", "<b_0>"]}


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.build_app(), ["index", *map(str, arguments)])


def succeed(*arguments: Any) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def fail(*arguments: Any, code: int = 2) -> str:
    """What is printed of an error that a user can mend: one line on stderr."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith(f"hf-gr index {arguments[0]}: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved index."""
    path = tmp_path / "catalogue"
    ConstraintIndex.from_sequences(ROWS, item_ids=list("abcde"), eos_token_id=1).save_pretrained(path)
    return path


# The numbers


def reference_summary(rows: list[list[int]]) -> list[dict[str, Any]]:
    """By level, one prefix at a time."""
    sequences = set(map(tuple, rows))
    levels = []
    for level in range(1, max(map(len, sequences)) + 1):
        children = defaultdict(set)
        for sequence in sequences:
            if len(sequence) >= level:
                children[sequence[: level - 1]].add(sequence[level - 1])
        counts = [len(tokens) for tokens in children.values()]
        begins = Counter(sequence[:level] for sequence in sequences)
        levels.append(
            {
                "level": level,
                "nodes": sum(counts),
                "mean_children": sum(counts) / len(counts),
                "largest_branching": max(counts),
                "forced_share": counts.count(1) / len(counts),
                "decided_share": sum(begins[sequence[:level]] == 1 for sequence in sequences) / len(sequences),
                "num_ended": sum(len(sequence) == level for sequence in sequences),
            }
        )
    return levels


def check_levels(summary: Any, rows: list[list[int]]) -> None:
    expected = reference_summary(rows)
    assert len(summary.levels) == len(expected) == summary.max_length
    for level, wanted in zip(summary.levels, expected, strict=True):
        assert {name: pytest.approx(getattr(level, name)) for name in wanted} == wanted


@pytest.mark.parametrize("num_tokens", [2, 5, 40])
@pytest.mark.parametrize("num_rows", [1, 3, 30, 400])
def test_levels_of_sequences_of_one_length(num_rows: int, num_tokens: int) -> None:
    rows = np.random.default_rng(num_rows).integers(0, num_tokens, (num_rows, 5))
    check_levels(summarise(ConstraintIndex.from_sequences(rows).snapshot), rows.tolist())


@pytest.mark.parametrize("num_tokens", [2, 5, 40])
@pytest.mark.parametrize("num_rows", [1, 3, 30, 400])
def test_levels_of_sequences_of_several_lengths(num_rows: int, num_tokens: int) -> None:
    rng = np.random.default_rng(num_rows)
    rows = [rng.integers(2, num_tokens + 2, rng.integers(1, 7)).tolist() for _ in range(num_rows)]
    index = ConstraintIndex.from_sequences(rows, eos_token_id=1)
    check_levels(summarise(index.snapshot), [[*row, 1] for row in rows])


def test_the_twin_is_not_the_summary_of_other_rows() -> None:
    with pytest.raises(AssertionError):
        check_levels(summarise(ConstraintIndex.from_sequences(ROWS).snapshot), ROWS[1:])


@pytest.mark.parametrize("item_ids", [None, [3, 1, 4, 1, 5], list("abcde")])
def test_bytes_are_those_of_the_arrays(item_ids: Any) -> None:
    index = ConstraintIndex.from_sequences(ROWS, item_ids=item_ids)
    summary = summarise(index.snapshot)
    trie = index.snapshot.trie
    of_no_level = trie.tokens.nbytes - sum(level.token_bytes for level in summary.levels)
    assert of_no_level == (1 + max(trie.branching)) * trie.tokens.itemsize, "the root, and what may be read at the end"
    levels = sum(level.token_bytes + level.offset_bytes for level in summary.levels)
    assert levels + summary.item_bytes + summary.item_id_bytes + of_no_level == summary.nbytes == index.nbytes
    assert summary.bytes_per_item == index.nbytes / 5
    assert bool(summary.item_id_bytes) == (item_ids is not None)


def test_collisions() -> None:
    summary = summarise(ConstraintIndex.from_sequences([[1], [1], [1], [2], [3], [3]]).snapshot)
    assert (summary.num_items, summary.num_sequences) == (6, 3)
    assert (summary.num_shared_sequences, summary.num_sharing_items, summary.most_items_of_a_sequence) == (2, 5, 3)


def test_an_updated_index_counts_as_what_it_would_be_saved_as() -> None:
    index = ConstraintIndex.from_sequences(ROWS, item_ids=list("abcde"))
    index.remove(["a"])
    index.add([[4, 4, 4]], ["f"])
    summary = summarise(index.snapshot)
    check_levels(summary, [*ROWS[1:], [4, 4, 4]])
    index.compact()
    assert summary == summarise(index.snapshot)


# show


def test_show_prints_levels_and_facts(folder: Path) -> None:
    printed = succeed("show", folder)
    cells = [line.split() for line in printed.splitlines()]
    assert ["2", "3", "1.50", "2", "50.0%", "50.0%", "6", "B", "6", "B"] in cells
    for text in (
        "4 of up to 4 tokens, end token 1 included",
        "5, with string ids",
        "1 sequence has several items, at most 2: 2 items share, 40.0%",
        "10 or more; the largest token is 9",
        "bytes an item",
    ):
        assert text in printed
    assert "end" not in cells[2], "every sequence ends at the last level"


def test_show_says_where_sequences_end_if_they_differ_in_length(tmp_path: Path) -> None:
    ConstraintIndex.from_sequences([[5], [6, 7], [6, 8]], eos_token_id=1).save_pretrained(tmp_path)
    cells = [line.split() for line in succeed("show", tmp_path).splitlines()]
    assert ["2", "3", "1.50", "2", "50.0%", "100.0%", "1", "6", "B", "6", "B"] in cells


def test_show_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 50, rng.integers(2, 12)).tolist() for _ in range(20_000)]
    index = ConstraintIndex.from_sequences(rows, eos_token_id=1)
    summary = summarise(index.snapshot)
    monkeypatch.setattr(index_report, "PIPE_WIDTH", 80)
    index_report.print_summary(summary, "catalogue")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert all(f"{level.nodes:,}" in printed for level in summary.levels)


def test_show_json_is_the_summary(folder: Path) -> None:
    shown = json.loads(succeed("show", folder, "--json"))
    index = ConstraintIndex.from_pretrained(folder)
    summary = summarise(index.snapshot)
    assert shown["levels"][1]["nodes"] == 3
    assert shown == json.loads(json.dumps(dataclasses.asdict(summary)))
    assert (shown["num_items"], shown["eos_token_id"], shown["max_token_id"], shown["nbytes"]) == (
        5, 1, 9, summary.nbytes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0%"), (1, "100.0%"), (0.99999, ">99.9%"), (1e-9, "<0.1%"), (0.9994, "99.9%"), (0.0006, "0.1%")],
)
def test_what_is_not_quite_all_does_not_look_so(share: float, text: str) -> None:
    assert index_report.format_share(share) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e6, "2.5 MB"), (3.25e12, "3250.0 GB")]
)
def test_bytes_have_a_unit(size: float, text: str) -> None:
    assert index_report.format_bytes(size) == text


# show --plot


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG\r\n"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_plot_is_a_picture(ending: str, begins: bytes, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("show", folder, "--json", "--plot", tmp_path / f"levels.{ending}")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["num_items"] == 5, "stdout is one JSON object all the same"
    assert f"levels.{ending}" in result.stderr
    assert (tmp_path / f"levels.{ending}").read_bytes().startswith(begins)


def test_a_plot_shows_the_numbers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    levels = summarise(ConstraintIndex.from_pretrained(folder).snapshot).levels
    assert run("show", folder, "--plot", tmp_path / "levels.png").exit_code == 0
    bars = [[bar.get_height() for bar in series] for axes in drawn[0].axes for series in axes.containers]
    names = ("nodes", "mean_children", "largest_branching", "forced_share", "decided_share")
    assert bars == [[getattr(level, name) for level in levels] for name in names]
    assert "matplotlib.pyplot" not in sys.modules, "a window may open"


def test_a_plot_that_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for file, message in (
        ("levels.foo", "levels.foo', expected a name that ends in one of"),
        ("nowhere/levels.png", "No such file"),
    ):
        result = run("show", folder, "--plot", tmp_path / file)
        assert (result.exit_code in (1, 2), message in result.stderr, result.stderr.count("\n")) == (True, True, 1)


def test_a_plot_without_matplotlib_names_the_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("hf_gr.commands.index_plot", "hf_gr.files.figures"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 'needs matplotlib: pip install "hf-gr[plot]"' in fail("show", folder, "--plot", tmp_path / "levels.png")


# build


def build(tmp_path: Path, *arguments: Any) -> ConstraintIndex:
    printed = succeed("build", *arguments, "--output", tmp_path / "built")
    index = ConstraintIndex.from_pretrained(tmp_path / "built")
    assert f"{index.num_items:,} items, {len(index):,} sequences of up to {index.max_length} tokens" in printed
    assert f"hf-gr index show {tmp_path / 'built'}" in printed
    return index


def items_of(index: ConstraintIndex) -> dict[tuple[int, ...], list[Any]]:
    return {tuple(sequence): index.items([sequence])[0] for sequence in index}


def test_build_from_an_array(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array(ROWS))
    assert items_of(build(tmp_path, tmp_path / "rows.npy")) == items_of(ConstraintIndex.from_sequences(ROWS))


def test_build_from_an_array_of_several_lengths(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([[5, 7], [6, -1]]))
    index = build(tmp_path, tmp_path / "rows.npy", "--eos-token-id", 1)
    assert items_of(index) == {(5, 7, 1): [0], (6, 1): [1]}
    said = fail("build", tmp_path / "rows.npy", "-o", tmp_path / "other")
    assert "sequences have 1 to 2 tokens and eos_token_id=None" in said


def test_build_from_semantic_ids(tmp_path: Path) -> None:
    (tmp_path / "recipe.index.json").write_text(json.dumps(RECIPE))
    index = build(tmp_path, tmp_path / "recipe.index.json", "--offset", 10)
    assert items_of(index) == {(10, 14): [17], (12, 13): [23, 5]}
    index = build(tmp_path, tmp_path / "recipe.index.json", "--offset", 10, "--level-sizes", "256,256")
    assert items_of(index) == {(10, 267): [17], (12, 266): [23, 5]}


def test_build_from_semantic_ids_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"<|a_0|>": 70, "<|a_2|>": 71, "<|b_0|>": 5, "<|b_1|>": 6}

    loaded: list[str] = []
    monkeypatch.setattr(index_input, "_load_tokenizer", lambda name: loaded.append(name) or Tokenizer())
    text = json.dumps(RECIPE).replace("<", "<|").replace(">", "|>")
    (tmp_path / "recipe.json").write_text(text)
    template = ("--template", "<|{level}_{code}|>")
    index = build(tmp_path, tmp_path / "recipe.json", "--tokenizer", "me/model", *template, "--eos-token-id", 2)
    assert loaded == ["me/model"]
    assert items_of(index) == {(70, 6, 2): [17], (71, 5, 2): [23, 5]}


TABLES: dict[str, str] = {
    "items.csv": 'sequence,item_id,c0,c1\n"5 7",ham,5,7\n"5 8",jam,5,8\n',
    "items.tsv": "sequence\titem_id\tc0\tc1\n5 7\tham\t5\t7\n5 8\tjam\t5\t8\n",
    "items.jsonl": '{"sequence": [5, 7], "item_id": "ham", "c0": 5, "c1": 7}\n'
    '{"sequence": [5, 8], "item_id": "jam", "c0": 5, "c1": 8}\n',
}


def write_table(path: Path) -> None:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {"sequence": [[5, 7], [5, 8]], "item_id": ["ham", "jam"], "c0": [5, 5], "c1": [7, 8]}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        path.write_text(TABLES[f"items{path.suffix}"])


@pytest.mark.parametrize("ending", ["parquet", "csv", "tsv", "jsonl"])
def test_build_from_a_table(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = tmp_path / f"items.{ending}"
    write_table(table)
    expected = {(5, 7): ["ham"], (5, 8): ["jam"]}
    assert items_of(build(tmp_path, table)) == expected
    assert items_of(build(tmp_path, table, "--sequence", "c0", "--sequence", "c1")) == expected
    assert items_of(build(tmp_path, table, "--no-item-id")) == {(5, 7): [0], (5, 8): [1]}
    assert items_of(build(tmp_path, table, "--item-id", "c1")) == {(5, 7): [7], (5, 8): [8]}
    table.rename(tmp_path / "items.txt")
    assert items_of(build(tmp_path, tmp_path / "items.txt", "--format", ending)) == expected
    assert "is txt, expected --labels" in fail("build", tmp_path / "items.txt", "-o", tmp_path / "other")


def test_build_from_several_files_and_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "_SUCCESS").touch()
    for name, row in (
        ("b.jsonl", '{"sequence": [5, 7], "item_id": 1}'),
        ("a.jsonl", '{"sequence": [6], "item_id": 2}'),
    ):
        (parts / name).write_text(row)
    end = ("--eos-token-id", 9)
    assert list(build(tmp_path, parts, *end).item_ids) == [2, 1]
    assert list(build(tmp_path, parts / "b.jsonl", parts / "a.jsonl", *end).item_ids) == [1, 2]


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [
        ("recipe.json", [], "holds codes, expected either --tokenizer NAME, whose tokens they are, or --offset N"),
        ("recipe.json", ["--offset", 3, "--tokenizer", "x"], "expected either --tokenizer NAME"),
        ("recipe.json", ["--offset", -1], "offset=-1, expected 0 or more"),
        ("recipe.json", ["--offset", 3, "--level-sizes", "2,x"], "level_sizes='2,x', expected integers"),
        ("recipe.json", ["--offset", 3, "--level-sizes", "2,2"], "item 23 has code 2 at level 0"),
        ("recipe.json", ["--offset", 3, "--sequence", "x"], "sequence= is no option for a recipe's codes"),
        ("recipe.json", ["--offset", 3, "--item-id", "x"], "item_id= is no option for a recipe's codes"),
        ("recipe.json", ["--offset", 3, "--no-item-id"], "item_id= is no option for a recipe's codes"),
        ("recipe.json", ["--offset", 3, "--delimiter", ";"], "delimiter= is no option for a recipe's codes"),
        ("items.csv", ["--offset", 0], "has no column 'codes', expected one of"),
        ("items.csv", ["--codes", "sequence"], "holds codes, expected either --tokenizer NAME"),
        ("items.csv", ["--codes", "x", "--offset", 0], "name it with codes="),
        ("items.csv", ["--codes", "sequence", "--offset", 0, "--item-id", "x"], "with item_id=, or item_id=None for"),
        ("items.csv", ["--codes", "sequence", "--offset", 0, "--level-sizes", "9"], "level_sizes has 1 entries, exp"),
        ("items.csv", ["--sequence", "sequence", "--offset", 0], "sequence= and offset= are given, expected one"),
        ("items.csv", ["--sequence", "item_id"], "or name another column with sequence="),
        ("items.csv", ["--delimiter", ";"], "pass delimiter=',', if that separates the columns"),
        ("items.csv", ["--delimiter", "::"], "delimiter='::', expected one ASCII character"),
        ("items.csv", ["--labels"], "is a table, expected a text file of one label a line"),
        ("labels.txt", [], "is txt, expected --labels"),
        ("labels.txt", ["--labels"], "holds labels, expected --tokenizer NAME"),
        ("labels.txt", ["--labels", "--eos-token-id", 3], "eos_token_id= is no option for labels, and"),
        ("ragged.csv", [], "sequences have 1 to 2 tokens and eos_token_id=None, expected one length or an end token"),
        ("items.csv", ["--item-id", "x", "--no-item-id"], "item_id= and no_item_id= are given"),
        ("items.csv", ["--sequence", "x"], "has no column 'x'"),
        ("bars.csv", [], "has no column 'sequence', expected one of 'item_id|sequence': pass delimiter='|', if"),
        ("items.csv", ["--tokenizer", "/no"], "tokenizer='/no' cannot be read"),
        ("items.csv", ["--format", "json", "--offset", 0], "items.csv is no JSON file"),
        ("rows.npy", ["--no-item-id"], "item_id= is no option for an array of tokens"),
        ("rows.npy", ["--level-sizes", "1"], "level_sizes= is no option for an array of tokens, and"),
        ("rows.npy", [], "sequences has dtype float64, expected integers"),
        ("empty.npy", [], "empty.npy is no .npy file or is cut short"),
        ("cut.npy", [], "cut.npy is no .npy file or is cut short"),
        ("pickle.npy", [], "pickle.npy is no .npy file or is cut short"),
        ("header.npy", [], "header.npy is no .npy file or is cut short"),
        ("archive.npy", [], "archive.npy is no .npy file or is cut short"),
        ("nowhere.npy", [], "nowhere.npy is not there"),
        ("notes", [], "does not say what it is, expected names that end in one of"),
        (".", [], "has files of csv and jsonl, expected names that end in one of"),
        ("items.csv", ["--sequence", "x", "--sequence", "x"], "names a column twice"),
        (".", ["--format", "npy"], "expected one file of an array of tokens: only tables have several"),
    ],
)
def test_what_cannot_be_built_is_refused(file: str, arguments: list[Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "recipe.json").write_text(json.dumps(RECIPE))
    (inputs / "items.csv").write_text(TABLES["items.csv"])
    (inputs / "ragged.csv").write_text("item_id,sequence\nham,5 7\njam,5\n")
    (inputs / "bars.csv").write_text("item_id|sequence\nham|5 7\n")
    (inputs / "labels.txt").write_text("spam\nham\n")
    (inputs / "notes").touch()
    (inputs / "empty.npy").touch()
    np.save(inputs / "rows.npy", np.zeros((2, 2)))
    (inputs / "cut.npy").write_bytes((inputs / "rows.npy").read_bytes()[:-8])
    np.save(inputs / "pickle.npy", np.array([[{}]], dtype=object))
    (inputs / "header.npy").write_bytes((inputs / "rows.npy").read_bytes().replace(b"(2, 2)", b"(2, 2 "))
    np.savez(inputs / "archive.npz", rows=np.zeros((2, 2)))
    (inputs / "archive.npz").rename(inputs / "archive.npy")
    assert message in fail("build", inputs / file, *arguments, "--output", tmp_path / "built")
    assert not (tmp_path / "built").exists()


def test_a_table_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hf_gr.tables")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "items.csv").write_text(TABLES["items.csv"])
    message = fail("build", tmp_path / "items.csv", "--output", tmp_path / "built")
    assert 'needs pyarrow: pip install "hf-gr[tables]"' in message


def test_two_recipes_are_refused(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(RECIPE))
    message = fail("build", tmp_path / "a.json", tmp_path / "b.json", "--offset", 0, "-o", tmp_path / "built")
    assert "expected one file of a recipe's codes: only tables have several" in message


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "rows.npy", np.array(ROWS))
    monkeypatch.setattr(index_input, "compile_index", lambda *_, **__: pytest.fail("compiled in vain"))
    message = fail("build", tmp_path / "rows.npy", "--output", tmp_path / "rows.npy" / "built")
    assert "rows.npy is no folder that may be written to: name another" in message
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert f"{tmp_path} is no folder that may be written to" in fail(
        "build", tmp_path / "rows.npy", "--output", tmp_path / "new" / "built"
    )
    fail("build", tmp_path / "rows.npy", "--output", tmp_path / "rows.npy")
    assert run("build", tmp_path / "rows.npy").exit_code == 2


def test_a_path_is_printed_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array(ROWS))
    name = tmp_path / ("[red]a :smile: " + "long " * 40)
    printed = succeed("build", tmp_path / "rows.npy", "--output", name)
    assert f"Saved to {name}\n" in printed
    assert f"hf-gr index show '{name}'" in printed
    assert f"{name}\n" in succeed("show", name)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["\x1b[2J"], 2),
        (["--\x1b[2J"], 2),
        (["show", "\x1b[2J"], 2),
        (["show", "--plot", ".", "\x1b[2J"], 2),
        (["build", "\x1b[2J", "--output", "built"], 2),
        (["build", __file__, "--output", "built", "--format", "\x1b[2J"], 2),
        (["build", __file__, "--output", f"{__file__}/\x1b[2J\x9b"], 2),
    ],
)
def test_an_argument_does_not_control_the_terminal(arguments: list[str], code: int) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert not {"\x1b", "\x9b"} & set(result.output)
    assert "\\x1b" in result.stderr or "plot=" in result.stderr


def test_a_path_does_not_control_the_terminal(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array(ROWS))
    name = tmp_path / "\x1b[2Ja\x9b"
    shown = str(name).replace("\x1b", "\\x1b").replace("\x9b", "\\x9b")
    for printed in (
        succeed("build", tmp_path / "rows.npy", "-o", name),
        succeed("show", name),
        succeed("check", name),
    ):
        assert shown in printed
        assert not {"\x1b", "\x9b"} & set(printed)


# check


def edit_description(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def resign(folder: Path, **fields: Any) -> None:
    """Another description beside the arrays, with a digest that fits."""
    description = json.loads((folder / JSON_FILE).read_text()) | fields
    del description["sha256"]
    description["sha256"] = paired_files.digest(description)
    (folder / JSON_FILE).write_text(json.dumps(description))


def swap_files(folder: Path) -> None:
    (folder / JSON_FILE).rename(folder / "other")
    (folder / ARRAYS_FILE).rename(folder / JSON_FILE)
    (folder / "other").rename(folder / ARRAYS_FILE)


def swap_in(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        other = folder.parent / "other"
        ConstraintIndex.from_sequences(ROWS[1:], item_ids=list("bcde"), eos_token_id=1).save_pretrained(other)
        (other / name).replace(folder / name)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (lambda folder: flip(folder / ARRAYS_FILE, -1), f"{ARRAYS_FILE} was altered after it was saved"),
    "flipped bit in the header": (lambda folder: flip(folder / ARRAYS_FILE, 20), f"{ARRAYS_FILE} "),
    "cut arrays": (
        lambda folder: os.truncate(folder / ARRAYS_FILE, 900),
        f"{ARRAYS_FILE} is no safetensors file or is cut",
    ),
    "one byte less": (
        lambda folder: os.truncate(folder / ARRAYS_FILE, (folder / ARRAYS_FILE).stat().st_size - 1),
        f"{ARRAYS_FILE} is no safetensors file or is cut short",
    ),
    "empty arrays": (lambda folder: os.truncate(folder / ARRAYS_FILE, 0), f"{ARRAYS_FILE} is no safetensors file"),
    "cut description": (lambda folder: os.truncate(folder / JSON_FILE, 99), f"{JSON_FILE} is no description of"),
    "altered description": (
        lambda folder: edit_description(folder / JSON_FILE, eos_token_id=7),
        f"{JSON_FILE} was altered after it was saved",
    ),
    "newer format": (
        lambda folder: edit_description(folder / JSON_FILE, format_version=99),
        f"{JSON_FILE} has format_version 99, expected at most",
    ),
    "altered and signed description": (
        lambda folder: resign(folder, eos_token_id=7),
        f"{JSON_FILE} is not of one save with {ARRAYS_FILE} (they differ in eos_token_id, sha256)",
    ),
    "description of another index": (swap_in(JSON_FILE), f"{JSON_FILE} is not of one save with {ARRAYS_FILE}"),
    "arrays of another index": (swap_in(ARRAYS_FILE), f"{JSON_FILE} is not of one save with {ARRAYS_FILE}"),
    "swapped files": (swap_files, f"{JSON_FILE} is no description of a constraint index"),
    "no description": (lambda folder: (folder / JSON_FILE).unlink(), f"has no {JSON_FILE}, expected both"),
    "no arrays": (lambda folder: (folder / ARRAYS_FILE).unlink(), f"has no {ARRAYS_FILE}, expected both"),
    "another safetensors": (
        lambda folder: safetensors.numpy.save_file({"weight": np.zeros(3)}, folder / ARRAYS_FILE),
        f"{ARRAYS_FILE} holds no constraint index",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_check_finds_damage(name: str, folder: Path) -> None:
    damage, message = DAMAGES[name]
    assert "No damage found" in succeed("check", folder)
    damage(folder)
    assert message in fail("check", folder)


def test_check_says_what_it_checked(folder: Path) -> None:
    printed = succeed("check", folder)
    for text in ("of format version 2", "bytes of arrays", "4 sequences in 4 levels", "5 items", "can be looked up"):
        assert text in printed


def test_check_compares_with_the_vocabulary_of_a_model(folder: Path, tmp_path: Path) -> None:
    for name, config in {
        "fits": {"model_type": "qwen3", "vocab_size": 10},
        "small": {"model_type": "t5", "vocab_size": 9},
        "eyes": {"model_type": "vit"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert "vocabulary" in succeed("check", folder, "--model", tmp_path / "fits")
    message = fail("check", folder, "--model", tmp_path / "small")
    assert "the catalogue has token 9, expected less than the vocabulary of" in message
    assert "has no vocab_size" in fail("check", folder, "--model", tmp_path / "eyes")
    (tmp_path / "small" / "config.json").unlink()
    assert f"the config of {tmp_path / 'small'} cannot be read" in fail("check", folder, "--model", tmp_path / "small")


@pytest.mark.parametrize("command", ["show", "check"])
def test_an_index_that_is_not_there_is_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_, **arguments: asked.append(arguments) or missing()
    )
    assert "is no folder here" in fail(command, "me/nowhere", "--revision", "v1")
    assert asked[0]["revision"] == "v1"
    assert "is a file, expected a folder" in fail(command, __file__)


def missing() -> Any:
    raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")


# push


def test_push_uploads_and_prints_the_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    options = ("--private", "--revision", "next", "--message", "hello")
    assert succeed("push", folder, "me/catalogue", *options) == "https://huggingface.co/me/catalogue/commit/1\n"
    assert FakeApi.asked["create_repo"] == ("me/catalogue", {"private": True, "exist_ok": True})
    assert FakeApi.asked["create_branch"] == ("me/catalogue", {"branch": "next", "exist_ok": True})
    assert FakeApi.asked["upload_folder"] == {
        "repo_id": "me/catalogue", "revision": "next", "commit_message": "hello", "create_pr": False
    }  # fmt: skip
    for name in (JSON_FILE, ARRAYS_FILE):
        assert FakeApi.uploaded[name] == (folder / name).read_bytes()
    succeed("push", folder, "me/catalogue", "--create-pr")
    assert FakeApi.asked["create_repo"][1]["private"] is None
    assert "create_branch" not in FakeApi.asked
    asked = FakeApi.asked["upload_folder"]
    assert (asked["create_pr"], asked["commit_message"]) == (True, "Upload constraint index")


def test_push_verifies_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: pytest.fail("asked the Hub"))
    flip(folder / ARRAYS_FILE, -1)
    assert "was altered after it was saved" in fail("push", folder, "me/catalogue")


@pytest.mark.parametrize("kind", ["HTTPError", "OfflineModeIsEnabled", "HFValidationError", "LocalTokenNotFoundError"])
def test_push_reports_what_the_hub_says(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeApi):
        def create_repo(self, repo_id: str, **arguments: Any) -> Any:
            raise getattr(huggingface_hub.errors, kind)("403:\n\nnot allowed")

    monkeypatch.setattr(huggingface_hub, "HfApi", Refusing)
    message = fail("push", folder, "me/catalogue", code=2 if kind == "HFValidationError" else 1)
    assert "403: not allowed" in message
    assert "me/catalogue" in message or kind not in ("HTTPError", "OfflineModeIsEnabled")


# help


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("build", ["INPUT", "--output", "--sequence", "--no-item-id", "--tokenizer", "--offset", "--eos-token-id"]),
        ("show", ["INDEX", "--plot", "--json", "--revision"]),
        ("check", ["INDEX", "--model", "--revision"]),
        ("push", ["INDEX", "REPO_ID", "--private", "--revision", "--create-pr", "--message"]),
    ],
)
def test_help_has_every_option_and_an_example(command: str, texts: list[str]) -> None:
    result = CliRunner().invoke(cli.build_app(), ["index", command, "--help"], terminal_width=200)
    assert result.exit_code == 0
    for text in (*texts, f"Example: hf-gr index {command} "):
        assert text in result.output


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert all(command in result.output for command in ("build", "show", "check", "push"))
    assert "index" in CliRunner().invoke(cli.build_app(), ["--help"]).output


def test_help_imports_nothing_that_takes_time() -> None:
    heavy = {"torch", "transformers", "numpy", "pyarrow", "matplotlib", "huggingface_hub"}
    code = f"import sys; from hf_gr.commands import app; app.build_app(); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
