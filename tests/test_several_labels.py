# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers of several labels in `generate` and `classify`, against transformers' loop with the processor."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from families import DETAILS, build
from label_tokenizers import tokenizer_of
from transformers import GenerationMixin

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor, classify, enable

SCORE_TOL = 1e-4  # fp32: sums of at most 20 log-probabilities
EOS = 0
NAMES = {"a": [3], "ab": [3, 4], "cd": [5, 6], "cea": [5, 7, 3], "dab": [6, 3, 4]}
INDEX = ConstraintIndex.from_sequences(list(NAMES.values()), item_ids=list(NAMES), eos_token_id=EOS)
PROMPT = torch.tensor([[10, 11, 12], [13, 14, 15]])
SEVERAL = {"separator": [8, 9], "max_labels": 2}


def model_of(family: str, vocab_size: int = 32) -> Any:
    return enable(build(family, config={"eos_token_id": EOS, "pad_token_id": 1, "vocab_size": vocab_size}))


def generate(num_beams: int, **options: Any) -> Any:
    beams = {"num_beams": num_beams, "num_return_sequences": num_beams}
    return model_of("llama").generate(PROMPT, **{"constraint_index": INDEX, **DETAILS, **SEVERAL, **beams, **options})


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("max_labels", [None, 1, 2])
@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("rules", ["all", "views", "excluded"])
def test_answers_are_those_of_the_processor(family: str, max_labels: int | None, num_beams: int, rules: str) -> None:
    index = [INDEX.where(["a", "cd"]), INDEX] if rules == "views" else INDEX
    exclude = [["a"], ["ab", "dab"]] if rules == "excluded" else None
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": num_beams, "do_sample": False}
    options |= {"length_penalty": 0.0, "max_new_tokens": 9, **DETAILS}
    several: dict[str, Any] = {"separator": [8, 9], "max_labels": max_labels}
    model = model_of(family)
    start = 1 if model.config.is_encoder_decoder else PROMPT.shape[1]
    processor = ConstraintLogitsProcessor(index, start, exclude_items=exclude, **several)
    theirs = GenerationMixin.generate(model, PROMPT, logits_processor=[processor], **options)
    ours = model.generate(PROMPT, constraint_index=index, exclude_items=exclude, **several, **options)
    assert ours.item_ids == processor.items(ours.sequences[:, start:])
    for number, items in enumerate(ours.item_ids):
        assert len(items) == len(set(items))
        is_first = number < num_beams
        gone = {"all": (), "views": ("ab", "cea", "dab"), "excluded": ("a",)}[rules] if is_first else ()
        assert not set(items) & set(gone)
    if num_beams > 1:
        is_there = theirs.sequences_scores > -1e5  # transformers fills up with what is no answer
        assert torch.allclose(ours.sequences_scores[is_there], theirs.sequences_scores[is_there], atol=SCORE_TOL)
        assert not ours.sequences_scores[~is_there].isfinite().any()
    else:
        width = min(ours.sequences.shape[1], theirs.sequences.shape[1])
        assert ours.sequences[:, :width].tolist() == theirs.sequences[:, :width].tolist()


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 8.0])
def test_rows_without_an_answer_of_their_own_are_missing(length_penalty: float) -> None:
    others = ["ab", "cd", "cea"]
    out = generate(3, exclude_items=[others, []], max_labels=1, max_new_tokens=6, length_penalty=length_penalty)
    assert {tuple(items) for items in out.item_ids[:3]} == {("a",), ("dab",), ()}  # two labels are left
    assert out.sequences_scores[:3].isfinite().tolist() == [True, True, False]
    assert all(out.item_ids[3:])
    nothing = generate(1, exclude_items=[list(NAMES), []], max_labels=1)
    assert (nothing.sequences[0, PROMPT.shape[1] :] == 1).all()


def test_a_cut_off_answer_has_no_items() -> None:
    """`ab` may continue to a second label when the limit ends it: it is no answer, though its first label is whole."""
    for length in range(4, 10):
        out = generate(6, max_labels=None, max_new_tokens=length)
        for row, items in zip(out.sequences[:, PROMPT.shape[1] :].tolist(), out.item_ids, strict=True):
            assert bool(items) == (EOS in row), (row, items)


