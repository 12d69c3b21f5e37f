# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot of `hf-gr evaluate --plot`: what more beams gain, and what they cost. Counts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .index_plot import DARK, GREEN, LINES, ORANGE, TEXT, ConstrainedLayoutEngine, Figure, PercentFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hf_gr.offline.evaluation import Evaluation

COLOURS = (DARK, GREEN, ORANGE)  # of the largest cutoffs
MOST_LETTERS = 90  # per title line


def save_plot(found: Evaluation, path: Path, *, title: str) -> None:
    """Draw recall against beams, and against the latency of one user.

    Raises:
        ValueError: the suffix is no format.
        OSError: the file cannot be written.
    """
    results = sorted(found.results, key=lambda result: result.num_beams)
    beams = [result.num_beams for result in results]
    figure = Figure(figsize=(10, 4.4), layout=ConstrainedLayoutEngine(wspace=0.06), facecolor="white")
    name = title if len(title) <= MOST_LETTERS else f"...{title[3 - MOST_LETTERS :]}"
    headline = f"{name}\n{results[0].num_users:,} users, {found.hardware}"
    figure.suptitle(headline, x=0.005, ha="left", fontsize=12, color=TEXT, parse_math=False)
    by_beams, by_latency = figure.subplots(1, 2, sharey=True)
    # Without a sample of single users, the time per user in a batch.
    milliseconds = [1000 * (result.latency_seconds or 1 / result.users_per_second) for result in results]
    is_alone = results[0].latency_seconds is not None
    for cutoff, colour in zip(reversed(found.cutoffs), COLOURS, strict=False):
        recall = [result.metrics.get(f"recall@{cutoff}", 0.0) for result in results]
        by_beams.plot(beams, recall, marker="o", color=colour, label=f"Recall@{cutoff}")
        by_latency.plot(milliseconds, recall, marker="o", color=colour)
        if cutoff == found.cutoffs[-1]:
            for x, y, number in zip(milliseconds, recall, beams, strict=True):
                by_latency.annotate(
                    f"{number}", (x, y), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=9, color=TEXT
                )
    _finish(by_beams, "Recall by beams", "beams")
    by_beams.set_xscale("log", base=2)
    by_beams.set_xticks(beams, [str(number) for number in beams])
    by_beams.minorticks_off()
    by_beams.set_ylim(bottom=0)
    by_beams.yaxis.set_major_formatter(PercentFormatter(1))
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=9, labelcolor=TEXT)
    alone = "one user alone" if is_alone else "a user in a batch"
    _finish(by_latency, "Recall by latency; the numbers are beams", f"milliseconds, {alone}")
    figure.savefig(path, dpi=150)


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=TEXT)
    axes.set_xlabel(label, color=TEXT)
    axes.grid(color=LINES)
    axes.set_axisbelow(True)
    axes.margins(x=0.1, y=0.15)
    axes.tick_params(colors=TEXT, length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(TEXT)
