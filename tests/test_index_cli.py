# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr index build | show | check | push`, and the numbers of `show` against a slow twin."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import HubServer
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists
from label_tokenizers import tokenizer_of
from typer.testing import CliRunner

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.catalogue.code_book import doubts_of
from hf_gr.catalogue.storage import ARRAYS_FILE, JSON_FILE
from hf_gr.catalogue.summary import summarise
from hf_gr.commands import app as cli
from hf_gr.commands import index_input
from hf_gr.commands.index import COMMANDS
from hf_gr.commands.options import FLAGS

ROWS = [[5, 7, 9], [5, 7, 8], [5, 6, 8], [6, 6, 8], [6, 6, 8]]
RECIPE = {"17": ["<a_0>", "<b_1>"], "23": ["<a_2>", "<b_0>"], "5": ["<a_2>", "<b_0>"]}
CODES = [[0, 1], [2, 0], [2, 3]]
NAMES = ["ham", "jam", "yam"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.build_app(), ["index", *map(str, arguments)])


def succeed(*arguments: Any) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def fail(*arguments: Any) -> str:
    """What is printed of an error that a user can mend: one line on stderr."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith(f"hf-gr index {arguments[0]}: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved index."""
    path = tmp_path / "catalogue"
    ConstraintIndex.from_sequences(ROWS, item_ids=list("abcde"), eos_token_id=1).save_pretrained(path)
    return path


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


@given(rows=lists(lists(integers(2, 5), min_size=1, max_size=4), min_size=1, max_size=40), is_ragged=booleans())
def test_levels_are_those_of_the_twin(rows: list[list[int]], is_ragged: bool) -> None:
    rows = [[*row, 1] if is_ragged else (row * 4)[:4] for row in rows]
    summary = summarise(ConstraintIndex.from_sequences(rows, eos_token_id=1 if is_ragged else None).snapshot)
    expected = reference_summary(rows)
    assert len(summary.levels) == len(expected) == summary.max_length
    for level, wanted in zip(summary.levels, expected, strict=True):
        assert {name: pytest.approx(getattr(level, name)) for name in wanted} == wanted


def test_show_prints_levels_and_facts(folder: Path) -> None:
    printed = succeed("show", folder)
    assert ["2", "3", "1.50", "2", "50.0%", "50.0%", "0"] in map(str.split, printed.splitlines())
    for said in (
        "4 of up to 4 tokens, end token 1 included",
        "5, with string ids",
        "2 items, 40.0%, share 1 of the sequences, at most 2 one of them",
        "10 or more; the largest token is 9",
    ):
        assert said in printed
    summary = summarise(ConstraintIndex.from_pretrained(folder).snapshot)
    assert json.loads(succeed("show", folder, "--json")) == json.loads(json.dumps(dataclasses.asdict(summary)))


def build(tmp_path: Path, *arguments: Any) -> ConstraintIndex:
    printed = succeed("build", *arguments, "--output", tmp_path / "built")
    index = ConstraintIndex.from_pretrained(tmp_path / "built")
    assert f"{index.num_items:,} items, {len(index):,} sequences of up to {index.max_length} tokens" in printed
    assert f"hf-gr index show {tmp_path / 'built'}" in printed
    return index


def items_of(index: ConstraintIndex) -> dict[tuple[int, ...], list[Any]]:
    return {tuple(sequence): index.items([sequence])[0] for sequence in index}


def test_build_from_every_kind_of_file(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([[5, 7], [6, -1]]))
    assert items_of(build(tmp_path, tmp_path / "rows.npy", "--eos-token-id", 1)) == {(5, 7, 1): [0], (6, 1): [1]}
    (tmp_path / "recipe.index.json").write_text(json.dumps(RECIPE))
    index = build(tmp_path, tmp_path / "recipe.index.json", "--offset", 10, "--level-sizes", "256,256")
    assert items_of(index) == {(10, 267): [17], (12, 266): [23, 5]}
    first, second = tmp_path / "parts" / "a.jsonl", tmp_path / "parts" / "b.jsonl"
    first.parent.mkdir()
    first.write_text('{"sequence": [6], "item_id": 2}')
    second.write_text('{"sequence": [5, 7], "item_id": 1}')
    assert list(build(tmp_path, first.parent, "--eos-token-id", 9).item_ids) == [2, 1]
    assert list(build(tmp_path, second, first, "--eos-token-id", 9).item_ids) == [1, 2]


