# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`SemanticIds`: items, codes and tokens, with numbers alone, with a tokenizer and a model, from recipes' files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import build
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from hf_gr import SemanticIds

CODES = [[0, 1, 3], [2, 0, 0], [0, 1, 3]]
NAMES = ["ham", "jam", "yam"]
RAGGED = [[0, 1], [2, 0], [2, 0, 1], [1]]
RAGGED_NAMES = [*NAMES, "ram"]


def small_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<pad>", "</s>", "users", "like", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


def small_model(vocab_size: int) -> Any:
    return build("qwen3", config={"vocab_size": vocab_size, "num_hidden_layers": 1})


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


@pytest.mark.parametrize("codes", [np.array(CODES, dtype=np.uint8), np.array(CODES, np.uint64), torch.tensor(CODES)])
def test_codes_and_ids_of_any_type(codes: Any) -> None:
    ids = SemanticIds(codes, item_ids=np.array([7, 8, 9]), level_sizes=(256, 256, 256))  # room for codes not yet used
    assert (ids.vocab_size, ids.token_sequences()[1].tolist()) == (768, [2, 256, 512])
    assert ids.encode([np.int64(8)]) == ids.encode([8]) == [2, 256, 512]
    assert ids.decode(torch.tensor(ids.encode([8]))) == [[8]]
    names = SemanticIds(CODES, item_ids=np.array(NAMES)).item_ids
    assert {type(item) for item in (*ids.item_ids, *names)} == {int, str}


@pytest.mark.parametrize(
    ("codes", "arguments", "message"),
    [
        ([], {}, r"codes has shape \[0, 0\]"),
        ([0, 1], {}, "codes: code list 0 is 0, expected .* or N lists of them"),
        ([[0], ["<a_1>"]], {}, "codes: code list 1 has '<a_1>' at position 0, expected .*from_json"),
        ([[True]], {}, "code list 0 has True at position 0"),
        ([[0, -2]], {}, "item 0 has code -2 at level 1, expected 0 to 0: only the end of a row may be -1"),
        ([[0, 1, 0], [0, -1, 1]], {"item_ids": ["a", "b"]}, "item 'b' has code -1 at level 1, expected 0 to 1"),
        ([[0, 1], [0, 4]], {"level_sizes": [1, 4]}, "item 1 has code 4 at level 1, expected 0 to 3: was the level"),
        ([[0, -1]], {"level_sizes": [1, 0]}, "level_sizes has 0 at level 1, expected 1 or more"),
        ([[0, 2**31]], {}, "give tokens beyond 2147483647, expected codes of a codebook"),
        (CODES, {"level_sizes": [4, 4]}, "level_sizes has 2 entries, expected 3"),
        (CODES, {"offset": -1}, "offset=-1, expected 0 or more"),
        (CODES, {"item_ids": NAMES[:2]}, "item_ids has 2 entries, expected 3"),
        (CODES, {"item_ids": ["a", "b", "a"]}, "item_ids has 3 entries, 2 of them distinct"),
    ],
)
def test_bad_codes_are_refused(codes: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SemanticIds(codes, **arguments)


KNOWN, LENGTHS = SemanticIds(CODES, item_ids=NAMES), SemanticIds(RAGGED, item_ids=RAGGED_NAMES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KNOWN.encode(["ham", "spam"]), "item 'spam' has no semantic ID, expected one of the 3 known items"),
        (lambda: KNOWN.encode("ham"), r"item_ids='ham', expected a list of item ids: pass \['ham'\]"),
        (lambda: KNOWN.decode([0, 4, 8, 0]), r"has shape \[1, 4\], expected one list of a multiple of 3"),
        (lambda: LENGTHS.decode([0, 4, 7]), "has 7 at position 2, expected code tokens only: cut the prompt"),
        (lambda: LENGTHS.decode([[0, 4], [0, 4]]), r"token_ids has shape \[2, 2\], expected one list of tokens"),
        (LENGTHS.constraint_index, "differ in length and eos_token_id=None, .*: pass eos_token_id="),
    ],
)
def test_unknown_items_and_broken_histories_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


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
    assert model(**prompt).logits.shape[-1] > ids.constraint_index().max_token_id

    again = SemanticIds.from_tokenizer(CODES, tokenizer, item_ids=NAMES)
    assert again.encode(NAMES) == ids.encode(NAMES)
    assert len(tokenizer) == 14


