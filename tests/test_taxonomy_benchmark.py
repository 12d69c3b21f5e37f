# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`examples/benchmark/taxonomy.py`: what is held out, what an answer stands for, what is trained, and all of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_gr import ConstraintIndex

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"
PATHS = ["Animals > Cats > Lynx", "Animals > Cats > Lion", "Animals > Dogs > Fox", "Plants > Trees > Oak"]


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("taxonomy_sets")


@pytest.fixture
def training(sets: Any) -> Any:
    return import_module("taxonomy_training")


@pytest.fixture
def taxonomy(sets: Any) -> Any:
    return import_module("taxonomy")


def label_set(sets: Any, kind: str, labels: list[str], hierarchy: Any = None, test: Any = ()) -> Any:
    return sets.LabelSet("toy", kind, labels, "Which?", "Name it.", "{text}\nName:", (), test, hierarchy)


def test_no_code_and_no_text_is_on_both_sides(sets: Any) -> None:
    codes = [f"A{number // 10}.{number % 10}" for number in range(200)]
    phrases = [
        sets.Coded(text, code, ("A", "B", code[:2]))
        for number, code in enumerate(codes)
        for text in (f"phrase {number}", f"Other words {number}", f"shared {number % 7}")
    ]
    train, test = sets.split(phrases, 0)
    assert {one.code for one in train}.isdisjoint(one.code for one in test)
    assert {one.text.casefold() for one in train}.isdisjoint(one.text.casefold() for one in test)
    assert len({one.text for one in test}) == len(test) == 40  # of 20 codes; what is shared is trained on
    assert sets.split(phrases, 0) == (train, test)
    assert sets.split(phrases, 1)[1] != test


def test_joined_texts_have_the_labels_of_their_parts(sets: Any) -> None:
    pairs = [(f"text {number}", (f"label {number % 3}",)) for number in range(30)]
    found = sets.joined(pairs, 200, 0)
    known = dict(pairs)
    for text, labels in found:
        parts = text.split("; ")
        assert 1 <= len(parts) <= sets.MOST
        assert labels == tuple(dict.fromkeys(known[part][0] for part in parts))
    assert {len(labels) for _, labels in found} == {1, 2, 3}


def test_parents_are_classes_that_are_no_labels(sets: Any) -> None:
    assert label_set(sets, "flat", ["Cats", "Dogs"]).parents == set()
    parents = label_set(sets, "hierarchical", PATHS, " > ").parents
    assert {"Animals", "Animals > Cats", "Cats", "Lynx", "Plants > Trees"} <= parents
    assert parents.isdisjoint(PATHS)
    below = {"Lynx": ["Animals", "Cats"], "Cats": ["Animals", "Cats"]}
    assert label_set(sets, "hierarchical", list(below), below).parents == {"Animals"}


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("animals > CATS > lynx.", "a label"),
        ("Animals > Cats", "other level"),
        ("Lion", "other level"),
        ("Animals > Trees > Lynx", "mixed path"),
        ("Animals > Cats > Lynx, the bobcat", "label and more"),
        ("Animals > Cats > Lynxes", "near miss"),
        ("Animals > Cats > Lyn > Lynx", "near miss"),
        ("I do not know", "nothing alike"),
        ("", "nothing alike"),
    ],
)
def test_what_was_written_has_a_kind(sets: Any, taxonomy: Any, written: str, kind: str) -> None:
    reader = taxonomy.Reader(label_set(sets, "hierarchical", PATHS, " > "))
    assert reader.kind(written) == kind
    assert (reader.label(written, matching=False) is not None) == (kind == "a label")
    if kind in ("near miss", "label and more"):
        assert reader.label(written, matching=True) == PATHS[0]
    if kind == "nothing alike":
        assert reader.label(written, matching=True) is None


def test_answers_of_several_labels_are_read(sets: Any, taxonomy: Any) -> None:
    reader = taxonomy.Reader(label_set(sets, "several labels", ["Lynx", "Lion", "Fox", "Oak"]))
    assert reader.labels("lynx; Oak", matching=False) == ("Lynx", "Oak")
    wrong = {
        "lynx; lynx": "repeated",
        "lynx; lion; fox; oak": "repeated",
        "lynx; foxes": "near miss",
        ";": "nothing alike",
    }
    for written, kind in wrong.items():
        assert reader.labels(written, matching=False) is None
        assert reader.kind_of_several(written) == kind
    assert reader.kind_of_several("lynx; Oak") == "a label"
    assert reader.labels("lynx; foxes; zzz; lynx", matching=True) == ("Lynx", "Fox")
    assert reader.labels("zzz", matching=True) is None


def test_measures_count_by_level_and_by_set(sets: Any, taxonomy: Any) -> None:
    test = [("a", (PATHS[0],)), ("b", (PATHS[1],)), ("c", (PATHS[2],)), ("d", (PATHS[3],))]
    one = label_set(sets, "hierarchical", PATHS, " > ", test)
    found = taxonomy.measures(one, [PATHS[0], PATHS[0], PATHS[0], None], [PATHS[:2]] * 4)
    assert (found["valid"], found["accuracy"], found["first_five"]) == (0.75, 0.25, 0.5)
    assert found["levels"] == [0.75, 0.5, 0.25]
    several = label_set(sets, "several labels", list("xyz"), None, [("a", ("x", "y")), ("b", ("z",))])
    found = taxonomy.measures(several, [("y", "x"), ("z", "x")], None)
    assert (found["accuracy"], found["micro_f1"]) == (0.5, 2 * 3 / (4 + 3))


