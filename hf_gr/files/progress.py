# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The progress of long work: a bar for people, lines for logs. Knows how much there is and is done, not what it is."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from .text import printable

LOG_SECONDS = 60  # between two lines of work that has no parts
MILLION = 10**6

logger = logging.getLogger("hf_gr.progress")


@contextmanager
def progress_bar(
    title: str,
    total: Callable[[], int | None],
    *,
    unit: str,
    shown: bool,
    finished: Callable[[], int] | None = None,
) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal or in a notebook; elsewhere lines of the logger `hf_gr.progress`, at level INFO.

    Args:
        title: what is being done.
        total: how much there is, None if unknown; called once, and only if progress is shown.
        unit: what is counted, in the plural; `"bytes"` shows sizes in readable units.
        shown: whether to show it.
        finished: how much is done already, including other processes and earlier runs; called at the start, and at
            every update by 0.

    Yields:
        A function to call with how much more is done; 0 ends a part: it reads `finished` again, which includes this
        process's share, and logs a line. Work without parts logs a line a minute.
    """
    is_bar = _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
    if not shown or not (is_bar or logger.isEnabledFor(logging.INFO)):
        yield lambda more: None
        return
    show = _Bar(title, total(), unit) if is_bar else _Lines(title, total(), unit, has_parts=finished is not None)
    before, here = 0 if finished is None else finished(), 0
    show.begin(before)

    def advance(more: int) -> None:
        nonlocal before, here
        if more or finished is None:
            here += more
        else:
            before, here = finished(), 0
        done = before + here
        show.update(done if show.total is None else min(done, show.total), ends_part=more == 0)

    try:
        yield advance
    finally:
        show.close()


class _Bar:
    """A bar of tqdm, which knows terminals and notebooks."""

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets gets a bar of text
            from tqdm.auto import tqdm

        how: dict[str, Any] = {"unit": "B", "unit_scale": True} if unit == "bytes" else {"unit": f" {unit}"}
        self.total, self._bar = total, tqdm(desc=printable(title), total=total, file=sys.stderr, **how)

    def begin(self, done: int) -> None:
        self._bar.initial = self._bar.n = done  # of earlier runs, which say nothing of the speed
        self._bar.refresh()

    def update(self, done: int, *, ends_part: bool) -> None:
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """Lines of a log."""

    def __init__(self, title: str, total: int | None, unit: str, *, has_parts: bool) -> None:
        self.total, self._title, self._unit, self._has_parts = total, printable(title), unit, has_parts
        self._start = self._logged = monotonic()
        self._first = self._done = self._told = 0

    def begin(self, done: int) -> None:
        self._first = self._done = self._told = done

    def update(self, done: int, *, ends_part: bool) -> None:
        self._done = done
        is_due = ends_part if self._has_parts else monotonic() - self._logged >= LOG_SECONDS
        if is_due and done > self._told:
            self._log()

    def close(self) -> None:
        if self._done > self._told:
            self._log()

    def _log(self) -> None:
        self._logged, self._told = monotonic(), self._done
        seconds = max(self._logged - self._start, 1e-6)
        speed = (self._done - self._first) / seconds
        if self._unit == "bytes":
            parts = [f"{self._done / MILLION:,.0f} MB", f"{speed / MILLION:,.0f} MB a second"]
        else:
            parts = [f"{self._done:,}", f"{speed:,.1f} a second"]
        if self.total:
            name = f"{self.total / MILLION:,.0f} MB" if self._unit == "bytes" else f"{self.total:,} {self._unit}"
            left = (self.total - self._done) / max(speed, 1e-6)
            parts[0] += f" of {name} ({self._done / self.total:.1%})"
            parts.append(f"{_duration(left)} left")
        elif self._unit != "bytes":
            parts[0] += f" {self._unit}"
        logger.info("%s: %s", self._title, ", ".join(parts))


def _duration(seconds: float) -> str:
    """A time, as `2 h 05 min`, `3 min 20 s` or `8 s`.

    Example:
        >>> [_duration(seconds) for seconds in (8.2, 200, 7510)]
        ['8 s', '3 min 20 s', '2 h 05 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _in_notebook() -> bool:
    """Whether this is a kernel of a notebook, where a bar can be drawn without a terminal."""
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return hasattr(shell, "kernel")
