# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The results of `evaluate` as tables of texts, and these as plain text. Counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_gr.files.text import printable

from .intervals import FEWEST_USERS

if TYPE_CHECKING:
    from .results import Difference, Evaluation, Result

Row = list[str]
WIDE = 1000  # columns of a file or a log: nothing is cut there
SAID_IF_ANY = ("  with an unknown target", "  answered by the fallback", "unknown items dropped")


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        head: the names of the columns.
        rows: each begins with its name.
        num_keys: columns of names, which are aligned to the left.
    """

    head: Row
    rows: list[Row]
    num_keys: int = 1


def tables(found: Evaluation) -> list[Table]:
    """All results by metric, then differences, then groups and new items."""
    made = [_results(found)]
    if found.differences:
        made.append(_differences(found))
    if any(result.groups or result.new_items for result in found.results):
        made.append(_parts(found))
    return made


def notes(found: Evaluation) -> list[str]:
    """What a reader of the tables has to know, a line each."""
    lines = [found.hardware]
    if found.num_resamples:
        num_users = found.results[0].num_users
        how = f"{found.num_resamples:,} resamples, seed {found.bootstrap_seed}"
        lines.append(
            f"Too few users for an interval: {num_users}, expected {FEWEST_USERS} or more."
            if num_users < FEWEST_USERS
            else f"Intervals: {found.confidence:.0%} bootstrap percentile intervals over users ({how}); differences "
            "are paired over the same users."
        )
    if found.baselines_omit_history:
        lines.append(
            "Lists of the baselines omit what their user has had (omit_history=False, --no-omit-history: only what "
            "exclude= says)."
        )
    lines += [f"Skipped {reason.num_rows:,} rows such as this one: {reason.example}" for reason in found.skipped]
    return [printable(line) for line in lines]


def _results(found: Evaluation) -> Table:
    results: list[Any] = [*found.results, *found.baselines]
    shows: dict[str, tuple[str, Callable[[Any], str]]] = {
        "users": ("num_users", "{:,}".format),
        "rows": ("num_rows", "{:,}".format),
        "  with an unknown target": ("num_unknown_targets", "{:,}".format),
        "  answered by the fallback": ("num_fallback", "{:,}".format),
        "unknown items dropped": ("num_dropped", "{:,}".format),
        "coverage of the catalogue": ("coverage", "{:.1%}".format),
        "places filled": ("filled", "{:.1%}".format),
        "invalid items": ("invalid", "{:.1%}".format),
        "  without the catalogue": ("unconstrained_invalid", "{:.1%}".format),
        "latency of one user": ("latency_seconds", lambda value: f"{1000 * value:.1f} ms"),
        "users a second, in batches": ("users_per_second", "{:,.0f}".format),
    }
    rows: list[Row] = []
    for name, (field, show) in shows.items():
        values = [getattr(result, field, None) for result in results]
        is_said = any(values) if name in SAID_IF_ANY else any(value is not None for value in values)
        if is_said and not (name == "rows" and values == [result.num_users for result in results]):
            rows.append([name, *("-" if value is None else show(value) for value in values)])
        if name == "unknown items dropped":
            rows += [[metric, *(_with_interval(one, metric) for one in results)] for metric in results[0].metrics]
    return Table(["", *(printable(result.label) for result in results)], rows)


def _with_interval(result: Result, metric: str) -> str:
    if metric not in result.metrics:
        return "-"
    text = f"{result.metrics[metric]:.4f}"
    if metric in result.intervals:
        low, high = result.intervals[metric]
        text += f" ({low:.4f} to {high:.4f})"
    return text


def _differences(found: Evaluation) -> Table:
    """At the largest cutoff; all others are in `Evaluation.differences`."""
    metrics = _last_metrics(found)
    by_pair: dict[tuple[str, str], dict[str, Difference]] = {}
    for one in found.differences:
        by_pair.setdefault((one.result, one.other), {})[one.metric] = one
    rows = [
        [f"{printable(result)} - {printable(other)}", *(_signed(ones[metric]) for metric in metrics)]
        for (result, other), ones in by_pair.items()
    ]
    return Table(["difference", *metrics], rows)


def _signed(one: Difference) -> str:
    return f"{one.difference:+.4f} ({one.low:+.4f} to {one.high:+.4f})"


def _parts(found: Evaluation) -> Table:
    """Metrics at the largest cutoff, a row for each part of the users and each result."""
    metrics, rows = _last_metrics(found), []
    for result in (*found.results, *found.baselines):
        parts = {f"group {name}": values for name, values in result.groups.items()}
        parts |= {"target is new": result.new_items} if result.new_items else {}
        for part, values in parts.items():
            cells = [f"{values[metric]:.4f}" if metric in values else "-" for metric in metrics]
            rows.append([printable(part), printable(result.label), f"{int(values['num_users']):,}", *cells])
    return Table(["part of the users", "result", "users", *metrics], rows, num_keys=2)


def _last_metrics(found: Evaluation) -> list[str]:
    return [f"recall@{found.cutoffs[-1]}", f"ndcg@{found.cutoffs[-1]}", "mrr"]


def as_text(found: Evaluation, *, width: int = WIDE) -> str:
    """All tables, warnings and notes; a table that is wider is cut into some columns each, with the names of its rows.

    Args:
        found: the results.
        width: columns of the terminal.
    """
    hardware, *others = notes(found)
    lines = [hardware, *(f"Warning: {printable(warning)}" for warning in found.warnings), *others]
    return "\n\n".join([*(part for table in tables(found) for part in _in_columns(table, width)), "\n".join(lines)])


def _in_columns(table: Table, width: int) -> Iterator[str]:
    rows = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    keys, start = range(table.num_keys), table.num_keys
    while start < len(widths):
        places = [*keys, start]
        while places[-1] + 1 < len(widths) and sum(widths[at] + 2 for at in (*places, places[-1] + 1)) <= width + 2:
            places.append(places[-1] + 1)
        start = places[-1] + 1
        yield "\n".join(
            "  ".join(
                row[at].ljust(widths[at]) if at < table.num_keys else row[at].rjust(widths[at]) for at in places
            ).rstrip()
            for row in rows
        )
