# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `hf-gr index` prints. Counts nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from hf_gr.files.text import counted

from .text import shown

if TYPE_CHECKING:
    from hf_gr.catalogue import ConstraintIndex
    from hf_gr.catalogue.summary import LevelSummary, Summary

LEGEND = """\
[dim]children: of the nodes above that go on; forced: such nodes with one child only
decided: sequences that are unlike all others within these tokens[/]
"""
WIDE = 100  # terminal columns that leave room between the table's columns
PIPE_WIDTH = 120  # columns if stdout is not a terminal


def print_built(index: ConstraintIndex, folder: Path, seconds: float) -> None:
    """Print what was built, and what to do next."""
    console, name = _console(), shlex.quote(str(folder))
    memory = f"{format_bytes(index.nbytes)} ({index.nbytes / index.num_items:.1f} bytes an item)"
    console.print(
        f"Built in {seconds:.1f} s: [bold]{counted(index.num_items, 'item')}[/], {counted(len(index), 'sequence')} of "
        f"up to {counted(index.max_length, 'token')}, {memory}."
    )
    console.print(f"Saved to {shown(str(folder))}", soft_wrap=True)
    steps = {
        f"hf-gr index show {name}": "its levels, collisions and memory",
        f"hf-gr index check {name} --model MODEL": "does it fit the model's vocabulary?",
        f"hf-gr index push {name} REPO_ID": "put it on the Hub",
        f"ConstraintIndex.from_pretrained({str(folder)!r})": "for model.generate(constraint_index=...)",
    }
    width = max(map(len, steps))
    console.print("\nWhat next:")
    for command, purpose in steps.items():
        console.print(f"  {shown(command.ljust(width))}  [dim]{purpose}[/]", soft_wrap=True)  # to be copied whole


def print_summary(summary: Summary, name: str) -> None:
    """Print the levels as a table, and the whole catalogue below."""
    console = _console()
    console.print(f"[bold]{shown(name)}[/]", soft_wrap=True)
    console.print(_level_table(summary.levels, is_narrow=console.width < WIDE))
    console.print(LEGEND)
    console.print(_pairs(_facts(summary)))


def print_checked(name: str, checked: Sequence[tuple[str, str]]) -> None:
    """Print that nothing is damaged, and what was checked."""
    console = _console()
    console.print(f"[bold green]No damage found[/] in {shown(name)}. Checked:", soft_wrap=True)
    console.print(_pairs(checked))


def print_doubts(doubts: Sequence[str]) -> None:
    """Print what looks like a mistake; on stderr, since stdout may be one JSON object."""
    for doubt in doubts:
        _console(stderr=True).print(f"[bold yellow]Warning:[/] {shown(doubt)}", soft_wrap=True)


def format_bytes(size: float) -> str:
    """Such as `12.5 MB`; 1 MB is a million bytes."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def format_share(share: float) -> str:
    """Such as `97.1%`; only exact values read 0% or 100%."""
    if 0.9995 <= share < 1:
        return ">99.9%"
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _level_table(levels: Sequence[LevelSummary], *, is_narrow: bool) -> Table:
    """One row per level; a column for ended sequences only if they end at several levels."""
    are_ragged = sum(level.num_ended > 0 for level in levels) > 1
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0 if is_narrow else 1),
        pad_edge=False,
    )
    headings = ["level", "nodes", "mean\nchildren", "most\nchildren", "forced", "decided"]
    for heading in (*headings, *["end\nhere"] * are_ragged, "tokens", "offsets"):
        table.add_column(heading, justify="right", vertical="bottom")
    for level in levels:
        shares = (format_share(level.forced_share), format_share(level.decided_share))
        table.add_row(
            str(level.level),
            f"{level.nodes:,}",
            f"{level.mean_children:,.2f}",
            f"{level.largest_branching:,}",
            *shares,
            *[f"{level.num_ended:,}"] * are_ragged,
            format_bytes(level.token_bytes),
            format_bytes(level.offset_bytes),
        )
    return table


def _facts(summary: Summary) -> list[tuple[str, str]]:
    end = "no end token" if summary.eos_token_id is None else f"end token {summary.eos_token_id} included"
    ids = {"row number": "known by their row numbers", "integer": "with integer ids", "string": "with string ids"}
    offsets = sum(level.offset_bytes for level in summary.levels)
    tokens = summary.nbytes - offsets - summary.item_bytes - summary.item_id_bytes  # a few belong to no level
    parts = [
        ("tokens", tokens),
        ("offsets", offsets),
        ("items", summary.item_bytes),
        ("item ids", summary.item_id_bytes),
    ]
    return [
        ("sequences", f"{summary.num_sequences:,} of up to {counted(summary.max_length, 'token')}, {end}"),
        ("items", f"{summary.num_items:,}, {ids[summary.item_id_type]}"),
        ("collisions", _collisions(summary)),
        ("vocabulary", f"{summary.max_token_id + 1:,} or more; the largest token is {summary.max_token_id:,}"),
        ("memory", f"{format_bytes(summary.nbytes)}, {summary.bytes_per_item:.1f} bytes an item"),
        ("", ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)),
    ]


def _collisions(summary: Summary) -> str:
    if not summary.num_shared_sequences:
        return "none: every item has a sequence of its own"
    have = "sequence has" if summary.num_shared_sequences == 1 else "sequences have"
    share = format_share(summary.num_sharing_items / summary.num_items)
    return (
        f"{summary.num_shared_sequences:,} {have} several items, at most {summary.most_items_of_a_sequence:,}: "
        f"{summary.num_sharing_items:,} items share, {share}"
    )


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, text in rows:
        grid.add_row(shown(name), shown(text))
    return grid


def _console(*, stderr: bool = False) -> Console:
    """A console that takes nothing in a path or a name for a number, an emoji or a colour."""
    console = Console(stderr=stderr, highlight=False, emoji=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, emoji=False, width=PIPE_WIDTH)
