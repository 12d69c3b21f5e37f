# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of users, and its rows as requests, each with its target. What is wrong with a row is its problem alone."""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hf_gr.answering.recommender import Recommender
from hf_gr.answering.requests import Request, item_list, shown
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.tables.cells import read_list
from hf_gr.tables.files import pa
from hf_gr.tables.memory import HISTORY
from hf_gr.tables.purchases import clean
from hf_gr.tables.table import Rows, Table, is_text

from .settings import PROMPTS, WINDOW_ROWS, Settings

READ = (*PROMPTS, "exclude", "filter", "target", "is_new")  # columns that requests and targets are made from
# What is left out of a table of purchases: nobody is, but who has no purchase left.
CLEANING = dict.fromkeys(("drop_missing", "drop_returns", "drop_duplicates", "shuffle_ties"), True) | {
    "min_item_count": 1
}
BARE = re.compile(r"[^\s,\[\]()]+")  # a cell with one id, and not in brackets
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class Users(Table):
    """A table of users, in files or in memory, or made of one of purchases; `are_strings` is whether item ids are.

    `report` says what of the purchases was left out.

    Raises:
        ValueError: a file is missing, damaged or of another format, a column is missing or of another type, or there
            is no row.
    """

    def __init__(self, users: Any, settings: Settings, *, are_strings: bool) -> None:
        item = pa.string() if are_strings else pa.int64()
        types = dict.fromkeys(("history", "exclude", "filter"), pa.list_(item)) | {"tokens": pa.list_(pa.int64())}
        types |= {"target": item, "is_new": pa.bool_()}
        how = {"format": settings.format, "delimiter": settings.delimiter}
        self.report: list[str] = []
        if settings.item is not None:
            users, how = self._from_purchases(users, settings, are_strings, how), {}
        super().__init__(users, settings.roles, name="users", types=types, **how)
        first = next(self.windows(1), None)  # also finds a missing column before a model is loaded
        if first is None:
            raise ValueError(f"{self.name} has no row, expected at least one user")
        kind, is_id = ("texts", is_text) if are_strings else ("integers", pa.types.is_integer)
        for name in (settings.history, settings.exclude, settings.filter):
            found = pa.null() if name is None else first.columns.schema.field(name).type
            value = getattr(found, "value_type", None)
            if not (pa.types.is_null(value or found) or is_text(found) or (value is not None and is_id(value))):
                expected = f"lists of {kind}, as the catalogue's ids are: convert the column"
                fix = f"; where a row is a purchase, pass item={name!r}, user= and time=" * (
                    name == settings.history and settings.item is None
                )
                raise ValueError(first.problem_of_type(name or "", expected + fix))
        name = settings.history
        if name is not None and settings.target is None and self._are_purchases(name, settings.user):
            raise ValueError(
                f"{self.name} has one item in every row (column {name!r}), expected histories: where a row is a "
                f"purchase, pass item={name!r} in place of history=, with user= and time=; where users have bought "
                f"one item each, write it in brackets, [{first.cells(name)[0]}]"
            )

    def _from_purchases(self, purchases: Any, settings: Settings, are_strings: bool, how: Any) -> dict[str, list[Any]]:
        """A table of users with their histories, held in memory; cleaned as by `train`, but for rare items."""
        columns = {"user": settings.user, "item": settings.item, "time": settings.time, "quantity": settings.quantity}
        roles = {role: name for role, name in columns.items() if name is not None}
        table = Table(purchases, {name: role for role, name in reversed(roles.items())}, name="users", **how)
        fewest = 2 if settings.leave_one_out and settings.fallback is None else 1  # the last purchase is the target
        histories, _, report = clean(table, roles, CLEANING | {"min_user_count": fewest}, are_strings=are_strings)
        self.report = [re.sub(r" \(\w+\)", "", line) for line in report if not line.startswith("0 ")]
        return {roles["user"]: list(histories), HISTORY: list(histories.values())}

    def _are_purchases(self, history: str, user: str | None) -> bool:
        """Whether the first rows have texts of one id each, and some user again."""
        with suppress(ValueError):  # of a damaged file, whose rows before the damage are answered first
            rows = next(self.windows(WINDOW_ROWS))
            who = rows.cells(user) if user else [None] * len(rows)
            is_bare = (isinstance(cell, str) and BARE.fullmatch(cell) for cell in rows.cells(history))
            return len(set(who)) < len(who) and all(is_bare)
        return False


