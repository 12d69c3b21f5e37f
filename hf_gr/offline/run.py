# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`recommend`: answers for a whole table of users, window by window, on as many devices as there are.

The table is cut into windows of rows. A window is the unit of everything: its rows are sorted by length, cut into
batches, decoded, put back in order, and written as one part. Window i is process i % N's. Windows depend neither on
the number of processes nor on what is finished, so one process and many make the same parts, and to resume is to skip
the parts that are there. Memory is that of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from hf_gr.catalogue import ConstraintIndex
from hf_gr.files.progress import progress_bar
from hf_gr.files.tables import Format

from .job import Job, make_job
from .parts import Parts, check_output
from .processes import Processes
from .settings import TOKEN_BUDGET, WINDOW_ROWS, OnError, Settings
from .users import Paths, UserColumns, Users


@dataclass(frozen=True)
class Recommended:
    """What a run has made.

    Attributes:
        output: the file.
        num_rows: rows of it, as many as users.
        num_skipped: rows without an answer, whose `error` says why.
        num_resumed: windows that were finished before this run began.
    """

    output: Path
    num_rows: int
    num_skipped: int
    num_resumed: int


def recommend(
    model: Any,
    users: Paths,
    output: str | PathLike[str],
    *,
    constraint_index: ConstraintIndex | str | Path | None = None,
    history: str | None = None,
    tokens: str | None = None,
    text: str | None = None,
    user: str | None = None,
    exclude: str | None = None,
    filter: str | None = None,
    top_k: int = 10,
    num_beams: int | None = None,
    assistant_model: Any = None,
    on_error: OnError = "stop",
    overwrite: bool = False,
    format: Format | None = None,
    delimiter: str | None = None,
    tokenizer: Any = None,
    prefix_tokens: Sequence[int] = (),
    suffix_tokens: Sequence[int] = (),
    max_prompt_tokens: int | None = None,
    token_budget: int = TOKEN_BUDGET,
    window_rows: int = WINDOW_ROWS,
    dtype: Any = "auto",
    device_map: Any = None,
    progress: bool = True,
    **options: Any,
) -> Recommended:
    """Recommend items to every user of a table, and write them to a Parquet file, in the order of the table.

    Runs as it is on one device, and under `accelerate launch` on many: call it in every process. Each has the model
    and the catalogue, takes every N-th window of users, and the first one merges what they have written; all of them
    see the same folders. Interrupted or killed, a repeated call goes on where it stopped. Windows that are finished
    are in `OUTPUT.parts` until all are; no process holds more than one.

    Args:
        model: a loaded model, or the folder or repository of one.
        users: a file, several in order, or a folder of them: Parquet, CSV or JSON lines. In CSV, lists are texts such
            as `5 7` or `[5, 7]`. JSON lines have all keys in the first line.
        output: a `.parquet` file with the columns of `user` (or `row`, from 0), `items` (ids, best first), `scores`
            (as `sequences_scores`), and with `on_error="skip"` also `error`. There are at most `top_k` items, less
            where fewer are allowed. Items of one sequence have one score.
        constraint_index: the catalogue, or its name; by default the one that the checkpoint names.
        history: column of lists of item ids, oldest first; the prompt is their tokens (without end tokens), of as many
            of the latest as the model has room for. This, `tokens` or `text`.
        tokens: column of lists of token ids: the prompt as it is.
        text: column of texts, for the tokenizer.
        user: column that says who it is, of any type, copied.
        exclude: column of lists of ids that a user is not answered with; it may be the history's. Ids that the
            catalogue does not have are fine, and so is null.
        filter: column of lists of the only ids that a user may be answered with; null allows all, an empty list none.
        top_k: items for every user.
        num_beams: of the search, 2 or more and at least `top_k`; by default the checkpoint's own, if it has any, else
            20, or `top_k` if that is more.
        assistant_model: a draft model for `generate`, loaded or by name.
        on_error: `"stop"` at the first row that cannot be answered, or `"skip"` it, with an empty row that says why.
            A damaged file stops in any case. A run that has stopped may go on with `"skip"`.
        overwrite: replace the output or the parts of another run. Those of this run are gone on with in any case.
        format: of `users`: `"parquet"`, `"csv"` or `"jsonl"`; by default what the ending says.
        delimiter: of CSV; by default a tab in `.tsv` and a comma elsewhere.
        tokenizer: for `text`, or its name; by default the checkpoint's.
        prefix_tokens: in front of every history, such as a begin token.
        suffix_tokens: behind every history.
        max_prompt_tokens: of a prompt; the latest are kept.
        token_budget: the most tokens of a batch, padding and beams included: take a smaller one where memory runs out.
            It decides the last digits of scores alone, and may be another one when a run goes on.
        window_rows: users that are sorted, decoded and written together; so many are held, and lost when a process
            dies. It, too, decides the last digits of scores.
        dtype: of a model that is loaded here: `"auto"` (the checkpoint's), `"float32"`, `"bfloat16"` or `"float16"`.
        device_map: of a model that is loaded here, such as `"auto"` for one larger than a device; in one process only.
        progress: show a bar, if stderr is a terminal; the first process does.
        options: further arguments of `generate`: `drafting="trie"`, `length_penalty`, ... Sampling is refused, since
            rows would not be the same again.

    Returns:
        What was made, in every process.

    Raises:
        ValueError: before any work, for arguments and columns that cannot lead to rows; later for a row that cannot be
            answered (with its number, from 0 through all files) or a damaged file. What is finished is kept.
        OSError: the disk is full; what is finished is kept.
        RuntimeError: another process died or failed.

    Example:
        >>> import hf_gr  # doctest: +SKIP
        >>> hf_gr.recommend("me/recommender", "users.parquet", "recs.parquet", history="items")  # doctest: +SKIP
    """
    settings = Settings(
        columns=UserColumns(history, tokens, text, user, exclude, filter),
        top_k=top_k,
        num_beams=num_beams,
        options=options,
        on_error=on_error,
        token_budget=token_budget,
        window_rows=window_rows,
        max_prompt_tokens=max_prompt_tokens,
        prefix_tokens=tuple(prefix_tokens),
        suffix_tokens=tuple(suffix_tokens),
    )
    check_output(Path(output), users)
    processes = Processes()
    job, table = make_job(
        model,
        users,
        settings,
        processes,
        index=constraint_index,
        format=format,
        delimiter=delimiter,
        tokenizer=tokenizer,
        draft_model=assistant_model,
        dtype=dtype,
        device_map=device_map,
    )
    return run_job(job, table, Path(output), processes, overwrite=overwrite, progress=progress)


