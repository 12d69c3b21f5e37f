# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Labels to an index: what the tokenizers of four families make of them, and what is refused."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from label_tokenizers import tokenizer_of
from transformers import ByT5Tokenizer

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor
from hf_gr.catalogue import labels as labels_module

LABELS = [
    "Technology",
    "Technology > AI",
    "Technology > AI > Deep learning",
    "Sports",
    "sport",
    "Café & crème",
    "北京",
]
KINDS = ["bpe", "bpe-prefix-space", "unigram", "llama", "wordpiece", "wordpiece-uncased"]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_come_back(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    index = ConstraintIndex.from_labels(LABELS, tokenizer)
    assert index.item_ids == LABELS
    assert (len(index), index.eos_token_id) == (len(LABELS), tokenizer.eos_token_id)
    found = {str(items[0]): row for row in index for items in index.items([row])}
    assert set(found) == set(LABELS)
    for label, row in found.items():
        text = tokenizer.decode(row[:-1], clean_up_tokenization_spaces=False)
        same = labels_module._letters(text) == labels_module._letters(label)
        assert same if kind.startswith("wordpiece") else text.strip() == label
        if kind != "llama":
            assert row[:-1] == tokenizer(" " + label, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_the_continuations_of_a_prompt(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    index = ConstraintIndex.from_labels(LABELS, tokenizer)
    prompt = tokenizer("Category:", add_special_tokens=False)["input_ids"]
    for label in LABELS:
        both = tokenizer("Category: " + label, add_special_tokens=False)["input_ids"]
        assert index.items([both[len(prompt) :]]) == [[label]]


def test_labels_that_tokenize_alike_share_a_sequence() -> None:
    index = ConstraintIndex.from_labels(["Café", "cafe", "CAFE"], tokenizer_of("wordpiece-uncased"))
    assert (len(index), index.num_items) == (1, 3)
    assert index.items(list(index)) == [["Café", "cafe", "CAFE"]]


def test_another_prefix_is_other_tokens() -> None:
    tokenizer = tokenizer_of("bpe")
    index = ConstraintIndex.from_labels(["Sports"], tokenizer, prefix="")
    assert list(index) == [[*tokenizer("Sports")["input_ids"], tokenizer.eos_token_id]]


@pytest.mark.parametrize("kind", ["bpe", "bpe-prefix-space", "unigram", "llama"])
@pytest.mark.parametrize("prefix", [" ", "", ";"])
def test_the_prefix_alone_decides_on_a_space(kind: str, prefix: str) -> None:
    """Also where the tokenizer puts one before every text: labels and separators follow another text."""
    tokenizer = tokenizer_of(kind)
    before = tokenizer("Category:", add_special_tokens=False)["input_ids"]
    for label in ["Sports", "and", "a", ":x"]:
        (row,) = ConstraintIndex.from_labels([label], tokenizer, prefix=prefix)
        (same,) = labels_module.encode_continuations(tokenizer, [prefix + label])
        assert row[:-1] == same
        text = tokenizer.decode([*before, *same], clean_up_tokenization_spaces=False)
        assert text.removeprefix(" ") == "Category:" + prefix + label


def test_tokenizers_of_single_bytes_will_do() -> None:
    """One without a vocabulary file, in plain Python."""
    labels = [*LABELS, "😀", "👨\u200d👩\u200d👧", "שלום עולם", "e\u0301", "é"]
    index = ConstraintIndex.from_labels(labels, ByT5Tokenizer())
    assert sorted(str(index.items([row])[0][0]) for row in index) == sorted(labels)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6).filter(str.strip), min_size=1, max_size=6, unique=True))
def test_byte_level_labels_of_any_text_survive(texts: list[str]) -> None:
    index = ConstraintIndex.from_labels(texts, tokenizer_of("bpe"))
    assert sorted(item for row in index for item in index.items([row])[0]) == sorted(texts)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_reachable_outputs_are_exactly_the_labels(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    index = ConstraintIndex.from_labels(LABELS, tokenizer)
    processor = ConstraintLogitsProcessor(index, 0)
    reached: list[str] = []
    open_rows: list[list[int]] = [[]]
    while open_rows:
        row = open_rows.pop()
        scores = processor(torch.tensor([row], dtype=torch.long), torch.zeros(1, len(tokenizer)))
        for token in (scores[0] > -1).nonzero()[:, 0].tolist():
            if token == tokenizer.eos_token_id:
                reached += map(str, index.items([row])[0])
            else:
                open_rows.append([*row, token])
    assert sorted(reached) == sorted(LABELS)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "llama", "wordpiece"])
