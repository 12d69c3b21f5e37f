# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What the demo prints, and its progress bars. Measures nothing."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hf_gr.catalogue import ConstraintIndex, SemanticIds

from .data import MovieLens, Split
from .evaluate import DemoReport

SHOWN_FILMS = 5  # films of a history and of a list


@contextmanager
def training_bar(console: Console) -> Iterator[Callable[[float, float], None]]:
    """A bar; yields a function to call with the share that is done and the loss."""
    with _bar(console) as bar:
        task = bar.add_task("training", total=1.0, note="")

        def update(fraction: float, loss: float) -> None:
            bar.update(task, completed=fraction, note="" if math.isnan(loss) else f"loss {loss:.3f}")

        yield update


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left  {task.fields[note]}"),
        console=console,
    )


def print_data(console: Console, films: MovieLens) -> None:
    """Print what the data is, and how it is used."""
    ratings = sum(len(history) for history in films.histories)
    console.print(
        f"[bold]Data[/]: MovieLens-latest-small, {len(films):,} films, {len(films.histories):,} users, "
        f"{ratings:,} ratings. Every user's last film is held out. Ratings with equal timestamps are in a random "
        "order, the same in every run."
    )


def print_semantic_ids(console: Console, semantic_ids: SemanticIds) -> None:
    """Print how films became tokens."""
    shared = int((semantic_ids.codes[:, -1] > 0).sum())
    console.print(
        f"[bold]Semantic ids[/]: {semantic_ids.num_levels} tokens a film, codes of the levels "
        f"{semantic_ids.level_sizes}; the last one tells {shared:,} films from others with the same first "
        f"{semantic_ids.num_levels - 1}."
    )


def print_recommender(
    console: Console, model: Any, index: ConstraintIndex, folder: Path, trained_seconds: float | None
) -> None:
    """Print the model, and its folder."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    origin = "from an earlier run" if trained_seconds is None else f"trained in {trained_seconds:.0f} s"
    console.print(f"[bold]Model[/]: {type(model).__name__}, {parameters:,} parameters, {origin}.")
    console.print(f"[bold]Catalogue[/]: {escape(repr(index))}")
    console.print(f"Both are loaded from {escape(str(folder))}", soft_wrap=True)


def print_users(
    console: Console, films: MovieLens, split: Split, lists: Sequence[Sequence[int]], *, num_users: int, seed: int
) -> None:
    """Print some random users: what they watched, what is recommended, and what they watched next."""
    chosen = np.random.default_rng(seed).permutation(len(lists))[:num_users]
    for user in sorted(chosen.tolist()):
        target = int(split.targets[user])
        table = Table(title=f"user {films.user_ids[user]}", title_justify="left", expand=True)
        table.add_column("watched, latest last", ratio=1)
        table.add_column("recommended, best first", ratio=1)
        history = split.train[user][-SHOWN_FILMS:].tolist()
        recommended = list(lists[user][:SHOWN_FILMS])
        for row in range(max(len(history), len(recommended))):
            watched = escape(films.titles[history[row]]) if row < len(history) else ""
            title = escape(films.titles[recommended[row]]) if row < len(recommended) else ""
            hit = row < len(recommended) and recommended[row] == target
            table.add_row(watched, f"[bold green]{title} (watched next)[/]" if hit else title)
        console.print(table)
        place = lists[user].index(target) + 1 if target in lists[user] else None
        outcome = (
            f"not among the {len(lists[user])}"
            if place is None
            else f"[bold green]number {place} of the {len(lists[user])}[/]"
        )
        console.print(f"  held out, watched next: {escape(films.titles[target])}: {outcome}\n")


def print_report(console: Console, report: DemoReport, *, list_length: int) -> None:
    """The measurements."""
    users, comparison = report.num_users, report.comparison
    table = Table(title="What was measured", title_justify="left", show_header=False, expand=True)
    table.add_column(ratio=5)
    table.add_column(ratio=5)
    table.add_column(no_wrap=True)
    table.add_row(f"HR@{list_length}: last film of all {users:,} users", "the model", _share(report.model_hits, users))
    table.add_row("(no list has films rated before)", "the most popular films", _share(report.popular_hits, users))
    table.add_section()
    for name, invalid in (("beams", report.invalid_beams), ("samples", report.invalid_samples)):
        table.add_row(
            f"{name} that are no film",
            "without the catalogue",
            _share(invalid.unconstrained, invalid.total),
        )
        table.add_row(
            f"({invalid.num_users} users, {invalid.total // invalid.num_users} {name} each)",
            "with the catalogue",
            _share(invalid.constrained, invalid.total),
        )
    table.add_section()
    table.add_row(
        f"one call: {comparison.batch_size} users, {comparison.prompt_length} tokens, {comparison.num_beams} beams",
        "transformers, prefix_allowed_tokens_fn",
        f"{comparison.transformers_seconds:.3f} s",
    )
    table.add_row(
        f"same answers; median of {comparison.num_runs} paired runs",
        "hf_gr, constraint_index",
        f"{comparison.hf_gr_seconds:.3f} s: [bold]{comparison.ratio:.1f}x[/] as fast",
    )
    table.add_section()
    table.add_row(
        f"lists of all {users:,} users", f"hf_gr, {report.num_beams} beams", f"{report.recommend_seconds:.1f} s"
    )
    console.print(table)
    console.print(
        f"A list is the first {list_length} films, of the beams or of the training data's most often rated, that the "
        "user has not rated before. Model, semantic ids and counts know all ratings but the last one of every user."
    )
    if report.model_hits <= report.popular_hits:
        console.print(
            "[yellow]This model recommends no better than popularity: it was trained too little (--fast). Run "
            "without --fast."
        )


def print_next_steps(console: Console, folder: Path, users: Path) -> None:
    """Print commands that go on from here, as they run."""
    model, table = shlex.quote(str(folder)), shlex.quote(str(users))
    commands = {
        "Recommend to every user of a table": f"hf-gr recommend --model {model} --input {table} --user user "
        "--history history --exclude history --output recs.parquet",
        "Measure": f"hf-gr evaluate --model {model} --input {table} --history history --exclude history --target next "
        "--num-beams 10,50",
        "Show the catalogue": f"hf-gr index show {model}",
        "Serve it, and try it at http://127.0.0.1:8000/page/": f"hf-gr serve {model} --page",
    }
    console.print("[bold]What next[/]: the folder names its catalogue, whose items are titles; no command needs more.")
    if find_spec("fastapi") is None:
        console.print('First, for the server: pip install "hf-gr[serve]"', markup=False)
    for title, command in commands.items():
        console.print(f"[bold]{title}[/]")
        # No line break of ours inside a command: it is there to be copied.
        console.print(f"  {command}", soft_wrap=True, markup=False, highlight=False)
    console.print(
        "Your own purchases, from a CSV to such a folder: read_histories, semantic_ids_from_histories and "
        "train_recommender of hf_gr.training.",
        highlight=False,
    )


def _share(count: int, total: int) -> str:
    return f"[bold]{count / total:.1%}[/]  ({count:,} of {total:,})"
