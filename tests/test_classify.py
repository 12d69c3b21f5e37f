# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`classify`: every label exactly or by beams, against a plain forward for each label; and what it refuses."""

from __future__ import annotations

import math
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import build
from label_tokenizers import tokenizer_of
from reference import reference_label_log_probs

from hf_gr import ConstraintIndex, classify, enable
from hf_gr.classification import label_search, prompts
from hf_gr.classification.result import RankedLabels

classify_module: Any = sys.modules["hf_gr.classification.classify"]
# Of log-probabilities, since these models are sure of themselves: fp32 sums of at most 13 of some tens.
LOG_TOL = 1e-4
LABELS = [
    "Technology",
    "Technology > AI",
    "Technology > AI > Deep learning",
    "Sports",
    "sport",
    "Café & crème",
    "北京",
]
TEXTS = ["a", "the technology of sports, and politics", "北京"]
PROMPT = "Text: {text}\nCategory:"


def model_of(family: str, **kwargs: Any) -> Any:
    return build(family, config={"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": 0}, **kwargs)


def index_of(labels: list[str] = LABELS, kind: str = "bpe") -> ConstraintIndex:
    return ConstraintIndex.from_labels(labels, tokenizer_of(kind))


def plainly(model: Any, text: str, index: ConstraintIndex, prompt: str = PROMPT) -> dict[str, float]:
    """The probability of every label, each by a plain forward of its own."""
    prompt_ids = tokenizer_of("bpe")(prompt.replace("{text}", text))["input_ids"]

    @torch.no_grad()
    def logits(tokens: list[int]) -> Any:
        if model.config.is_encoder_decoder:
            start = model.config.decoder_start_token_id
            out = model(
                input_ids=torch.tensor([prompt_ids]),
                decoder_input_ids=torch.tensor([[start, *tokens]]),
                use_cache=False,
            )
        else:
            out = model(torch.tensor([[*prompt_ids, *tokens]]), use_cache=False)
        return out.logits[0, -len(tokens) - 1 :].double().numpy()

    rows = list(index)
    log_probs = reference_label_log_probs(logits, rows)
    total = sum(math.exp(value) for value in log_probs)
    found: dict[str, float] = {}
    for row, value in zip(rows, log_probs, strict=True):
        labels = index.items([row])[0]
        found |= {str(label): math.exp(value) / total / len(labels) for label in labels}
    return found


def difference(ranked: list[tuple[str, float]], expected: dict[str, float]) -> float:
    assert [p for _, p in ranked] == sorted((p for _, p in ranked), reverse=True)
    assert {label for label, _ in ranked} == set(expected)
    return max(abs(math.log(probability / expected[label])) for label, probability in ranked)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "t5", "bart"])
