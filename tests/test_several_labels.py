# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers of several labels in `generate` and `classify`, against transformers' loop with the processor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import build
from label_tokenizers import tokenizer_of

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor, classify, enable
from hf_gr.catalogue import separators

SCORE_TOL = 1e-4  # fp32: sums of at most 20 log-probabilities
EOS = 0
ROWS = [[3], [3, 4], [5, 6], [5, 7, 3], [6, 3, 4]]
SEPARATOR = [8, 9]
PROMPT = torch.tensor([[10, 11, 12], [13, 14, 15]])


def index_of(rows: list[list[int]] = ROWS) -> ConstraintIndex:
    names = ["".join("abcdefgh"[token - 3] for token in row) for row in rows]
    return ConstraintIndex.from_sequences(rows, item_ids=names, eos_token_id=EOS)


def model_of(family: str) -> Any:
    return build(family, config={"eos_token_id": EOS, "pad_token_id": 1, "vocab_size": 32})


def both(family: str, index: Any, options: dict[str, Any], several: dict[str, Any]) -> tuple[Any, Any]:
    """Ours, and transformers' loop with the processor."""
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 14, **options}
    model = model_of(family)
    is_encoder_decoder = model.config.is_encoder_decoder
    start = 1 if is_encoder_decoder else PROMPT.shape[1]
    exclude = options.pop("exclude_items", None)
    processor = ConstraintLogitsProcessor(index, start, exclude_items=exclude, **several)
    theirs = model.generate(PROMPT, logits_processor=[processor], **options)
    ours = enable(model).generate(PROMPT, constraint_index=index, exclude_items=exclude, **several, **options)
    assert ours.item_ids == processor.items(ours.sequences[:, start:])
    return ours, theirs


@pytest.mark.parametrize("family", ["llama", "t5", "gpt2"])
@pytest.mark.parametrize("max_labels", [None, 1, 2])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_tree_equals_the_processor(family: str, max_labels: int | None, num_beams: int) -> None:
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": num_beams, "do_sample": False}
    ours, theirs = both(family, index_of(), options, {"separator": SEPARATOR, "max_labels": max_labels})
    width = min(ours.sequences.shape[1], theirs.sequences.shape[1])
    assert ours.sequences[:, :width].tolist() == theirs.sequences[:, :width].tolist()
    if num_beams > 1:
        assert torch.allclose(ours.sequences_scores, theirs.sequences_scores, atol=SCORE_TOL)


def test_views_exclusions_and_length_penalties() -> None:
    index = index_of()
    views = [index.where(["a", "cd"]), index]
    options: dict[str, Any] = {"num_beams": 5, "num_return_sequences": 5, "length_penalty": 0.0, "max_new_tokens": 9}
    for catalogue, exclude in ((views, None), (index, [["a"], ["ab", "dab"]])):
        several = {"separator": SEPARATOR, "max_labels": 2}
        ours, theirs = both("llama", catalogue, options | {"exclude_items": exclude}, several)
        is_there = theirs.sequences_scores > -1e5  # transformers fills up with what is no answer
        assert torch.allclose(ours.sequences_scores[is_there], theirs.sequences_scores[is_there], atol=SCORE_TOL)
        assert not ours.sequences_scores[~is_there].isfinite().any()
        labels = [set(items) for items in ours.item_ids]
        assert all(len(items) == len(set(items)) for items in ours.item_ids)
        assert all(items <= {"a", "cd"} if exclude is None else "a" not in items for items in labels[:5])


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 8.0])
def test_rows_without_an_answer_of_their_own_are_missing(length_penalty: float) -> None:
    model, options = enable(model_of("llama")), {"separator": SEPARATOR, "max_labels": 1, "max_new_tokens": 6}
    details = {"return_dict_in_generate": True, "output_scores": True}
    beams = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": length_penalty}
    index, others = index_of(), ["ab", "cd", "cea"]
    out = model.generate(PROMPT, constraint_index=index, exclude_items=[others, []], **options, **beams, **details)
    assert len(out.item_ids[0]) == 1
    two = {tuple(items) for items in out.item_ids[:3]}
    assert two == {("a",), ("dab",), ()}, two  # of two labels left, and a missing row
    assert out.sequences_scores[:3].isfinite().tolist() == [True, True, False]
    assert out.item_ids[3:] == [items for items in out.item_ids[3:] if items]
    alone = model.generate(PROMPT, constraint_index=index, exclude_items=[["a", *others, "dab"], []], **options)
    assert (alone[0, PROMPT.shape[1] :] == 1).all()


