# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What looks like a mistake in a run that went well, counted while it runs. Knows rows, and no model.

Windows that an earlier run finished are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.tables.cells import shorten
from hf_gr.tables.files import pc
from hf_gr.tables.table import Rows

from .reading import UserRow


def counts_of(
    rows: Sequence[UserRow], items: Sequence[Sequence[Any]], errors: Sequence[str | None], snapshot: Snapshot
) -> Counter[str]:
    """What to count of a window: its rows, the items of each, and why some have none."""
    answered = [(row, found) for row, found, error in zip(rows, items, errors, strict=True) if error is None]
    excluded = [item for row in rows if row.request for item in row.request.exclude]
    return Counter(
        answered=len(answered),
        fallback=sum(row.is_cold for row, _ in answered),
        empty=sum(not found for _, found in answered),
        excluded=len(excluded),
        unknown=int((~snapshot.sequences_of(excluded)[0]).sum()) if excluded else 0,
    )


def warning_of_repeated(window: Rows, column: str) -> Iterator[str]:
    """What to tell of a user with several rows in a window."""
    counted = pc.value_counts(window.columns.column(column).combine_chunks().drop_null())
    most = pc.max(counted.field("counts")).as_py() or 0
    if most > 1:
        user = counted.field("values")[pc.index(counted.field("counts"), most).as_py()].as_py()
        yield (
            f"user {shorten(user)} has {most:,} rows among the first {len(window):,}, expected one of each user: "
            "every row is answered alone; hf_gr.training.read_histories makes one history of each user's rows"
        )


def warnings_of(counts: Counter[str]) -> Iterator[str]:
    """What to tell of the counts of a whole run."""
    answered, excluded = counts["answered"], counts["excluded"]
    if excluded and counts["unknown"] == excluded:
        what = f"exclude= has {excluded:,} ids, of which the catalogue has none, expected its ids"
        yield f"{what}: nothing was excluded; is it the right column?"
    if answered and counts["fallback"] == answered:
        yield (
            f"fallback= answered all {answered:,} rows, expected some from the model: is the history the right "
            "column, and are its ids the catalogue's?"
        )
    elif answered and counts["empty"] == answered:
        yield (
            f"all {answered:,} rows are without an item, expected some: exclude= or filter= leaves nothing; are they "
            "the right columns?"
        )
