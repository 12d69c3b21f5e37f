# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: how good and how fast recommendations are, for one number of beams or several.

Rows come from the same code as `recommend`'s, over the same processes; what is counted here is counted by the first.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hf_gr.catalogue import ConstraintIndex
from hf_gr.files.tables import Format

from .job import Job, make_job
from .loading import input_device
from .measures import count_rows, time_users
from .processes import Processes
from .run import run_job
from .settings import TOKEN_BUDGET, WINDOW_ROWS, OnError, Settings, check_count
from .users import Paths, UserColumns, Users

CUTOFFS = (1, 5, 10)
SAMPLED_USERS = 16  # whose latency is measured, and whose unconstrained beams are looked up


@dataclass(frozen=True)
class BeamResult:
    """What one number of beams gives.

    Attributes:
        num_beams: of the search.
        num_users: users that were evaluated.
        num_skipped: rows that could not be answered, which count nowhere.
        metrics: by name, over all users: see `RankingTotals`.
        groups: the same by group, with `num_users`; empty without a column of groups.
        new_items: the same over the users whose target is a new item; empty where none was named.
        coverage: the share of the catalogue's items that are recommended to somebody.
        filled: the share of the places of all lists that hold an item; less than 1 where filters leave too few.
        invalid: the share of recommended items that the catalogue does not have: 0, and counted all the same.
        unconstrained_invalid: the share of beams that are no item when the same model generates freely, over a sample.
        latency_seconds: mean time until one user alone is answered, over a sample.
        users_per_second: of all processes together, in batches.
    """

    num_beams: int
    num_users: int
    num_skipped: int
    metrics: dict[str, float]
    groups: dict[str, dict[str, float]]
    new_items: dict[str, float]
    coverage: float
    filled: float
    invalid: float
    unconstrained_invalid: float | None
    latency_seconds: float | None
    users_per_second: float


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found, by number of beams in the order in which they were asked for.

    Attributes:
        cutoffs: the K of the metrics.
        results: one for each number of beams.
        hardware: what it ran on.
    """

    cutoffs: tuple[int, ...]
    results: tuple[BeamResult, ...]
    hardware: str

    def to_json(self) -> str:
        """One JSON object; its fields are those of this class."""
        return json.dumps(asdict(self), indent=2)


def evaluate(
    model: Any,
    users: Paths,
    *,
    constraint_index: ConstraintIndex | str | Path | None = None,
    history: str | None = None,
    tokens: str | None = None,
    text: str | None = None,
    target: str | None = None,
    exclude: str | None = None,
    filter: str | None = None,
    group: str | None = None,
    new_items: Iterable[Any] | None = None,
    is_new: str | None = None,
    cutoffs: Sequence[int] = CUTOFFS,
    num_beams: int | Sequence[int] | None = None,
    assistant_model: Any = None,
    sampled_users: int = SAMPLED_USERS,
    on_error: OnError = "stop",
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
    work_dir: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Evaluation:
    """Measure recommendations against what users chose next.

    Without `target` it is leave-one-out: the last item of every history is the target, the others are the prompt.
    Items that are excluded never include the target.

    Args:
        model: as in `recommend`; so are all arguments that are not listed here.
        users: a table of users.
        constraint_index: the catalogue.
        history: column of histories; this, `tokens` or `text`.
        tokens: column of prompts as tokens; needs `target`.
        text: column of prompts as texts; needs `target`.
        target: column of the item that came next, or of lists of them.
        exclude: column of items that a user is not answered with, such as the history's.
        filter: column of the only items that a user may be answered with.
        group: column of parts of the users, each of which gets metrics of its own.
        new_items: ids of items that are new; users whose first target is one of them get metrics of their own.
        is_new: column of true and false (or 1 and 0): whether the target is new, instead.
        cutoffs: the K of Recall@K and NDCG@K; the largest is the number of items that a user gets.
        num_beams: one number or several, each evaluated; by default the checkpoint's own, else 20.
        assistant_model: a draft model for `generate`, loaded or by name.
        sampled_users: users whose latency is measured, one after the other, and whose beams without the catalogue are
            looked up; 0 for neither.
        on_error: `"stop"` or `"skip"`, as in `recommend`; skipped users count nowhere.
        format: of `users`.
        delimiter: of CSV.
        tokenizer: for `text`.
        prefix_tokens: in front of every history.
        suffix_tokens: behind every history.
        max_prompt_tokens: of a prompt.
        token_budget: of a batch.
        window_rows: of a window.
        dtype: of a model that is loaded here.
        device_map: of a model that is loaded here.
        work_dir: a folder for rows on the way, which all processes see; by default one of the system's.
        progress: show a bar, if stderr is a terminal.
        options: further arguments of `generate`.

    Returns:
        The metrics, in every process.

    Raises:
        ValueError, OSError, RuntimeError: as `recommend`; and arguments that do not go together.
    """
    ks = tuple(sorted(set(cutoffs)))
    if not ks or any(type(k) is not int or k < 1 for k in ks):
        raise ValueError(f"cutoffs={cutoffs!r}, expected integers of 1 or more")
    if target is None and history is None:
        raise ValueError("target=None without history=, expected the column of what came next: pass target=")
    if new_items is not None and is_new is not None:
        raise ValueError("new_items= and is_new= are given, expected one of them")
    check_count("sampled_users", sampled_users, at_least=0)
    beams = list(dict.fromkeys(num_beams)) if isinstance(num_beams, Sequence) else [num_beams]
    if not beams:
        raise ValueError("num_beams=[], expected one number or more")
    every = [
        Settings(
            columns=UserColumns(history, tokens, text, None, exclude, filter, target, group, is_new),
            top_k=ks[-1],
            num_beams=width,
            options=options,
            on_error=on_error,
            token_budget=token_budget,
            window_rows=window_rows,
            max_prompt_tokens=max_prompt_tokens,
            prefix_tokens=tuple(prefix_tokens),
            suffix_tokens=tuple(suffix_tokens),
            leave_one_out=target is None,
        )
        for width in beams
    ]
    processes = Processes()
    job, table = make_job(
        model,
        users,
        every[0],
        processes,
        index=constraint_index,
        format=format,
        delimiter=delimiter,
        tokenizer=tokenizer,
        draft_model=assistant_model,
        dtype=dtype,
        device_map=device_map,
    )
    known_new = None if new_items is None else frozenset(new_items)
    folder = Path(
        processes.by_main(
            lambda: tempfile.mkdtemp(prefix="hf_gr-evaluate-", dir=work_dir), doing="has no folder for rows on the way"
        )
    )
    try:
        how = {"cutoffs": ks, "new_items": known_new, "sampled_users": sampled_users, "progress": progress}
        results = [
            _evaluate_beams(job, table, width or job.decoder.num_beams, folder, processes, **how) for width in beams
        ]
    finally:
        if processes.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return Evaluation(ks, tuple(results), _hardware(job.decoder.model, processes.count))


def _evaluate_beams(
    job: Job,
    users: Users,
    num_beams: int,
    folder: Path,
    processes: Processes,
    *,
    cutoffs: tuple[int, ...],
    new_items: Collection[Any] | None,
    sampled_users: int,
    progress: bool,
) -> BeamResult:
    job = replace(
        job,
        settings=replace(job.settings, num_beams=num_beams),
        decoder=replace(job.decoder, num_beams=num_beams),
    )
    # By the first process; nobody else begins while it takes the time.
    latency, invalid = processes.by_main(
        lambda: time_users(job, users, sampled_users), doing="could not take the time"
    )
    start = perf_counter()
    made = run_job(job, users, folder / f"{num_beams}.parquet", processes, overwrite=True, progress=progress)
    seconds = perf_counter() - start
    counted = processes.by_main(
        lambda: count_rows(made.output, job.decoder.index, cutoffs, new_items), doing="could not count"
    )
    return BeamResult(
        num_beams=num_beams,
        num_users=made.num_rows - made.num_skipped,
        num_skipped=made.num_skipped,
        **counted,
        unconstrained_invalid=invalid,
        latency_seconds=latency,
        users_per_second=made.num_rows / seconds,
    )


def _hardware(model: Any, num_processes: int) -> str:
    device = input_device(model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{num_processes} x {name}, {dtype}, torch {torch.__version__}"