@pytest.mark.parametrize("nodes", [None, 3])
def test_the_tree_equals_a_forward_for_each_label(
    family: str, nodes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece and in several; batches with padding; levels together and one after the other."""
    if nodes is not None:
        monkeypatch.setattr(label_search, "NODES_AT_ONCE", nodes)
    model, index = model_of(family), index_of()
    ranked = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=None, prompt=PROMPT, batch_size=2)
    for text, answer in zip(TEXTS, ranked, strict=True):
        assert difference(answer, plainly(model, text, index)) < LOG_TOL


@pytest.mark.filterwarnings("ignore:.*torch:DeprecationWarning", "ignore:.*deprecated:UserWarning")
def test_a_quantised_models_weights_are_no_tensors() -> None:
    model = torch.ao.quantization.quantize_dynamic(model_of("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    (ranked,) = classify(model, tokenizer_of("bpe"), TEXTS[:1], index_of(), top_k=None, prompt=PROMPT)
    assert {label for label, _ in ranked} == set(LABELS)
    assert sum(probability for _, probability in ranked) == pytest.approx(1)


@pytest.mark.parametrize("family", ["mamba", "bloom"])
def test_a_model_that_takes_no_tree_is_refused(family: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8} if family == "mamba" else {}
    model = build(family, config={"vocab_size": 512, **sizes})
    with pytest.raises(
        ValueError, match=r"which cannot score the nodes of a tree, .* generate\(constraint_index=...\)"
    ):
        classify(model, tokenizer_of("bpe"), TEXTS, index_of())


def test_a_thousand_labels_are_scored_as_by_themselves() -> None:
    draw = random.Random(0)
    words = ["sport", "science", "and", "deep", "learning", ">", "2048", "café", "of"]
    labels = sorted({" ".join(draw.choices(words, k=draw.randrange(1, 5))) for _ in range(3000)})[:1000]
    assert len(labels) == 1000
    model, index = model_of("llama"), index_of(labels)
    (ranked,) = classify(model, tokenizer_of("bpe"), TEXTS[1:2], index, top_k=None, prompt=PROMPT)
    assert difference(ranked, plainly(model, TEXTS[1], index)) < LOG_TOL


def test_a_wrong_parent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: every node hangs below the first of its level."""
    ancestry = label_search._Batch._ancestry
    model, index = model_of("llama"), index_of()
    monkeypatch.setattr(
        label_search._Batch, "_ancestry", lambda self, nodes: ancestry(self, nodes)[:, [0] * nodes.shape[1]]
    )
    (ranked,) = classify(model, tokenizer_of("bpe"), TEXTS[1:2], index, top_k=None, prompt=PROMPT)
    assert difference(ranked, plainly(model, TEXTS[1], index)) > 10 * LOG_TOL


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_beams_that_find_everything_equal_the_tree(family: str) -> None:
    model, index = model_of(family), index_of()
    every: dict[str, Any] = {"top_k": None, "prompt": PROMPT}
    exact = classify(model, tokenizer_of("bpe"), TEXTS, index, **every)
    found = classify(model, tokenizer_of("bpe"), TEXTS, index, **every, max_tree_nodes=0)
    for ours, theirs in zip(found, exact, strict=True):
        assert difference(ours, dict(theirs)) < LOG_TOL


def test_few_beams_give_upper_bounds_of_what_they_find() -> None:
    model, index = model_of("llama"), index_of()
    (exact,) = classify(model, tokenizer_of("bpe"), TEXTS[:1], index, top_k=None)
    (found,) = classify(model, tokenizer_of("bpe"), TEXTS[:1], index, top_k=3, max_tree_nodes=0, num_beams=1)
    assert len(found) == 3
    assert math.isclose(sum(probability for _, probability in found), 1.0, abs_tol=1e-9)
    assert all(probability >= dict(exact)[label] - LOG_TOL for label, probability in found)


def test_the_best_label_is_the_one_that_generate_finds() -> None:
    model, tokenizer, index = model_of("llama"), tokenizer_of("bpe"), index_of()
    enabled = enable(model_of("llama"))
    for text in TEXTS:
        inputs = tokenizer(PROMPT.replace("{text}", text), return_tensors="pt")
        out = enabled.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            constraint_index=index,
            num_beams=len(LABELS),
            num_return_sequences=len(LABELS),
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        generated = [items[0] for items in index.items(out.sequences[:, inputs["input_ids"].shape[1] :])]
        (ranked,) = classify(model, tokenizer, [text], index, top_k=None, prompt=PROMPT)
        assert [label for label, _ in ranked] == generated
        expected = out.sequences_scores.double().softmax(0).tolist()
        assert max(abs(math.log(p / q)) for (_, p), q in zip(ranked, expected, strict=True)) < LOG_TOL


def test_batches_of_any_size_and_order_give_the_same() -> None:
    model, tokenizer, index = model_of("gemma2"), tokenizer_of("bpe"), index_of()
    texts = [*TEXTS, "", "sports " * 20]
    expected = [classify(model, tokenizer, [text], index, top_k=None)[0] for text in texts]
    for batch_size in (2, 5, 100):
        found = classify(model, tokenizer, iter(texts), index, top_k=None, batch_size=batch_size, progress=False)
        for ours, theirs in zip(found, expected, strict=True):
            assert difference(ours, dict(theirs)) < LOG_TOL


def test_labels_that_tokenize_alike_share() -> None:
    tokenizer = tokenizer_of("wordpiece-uncased")
    labels = ["Sports", "SPORTS", "science", "politics"]
    index = ConstraintIndex.from_labels(labels, tokenizer)
    assert len(index) == 3
    for nodes in (0, 100):
        (ranked,) = classify(model_of("llama"), tokenizer, ["sports"], index, top_k=None, max_tree_nodes=nodes)
        probabilities = dict(ranked)
        assert probabilities["Sports"] == probabilities["SPORTS"]
        assert set(probabilities) == set(labels)
        assert math.isclose(sum(probabilities.values()), 1.0, abs_tol=1e-9)


@pytest.mark.parametrize("nodes", [1, 2, 1000])
def test_pieces_of_what_is_left_of_a_label_set(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of several lengths, two of them one sequence, some removed and one added since."""
    monkeypatch.setattr(label_search, "NODES_AT_ONCE", nodes)
    model, tokenizer = model_of("llama"), tokenizer_of("wordpiece-uncased")
    left = ["Sports", "SPORTS", "science", "deep learning", "politics"]
    index = ConstraintIndex.from_labels(["science of sports", *left[:4], "Politics"], tokenizer)
    index.remove(["science of sports", "Politics"])
    index.add(list(ConstraintIndex.from_labels(["politics"], tokenizer)), item_ids=["politics"])
    fresh = ConstraintIndex.from_labels(left, tokenizer)
    (found,) = classify(model, tokenizer, ["sports"], index, top_k=None)
    (expected,) = classify(model, tokenizer, ["sports"], fresh, top_k=None)
    assert found == expected


def test_a_threshold_answers_none_of_them() -> None:
    model, tokenizer, index = model_of("llama"), tokenizer_of("bpe"), index_of()
    (ranked,) = classify(model, tokenizer, TEXTS[:1], index, top_k=None)
    second = ranked[1][1]
    (above,) = classify(model, tokenizer, TEXTS[:1], index, top_k=None, threshold=second)
    assert above == ranked[:2]
    (nothing,) = classify(model, tokenizer, TEXTS[:1], index.where(["sport", "北京"]), threshold=1.0)
    assert nothing == []


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_a_neutral_text_takes_the_labels_own_weight_away(family: str) -> None:
    model, index = model_of(family), index_of()
    ranked = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=None, prompt=PROMPT, neutral_text="N/A")
    prior = plainly(model, "N/A", index)
    for text, labels in zip(TEXTS, ranked, strict=True):
        shares = {label: probability / prior[label] for label, probability in plainly(model, text, index).items()}
        total = sum(shares.values())
        assert difference(labels, {label: share / total for label, share in shares.items()}) < 2 * LOG_TOL
    # The neutral text itself says nothing.
    ((*same,),) = classify(model, tokenizer_of("bpe"), ["N/A"], index, top_k=None, prompt=PROMPT, neutral_text="N/A")
    assert [probability for _, probability in same] == pytest.approx([1 / len(LABELS)] * len(LABELS))


def test_what_beams_find_is_calibrated() -> None:
    """Beams that find everything give what the tree gives; few beams rank what they find by the same ratios."""
    model, index = model_of("qwen3"), index_of()
    options: dict[str, Any] = {"top_k": None, "prompt": PROMPT, "neutral_text": "N/A"}
    exact = classify(model, tokenizer_of("bpe"), TEXTS, index, **options)
    found = classify(model, tokenizer_of("bpe"), TEXTS, index, **options, max_tree_nodes=0, batch_size=2)
    for ours, theirs in zip(found, exact, strict=True):
        assert difference(ours, dict(theirs)) < 2 * LOG_TOL
    few = classify(model, tokenizer_of("bpe"), TEXTS, index, **options, max_tree_nodes=0, num_beams=2)
    for ours, theirs in zip(few, exact, strict=True):
        total = sum(dict(theirs)[label] for label, _ in ours)
        assert difference(ours, {label: dict(theirs)[label] / total for label, _ in ours}) < 2 * LOG_TOL


def many_labels(number: int) -> list[str]:
    draw = random.Random(0)
    words = ["sport", "science", "and", "deep", "learning", ">", "2048", "café", "of"]
    return sorted({" ".join(draw.choices(words, k=draw.randrange(1, 5))) for _ in range(3 * number)})[:number]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "t5"])
@pytest.mark.parametrize(("keys", "tolerance"), [(None, 1e-3), (1, 1e-3), (None, 0.3)])
def test_a_bounded_search_finds_what_matters(
    family: str, keys: int | None, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels of at least the tolerance are there in the exact order; also where keys are forgotten again and again."""
    monkeypatch.setattr(classify_module, "LOGITS_AT_ONCE", 512)
    monkeypatch.setattr(label_search, "FIRST_NODES", 8)
    if keys is not None:
        monkeypatch.setattr(label_search, "KEYS_AT_ONCE", keys)
        monkeypatch.setattr(label_search, "NODES_AT_ONCE", 60)
    model, index = sure(model_of(family)), index_of(many_labels(300))
    options: dict[str, Any] = {"prompt": PROMPT, "batch_size": 2}
    found = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=20, tolerance=tolerance, **options)
    exact = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=None, **options)
    assert (found.method, exact.method, found.num_nodes) == ("bounded", "exact", exact.num_nodes)
    assert max(found.num_scored) < 0.9 * exact.num_nodes == 0.9 * exact.num_scored[0]
    for ours, theirs in zip(found, exact, strict=True):
        for (label, probability), (wanted, expected) in zip(ours, theirs, strict=False):
            if expected < tolerance:
                break
            assert label == wanted
            assert expected * (1 - LOG_TOL) <= probability <= expected * (1 + tolerance + LOG_TOL)
        assert len(ours) == 20
    # The first label alone: the search may not end where one is found, while others hold much of the mass.
    first = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=1, tolerance=tolerance, **options)
    for ((label, probability),), ((wanted, expected), *_) in zip(first, exact, strict=True):
        assert (label, probability) == (wanted, pytest.approx(expected, rel=tolerance + LOG_TOL))


