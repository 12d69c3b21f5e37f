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
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from hf_gr.catalogue import ConstraintIndex
from hf_gr.tables import Format, pyarrow

from .metrics import RankingTotals
from .processes import Processes
from .prompts import Request
from .run import TOKEN_BUDGET, WINDOW_ROWS, Job, OnError, Settings, check_settings, make_job, run_job
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
        is_new: column that says whether the target is new, instead.
        cutoffs: the K of Recall@K and NDCG@K; the largest is the number of items that a user gets.
        num_beams: one number or several, each evaluated; by default the checkpoint's own, else 20.
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
    beams = list(num_beams) if isinstance(num_beams, Sequence) else [num_beams]
    if not beams:
        raise ValueError("num_beams=[], expected one number or more")
    settings = Settings(
        columns=UserColumns(history, tokens, text, None, exclude, filter, target, group, is_new),
        top_k=ks[-1],
        num_beams=beams[0] or 0,
        on_error=on_error,
        token_budget=token_budget,
        window_rows=window_rows,
        max_prompt_tokens=max_prompt_tokens,
        prefix_tokens=tuple(prefix_tokens),
        suffix_tokens=tuple(suffix_tokens),
        options=options,
        leave_one_out=target is None,
    )
    for width in beams:
        check_settings(replace(settings, num_beams=width or 0))
    processes = Processes()
    where = {"dtype": dtype, "device_map": device_map, "tokenizer": tokenizer}
    job, table = make_job(
        model, users, settings, processes, index=constraint_index, format=format, delimiter=delimiter, **where
    )
    known_new = None if new_items is None else frozenset(new_items)
    own = tempfile.mkdtemp(prefix="hf_gr-evaluate-", dir=work_dir) if processes.is_main else None
    folder = Path(processes.from_main(own))
    try:
        results = []
        for width in beams:
            how = {"cutoffs": ks, "new_items": known_new, "sampled_users": sampled_users, "progress": progress}
            results.append(_evaluate_beams(job, table, width or job.decoder.num_beams, folder, processes, **how))
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
    latency, invalid = _sample(job, users, sampled_users) if processes.is_main and sampled_users else (None, None)
    processes.from_main(None)  # nobody begins while the first one takes the time
    start = perf_counter()
    made = run_job(job, users, folder / f"{num_beams}.parquet", processes, overwrite=True, progress=progress)
    seconds = perf_counter() - start
    result = None
    if processes.is_main:
        counted = _count(made.output, job.decoder.index, cutoffs, new_items)
        result = BeamResult(
            num_beams=num_beams,
            num_users=made.num_rows - made.num_skipped,
            num_skipped=made.num_skipped,
            **counted,
            unconstrained_invalid=invalid,
            latency_seconds=latency,
            users_per_second=made.num_rows / seconds,
        )
    return processes.from_main(result)


def _count(
    output: Path, index: ConstraintIndex, cutoffs: tuple[int, ...], new_items: Collection[Any] | None
) -> dict[str, Any]:
    """Metrics of a file of rows, read in pieces."""
    totals, of_new = RankingTotals(cutoffs), RankingTotals(cutoffs)
    groups: dict[str, RankingTotals] = {}
    seen: set[Any] = set()
    num_items = num_invalid = 0
    with pyarrow.parquet.ParquetFile(output) as reader:
        for batch in reader.iter_batches(8192):
            columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
            found = {item for items in columns["items"] for item in items}
            unknown = found - seen
            listed = list(unknown)
            invalid = {item for item, there in zip(listed, index.has_items(listed), strict=True) if not there}
            seen |= unknown
            for row, (items, targets) in enumerate(zip(columns["items"], columns["targets"], strict=True)):
                if columns["error"][row] is not None if "error" in columns else False:
                    continue
                num_items += len(items)
                num_invalid += sum(item in invalid for item in items)
                totals.add(items, targets)
                if "group" in columns:
                    groups.setdefault(str(columns["group"][row]), RankingTotals(cutoffs)).add(items, targets)
                is_new = columns["is_new"][row] if "is_new" in columns else targets[0] in (new_items or ())
                if is_new in (True, 1, "true", "True", "1"):
                    of_new.add(items, targets)
    return {
        "metrics": totals.means(),
        "groups": {name: _with_size(groups[name]) for name in sorted(groups)},
        "new_items": _with_size(of_new) if new_items is not None or "is_new" in reader.schema_arrow.names else {},
        "coverage": len(seen) / max(1, len(set(index.item_ids))),
        "filled": num_items / max(1, totals.num_users * cutoffs[-1]),
        "invalid": num_invalid / max(1, num_items),
    }


def _with_size(totals: RankingTotals) -> dict[str, float]:
    return {"num_users": totals.num_users, **totals.means()}


def _sample(job: Job, users: Users, num_users: int) -> tuple[float | None, float | None]:
    """Mean seconds of one user alone, and the share of beams that are no item without the catalogue."""
    requests = job.maker(next(users.windows(num_users))).requests
    if not requests:
        return None, None
    decoder = job.decoder
    decoder.answer(requests[:1])  # the first call is slower than all others
    seconds = []
    for request in requests:
        start = perf_counter()
        decoder.answer([request])  # it ends with items on the host: the device has finished
        seconds.append(perf_counter() - start)
    return fmean(seconds), fmean(_free_invalid(job, request) for request in requests)


def _free_invalid(job: Job, request: Request) -> float:
    """The share of the beams of a model without its catalogue that are no item."""
    decoder = job.decoder
    prompts = decoder.prompts([request])
    sequences: torch.Tensor = decoder.model.generate(
        **prompts,
        constraint_index=False,
        num_beams=decoder.num_beams,
        num_return_sequences=decoder.top_k,
        max_new_tokens=decoder.index.max_length,
        min_new_tokens=None,
        do_sample=False,
    )
    length = 1 if decoder.model.config.is_encoder_decoder else prompts["input_ids"].shape[1]
    found = decoder.index.items(sequences[:, length:].cpu())
    return sum(not items for items in found) / len(found)


def _hardware(model: Any, num_processes: int) -> str:
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{num_processes} x {name}, {dtype}, torch {torch.__version__}"
