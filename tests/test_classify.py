# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`classify`: every label exactly or by beams, against a plain forward for each label; and what it refuses."""

import math
import pickle
import random
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from families import build
from label_tokenizers import LABELS, tokenizer_of
from reference import reference_label_scores
from sklearn import metrics
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


def plainly(
    model: Any, text: str, index: ConstraintIndex, score: str = "renormalized", known: dict[Any, Any] | None = None
) -> Answers:
    """The probability of every label, each by a plain forward of its own; `known` ones are not run again."""
    known = {} if known is None else known

    def after(text: str, tokens: list[int]) -> Any:
        if (key := (text, *tokens)) not in known:
            known[key] = forward(text, tokens)
        return known[key]

    @torch.no_grad()
    def forward(text: str, tokens: list[int]) -> Any:
        prompt = torch.tensor([tokenizer_of("bpe")(PROMPT.replace("{text}", text))["input_ids"]])
        row = torch.tensor([tokens], dtype=torch.long)
        if model.config.is_encoder_decoder:
            start = torch.tensor([[model.config.decoder_start_token_id]])
            given = {"input_ids": prompt, "decoder_input_ids": torch.cat([start, row], dim=1)}
        else:
            given = {"input_ids": torch.cat([prompt, row], dim=1)}
        return model(**given, use_cache=False).logits[0, -len(tokens) - 1 :].double().numpy()

    rows = list(index)
    scores = reference_label_scores(score, rows, partial(after, text), partial(after, "N/A"))
    found = {tuple(row): math.exp(one - max(scores)) for row, one in zip(rows, scores, strict=True)}
    items = {row: index.items([row])[0] for row in found}
    return shares({str(item): found[row] / len(items[row]) for row in found for item in items[row]})


def shares(weights: Answers) -> Answers:
    return {label: weight / sum(weights.values()) for label, weight in weights.items()}


def difference(ranked: list[tuple[str, float]], expected: Answers) -> float:
    assert [p for _, p in ranked] == sorted((p for _, p in ranked), reverse=True)
    assert {label for label, _ in ranked} == set(expected)
    return max(abs(math.log(probability / expected[label])) for label, probability in ranked)


@pytest.mark.parametrize(
    ("family", "nodes"),
    [("llama", 3), ("gpt2", 1024), ("gemma2", 3), ("gemma2", 1024), ("mistral", 3), ("t5", 1024), ("bart", 3)],
)
def test_labels_have_their_probability(family: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_search, "NODES_AT_ONCE", nodes)
    model, index, known = model_of(family), index_of(), dict[Any, Any]()
    for score in ("sum", "renormalized", "mean", "pmi"):
        ranked = classify(model, tokenizer_of("bpe"), iter(TEXTS), index, batch_size=2, score=score, **EVERY)
        assert (ranked.method, ranked.mass_left) == ("exact", [0.0] * 3)
        for text, answer in zip(TEXTS, ranked, strict=True):
            assert difference(answer, plainly(model, text, index, score, known)) < 2 * LOG_TOL


