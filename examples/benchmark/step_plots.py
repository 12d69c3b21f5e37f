# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The plots of `step.py` and `step_branching.py`: STATIC's figures 2 and 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from report import save_plot


def draw(results: Sequence[dict[str, Any]]) -> None:
    """Milliseconds of a step over the number of items, and over the vocabulary."""
    uniform = [result for result in results if result["codes"] == "uniform"]
    most_common = [result["vocab"] for result in uniform]
    vocab = max(set(most_common), key=most_common.count)
    by_items = sorted((result for result in uniform if result["vocab"] == vocab), key=lambda result: result["items"])
    items = [result["items"] for result in uniform if result["vocab"] != vocab]
    by_vocab = sorted((result for result in uniform if result["items"] in items), key=lambda result: result["vocab"])
    for axis, chosen in (("items", by_items), ("vocab", by_vocab)):
        if len(chosen) > 1:
            lines: dict[str, list[tuple[int, float]]] = {}
            for result in chosen:
                for name, seconds in result["step_seconds"].items():
                    lines.setdefault(name, []).append((result[axis], 1000 * seconds))
            plot(f"step-{axis}", {"items": "items", "vocab": "vocabulary"}[axis], "ms a step", lines)


def plot(name: str, x_axis: str, y_axis: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Lines over logarithmic axes; ours are thick."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for label, points in lines.items():
        is_ours = label.startswith("ours")
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=2.5 if is_ours else 1.2, label=label)
    axes.set(xscale="log", yscale="log", xlabel=x_axis, ylabel=y_axis)
    axes.grid(alpha=0.3, which="both")
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    save_plot(name, figure)
