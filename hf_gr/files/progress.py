# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a run. Knows a number of rows, and how to ask for the windows that are finished."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress_bar(
    num_rows: Callable[[], int | None], num_finished: Callable[[], int], *, window_rows: int, shown: bool
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal and Rich is there.

    Args:
        num_rows: of the table; None where it does not know.
        num_finished: windows on the disk, those of other processes included.
        window_rows: of a window.
        shown: whether this process shows one.

    Yields:
        A function that is told how many more rows of a window are answered, and 0 when the window is written.
    """
    if not (shown and sys.stderr is not None and sys.stderr.isatty() and find_spec("rich")):
        yield lambda num_rows: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    total, finished, here = num_rows(), 0, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("users"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task("Recommending", total=total)

        def advance(more: int) -> None:
            nonlocal finished, here
            if more:
                here += more
            else:
                finished, here = num_finished(), 0  # a look at the disk: once a window
            done = finished * window_rows + here
            bar.update(task, completed=done if total is None else min(done, total))

        advance(0)
        yield advance
