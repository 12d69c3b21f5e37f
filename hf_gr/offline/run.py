# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`recommend`: answers for a whole table of users, window by window, on as many devices as there are.

The table is cut into windows of rows. A window is the unit of work: its rows are sorted by length, cut into batches,
decoded, put back in order, and written as one part. Window i belongs to process i % N. Windows depend neither on the
number of processes nor on what is finished, so one process and many write the same parts, and a resumed run skips
existing parts. Memory is that of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from hf_gr.files.progress import progress_bar
from hf_gr.torch.processes import Processes

from .job import Job, make_job
from .options import RECOMMEND, takes_options
from .parts import Parts, check_output
from .settings import Settings
from .users import Paths, Users


@dataclass(frozen=True)
class Recommended:
    """The result of a run.

    Attributes:
        output: the file.
        num_rows: its rows, one per user.
        num_skipped: rows without an answer, whose `error` says why.
        num_resumed: windows that an earlier run finished.
    """

    output: Path
    num_rows: int
    num_skipped: int
    num_resumed: int


@takes_options(Settings, RECOMMEND)
def recommend(model: Any, users: Paths, output: str | PathLike[str], **options: Any) -> Recommended:
    """Recommend items to every user of a table, and write them to a Parquet file, in the order of the table.

    Runs on one device, or under `accelerate launch` on many (on CPUs `torch.distributed.run`, since `accelerate launch
    --cpu` starts one process): call it in every process. Each process loads the model
    and the catalogue and answers every N-th window of users; the first one merges the results. All must see the same
    folders. After an interruption or a kill, the same call continues where it stopped. Finished windows are in
    `OUTPUT.parts` until all are finished; a process holds one window at a time.

    Args:
        model: a loaded model, or the folder or repository of one.
        users: a file, several in order, or a folder of them: Parquet, CSV or JSON lines. In CSV, lists are texts such
            as `5 7` or `[5, 7]`. JSON lines have all keys in the first line.
        output: a `.parquet` file with the columns of `user` (or `row`, from 0), `items` (ids, best first), `scores`
            (as `sequences_scores`), and with `on_error="skip"` also `error`. There are at most `top_k` items, fewer
            if fewer are allowed. Items of one sequence have one score.
        options: further arguments of `generate`: `drafting="trie"`, `length_penalty`, ... Sampling is refused, since
            rows would not be reproducible.

    Returns:
        The result, in every process.

    Raises:
        ValueError: before any work, for invalid arguments or columns; later for a row that cannot be answered (with
            its number, from 0 through all files) or a damaged file. What is finished is kept.
        OSError: the disk is full; what is finished is kept.
        RuntimeError: another process died or failed.

    Example:
        >>> import hf_gr  # doctest: +SKIP
        >>> hf_gr.recommend("me/recommender", "users.parquet", "recs.parquet", history="items")  # doctest: +SKIP
    """
    settings = Settings.read(RECOMMEND, options).checked()
    check_output(Path(output), users)
    processes = Processes()
    job, table = make_job(model, users, settings, processes)
    return run_job(job, table, Path(output), processes)


def run_job(job: Job, users: Users, output: Path, processes: Processes) -> Recommended:
    """Run a job over a table, with all processes, or resume it."""
    parts = Parts(output, with_errors=job.settings.on_error == "skip")
    try:
        is_done = processes.by_main(
            lambda: parts.prepare(job.manifest(users), overwrite=job.settings.overwrite), doing="has refused the run"
        )
        if is_done:
            return Recommended(output, *processes.by_main(parts.totals, doing="cannot read the output"), num_resumed=0)
        num_resumed = processes.by_main(parts.count, doing="cannot read the parts")
        num_windows = processes.by_all(
            lambda: _run_windows(job, users, parts, processes), after_failure=parts.discard_empty
        )[0]
        found = processes.by_main(lambda: _merge(parts, num_windows, users), doing="could not merge the parts")
        return Recommended(output, *found, num_resumed=num_resumed)
    finally:
        parts.release()


def _run_windows(job: Job, users: Users, parts: Parts, processes: Processes) -> int:
    """Write the parts of this process; return the number of all windows."""
    size, num_windows = job.settings.window_rows, 0
    bar = progress_bar(
        "Recommending",
        lambda: users.num_rows,
        unit="users",
        shown=job.settings.progress and processes.is_main,
        finished=lambda: parts.count() * size,
    )
    try:
        with bar as advance:
            for window in users.windows(size):
                num_windows += 1
                if window.number % processes.count != processes.rank or parts.has(window.number) or parts.is_stopped:
                    continue
                parts.write(window.number, job.run(window, advance))
                advance(0)
    except Exception:
        parts.stop()
        raise
    return num_windows


def _merge(parts: Parts, num_windows: int, users: Users) -> tuple[int, int]:
    if users.fingerprint() != parts.manifest["users"]:
        raise ValueError(f"{users.name} has changed since the run began, expected the same rows to the end: repeat it")
    return parts.merge(num_windows)