def test_a_planted_error_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that may repeat."""
    right = separators.Answers.next_tokens

    def forgetful(answers: Any, tokens: list[int]) -> list[int]:
        return right(answers, separators.split(tokens, answers.separator, EOS)[-1] if EOS not in tokens else tokens)

    monkeypatch.setattr(separators.Answers, "next_tokens", forgetful)
    out = enable(model_of("llama")).generate(
        PROMPT,
        constraint_index=index_of([[3], [4]]),
        separator=[8],
        max_labels=2,
        return_dict_in_generate=True,
        num_beams=20,
        num_return_sequences=20,
        max_new_tokens=9,
    )
    assert any(len(items) != len(set(items)) for items in out.item_ids)


def test_samples_are_answers_and_a_text_is_a_separator() -> None:
    tokenizer = tokenizer_of("bpe")
    index = ConstraintIndex.from_labels(["Sports", "Science", "Deep learning"], tokenizer)
    model = enable(build("llama", config={"vocab_size": 512, "eos_token_id": EOS}))
    inputs = tokenizer("a text", return_tensors="pt")
    torch.manual_seed(3)
    out = model.generate(
        **inputs,
        constraint_index=index,
        separator=";",
        max_labels=2,
        tokenizer=tokenizer,
        do_sample=True,
        num_return_sequences=20,
        return_dict_in_generate=True,
    )
    assert all(0 < len(items) <= 2 and len(set(items)) == len(items) for items in out.item_ids)
    assert {len(items) for items in out.item_ids} == {1, 2}


def test_a_cut_off_answer_has_no_items() -> None:
    """`ab` may go on to a second label when the limit ends it: it is no answer, though its first label is whole."""
    index = index_of([[3, 4], [5, 6]])
    model = enable(model_of("llama"))
    several: dict[str, Any] = {"constraint_index": index, "separator": SEPARATOR, "return_dict_in_generate": True}
    for length in range(3, 9):
        out = model.generate(PROMPT, num_beams=6, num_return_sequences=6, max_new_tokens=length, **several)
        for row, items in zip(out.sequences[:, PROMPT.shape[1] :].tolist(), out.item_ids, strict=True):
            assert bool(items) == (EOS in row), (row, items)


def test_classify_ranks_answers() -> None:
    """All answers of two labels are found, and each is as probable as generate says."""
    tokenizer = tokenizer_of("bpe")
    index = ConstraintIndex.from_labels(["Sports", "Science", "Deep learning"], tokenizer)
    model = build("llama", config={"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": EOS})
    several: dict[str, Any] = {"separator": ";", "max_labels": 2}
    found = classify(model, tokenizer, ["a", "sports"], index, top_k=None, prompt="{text}:", num_beams=40, **several)
    assert found.method == "beams"
    every = {("Sports",), ("Science",), ("Deep learning",)}
    every |= {(one, other) for (one,) in list(every) for (other,) in list(every) if one != other and (other,) in every}
    for text, ranked in zip(["a", "sports"], found, strict=True):
        assert {answer for answer, _ in ranked} == {answer for answer in every if len(answer) <= 2}
        assert math.isclose(sum(probability for _, probability in ranked), 1.0, abs_tol=1e-9)
        inputs = tokenizer(f"{text}:", return_tensors="pt")
        out = enable(model).generate(
            inputs["input_ids"],
            constraint_index=index,
            tokenizer=tokenizer,
            num_beams=40,
            num_return_sequences=9,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
            **several,
        )
        assert [tuple(items) for items in out.item_ids] == [answer for answer, _ in ranked]
        expected = out.sequences_scores.double().softmax(0).tolist()
        assert max(abs(math.log(p / q)) for (_, p), q in zip(ranked, expected, strict=True)) < SCORE_TOL
    calibrated = classify(
        model, tokenizer, ["N/A"], index, top_k=None, prompt="{text}:", num_beams=40, neutral_text="N/A", **several
    )
    assert [probability for _, probability in calibrated[0]] == pytest.approx([1 / 9] * 9, rel=SCORE_TOL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separator": [8]}, "separator is given without a limit, expected max_labels= or max_new_tokens="),
        ({"max_labels": 2}, "max_labels=2 without separator, expected both"),
        ({"separator": [8], "max_labels": 0}, "max_labels=0, expected 1 or more"),
        ({"separator": ";", "max_labels": 2}, "separator=';' is a text, expected tokenizer="),
        ({"separator": [4], "max_labels": 2}, "is also inside labels"),
        ({"separator": [99], "max_labels": 2}, "separator has token 99, expected less than the vocabulary, 32"),
        ({"separator": [8], "max_labels": 2, "drafting": "trie"}, "drafting='trie', expected no draft"),
        ({"separator": [8], "max_labels": 2, "constraint_index": False}, "given without constraint_index"),
        ({"separator": [8], "max_labels": 2, "seed": 1}, "seed is given, expected None in transformers' loop"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        enable(model_of("llama")).generate(PROMPT, **{"constraint_index": index_of(), **options})
