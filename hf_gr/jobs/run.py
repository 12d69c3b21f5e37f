# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`recommend`: answers for a whole table of users, window by window, on as many devices as there are.

The table is cut into windows of rows. A window is the unit of work: its rows are sorted by length, cut into batches,
decoded, put back in order, and written as one part. Window i belongs to process i % N. Windows depend neither on the
number of processes nor on what is finished, so one process and many write the same parts, and a resumed run skips
existing parts. Memory is that of a window, unless the rows are to stay in memory.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from hf_gr.answering.backends import backend_for
from hf_gr.files.progress import progress_bar
from hf_gr.tables.cells import shorten
from hf_gr.tables.files import pa
from hf_gr.tables.memory import give_back, is_in_memory

from .job import Job, make_job, warnings_of
from .parts import Parts, check_output
from .reading import Users
from .settings import Settings

logger = logging.getLogger("hf_gr.recommend")


@dataclass(frozen=True)
class Recommended:
    """The summary of a run with an output.

    Attributes:
        output: the file.
        num_rows: its rows, one per user.
        num_skipped: rows without an answer, whose `error` says why.
        num_resumed: windows (`window_rows` rows each) that an earlier, interrupted run finished.
        num_fallback: rows that the fallback answered.
        num_dropped: items of histories and filters that the catalogue does not have, if these are dropped.
        already_finished: nothing was done: the same run had finished the output before.
    """

    output: Path
    num_rows: int
    num_skipped: int
    num_resumed: int
    num_fallback: int = 0
    num_dropped: int = 0
    already_finished: bool = False


def run_table(model: Any, users: Any, output: str | PathLike[str] | None, settings: Settings) -> Any:
    """What `recommend` does, after its arguments are read."""
    if output is None and not is_in_memory(users):
        one_history = "" if isinstance(users, (str, PathLike)) else "; one user's history is a list in a list"
        raise ValueError(
            f"output=None with users={shorten(users)} in files, expected a .parquet file to write: pass output="
            f"{one_history}"
        )
    settings = settings.checked()
    if output is not None:
        check_output(Path(output), users)
    elif settings.overwrite:
        raise ValueError("overwrite=True without output=, expected both: nothing is written")
    processes = backend_for(model, settings.backend, settings.of_loading).processes()
    job, table = make_job(model, users, settings, processes)
    if processes.is_main:
        for doubt in job.doubts:
            logger.warning(doubt)
    if output is not None:
        return run_job(job, table, Path(output), processes)
    held = Held(processes.count)
    ran = processes.by_all(lambda: (_run_windows(job, table, held, processes), job.counts, job.told, held.rows))
    _warn(processes, ran)
    windows = {number: rows for *_, part in ran for number, rows in part.items()}
    rows = pa.concat_tables([windows[number] for number in sorted(windows)]).combine_chunks()
    rows = rows if settings.on_error == "skip" else rows.drop_columns(["error"])
    return give_back(rows, users, settings.user, is_made=settings.item is not None)


@dataclass
class Held:
    """The finished windows of this process, kept in memory where a run has no output; else `Parts` keeps them."""

    num_processes: int
    rows: dict[int, Any] = field(default_factory=dict)
    is_stopped = False

    def has(self, number: int) -> bool:
        """Whether a window is finished."""
        return number in self.rows

    def count(self) -> int:
        """About how many windows are finished, if all processes are as fast as this one."""
        return len(self.rows) * self.num_processes

    def write(self, number: int, table: Any) -> None:
        """Hold a finished window."""
        self.rows[number] = table

    def stop(self) -> None:
        """Nothing: the other processes finish their windows."""


def run_job(job: Job, users: Users, output: Path, processes: Any) -> Recommended:
    """Run a job over a table, with all processes, or resume it."""
    manifest = processes.by_main(lambda: job.manifest(users), doing="cannot tell what decides the rows")
    parts = Parts(output, manifest, with_errors=job.settings.on_error == "skip")
    try:
        is_done = processes.by_main(
            lambda: parts.prepare(overwrite=job.settings.overwrite), doing="has refused the run"
        )
        if is_done:
            found = processes.by_main(parts.totals, doing="cannot read the output")
            if processes.is_main:
                logging.getLogger("hf_gr.progress").info("%s is already finished: nothing to do", output)
            return Recommended(output, num_resumed=0, already_finished=True, **found)
        num_resumed = processes.by_main(parts.count, doing="cannot read the parts")
        ran = processes.by_all(
            lambda: (_run_windows(job, users, parts, processes), job.counts, job.told),
            after_failure=parts.discard_empty,
        )
        found = processes.by_main(lambda: _merge(parts, ran[0][0], users), doing="could not merge the parts")
        if not job.settings.has_targets:  # `evaluate` has warnings of its own
            _warn(processes, ran)
        return Recommended(output, num_resumed=num_resumed, **found)
    finally:
        parts.release()


def _warn(processes: Any, ran: Iterable[Sequence[Any]]) -> None:
    """Tell once, whatever the number of processes, what their runs have counted and told."""
    if processes.is_main:
        told = [warning for _, _, told, *_ in ran for warning in told]
        for warning in (*warnings_of(sum((counts for _, counts, *_ in ran), Counter())), *told):
            logger.warning(warning)


def _run_windows(job: Job, users: Users, parts: Parts | Held, processes: Any) -> int:
    """Write the windows of this process; return the number of all windows."""
    size, num_windows = job.settings.window_rows, 0
    num_rows = math.inf  # of the table; a shorter window is the last one and tells
    bar = progress_bar(
        "Recommending",
        lambda: users.num_rows,
        unit="users",
        shown=job.settings.progress and processes.is_main,
        finished=lambda: int(min(parts.count() * size, num_rows)),
    )
    try:
        with bar as advance:
            for window in users.windows(size):
                num_windows += 1
                if len(window) < size:
                    num_rows = window.first_row + len(window)
                if window.number % processes.count != processes.rank or parts.has(window.number) or parts.is_stopped:
                    continue
                parts.write(window.number, job.run(window, advance))
                advance(0)
    except Exception:
        parts.stop()
        raise
    return num_windows


def _merge(parts: Parts, num_windows: int, users: Users) -> dict[str, int]:
    if users.fingerprint() != parts.settings["users"]:
        raise ValueError(f"{users.name} has changed since the run began, expected the same rows to the end: repeat it")
    return parts.merge(num_windows)