def run_job(
    job: Job, users: Users, output: Path, processes: Processes, *, overwrite: bool, progress: bool
) -> Recommended:
    """Run a job over a table, with all processes, from where it stopped."""
    parts = Parts(output, with_errors=job.settings.on_error == "skip")
    try:
        is_done = processes.by_main(
            lambda: parts.prepare(job.manifest(users), overwrite=overwrite), doing="has refused the run"
        )
        if is_done:
            return Recommended(output, *processes.by_main(parts.totals, doing="cannot read the output"), num_resumed=0)
        num_resumed = processes.by_main(parts.count, doing="cannot read the parts")
        failure: Exception | None = None
        num_windows = 0
        try:
            num_windows = _run_windows(job, users, parts, processes, shown=progress)
        except Exception as error:  # told to the others, and raised below
            failure = error
            parts.stop()
        failures = processes.gather(None if failure is None else str(failure))
        if processes.is_main and any(text is not None for text in failures):
            parts.discard_empty()
        if failure is not None:
            raise failure
        first = next((rank for rank, text in enumerate(failures) if text is not None), None)
        if first is not None:
            raise RuntimeError(f"process {first} has stopped: {failures[first]}")
        found = processes.by_main(lambda: _merge(parts, num_windows, users), doing="could not merge the parts")
        return Recommended(output, *found, num_resumed=num_resumed)
    finally:
        parts.release()


def _run_windows(job: Job, users: Users, parts: Parts, processes: Processes, *, shown: bool) -> int:
    """Write the parts of this process; how many windows there are in all."""
    size, num_windows = job.settings.window_rows, 0
    bar = progress_bar(
        "Recommending",
        lambda: users.num_rows,
        unit="users",
        shown=shown and processes.is_main,
        finished=lambda: parts.count() * size,
    )
    with bar as advance:
        for window in users.windows(size):
            num_windows += 1
            if window.number % processes.count != processes.rank or parts.has(window.number) or parts.is_stopped:
                continue
            parts.write(window.number, job.run(window, advance))
            advance(0)
    return num_windows


def _merge(parts: Parts, num_windows: int, users: Users) -> tuple[int, int]:
    if users.fingerprint() != parts.manifest["users"]:
        raise ValueError(f"{users.name} has changed since the run began, expected the same rows to the end: repeat it")
    return parts.merge(num_windows)