def test_codes_of_no_item_need_no_token() -> None:
    tokenizer = small_tokenizer("<a_2>", "<a_0>", "<b_0>", "<b_1>", "<c_3>", "<c_0>")
    for size, resized in ((5, 11), (64, 64)):
        model = small_model(size)
        ids = SemanticIds.from_tokenizer(CODES, tokenizer, model=model)
        assert (len(tokenizer), num_embeddings(model), ids.vocab_size) == (11, resized, 11)
        assert ids.encode([1]) == [5, 7, 10]
        assert ids.decode([5, 7, 10]) == [[1]]
    ragged = SemanticIds.from_tokenizer([[2], [2, 0]], tokenizer)
    with pytest.raises(ValueError, match="token_ids has 0 at position 1, expected code tokens only"):
        ragged.decode([5, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template": "<{code}>"}, "gives one text to several codes: use both {level} and {code}"),
        ({"template": "<{lvl}_{code}>"}, "fails with KeyError"),
        ({"template": "<{level}_{code:q}>"}, "fails with ValueError"),
        ({"codes": [[0] * 27]}, "level 26 has no name, expected at most 26 levels"),
        ({"model": None}, "lacks 6 of 6 code tokens, such as '<a_0>', and model=None: pass model="),
    ],
)
def test_what_a_tokenizer_cannot_have_is_refused_and_nothing_is_added(arguments: Any, message: str) -> None:
    tokenizer, model = small_tokenizer(), small_model(5)
    with pytest.raises(ValueError, match=message):
        SemanticIds.from_tokenizer(**{"codes": CODES, "tokenizer": tokenizer, "model": model} | arguments)
    assert len(tokenizer) == num_embeddings(model) == 5


def test_items_of_several_lengths_are_told_apart_by_an_end_token() -> None:
    assert LENGTHS.decode([0, 3, 3, 6, 5, 2, 6, 1, 1]) == [[], [], [], [], [], ["ram"], ["ram"]]
    ids = SemanticIds(RAGGED, item_ids=RAGGED_NAMES, offset=3)
    index = ids.constraint_index(eos_token_id=2)
    assert index.items(ids.token_sequences()) == [[name] for name in RAGGED_NAMES]
    assert index.allowed_next_tokens([5, 6]) == [2, 9]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=20),
    st.integers(0, 50),
    st.randoms(use_true_random=False),
)
def test_encode_and_decode_are_inverse_for_any_lengths(codes: list[list[int]], offset: int, random: Any) -> None:
    ids = SemanticIds(codes, offset=offset)
    assert [list(ids.codes_of(item)) for item in range(len(codes))] == codes
    filled = SemanticIds(torch.tensor(ids.codes), level_sizes=ids.level_sizes, offset=offset)
    assert np.array_equal(filled.token_sequences(), ids.token_sequences())
    history = random.choices(range(len(codes)), k=10)
    tokens = ids.encode(history)
    assert len(tokens) == sum(len(codes[item]) for item in history)
    twins = [[other for other, twin in enumerate(codes) if twin == codes[item]] for item in history]
    assert ids.decode(tokens) == twins
    index = ids.constraint_index(eos_token_id=ids.vocab_size)
    assert index.items([ids.encode([item]) for item in history]) == twins


def write_texts(codes: list[int], template: str = "<{}_{}>") -> list[str]:
    """As LC-Rec, LETTER and MiniOneRec write them."""
    return [template.format("abcdefgh"[level], code) for level, code in enumerate(codes)]


def test_files_that_hold_no_semantic_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    with pytest.raises(ValueError, match=r"index.json is no JSON file or is cut short .*No such file"):
        SemanticIds.from_json(path)
    for content, message in [
        (b'{"0": ["<a_1>", "<b_', "index.json is no JSON file or is cut short .*: download it or write it again"),
        (b"[" * 100_000, "index.json is no JSON file or is cut short"),
        (b"{}", "index.json holds '{}', expected the semantic ID of every item, such as"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            SemanticIds.from_json(path)


def test_the_files_of_lc_rec_and_minionerec(tmp_path: Path) -> None:
    path = tmp_path / "Beauty.index.json"
    path.write_text(json.dumps({str(item): write_texts(row) for item, row in enumerate(CODES)}))
    for source in (path, str(path)):
        ids = SemanticIds.from_json(source, level_sizes=[256] * 3, offset=10)
        assert (ids.item_ids, ids.codes.tolist(), ids.encode([1])) == ([0, 1, 2], CODES, [12, 266, 522])
    numbered = {str(item): write_texts(row, "<|{}_{}|>") for item, row in enumerate([[1, 2, 1], [1, 2, 2], [3, 1]])}
    ids = SemanticIds.from_json(numbered, template="<|{level}_{code}|>", offset=0)
    assert ids.codes.tolist() == [[1, 2, 1], [1, 2, 2], [3, 1, -1]]


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), min_size=1, max_size=10))
def test_every_way_to_write_codes_is_read_back(codes: list[list[int]]) -> None:
    texts = [write_texts(row) for row in codes]
    ways: list[list[Any]] = [
        codes,
        texts,
        ["".join(row) for row in texts],
        ["".join(write_texts(row[:-1])) + f"-{row[-1]}" if len(row) > 1 else str(row[0]) for row in codes],
        *([sign.join(map(str, row)) for row in codes] for sign in "-_,; |"),
    ]
    for way in ways:
        ids = SemanticIds.from_json(json.loads(json.dumps(dict(enumerate(way)))), offset=0)
        assert [list(ids.codes_of(item)) for item in range(len(codes))] == codes
    assert SemanticIds.from_json([tuple(row) for row in codes]).codes.tolist() == ids.codes.tolist()


