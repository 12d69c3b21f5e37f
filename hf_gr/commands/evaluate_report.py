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


WIDE = 1000  # columns of a file or a log: nothing is cut or broken there


def print_evaluation(found: Evaluation, *, title: str) -> None:
    """Print all tables; one that is wider than the terminal is printed in parts, a few columns each."""
    console = Console() if Console().is_terminal else Console(width=WIDE)
    hardware, *others = map(shown, notes(found))
    console.print(f"[bold]{shown(title)}[/], {hardware}", soft_wrap=True)
    for table in tables(found):
        for part in _parts_that_fit(table, console):
            console.print(part)
            console.print()
    for line in others:
        console.print(line, soft_wrap=True, highlight=False)


def _parts_that_fit(table: Table, console: Console) -> list[RichTable]:
    """The table, or parts of its columns that are no wider than the console, each with the names of its rows."""
    keys, width, endless = table.num_keys, len(table.head), Console(width=WIDE)  # others measure at most their width
    for size in range(width - keys, 0, -1):
        made = [
            _to_rich(
                Table(
                    table.head[:keys] + table.head[start : start + size],
                    [row[:keys] + row[start : start + size] for row in table.rows],
                    keys,
                )
            )
            for start in range(keys, width, size)
        ]
        if size == 1 or all(endless.measure(part).maximum <= console.width for part in made):
            return made
    return []


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