def test_the_interval_is_that_of_the_binomial(taxonomy: Any) -> None:
    hits = [number < 120 for number in range(400)]
    low, high = taxonomy.interval(hits)
    half = 1.96 * (0.3 * 0.7 / 400) ** 0.5
    assert low == pytest.approx(0.3 - half, abs=0.01)
    assert high == pytest.approx(0.3 + half, abs=0.01)
    assert taxonomy.interval([True] * 5) == (1.0, 1.0)
    wide = taxonomy.interval(hits, [str(number // 4) for number in range(500)])  # texts of a code agree
    assert wide[1] - wide[0] == pytest.approx(2 * (high - low), rel=0.1)


@pytest.fixture
def toy(sets: Any, training: Any) -> Any:
    example = import_module("fine_tune_classifier")
    model, tokenizer = example.tiny_model(0)
    several = label_set(sets, "several labels", ["Lynx", "Lion"])
    pairs = [("a cat", ("Lynx",)), ("a cat and its king", ("Lynx", "Lion")), ("roars", ("Lion",))]
    several = sets.LabelSet(
        *(getattr(several, name) for name in "name kind labels question form prompt".split()), pairs, ()
    )
    recipe = training.Recipe((48,), frozen=1, batch_size=4, learning_rate=5e-3, bfloat16=False, seed=0)
    return model, tokenizer, several, ConstraintIndex.from_labels(several.labels, tokenizer), recipe


def test_the_loss_is_that_of_the_answers_tokens(training: Any, toy: Any) -> None:
    model, tokenizer, one, index, recipe = toy
    rows = training.make_rows([one], [index], tokenizer, recipe)
    assert len(rows) == 48
    assert tokenizer.decode(rows[1][0]) == "a cat and its king\nName:"
    assert tokenizer.decode(rows[1][1]) == " Lynx; Lion</s>"
    expected, count = 0.0, 0
    for prompt, answer in rows[:3]:
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        expected += cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    assert training.loss_of(model, rows[:3], bfloat16=False).item() == pytest.approx(expected / count, rel=1e-5)
    assert training.digest(recipe, rows) != training.digest(recipe, rows[::-1])
    assert training.digest(recipe, rows) != training.digest(replace(recipe, seed=1), rows)
    seen = [row for batch in training.batches(rows, recipe) for row in batch]
    assert sorted(seen) == sorted(rows)
    assert seen != rows


def test_training_goes_on_where_it_was_ended(
    training: Any, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, one, index, recipe = toy
    rows = training.make_rows([one], [index], tokenizer, recipe)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    monkeypatch.setattr(training, "KEEP", 5)

    def trained(folder: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        model.load_state_dict(start)
        told = training.train(model, rows, recipe, tmp_path / folder)
        return told, {name: weight.clone() for name, weight in model.state_dict().items()}

    whole, expected = trained("whole")
    assert whole["steps"] == 12
    changed = {name for name in start if not torch.equal(start[name], expected[name])}
    assert changed
    assert all(name.startswith(("model.layers.1.", "model.norm")) for name in changed)  # the rest is frozen

    loss_of, calls = training.loss_of, []

    def ends(*args: Any, **how: Any) -> Any:
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return loss_of(*args, **how)

    with monkeypatch.context() as patched:
        patched.setattr(training, "loss_of", ends)
        with pytest.raises(KeyboardInterrupt):
            trained("parts")
        calls.clear()
        calls.extend([()] * 100)
        told, found = trained("parts")
    assert len(calls) == 100 + 7  # steps 6 to 12
    assert told["loss"] == pytest.approx(whole["loss"])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with monkeypatch.context() as patched:
        patched.setattr(training, "loss_of", None)  # nothing is trained again
        assert trained("parts")[0] == told
        assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def test_answers_are_kept_for_the_same_texts_alone(
    sets: Any, taxonomy: Any, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tokenizer, one, index, _ = toy
    test = [(f"text {number}", ("Lynx",)) for number in range(4)]

    def kept(texts: list[Any], prompt: str = "{text}:") -> Any:
        one = label_set(sets, "flat", ["Lynx", "Lion"], None, texts)
        experiment = taxonomy.Experiment("as it is", one, index, prompt, len(texts), tmp_path)
        return experiment.kept("5 beams", lambda: [random.random() for _ in texts])

    first = kept(test[:3])
    assert kept(test[:3])["found"] == first["found"]
    assert kept(test[:2])["found"] == first["found"][:2]
    assert kept(test[:2])["seconds"] == pytest.approx(first["seconds"] * 2 / 3)
    assert kept(test[1:])["found"] != first["found"][1:]
    again = kept(test)["found"]
    assert again[:3] != first["found"]
    assert kept(test, "{text}?")["found"] != again
    again = kept(test)
    assert again["commit"]
    monkeypatch.setitem(taxonomy.OPTIONS, "5 beams", {"num_beams": 6})
    assert kept(test)["found"] != again["found"]


@pytest.mark.script("benchmark/taxonomy.py")
def test_fine_tuning_and_the_constraint_each_do_their_part() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "taxonomy.py"), "--fast"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    found = {(row["set"], row["model"], row["way"]): row for row in rows}
    assert {name for name, _, _ in found} == {"tickets", "ticket paths", "tickets, several"}
    for (name, model, way), row in found.items():
        if not way.startswith("prompt"):
            assert row["valid"] == 1
        low, high = row["interval"]
        assert low <= row["accuracy"] <= high
        if "kinds" in row:
            assert sum(row["kinds"].values()) == pytest.approx(1)
            assert row["kinds"]["a label"] == row["valid"]
        if model == "fine-tuned" and way == "greedy constrained":
            assert row["accuracy"] > 0.2 + found[name, "as it is", way]["accuracy"]
            assert row["accuracy"] >= found[name, model, "prompt only"]["accuracy"]