@pytest.mark.parametrize("separator", [";", " and", "; /"])
def test_a_separator_may_be_text(kind: str, separator: str) -> None:
    tokenizer = tokenizer_of(kind)
    index = ConstraintIndex.from_labels(LABELS, tokenizer)
    processor = ConstraintLogitsProcessor(index, 0, separator=separator, tokenizer=tokenizer)
    rng = random.Random(0)
    for _ in range(5):
        rows: list[list[int]] = [[]]
        while not rows[0] or rows[0][-1] != tokenizer.eos_token_id:
            scores = processor(torch.tensor(rows, dtype=torch.long), torch.zeros(1, len(tokenizer)))
            rows[0].append(rng.choice((scores[0] > -1).nonzero()[:, 0].tolist()))
        (items,) = processor.items(rows)
        assert len(set(items)) == len(items) > 0
        text = tokenizer.decode(rows[0][:-1], clean_up_tokenization_spaces=False)
        written = labels_module._letters(separator.join(map(str, items)))
        assert labels_module._letters(text) == written


def test_an_index_knows_its_tokenizer_again(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bpe")
    index = ConstraintIndex.from_labels(LABELS, tokenizer)
    index.save_pretrained(tmp_path)
    loaded = ConstraintIndex.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "constraint_index.json").read_text())["format_version"] == 2
    loaded.remove(["Sports"])
    loaded.add([[7, 8]], ["More"])
    compacted = ConstraintIndex.from_pretrained(tmp_path)
    compacted.remove(["Sports"])
    compacted.compact()
    for one in (index, loaded, compacted, loaded.where(["More"]), pickle.loads(pickle.dumps(loaded))):
        one.check_tokenizer(tokenizer)
        with pytest.raises(ValueError, match="tokenizer is not the one that the index was built with"):
            one.check_tokenizer(tokenizer_of("wordpiece"))
        with pytest.raises(ValueError, match="is not the one"):
            ConstraintLogitsProcessor(one, separator=";", tokenizer=tokenizer_of("unigram"))
    ConstraintIndex.from_sequences([[1]]).check_tokenizer(tokenizer)


class _Ended:
    """A tokenizer with other attributes."""

    def __init__(self, tokenizer: Any, **attributes: Any) -> None:
        self._tokenizer, self._attributes = tokenizer, attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._attributes[name] if name in self._attributes else getattr(self._tokenizer, name)


def test_another_end_token_is_another_tokenizer() -> None:
    index = ConstraintIndex.from_labels(LABELS, tokenizer_of("bpe"))
    with pytest.raises(ValueError, match="eos_token_id is 7, expected 0 as when the index was built"):
        index.check_tokenizer(_Ended(tokenizer_of("bpe"), eos_token_id=7))


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        ([], "bpe", "labels is empty"),
        ("Sports", "bpe", "labels is 'Sports', expected a list of strings"),
        (["Sports", 3], "bpe", r"labels\[1\] is 3, expected a string"),
        (["Sports", " "], "bpe", r"labels\[1\] is ' ', expected some text"),
        (["a", "b", "a", "c", "b"], "bpe", r"labels has 'a', 'b' more than once"),
        (["a", "b </s>"], "bpe", r"labels 'b </s>' have the end token 0 inside"),
        (
            ["a", "日本", "ok", "ありがとう", "한국", "ไทย"],
            "unigram",
            "'日本', 'ありがとう', '한국', ... do not survive",
        ),
        (["a", "😀"], "wordpiece", "labels '😀' do not survive the tokenizer"),
        (["a", "a\u200b\u0000"], "wordpiece", None),
        (["a", "\ud800b"], "bpe", r"labels\[1\] is '\\ud800b', expected Unicode without lone surrogates"),
    ],
)
def test_bad_labels_are_refused(labels: Any, kind: str, message: str | None) -> None:
    if message is None:
        assert len(ConstraintIndex.from_labels(labels, tokenizer_of(kind))) == 1
        return
    with pytest.raises(ValueError, match=message):
        ConstraintIndex.from_labels(labels, tokenizer_of(kind))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ConstraintIndex.from_labels(["a"], None), "tokenizer is a NoneType, expected one of transformers"),
        (lambda: ConstraintIndex.from_labels(["a"], len), "tokenizer is a builtin_function"),
        (lambda: ConstraintIndex.from_labels(["a"], tokenizer_of("bpe"), prefix=None), "prefix is None"),  # pyright: ignore
        (
            lambda: ConstraintIndex.from_labels(["a"], _Ended(tokenizer_of("bpe"), eos_token_id=None)),
            "eos_token_id is None, expected a token",
        ),
    ],
)
def test_bad_tokenizers_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_label_of_another_text_does_not_survive() -> None:
    """A planted error: a tokenizer whose decoder loses a letter."""
    tokenizer = tokenizer_of("bpe")
    loses = _Ended(
        tokenizer, batch_decode=lambda rows, **_: [text.replace("S", "") for text in tokenizer.batch_decode(rows)]
    )
    with pytest.raises(ValueError, match="labels 'Sports' do not survive"):
        ConstraintIndex.from_labels(LABELS, loses)
