# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of purchases, one interaction a row, as a history per user. Knows no tokens and no model."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_gr.catalogue import SemanticIds
from hf_gr.catalogue.item_ids import ItemId

Histories = dict[Any, list[ItemId]]


def read_histories(
    interactions: Any,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    items: SemanticIds | None = None,
    unknown_items: Literal["refuse", "drop"] = "refuse",
) -> Histories:
    """Read interactions, one a row, as a history per user.

    Args:
        interactions: a file of CSV, TSV, RecBole's `.inter`, Parquet or JSON lines, several, or a folder of them; or a
            table in memory with columns by name (pandas, Polars, Arrow, a dictionary of lists). Or a file of lists,
            oldest item first: a `.json` of one object (`{"0": [5, 7]}`), or a `.txt` of lines of a user and items.
        user: the column of users.
        item: the column of item ids.
        time: the column by which a user's rows are sorted: numbers, dates, or texts such as `2026-11-22`; without it
            they are in order. Equal times keep the order of rows.
        items: semantic IDs: item ids are read as their type (in CSV all is text), and unknown ones are refused.
        unknown_items: `"drop"` omits items without a semantic ID, and users with no others.

    Returns:
        Lists of item ids by user, oldest first; users in the order of their first row.

    Raises:
        ValueError: a file cannot be read, a column is missing, a cell is empty, there is no row, an item has no
            semantic ID, or times cannot be sorted.
        ImportError: pyarrow is missing: `pip install "hf-gr[tables]"`.

    Example:
        >>> rows = {"user": ["ann", "bob", "ann"], "item": ["tea", "jam", "ham"], "day": [2, 1, 1]}
        >>> read_histories(rows, time="day")
        {'ann': ['ham', 'tea'], 'bob': ['jam']}
    """
    if unknown_items not in ("refuse", "drop"):
        raise ValueError(f"unknown_items={unknown_items!r}, expected 'refuse' or 'drop'")
    from hf_gr.tables.items import read_lists
    from hf_gr.tables.purchases import WINDOW_ROWS, as_ids, as_times
    from hf_gr.tables.table import Table

    is_path, place = isinstance(interactions, (str, PathLike)), "interactions"
    lists = read_lists(Path(interactions)) if is_path else None
    if lists is not None:
        if time is not None:
            raise ValueError(f"time={time!r} with the lists of {interactions}, expected None: lists are in order")
        pairs = [(of, one) for of, items_of in lists.items() for one in items_of]
        place, interactions = str(interactions), {user: [of for of, _ in pairs], item: [one for _, one in pairs]}
    names = {"user": user, "item": item} | ({} if time is None else {"time": time})
    table = Table(interactions, {name: argument for argument, name in reversed(names.items())}, name=place)
    columns: dict[str, list[Any]] = {name: [] for name in table.roles}
    for rows in table.windows(WINDOW_ROWS):
        for name, values in columns.items():
            values += (cells := rows.cells(name))
            for row, cell in enumerate(cells):
                if cell is None or cell != cell:
                    raise ValueError(rows.problem(name, row, cell, "a value: drop such rows"))
    are_strings = None if items is None else isinstance(items.item_ids[0], str)
    users, ids = columns[user], as_ids(columns[item], are_strings, is_text=table.is_text or lists is not None)
    if not users:
        raise ValueError(f"{table.name} has no row, expected at least one: there is nothing to learn from")
    known = None if items is None else set(items.item_ids)
    if known is not None and unknown_items == "refuse":
        missing = [number for number, name in enumerate(ids) if name not in known]
        if missing:
            raise ValueError(
                f"item={item!r} is {ids[missing[0]]!r} in row {missing[0]}, and {len(missing)} of {len(ids)} rows "
                "have items without a semantic ID, expected one for each: give them IDs, or pass unknown_items='drop'"
            )
    order: Sequence[int] = range(len(ids))
    if time is not None:
        order = np.argsort(as_times(columns[time], time), kind="stable").tolist()
    histories: Histories = {user: [] for user in users}
    for row in order:
        if known is None or ids[row] in known:
            histories[users[row]].append(ids[row])
    return {user: history for user, history in histories.items() if history}
