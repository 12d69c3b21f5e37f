# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr classify`: from a table of texts to a table of labels. Takes the options of `hf_gr.classify`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import typer

from .failures import quiet_libraries, say

# Options that are arguments of `hf_gr.classify` as they are.
OF_CLASSIFY = (
    *("top_k", "score", "threshold", "neutral_text", "hierarchy", "separator", "max_labels", "max_tree_nodes"),
    *("tolerance", "num_beams", "batch_size", "max_length", "progress"),
)


def classify(
    *,
    model: str,
    texts: list[Path],
    constraint_index: str,
    output: Path,
    text: str = "text",
    id: str | None = None,
    target: str | None = None,
    format: Literal["parquet", "csv", "jsonl"] | None = None,
    delimiter: str | None = None,
    as_json: bool = False,
    overwrite: bool = False,
    on_error: Literal["stop", "skip"] = "stop",
    progress: bool = True,
    prompt: str | None = None,
    top_k: int = 5,
    score: Literal["renormalized", "sum", "mean", "pmi"] = "renormalized",
    threshold: float | None = None,
    neutral_text: str | None = None,
    hierarchy: str | None = None,
    separator: str | None = None,
    max_labels: int | None = None,
    max_tree_nodes: int = 8192,
    tolerance: float = 0.001,
    num_beams: int = 32,
    batch_size: int = 8,
    max_length: int | None = None,
    tokenizer: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: str | None = None,
    revision: str | None = None,
) -> None:
    r"""Rank the labels of an index for every text of a table.

    Writes a Parquet file with a row for every text, in their order: its id, labels (best first), probabilities, and
    mass_left, the largest share of all probability that other labels may have. An interrupted run writes nothing.

    Args:
        model: a language model's folder or repository.
        texts: a table of texts: .parquet, .csv, .tsv or .jsonl (also .gz, .bz2, .zst), or a folder of them; may be
            given several times.
        constraint_index: the labels, of `hf-gr index build labels.txt --labels --tokenizer MODEL`.
        output: the Parquet file to write.
        text: the column of texts.
        id: the column that names a row in the output; by default its number.
        target: the column of the right labels: also print accuracy and F1, with --hierarchy by level.
        format: the format of the table; by default from its ending.
        overwrite: replace an existing output.
        on_error: stop at the first row without a text, or skip it: write an empty row that says so.
        progress: show a bar, or without a terminal log a line a minute.
        prompt: what the model reads, with {text} in the text's place, to be followed by a label; \n is a new line.
            Default: that of hf_gr.classify.
        top_k: labels of one text.
        score: rank by the probabilities of a label's tokens among those that labels allow (renormalized), by their
            product (sum, of logarithms, which favours short labels), by its mean over tokens, or by what the text
            adds to a label that the model writes anyway (pmi).
        threshold: omit labels and parents with a smaller probability.
        neutral_text: a text without content, of --score pmi; by default N/A.
        hierarchy: what separates the levels of a label, such as " > ": also write the probabilities of parents.
        separator: for answers of several labels: what separates them, such as ","; needs --max-labels.
        max_labels: the most labels of one answer.
        max_tree_nodes: the most nodes (beginnings of labels after which these differ) that are scored for a text.
        tolerance: by sums, or with --hierarchy, the share of probability that larger sets may leave; 0 scores all.
        num_beams: beams of answers of several labels.
        batch_size: texts of one forward.
        max_length: the longest prompt in tokens; texts of longer ones are cut at the end.
        tokenizer: its name; by default the model's own.
        dtype: of the loaded weights.
    """
    arguments, start = locals(), perf_counter()
    from hf_gr.classification.tables import read_texts, write_ranked
    from hf_gr.jobs.parts import check_output

    check_output(output, texts, argument="texts")  # before any long work
    if output.exists() and not overwrite:
        raise ValueError(f"{output} is there already, expected a new name: name another one, or pass --overwrite")
    if target is not None and separator is not None:
        raise ValueError("target= and separator= are given, expected one: such answers have no measure")
    table = read_texts(
        texts, text=text, id=id, target=target, format=format, delimiter=delimiter, may_lack=on_error == "skip"
    )
    from hf_gr.catalogue import ConstraintIndex

    named = constraint_index if constraint_index == "." else ConstraintIndex.from_pretrained(constraint_index)
    quiet_libraries()
    from hf_gr.answering.backends import Alone, backend_for
    from hf_gr.answering.loading import load_index, load_tokenizer
    from hf_gr.classification.classify import DEFAULT_PROMPT
    from hf_gr.classification.classify import classify as run

    of_loading = {"revision": revision, "device": device}
    on = backend_for(model, "torch", of_loading)
    loaded = on.load_model(model, dtype=dtype, device_map=None, processes=Alone(), **of_loading)
    labels = load_index(named, loaded)
    found = table.column(text).to_pylist()
    rows = [row for row, value in enumerate(found) if value is not None]
    targets = None if target is None else table.column(target).take(rows).to_pylist()
    if targets is not None:
        warn_of_unknown(str(target), targets, labels.item_ids, hierarchy)
    ranked = run(
        loaded,
        load_tokenizer(tokenizer, model, revision=revision),
        [found[row] for row in rows],
        labels,
        prompt=DEFAULT_PROMPT if prompt is None else prompt.replace("\\n", "\n"),
        **{name: arguments[name] for name in OF_CLASSIFY},
    )
    metrics = [] if targets is None else [asdict(one) for one in ranked.metrics(targets)]
    write_ranked(output, table, id, ranked, rows)
    facts = {
        "num_texts": len(ranked),
        "num_labels": ranked.num_labels,
        "num_nodes": ranked.num_nodes,
        "num_scored": sum(ranked.num_scored) / len(ranked),
        "method": ranked.method,
        "score": ranked.score,
        "mass_left": max(ranked.mass_left),
        "metrics": metrics,
        "seconds": perf_counter() - start,
        "output": str(output),
    }
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        print_facts(facts)


def warn_of_unknown(column: str, right: list[str], labels: Iterable[Any], hierarchy: str | None) -> None:
    """Say on stderr how many right labels of a column are neither in the set nor parents there."""
    known = set(labels)
    if hierarchy:
        paths = [label.split(hierarchy) for label in known]
        known |= {hierarchy.join(path[:level]) for path in paths for level in range(1, len(path))}
    unknown = [label for label in right if label not in known]
    if unknown:
        say(
            f"hf-gr classify: {len(unknown):,} of {len(right):,} texts have a label in column {column!r} that is "
            f"not in the index, such as {unknown[0]!r}: no answer can be right there",
            err=True,
        )


def print_facts(facts: dict[str, Any]) -> None:
    """Print how labels were found, and the measures, for people."""
    found = {
        "exact": "all were scored",
        "bounded": f"the most probable were scored, others have at most {facts['mass_left']:.2g} of the probability",
        "beams": f"searched by beams, others have at most {facts['mass_left']:.2g} of the probability",
    }[facts["method"]]
    say(
        f"{facts['output']}: {facts['num_texts']:,} texts, {facts['num_labels']:,} labels ({facts['num_nodes']:,} "
        f"nodes): {found}, {facts['num_scored']:,.0f} nodes a text, {facts['seconds']:.1f} s"
    )
    for one in facts["metrics"]:
        level = "labels" if one["level"] is None else f"level {one['level']}"
        say(
            f"{level}: accuracy {one['accuracy']:.1%}, among the ranked {one['accuracy_at_k']:.1%}, macro F1 "
            f"{one['macro_f1']:.3f} ({one['num_texts']:,} texts, {one['num_classes']:,} classes)"
        )
