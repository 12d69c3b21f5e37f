# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot of `hf-gr index show --plot`: how a catalogue narrows down level by level. Counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_gr.files.figures import (
    DARK,
    GREEN,
    ORANGE,
    PALE,
    RESOLUTION,
    TEXT,
    Chart,
    FuncFormatter,
    NullLocator,
    PercentFormatter,
    finish,
)

from .index_report import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hf_gr.catalogue.summary import Summary

MOST_LABELS = 8  # numbers above the bars of more levels would overlap

Series = tuple[str, Sequence[float], str, Callable[[float], str]]  # a name, values by level, a colour, their text


def save_plot(summary: Summary, path: Path, *, title: str) -> None:
    """Draw the levels of a catalogue.

    Raises:
        ValueError: the suffix is no format.
        OSError: the file cannot be written.
    """
    levels = summary.levels
    numbers = [level.level for level in levels]
    figure = Chart((12, 4), _headline(summary, title) + "\n")
    nodes, children, shares = figure.subplots(1, 3)

    _draw(nodes, "Nodes", numbers, [("", [level.nodes for level in levels], DARK, _short)])
    _use_log_scale(nodes, max(level.nodes for level in levels))

    mean = ("mean", [level.mean_children for level in levels], DARK, _short)
    largest = ("largest", [level.largest_branching for level in levels], PALE, _short)
    _draw(children, "Children of a node", numbers, [mean, largest])
    _use_log_scale(children, max(level.largest_branching for level in levels))

    forced = ("nodes forced", [level.forced_share for level in levels], ORANGE, _percent)
    decided = ("sequences decided", [level.decided_share for level in levels], GREEN, _percent)
    _draw(shares, "Shares", numbers, [forced, decided])
    shares.set_ylim(0, 1.08)
    shares.set_yticks([0, 0.25, 0.5, 0.75, 1])
    shares.yaxis.set_major_formatter(PercentFormatter(1))
    figure.savefig(path, dpi=RESOLUTION)


def _headline(summary: Summary, title: str) -> str:
    return (
        f"{title}: {summary.num_items:,} items, {summary.num_sequences:,} sequences, {format_bytes(summary.nbytes)} "
        f"({summary.bytes_per_item:.1f} bytes an item)"
    )


def _draw(axes: Axes, title: str, numbers: Sequence[int], series: Sequence[Series]) -> None:
    """Bars side by side, with the levels on the x axis."""
    finish(axes, title, "level")
    axes.grid(visible=False, axis="x")
    axes.set_xticks(numbers[:: 1 + len(numbers) // 20])
    width = 0.8 / len(series)
    for place, (name, values, color, text) in enumerate(series):
        centres = [number + (place - (len(series) - 1) / 2) * width for number in numbers]
        bars = axes.bar(centres, values, width=width * 0.94, color=color, label=name)
        if len(numbers) <= MOST_LABELS:
            size = 9 if len(series) * len(numbers) <= MOST_LABELS else 7
            axes.bar_label(bars, [text(value) for value in values], padding=2, fontsize=size, color=TEXT)
    if len(series) > 1:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.01, 0.985),
            ncols=len(series),
            frameon=False,
            fontsize=9,
            labelcolor=TEXT,
            handlelength=0.9,
            handletextpad=0.4,
            columnspacing=1.0,
        )


def _use_log_scale(axes: Axes, largest: float) -> None:
    """A logarithmic axis on which 1 is visible."""
    axes.set_yscale("log")
    axes.set_ylim(0.5, max(largest, 4) ** 1.1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _percent(share: float) -> str:
    """Such as `94%`; only exact values read 0% or 100%."""
    if 0.995 <= share < 1:
        return ">99%"
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _short(value: float) -> str:
    """Three digits, such as `256`, `1.08`, `65.5k` and `20M`."""
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"
