# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: how good and how fast recommendations are, for one number of beams or several.

Rows come from the same code as `recommend`'s, over the same processes; only the first process counts.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hf_gr.answering.decoding import useful_beams
from hf_gr.answering.loading import input_device
from hf_gr.torch.processes import Processes

from .job import Job, make_job
from .measures import count_rows, time_users
from .options import EVALUATE, takes_options
from .run import run_job
from .settings import Settings, count, is_count
from .users import Users


@dataclass(frozen=True)
class BeamResult:
    """The results for one number of beams.

    Attributes:
        num_beams: of the search; at most as many as the catalogue has sequences, since more find nothing.
        num_users: users that were evaluated.
        num_skipped: rows that could not be answered; they count nowhere.
        metrics: by name, over all users: see `RankingTotals`.
        groups: the same by group, with `num_users`; empty without a column of groups.
        new_items: the same over the users whose target is a new item; empty if no new items were named.
        coverage: the share of the catalogue's items that are recommended to at least one user.
        filled: the share of list positions that hold an item; less than 1 if filters leave too few.
        invalid: the share of recommended items that the catalogue does not have: always 0, but counted.
        unconstrained_invalid: the share of beams that are no item when the same model generates freely, over a sample.
        latency_seconds: mean time to answer one user alone, over a sample.
        users_per_second: throughput of all processes together, in batches.
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
    """The results of `evaluate`, by number of beams in the order of the argument.

    Attributes:
        cutoffs: the K of the metrics.
        results: one for each number of beams.
        hardware: the devices used.
    """

    cutoffs: tuple[int, ...]
    results: tuple[BeamResult, ...]
    hardware: str

    def to_json(self) -> str:
        """One JSON object; its fields are those of this class."""
        return json.dumps(asdict(self), indent=2)


@takes_options(Settings, EVALUATE)
def evaluate(model: Any, users: Any, **options: Any) -> Evaluation:
    """Measure recommendations against what users chose next.

    The default is leave-one-out: the last item of every history is the target, the others are the prompt; `tokens` and
    `text` need `target`. The target is never excluded. Skipped rows (`on_error="skip"`) count nowhere.

    Args:
        model: as in `recommend`.
        users: a table of users in files or in memory, as in `recommend`.
        options: further arguments of `generate`.

    Returns:
        The metrics, in every process.

    Raises:
        ValueError, OSError, RuntimeError: as `recommend`; or arguments contradict each other.
    """
    given = Settings.read(EVALUATE, options, users=users)
    cutoffs = tuple(given.cutoffs)
    if not cutoffs or not all(map(is_count, cutoffs)):
        raise ValueError(f"cutoffs={given.cutoffs!r}, expected integers of 1 or more")
    cutoffs = tuple(sorted(set(map(int, cutoffs))))
    if given.target is None and given.history is None:
        raise ValueError("target=None without history=, expected the column of what came next: pass target=")
    if given.new_items is not None and given.is_new is not None:
        raise ValueError("new_items= and is_new= are given, expected one of them")
    count("sampled_users", given.sampled_users, at_least=0)
    beams: Any = given.num_beams
    beams = list(dict.fromkeys(beams)) if isinstance(beams, Sequence) else [beams]
    if not beams:
        raise ValueError("num_beams=[], expected one number or more")
    given = replace(given, top_k=cutoffs[-1], leave_one_out=given.target is None, overwrite=True)
    every = [replace(given, num_beams=width).checked() for width in beams]
    processes = Processes()
    job, table = make_job(model, users, every[0], processes)
    widths = [one.num_beams or job.decoder.num_beams for one in every]
    widths = dict.fromkeys(useful_beams(width, job.decoder.index, given.top_k) for width in widths)
    new_items = None if given.new_items is None else frozenset(given.new_items)
    folder = Path(
        processes.by_main(
            lambda: tempfile.mkdtemp(prefix="hf_gr-evaluate-", dir=given.work_dir),
            doing="has no folder for rows on the way",
        )
    )
    try:
        results = [_evaluate_beams(job, table, width, folder, processes, cutoffs, new_items) for width in widths]
    finally:
        if processes.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return Evaluation(cutoffs, tuple(results), _hardware(job.decoder.model, processes.count))


def _evaluate_beams(
    job: Job,
    users: Users,
    num_beams: int,
    folder: Path,
    processes: Processes,
    cutoffs: tuple[int, ...],
    new_items: Collection[Any] | None,
) -> BeamResult:
    job = replace(
        job,
        settings=replace(job.settings, num_beams=num_beams),
        decoder=replace(job.decoder, num_beams=num_beams),
    )
    # The first process only; the others wait while it measures.
    latency, invalid = processes.by_main(
        lambda: time_users(job, users, job.settings.sampled_users), doing="could not take the time"
    )
    start = perf_counter()
    made = run_job(job, users, folder / f"{num_beams}.parquet", processes)
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