def sure(model: Any) -> Any:
    """The same model with larger logits, as trained ones have them."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    return model


def test_a_search_that_stops_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: what is left counts for less than it is."""
    monkeypatch.setattr(classify_module, "LOGITS_AT_ONCE", 512)
    monkeypatch.setattr(label_search, "FIRST_NODES", 8)
    model, index = sure(model_of("llama")), index_of(many_labels(300))
    options: dict[str, Any] = {"prompt": PROMPT, "batch_size": 1}
    exact = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=None, **options)
    init = label_search.TreeSearch.__init__
    monkeypatch.setattr(
        label_search.TreeSearch, "__init__", lambda self, *args, **kw: init(self, *args, **(kw | {"tolerance": 1e9}))
    )
    found = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=1, **options)
    assert any(
        abs(ours[0][1] / dict(theirs)[ours[0][0]] - 1) > 0.001 for ours, theirs in zip(found, exact, strict=True)
    )


def test_the_result_says_how_labels_were_found(caplog: pytest.LogCaptureFixture) -> None:
    model, index = model_of("llama"), index_of()
    exact = classify(model, tokenizer_of("bpe"), TEXTS, index)
    nodes = len(prefixes_of(list(index)))
    first, *rows = repr(exact).splitlines()
    assert first == f"RankedLabels of 3 texts by 7 labels ({nodes} nodes): exact"
    assert [row.split("'")[1] for row in rows] == [labels[0][0] for labels in exact]
    assert exact.num_scored == [nodes] * 3
    searched = classify(model, tokenizer_of("bpe"), TEXTS, index, max_tree_nodes=nodes - 1)
    assert searched.method == "beams"
    assert f"7 labels have {nodes} nodes, more than max_tree_nodes={nodes - 1}" in caplog.text


