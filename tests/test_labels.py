# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Labels to an index: what the tokenizers of four families make of them, and what is refused."""

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from label_tokenizers import LABELS, tokenizer_of
from transformers import ByT5Tokenizer

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor
from hf_gr.catalogue.labels import _letters as letters

KINDS = ["bpe", "bpe-prefix-space", "unigram", "llama", "wordpiece", "wordpiece-uncased"]
index_of = ConstraintIndex.from_labels


def text_of(tokenizer: Any, row: list[int]) -> str:
    return tokenizer.decode(row, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_come_back_and_are_the_continuations_of_a_prompt(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    index = index_of(LABELS, tokenizer)
    assert (index.item_ids, len(index), index.eos_token_id) == (LABELS, len(LABELS), tokenizer.eos_token_id)
    prompt = tokenizer("Category:", add_special_tokens=False)["input_ids"]
    for label in LABELS:
        both = tokenizer("Category: " + label, add_special_tokens=False)["input_ids"]
        assert index.items([both[len(prompt) :]]) == [[label]]
        text = text_of(tokenizer, both[len(prompt) :])
        same = letters(text) == letters(label)
        assert same if kind.startswith("wordpiece") else text.strip() == label


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("prefix", [" ", "", ";"])
def test_the_prefix_alone_decides_on_a_space(kind: str, prefix: str) -> None:
    """Also where the tokenizer puts one before every text."""
    tokenizer = tokenizer_of(kind)
    before = tokenizer("Category:", add_special_tokens=False)["input_ids"]
    for label in ["Sports", "and", "a", ":x"]:
        (row,) = index_of([label], tokenizer, prefix=prefix)
        assert text_of(tokenizer, [*before, *row[:-1]]).removeprefix(" ") == "Category:" + prefix + label


def test_labels_that_tokenize_alike_share_a_sequence() -> None:
    index = index_of(["Café", "cafe", "CAFE"], tokenizer_of("wordpiece-uncased"))
    assert (len(index), index.items(list(index))) == (1, [["Café", "cafe", "CAFE"]])


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1, max_size=6).filter(str.strip), min_size=1, max_size=6, unique=True))
def test_byte_level_labels_of_any_text_survive(texts: list[str]) -> None:
    index = index_of(texts, tokenizer_of("bpe"))
    assert sorted(item for row in index for item in index.items([row])[0]) == sorted(texts)


def test_tokenizers_without_a_vocabulary_will_do() -> None:
    labels = [*LABELS, "😀", "👨\u200d👩\u200d👧", "שלום עולם", "é"]
    index = index_of(labels, ByT5Tokenizer())
    assert sorted(index.items([row])[0][0] for row in index) == sorted(labels)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "llama", "wordpiece"])
@pytest.mark.parametrize("separator", [";", " and", "; /"])
def test_a_separator_may_be_text(kind: str, separator: str) -> None:
    tokenizer, draw = tokenizer_of(kind), random.Random(0)
    processor = ConstraintLogitsProcessor(index_of(LABELS, tokenizer), 0, separator=separator, tokenizer=tokenizer)
    for _ in range(5):
        rows: list[list[int]] = [[]]
        while not rows[0] or rows[0][-1] != tokenizer.eos_token_id:
            scores = processor(torch.tensor(rows, dtype=torch.long), torch.zeros(1, len(tokenizer)))
            rows[0].append(draw.choice((scores[0] > -1).nonzero()[:, 0].tolist()))
        (items,) = processor.items(rows)
        assert len(set(items)) == len(items) > 0
        assert letters(text_of(tokenizer, rows[0][:-1])) == letters(separator.join(map(str, items)))


def test_an_index_knows_its_tokenizer_again(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bpe")
    index = index_of(LABELS, tokenizer)
    index.save_pretrained(tmp_path)
    loaded = ConstraintIndex.from_pretrained(tmp_path)
    loaded.remove(["Sports"])
    loaded.add([[7, 8]], ["More"])
    for one in (index, loaded, loaded.where(["More"]), pickle.loads(pickle.dumps(loaded))):
        one.check_tokenizer(tokenizer)
        with pytest.raises(ValueError, match="tokenizer is not the one that the index was built with"):
            one.check_tokenizer(tokenizer_of("wordpiece"))
        with pytest.raises(ValueError, match="is not the one"):
            ConstraintLogitsProcessor(one, separator=";", tokenizer=tokenizer_of("unigram"))
    ConstraintIndex.from_sequences([[1]]).check_tokenizer(tokenizer)
    with pytest.raises(ValueError, match="eos_token_id is 7, expected 0 as when the index was built"):
        index.check_tokenizer(Other(tokenizer, eos_token_id=7))


class Other:
    """A tokenizer with other attributes."""

    def __init__(self, tokenizer: Any, lost: str | None = None, **attributes: Any) -> None:
        self._tokenizer, self._lost = tokenizer, lost
        self.__dict__ |= attributes

    def __call__(self, texts: list[str], **kwargs: Any) -> Any:
        kept = [text.replace(self._lost, "") for text in texts] if self._lost else texts
        return self._tokenizer(kept, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


BPE = tokenizer_of("bpe")
FORGETFUL = Other(BPE, batch_decode=lambda rows, **_: [text.replace("S", "") for text in BPE.batch_decode(rows)])


@pytest.mark.parametrize(
    ("labels", "tokenizer", "message"),
    [
        ([], BPE, "labels is empty"),
        ("Sports", BPE, "labels is 'Sports', expected a list of strings"),
        (["Sports", 3], BPE, r"labels\[1\] is 3, expected a string"),
        (["Sports", " "], BPE, r"labels\[1\] is ' ', expected some text"),
        (["a", "b", "a", "c", "b"], BPE, r"labels has 'a', 'b' more than once"),
        (
            ["caf\u00e9", "cafe\u0301\n"],
            BPE,
            r"labels has 'caf\u00e9' more than once, but for spaces and Unicode forms",
        ),
        (["a", "b </s>"], BPE, r"labels 'b </s>' have the end token 0 inside"),
        (["a", "\ud800b"], BPE, r"labels\[1\] is '\\ud800b', expected Unicode without lone surrogates"),
        (["a", "日本", "한국", "ไทย", "ก"], tokenizer_of("unigram"), "'日本', '한국', 'ไทย', ... do not survive"),
        (["a", "😀"], tokenizer_of("wordpiece"), "labels '😀' do not survive the tokenizer"),
        (["Sports"], FORGETFUL, "labels 'Sports' do not survive"),
        (["Sports"], Other(BPE, lost="S"), "labels 'Sports' do not survive"),
        (["a", "<unk>"], tokenizer_of("unigram"), "labels '<unk>' do not survive"),
        (["a"], None, "tokenizer is a NoneType, expected one of transformers"),
        (["a"], len, "tokenizer is a builtin_function"),
        (["a"], Other(BPE, eos_token_id=None), "eos_token_id is None, expected a token"),
    ],
)
def test_bad_labels_are_refused(labels: Any, tokenizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        index_of(labels, tokenizer)


def test_characters_that_are_not_written_may_be_lost() -> None:
    assert len(index_of(["a", "a\u200b\u0000"], tokenizer_of("wordpiece"))) == 1
