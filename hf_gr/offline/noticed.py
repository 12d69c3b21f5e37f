# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What looks like a mistake in a run that went well, counted while it runs. Knows rows, and no model.

Windows that an earlier run finished are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hf_gr.tables.cells import shorten
from hf_gr.tables.files import pc


@dataclass
class Noticed:
    """Counts of the rows of one process.

    Attributes:
        num_answered: rows without an error.
        num_fallback: those that the fallback answered.
        num_empty: those without an item.
        num_excluded: ids that rows exclude.
        num_unknown: those of them that the catalogue does not have.
        repeated: of the first window: a user with several rows, the number of these rows, and the window's size.
    """

    num_answered: int = 0
    num_fallback: int = 0
    num_empty: int = 0
    num_excluded: int = 0
    num_unknown: int = 0
    repeated: tuple[Any, int, int] | None = None

    def look_for_repeated(self, users: Any) -> None:
        """Look for a user with several rows in a window's Arrow column of users."""
        counted = pc.value_counts(users.drop_null())
        if len(counted):
            numbers = counted.field("counts")
            most = pc.max(numbers).as_py()
            if most > 1:
                user = counted.field("values")[pc.index(numbers, most).as_py()].as_py()
                self.repeated = (user, most, len(users))


def warnings_of(found: Iterable[Noticed]) -> Iterator[str]:
    """What to tell of the counts of all processes."""
    found = list(found)
    total = {
        name: sum(getattr(one, name) for one in found)
        for name in ("num_answered", "num_fallback", "num_empty", "num_excluded", "num_unknown")
    }
    answered, excluded = total["num_answered"], total["num_excluded"]
    if excluded and total["num_unknown"] == excluded:
        yield (
            f"exclude= has {excluded:,} ids, of which the catalogue has none, expected its ids: nothing was excluded; "
            "is it the right column?"
        )
    if answered and total["num_fallback"] == answered:
        yield (
            f"fallback= answered all {answered:,} rows, expected some from the model: is the history the right "
            "column, and are its ids the catalogue's?"
        )
    elif answered and total["num_empty"] == answered:
        yield (
            f"all {answered:,} rows are without an item, expected some: exclude= or filter= leaves nothing; are they "
            "the right columns?"
        )
    for user, number, size in filter(None, (one.repeated for one in found)):
        yield (
            f"user {shorten(user)} has {number:,} rows among the first {size:,}, expected one of each user: every row "
            "is answered by itself; hf_gr.training.read_histories makes one history of each user's rows"
        )