def test_parents_have_the_sums_of_their_labels() -> None:
    model, index = model_of("llama"), index_of()
    every = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=None)
    named = {label: label.split(" > ")[:-1] for label in LABELS}
    for hierarchy in (" > ", named):
        found = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=1, hierarchy=hierarchy)
        assert found.parents is not None
        for ranked, (top, second) in zip(every, found.parents, strict=True):
            below = [p for label, p in ranked if label.startswith("Technology > ")]
            assert top == [("Technology", pytest.approx(sum(below)))]
            name = "Technology > AI" if hierarchy == " > " else "AI"
            assert second == [(name, pytest.approx(dict(ranked)["Technology > AI > Deep learning"]))]
    assert every.parents is None
    again = pickle.loads(pickle.dumps(found))
    assert (again, again.parents, again.method) == (found, found.parents, "exact")
    assert again.metrics(["Sports"] * 3) == found.metrics(["Sports"] * 3)


def test_metrics_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draw = random.Random(1)
    classes = ["A > a", "A > b", "B > a", "B > c > x", "C"]
    right = [draw.choice(classes) for _ in range(60)]
    answers = [draw.sample(classes, 3) if draw.random() < 0.9 else [] for _ in right]
    ranked = [[(label, 0.3) for label in labels] for labels in answers]
    sizes: dict[str, Any] = {"method": "exact", "num_labels": 5, "num_nodes": 9, "num_scored": [9] * 60}
    (whole,) = RankedLabels(ranked, **sizes).metrics(right)
    first = [labels[0] if labels else "" for labels in answers]
    wanted = [one for one in {*right, *first} if one]
    assert whole.level is None
    assert whole.accuracy == pytest.approx(metrics.accuracy_score(right, first))
    assert whole.macro_f1 == pytest.approx(metrics.f1_score(right, first, labels=wanted, average="macro"))
    assert whole.accuracy_at_k == sum(r in labels for r, labels in zip(right, answers, strict=True)) / 60
    levels = RankedLabels(ranked, path_of=lambda label: label.split(" > "), **sizes).metrics(right)
    assert [level.level for level in levels] == [1, 2, 3]
    for level in levels:
        cut = [
            (" > ".join(r.split(" > ")[: level.level]), " > ".join(f.split(" > ")[: level.level]))
            for r, f in zip(right, first, strict=True)
            if level.level is not None and len(r.split(" > ")) >= level.level
        ]
        of_right, of_first = zip(*cut, strict=True)
        wanted = [one for one in {*of_right, *of_first} if one]
        assert level.num_texts == len(cut)
        assert level.accuracy == pytest.approx(metrics.accuracy_score(of_right, of_first))
        assert level.macro_f1 == pytest.approx(metrics.f1_score(of_right, of_first, labels=wanted, average="macro"))
    for wrong, message in ((right[1:], "expected has 59 labels"), ([3, *right[1:]], r"expected\[0\] is 3")):
        with pytest.raises(ValueError, match=message):
            RankedLabels(ranked, **sizes).metrics(wrong)  # pyright: ignore[reportArgumentType]


