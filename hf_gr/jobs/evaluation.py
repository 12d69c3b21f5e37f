# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: how good and how fast recommendations are, for one number of beams or several, and several models.

Rows come from the same code as `recommend`'s, over the same processes; only the first process counts.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from hf_gr.answering.backends import backend_for, backend_of
from hf_gr.answering.loading import check_name
from hf_gr.answering.recommender import useful_beams
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.code_book import doubts_of

from .baselines import ITEM_TO_ITEM, POPULARITY
from .job import Job, make_job
from .measures import Tally, baseline_lists, count_rows, learn, proven_share, time_users
from .reading import Users
from .results import BeamResult, Evaluation, Result
from .run import run_job
from .settings import Settings, count, cutoffs_and_beams

MODEL_FILES = ("config.json", "adapter_config.json")  # of models, and of adapters

logger = logging.getLogger("hf_gr.evaluate")


class Contender(NamedTuple):
    """A model with its catalogue, under a name; the catalogue is None if the model's checkpoint names it."""

    name: str
    model: Any
    index: Any


class Run(NamedTuple):
    """One model's answers to all users, with one number of beams: the rows, and other fields of `BeamResult`."""

    name: str
    num_beams: int
    output: Path
    index: ConstraintIndex
    doubts: Sequence[str]  # warnings about the catalogue, for this model
    measured: dict[str, Any]


def run_evaluation(model: Any, users: Any, given: Settings) -> Evaluation:
    """What `evaluate` does, after its arguments are read."""
    cutoffs, beams = cutoffs_and_beams(given)
    if given.target is None and given.history is None:
        raise ValueError("target=None without history=, expected the column of what came next: pass target=")
    if given.new_items is not None and given.is_new is not None:
        raise ValueError("new_items= and is_new= are given, expected one of them")
    for name in ("sampled_users", "num_resamples", "bootstrap_seed"):
        count(name, getattr(given, name), at_least=0)
    given = replace(given, top_k=cutoffs[-1], leave_one_out=given.target is None, overwrite=True)
    every = [replace(given, num_beams=width).checked() for width in beams]
    contenders = _contenders(model, given.constraint_index)
    processes = _processes(contenders, given)
    folder = Path(
        processes.by_main(
            lambda: tempfile.mkdtemp(prefix="hf_gr-evaluate-", dir=given.work_dir),
            doing="has no folder for rows on the way",
        )
    )
    try:
        runs: list[Run] = []
        readers: list[tuple[Job, Users]] = []
        hardware: list[str] = []
        for number, contender in enumerate(contenders):
            more, reader, used = _run_model(contender, users, every, folder, number, processes)
            runs += more
            readers.append(reader)
            hardware += [used] if used not in hardware else []
        found = processes.by_main(
            lambda: _count(runs, *readers[0], cutoffs, "; ".join(hardware)), doing="could not count"
        )
    finally:
        if processes.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if processes.is_main:
        for warning in found.warnings:
            logger.warning(warning)
    return found


def _contenders(model: Any, index: Any) -> list[Contender]:
    """The models and catalogues to compare, by name; a mistake in a later name is found before the first one runs."""
    for argument, given in (("model", model), ("constraint_index", index)):
        if isinstance(given, (list, tuple)):
            raise ValueError(
                f"{argument} is a {type(given).__name__}, expected one or a dictionary by name: name each"
            )
    models, indexes = (given if isinstance(given, Mapping) else None for given in (model, index))
    names = list(models if models is not None else indexes if indexes is not None else [_name_of(model)])
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"model= or constraint_index= has the names {names!r}, expected one text or more: name them")
    if models is not None and indexes is not None and set(models) != set(indexes):
        raise ValueError(
            f"constraint_index= has {sorted(indexes)!r} and model= has {sorted(models)!r}, expected the same names: "
            "give each model its catalogue, or one catalogue for all"
        )
    found = [
        Contender(name, model if models is None else models[name], index if indexes is None else indexes[name])
        for name in names
    ]
    if clash := {POPULARITY, ITEM_TO_ITEM}.intersection(names):
        raise ValueError(f"a model is called {clash.pop()!r}, expected another name: that of a baseline")
    for contender in found:
        if isinstance(contender.model, (str, Path)):
            check_name(contender.model)
            folder = Path(contender.model)
            if folder.is_dir() and not any((folder / name).is_file() for name in MODEL_FILES):
                raise ValueError(f"model={str(folder)!r} has no config.json, expected a saved model: check the path")
    return found


def _processes(contenders: Sequence[Contender], settings: Settings) -> Any:
    """The processes of a comparison: PyTorch's, if any of its models is there; a model in Flax refuses several."""
    found = [backend_for(one.model, settings.backend, settings.of_loading) for one in contenders]
    backends = {backend.name: backend for backend in found}
    made = {name: backend.processes() for name, backend in sorted(backends.items())}  # Flax refuses before any begins
    return made.get("torch") or made["flax"]


def _name_of(model: Any) -> str:
    """The name of a single model: its folder's name, its repository, or `model`."""
    if not isinstance(model, (str, Path)):
        model = getattr(getattr(model, "config", None), "name_or_path", None) or "model"
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def _run_model(
    contender: Contender, users: Any, every: Sequence[Settings], folder: Path, number: int, processes: Any
) -> tuple[list[Run], tuple[Job, Users], str]:
    """Answer all users with each number of beams; what is returned does not keep the model."""
    job, table = make_job(contender.model, users, replace(every[0], constraint_index=contender.index), processes)
    recommender = job.recommender
    model, index, mesh = recommender.model, recommender.index, recommender.options.get("mesh")
    hardware = backend_of(model).hardware(model, num_processes=processes.count, mesh=mesh)
    doubts = doubts_of(index.snapshot, vocabulary=recommender.vocab_size)
    widths = [useful_beams(one.num_beams or recommender.num_beams, index, one.top_k) for one in every]
    runs = []
    for width in dict.fromkeys(widths):
        output = folder / f"{number}-{width}.parquet"
        measured = _run_beams(job, table, width, output, processes)
        runs.append(Run(contender.name, width, output, index, doubts, measured))
    return runs, (job.without_model(), table), hardware


