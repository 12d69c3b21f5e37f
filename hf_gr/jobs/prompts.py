# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""From rows of a table of users to requests: a prompt, and the items allowed or excluded. Knows no model.

An error in a row becomes a problem of that row, never of the window's other rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from hf_gr.answering.requests import Request, first_allowed, join_tokens, latest_that_fit, tokens_of_items
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.tables.cells import read_list
from hf_gr.tables.table import Rows

from .settings import Settings
from .users import SKIPPING

A_KNOWN_ITEM, ANSWERED = "an item of the catalogue", "or answer it with fallback="
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass
class Requests:
    """The requests of a window in the order of its rows, and the problems of the rows that have none.

    Attributes:
        window: the rows.
        requests: of all rows without a problem.
        problems: by row, counted from the window's first.
        targets: by row without a problem: the items that came next, if requested.
        are_new: by row: whether the target is new, if a column says so.
        fallbacks: by row: the answer to a user without a history.
        num_dropped: by row: items of the history and the filter that the catalogue does not have.
        histories: by row with a prompt made from it: the items before the target.
        cold: the requests of rows in `fallbacks`, without tokens.
        num_excluded: ids that the rows exclude.
        num_unknown_excluded: those of them that the catalogue has never had.
        spared: rows whose exclusions contain a target, other than as the held-out last item of the history: targets
            are never excluded.
    """

    window: Rows
    requests: list[Request] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    targets: dict[int, list[Any]] = field(default_factory=dict)
    are_new: dict[int, bool] = field(default_factory=dict)
    fallbacks: dict[int, list[Any]] = field(default_factory=dict)
    num_dropped: Counter[int] = field(default_factory=Counter)
    histories: dict[int, list[Any]] = field(default_factory=dict)
    cold: list[Request] = field(default_factory=list)
    num_excluded: int = 0
    num_unknown_excluded: int = 0
    spared: set[int] = field(default_factory=set)

    def refuse(self, name: str, row: int, value: object, expected: str) -> None:
        """Note what is wrong with a cell; the first problem of a row counts."""
        self.problems.setdefault(row, self.window.problem(name, row, value, expected))