def test_a_view_is_a_smaller_label_set_and_additions_belong_to_it() -> None:
    model, tokenizer = model_of("llama"), tokenizer_of("bpe")
    smaller = ["Sports", "Technology", "北京"]
    (expected,) = classify(model, tokenizer, TEXTS[:1], index_of(smaller), top_k=None)
    changed = index_of(["Technology", "Technology > AI"])
    added = index_of(["Sports", "北京"])
    changed.add(list(added), item_ids=["Sports", "北京"])
    changed.remove(["Technology > AI"])
    for index in (index_of().where(smaller), changed):
        for nodes in (0, 100):
            (ranked,) = classify(model, tokenizer, TEXTS[:1], index, top_k=None, max_tree_nodes=nodes)
            assert difference(ranked, dict(expected)) < LOG_TOL


def test_a_long_text_is_cut_and_the_template_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, index = model_of("gpt2"), tokenizer_of("bpe"), index_of()
    seen: list[list[int]] = []
    encode = prompts.PromptEncoder.encode

    def spy(self: Any, texts: Any) -> Any:
        rows = encode(self, texts)
        seen.extend(rows)
        return rows

    monkeypatch.setattr(prompts.PromptEncoder, "encode", spy)
    (long,) = classify(model, tokenizer, ["science " * 500], index, prompt=PROMPT, top_k=None)
    assert len(seen[0]) <= 256 - index.max_length
    text = tokenizer.decode(seen[0])
    assert text.startswith("Text: science science")
    assert text.endswith("\nCategory:")
    cut = text.removeprefix("Text: ").removesuffix("\nCategory:")
    assert "science " * 500 != cut
    assert ("science " * 500).startswith(cut)
    assert difference(long, plainly(model, cut, index)) < LOG_TOL
    classify(model, tokenizer, ["science " * 500], index, prompt=PROMPT, max_length=20)
    assert len(seen[1]) <= 20


