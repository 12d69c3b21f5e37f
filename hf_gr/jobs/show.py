# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The results of `evaluate` as tables of texts, and these as plain text. Counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hf_gr.files.text import printable

from .intervals import FEWEST_USERS

if TYPE_CHECKING:
    from .results import Evaluation, Result

WIDE = 1000  # columns of a file or a log: nothing is cut there
Table = tuple[list[list[str]], int]  # its head and rows, and how many of the first columns are names

COUNT, SHARE = "{:,}".format, "{:.1%}".format
# Rows of the first table: the field of a result, how it is shown, and whether a row of zeros is omitted.
BEFORE: dict[str, tuple[str, Callable[[Any], str], bool]] = {
    "users": ("num_users", COUNT, False),
    "rows": ("num_rows", COUNT, False),
    "  with an unknown target": ("num_unknown_targets", COUNT, True),
    "  with an excluded target": ("num_excluded_targets", COUNT, True),
    "  answered by the fallback": ("num_fallback", COUNT, True),
    "unknown items dropped": ("num_dropped", COUNT, True),
}
AFTER: dict[str, tuple[str, Callable[[Any], str], bool]] = {
    "coverage of the catalogue": ("coverage", SHARE, False),
    "places filled": ("filled", SHARE, False),
    "proven lists": ("proven", SHARE, False),
    "invalid items": ("invalid", SHARE, False),
    "  without the catalogue": ("unconstrained_invalid", SHARE, False),
    "latency of one user": ("latency_seconds", lambda value: f"{1000 * value:.1f} ms", False),
    "users a second, in batches": ("users_per_second", "{:,.0f}".format, False),
}


def as_text(found: Evaluation, *, width: int = WIDE) -> str:
    """All tables, warnings and notes; a table that is wider is cut into some columns each, with the names of its rows.

    Args:
        found: the results.
        width: columns of the terminal.
    """
    tables = [_results(found)]
    if found.differences:
        tables.append(_differences(found))
    if any(result.groups or result.new_items for result in found.results):
        tables.append(_parts(found))
    warnings = [f"Warning: {warning}" for warning in found.warnings]
    lines = [printable(line) for line in (found.hardware, *warnings, *_notes(found))]
    return "\n\n".join([*(part for table in tables for part in _in_columns(table, width)), "\n".join(lines)])


def _notes(found: Evaluation) -> Iterator[str]:
    """What a reader of the tables has to know, a line each."""
    if found.num_resamples and found.results[0].num_users < FEWEST_USERS:
        yield f"Too few users for an interval: {found.results[0].num_users}, expected {FEWEST_USERS} or more."
    elif found.num_resamples:
        yield (
            f"Intervals: {found.confidence:.0%} bootstrap percentile intervals over users ({found.num_resamples:,} "
            f"resamples, seed {found.bootstrap_seed}); differences are paired over the same users."
        )
    if found.baselines_omit_history:
        yield ("Lists of the baselines omit what their user has had (omit_history=False: only what exclude= says).")
    yield from (f"Skipped {reason.num_rows:,} rows such as this one: {reason.example}" for reason in found.skipped)


def _results(found: Evaluation) -> Table:
    results: list[Any] = [*found.results, *found.baselines]

    def shown(rows: dict[str, tuple[str, Callable[[Any], str], bool]]) -> Iterator[list[str]]:
        for name, (field, show, is_left_out) in rows.items():
            values = [getattr(result, field, None) for result in results]
            is_said = any(values) if is_left_out else any(value is not None for value in values)
            if is_said and not (name == "rows" and values == [result.num_users for result in results]):
                yield [name, *("-" if value is None else show(value) for value in values)]

    metrics = [[metric, *(_with_interval(result, metric) for result in results)] for metric in results[0].metrics]
    head = ["", *(printable(result.label) for result in results)]
    return [head, *shown(BEFORE), *metrics, *shown(AFTER)], 1


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
    by_pair: dict[str, dict[str, str]] = {}
    for one in found.differences:
        pair = f"{printable(one.result)} - {printable(one.other)}"
        text = f"{one.difference:+.4f} ({one.low:+.4f} to {one.high:+.4f})"
        by_pair.setdefault(pair, {})[one.metric] = text
    rows = [[pair, *(texts[metric] for metric in metrics)] for pair, texts in by_pair.items()]
    return [["difference", *metrics], *rows], 1


def _parts(found: Evaluation) -> Table:
    """Metrics at the largest cutoff, a row for each part of the users and each result."""
    metrics = _last_metrics(found)
    rows = [["part of the users", "result", "users", *metrics]]
    for result in (*found.results, *found.baselines):
        parts = {f"group {name}": values for name, values in result.groups.items()}
        parts |= {"target is new": result.new_items} if result.new_items else {}
        for part, values in parts.items():
            cells = [f"{values[metric]:.4f}" if metric in values else "-" for metric in metrics]
            rows.append([printable(part), printable(result.label), f"{int(values['num_users']):,}", *cells])
    return rows, 2


def _last_metrics(found: Evaluation) -> list[str]:
    return [f"recall@{found.cutoffs[-1]}", f"ndcg@{found.cutoffs[-1]}", "mrr"]


def _in_columns(table: Table, width: int) -> Iterator[str]:
    """The table as text: names to the left, all else to the right."""
    rows, start = table
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    keys = list(range(start))
    while start < len(widths):
        places = [*keys, start]
        while places[-1] + 1 < len(widths) and sum(widths[at] + 2 for at in (*places, places[-1] + 1)) <= width + 2:
            places.append(places[-1] + 1)
        start = places[-1] + 1
        lines = (
            [row[at].ljust(widths[at]) if at in keys else row[at].rjust(widths[at]) for at in places] for row in rows
        )
        yield "\n".join("  ".join(line).rstrip() for line in lines)
