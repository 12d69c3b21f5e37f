# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`classify`: every label exactly or by beams, against a plain forward for each label; and what it refuses."""

from __future__ import annotations

import math
import pickle
import random
import sys
from typing import Any

import pytest
import torch
from families import build
from label_tokenizers import LABELS, tokenizer_of
from reference import reference_label_log_probs
from tokenizers.processors import TemplateProcessing

from hf_gr import ConstraintIndex, classify
from hf_gr.classification import label_search
from hf_gr.classification.result import RankedLabels

classify_module: Any = sys.modules["hf_gr.classification.classify"]
# Of log-probabilities, since these models are sure of themselves: fp32 sums of at most 13 of some tens.
LOG_TOL = 1e-4
TEXTS = ["a", "the technology of sports, and politics", "北京 {text} {}"]
PROMPT = '{"text": "{text}", "category":'  # other braces are themselves
EVERY: dict[str, Any] = {"top_k": None, "prompt": PROMPT}
Answers = dict[str, float]


def model_of(family: str, **kwargs: Any) -> Any:
    return build(family, config={"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": 0}, **kwargs)


def sure(family: str) -> Any:
    """A model with larger logits, as trained ones have them."""
    model = model_of(family)
    model.get_output_embeddings().weight.data *= 4
    return model


def index_of(labels: list[str] = LABELS, kind: str = "bpe") -> ConstraintIndex:
    return ConstraintIndex.from_labels(labels, tokenizer_of(kind))


def many_labels(number: int) -> list[str]:
    draw = random.Random(0)
    words = ["sport", "science", "and", "deep", "learning", ">", "2048", "café", "of"]
    return sorted({" ".join(draw.choices(words, k=draw.randrange(1, 5))) for _ in range(3 * number)})[:number]


def plainly(model: Any, text: str, index: ConstraintIndex) -> Answers:
    """The probability of every label, each by a plain forward of its own."""
    prompt = torch.tensor([tokenizer_of("bpe")(PROMPT.replace("{text}", text))["input_ids"]])

    @torch.no_grad()
    def logits(tokens: list[int]) -> Any:
        row = torch.tensor([tokens], dtype=torch.long)
        if model.config.is_encoder_decoder:
            start = torch.tensor([[model.config.decoder_start_token_id]])
            given = {"input_ids": prompt, "decoder_input_ids": torch.cat([start, row], dim=1)}
        else:
            given = {"input_ids": torch.cat([prompt, row], dim=1)}
        return model(**given, use_cache=False).logits[0, -len(tokens) - 1 :].double().numpy()

    rows = list(index)
    found = dict(zip(map(tuple, rows), map(math.exp, reference_label_log_probs(logits, rows)), strict=True))
    items = {row: index.items([row])[0] for row in found}
    return shares({str(item): found[row] / len(items[row]) for row in found for item in items[row]})


def shares(weights: Answers) -> Answers:
    return {label: weight / sum(weights.values()) for label, weight in weights.items()}


def difference(ranked: list[tuple[str, float]], expected: Answers) -> float:
    assert [p for _, p in ranked] == sorted((p for _, p in ranked), reverse=True)
    assert {label for label, _ in ranked} == set(expected)
    return max(abs(math.log(probability / expected[label])) for label, probability in ranked)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "t5", "bart"])
