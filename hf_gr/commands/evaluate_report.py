# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of `hf-gr evaluate`. Counts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from .text import shown

if TYPE_CHECKING:
    from hf_gr.offline.evaluation import BeamResult, Evaluation


def print_evaluation(found: Evaluation, *, title: str) -> None:
    """A column for every number of beams: all users, then groups and new items."""
    console = Console()
    console.print(f"[bold]{shown(title)}[/], {shown(found.hardware)}", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("beams")
    for result in found.results:
        table.add_column(str(result.num_beams), justify="right")
    first = found.results[0]

    def add(name: str, values: list[str], *, end: bool = False) -> None:
        table.add_row(name, *values, end_section=end)

    add("users", [_users(result) for result in found.results])
    for name in first.metrics:
        add(name, [f"{result.metrics[name]:.4f}" for result in found.results])
    add("coverage of the catalogue", [f"{result.coverage:.1%}" for result in found.results])
    add("places filled", [f"{result.filled:.1%}" for result in found.results])
    add("invalid items", [f"{result.invalid:.1%}" for result in found.results])
    if first.unconstrained_invalid is not None:
        add("  without the catalogue", [f"{result.unconstrained_invalid:.1%}" for result in found.results])
    if first.latency_seconds is not None:
        add("latency of one user", [f"{1000 * (result.latency_seconds or 0):.1f} ms" for result in found.results])
    add("users a second, in batches", [f"{result.users_per_second:,.0f}" for result in found.results])
    console.print(table)
    parts = {f"group {name}": name for name in first.groups}
    if parts or first.new_items:
        console.print(_parts_table(found, parts))


def _users(result: BeamResult) -> str:
    return f"{result.num_users:,}" + (f" (skipped {result.num_skipped:,})" if result.num_skipped else "")


def _parts_table(found: Evaluation, parts: dict[str, str]) -> Table:
    """Recall and NDCG at the largest cutoff, a row for each group of users and number of beams."""
    last = found.cutoffs[-1]
    names = (f"recall@{last}", f"ndcg@{last}", "mrr")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("part of the users")
    for name in ("beams", "users", *names):
        table.add_column(name, justify="right")
    for result in found.results:
        rows = {shown(part): result.groups[name] for part, name in parts.items()}
        rows |= {"target is new": result.new_items} if result.new_items else {}
        for number, (part, values) in enumerate(rows.items(), start=1):
            cells = [f"{values[name]:.4f}" if name in values else "-" for name in names]
            size = f"{int(values['num_users']):,}"
            table.add_row(part, str(result.num_beams), size, *cells, end_section=number == len(rows))
    return table