def test_braces_of_a_prompt_are_themselves() -> None:
    model, index = model_of("llama"), index_of()
    prompt = '{"text": "{text}", "label":'
    (ranked,) = classify(model, tokenizer_of("bpe"), TEXTS[:1], index, top_k=None, prompt=prompt)
    assert difference(ranked, plainly(model, TEXTS[0], index, prompt)) < LOG_TOL


def test_the_model_stays_in_its_mode_and_is_not_enabled() -> None:
    model = model_of("llama", attn_implementation="eager").train()
    kind = type(model)
    first, second = (classify(model, tokenizer_of("bpe"), TEXTS, index_of()) for _ in range(2))
    assert first == second
    assert model.training
    assert type(model) is kind


def test_progress_is_logged_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("llama")
    caplog.set_level("INFO", "hf_gr.progress")
    classify(model, tokenizer_of("bpe"), TEXTS, index_of(), progress=False)
    assert not caplog.messages
    classify(model, tokenizer_of("bpe"), TEXTS, index_of())
    assert caplog.messages[-1].startswith("Classifying: 3 of 3 texts (100.0%)")


@pytest.mark.parametrize("nodes", [0, 100])
def test_logits_that_are_no_numbers_are_an_error_and_not_none_of_them(nodes: int) -> None:
    model = model_of("llama")
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match="model gives logits that are no numbers, in torch.float32"):
        classify(model, tokenizer_of("bpe"), TEXTS, index_of(), max_tree_nodes=nodes)


def test_nodes_go_depth_first_and_rows_as_their_leaves() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        drawn = {
            tuple(draw.randrange(1, 4) for _ in range(draw.randrange(1, 5))) for _ in range(draw.randrange(1, 30))
        }
        index = ConstraintIndex.from_sequences([list(row) for row in drawn], eos_token_id=0)
        edges = label_search.Edges.of(trie := index.snapshot.trie)
        paths = [()]
        for node in range(1, len(edges.parents)):
            paths.append((*paths[edges.parents[node]], int(edges.tokens[node])))
        inner = sorted(prefixes_of(rows := list(index)))
        assert [paths[node] for node in edges.depth_first()] == inner  # as texts are sorted
        assert label_search.num_inner_nodes(trie) == len(inner)
        leaves = [paths[node] for node in np.flatnonzero(~edges.is_inner)]
        assert sorted(leaves) == sorted(map(tuple, rows))
        assert [tuple(row[row >= 0].tolist()) for row in trie.sequences(np.arange(len(rows)))] == leaves


def prefixes_of(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[:end]) for row in rows for end in range(1, len(row))}


def call(**changes: Any) -> Callable[[], Any]:
    def made() -> Any:
        given: dict[str, Any] = {"texts": TEXTS, "index": index_of(), "model": model_of("llama"), "tokenizer": None}
        given = {**given, "tokenizer": tokenizer_of("bpe"), **changes}
        return classify(**given)

    return made


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
    with pytest.raises(ValueError, match=message):
        call(**changes)()
