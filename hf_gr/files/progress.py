# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The progress bar of long work. Knows how much there is and how much is done, not what it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from .text import printable


@contextmanager
def progress_bar(
    title: str,
    total: Callable[[], int | None],
    *,
    unit: str,
    shown: bool,
    finished: Callable[[], int] | None = None,
    on_terminals_only: bool = True,
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if Rich is installed.

    Args:
        title: what is being done.
        total: how much there is, None if unknown; called once, and only for a bar that is shown.
        unit: what is counted, in the plural; `"bytes"` shows sizes in readable units.
        shown: whether to show it.
        finished: how much is done already, including other processes and earlier runs; called at the start, and at
            every update by 0.
        on_terminals_only: show nothing if stderr is not a terminal.

    Yields:
        A function to call with how much more is done; 0 reads `finished` again, which includes this process's part.
    """
    is_seen = sys.stderr is not None and (sys.stderr.isatty() or not on_terminals_only)
    if not (shown and is_seen and find_spec("rich")):
        yield lambda more: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    amount = (DownloadColumn(),) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        end = total()
        task = bar.add_task(escape(printable(title)), total=end)
        if finished is None:
            yield lambda more: bar.advance(task, more)
            return
        before, here = 0, 0

        def advance(more: int) -> None:
            nonlocal before, here
            before, here = (before, here + more) if more else (finished(), 0)
            done = before + here
            bar.update(task, completed=done if end is None else min(done, end))

        advance(0)
        yield advance
