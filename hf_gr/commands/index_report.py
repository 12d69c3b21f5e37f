# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `hf-gr index` prints. Counts nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_gr.files.text import counted, shown_share

from .failures import say

if TYPE_CHECKING:
    from hf_gr.catalogue import ConstraintIndex
    from hf_gr.catalogue.summary import Summary

LEGEND = """\
children: of the nodes one level up that continue; forced: those with a single child
decided: sequences that are unique within these tokens
"""


def print_built(index: ConstraintIndex, folder: Path, seconds: float, sizes: Sequence[int]) -> None:
    """Print what was built, and what to do next."""
    name = shlex.quote(str(folder))
    memory = f"{shown_bytes(index.nbytes)} ({index.nbytes / index.num_items:.1f} bytes an item)"
    say(
        f"Built in {seconds:.1f} s: {counted(index.num_items, 'item')}, {counted(len(index), 'sequence')} of up to "
        f"{counted(index.max_length, 'token')}, {memory}."
    )
    if sizes:
        say(f"Codes by level: {', '.join(map(str, sizes))}")
    say(f"Saved to {folder}\n\nWhat next:")
    _print_pairs(
        {
            f"  hf-gr index show {name}": "its levels, collisions and memory",
            f"  hf-gr index check {name} --model MODEL": "does it fit the model's vocabulary?",
            f"  hf-gr index push {name} REPO_ID": "put it on the Hub",
            f"  ConstraintIndex.from_pretrained({str(folder)!r})": "for model.generate(constraint_index=...)",
        }
    )


def print_summary(summary: Summary, name: str) -> None:
    """Print the levels as a table, and the whole catalogue below."""
    rows = [["level", "nodes", "mean children", "most children", "forced", "decided", "end here"]]
    rows += [level.cells() for level in summary.levels]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    say("\n".join([name, "", *lines, "", LEGEND]))
    end = "no end token" if summary.eos_token_id is None else f"end token {summary.eos_token_id} included"
    ids = {"row number": "known by their row numbers", "integer": "with integer ids", "string": "with string ids"}
    collisions = "none: every item has a sequence of its own"
    if summary.num_shared_sequences:
        share = shown_share(summary.num_sharing_items / summary.num_items)
        collisions = (
            f"{counted(summary.num_sharing_items, 'item')}, {share}, share {summary.num_shared_sequences:,} of the "
            f"sequences, at most {summary.most_items_of_a_sequence:,} one of them"
        )
    _print_pairs(
        {
            "sequences": f"{summary.num_sequences:,} of up to {counted(summary.max_length, 'token')}, {end}",
            "items": f"{summary.num_items:,}, {ids[summary.item_id_type]}",
            "collisions": collisions,
            "vocabulary": f"{summary.max_token_id + 1:,} or more; the largest token is {summary.max_token_id:,}",
            "memory": f"{shown_bytes(summary.nbytes)}, {summary.bytes_per_item:.1f} bytes an item",
        }
    )


def print_checked(name: str, checked: Mapping[str, str]) -> None:
    """Print that nothing is damaged, and what was checked."""
    say(f"No damage found in {name}. Checked:")
    _print_pairs(checked)


def print_doubts(doubts: Iterable[str]) -> None:
    """Print warnings; on stderr, since stdout may be one JSON object."""
    for doubt in doubts:
        say(f"Warning: {doubt}", err=True)


def shown_bytes(size: float) -> str:
    """Such as `12.5 MB`; 1 MB is a million bytes."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _print_pairs(rows: Mapping[str, str]) -> None:
    width = max(map(len, rows))
    for name, text in rows.items():
        say(f"{name.ljust(width)}  {text}")
