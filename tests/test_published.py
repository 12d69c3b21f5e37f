# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What public recipes publish: tokens of each form, and interactions, as in examples/guides/published.md."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_gr import SemanticIds
from hf_gr.training import read_histories, small_recommender

CODES = [[99, 19, 220, 204], [99, 19, 220, 0], [7, 255, 0, 1], [0, 0, 0, 0]]
THREE = [row[:3] for row in CODES[1:]]
MARKS = ("<|rec|>", "<|sid_start|>", "<|sid_end|>")


def tokenizer_of(*texts: str) -> Any:
    made = Tokenizer(models.WordLevel({text: number for number, text in enumerate(("<unk>", *texts))}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<[^<>]+>"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def open_one_rec() -> tuple[Any, SemanticIds, list[str]]:
    texts = [f"<s_{level}_{code}>" for level in "abc" for code in range(8192)]
    tokenizer = tokenizer_of(*texts, "<|sid_begin|>", "<|sid_end|>")
    form: Any = {"tokenizer": tokenizer, "template": "<s_{level}_{code}>", "level_sizes": [8192] * 3}
    ids = SemanticIds.from_table({"pid": [0, 1, 2], "sid": THREE}, codes="sid", item_id="pid", progress=False, **form)
    assert ids.codebooks()[2].tolist() == [*range(1 + 2 * 8192, 1 + 3 * 8192)]
    return tokenizer, ids, [f"<s_a_{a}><s_b_{b}><s_c_{c}>" for a, b, c in THREE]


def lc_rec(codes: list[list[int]] = CODES) -> tuple[Any, SemanticIds, list[str]]:
    texts = [[f"<{'abcd'[level]}_{code}>" for level, code in enumerate(row)] for row in codes]
    tokenizer = tokenizer_of(*sorted({text for row in texts for text in row}))  # of codes that items have, as it adds
    ids = SemanticIds.from_json(dict(enumerate(texts)), tokenizer=tokenizer, level_sizes=[256] * len(codes[0]))
    return tokenizer, ids, ["".join(row) for row in texts]


def semantic_ids_llm() -> tuple[Any, SemanticIds, list[str]]:
    tokenizer = tokenizer_of(*MARKS, *(f"<|sid_{number}|>" for number in range(1024)))
    columns = {f"semantic_id_{level}": [row[level] for row in CODES] for level in range(4)}
    form: Any = {"offset": tokenizer.convert_tokens_to_ids("<|sid_0|>"), "level_sizes": [256] * 4}
    ids = SemanticIds.from_table(columns, codes=list(columns), item_id=None, progress=False, **form)
    rows = [[f"<|sid_{256 * level + code}|>" for level, code in enumerate(row)] for row in CODES]
    return tokenizer, ids, ["".join(row) for row in rows]


def grid() -> tuple[Any, SemanticIds, list[str]]:
    texts = [str(number) for number in range(4 * 256)]
    rows = [" ".join(str(256 * level + code) for level, code in enumerate(row)) for row in CODES]
    tokenizer = tokenizer_of(*texts)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    published = torch.tensor(CODES).T  # one item a column
    return tokenizer, SemanticIds(published.T, level_sizes=[256] * 4, offset=1), rows


@pytest.mark.parametrize(
    "form", [open_one_rec, lc_rec, lambda: lc_rec(THREE), semantic_ids_llm, grid],
    ids=["OpenOneRec", "LC-Rec", "MiniOneRec", "semantic-ids-llm", "GRID"],
)  # fmt: skip
def test_items_are_the_published_texts_before_and_after_a_call(form: Any) -> None:
    tokenizer, ids, texts = form()
    items = list(range(len(texts)))
    assert [ids.encode([item]) for item in items] == [tokenizer(text).input_ids for text in texts]
    torch.manual_seed(0)
    model = small_recommender(ids, hidden_size=8, num_hidden_layers=1)
    prompt = torch.tensor([ids.encode(items)])
    index = ids.constraint_index()
    found = model.generate(prompt, constraint_index=index, num_beams=5, num_return_sequences=len(items))
    written = tokenizer.batch_decode(found[:, prompt.shape[1] :])
    assert sorted(text.replace(" ", "") for text in written) == sorted(text.replace(" ", "") for text in texts)


INTER = "user_id:token\titem_id:token\ttimestamp:float\nu1\t007\t9.5\nu2\t7\t3\nu1\t8\t10\n"
COLUMNS = {"user": "user_id:token", "item": "item_id:token", "time": "timestamp:float"}


@pytest.mark.parametrize(
    ("name", "text", "how", "expected"),
    [
        ("X.inter.json", '{"0": [2, 0], "1": [], "2": [1]}', {}, {"0": [2, 0], "2": [1]}),
        ("X.inter.json", '{\n "0": ["2"]}', {"items": SemanticIds([[0], [1], [2]])}, {"0": [2]}),
        ("X.json", '{"0": ["B1", "7"]}', {}, {"0": ["B1", "7"]}),
        ("rows.json", '{"user": 5, "item": 7}', {}, {5: [7]}),
        ("X.inter", INTER, COLUMNS, {"u1": ["007", "8"], "u2": ["7"]}),
        ("sequential_train.txt", "1 2 10\n2\n\n3 1\r\n1 5\n", {}, {"1": [2, 10, 5], "3": [1]}),
    ],
)
def test_interactions_as_they_are_published(tmp_path: Path, name: str, text: str, how: Any, expected: Any) -> None:
    (tmp_path / name).write_text(text)
    assert read_histories(tmp_path / name, **how) == expected


@pytest.mark.parametrize(
    ("name", "text", "how", "message"),
    [
        ("a.txt", "1 2", {"time": "t"}, "time='t' with the lists of .*a.txt, expected None: lists are in order"),
        ("a.txt", "1\n", {}, "a.txt has no row"),
        ("a.txt", "1 2", {"items": SemanticIds([[0], [1]])}, "item='item' is 2 in row 0, .* without a semantic ID"),
        ("a.json", '{"0": [1, null]}', {}, "a.json, column 'item', row 1 is None, expected a value"),
    ],
)
def test_lists_that_cannot_be_read(tmp_path: Path, name: str, text: str, how: Any, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_histories(tmp_path / name, **how)
    with pytest.raises(ValueError, match="none.txt cannot be read .*, expected items by user: check"):
        read_histories(tmp_path / "none.txt")


def write_atspeed(folder: Path, codes: Any, users: list[dict[str, Any]]) -> None:
    """As AtSpeed publishes: ids of users and items from 1, those of semantic IDs from 0."""
    texts = {str(item): [f"<{'abcd'[level]}_{code}>" for level, code in enumerate(row)] for item, row in codes}
    (folder / "beauty.LCRec-1e-3lr.json").write_text(json.dumps(texts))
    for part in ("train", "valid", "test"):
        lines = (" ".join(str(1 + number) for number in (user["user_id"], *user[part])) + "\n" for user in users)
        (folder / f"sequential_{part}.txt").write_text("".join(lines))


def test_beauty_is_made_of_what_atspeed_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "examples" / "benchmark"))
    data = import_module("beauty_data")
    bought = [([3, 0], [], [1]), ([2], [0], [])]
    users = [{"user_id": user, "train": a, "valid": b, "test": c} for user, (a, b, c) in enumerate(bought)]
    write_atspeed(tmp_path, enumerate(CODES), users)
    with pytest.raises(SystemExit, match=r"items.tsv and users.jsonl differ from those of RESULTS.md"):
        data.main([str(tmp_path), str(tmp_path / "made")])
    numbers, codes = data.read_items(tmp_path / "made")
    assert (numbers, codes.tolist(), data.read_users(tmp_path / "made")) == ([0, 1, 2, 3], CODES, users)
    if data.is_there(data.DEFAULT_DATA, fast=True):  # the data of RESULTS.md, written as AtSpeed does and read back
        numbers, codes = data.read_items(data.DEFAULT_DATA)
        write_atspeed(tmp_path, zip(numbers, codes.tolist(), strict=True), data.read_users(data.DEFAULT_DATA))
        data.main([str(tmp_path), str(tmp_path / "again")])