def test_codes_of_a_table_become_tokens(tmp_path: Path) -> None:
    table = (table_of_codes(tmp_path), "--delimiter", ";")
    for options, expected in (
        (["--codes", "codes", "--offset", 3], {"offset": 3}),
        (["--offset", 0, "--level-sizes", "4,4"], {"level_sizes": [4, 4]}),  # the column's name is the default
        (["--codes", "c0", "--codes", "c1", "--offset", 3], {"offset": 3}),
    ):
        index = SemanticIds(CODES, item_ids=NAMES, **expected).constraint_index()
        assert items_of(build(tmp_path, *table, *options)) == items_of(index)
    tokenizer = tokenizer_of("bpe")
    tokenizer.add_tokens([f"<{level}_{code}>" for level in "ab" for code in range(4)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ["--tokenizer", tmp_path / "tokenizer", "--template"]
    index = SemanticIds.from_tokenizer(CODES, tokenizer, item_ids=NAMES).constraint_index()
    assert items_of(build(tmp_path, *table, *options, "<{level}_{code}>")) == items_of(index)
    said = fail("build", *table, *options, "[{level}{code}]", "-o", tmp_path / "other")
    assert "codes.csv: the tokenizer lacks 5 of" in said


@pytest.mark.parametrize(
    ("largest", "options", "doubt"),
    [
        ([14, 9, 2], [], "Warning: level 1 has 15 codes, and not 16"),
        ([29, 28, 2], [], "Warning: level 1 has 30 codes, and not 32"),
        ([18, 19, 2], [], "Warning: level 1 has 19 codes, and not 20"),
        ([15, 9, 5], [], ""),
        ([14, 9, 2], ["--level-sizes", "16,16,3"], ""),
    ],
)
def test_levels_that_seem_short_are_doubted(
    largest: list[int], options: list[str], doubt: str, tmp_path: Path
) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([[0, 0, 0], largest]))
    done = run("build", tmp_path / "ids.json", "--offset", 0, *options, "-o", tmp_path / "index")
    assert "Codes by level: " in done.stdout
    assert done.stderr.startswith(doubt) if doubt else not done.stderr


def table_of_codes(folder: Path) -> Path:
    rows = [f"{name};{' '.join(map(str, row))};{row[0]};{row[1]}" for name, row in zip(NAMES, CODES, strict=True)]
    (folder / "codes.csv").write_text("\n".join(["item_id;codes;c0;c1", *rows]))
    return folder / "codes.csv"


def test_labels_of_a_file(tmp_path: Path) -> None:
    tokenizer, labels = tokenizer_of("bpe"), tmp_path / "labels.txt"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ("--labels", "--tokenizer", tmp_path / "tokenizer")
    labels.write_text("sports\n science \n\npolitics\n")
    for more, prefix in (((), " "), (("--prefix", ""), "")):
        index = build(tmp_path, labels, *options, *more)
        expected = ConstraintIndex.from_labels(["sports", "science", "politics"], tokenizer, prefix=prefix)
        assert items_of(index) == items_of(expected)
        index.check_tokenizer(tokenizer)
    (tmp_path / "tickets.csv").write_text("text,label,kind\na,sports,x\nb,science,y\nc,sports,z\nd,politics,x\n")
    assert items_of(build(tmp_path, tmp_path / "tickets.csv", *options)) == items_of(
        ConstraintIndex.from_labels(["sports", "science", "politics"], tokenizer)
    )
    kinds = build(tmp_path, tmp_path / "tickets.csv", *options, "--item-id", "kind")
    assert items_of(kinds) == items_of(ConstraintIndex.from_labels(["x", "y", "z"], tokenizer))
    labels.write_bytes("café".encode("latin-1"))
    assert "labels.txt: it is no UTF-8 text" in fail("build", labels, *options, "-o", tmp_path / "other")


def test_labels_of_a_workbook(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    tokenizer_of("bpe").save_pretrained(tmp_path / "tokenizer")
    book = openpyxl.Workbook()
    for row in (["text", "label"], ["a", "sports"], ["b", None], ["c", "science"], ["d", "sports"]):
        book.active.append(row)
    book.save(tmp_path / "labels.xlsx")
    options = (tmp_path / "labels.xlsx", "--labels", "--tokenizer", tmp_path / "tokenizer")
    index = ConstraintIndex.from_labels(["sports", "science"], tokenizer_of("bpe"))
    assert items_of(build(tmp_path, *options)) == items_of(index)
    assert "no column 'name', expected one of" in fail(
        "build", *options, "--item-id", "name", "-o", tmp_path / "other"
    )


TABLE = 'sequence,item_id,c0,c1\n"5 7",ham,5,7\n"5 8",jam,5,8\n'


def test_build_from_a_table(tmp_path: Path) -> None:
    """Formats and what is wrong in them: tests/test_tables.py."""
    table = tmp_path / "items.txt"
    table.write_text(TABLE)
    for options, ids in (
        ((), [["ham"], ["jam"]]),
        (("--sequence", "c0", "--sequence", "c1"), [["ham"], ["jam"]]),
        (("--no-item-id",), [[0], [1]]),
        (("--item-id", "c1"), [[7], [8]]),
    ):
        index = build(tmp_path, table, "--format", "csv", *options)
        assert items_of(index) == dict(zip([(5, 7), (5, 8)], ids, strict=True))


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [
        ("recipe.json", [], "holds codes, expected either --tokenizer NAME, whose tokens they are, or --offset N"),
        ("recipe.json", ["--offset", 3, "--level-sizes", "2,x"], "--level-sizes '2,x', expected integers"),
        ("recipe.json", ["--offset", 3, "--codes", "x"], "--codes is no option for a recipe's codes"),
        ("items.csv", ["--codes", "x", "--offset", 0], "name it with --codes"),
        ("items.csv", ["--sequence", "sequence", "--offset", 0], "--sequence and --offset are given, expected one"),
        ("items.csv", ["--delimiter", ";"], "pass --delimiter ',', if that separates the columns"),
        ("items.csv", ["--labels"], "holds labels, expected --tokenizer NAME"),
        ("rows.npy", ["--labels"], "is npy, expected a text file of one label a line, or a table"),
        ("items.csv", ["--tokenizer", "/no"], "--tokenizer '/no' cannot be read"),
        ("labels.txt", [], "is txt, expected --labels, or another --format"),
        ("labels.txt", ["--labels"], "holds labels, expected --tokenizer NAME"),
        ("labels.txt", ["--labels", "--eos-token-id", 3], "--eos-token-id is no option for labels, and"),
        ("rows.npy", ["--level-sizes", "1"], "--level-sizes is no option for an array of tokens, and"),
        ("rows.npy", [], "sequences has dtype float64, expected integers"),
        ("pickle.npy", [], "pickle.npy is no .npy file or is cut short"),
        ("nowhere.npy", [], "nowhere.npy is not there"),
        (".", [], "has files of csv and jsonl, expected names that end in one of"),
        (".", ["--format", "npy"], "expected one file of an array of tokens: only tables have several"),
    ],
)
def test_what_cannot_be_built_is_refused(file: str, arguments: list[Any], message: str, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "recipe.json").write_text(json.dumps(RECIPE))
    (inputs / "items.csv").write_text(TABLE)
    (inputs / "labels.txt").write_text("spam\nham\n")
    np.save(inputs / "rows.npy", np.zeros((2, 2)))
    np.save(inputs / "pickle.npy", np.array([[{}]], dtype=object))
    assert message in fail("build", inputs / file, *arguments, "--output", tmp_path / "built")
    assert not (tmp_path / "built").exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "rows.npy", np.array(ROWS))
    monkeypatch.setattr(index_input, "compile_index", lambda *_, **__: pytest.fail("compiled in vain"))
    for output, access in ((tmp_path / "rows.npy" / "built", True), (tmp_path / "new" / "built", False)):
        monkeypatch.setattr(os, "access", lambda _, mode, access=access: access or mode != os.W_OK)
        said = fail("build", tmp_path / "rows.npy", "--output", output)
        assert "is no folder that may be written to: name another" in said