@pytest.mark.parametrize("how", ["in one piece", "in several", "by beams that find all"])
def test_labels_have_their_probability(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "in several":
        monkeypatch.setattr(label_search, "NODES_AT_ONCE", 3)
    model, index = model_of(family), index_of()
    most = {"max_tree_nodes": 0} if how.startswith("by beams") else {}
    ranked = classify(model, tokenizer_of("bpe"), TEXTS, index, batch_size=2, **most, **EVERY)
    for text, answer in zip(TEXTS, ranked, strict=True):
        assert difference(answer, plainly(model, text, index)) < LOG_TOL


def test_many_labels_have_their_probability() -> None:
    model, index = model_of("llama"), index_of(many_labels(60))
    (ranked,) = classify(model, tokenizer_of("bpe"), TEXTS[1:2], index, **EVERY)
    assert difference(ranked, plainly(model, TEXTS[1], index)) < LOG_TOL


def test_batches_of_any_size_and_order_give_the_same() -> None:
    model, tokenizer, index = model_of("gemma2"), tokenizer_of("bpe"), index_of()
    texts = [*TEXTS, "", "sports " * 20]
    expected = [classify(model, tokenizer, [text], index, top_k=None)[0] for text in texts]
    for batch_size in (2, 100):
        found = classify(model, tokenizer, iter(texts), index, top_k=None, batch_size=batch_size)
        for ours, theirs in zip(found, expected, strict=True):
            assert difference(ours, dict(theirs)) < LOG_TOL


@pytest.mark.filterwarnings("ignore:.*torch:DeprecationWarning", "ignore:.*deprecated:UserWarning")
def test_a_quantised_models_weights_are_no_tensors() -> None:
    model = torch.ao.quantization.quantize_dynamic(model_of("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    (ranked,) = classify(model, tokenizer_of("bpe"), TEXTS[:1], index_of(), **EVERY)
    assert {label for label, _ in ranked} == set(LABELS)
    assert sum(probability for _, probability in ranked) == pytest.approx(1)


def test_few_beams_give_upper_bounds_of_what_they_find() -> None:
    model, index = model_of("llama"), index_of()
    (exact,) = classify(model, tokenizer_of("bpe"), TEXTS[:1], index, top_k=None)
    (found,) = classify(model, tokenizer_of("bpe"), TEXTS[:1], index, top_k=3, max_tree_nodes=0, num_beams=1)
    assert len(found) == 3
    assert sum(probability for _, probability in found) == pytest.approx(1)
    assert all(probability >= dict(exact)[label] - LOG_TOL for label, probability in found)


@pytest.mark.parametrize(("nodes", "most"), [(1, 8192), (1000, 8192), (1000, 0)])
def test_labels_that_are_left_and_that_tokenize_alike(nodes: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several lengths, two of them one sequence, which they share; some were removed, and one was added."""
    monkeypatch.setattr(label_search, "NODES_AT_ONCE", nodes)
    model, tokenizer = model_of("llama"), tokenizer_of("wordpiece-uncased")
    left = ["Sports", "SPORTS", "science", "deep learning", "politics"]
    fresh = index_of(left, "wordpiece-uncased")
    (expected,) = classify(model, tokenizer, ["sports"], fresh, top_k=None)
    of = dict(expected)
    assert (len(fresh), of["Sports"], sum(of.values())) == (4, of["SPORTS"], pytest.approx(1))
    index = index_of(["science of sports", *left[:4], "Politics"], "wordpiece-uncased")
    index.remove(["science of sports", "Politics"])
    index.add(list(index_of(["politics"], "wordpiece-uncased")), item_ids=["politics"])
    view = index_of([*left, "technology"], "wordpiece-uncased").where(left)
    for one in (index, view):
        (found,) = classify(model, tokenizer, ["sports"], one, top_k=None, max_tree_nodes=most)
        assert difference(found, of) < LOG_TOL


def test_a_threshold_answers_none_of_them() -> None:
    model, tokenizer, index = model_of("llama"), tokenizer_of("bpe"), index_of()
    (ranked,) = classify(model, tokenizer, TEXTS[:1], index, top_k=None)
    assert classify(model, tokenizer, TEXTS[:1], index, top_k=None, threshold=ranked[1][1]) == [ranked[:2]]
    assert classify(model, tokenizer, TEXTS[:1], index.where(["sport", "北京"]), threshold=1.0) == [[]]


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_a_neutral_text_takes_the_labels_own_weight_away(family: str) -> None:
    """From all labels, and from those that beams find."""
    model, index = model_of(family), index_of()
    options: dict[str, Any] = {**EVERY, "neutral_text": "N/A", "batch_size": 2}
    texts, prior = [*TEXTS, "N/A"], plainly(model, "N/A", index)
    exact, found, few = (
        classify(model, tokenizer_of("bpe"), texts, index, **options, **beams)
        for beams in ({}, {"max_tree_nodes": 0}, {"max_tree_nodes": 0, "num_beams": 2})
    )
    for number, text in enumerate(texts):
        expected = shares({label: p / prior[label] for label, p in plainly(model, text, index).items()})
        assert difference(exact[number], expected) < 2 * LOG_TOL
        assert difference(found[number], expected) < 2 * LOG_TOL
        assert difference(few[number], shares({label: expected[label] for label, _ in few[number]})) < 2 * LOG_TOL
    assert [probability for _, probability in exact[-1]] == pytest.approx([1 / 7] * 7, rel=LOG_TOL)


@pytest.mark.parametrize(
    ("family", "keys", "tolerance"),
    [("llama", 1, 1e-3), ("gpt2", None, 0.3), ("gemma2", 1, 0.3), ("mistral", None, 1e-3), ("t5", 1, 1e-3)],
)
def test_a_bounded_search_finds_what_matters(
    family: str, keys: int | None, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels of at least the tolerance are there in the exact order; also where keys are forgotten again and again."""
    monkeypatch.setattr(classify_module, "LOGITS_AT_ONCE", 512)
    monkeypatch.setattr(label_search, "FIRST_NODES", 8)
    if keys is not None:
        monkeypatch.setattr(label_search, "KEYS_AT_ONCE", keys)
        monkeypatch.setattr(label_search, "NODES_AT_ONCE", 60)
    model, index = sure(family), index_of(many_labels(300))
    options: dict[str, Any] = {"prompt": PROMPT, "batch_size": 2, "tolerance": tolerance}
    exact, found, first = (
        classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=top_k, **options) for top_k in (None, 20, 1)
    )
    assert (found.method, exact.method, found.num_nodes) == ("bounded", "exact", exact.num_nodes)
    assert max(found.num_scored) < 0.9 * exact.num_nodes == 0.9 * exact.num_scored[0]
    for all_labels, ours, (best,) in zip(exact, found, first, strict=True):
        assert len(ours) == 20
        enough = [one for one in all_labels[:20] if one[1] >= tolerance]
        assert [label for label, _ in ours[: len(enough)]] == [label for label, _ in enough]
        for (_, probability), (_, expected) in zip(ours, enough, strict=False):
            assert expected * (1 - LOG_TOL) <= probability <= expected * (1 + tolerance + LOG_TOL)
        # The search may not end where one is found, while others hold much of the mass.
        assert best == (all_labels[0][0], pytest.approx(all_labels[0][1], rel=tolerance + LOG_TOL))


def test_the_result_says_how_labels_were_found(caplog: pytest.LogCaptureFixture) -> None:
    model, index = model_of("llama"), index_of()
    exact = classify(model, tokenizer_of("bpe"), TEXTS, index)
    nodes = len({tuple(row[:end]) for row in index for end in range(1, len(row))})
    first, *rows = repr(exact).splitlines()
    assert first == f"RankedLabels of 3 texts by 7 labels ({nodes} nodes): exact"
    assert [row.split("'")[1] for row in rows] == [labels[0][0] for labels in exact]
    assert exact.num_scored == [nodes] * 3
    assert classify(model, tokenizer_of("bpe"), TEXTS, index, max_tree_nodes=nodes - 1).method == "beams"
    assert f"7 labels have {nodes} nodes, more than max_tree_nodes={nodes - 1}" in caplog.text


def test_parents_have_the_sums_of_their_labels() -> None:
    model, tokenizer = model_of("llama"), tokenizer_of("bpe")
    model.lm_head.weight.data *= 0.1
    options = {"neutral_text": "N/A"}  # no label is impossible
    every = classify(model, tokenizer, TEXTS, index_of(), top_k=None, **options)
    named = {label: label.split(" > ")[:-1] for label in LABELS}
    for hierarchy, name in ((" > ", "Technology > AI"), (named, "AI")):
        found = classify(model, tokenizer, TEXTS, index_of(), top_k=1, hierarchy=hierarchy, **options)
        assert found.parents is not None
        for ranked, levels in zip(map(dict, every), found.parents, strict=True):
            deepest = ranked["Technology > AI > Deep learning"]
            assert min(deepest, ranked["Technology > AI"]) > 1e-6
            assert levels[0] == [("Technology", pytest.approx(deepest + ranked["Technology > AI"]))]
            assert levels[1] == [(name, pytest.approx(deepest))]
        again = pickle.loads(pickle.dumps(found))
        assert (again, again.parents, again.method) == (found, found.parents, "exact")
        assert again.metrics(["Sports"] * 3) == found.metrics(["Sports"] * 3)
    assert every.parents is None


def test_metrics_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draw = random.Random(1)
    right = [draw.choice(classes := ["A > a", "A > b", "B > a", "B > c > x", "C"]) for _ in range(60)]
    answers = [draw.sample(classes, 3) if draw.random() < 0.9 else [] for _ in right]
    sizes: dict[str, Any] = {"method": "exact", "num_labels": 5, "num_nodes": 9, "num_scored": [9] * 60}
    ranked = [[(label, 0.3) for label in labels] for labels in answers]
    first = [labels[0] if labels else "" for labels in answers]
    levels = RankedLabels(ranked, path_of=lambda label: label.split(" > "), **sizes).metrics(right)
    assert [level.level for level in levels] == [1, 2, 3]
    (whole,) = RankedLabels(ranked, **sizes).metrics(right)
    assert whole.level is None
    assert whole.accuracy_at_k == sum(r in labels for r, labels in zip(right, answers, strict=True)) / 60
    for level in (whole, *levels):
        depth = level.level or 0
        cut = [
            [" > ".join(label.split(" > ")[: depth or None]) for label in pair]
            for pair in zip(right, first, strict=True)
            if len(pair[0].split(" > ")) >= depth
        ]
        wanted, found = zip(*cut, strict=True)
        classes = [one for one in {*wanted, *found} if one]
        assert (level.num_texts, level.num_classes) == (len(cut), len(set(wanted)))
        assert level.accuracy == pytest.approx(metrics.accuracy_score(wanted, found))
        assert level.macro_f1 == pytest.approx(metrics.f1_score(wanted, found, labels=classes, average="macro"))
    for wrong, message in ((right[1:], "expected has 59 labels"), ([3, *right[1:]], r"expected\[0\] is 3")):
        with pytest.raises(ValueError, match=message):
            RankedLabels(ranked, **sizes).metrics(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("max_length", [None, 40])
def test_a_long_text_is_cut_and_the_template_is_not(max_length: int | None) -> None:
    model, tokenizer, index = model_of("gpt2"), tokenizer_of("bpe"), index_of()
    text, room = "science " * 500, max_length or 256 - index.max_length
    (found,) = classify(model, tokenizer, [text], index, max_length=max_length, **EVERY)
    sizes = {end: len(tokenizer(PROMPT.replace("{text}", text[:end]))["input_ids"]) for end in range(1200)}
    fitting = [end for end, size in sizes.items() if size <= room][-9:]  # a letter more may be a token less
    assert min(difference(found, plainly(model, text[:end], index)) for end in fitting) < LOG_TOL


def test_no_label_follows_the_tokenizers_own_end_token() -> None:
    model, tokenizer, index = model_of("llama"), pickle.loads(pickle.dumps(tokenizer_of("bpe"))), index_of()
    expected = classify(model, tokenizer, TEXTS, index)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    assert tokenizer("a")["input_ids"][-1] == 0
    assert classify(model, tokenizer, TEXTS, index) == expected


def test_the_model_stays_in_its_mode_and_is_not_enabled() -> None:
    model = model_of("llama", attn_implementation="eager").train()
    kind = type(model)
    first, second = (classify(model, tokenizer_of("bpe"), TEXTS, index_of()) for _ in range(2))
    assert first == second
    assert (model.training, type(model)) == (True, kind)


def test_progress_is_logged_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hf_gr.progress")
    classify(model_of("llama"), tokenizer_of("bpe"), TEXTS, index_of(), progress=False)
    assert not caplog.messages
    classify(model_of("llama"), tokenizer_of("bpe"), TEXTS, index_of())
    assert caplog.messages[-1].startswith("Classifying: 3 of 3 texts (100.0%)")


@pytest.mark.parametrize("nodes", [0, 100])
def test_logits_that_are_no_numbers_are_an_error_and_not_none_of_them(nodes: int) -> None:
    model = model_of("llama")
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match=r"model gives logits that are no numbers, in torch.float32"):
        classify(model, tokenizer_of("bpe"), TEXTS, index_of(), max_tree_nodes=nodes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": []}, "texts is empty"),
        ({"texts": "a text"}, "texts is 'a text', expected a list of strings"),
        ({"texts": ["a", 3]}, r"texts\[1\] is 3, expected a string"),
        ({"texts": ["a", "\udc80"]}, r"texts\[1\] is '\\udc80', expected Unicode without lone surrogates"),
        ({"prompt": "no place"}, "prompt is 'no place', expected a string with {text}"),
        ({"prompt": "{text} is a "}, "prompt ends with a space"),
        ({"prompt": "Sports " * 300 + "{text}:"}, "prompt has .* tokens without a text, expected less than"),
        ({"tokenizer": None}, "tokenizer is a NoneType"),
        ({"tokenizer": tokenizer_of("unigram")}, "tokenizer is not the one that the index was built with"),
        ({"index": ["Sports"]}, "index is a list, expected a ConstraintIndex"),
        ({"index": ConstraintIndex.from_sequences([[3, 4]])}, "index has numbers for item ids, expected labels"),
        ({"index": index_of().where([])}, "index has no living label"),
        ({"model": len}, "model is a builtin_function_or_method, expected a language model"),
        ({"model": type("FlaxModel", (), {"__module__": "hf_gr.flax.model"})()}, "FlaxModel, .* runs on PyTorch"),
        ({"model": build("llama")}, "index has token .*, expected less than the vocabulary, 64"),
        ({"model": build("mamba")}, r"cannot score the nodes of a tree, .* generate\(constraint_index=...\)"),
        ({"model": build("bloom")}, "cannot score the nodes of a tree"),
        ({"top_k": 0}, "top_k=0, expected 1 or more"),
        ({"batch_size": 0}, "batch_size=0, expected 1 or more"),
        ({"num_beams": 1.5}, "num_beams=1.5, expected 1 or more"),
        ({"max_tree_nodes": -1}, "max_tree_nodes=-1, expected 0"),
        ({"neutral_text": 3}, "neutral_text=3, expected None or a string"),
        ({"tolerance": 2}, "tolerance=2, expected a relative error"),
        ({"hierarchy": 3}, "hierarchy=3, expected what is between the levels"),
        ({"hierarchy": {"Sports": []}}, r"hierarchy\['Technology'\] is None, expected the list of its parents"),
        ({"separator": ";"}, "separator=';' and max_labels=None, expected both"),
        ({"separator": ";", "max_labels": 2, "hierarchy": " > "}, "hierarchy and separator are given"),
        ({"separator": [600], "max_labels": 2}, "separator has token 600, expected less than the vocabulary"),
        ({"threshold": 50}, "threshold=50, expected a probability"),
        ({"max_length": 300}, "max_length=300, expected at most"),
        ({"max_length": 0}, "max_length=0, expected 1 or more tokens"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"model": model_of("llama"), "tokenizer": tokenizer_of("bpe"), "texts": TEXTS, "index": index_of()}
    with pytest.raises(ValueError, match=message):
        classify(**{**given, **changes})
