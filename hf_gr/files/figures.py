# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What all figures share: colours, axes, formats, and how a notebook shows one. Needs matplotlib; knows no numbers."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

try:
    # No pyplot: a separate figure draws with Agg, opens no window, and does not change the program's settings.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter
except ImportError as error:
    raise ImportError('a plot (--plot) needs matplotlib: pip install "hf-gr[plot]"') from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "DARK", "GREEN", "LINES", "ORANGE", "PALE", "PURPLE", "RESOLUTION", "TEXT",
    "Chart", "FuncFormatter", "NullLocator", "PercentFormatter", "check_format", "finish",
]  # fmt: skip

DARK, PALE, GREEN, ORANGE, PURPLE = "#2f6690", "#9fb8cc", "#3a7d44", "#d9822b", "#7b4f9d"
TEXT, LINES = "#22282e", "#e3e6e9"
FORMATS = (".png", ".svg", ".pdf")  # those that documentation and --help name
RESOLUTION = 150  # dots per inch of a saved figure
SHOWN = 90  # of one in a notebook


class Chart(Figure):
    """A figure with a headline, which a notebook shows although pyplot does not know it."""

    def __init__(self, size: tuple[float, float], headline: str) -> None:
        super().__init__(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.06), facecolor="white")
        self.suptitle(headline, x=0.005, ha="left", fontsize=12, color=TEXT, parse_math=False)

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", dpi=SHOWN)
        return file.getvalue()


def check_format(path: str | Path, argument: str) -> None:
    """Refuse a suffix that is no format, before there is anything to draw."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(
            f"{argument}={str(path)!r}, expected a name that ends in one of {', '.join(FORMATS)}: rename it"
        )


def finish(axes: Axes, title: str, label: str) -> None:
    """Title, name of the x axis, a pale grid, and no frame but the x axis."""
    axes.set_title(title, loc="left", fontsize=11, color=TEXT)
    axes.set_xlabel(label, color=TEXT)
    axes.grid(color=LINES)
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT, length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(TEXT)