def test_an_argument_does_not_control_the_terminal(tmp_path: Path) -> None:
    refused = run("show", "\x1b[2J\x9b")
    assert refused.exit_code == 2
    np.save(tmp_path / "rows.npy", np.array([[7]]))
    name = tmp_path / ("[red]a :smile: \x1b[2Ja\x9b" + "long " * 40)
    shown = str(name).replace("\x1b", "\\x1b").replace("\x9b", "\\x9b")
    printed = [succeed("build", tmp_path / "rows.npy", "-o", name), succeed("show", name), succeed("check", name)]
    assert f"Saved to {shown}\n" in printed[0]
    assert ": 1 item, 1 sequence of up to 1 token," in printed[0]
    assert all(shown in each for each in printed)
    assert not {"\x1b", "\x9b"} & set("".join([refused.output, *printed]))


def test_check_finds_damage_and_nothing_damaged_is_pushed(folder: Path, hub: HubServer) -> None:
    """What is damage: tests/test_index.py."""
    printed = succeed("check", folder)
    for said in ("No damage found", "of format version 2", "bytes of arrays", "4 sequences, 4 levels, 5 items"):
        assert said in printed
    ConstraintIndex.from_sequences(ROWS[1:], item_ids=list("bcde"), eos_token_id=1).save_pretrained(
        folder.parent / "x"
    )
    own, other = (folder / JSON_FILE).read_bytes(), (folder.parent / "x" / JSON_FILE).read_bytes()
    (folder / JSON_FILE).write_bytes(other)
    assert f"{JSON_FILE} and {ARRAYS_FILE} are of different saves (" in fail("check", folder)
    (folder / JSON_FILE).write_bytes(own)
    data = (folder / ARRAYS_FILE).read_bytes()
    (folder / ARRAYS_FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for command in (("check", folder), ("push", folder, "me/catalogue")):
        assert f"{ARRAYS_FILE} was altered after it was saved" in fail(*command)
    assert hub.repositories == {}


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


def test_codes_compiled_as_tokens_are_doubted(tmp_path: Path) -> None:
    table = table_of_codes(tmp_path)
    as_tokens = run("build", table, "--delimiter", ";", "--sequence", "codes", "-o", tmp_path / "built")
    assert as_tokens.exit_code == 0
    assert (
        "Warning: the tokens look like codes: those of every level begin at 0, 0, and levels share" in as_tokens.stderr
    )
    assert "--codes with --offset or --tokenizer" in as_tokens.stderr
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 1000}))
    checked = run("check", tmp_path / "built", "--model", tmp_path / "model")
    assert checked.exit_code == 0
    assert "No damage found" in checked.stdout
    assert checked.stderr.count("Warning: ") == 2
    assert "the largest token, 3, is far below the model's vocabulary of 1,000" in checked.stderr