def test_samples_are_answers_and_a_text_is_a_separator() -> None:
    tokenizer = tokenizer_of("bpe")
    index = ConstraintIndex.from_labels(["Sports", "Science", "Deep learning"], tokenizer)
    inputs = tokenizer("a text", return_tensors="pt")
    several: dict[str, Any] = {"constraint_index": index, "separator": ";", "max_labels": 2, "tokenizer": tokenizer}
    torch.manual_seed(3)
    samples = {"do_sample": True, "num_return_sequences": 20}
    out = model_of("llama", 512).generate(**inputs, **several, **samples, return_dict_in_generate=True)
    assert {len(items) for items in out.item_ids} == {1, 2}
    assert all(len(set(items)) == len(items) for items in out.item_ids)


@pytest.mark.parametrize("score", ["sum", "renormalized", "mean", "pmi"])
def test_classify_ranks_sets_of_labels(score: Any) -> None:
    """All answers of two labels are found; "A;B" and "B;A" are one, as probable as generate says of both together."""
    tokenizer, model = tokenizer_of("bpe"), model_of("llama", 512)
    labels = ["Sports", "Science", "Deep learning"]
    index = ConstraintIndex.from_labels(labels, tokenizer)
    several: dict[str, Any] = {"separator": ";", "max_labels": np.int64(2), "num_beams": 40}
    how: dict[str, Any] = {"top_k": None, "prompt": "{text}:", "score": score, **several}
    renormalize = score == "renormalized"

    def summed(text: str) -> tuple[dict[frozenset[str], float], dict[frozenset[str], int]]:
        beams = {"num_return_sequences": 9, "length_penalty": 0.0, "renormalize_logits": renormalize, **DETAILS}
        inputs = tokenizer(f"{text}:", return_tensors="pt")
        out = model.generate(**inputs, constraint_index=index, tokenizer=tokenizer, **several, **beams)
        rows = out.sequences[:, inputs["input_ids"].shape[1] :]
        sums: dict[frozenset[str], float] = {}
        sizes: dict[frozenset[str], int] = {}
        for items, row, own in zip(out.item_ids, rows.tolist(), out.sequences_scores.double().tolist(), strict=True):
            sums[frozenset(items)] = float(np.logaddexp(sums.get(frozenset(items), -math.inf), own))
            sizes[frozenset(items)] = row.index(EOS) + 1
        return sums, sizes

    found = classify(model, tokenizer, ["a", "sports"], index, **how)
    assert (found.method, found.each is not None) == ("beams", True)
    for number, (text, ranked) in enumerate(zip(["a", "sports"], found, strict=True)):
        sums, sizes = summed(text)
        priors = summed("N/A")[0]
        scores = {
            answer: own / sizes[answer] if score == "mean" else own - priors[answer] if score == "pmi" else own
            for answer, own in sums.items()
        }
        left, total = 1 - sum(map(math.exp, sums.values())), sum(map(math.exp, scores.values()))
        assert found.mass_left[number] == pytest.approx(max(left, 0), abs=1e-5)
        expected = {answer: (1 - left) * math.exp(own) / total for answer, own in scores.items()}
        assert {frozenset(answer): p for answer, p in ranked} == pytest.approx(expected, rel=SCORE_TOL)
        each = {label: sum(p for answer, p in ranked if label in answer) for label in labels}
        assert dict(found.each[number] if found.each else []) == pytest.approx(each)


def test_an_answer_has_no_more_labels_than_there_are() -> None:
    several: dict[str, Any] = {"max_labels": 10**6, "num_beams": 2}
    assert (
        generate(**several).sequences.tolist() == generate(**{**several, "max_labels": len(NAMES)}).sequences.tolist()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_labels": None}, "separator is given without a limit, expected max_labels= or max_new_tokens="),
        ({"separator": None}, "max_labels=2 without separator, expected both"),
        ({"separator": [99]}, "separator has token 99, expected less than the vocabulary, 32"),
        ({"drafting": "trie"}, "drafting='trie', expected no draft"),
        ({"constraint_index": False}, "given without constraint_index"),
        ({"seed": 1}, "seed is given, expected None in transformers' loop"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(1, **options)
