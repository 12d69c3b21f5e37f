# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `evaluate` measures: on files of rows, on lists of the baselines, and on some single users. Knows no processes.

All files are read in step, a row of each at a time: a user counts for all models or for none.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from hf_gr.answering.backends import backend_of
from hf_gr.answering.requests import Request
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.sequences import to_host
from hf_gr.tables.files import pyarrow

from .baselines import Baselines, Histories
from .intervals import UserValues
from .job import USER, WAS_EXCLUDED, Job
from .metrics import metric_names, user_metrics
from .parts import NUM_PROVEN
from .reading import Users
from .results import Skipped

ROWS_AT_ONCE = 8192
COUNTED = (USER, "items", "targets", "error", "group", "is_new", WAS_EXCLUDED)  # columns of a file of rows
# What differs between the messages for two rows of one problem: numbers, and names in quotes.
DETAILS = re.compile(r"""'[^']*'|"[^"]*"|\d+""")


@dataclass
class Tally:
    """Counts the lists of one model or baseline."""

    cutoffs: tuple[int, ...]
    index: ConstraintIndex  # that the items are of
    new_items: Collection[Any] | None  # None if none were named
    values: UserValues = field(default_factory=UserValues)

    def __post_init__(self) -> None:
        self._of_new = UserValues()
        self._groups: dict[str, UserValues] = {}
        self._is_known: dict[Any, bool] = {}  # by item, whether the catalogue has it
        self._recommended: set[Any] = set()
        self._num_items = self._num_invalid = self._num_unknown = self._num_excluded = 0
        self._names_new = self.new_items is not None

    def add(self, lists: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
        """Add some users: the items that they get, and the row with their targets, group and `is_new`."""
        new = list({item for items, row in lists for item in (*items, *row["targets"])} - self._is_known.keys())
        self._is_known |= dict(zip(new, self.index.has_items(new), strict=True))
        for items, row in lists:
            targets, user = row["targets"], row.get(USER)
            self._recommended.update(items)
            self._num_unknown += not all(self._is_known[target] for target in targets)
            self._num_excluded += row[WAS_EXCLUDED]
            self._num_items += len(items)
            self._num_invalid += sum(not self._is_known[item] for item in items)
            values = user_metrics(items, targets, self.cutoffs)
            self.values.add(values, user)
            if "group" in row:
                self._groups.setdefault(str(row["group"]), UserValues()).add(values, user)
            self._names_new = self._names_new or "is_new" in row
            if row["is_new"] if "is_new" in row else targets[0] in (self.new_items or ()):
                self._of_new.add(values, user)

    def result(self, *, num_resamples: int, seed: int) -> dict[str, Any]:
        """The fields of a `Result` that are counted."""
        bounds = self.values.intervals(num_resamples=num_resamples, seed=seed)
        return {
            "num_users": self.values.num_users,
            "num_rows": len(self.values.codes),
            "num_unknown_targets": self._num_unknown,
            "num_excluded_targets": self._num_excluded,
            "metrics": self._means(self.values),
            "intervals": dict(zip(metric_names(self.cutoffs), bounds, strict=False)),
            "groups": {name: self._with_size(self._groups[name]) for name in sorted(self._groups)},
            "new_items": self._with_size(self._of_new) if self._names_new else {},
            "coverage": len(self._recommended) / max(1, len(set(self.index.item_ids))),
            "filled": self._num_items / max(1, len(self.values.codes) * self.cutoffs[-1]),
            "invalid": self._num_invalid / max(1, self._num_items),
        }

    def _means(self, values: UserValues) -> dict[str, float]:
        return dict(zip(metric_names(self.cutoffs), values.means(), strict=False))

    def _with_size(self, values: UserValues) -> dict[str, float]:
        return {"num_users": values.num_users, **self._means(values)}


def count_rows(
    outputs: Sequence[Path], tallies: Sequence[Tally], beside: Iterable[Sequence[Sequence[Any]]] | None = None
) -> tuple[Skipped, ...]:
    """Count files of the same users' rows, each with its tally, and the lists `beside` them, with the last tallies.

    A row for which any file has no answer is excluded for all. Returns why rows were skipped.
    """
    reasons: dict[str, Skipped] = {}
    users: dict[str, int] = {}
    more = repeat(()) if beside is None else beside
    together = zip(zip(*map(_rows, outputs), strict=True), more, strict=beside is not None)
    while found := list(islice(together, ROWS_AT_ONCE)):
        kept = []
        for rows, lists in found:
            problem = next((row["error"] for row in rows if row.get("error") is not None), None)
            if problem is None:
                if USER in rows[0]:
                    who = rows[0][USER]  # a row without one is a user of its own
                    who = f"no user {len(users)}" if who is None else f"user {who}"
                    rows[0][USER] = users.setdefault(who, len(users))
                kept.append((rows[0], [*(row["items"] for row in rows), *lists]))
            else:
                kind = DETAILS.sub("...", problem)
                known = reasons.get(kind, Skipped(0, problem))
                reasons[kind] = replace(known, num_rows=known.num_rows + 1)
        for number, tally in enumerate(tallies):
            tally.add([(lists[number], row) for row, lists in kept])
    return tuple(sorted(reasons.values(), key=lambda reason: -reason.num_rows))


def proven_share(output: Path) -> float | None:
    """The share of a file's lists of which all items are proven; None if that is unknown."""
    num_lists = num_proven = 0
    for row in _rows(output, ("items", NUM_PROVEN)):
        if row[NUM_PROVEN] is not None:
            num_lists, num_proven = num_lists + 1, num_proven + (row[NUM_PROVEN] == len(row["items"]))
    return num_proven / num_lists if num_lists else None


def learn(job: Job, users: Users) -> Baselines:
    """Count the histories of a table, those of all users that have a prompt; targets are no part of them."""
    histories = Histories()
    for window in users.windows(job.settings.window_rows):
        histories.add(row.request.history for row in job.read(window) if row.request and row.request.tokens)
    return Baselines(histories, job.recommender.index, omit_history=job.settings.omit_history)


def baseline_lists(baselines: Baselines, job: Job, users: Users) -> Iterator[tuple[Sequence[Any], ...]]:
    """The baselines' lists for every row of a table, in order; empty ones for rows without an answer."""
    for window in users.windows(job.settings.window_rows):
        for row in job.read(window):
            if row.request is None:
                yield (), ()
            else:
                found = baselines.answer(row.request, row.request.history, top_k=job.settings.top_k)
                yield tuple(found.values())


def time_users(job: Job, users: Users, num_users: int) -> tuple[float | None, float | None]:
    """Mean seconds to answer one user alone, and the share of beams that are no item without the catalogue."""
    rows = job.read(next(users.windows(num_users))) if num_users else []
    requests = [row.request for row in rows if row.request and row.request.tokens]
    if not requests:
        return None, None
    recommender, backend = job.recommender, backend_of(job.recommender.model)
    for request in requests if backend.is_compiled else requests[:1]:
        recommender.answer([request])  # warm-up: the first call (of a shape, if there is a program for each) is slower
    seconds = []
    for request in requests:
        start = perf_counter()
        recommender.answer([request])  # its items are on the host: the device has finished
        seconds.append(perf_counter() - start)
    if backend.is_compiled:  # Flax generates nothing without a catalogue
        return fmean(seconds), None
    return fmean(seconds), fmean(_free_invalid(job, request) for request in requests)


def _free_invalid(job: Job, request: Request) -> float:
    """The share of beams that are no item when the model generates without its catalogue."""
    recommender = job.recommender
    prompts = recommender.prompts([request])
    sequences: Any = recommender.model.generate(
        **prompts,
        constraint_index=False,
        num_beams=max(recommender.num_beams, recommender.num_results),
        num_return_sequences=recommender.num_results,
        max_new_tokens=recommender.index.max_length,
        min_new_tokens=None,
        do_sample=False,
    )
    length = 1 if recommender.model.config.is_encoder_decoder else prompts["input_ids"].shape[1]
    # Not `index.items`, which refuses rows that continue after an item: a free beam may.
    found = recommender.index.snapshot.items_of(to_host(sequences)[:, length:])
    return sum(not items for items in found) / len(found)


def _rows(output: Path, columns: Collection[str] = COUNTED) -> Iterator[dict[str, Any]]:
    with pyarrow.parquet.ParquetFile(output) as reader:
        names = [name for name in reader.schema_arrow.names if name in columns]
        for batch in reader.iter_batches(ROWS_AT_ONCE, columns=names):
            yield from batch.to_pylist()
