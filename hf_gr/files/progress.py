# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The progress of long work, by tqdm: a bar for people, lines for logs. Knows how much is done, not what it is."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .text import printable

LOG_SECONDS = 60  # between two lines of work that has no parts

logger = logging.getLogger("hf_gr.progress")


@contextmanager
def progress_bar(
    title: str, total: Callable[[], int | None], *, unit: str, shown: bool, finished: Callable[[], int] | None = None
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets gets a bar of text
        from tqdm.auto import tqdm
    number, before = total(), 0 if finished is None else finished()
    how: dict[str, Any] = {"unit": "B", "unit_scale": True} if unit == "bytes" else {"unit": f" {unit}"}
    if not is_bar:
        done, of_total, part, left = "{n:,}", " of {total:,}", " ({percentage:.1f}%)", ", {remaining} left"
        if unit == "bytes":
            done, of_total = "{n_fmt}", " of {total_fmt}"
        if number is None:
            of_total = part = left = ""
        how |= {"bar_format": f"{{desc}}: {done}{of_total}{{unit}}{part}, {{rate_fmt}}{left}", "file": _Log()}
        how |= {"mininterval": LOG_SECONDS if finished is None else float("inf"), "miniters": 1, "smoothing": 0}
        how |= {"delay": 1e-9, "leave": finished is None}  # no line at the start; at the end, unless a part has ended
    # What earlier runs did says nothing of the speed.
    with tqdm(desc=printable(title), total=number, initial=before, **how) as bar:

        def advance(more: int) -> None:
            done = finished() if finished is not None and not more else bar.n + more
            bar.update((done if number is None else min(done, number)) - bar.n)
            if not more:
                bar.refresh()

        yield advance


class _Log:
    """A file whose lines go to the logger."""

    def write(self, text: str) -> None:
        if text.strip():
            logger.info("%s", text.strip())

    def flush(self) -> None:
        pass


def _in_notebook() -> bool:
    """Whether this is a kernel of a notebook, where a bar can be drawn without a terminal."""
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return hasattr(shell, "kernel")
