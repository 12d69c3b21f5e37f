# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of `hf-gr evaluate`. Counts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from hf_gr.offline.show import Table, notes, tables

from .text import shown

if TYPE_CHECKING:
    from hf_gr.offline.results import Evaluation


def print_evaluation(found: Evaluation, *, title: str) -> None:
    """Print all tables; in a file or a log they are as wide as they need to be."""
    console = Console()
    hardware, *others = map(shown, notes(found))
    console.print(f"[bold]{shown(title)}[/], {hardware}", soft_wrap=True)
    for table in tables(found):
        made = _to_rich(table)
        width = console.measure(made).maximum
        console.print(made, width=None if console.is_terminal else max(width, console.width), crop=console.is_terminal)
    for line in others:
        console.print(line, soft_wrap=True, highlight=False)


def _to_rich(table: Table) -> RichTable:
    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, name in enumerate(table.head):
        made.add_column(shown(name), justify="left" if place < table.num_keys else "right", overflow="fold")
    for row in table.rows:
        keys, values = row[: table.num_keys], row[table.num_keys :]
        made.add_row(*map(shown, keys), *map(_dim_interval, values))
    return made


def _dim_interval(cell: str) -> str:
    value, line, interval = cell.partition("\n")
    return f"{shown(value)}\n[dim]{shown(interval)}[/]" if line else shown(value)
