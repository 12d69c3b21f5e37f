# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr classify`: from a table of texts to a table of labels. Takes the options of `hf_gr.classify`.

Exit codes: 0 all texts, 1 stopped (nothing is written; the same command may succeed), 2 refused (something has to be
changed first), 130 interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_gr.files.text import printable

from .flags import BACKEND, DEVICE, MESH, REVISION, Backend, read_integers
from .recommend import errors_on_one_line, quiet_libraries
from .text import flag_of

if TYPE_CHECKING:
    from hf_gr.classification.result import RankedLabels

FLAGS = (
    *("top_k", "threshold", "neutral_text", "hierarchy", "separator", "max_labels", "max_tree_nodes", "tolerance"),
    *("id", "target", "output", "num_beams", "batch_size", "max_length", "prompt", "device", "revision", "dtype"),
    *("backend", "mesh"),
    *("delimiter", "tokenizer"),
)
SEARCH, COLUMNS = "Search", "Columns and files"


class TableFormat(StrEnum):
    """The format of tables of texts."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


def classify(
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="A language model's folder or repository.")
    ],
    input: Annotated[
        list[Path],
        typer.Option(
            "--input",
            "-i",
            metavar="TEXTS",
            help="A table of texts: .parquet, .csv, .tsv or .jsonl (also .gz, .bz2, .zst), or a folder of them; may "
            "be given several times.",
        ),
    ],
    index: Annotated[
        str,
        typer.Option(metavar="INDEX", help="The labels: `hf-gr index build labels.txt --labels --tokenizer MODEL`."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.parquet", help="The file to write.")],
    text: Annotated[
        str, typer.Option(metavar="COLUMN", help="The column of texts.", rich_help_panel=COLUMNS)
    ] = "text",
    id: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="What names a row in the output. Default: its number.",
            show_default=False,
            rich_help_panel=COLUMNS,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The right labels: also print accuracy and F1, with --hierarchy by level.",
            show_default=False,
            rich_help_panel=COLUMNS,
        ),
    ] = None,
    format: Annotated[
        TableFormat | None,
        typer.Option(
            help="The format of TEXTS. Default: from its ending.", show_default=False, rich_help_panel=COLUMNS
        ),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            metavar="C",
            help="What separates the columns of CSV. Default: a comma; a tab for .tsv.",
            show_default=False,
            rich_help_panel=COLUMNS,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print how labels were found, and the measures, as one JSON object.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output.", rich_help_panel=COLUMNS)
    ] = False,
    progress: Annotated[
        bool, typer.Option(help="Show a bar, or without a terminal log a line a minute.", rich_help_panel=SEARCH)
    ] = True,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="What the model reads, with {text} in the text's place, to be followed by a label. \\n is a new "
            "line. Default: that of `hf_gr.classify`.",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Labels of one text.")] = 5,
    threshold: Annotated[
        float | None, typer.Option(help="Omit labels with a smaller probability.", show_default=False)
    ] = None,
    neutral_text: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='A text that says nothing, such as "N/A": labels that the model writes anyway gain nothing.',
            show_default=False,
        ),
    ] = None,
    hierarchy: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='What is between the levels of a label, such as " > ": also write the probabilities of parents.',
            show_default=False,
        ),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='For answers of several labels: what is between them, such as ",". Needs --max-labels.',
            show_default=False,
        ),
    ] = None,
    max_labels: Annotated[int | None, typer.Option(help="The most labels of one answer.", show_default=False)] = None,
    max_tree_nodes: Annotated[
        int,
        typer.Option(
            help="The largest label set, in nodes, that is not searched by beams, which may miss labels. 5,000 labels "
            "have more than the default (ICD codes: 26,644): with 30000 they are searched within --tolerance, which "
            "took 26.1 CPU seconds a text with SmolLM2-135M on one thread; all of them, with --tolerance 0, 122.5.",
            rich_help_panel=SEARCH,
        ),
    ] = 8192,
    tolerance: Annotated[
        float,
        typer.Option(help="The largest relative error in larger sets; 0 scores all labels.", rich_help_panel=SEARCH),
    ] = 0.001,
    num_beams: Annotated[int, typer.Option(help="Beams in sets that are searched.", rich_help_panel=SEARCH)] = 32,
    batch_size: Annotated[int, typer.Option(help="Texts of one forward.", rich_help_panel=SEARCH)] = 8,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="The longest prompt in tokens; a longer one loses the end of its text.",
            show_default=False,
            rich_help_panel=SEARCH,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Default: the model's own.", show_default=False, rich_help_panel=SEARCH),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=SEARCH)] = "auto",
    backend: BACKEND = Backend.AUTO,
    mesh: MESH = None,
    device: DEVICE = None,
    revision: REVISION = None,
) -> None:
    """Rank the labels of an index for every text of a table.

    Writes a Parquet file with a row for every text, in their order: its id, labels (best first) and probabilities; all
    of it, or nothing. Prints how labels were found: exact, bounded (within --tolerance), or by beams, which may miss
    some.
    """
    start = perf_counter()
    flags = {name: flag_of(name) for name in FLAGS} | {"texts": "--input", "constraint_index": "--index"}
    with errors_on_one_line("classify", smaller="--batch-size", flags=flags, as_json=as_json):
        from hf_gr.classification.tables import read_texts, write_ranked
        from hf_gr.offline.parts import check_output

        check_output(output, input, argument="texts")  # before any long work
        if output.exists() and not overwrite:
            raise ValueError(f"{output} is there already, expected a new name: name another one, or pass --overwrite")
        if target is not None and separator is not None:
            raise ValueError("target= and separator= are given, expected one: such answers have no measure")
        how = {"format": None if format is None else format.value, "delimiter": delimiter}
        table = read_texts(input, text=text, id=id, target=target, **how)
        from hf_gr.offline.early import load_named

        named = load_named(index)
        quiet_libraries()
        from hf_gr.answering.backends import Alone, backend_for
        from hf_gr.answering.loading import load_index, load_tokenizer
        from hf_gr.classification.classify import DEFAULT_PROMPT
        from hf_gr.classification.classify import classify as run

        of_loading = {"revision": revision, "device": device}
        devices = None if mesh is None else read_integers("--mesh", mesh)
        on = backend_for(model, backend.value, {**of_loading, "mesh": devices})
        on.refuse_foreign({"device": device, "mesh": devices})
        loaded = on.load_model(model, dtype=dtype, device_map=None, processes=Alone(), **of_loading)
        labels = load_index(named, loaded)
        if target is not None:
            warn_of_unknown(target, table.column(target).to_pylist(), labels.item_ids, hierarchy)
        ranked = run(
            loaded,
            load_tokenizer(tokenizer, model, revision=revision),
            table.column(text).to_pylist(),
            labels,
            top_k=top_k,
            prompt=DEFAULT_PROMPT if prompt is None else prompt.replace("\\n", "\n"),
            threshold=threshold,
            neutral_text=neutral_text,
            hierarchy=hierarchy,
            separator=separator,
            max_labels=max_labels,
            max_tree_nodes=max_tree_nodes,
            tolerance=tolerance,
            num_beams=num_beams,
            batch_size=batch_size,
            max_length=max_length,
            mesh=devices,
            progress=progress,
        )
        metrics = [] if target is None else [asdict(one) for one in ranked.metrics(table.column(target).to_pylist())]
        write_ranked(output, table, id, ranked)
        facts = to_facts(ranked, metrics, perf_counter() - start)
        typer.echo(json.dumps(facts | {"output": str(output)})) if as_json else print_facts(facts, output)


def warn_of_unknown(column: str, right: list[str], labels: Iterable[Any], hierarchy: str | None) -> None:
    """Say on stderr how many right labels are not in the set: no answer can be right there.

    Args:
        column: its name.
        right: the right labels.
        labels: the set.
        hierarchy: what is between the levels of a label: its parents are then known, too.
    """
    known = set(labels)
    if hierarchy:
        paths = [label.split(hierarchy) for label in known]
        known |= {hierarchy.join(path[:level]) for path in paths for level in range(1, len(path))}
    unknown = [label for label in right if label not in known]
    if unknown:
        typer.echo(
            printable(
                f"hf-gr classify: {len(unknown):,} of {len(right):,} texts have a label in column {column!r} that is "
                f"not in the index, such as {unknown[0]!r}: no answer can be right there"
            ),
            err=True,
        )


def to_facts(ranked: RankedLabels, metrics: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """How labels were found, and the measures."""
    return {
        "num_texts": len(ranked),
        "num_labels": ranked.num_labels,
        "num_nodes": ranked.num_nodes,
        "num_scored": sum(ranked.num_scored) / len(ranked),
        "method": ranked.method,
        "metrics": metrics,
        "seconds": seconds,
    }


def print_facts(facts: dict[str, Any], output: Path) -> None:
    """Print the same for people."""
    found = {
        "exact": "all labels were scored",
        "bounded": "all labels that matter were scored",
        "beams": "searched by beams, which may miss labels",
    }[facts["method"]]
    typer.echo(
        f"{output}: {facts['num_texts']:,} texts, {facts['num_labels']:,} labels ({facts['num_nodes']:,} nodes): "
        f"{found}, {facts['num_scored']:,.0f} nodes a text, {facts['seconds']:.1f} s"
    )
    for one in facts["metrics"]:
        level = "labels" if one["level"] is None else f"level {one['level']}"
        typer.echo(
            f"{level}: accuracy {one['accuracy']:.1%}, among the ranked {one['accuracy_at_k']:.1%}, macro F1 "
            f"{one['macro_f1']:.3f} ({one['num_texts']:,} texts, {one['num_classes']:,} classes)"
        )