@pytest.mark.parametrize(
    ("keys", "item_ids"),
    [
        (["0", "17"], [0, 17]),
        (["17", "B001"], ["17", "B001"]),
        (["17", "007"], ["17", "007"]),
        (["17", "\u0663"], ["17", "\u0663"]),
        (["1" * 19, "2"], ["1" * 19, "2"]),
        ([17, 3], [17, 3]),
    ],
)
def test_item_ids_become_integers_together_or_not_at_all(keys: list[Any], item_ids: list[Any]) -> None:
    assert SemanticIds.from_json({key: [row] for row, key in enumerate(keys)}).item_ids == item_ids


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "item 'jam' has \\[\\], expected its codes, such as"),
        (
            ["<a_1>", "<c_2>"],
            "item 'jam' has '<c_2>' at level 1, expected an integer or a text such as '<b_0>': levels",
        ),
        (["<a_01>"], "item 'jam' has '<a_01>' at level 0, .*: levels are named a, b, c, ... in turn .pass template="),
        (["<a_1>", 0.5], "item 'jam' has 0.5 at level 1"),
        ([True], "item 'jam' has True at level 0"),
        ("<a_1><c_2>", "item 'jam' has '<c_2>' at level 1"),
        ("3-9-SKU7", "item 'jam' has '3-9-SKU7' at level 0, .* collisions end with a number, not"),
        ("12.5", "item 'jam' has '12.5' at level 0, .* numbers are written as"),
        ("<a_1><C_2>", "item 'jam' has '<C_2>' at level 1, expected .* such as '<b_0>': levels are named a, b, c"),
        ([1, -1, 2], "item 'jam' has code -1 at level 1"),
    ],
)
def test_semantic_ids_that_cannot_be_read_are_refused_and_add_nothing(value: Any, message: str) -> None:
    tokenizer, model = small_tokenizer(), small_model(5)
    with pytest.raises(ValueError, match=message):
        SemanticIds.from_json({"ham": ["<a_1>", "<b_1>", "<c_1>"], "jam": value}, tokenizer=tokenizer, model=model)
    assert len(tokenizer) == num_embeddings(model) == 5


@pytest.mark.parametrize("source", [["<a_1>", "<b_2>"], "<a_1><b_2>", "<A_1>-2", ["<a_1>", 2]])
def test_texts_of_tokens_need_a_tokenizer_or_an_offset(source: Any) -> None:
    with pytest.raises(ValueError, match=r"item 'ham' has the token texts .*, expected tokenizer= or offset=: .*Pass"):
        SemanticIds.from_json({"jam": [0, 1], "ham": source})
    assert SemanticIds.from_json({"ham": source}, offset=3).encode(["ham"]) == [4, 5 + 2]
    assert SemanticIds.from_json({"ham": "1-2"}).encode(["ham"]) == [1, 2 + 2]


def test_a_tokenizer_with_the_other_case() -> None:
    tokenizer, model = small_tokenizer(), small_model(5)
    expected = SemanticIds.from_tokenizer(CODES, tokenizer, item_ids=NAMES, model=model).encode(NAMES)
    capitals = {name: [text.upper() for text in write_texts(row)] for name, row in zip(NAMES, CODES, strict=True)}
    with pytest.raises(ValueError, match=r"such as '<A_0>'.* or template='<{level}_{code}>', since .* has '<a_0>'"):
        SemanticIds.from_json(capitals, tokenizer=tokenizer)
    found = SemanticIds.from_json(capitals, tokenizer=tokenizer, template="<{level}_{code}>")  # what it says
    assert found.encode(NAMES) == expected


def test_a_file_with_a_tokenizer() -> None:
    source = {name: write_texts(row) for name, row in zip(RAGGED_NAMES, RAGGED, strict=True)}
    tokenizer, model = small_tokenizer(), small_model(5)
    ids = SemanticIds.from_json(source, tokenizer=tokenizer, model=model)
    assert tokenizer.convert_ids_to_tokens(ids.encode(["yam", "ram"])) == ["<a_2>", "<b_0>", "<c_1>", "<a_1>"]


def test_a_file_with_a_template() -> None:
    ids = SemanticIds.from_json([["[a002]", "[b010]"], "[a000][b001]"], template="[{level}{code:03}]", offset=0)
    assert ids.codes.tolist() == [[2, 10], [0, 1]]
    with pytest.raises(ValueError, match="template='<{level}>' writes no codes, expected {code} in it"):
        SemanticIds.from_json([["<a>"]], template="<{level}>")