def test_doubts_are_of_codes_alone() -> None:
    codes = np.random.default_rng(0).integers(0, 16, size=(500, 3))
    ragged = [row[: 1 + number % 3].tolist() for number, row in enumerate(codes)]
    of_tokens = SemanticIds(codes, level_sizes=[16] * 3, offset=100).constraint_index()
    labels = ConstraintIndex.from_labels(["sports", "science"], tokenizer_of("bpe"))
    for index, vocabulary, number in (
        (of_tokens, 160, 0),
        (of_tokens, 1000, 1),
        (labels, 10**6, 0),
        (ConstraintIndex.from_sequences(codes), None, 1),
        (ConstraintIndex.from_sequences(codes + 1), None, 1),
        (ConstraintIndex.from_sequences(ragged, eos_token_id=1000), None, 1),
        # A shift of all levels, or by level, is no code any more.
        (ConstraintIndex.from_sequences(codes + 2), None, 0),
        (ConstraintIndex.from_sequences(codes + [0, 16, 32]), None, 0),
    ):
        assert len(doubts_of(index.snapshot, vocabulary=vocabulary)) == number


def test_every_command_prints_json(tmp_path: Path, hub: HubServer) -> None:
    table, output = table_of_codes(tmp_path), str(tmp_path / "built")
    built = json.loads(succeed("build", table, "--delimiter", ";", "--offset", 3, "-o", output, "--json"))
    assert min(built.pop("seconds"), built.pop("nbytes")) > 0
    sizes = {"num_sequences": 3, "num_items": 3, "max_length": 2, "eos_token_id": None, "max_token_id": 9}
    assert built == {"output": output, "warnings": [], "level_sizes": [3, 4], **sizes}
    checked = json.loads(succeed("check", output, "--json"))
    assert set(checked["checked"]) == {"files", "digests", "catalogue"}
    assert checked["warnings"] == []
    pushed = json.loads(succeed("push", output, "me/catalogue", "--json"))
    assert pushed["repo_id"] == "me/catalogue"
    assert pushed["url"].endswith(f"me/catalogue/commit/{hub.commit('me/catalogue')}")


@pytest.mark.parametrize("command", ["show", "check"])
def test_an_index_that_is_not_there_is_refused(command: str) -> None:
    assert "is no folder here" in fail(command, "me/nowhere", "--revision", "v1")
    assert "is a file, expected a folder" in fail(command, __file__)


def test_help_has_every_option_and_an_example() -> None:
    for function in COMMANDS:
        result = CliRunner().invoke(cli.build_app(), ["index", function.__name__, "--help"], terminal_width=200)
        assert result.exit_code == 0
        for name in signature(function).parameters:
            assert any(
                word in result.output for word in (name.upper(), name.replace("_", "-"), FLAGS.get(name)) if word
            )
        assert f"Example: hf-gr index {function.__name__} " in result.output


def test_help_imports_nothing_that_takes_time() -> None:
    heavy = {"torch", "transformers", "numpy", "pyarrow", "matplotlib", "huggingface_hub"}
    code = f"import sys; from hf_gr.commands import app; app.build_app(); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
