# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The results of `evaluate`: numbers by model, number of beams and baseline. Counts nothing but differences."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .intervals import CONFIDENCE, UserValues
from .metrics import metric_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True)
class Result:
    """How good some lists are: those of a baseline, or of a model.

    Attributes:
        name: of the model or the baseline.
        num_users: users that were evaluated: rows, or with `user=` users, who may have several rows.
        num_rows: rows that were evaluated; metrics are means over them.
        num_unknown_targets: rows with a target that the catalogue does not have, which is a miss.
        num_excluded_targets: rows with a target that `exclude` has, which is a miss.
        num_skipped: rows that some model could not answer; they are excluded for all models and baselines.
        metrics: by name, over all rows: see `user_metrics`.
        intervals: the lower and the upper bound of each metric: see `Evaluation.confidence`. Empty with fewer than
            10 users, and without resamples.
        groups: metrics by group, with `num_users`; empty without a column of groups.
        new_items: the same over the users whose target is a new item; empty if no new items were named.
        coverage: the share of the catalogue's items that are recommended to at least one user.
        filled: the share of list positions that hold an item; less than 1 if filters leave too few.
        invalid: the share of recommended items that the catalogue does not have: always 0, but counted.
    """

    name: str
    num_users: int
    num_rows: int
    num_unknown_targets: int
    num_excluded_targets: int
    num_skipped: int
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    groups: dict[str, dict[str, float]]
    new_items: dict[str, float]
    coverage: float
    filled: float
    invalid: float

    @property
    def label(self) -> str:
        """What tables and plots call it."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class BeamResult(Result):
    """The results of a model with one number of beams.

    Attributes:
        exact: whether the best items of the whole catalogue were asked for.
        num_beams: of the search; at most as many as the catalogue has sequences, since more find nothing.
        unconstrained_invalid: the share of beams that are no item when the same model generates without the catalogue,
            over a sample; None in Flax, which cannot.
        latency_seconds: mean time to answer one user alone, over a sample.
        users_per_second: throughput of all processes together, in batches.
        proven: the share of the model's lists of which all items are certainly the best of the catalogue; None if
            unknown.
        num_fallback: rows that the fallback answered, not the model; they count like all others.
        num_dropped: items of histories and filters that the catalogue does not have, if these are dropped.
    """

    num_beams: int
    exact: bool
    unconstrained_invalid: float | None
    latency_seconds: float | None
    users_per_second: float
    proven: float | None
    num_fallback: int
    num_dropped: int

    @property
    def label(self) -> str:
        """What tables and plots call it."""
        return f"{self.name}, exact" if self.exact else f"{self.name}, {self.num_beams} beams"


@dataclass(frozen=True)
class Difference:
    """By how much one result is better than another, over the same users.

    Attributes:
        result: the label of the first.
        other: the label of the second.
        metric: its name.
        difference: the mean of the users' differences, the first minus the second.
        low: the lower bound of its interval: see `Evaluation.confidence`.
        high: the upper bound.
    """

    result: str
    other: str
    metric: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Skipped:
    """Rows that could not be answered for one reason.

    Attributes:
        num_rows: how many.
        example: the first one's message, with its file and number.
    """

    num_rows: int
    example: str


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The results of `evaluate`, which are shown as tables.

    Attributes:
        cutoffs: the K of the metrics.
        results: one for each model and number of beams, in the order of the arguments.
        baselines: the same of the baselines, over the same users: popular items, and items that go with those of the
            history. Empty without histories, or if they were not requested.
        baselines_omit_history: whether lists of the baselines omit what their user has had, beyond what `exclude`
            says: see `omit_history`.
        differences: paired differences: every model to the first one with as many beams, and with most beams to the
            baselines; `difference` makes others.
        skipped: the reasons why rows were skipped, the most frequent first.
        warnings: what makes the numbers doubtful.
        hardware: the devices used.
        num_resamples: resamples of the users for intervals, which are bootstrap percentile intervals; 0 for none.
        bootstrap_seed: of the resamples.
        confidence: the share of the resamples whose means lie within an interval.
    """

    cutoffs: tuple[int, ...]
    results: tuple[BeamResult, ...]
    baselines: tuple[Result, ...]
    baselines_omit_history: bool
    differences: tuple[Difference, ...]
    skipped: tuple[Skipped, ...]
    warnings: tuple[str, ...]
    hardware: str
    num_resamples: int
    bootstrap_seed: int
    confidence: float = CONFIDENCE
    _values: dict[str, UserValues] = field(default_factory=dict, compare=False)  # by label

    def difference(self, result: Result, other: Result) -> tuple[Difference, ...]:
        """Paired differences of two of these results, one for each metric.

        None without resamples, or with fewer than 10 users.

        Raises:
            ValueError: one is no result of this evaluation.
        """
        known = (*self.results, *self.baselines)
        for name, one in (("result", result), ("other", other)):
            if one not in known:  # one of another evaluation may have the same label, and is over other users
                labels = ", ".join(map(repr, self._values))
                raise ValueError(
                    f"{name}={getattr(one, 'label', one)!r}, expected one of this evaluation's results or baselines "
                    f"({labels}): pass one of found.results or found.baselines"
                )
        means, bounds = self._values[result.label].differences(
            self._values[other.label], num_resamples=self.num_resamples, seed=self.bootstrap_seed
        )
        return tuple(
            Difference(result.label, other.label, metric, mean, low, high)
            for metric, mean, (low, high) in zip(metric_names(self.cutoffs), means, bounds, strict=False)
        )

    def to_json(self) -> str:
        """One JSON object; its fields are those of this class."""
        return json.dumps(
            {name: value for name, value in asdict(replace(self, _values={})).items() if name != "_values"}, indent=2
        )

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each result and each part of its users; missing numbers are NaN.

        Columns: `name`, `num_beams`, `users` (`"all"`, `"group fr"` or `"target is new"`), `num_users`, each metric
        and its bounds (`recall@10`, `recall@10_low`, `recall@10_high`), and the other fields of `BeamResult`.
        `pandas.DataFrame(found.differences)` is the table of differences.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        rows: list[dict[str, Any]] = []
        for result in (*self.results, *self.baselines):
            known = {"name": result.name, "num_beams": getattr(result, "num_beams", None)}
            row = known | {"users": "all", "num_users": result.num_users}
            for metric, value in result.metrics.items():
                row[metric] = value
                if metric in result.intervals:
                    row[f"{metric}_low"], row[f"{metric}_high"] = result.intervals[metric]
            rest = {name: value for name, value in vars(result).items() if not isinstance(value, dict)}
            rows.append(row | rest)
            rows.extend(known | {"users": f"group {name}"} | values for name, values in result.groups.items())
            if result.new_items:
                rows.append(known | {"users": "target is new"} | result.new_items)
        return DataFrame(rows).astype({"num_beams": "Int64"})

    def plot(self, path: str | Path | None = None, *, metric: str | None = None) -> Figure:
        """Draw a metric with its intervals, by beams and by latency; line styles and markers tell models apart.

        Args:
            path: also save it there; the suffix is the format: `.png`, `.svg` or `.pdf`.
            metric: such as `"ndcg@10"`; by default recall at the largest cutoff.

        Returns:
            A figure of matplotlib, which a notebook shows.

        Raises:
            ValueError: no such metric, or no such format.
            ImportError: matplotlib is not installed.
        """
        from .plot import draw  # needs matplotlib

        return draw(self, path, metric=metric)

    def __repr__(self) -> str:
        from .show import as_text

        return as_text(self)
