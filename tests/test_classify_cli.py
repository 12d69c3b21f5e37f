# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr classify`: the table it writes against `classify`, what it prints, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from families import build
from label_tokenizers import tokenizer_of
from pyarrow import csv
from typer.testing import CliRunner

from hf_gr import ConstraintIndex, classify
from hf_gr.commands.app import build_app

LABELS = ["Technology > AI", "Technology > Science", "Sports"]
TEXTS = ["a match", "deep learning", "the science of sports"]
TARGETS = ["Sports", "Technology > AI", "Technology > AI"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, an index, a table in two formats, and one with a gap."""
    folder = tmp_path_factory.mktemp("classify")
    model = build("llama", config={"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": 0})
    model.save_pretrained(folder / "model")
    tokenizer_of("bpe").save_pretrained(folder / "model")
    ConstraintIndex.from_labels(LABELS, tokenizer_of("bpe")).save_pretrained(folder / "index")
    table = pa.table({"id": [7, 8, 9], "text": TEXTS, "label": TARGETS})
    pq.write_table(table, folder / "texts.parquet")
    csv.write_csv(table, folder / "texts.csv")
    pq.write_table(pa.table({"text": ["a", None]}), folder / "gap.parquet")
    return folder


def run(folder: Path, *arguments: str, table: str = "texts.parquet", code: int = 0) -> str:
    given = ["--model", folder / "model", "--index", folder / "index", "--input", folder / table]
    done = CliRunner().invoke(
        build_app(), ["classify", *map(str, given), "--output", f"{folder}/out.parquet", "--overwrite", *arguments]
    )
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("table", ["texts.parquet", "texts.csv"])
def test_the_table_is_what_classify_returns(folder: Path, table: str) -> None:
    options = ["--id", "id", "--target", "label", "--hierarchy", " > "]
    shown = run(folder, *options, table=table)
    assert "3 texts, 3 labels" in shown
    assert "level 2: accuracy" in shown
    model = build("llama", config={"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": 0})
    index = ConstraintIndex.from_pretrained(folder / "index")
    expected: Any = classify(model, tokenizer_of("bpe"), TEXTS, index, hierarchy=" > ")
    rows = pq.read_table(folder / "out.parquet").to_pylist()
    assert [str(row["id"]) for row in rows] == ["7", "8", "9"]
    for row, ranked, (top,) in zip(rows, expected, expected.parents, strict=True):
        assert row["labels"] == [label for label, _ in ranked]
        assert row["probabilities"] == pytest.approx([probability for _, probability in ranked], rel=1e-4)
        assert row["parents"] == [top[0][0]]
        assert row["parent_probabilities"] == pytest.approx([top[0][1]], rel=1e-4)
    facts = json.loads(run(folder, *options, "--no-progress", "--json", table=table))
    assert (facts["method"], facts["num_nodes"]) == ("exact", expected.num_nodes)
    assert facts["metrics"][0]["accuracy"] == expected.metrics(TARGETS)[0].accuracy


def test_answers_of_several_labels_are_lists(folder: Path) -> None:
    shown = run(folder, "--separator", ";", "--max-labels", "2", "--top-k", "2")
    assert "searched by beams" in shown
    rows = pq.read_table(folder / "out.parquet").to_pylist()
    assert [row["row"] for row in rows] == [0, 1, 2]
    assert all(len(row["each"]) == len(row["each_probabilities"]) == 2 for row in rows)
    assert all(len(row["labels"]) == 2 and isinstance(row["labels"][0], list) for row in rows)


def test_rows_without_a_text_are_skipped_if_asked(folder: Path) -> None:
    shown = run(folder, "--on-error", "skip", "--score", "mean", "--max-tree-nodes", "5", table="gap.parquet")
    assert "1 texts, 3 labels" in shown
    found, skipped = pq.read_table(folder / "out.parquet").to_pylist()
    assert (found["error"], skipped) == (None, dict.fromkeys(found) | {"row": 1, "error": "no text"})
    assert sum(found["probabilities"]) == pytest.approx(1 - found["mass_left"])
    assert f"{found['mass_left']:.2g} of the probability" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "body"], "no column 'body', expected one of 'id', 'text', 'label': name it with"),
        (["--text", "id"], "column 'id' has type int64, expected texts"),
        (["--target", "right"], "no column 'right'"),
        (["--output", "nowhere/at/all.parquet"], "is no folder to write to"),
        (["--output", "out.csv"], "--output 'out.csv', expected a name that ends in .parquet"),
        (["--id", "labels"], "--id labels is also a column of the output"),
        (["--target", "label", "--separator", ";", "--max-labels", "2"], "--target and --separator are given"),
        (["--input", "nothing.parquet"], "nothing.parquet"),
        (["--input", "{}/gap.parquet"], "gap.parquet, column 'text', row 1 is None, expected a text"),
        (["--output", "{}/texts.parquet"], "it would be read as texts"),
        (["--index", "{}/nowhere", "--model", "{}/texts.csv"], "nowhere"),  # the index is read before the model
    ],
)
def test_what_is_wrong_is_said_on_one_line(folder: Path, arguments: list[str], message: str) -> None:
    shown = run(folder, *(one.format(folder) for one in arguments), code=2)
    assert message in " ".join(shown.split())
    assert shown.count("\n") == 1


def test_no_file_is_replaced_unasked(folder: Path) -> None:
    (folder / "there.parquet").write_bytes(b"mine")
    given = ["--model", folder / "model", "--index", folder / "index", "--input", folder / "texts.parquet"]
    done = CliRunner().invoke(build_app(), ["classify", *map(str, given), "--output", f"{folder}/there.parquet"])
    assert done.exit_code == 2
    assert "there.parquet is there already" in done.output
    assert (folder / "there.parquet").read_bytes() == b"mine"


def test_labels_that_are_not_in_the_set_are_counted(folder: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS, "label": ["Sport", "Sports", "Technology"]}), folder / "other.parquet")
    shown = run(folder, "--target", "label", table="other.parquet")
    assert "2 of 3 texts have a label in column 'label' that is not in the index, such as 'Sport'" in shown
    assert "1 of 3 texts" in run(folder, "--target", "label", "--hierarchy", " > ", table="other.parquet")
