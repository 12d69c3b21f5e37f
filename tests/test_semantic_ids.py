# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`SemanticIds`: items, codes and tokens, with numbers alone and with a tokenizer and a model of transformers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_gr import SemanticIds

CODES = [[0, 1, 3], [2, 0, 0], [0, 1, 3]]
NAMES = ["ham", "jam", "yam"]


def small_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<pad>", "</s>", "users", "like", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


def small_model(vocab_size: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=1,
        )
    )


def num_embeddings(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def test_every_level_has_its_own_tokens() -> None:
    ids = SemanticIds(CODES, item_ids=NAMES, offset=10)
    assert (len(ids), ids.num_levels, ids.level_sizes, ids.vocab_size) == (3, 3, (3, 2, 4), 19)
    assert ids.token_sequences().tolist() == [[10, 14, 18], [12, 13, 15], [10, 14, 18]]
    assert ids.encode(["jam", "ham"]) == [12, 13, 15, 10, 14, 18]
    assert ids.decode([10, 14, 18, 12, 13, 15, 10, 14, 15]) == [["ham", "yam"], ["jam"], []]
    assert ids.codes_of("jam") == (2, 0, 0)
    assert ids.encode([]) == ids.decode([]) == []


def test_level_sizes_leave_room_for_codes_not_yet_used() -> None:
    ids = SemanticIds(CODES, level_sizes=(256, 256, 256))
    assert (ids.level_sizes, ids.vocab_size) == ((256, 256, 256), 768)
    assert ids.encode([1]) == [2, 256, 512]


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint64, np.int64, torch.int32, torch.int64, list])
def test_codes_of_any_integer_type(kind: Any) -> None:
    if kind is list:
        codes = CODES
    elif isinstance(kind, torch.dtype):
        codes = torch.tensor(CODES, dtype=kind)
    else:
        codes = np.array(CODES, dtype=kind)
    assert SemanticIds(codes, offset=10).token_sequences().tolist() == [[10, 14, 18], [12, 13, 15], [10, 14, 18]]


def test_item_ids_are_pythons_own() -> None:
    ids = SemanticIds(CODES, item_ids=np.array([7, 8, 9]))
    assert [type(item) for items in ids.decode(ids.encode([7, 8])) for item in items] == [int, int, int]
    assert ids.encode([np.int64(8)]) == ids.encode([8])
    assert type(SemanticIds(CODES, item_ids=np.array(NAMES)).item_ids[0]) is str
    assert ids.decode(torch.tensor(ids.encode([8]))) == [[8]]


def test_the_catalogue_of_its_items() -> None:
    ids = SemanticIds(CODES, item_ids=NAMES, offset=3)
    index = ids.constraint_index()
    assert (len(index), index.num_items, index.max_length) == (2, 3, 3)
    assert index.items(ids.token_sequences()) == [["ham", "yam"], ["jam"], ["ham", "yam"]]
    ended = ids.constraint_index(eos_token_id=2)
    assert (ended.max_length, ended.eos_token_id) == (4, 2)


@given(st.lists(st.lists(st.integers(0, 300), min_size=3, max_size=3), min_size=1, max_size=20), st.integers(0, 50))
def test_encode_and_decode_are_inverse(codes: list[list[int]], offset: int) -> None:
    ids = SemanticIds(codes, offset=offset)
    for item, row in enumerate(codes):
        assert ids.decode(ids.encode([item])) == [[other for other, twin in enumerate(codes) if twin == row]]
        assert ids.codes_of(item) == tuple(row)
    assert min(ids.encode(range(len(codes)))) >= offset
    assert max(ids.encode(range(len(codes)))) == ids.vocab_size - 1


def test_copies_are_equal() -> None:
    ids = SemanticIds(CODES, item_ids=NAMES)
    ids.decode(ids.encode(["jam"]))
    for twin in (copy.deepcopy(ids), pickle.loads(pickle.dumps(ids))):
        assert twin.decode(twin.encode(["jam", "ham"])) == [["jam"], ["ham", "yam"]]


