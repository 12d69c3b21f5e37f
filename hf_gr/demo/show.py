# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What the demo prints. Measures nothing."""

import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_gr.catalogue import ConstraintIndex
from hf_gr.jobs.results import Evaluation
from hf_gr.jobs.show import as_text
from hf_gr.purchases.train import verdict_of

from .compare import Comparison
from .data import MovieLens, Split

SHOWN_FILMS = 5  # films of a history and of a list


def print_data(console: Console, films: MovieLens) -> None:
    """Print what the data is, and how it is used."""
    ratings = sum(len(history) for history in films.histories)
    console.print(
        f"[bold]Data[/]: MovieLens-latest-small, {len(films):,} films, {len(films.histories):,} users, "
        f"{ratings:,} ratings. Every user's last film is held out. Ratings with equal timestamps are in a random "
        "order, the same in every run."
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
    console: Console, films: MovieLens, split: Split, users: Sequence[int], lists: Sequence[Sequence[str]]
) -> None:
    """Print some users: what they watched, the titles that are recommended, and what they watched next."""
    for user, titles in zip(users, lists, strict=True):
        target = films.titles[split.targets[user]]
        table = Table(title=f"user {films.user_ids[user]}", title_justify="left", expand=True)
        table.add_column("watched, latest last", ratio=1)
        table.add_column("recommended, best first", ratio=1)
        watched = [films.titles[film] for film in split.train[user][-SHOWN_FILMS:]]
        for film, title in zip_longest(watched, titles[:SHOWN_FILMS], fillvalue=""):
            is_hit = title == target
            table.add_row(escape(film), f"[bold green]{escape(title)} (watched next)[/]" if is_hit else escape(title))
        console.print(table)
        place = f"number {titles.index(target) + 1} of" if target in titles else "not among"
        console.print(f"  held out, watched next: {escape(target)}: {place} the {len(titles)}\n")


def print_measurements(console: Console, evaluation: Evaluation, comparison: Comparison) -> None:
    """Print how good the lists of all users are, and the time against transformers."""
    console.print("[bold]The last film of every user[/], which no model and no count has seen:")
    console.print(as_text(evaluation, width=console.width), markup=False, highlight=False, soft_wrap=True)
    for line in verdict_of(evaluation, "run without --fast: this model was hardly trained"):
        console.print(line, markup=False, highlight=False)
    ratio = comparison.transformers_seconds / comparison.hf_gr_seconds
    console.print(
        f"\n[bold]One call[/], {comparison.batch_size} users, {comparison.prompt_length} tokens, "
        f"{comparison.num_beams} beams, same answers, median of {comparison.num_runs} paired runs: transformers' "
        f"prefix_allowed_tokens_fn {comparison.transformers_seconds:.3f} s, hf_gr {comparison.hf_gr_seconds:.3f} s: "
        f"[bold]{ratio:.1f}x[/] as fast.\n"
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
    console.print("Your own purchases, from a CSV to such a folder: hf-gr train purchases.csv -o recommender")