@dataclass(frozen=True)
class PromptMaker:
    """Makes requests.

    Attributes:
        snapshot: the catalogue, which has the tokens of a history's items.
        settings: the columns, and how to read them.
        tokenizer: for a column of texts.
        vocab_size: tokens are below it; None if unknown.
        longest: the most tokens that the model has positions for; None if unknown. A history keeps the latest items
            that fit; other prompts that do not fit are problems, unless `max_prompt_tokens` cuts them.
        fallback: living items, the best first, that answer users without a history; None if these are problems.
        removed: items that the run removes: a filter may name them, which allows nothing.
    """

    snapshot: Snapshot
    settings: Settings
    tokenizer: Any = None
    vocab_size: int | None = None
    longest: int | None = None
    fallback: Sequence[Any] | None = None
    removed: frozenset[Any] = frozenset()

    def __call__(self, window: Rows) -> Requests:
        """The requests of a window."""
        made, columns = Requests(window), self.settings
        self._read_targets(made)
        if columns.history is not None:
            prompts = self._from_histories(made, columns.history)
        elif columns.tokens is not None:
            prompts = self._from_tokens(made, columns.tokens)
        else:
            prompts = self._from_texts(made, columns.text or "")
        excluded = self._read_lists(made, columns.exclude)
        allowed = self._read_lists(made, columns.filter)
        if self.removed:
            allowed = {row: [item for item in items if item not in self.removed] for row, items in allowed.items()}
        self._know(made, columns.filter, allowed, self._among(allowed.values(), self.snapshot.has_items))
        for row in range(len(window)):
            if row in made.problems:
                continue
            named, wanted = excluded.get(row, []), made.targets.get(row, [])
            among = set(wanted).intersection(named)
            if among.intersection(made.histories.get(row, ())) if columns.leave_one_out else among:
                made.spared.add(row)
            exclude = tuple(item for item in named if item not in wanted)
            only = None if row not in allowed else tuple(allowed[row])
            if row in prompts:
                made.requests.append(Request(row, prompts[row], exclude, only))
            else:
                assert self.fallback is not None
                made.cold.append(Request(row, [], exclude, only))
                rules: Any = {"exclude": set(exclude), "allowed": None if only is None else set(only)}
                made.fallbacks[row] = first_allowed(self.fallback, **rules, at_most=columns.top_k)
        for row in made.problems:
            made.targets.pop(row, None)
            made.histories.pop(row, None)
        known = self._among(excluded.values(), lambda items: self.snapshot.sequences_of(items)[0])
        made.num_excluded = sum(map(len, excluded.values()))
        made.num_unknown_excluded = sum(item not in known for items in excluded.values() for item in items)
        return made

    def _from_histories(self, made: Requests, name: str) -> dict[int, list[int]]:
        drops, prefix, suffix = self._drops_unknown, self.settings.prefix_tokens, self.settings.suffix_tokens
        at_least = int(self.settings.leave_one_out) + int(self.fallback is None)
        histories = self._read_lists(made, name, at_least=at_least)
        tokens_of = tokens_of_items(self.snapshot, chain.from_iterable(histories.values()))
        if not drops:
            self._know(made, name, histories, tokens_of)
        if self.settings.leave_one_out:
            made.targets |= {row: items[-1:] for row, items in histories.items()}
            histories = {row: items[:-1] for row, items in histories.items()}
        if drops:  # a target stays, and is a miss, as one in a column is
            self._know(made, name, histories, tokens_of)
        room, prompts = self._room - len(prefix) - len(suffix), {}
        cells = [] if all(histories.values()) else made.window.cells(name)  # as they are in the table, for messages
        for row, items in histories.items():
            if items and row not in made.problems:
                made.histories[row] = items
                latest = latest_that_fit(items, tokens_of, room)
                if not latest:
                    expected = f"its latest item to fit a prompt of {self._room} tokens: allow longer ones"
                    made.refuse(name, row, items, expected)
                prompts[row] = [*prefix, *join_tokens(latest, tokens_of), *suffix]
            elif self.fallback is None:
                made.refuse(name, row, cells[row] if cells else items, f"{A_KNOWN_ITEM}: {SKIPPING}, {ANSWERED}")
        return prompts

    def _from_tokens(self, made: Requests, name: str) -> dict[int, list[int]]:
        below = "" if self.vocab_size is None else f" below the model's {self.vocab_size}"
        prompts: dict[int, list[int]] = {}
        for row, cell in enumerate(made.window.cells(name)):
            tokens = [] if cell is None else read_list(cell, are_strings=False)
            if tokens == [] and self.fallback is not None:
                continue
            if not tokens or min(tokens) < 0 or (self.vocab_size is not None and max(tokens) >= self.vocab_size):
                made.refuse(name, row, cell, f"one or more token ids from 0{below}: {SKIPPING}")
            else:
                prompts[row] = self._cut(made, name, row, tokens)
        return prompts

    def _from_texts(self, made: Requests, name: str) -> dict[int, list[int]]:
        texts: dict[int, str] = {}
        for row, cell in enumerate(made.window.cells(name)):
            if isinstance(cell, str) and cell:
                texts[row] = cell
            elif not (cell in (None, "") and self.fallback is not None):
                made.refuse(name, row, cell, f"a text: {SKIPPING}")
        # Not all at once: a tokenizer may warn of long ones, which are handled here.
        encoded = self.tokenizer(list(texts.values()), verbose=False)["input_ids"] if texts else []
        prompts: dict[int, list[int]] = {}
        for row, tokens in zip(texts, encoded, strict=True):
            if tokens:
                prompts[row] = self._cut(made, name, row, list(tokens))
            else:
                made.refuse(name, row, texts[row], f"a text with tokens: {SKIPPING}")
        return prompts

    @property
    def _room(self) -> int:
        """The most tokens of a prompt."""
        limits = [limit for limit in (self.longest, self.settings.max_prompt_tokens) if limit is not None]
        return min(limits, default=2**31)

    @property
    def _drops_unknown(self) -> bool:
        return self.settings.unknown_items == "drop"

    def _cut(self, made: Requests, name: str, row: int, tokens: list[int]) -> list[int]:
        if self.settings.max_prompt_tokens is not None:
            return tokens[-self._room :]
        if len(tokens) > self._room:
            expected = (
                f"at most {self.longest} tokens and not {len(tokens)}, which the model has room for: shorten it, or "
                "keep the latest with max_prompt_tokens="
            )
            made.refuse(name, row, tokens, expected)
        return tokens

    def _read_targets(self, made: Requests) -> None:
        """The targets of a column, and whether they are new."""
        are_strings, (target, is_new) = self.snapshot.are_strings, (self.settings.target, self.settings.is_new)
        for row, cell in enumerate(() if target is None else made.window.cells(target)):
            is_one = not isinstance(cell, (list, str)) or (are_strings and isinstance(cell, str))
            items = read_list([cell] if is_one else cell, are_strings=are_strings)
            if items:
                made.targets[row] = items
            else:
                made.refuse(target or "", row, cell, f"the id of an item, or a list of them: {SKIPPING}")
        for row, cell in enumerate(() if is_new is None else made.window.cells(is_new)):
            if (truth := TRUTHS.get(str(cell).lower())) is None:
                made.refuse(is_new or "", row, cell, f"true, false, 1 or 0: {SKIPPING}")
            else:
                made.are_new[row] = truth

    def _read_lists(self, made: Requests, name: str | None, *, at_least: int = 0) -> dict[int, list[Any]]:
        """By row the lists of item ids of a column; rows where it is null, if it may be, are omitted."""
        kind = "strings" if self.snapshot.are_strings else "integers"
        lists: dict[int, list[Any]] = {}
        for row, cell in enumerate(() if name is None else made.window.cells(name)):
            if cell is None and not at_least:
                continue
            items = read_list(cell, are_strings=self.snapshot.are_strings)
            if items is not None and len(items) >= at_least:
                lists[row] = items
                continue
            how_many = f"{at_least} or more " if at_least else ""
            answered = f", {ANSWERED}" if at_least and (items is not None or cell is None) else ""
            expected = f"a list of {how_many}item ids, which are {kind} in the catalogue: {SKIPPING}{answered}"
            made.refuse(name or "", row, cell, expected)
        return lists

    def _know(self, made: Requests, name: str | None, lists: dict[int, list[Any]], known: Container[Any]) -> None:
        """Drop unknown items from lists, in place, or add a problem for every row that names one."""
        for row, items in lists.items():
            unknown = [item for item in items if item not in known]
            if unknown and self._drops_unknown:
                made.num_dropped[row] += len(unknown)
                lists[row] = [item for item in items if item in known]
            elif unknown:
                expected = (
                    f"items of the catalogue, which has no {unknown[0]!r}: remove it, {SKIPPING}, or drop such items "
                    "with unknown_items='drop'"
                )
                made.refuse(name or "", row, items, expected)

    def _among(self, lists: Iterable[list[Any]], has: Callable[[list[Any]], Any]) -> set[Any]:
        """The items in some lists for which the catalogue says yes, asked once for all."""
        distinct = list(dict.fromkeys(chain.from_iterable(lists)))
        return {item for item, yes in zip(distinct, has(distinct), strict=True) if yes} if distinct else set()
