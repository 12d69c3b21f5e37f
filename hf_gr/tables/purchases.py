# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of purchases to histories; what is left out is counted and told. Knows no tokens and no model."""

from collections.abc import Mapping
from datetime import UTC
from importlib.util import find_spec
from typing import Any, cast

import numpy as np

from .cells import integers_in
from .sequences import pa, read_ids
from .table import Table

WINDOW_ROWS = 2**16


def read_purchases(purchases: Any, columns: Mapping[str, str | None], **how: Any) -> tuple[Table, dict[str, str]]:
    """The table, and which of its columns have which role; `how` is for `Table`."""
    roles = {role: name for role, name in columns.items() if name}
    if "text" in roles and find_spec("sentence_transformers") is None:
        raise ImportError(f'text={roles["text"]!r} needs sentence-transformers: pip install "hf-gr[text]"')
    by_column = {name: role for role, name in reversed(roles.items())}
    return Table(purchases, by_column, name="purchases", **how), roles


def clean(
    table: Table, roles: Mapping[str, str], options: Mapping[str, Any], *, are_strings: bool | None = None
) -> tuple[dict[Any, list[Any]], dict[Any, str], tuple[str, ...]]:
    """Histories by user, oldest purchase first; texts of items; and what was found and left out, a line each.

    `roles` names the columns `user`, `item`, perhaps `time`, `quantity` and `text`; `options` are those of `train`;
    `are_strings` is as for `as_ids`. All is held in memory.
    """
    import pandas as pd

    columns: dict[str, list[Any]] = {role: [] for role in roles}
    for rows in table.windows(WINDOW_ROWS):
        for role, name in roles.items():
            columns[role] += rows.cells(name)
    frame: Any = pd.DataFrame(columns, dtype=object)
    if frame.empty:
        raise ValueError(f"{table.name} has no row, expected some")
    report = [f"{len(frame):,} rows"]

    def keep(kept: Any, what: str) -> None:
        nonlocal frame
        report.append(f"{len(frame) - len(kept):,} {what}: dropped")
        frame = kept

    whole = frame.dropna(subset=[role for role in roles if role != "text"])
    if len(whole) < len(frame) and not options["drop_missing"]:
        first = frame.index.difference(whole.index)[0]
        raise ValueError(
            f"{table.name}, row {first} has a missing cell, expected none: drop_missing=True drops such rows"
        )
    keep(whole, "with a missing cell (drop_missing)")
    if "quantity" in roles and options["drop_returns"]:
        try:
            is_bought = frame["quantity"].astype(float) > 0
        except (TypeError, ValueError) as error:
            raise ValueError(f"quantity={roles['quantity']!r} is no column of numbers ({error})") from None
        keep(frame[is_bought], "with a quantity of 0 or less, such as returns (drop_returns)")
    users, ids = (  # beside a missing cell, pandas makes floats of integers
        [int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in frame[role]]
        for role in ("user", "item")
    )
    ids = as_ids(ids, are_strings, is_text=table.is_text)
    times = as_times(list(frame["time"]), roles["time"]) if "time" in roles else range(len(frame))
    frame = frame.assign(
        user=pd.Series(users, frame.index, object), item=pd.Series(ids, frame.index, object), time=times
    )
    if "time" in roles and options["drop_duplicates"]:  # without times, the user may have bought it again
        same = ["user", "item", "time"]
        keep(frame.drop_duplicates(same), "of the same user, item and time as another (drop_duplicates)")
    counts, left = {"item": options["min_item_count"], "user": options["min_user_count"]}, frame
    while any((is_rare := left.groupby(by)[by].transform("size") < least).any() for by, least in counts.items()):
        left = left[~is_rare]
    keep(
        left,
        f"of items with fewer than {counts['item']} purchases (min_item_count) or users with fewer than "
        f"{counts['user']} (min_user_count)",
    )
    if frame.empty:
        raise ValueError(f"{table.name}: no row is left, expected some: leave out less ({'; '.join(report)})")
    tied = int(frame.duplicated(["user", "time"]).sum())
    told = "in a random order, always the same (shuffle_ties)" if options["shuffle_ties"] else "in the order of rows"
    report.append(f"{tied:,} at the time of another of their user: {told}")
    by = ["time"]
    if options["shuffle_ties"]:  # by what a purchase is, so that its place does not depend on the rest of the table
        own = frame[["user", "item", "time"]].astype(str)
        by, frame = [*by, "tie"], frame.assign(tie=cast(Any, pd).util.hash_pandas_object(own, index=False))
    ordered = frame.sort_values(by, kind="stable")
    histories: dict[Any, list[Any]] = {user: [] for user in frame["user"]}  # in the order of their first rows
    for user, item in zip(ordered["user"], ordered["item"], strict=True):
        histories[user].append(item)
    report.append(
        f"{len(frame):,} purchases of {frame['item'].nunique():,} items by {len(histories):,} users are left"
    )
    texts = frame.dropna(subset="text").drop_duplicates("item") if "text" in roles else frame[:0].assign(text="")
    return histories, dict(zip(texts["item"], texts["text"].astype(str), strict=True)), tuple(report)


def as_ids(values: list[Any], are_strings: bool | None, *, is_text: bool) -> list[Any]:
    """Item ids: strings or integers as the catalogue's are; without one, of a CSV, integers if all texts look so.

    For a catalogue of integers any other id stays as it is: an unknown item.
    """
    if are_strings:
        return [str(value) for value in values]
    if are_strings is False:
        return integers_in(values)
    return np.asarray(read_ids(pa.array(values), True)).tolist() if is_text and values else values


def as_times(values: list[Any], name: str) -> np.ndarray:
    """Times in an order that can be sorted; those with a zone by universal time."""
    values = [one.astimezone(UTC).replace(tzinfo=None) if getattr(one, "tzinfo", None) else one for one in values]
    bad: list[int] = []
    for kind in ("float64", "datetime64[us]"):
        try:
            times = np.asarray(values, dtype=kind)
            if kind == "float64" and np.isfinite(times).all():
                return times
            if kind != "float64" and (times < np.datetime64("9999-01-01")).all():  # not so for NaT
                return times
            raise ValueError("no time")
        except (TypeError, ValueError, OverflowError):
            found = [row for row, value in enumerate(values) if not _converts(value, kind)]
            bad = found if not bad or len(found) < len(bad) else bad
    raise ValueError(
        f"time={name!r} is {values[bad[0]]!r} in row {bad[0]}, expected numbers, dates, or texts such as "
        "2026-11-22T09:30, and all of one kind"
    )


def _converts(value: Any, kind: str) -> bool:
    try:
        return np.asarray([value], dtype=kind) is not None
    except (TypeError, ValueError, OverflowError):
        return False