@dataclass(frozen=True)
class UserRow:
    """A row of a table of users."""

    problem: str | None = None  # why it cannot be answered; then it has nothing else
    request: Request | None = None  # without tokens if the fallback answers it
    targets: list[Any] | None = None  # ids of the items that came next, if requested
    is_new: bool | None = None  # whether the target is new, if a column says so
    is_excluded: bool = False  # whether a target is among its exclusions

    @property
    def is_cold(self) -> bool:
        """Whether the fallback answers it."""
        return self.request is not None and not self.request.tokens


def read_rows(
    window: Rows, recommender: Recommender, settings: Settings, removed: frozenset[Any] = frozenset()
) -> list[UserRow]:
    """The rows of a window; filters may name `removed` items, which the run removes: that allows nothing."""
    columns = {role: window.cells(name) for role in READ if (name := getattr(settings, role)) is not None}
    found: list[UserRow] = []
    for number, cells in enumerate(zip(*columns.values(), strict=True)):
        try:
            found.append(_read(dict(zip(columns, cells, strict=True)), recommender, settings, removed))
        except ValueError as error:
            what = f"cannot be answered: {error} (on_error='skip' skips such rows)"
            found.append(
                UserRow(problem=window.problem_of_row(number, what, settings.user if settings.item else None))
            )
    return found


def _read(cells: dict[str, Any], recommender: Recommender, settings: Settings, removed: frozenset[Any]) -> UserRow:
    snapshot = recommender.index.snapshot
    prompt = next(role for role in PROMPTS if role in cells)
    given = cells[prompt] or "" if prompt == "text" else _list_in(cells[prompt], prompt, snapshot) or []
    targets = _targets_in(cells["target"], snapshot) if "target" in cells else None
    if settings.leave_one_out:
        fewest = 2 if recommender.fallback is None else 1
        if len(given) < fewest:
            raise ValueError(f"history={given}, expected {fewest} items or more: the last one is the target")
        *given, target = item_list(given, "history", snapshot)
        targets = [target]
        if settings.unknown_items == "refuse" and not snapshot.has_items(targets).all():
            recommender.read(history=targets)  # refuses it, unless it has only left the catalogue
    exclude = _list_in(cells.get("exclude"), "exclude", snapshot) or []
    is_own = settings.leave_one_out and settings.exclude == settings.history
    if is_own and targets and targets[0] not in given:  # it is there as what came last
        exclude = [item for item in exclude if item not in targets]
    allowed = _list_in(cells.get("filter"), "filter", snapshot)
    request = recommender.read(
        **{prompt: given},
        exclude=exclude,
        filter=[item for item in allowed if item not in removed] if allowed and removed else allowed,
    )
    if request.num_cut and prompt != "history" and settings.max_prompt_tokens is None:
        raise ValueError(
            f"{prompt} has {request.num_cut} tokens more than the {recommender.room} that the model has room for, "
            "expected fewer: shorten it, or keep the latest with max_prompt_tokens="
        )
    is_excluded = not set(targets or ()).isdisjoint(exclude)
    return UserRow(None, request, targets, _truth(cells["is_new"]) if "is_new" in cells else None, is_excluded)


def _list_in(cell: Any, role: str, snapshot: Snapshot) -> Any:
    """The list in a cell, in text files a text; what it holds is checked by `Recommender.read`."""
    if not isinstance(cell, str):
        return cell
    items = read_list(cell, are_strings=snapshot.are_strings and role != "tokens")
    if items is None:
        raise ValueError(f"{role}={shown(cell)}, expected a list of integers")
    return items


def _targets_in(cell: Any, snapshot: Snapshot) -> list[Any]:
    """The item in a cell, or the list of them."""
    is_one = not isinstance(cell, (list, str)) or (snapshot.are_strings and isinstance(cell, str))
    items = item_list([cell] if is_one else _list_in(cell, "target", snapshot), "target", snapshot)
    if not items:
        raise ValueError(f"target={shown(cell)}, expected the id of an item, or a list of them")
    return items


def _truth(cell: Any) -> bool:
    if (truth := TRUTHS.get(str(cell).lower())) is None:
        raise ValueError(f"is_new={shown(cell)}, expected true, false, 1 or 0")
    return truth
