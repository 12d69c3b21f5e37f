# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr index build` of codes and labels, what it doubts, and `--json` of every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from label_tokenizers import tokenizer_of
from test_index import FakeApi
from test_index_cli import fail, items_of, run, succeed

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.catalogue.doubts import doubts_of

CODES = [[0, 1], [2, 0], [2, 3]]
NAMES = ["ham", "jam", "yam"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of codes with another delimiter."""
    path = tmp_path / "items.csv"
    rows = [f"{name};{' '.join(map(str, row))};{row[0]};{row[1]}" for name, row in zip(NAMES, CODES, strict=True)]
    path.write_text("\n".join(["item_id;codes;c0;c1", *rows]))
    return path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--codes", "codes", "--offset", 3], {"offset": 3}),
        (["--offset", 0, "--level-sizes", "4,4"], {"level_sizes": [4, 4]}),  # the column's name is the default
        (["--codes", "c0", "--codes", "c1", "--offset", 3], {"offset": 3}),
    ],
)
def test_codes_of_a_table_become_tokens(options: list[Any], expected: Any, table: Path, tmp_path: Path) -> None:
    succeed("build", table, "--delimiter", ";", *options, "-o", tmp_path / "built")
    index = SemanticIds(CODES, item_ids=NAMES, **expected).constraint_index()
    assert items_of(ConstraintIndex.from_pretrained(tmp_path / "built")) == items_of(index)


def test_codes_of_a_table_become_the_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tokenizer = tokenizer_of("bpe")
    texts = [f"<{level}_{code}>" for level in "AB" for code in range(4)]
    tokenizer.add_tokens(texts)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [[f"<A_{first}>", f"<B_{second}>"] for first, second in CODES]
    pq.write_table(pa.table({"codes": rows, "item_id": NAMES}), tmp_path / "items.parquet")
    table, options = tmp_path / "items.parquet", ("--tokenizer", tmp_path / "tokenizer", "-o", tmp_path / "built")
    succeed("build", table, "--codes", "codes", *options)
    index = ConstraintIndex.from_pretrained(tmp_path / "built")
    assert index.encode(NAMES) == tokenizer.convert_tokens_to_ids([text for row in rows for text in row])
    said = fail("build", table, "--codes", "codes", *options, "--template", "[{level}{code}]")
    assert "row 0 is ['<A_0>', '<B_1>'], it has '<A_0>' at level 0, expected" in said
    assert "texts are written otherwise" in said
    pq.write_table(pa.table({"codes": [[5, 5]], "item_id": ["pie"]}), tmp_path / "more.parquet")
    said = fail("build", tmp_path / "more.parquet", "--codes", "codes", *options)
    assert "lacks 2 of 2 code tokens, such as '<a_5>'" in said


def test_a_recipe_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "lc.json").write_text('{"0": ["<a_0>", "<b_1>"], "1": ["<a_2>", "<b_0>"]}')
    said = fail("build", tmp_path / "lc.json", "--codes", "codes", "-o", tmp_path / "built")
    assert "codes= is no option for a recipe's codes" in said
    succeed("build", tmp_path / "lc.json", "--offset", 3, "-o", tmp_path / "built")
    assert ConstraintIndex.from_pretrained(tmp_path / "built").encode([1]) == [5, 6]


def test_labels_of_a_file(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bpe")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "labels.txt").write_text("sports\n science \n\npolitics\n")
    succeed(
        "build", tmp_path / "labels.txt", "--labels", "--tokenizer", tmp_path / "tokenizer", "-o", tmp_path / "one"
    )
    index = ConstraintIndex.from_pretrained(tmp_path / "one")
    expected = ConstraintIndex.from_labels(["sports", "science", "politics"], tokenizer)
    assert items_of(index) == items_of(expected)
    index.check_tokenizer(tokenizer)
    options = ("--labels", "--tokenizer", tmp_path / "tokenizer", "-o", tmp_path / "two")
    succeed("build", tmp_path / "labels.txt", *options, "--prefix", "")
    bare = ConstraintIndex.from_labels(["sports", "science", "politics"], tokenizer, prefix="")
    assert items_of(ConstraintIndex.from_pretrained(tmp_path / "two")) == items_of(bare)
    (tmp_path / "labels.txt").write_bytes("café".encode("latin-1"))
    assert "labels.txt: it is no UTF-8 text" in fail("build", tmp_path / "labels.txt", *options)
    (tmp_path / "labels.txt").write_text("a\na\n")
    assert "labels.txt: " in fail("build", tmp_path / "labels.txt", *options)


def test_codes_compiled_as_tokens_are_doubted(table: Path, tmp_path: Path) -> None:
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
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 16, size=(500, 3))
    ragged = [row[: 1 + number % 3].tolist() for number, row in enumerate(codes)]
    of_tokens = SemanticIds(codes, level_sizes=[16] * 3, offset=100).constraint_index()
    assert doubts_of(of_tokens.snapshot, vocabulary=160) == []
    assert len(doubts_of(of_tokens.snapshot, vocabulary=1000)) == 1
    wrong = {
        "fixed": ConstraintIndex.from_sequences(codes),
        "from 1": ConstraintIndex.from_sequences(codes + 1),
        "ended": ConstraintIndex.from_sequences(ragged, eos_token_id=1000),
    }
    for name, index in wrong.items():
        assert len(doubts_of(index.snapshot)) == 1, name
    # A shift by level, or of all levels, is no code any more; nor are labels.
    assert doubts_of(ConstraintIndex.from_sequences(codes + 2).snapshot) == []
    assert doubts_of(ConstraintIndex.from_sequences(codes + [0, 16, 32]).snapshot) == []
    labels = ConstraintIndex.from_labels(["sports", "science"], tokenizer_of("bpe"))
    assert doubts_of(labels.snapshot, vocabulary=10**6) == []


def test_every_command_prints_json(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = json.loads(succeed("build", table, "--delimiter", ";", "--offset", 3, "-o", tmp_path / "built", "--json"))
    assert built.pop("seconds") >= 0
    assert built.pop("nbytes") > 0
    assert built == {
        "output": str(tmp_path / "built"),
        "num_sequences": 3,
        "num_items": 3,
        "max_length": 2,
        "eos_token_id": None,
        "max_token_id": 9,
        "warnings": [],
    }
    checked = json.loads(succeed("check", tmp_path / "built", "--json"))
    assert set(checked["checked"]) == {"files", "digests", "catalogue"}
    assert checked["warnings"] == []
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    pushed = json.loads(succeed("push", tmp_path / "built", "me/catalogue", "--json"))
    assert pushed == {"repo_id": "me/catalogue", "url": "https://huggingface.co/me/catalogue/commit/1"}


def test_one_item_is_no_plural(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.array([[7]]))
    assert ": 1 item, 1 sequence of up to 1 token," in succeed("build", tmp_path / "one.npy", "-o", tmp_path / "built")
    assert "1 sequence in 1 level; 1 item," in succeed("check", tmp_path / "built")
