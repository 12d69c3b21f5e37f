# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot of an evaluation: a metric with its intervals, by number of beams and by latency. Counts nothing.

Models differ in line style, marker and colour, so that they can be told apart without colours.
"""

from __future__ import annotations

from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_gr.files.text import printable

from .metrics import metric_names

try:
    # No pyplot: a separate figure draws with Agg, opens no window, and does not change the program's settings.
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError('a plot (--plot) needs matplotlib: pip install "hf-gr[plot]"') from error

if TYPE_CHECKING:
    from .results import BeamResult, Evaluation

FORMATS = (".png", ".svg", ".pdf")  # those that documentation and --help name
STYLES = (("-", "o", "C0"), ("--", "s", "C1"), (":", "^", "C2"), ("-.", "D", "C4"), ((0, (6, 1, 1, 1)), "v", "C7"))
BASELINE_STYLES = ((0, (1, 3)), (0, (8, 4)))  # lines without markers
MOST_LETTERS = 90  # of a title's line


class Chart(Figure):
    """A figure that a notebook shows although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", dpi=90)
        return file.getvalue()


def check_format(path: str | Path, argument: str) -> None:
    """Refuse a suffix that is no format, before there is anything to draw."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(
            f"{argument}={str(path)!r}, expected a name that ends in one of {', '.join(FORMATS)}: rename it"
        )


def draw(found: Evaluation, path: str | Path | None, *, metric: str | None) -> Chart:
    """See `Evaluation.plot`."""
    metric = f"recall@{found.cutoffs[-1]}" if metric is None else metric
    names = metric_names(found.cutoffs)
    if metric not in names:
        raise ValueError(f"metric={metric!r}, expected one of {', '.join(names)}: name one of them")
    if path is not None:
        check_format(path, "path")
    is_alone = all(result.latency_seconds is not None for result in found.results)

    def milliseconds(result: BeamResult) -> float:
        """Without a sample of single users, the time of a user in a batch."""
        return 1000 * ((is_alone and result.latency_seconds) or 1 / result.users_per_second)

    chart = Chart(figsize=(10, 4.6), layout="constrained")
    intervals = f", {found.confidence:.0%} bootstrap intervals over users" if found.results[0].intervals else ""
    headline = f"{found.results[0].num_users:,} users{intervals}\n{_short(found.hardware)}"
    chart.suptitle(headline, x=0.005, ha="left", fontsize=11, parse_math=False)
    by_beams, by_latency = chart.subplots(1, 2)
    models = dict.fromkeys(result.name for result in found.results)
    for axes, place in ((by_beams, lambda result: result.num_beams), (by_latency, milliseconds)):
        for name, (dashes, marker, color) in zip(models, cycle(STYLES), strict=False):
            results = sorted((one for one in found.results if one.name == name), key=lambda one: one.num_beams)
            values = [result.metrics.get(metric, 0.0) for result in results]
            # Percentiles of resamples may leave out the mean of few users.
            ends = zip(values, (result.intervals.get(metric, (1.0, 0.0)) for result in results), strict=True)
            reach = zip(*((max(0.0, value - low), max(0.0, high - value)) for value, (low, high) in ends), strict=True)
            how: dict[str, Any] = {"linestyle": dashes, "marker": marker, "color": color, "capsize": 3}
            axes.errorbar([place(result) for result in results], values, list(reach), label=_short(name), **how)
        for baseline, dashes in zip(found.baselines, BASELINE_STYLES, strict=False):
            axes.axhline(baseline.metrics.get(metric, 0.0), color="grey", linestyle=dashes, label=baseline.name)
        axes.grid(alpha=0.3)
        axes.margins(x=0.1, y=0.15)
        axes.set_ylim(bottom=0)
    for result in found.results:
        at = milliseconds(result), result.metrics.get(metric, 0.0)
        by_latency.annotate(f"{result.num_beams}", at, xytext=(5, 5), textcoords="offset points", fontsize=8)
    by_latency.set_title(f"{metric} by latency; numbers are beams", loc="left")
    by_latency.set_xlabel(f"milliseconds, {'one user alone' if is_alone else 'a user in a batch'}")
    by_latency.set_xlim(left=0)
    by_beams.set_title(f"{metric} by beams", loc="left")
    by_beams.set_xscale("log", base=2)
    ticks = sorted({result.num_beams for result in found.results})
    by_beams.set_xticks(ticks, [str(number) for number in ticks])
    by_beams.minorticks_off()
    chart.legend(*by_latency.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    if path is not None:
        chart.savefig(path, dpi=150)
    return chart


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MOST_LETTERS else f"...{text[3 - MOST_LETTERS :]}"
