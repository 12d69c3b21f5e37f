# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot of an evaluation: a metric with its intervals, by number of beams and by latency. Counts nothing.

Models differ in line style, marker and colour, so that they can be told apart without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_gr.files.text import printable

from .metrics import metric_names

try:
    # No pyplot: a separate figure draws with Agg, opens no window, and does not change the program's settings.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
except ImportError as error:
    raise ImportError('a plot (--plot) needs matplotlib: pip install "hf-gr[plot]"') from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .results import BeamResult, Evaluation, Result

TEXT, LINES = "#22282e", "#e3e6e9"
FORMATS = (".png", ".svg", ".pdf")  # those that documentation and --help name
STYLES = (
    ("-", "o", "#2f6690"),
    ("--", "s", "#d9822b"),
    (":", "^", "#3a7d44"),
    ("-.", "D", "#7b4f9d"),
    ((0, (6, 1, 1, 1, 1, 1)), "v", TEXT),
)
BASELINE_STYLES = ((0, (1, 3)), (0, (8, 4)))  # lines without markers
GREY = "#6b747c"
MOST_LETTERS = 90  # of a title's line
CAP = 3  # length of the ends of an interval


class Line(NamedTuple):
    """A model's results, ascending in beams, and how they are drawn."""

    name: str
    results: Sequence[BeamResult]
    style: dict[str, Any]


class Chart(Figure):
    """A figure with a headline, which a notebook shows although pyplot does not know it."""

    def __init__(self, size: tuple[float, float], headline: str) -> None:
        super().__init__(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.06), facecolor="white")
        self.suptitle(headline, x=0.005, ha="left", fontsize=12, color=TEXT, parse_math=False)

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
    lines = _lines(found.results)
    has_several = any(len(line.results) > 1 for line in lines)
    height = 4.6 if has_several else max(4.6, 2 + 0.4 * (len(found.results) + len(found.baselines)))
    intervals = f", {found.confidence:.0%} bootstrap intervals over users" if found.results[0].intervals else ""
    users = f"{found.results[0].num_users:,} users{intervals}"
    headline = map(_short, [", ".join(line.name for line in lines), users, found.hardware])
    chart = Chart((10, height), "\n".join(headline))
    left, right = chart.subplots(1, 2)
    (_draw_by_beams if has_several else _draw_one_by_one)(left, lines, found.baselines, metric)
    _draw_by_latency(right, lines, found.baselines, metric)
    how: dict[str, Any] = {"ncols": 4, "frameon": False, "fontsize": 9, "labelcolor": TEXT, "handlelength": 4}
    chart.legend(*right.get_legend_handles_labels(), loc="outside lower center", **how)
    if path is not None:
        chart.savefig(path, dpi=150)
    return chart


def _lines(results: Sequence[BeamResult]) -> list[Line]:
    by_name: dict[str, list[BeamResult]] = {}
    for result in sorted(results, key=lambda result: result.num_beams):
        by_name.setdefault(result.name, []).append(result)
    looks = zip(dict.fromkeys(result.name for result in results), cycle(STYLES), strict=False)
    how: dict[str, Any] = {"capsize": CAP, "markersize": 5, "linewidth": 1.6}
    return [
        Line(_short(name), by_name[name], {"linestyle": dashes, "marker": marker, "color": color, **how})
        for name, (dashes, marker, color) in looks
    ]


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MOST_LETTERS else f"...{text[3 - MOST_LETTERS :]}"


def _draw_by_beams(axes: Axes, lines: Sequence[Line], baselines: Sequence[Result], metric: str) -> None:
    _draw_lines(axes, lines, baselines, metric, lambda result: result.num_beams)
    ticks = sorted({result.num_beams for line in lines for result in line.results})
    _finish(axes, f"{metric} by beams", "beams")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(number) for number in ticks])
    axes.minorticks_off()


def _draw_one_by_one(axes: Axes, lines: Sequence[Line], baselines: Sequence[Result], metric: str) -> None:
    """A row for each result, since there is no line to draw."""
    of_baseline: dict[str, Any] = {"marker": "|", "color": GREY, "capsize": CAP, "markersize": 10}
    rows = [*((line.results[0], line.style) for line in lines), *((baseline, of_baseline) for baseline in baselines)]
    for place, (result, style) in enumerate(rows):
        values, bounds = _values([result], metric)
        axes.errorbar(values, [place], xerr=bounds, **style | {"linestyle": "none"})
    _finish(axes, metric, metric)
    axes.set_yticks(range(len(rows)), [_short(result.label) for result, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.set_xlim(left=0)


def _draw_by_latency(axes: Axes, lines: Sequence[Line], baselines: Sequence[Result], metric: str) -> None:
    """Without a sample of single users, the time of a user in a batch."""
    is_alone = all(result.latency_seconds is not None for line in lines for result in line.results)

    def milliseconds(result: BeamResult) -> float:
        return 1000 * ((is_alone and result.latency_seconds) or 1 / result.users_per_second)

    _draw_lines(axes, lines, baselines, metric, milliseconds)
    for result in (result for line in lines for result in line.results):
        how: dict[str, Any] = {"textcoords": "offset points", "xytext": (5, 5), "fontsize": 8, "color": TEXT}
        axes.annotate(f"{result.num_beams}", (milliseconds(result), result.metrics.get(metric, 0.0)), **how)
    unit = f"milliseconds, {'one user alone' if is_alone else 'a user in a batch'}"
    _finish(axes, f"{metric} by latency; numbers are beams", unit)
    axes.set_xlim(0, 1.12 * axes.dataLim.x1)


def _draw_lines(
    axes: Axes, lines: Sequence[Line], baselines: Sequence[Result], metric: str, x_of: Callable[[BeamResult], float]
) -> None:
    """A line with intervals for each model, and one without markers for each baseline."""
    for line in lines:
        axes.errorbar(list(map(x_of, line.results)), *_values(line.results, metric), label=line.name, **line.style)
    for baseline, dashes in zip(baselines, BASELINE_STYLES, strict=False):
        value = baseline.metrics.get(metric, 0.0)
        axes.axhline(value, color=GREY, linestyle=dashes, linewidth=1.4, label=baseline.name)
    axes.margins(x=0.1, y=0.15)
    axes.set_ylim(bottom=0)


def _values(results: Sequence[Result], metric: str) -> tuple[list[float], Any]:
    """The metric of each result, and how far its interval reaches below and above."""
    values = [result.metrics.get(metric, 0.0) for result in results]
    if not all(metric in result.intervals for result in results):
        return values, None
    lows, highs = zip(*(result.intervals[metric] for result in results), strict=True)
    # Percentiles of resamples may leave out the mean of few users.
    below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
    return values, [below, above]


def _finish(axes: Axes, title: str, label: str) -> None:
    """Title, name of the x axis, a pale grid, and no frame but the x axis."""
    axes.set_title(title, loc="left", fontsize=11, color=TEXT)
    axes.set_xlabel(label, color=TEXT)
    axes.grid(color=LINES)
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT, length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(TEXT)