@pytest.mark.filterwarnings("ignore:.*torch:DeprecationWarning", "ignore:.*deprecated:UserWarning")
def test_a_quantised_models_weights_are_no_tensors() -> None:
    model = torch.ao.quantization.quantize_dynamic(model_of("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    (ranked,) = classify(model, tokenizer_of("bpe"), TEXTS[:1], index_of(), **EVERY)
    assert {label for label, _ in ranked} == set(LABELS)
    assert sum(probability for _, probability in ranked) == pytest.approx(1)


@pytest.mark.parametrize("nodes", [1, 1000])
def test_labels_that_are_left_and_that_tokenize_alike(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (found,) = classify(model, tokenizer, ["sports"], one, top_k=None)
        assert difference(found, of) < LOG_TOL


def test_a_threshold_answers_none_of_them() -> None:
    model, tokenizer, index = model_of("llama"), tokenizer_of("bpe"), index_of()
    (ranked,) = classify(model, tokenizer, TEXTS[:1], index, top_k=None)
    assert classify(model, tokenizer, TEXTS[:1], index, top_k=None, threshold=ranked[1][1]) == [ranked[:2]]
    assert classify(model, tokenizer, TEXTS[:1], index.where(["sport", "北京"]), threshold=1.0) == [[]]


def test_priors_are_kept_while_the_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, index = model_of("qwen3"), index_of()
    options: dict[str, Any] = {**EVERY, "score": "pmi", "neutral_text": "N/A"}
    (expected, nothing) = classify(model, tokenizer_of("bpe"), ["a", "N/A"], index, **options)
    assert [probability for _, probability in nothing] == pytest.approx([1 / 7] * 7, rel=LOG_TOL)
    searches: list[Any] = []
    find = label_search.TreeSearch.find
    monkeypatch.setattr(label_search.TreeSearch, "find", lambda self, *a: searches.append(self) or find(self, *a))
    (again,) = classify(model, tokenizer_of("bpe"), ["a"], index_of(), **options)
    assert difference(again, dict(expected)) < LOG_TOL
    assert len(searches) == 1  # of the text alone
    model.lm_head.weight.data *= 2
    (changed,) = classify(model, tokenizer_of("bpe"), ["a"], index, **options)
    assert difference(changed, plainly(model, "a", index, "pmi")) < 2 * LOG_TOL


@pytest.mark.parametrize("score", ["sum", "renormalized"])
@pytest.mark.parametrize(
    ("family", "tolerance"), [("llama", 1e-3), ("gpt2", 0.3), ("gemma2", 0.3), ("mistral", 1e-3), ("t5", 0.3)]
)
def test_a_bounded_search_finds_what_matters(
    family: str, tolerance: float, score: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels of at least the tolerance are there in the exact order, and probabilities within what is left."""
    monkeypatch.setattr(classify_module, "LOGITS_AT_ONCE", 512)
    monkeypatch.setattr(label_search, "NODES_OF_BATCH", 16)
    model, index = sure(family), index_of(many_labels(300))
    options: dict[str, Any] = {"prompt": PROMPT, "batch_size": 2, "tolerance": tolerance, "score": score}
    exact, found, first = (
        classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=top_k, **options) for top_k in (None, 20, 1)
    )
    assert (found.method, exact.method, found.num_nodes) == ("bounded", "exact", exact.num_nodes)
    assert max(found.num_scored) < 0.9 * exact.num_nodes == 0.9 * exact.num_scored[0]
    for number, (all_labels, ours, (best,)) in enumerate(zip(exact, found, first, strict=True)):
        assert len(ours) == 20
        is_sum = score == "sum"  # else probabilities are exact, and the best are proven, whatever is left
        enough = [one for one in all_labels[:20] if one[1] >= tolerance or not is_sum]
        assert [label for label, _ in ours[: len(enough)]] == [label for label, _ in enough]
        assert 0 < found.mass_left[number] <= (tolerance if is_sum else 1)
        for label, probability in ours:
            _is_bound(probability, dict(all_labels)[label], found.mass_left[number] * is_sum)
        # By sums the search may not end where one is found, while others hold much of the mass.
        assert best[0] == all_labels[0][0]
        _is_bound(best[1], all_labels[0][1], first.mass_left[number] * is_sum)


def test_a_proof_ends_the_search_but_not_where_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parents have the sums of all labels, and of labels that share a sequence each has less than it."""
    monkeypatch.setattr(classify_module, "LOGITS_AT_ONCE", 512)
    monkeypatch.setattr(label_search, "NODES_OF_BATCH", 16)
    plain = [label.replace("2048", "deep").replace("é", "e").replace(">", "of") for label in many_labels(300)]
    model, labels, kind = model_of("llama"), sorted(set(plain)), "wordpiece-uncased"
    options: dict[str, Any] = {"top_k": 3, "prompt": "{text}:"}
    found = classify(model, tokenizer_of(kind), TEXTS, index_of(labels, kind), **options)
    whole = classify(model, tokenizer_of(kind), TEXTS, index_of(labels, kind), hierarchy=" of ", **options)
    assert (found.method, whole.method) == ("bounded", "bounded")
    assert max(whole.mass_left) <= 0.001 < min(found.mass_left)
    assert max(found.num_scored) < 0.5 * min(whole.num_scored)
    twice = index_of([*labels, *(label.upper() for label, _ in found[0])], kind)
    (best,) = classify(model, tokenizer_of(kind), TEXTS[:1], twice, **options)
    (every,) = classify(model, tokenizer_of(kind), TEXTS[:1], twice, **{**options, "top_k": None})
    assert [probability for _, probability in best] == pytest.approx([p for _, p in every[:3]], rel=1e-3)


def _is_bound(probability: float, expected: float, mass_left: float) -> None:
    assert probability * (1 - LOG_TOL) <= expected <= probability / (1 - mass_left) * (1 + LOG_TOL)


@pytest.mark.parametrize("score", ["sum", "renormalized", "mean", "pmi"])
def test_a_search_that_ends_early_is_not_sure(score: Any) -> None:
    """Probabilities are no shares of what was found, as those of beams were: 0.979 for a label of 3e-9."""
    model, index = model_of("gpt2"), index_of(many_labels(300))
    options: dict[str, Any] = {**EVERY, "score": score, "prompt": "{text}:"}
    exact = classify(model, tokenizer_of("bpe"), TEXTS, index, **options)
    found = classify(model, tokenizer_of("bpe"), TEXTS, index, max_tree_nodes=20, **options)
    assert (found.method, max(found.num_scored) <= 20) == ("bounded", True)
    for all_labels, ours, left in zip(exact, found, found.mass_left, strict=True):
        assert ours
        assert sum(probability for _, probability in ours) == pytest.approx(1 - left)
        if score in ("sum", "renormalized"):
            visited = {label for label, _ in ours}
            assert sum(p for label, p in all_labels if label not in visited) <= left + LOG_TOL
            for label, probability in ours:
                _is_bound(probability, dict(all_labels)[label], left)


def test_the_result_says_how_labels_were_found() -> None:
    model, index = model_of("llama"), index_of()
    exact = classify(model, tokenizer_of("bpe"), TEXTS, index, score="sum")
    nodes = len({tuple(row[:end]) for row in index for end in range(1, len(row))})
    first, *rows = repr(exact).splitlines()
    assert first == f"RankedLabels of 3 texts by 7 labels ({nodes} nodes): exact"
    assert [row.split("'")[1] for row in rows] == [labels[0][0] for labels in exact]
    assert exact.num_scored == [nodes] * 3
    frame = exact.to_pandas()
    assert list(frame.columns) == ["text", "rank", "label", "probability"]
    assert [(row.text, row.rank, (row.label, row.probability)) for row in frame.itertuples(index=False)][5] == (
        *(1, 1),
        exact[1][0],
    )


@pytest.mark.parametrize("is_named", [False, True])
def test_parents_have_the_sums_of_their_labels(is_named: bool) -> None:
    """A label of one level is one of the topmost, one of two levels also one of the second."""
    model, paths = model_of("llama"), {label: label.split(" > ") for label in LABELS}
    model.lm_head.weight.data *= 0.1  # no label is impossible
    of: Any = {"hierarchy": {label: path[:-1] for label, path in paths.items()} if is_named else " > "}
    every = classify(model, tokenizer_of("bpe"), TEXTS, index_of(), top_k=None)
    found = classify(model, tokenizer_of("bpe"), TEXTS, index_of(), top_k=None, **of)
    assert (every.parents, found) == (None, every)
    paths = {label: [*path[:-1], label] for label, path in paths.items()} if is_named else paths
    for ranked, levels in zip(every, found.parents or [], strict=True):
        expected = [Counter[str](), Counter[str]()]
        for label, probability in ranked:
            for level, sums in enumerate(expected[: len(paths[label])]):
                sums[paths[label][level] if is_named else " > ".join(paths[label][: level + 1])] += probability  # pyright: ignore
        assert [dict(level) for level in levels] == [pytest.approx(dict(sums)) for sums in expected]
    first = (found.parents or [])[0][0][0]
    (likely,) = (
        classify(model, tokenizer_of("bpe"), TEXTS[:1], index_of(), threshold=first[1] - 1e-6, **of).parents or []
    )
    assert likely == [[(first[0], pytest.approx(first[1]))], []]
    again = pickle.loads(pickle.dumps(found))
    assert (again, again.parents, again.mass_left) == (found, found.parents, found.mass_left)
    assert again.metrics(["Sports"] * 3) == found.metrics(["Sports"] * 3)


def test_metrics_are_those_of_scikit_learn() -> None:
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


def test_angles_that_change_within_a_label_are_refused() -> None:
    """LongRoPE turns whole sequences by other angles beyond a limit: a batch is on one side of it."""
    tokenizer, index = tokenizer_of("bpe"), index_of()
    lengths = {end: len(tokenizer(PROMPT.replace("{text}", "a" * end))["input_ids"]) for end in range(60)}
    limit = lengths[9] + index.max_length - 1
    beyond = next(end for end, length in lengths.items() if length > limit)
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": limit}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0], "partial_rotary_factor": 1.0}
    config: dict[str, Any] = {"original_max_position_embeddings": limit, "max_position_embeddings": 256}
    model = build("phi3", config={"vocab_size": 512, "eos_token_id": 0, "rope_parameters": rope, **config})
    texts = ["a" * end for end in (1, beyond, 9, 59)]
    found = classify(model, tokenizer, texts, index, batch_size=4, **EVERY)
    for text, answer in zip(texts, found, strict=True):
        assert difference(answer, plainly(model, text, index)) < LOG_TOL
    options = {"texts": ["a", "a" * (beyond - 1)], "index": index, **EVERY}
    with pytest.raises(ValueError, match=rf"texts\[1\] makes a prompt of .* pass max_length={lengths[9]}"):
        classify(model, tokenizer, **options)
    classify(model, tokenizer, max_length=lengths[9], **options)


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


@pytest.mark.parametrize(
    ("score", "broken", "nodes"), [("sum", 3, 9), ("sum", 3, 100), ("renormalized", slice(300), 9)]
)
def test_logits_that_are_no_numbers_are_an_error_and_not_none_of_them(score: Any, broken: Any, nodes: int) -> None:
    model = model_of("llama")
    model.lm_head.weight.data[broken] = torch.nan
    with pytest.raises(ValueError, match="model gives logits that are no numbers, in torch.float32"):
        classify(model, tokenizer_of("bpe"), TEXTS, index_of(), max_tree_nodes=nodes, score=score)


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
        ({"max_tree_nodes": 0}, "max_tree_nodes=0, expected 1 or more"),
        ({"score": "best"}, "score='best', expected one of 'renormalized', 'sum', 'mean', 'pmi'"),
        ({"neutral_text": 3, "score": "pmi"}, "neutral_text=3 with score='pmi', expected a string"),
        ({"neutral_text": "N/A"}, "neutral_text='N/A' with score='renormalized', expected a string with score='pmi'"),
        (
            {"threshold": 0.5, "score": "pmi", "max_tree_nodes": 9},
            "threshold=0.5 with score='pmi', of a set of .* nodes",
        ),
        ({"tolerance": 2}, "tolerance=2, expected the share"),
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