@pytest.mark.parametrize(
    ("codes", "arguments", "message"),
    [
        ([], {}, r"codes has shape \[0\]"),
        ([[]], {}, r"codes has shape \[1, 0\]"),
        ([0, 1], {}, r"codes has shape \[2\]"),
        ([[0], [0, 1]], {}, "codes has rows of several lengths"),
        ([[0.5]], {}, "dtype float64"),
        ([[True]], {}, "dtype bool"),
        ([["a"]], {}, "expected .* integers"),
        ([[0, -1]], {}, "item 0 has code -1 at level 1, expected 0 to"),
        ([[0, 1], [0, 4]], {"level_sizes": [1, 4]}, "item 1 has code 4 at level 1, expected 0 to 3"),
        (CODES, {"level_sizes": [4, 4]}, "level_sizes has 2 entries, expected 3"),
        (CODES, {"offset": -1}, "offset=-1, expected 0 or more"),
        (CODES, {"item_ids": NAMES[:2]}, "item_ids has 2 entries, expected 3"),
        (CODES, {"item_ids": ["a", "b", "a"]}, "item_ids has 3 entries, 2 of them distinct"),
        (CODES, {"item_ids": ["a", 1, "b"]}, r"item_ids\[1\]=1, expected all integers or all strings"),
        (CODES, {"item_ids": [True, False, 2]}, r"item_ids\[0\]=True, expected all integers"),
        (CODES, {"item_ids": [None, 1, 2]}, r"item_ids\[0\]=None"),
    ],
)
def test_bad_codes_are_refused(codes: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SemanticIds(codes, **arguments)


def test_unknown_items_and_broken_histories_are_refused() -> None:
    ids = SemanticIds(CODES, item_ids=NAMES)
    with pytest.raises(ValueError, match="item 'spam' has no semantic ID, expected one of the 3 known items"):
        ids.encode(["ham", "spam"])
    with pytest.raises(ValueError, match="item 'spam' has no semantic ID"):
        ids.codes_of("spam")
    with pytest.raises(ValueError, match=r"token_ids has shape \[1, 4\], expected one list of a multiple of 3"):
        ids.decode([0, 4, 8, 0])
    with pytest.raises(ValueError, match=r"token_ids has shape \[2, 3\]"):
        ids.decode([[0, 4, 8], [0, 4, 8]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="sequence 0 has 0.0 at position 0, expected an integer"):
        ids.decode([0.0, 4.0, 8.0])  # type: ignore[list-item]


def test_a_tokenizer_that_knows_the_codes_is_left_alone() -> None:
    words = [f"<{level}_{code}>" for level, size in (("a", 3), ("b", 2), ("c", 4)) for code in range(size)]
    tokenizer = small_tokenizer(*reversed(words))
    ids = SemanticIds.from_tokenizer(CODES, tokenizer, item_ids=NAMES)
    assert len(tokenizer) == 5 + 9
    assert tokenizer.convert_ids_to_tokens(ids.encode(["jam"])) == ["<a_2>", "<b_0>", "<c_0>"]
    assert ids.encode(["jam"]) == tokenizer("<a_2> <b_0> <c_0>").input_ids
    assert ids.vocab_size == 14


def test_missing_tokens_are_added_and_the_model_resized() -> None:
    tokenizer = small_tokenizer("<b_1>", "<b_0>")
    model = small_model(len(tokenizer))
    before = model.get_input_embeddings().weight[:7].detach().clone()
    ids = SemanticIds.from_tokenizer(CODES, tokenizer, item_ids=NAMES, model=model)
    assert len(tokenizer) == num_embeddings(model) == model.config.vocab_size == ids.vocab_size == 7 + 7
    torch.testing.assert_close(model.get_input_embeddings().weight[:7], before, rtol=0, atol=0)
    prompt = tokenizer("users like <a_0><b_1><c_3>", return_tensors="pt")
    assert prompt.input_ids[0, 2:].tolist() == ids.encode(["ham"])
    assert tokenizer.decode(ids.encode(["ham"]), skip_special_tokens=True) != ""
    assert model(**prompt).logits.shape[-1] > ids.constraint_index().max_token_id

    again = SemanticIds.from_tokenizer(CODES, tokenizer, item_ids=NAMES)
    assert again.encode(NAMES) == ids.encode(NAMES)
    assert len(tokenizer) == 14


def test_a_model_with_room_is_not_resized() -> None:
    tokenizer = small_tokenizer()
    model = small_model(64)
    SemanticIds.from_tokenizer(CODES, tokenizer, model=model)
    assert num_embeddings(model) == 64


def test_a_model_too_small_for_known_tokens_is_resized() -> None:
    tokenizer = small_tokenizer(*[f"<a_{code}>" for code in range(4)])
    model = small_model(5)
    SemanticIds.from_tokenizer([[3], [0]], tokenizer, model=model)
    assert num_embeddings(model) == len(tokenizer) == 9


def test_without_a_model_nothing_is_added() -> None:
    tokenizer = small_tokenizer("<a_0>")
    with pytest.raises(ValueError, match="lacks 8 of 9 code tokens, such as '<a_1>', and model=None: pass model="):
        SemanticIds.from_tokenizer(CODES, tokenizer)
    assert len(tokenizer) == 6


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("<{code}>", "gives one text to several codes: use both {level} and {code}"),
        ("<{level}>", "gives one text to several codes"),
        ("<x>", "gives one text to several codes"),
        ("<{lvl}_{code}>", "fails with KeyError"),
        ("<{}_{code}>", "fails with IndexError"),
        ("<{level_{code}>", "fails with"),
        ("<{level}_{code:q}>", "fails with ValueError"),
        ("<{level.x}_{code}>", "fails with AttributeError"),
    ],
)
def test_bad_templates_are_refused_and_add_nothing(template: str, message: str) -> None:
    tokenizer, model = small_tokenizer(), small_model(5)
    with pytest.raises(ValueError, match=message):
        SemanticIds.from_tokenizer(CODES, tokenizer, template=template, model=model)
    assert len(tokenizer) == num_embeddings(model) == 5


def test_a_template_of_ones_own() -> None:
    tokenizer = small_tokenizer()
    ids = SemanticIds.from_tokenizer(CODES, tokenizer, template="[{level}{code:03}]", model=small_model(5))
    assert tokenizer.convert_ids_to_tokens(ids.encode([1])) == ["[a002]", "[b000]", "[c000]"]


def test_levels_beyond_the_alphabet_need_no_tokenizer() -> None:
    codes = np.zeros((1, 27), dtype=int)
    assert SemanticIds(codes).encode([0]) == list(range(27))
    tokenizer = small_tokenizer()
    with pytest.raises(ValueError, match="codes has 27 levels, expected at most 26"):
        SemanticIds.from_tokenizer(codes, tokenizer, model=small_model(5))
    assert len(tokenizer) == 5
    assert SemanticIds.from_tokenizer(codes[:, :26], tokenizer, model=small_model(5)).num_levels == 26