def _run_beams(job: Job, users: Users, num_beams: int, output: Path, processes: Any) -> dict[str, Any]:
    """Answer all users with one number of beams; fields of `BeamResult` that are no counts of rows."""
    settings = replace(job.settings, num_beams=num_beams)
    job = replace(job, settings=settings, recommender=replace(job.recommender, num_beams=num_beams))
    # The first process only; the others wait while it measures.
    latency, invalid = processes.by_main(
        lambda: time_users(job, users, settings.sampled_users), doing="could not take the time"
    )
    start = perf_counter()
    made = run_job(job, users, output, processes)
    return {
        "exact": bool(job.recommender.option("exact")),
        "unconstrained_invalid": invalid,
        "latency_seconds": latency,
        "users_per_second": made.num_rows / (perf_counter() - start),
        "num_fallback": made.num_fallback,
        "num_dropped": made.num_dropped,
    }


def _count(runs: Sequence[Run], job: Job, users: Users, cutoffs: tuple[int, ...], hardware: str) -> Evaluation:
    """Count the rows of all runs, and the baselines' lists for the same users, whose rows the job reads."""
    settings = job.settings
    new_items = None if settings.new_items is None else frozenset(settings.new_items)
    names: tuple[str, ...] = ()
    lists, omits_history = None, False
    if settings.baselines and settings.history is not None:
        learned = learn(job, users)
        names, omits_history = (POPULARITY, ITEM_TO_ITEM), learned.omits_history
        lists = baseline_lists(learned, job, users)
    indexes = [*(run.index for run in runs), *(runs[0].index for _ in names)]
    tallies = [Tally(cutoffs, index, new_items) for index in indexes]
    skipped = count_rows([run.output for run in runs], tallies, lists)
    num_skipped = sum(reason.num_rows for reason in skipped)
    resampling = {"num_resamples": settings.num_resamples, "seed": settings.bootstrap_seed}
    counted = [{"num_skipped": num_skipped, **tally.result(**resampling)} for tally in tallies]
    results = tuple(
        BeamResult(name=run.name, num_beams=run.num_beams, proven=proven_share(run.output), **run.measured, **fields)
        for run, fields in zip(runs, counted, strict=False)
    )
    baselines = tuple(Result(name=name, **fields) for name, fields in zip(names, counted[len(runs) :], strict=True))
    found = Evaluation(
        cutoffs=cutoffs,
        results=results,
        baselines=baselines,
        baselines_omit_history=omits_history,
        differences=(),
        skipped=skipped,
        warnings=_warnings(runs, results, cutoffs[-1]),
        hardware=hardware,
        num_resamples=settings.num_resamples,
        bootstrap_seed=settings.bootstrap_seed,
        _values={result.label: tally.values for result, tally in zip((*results, *baselines), tallies, strict=True)},
    )
    return replace(
        found, differences=tuple(one for pair in _pairs(results, baselines) for one in found.difference(*pair))
    )


def _pairs(results: Sequence[BeamResult], baselines: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    """The pairs to compare: each model with the first at equal beams, and with its most beams, with the baselines."""
    by_model: dict[str, list[BeamResult]] = {}
    for result in results:
        by_model.setdefault(result.name, []).append(result)
    first, *others = by_model.values()
    for result in chain.from_iterable(others):
        # Catalogues of different sizes may be searched with different numbers of beams.
        same = next((other for other in first if other.num_beams == result.num_beams), first[-1])
        yield result, same
    for model in by_model.values():
        best = max(model, key=lambda result: result.num_beams)
        yield from ((best, baseline) for baseline in baselines)


def _warnings(runs: Sequence[Run], results: Sequence[BeamResult], cutoff: int) -> tuple[str, ...]:
    """Reasons to doubt the numbers: most often a catalogue whose tokens are not those of the model."""
    num_rows, num_users = results[0].num_rows, results[0].num_users
    who = "users" if num_rows == num_users else "rows"
    fix = (
        "is this the model's own catalogue, with the tokens it was trained with? hf-gr index check --model tells more"
    )
    found = [f"{run.name}: {doubt}" for run in {run.name: run for run in runs}.values() for doubt in run.doubts]
    widest = {result.name: result for result in sorted(results, key=lambda result: result.num_beams)}
    for result in widest.values():
        if result.unconstrained_invalid == 1:
            found.append(f"{result.label}: without the catalogue no beam is an item, expected some: {fix}")
        if result.num_unknown_targets:
            found.append(
                f"{result.label}: the catalogue does not have the targets of {result.num_unknown_targets:,} of "
                f"{num_rows:,} {who}, expected all: such a target is a miss; are they ids of this catalogue?"
            )
        if result.num_unknown_targets < num_rows and not result.metrics[f"recall@{cutoff}"]:
            found.append(f"{result.label}: recall@{cutoff} is 0 for all {num_rows:,} {who}, expected more: {fix}")
    if num_excluded := results[0].num_excluded_targets:
        found.append(
            f"exclude= has the targets of {num_excluded:,} of {num_rows:,} {who}: each is a miss, as recommend would "
            "not show it; where users buy again, omit exclude="
        )
    if num_users < num_rows:
        found.append(
            f"{num_rows:,} rows are of {num_users:,} users: intervals resample users with all their rows, and "
            "baselines learn from later rows of a user, too, whose histories may hold earlier targets"
        )
    return tuple(found)
