# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""From rows of a table of users to requests: a prompt, and the items allowed or excluded. Knows no model.

An error in a row becomes a problem of that row, never of the window's other rows.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from hf_gr.answering.fallback import first_allowed
from hf_gr.answering.requests import Request, join_tokens, latest_that_fit, tokens_of_items
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.tables.cells import read_list
from hf_gr.tables.table import Rows

from .columns import UserColumns
from .users import SKIPPING

ANSWERED = "or answer it with fallback="
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Requests:
    """The requests of a window in the order of its rows, and the problems of the rows that have none.

    Attributes:
        requests: of all rows without a problem.
        problems: by row, counted from the window's first.
        targets: by row without a problem: the items that came next, if requested.
        are_new: by row: whether the target is new, if a column says so.
        fallbacks: by row: the answer to a user without a history.
        num_dropped: by row: items of the history and the filter that the catalogue does not have.
        histories: by row with a prompt made from it: the items before the target.
        cold: what rows in `fallbacks` may be answered with, without tokens.
        num_excluded: ids that the rows exclude.
        num_unknown_excluded: those of them that the catalogue has never had.
        spared: rows with a target that their exclusions hold, and not only as the last item of the history, which is
            held out: targets are never excluded.
    """

    requests: list[Request]
    problems: dict[int, str]
    targets: dict[int, list[Any]] = field(default_factory=dict)
    are_new: dict[int, bool] = field(default_factory=dict)
    fallbacks: dict[int, list[Any]] = field(default_factory=dict)
    num_dropped: dict[int, int] = field(default_factory=dict)
    histories: dict[int, list[Any]] = field(default_factory=dict)
    cold: list[Request] = field(default_factory=list)
    num_excluded: int = 0
    num_unknown_excluded: int = 0
    spared: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class PromptMaker:
    """Makes requests.

    Attributes:
        snapshot: the catalogue, which has the tokens of a history's items.
        columns: the columns by meaning.
        tokenizer: for a column of texts.
        vocab_size: tokens are below it; None if unknown.
        longest: the most tokens that the model has positions for; None if unknown. A history keeps the latest items
            that fit; other prompts that do not fit are problems.
        max_prompt_tokens: the user's own limit: any prompt keeps its latest tokens.
        prefix_tokens: before every prompt made from a history.
        suffix_tokens: after it.
        leave_one_out: the last item of a history is the target, and no part of the prompt.
        drops_unknown: items that the catalogue does not have are dropped from histories and filters; they are
            problems otherwise.
        fallback: living items, the best first, that answer users without a history; None if these are problems.
        top_k: items of such an answer.
        removed: items that the run removes: a filter may name them, which allows nothing.
    """

    snapshot: Snapshot
    columns: UserColumns
    tokenizer: Any = None
    vocab_size: int | None = None
    longest: int | None = None
    max_prompt_tokens: int | None = None
    prefix_tokens: tuple[int, ...] = ()
    suffix_tokens: tuple[int, ...] = ()
    leave_one_out: bool = False
    drops_unknown: bool = False
    fallback: Sequence[Any] | None = None
    top_k: int = 10
    removed: frozenset[Any] = frozenset()

    def __call__(self, window: Rows) -> Requests:
        """The requests of a window."""
        problems: dict[int, str] = {}
        targets = self._read_targets(window, problems)
        are_new = self._read_truths(window, self.columns.is_new, problems)
        dropped: dict[int, int] = {}
        kept_histories: dict[int, list[Any]] = {}
        if self.columns.history is not None:
            prompts = self._from_histories(window, problems, targets, dropped, kept_histories)
        elif self.columns.tokens is not None:
            prompts = self._from_tokens(window, problems)
        else:
            prompts = self._from_texts(window, problems)
        excluded = self._read_lists(window, self.columns.exclude, problems)
        allowed = self._read_lists(window, self.columns.filter, problems)
        if self.removed:
            allowed = {row: [item for item in items if item not in self.removed] for row, items in allowed.items()}
        self._know(window, self.columns.filter, allowed, self._living(allowed), problems, dropped)
        requests: list[Request] = []
        fallbacks: dict[int, list[Any]] = {}
        cold: list[Request] = []
        spared: set[int] = set()
        for row in range(len(window)):
            if row in problems:
                continue
            wanted = targets.get(row, [])
            exclude = [item for item in excluded.get(row) or () if item not in wanted]
            among = set(wanted).intersection(excluded.get(row) or ())
            if among.intersection(kept_histories.get(row, ())) if self.leave_one_out else among:
                spared.add(row)
            only = allowed.get(row)
            request = Request(row, prompts.get(row, []), tuple(exclude), None if only is None else tuple(only))
            if row in prompts:
                requests.append(request)
            else:
                assert self.fallback is not None
                cold.append(request)
                rules: Any = {"exclude": set(exclude), "allowed": None if only is None else set(only)}
                fallbacks[row] = first_allowed(self.fallback, **rules, at_most=self.top_k)
        kept = {*fallbacks, *(request.row for request in requests)}
        targets = {row: items for row, items in targets.items() if row in kept}
        kept_histories = {row: items for row, items in kept_histories.items() if row in kept}
        named = list(chain.from_iterable(excluded.values()))
        distinct = list(dict.fromkeys(named))
        is_known, _ = self.snapshot.sequences_of(distinct) if distinct else ((), ())
        known = {item for item, there in zip(distinct, is_known, strict=True) if there}
        num_unknown = sum(item not in known for item in named)
        return Requests(
            requests,
            problems,
            targets,
            are_new,
            fallbacks,
            dropped,
            kept_histories,
            cold,
            len(named),
            num_unknown,
            spared,
        )

    def _from_histories(
        self,
        window: Rows,
        problems: dict[int, str],
        targets: dict[int, list[Any]],
        dropped: dict[int, int],
        kept_histories: dict[int, list[Any]],
    ) -> dict[int, list[int]]:
        name = self.columns.history
        assert name is not None
        at_least = int(self.leave_one_out) + int(self.fallback is None)
        histories = self._read_lists(window, name, problems, at_least=at_least)
        tokens_of = tokens_of_items(self.snapshot, chain.from_iterable(histories.values()))
        if not self.drops_unknown:
            self._know(window, name, histories, tokens_of, problems, dropped)
        if self.leave_one_out:
            targets |= {row: items[-1:] for row, items in histories.items()}
            histories = {row: items[:-1] for row, items in histories.items()}
        if self.drops_unknown:  # a target stays, and is a miss, as one in a column is
            self._know(window, name, histories, tokens_of, problems, dropped)
        prompts: dict[int, list[int]] = {}
        cells = [] if all(histories.values()) else window.cells(name)  # as they are in the table, for messages
        for row, items in histories.items():
            if row in problems or (not items and self.fallback is not None):
                continue
            if not items:
                problems[row] = window.problem(
                    name, row, cells[row], f"an item of the catalogue: {SKIPPING}, {ANSWERED}"
                )
                continue
            kept_histories[row] = items
            room = self._room - len(self.prefix_tokens) - len(self.suffix_tokens)
            latest = latest_that_fit(items, tokens_of, room)
            if not latest:
                problems[row] = window.problem(
                    name, row, items, f"its latest item to fit a prompt of {self._room} tokens: allow longer ones"
                )
            prompts[row] = [*self.prefix_tokens, *join_tokens(latest, tokens_of), *self.suffix_tokens]
        return prompts

    def _from_tokens(self, window: Rows, problems: dict[int, str]) -> dict[int, list[int]]:
        name = self.columns.tokens
        assert name is not None
        below = "" if self.vocab_size is None else f" below the model's {self.vocab_size}"
        prompts: dict[int, list[int]] = {}
        for row, cell in enumerate(window.cells(name)):
            tokens = [] if cell is None else read_list(cell, are_strings=False)
            if tokens == [] and self.fallback is not None:
                continue
            if not tokens or min(tokens) < 0 or (self.vocab_size is not None and max(tokens) >= self.vocab_size):
                problems.setdefault(
                    row, window.problem(name, row, cell, f"one or more token ids from 0{below}: {SKIPPING}")
                )
            else:
                prompts[row] = self._cut(window, name, row, tokens, problems)
        return prompts

    def _from_texts(self, window: Rows, problems: dict[int, str]) -> dict[int, list[int]]:
        name = self.columns.text
        assert name is not None
        cells = window.cells(name)
        texts: dict[int, str] = {}
        for row, cell in enumerate(cells):
            if isinstance(cell, str) and cell:
                texts[row] = cell
            elif not (cell in (None, "") and self.fallback is not None):
                problems.setdefault(row, window.problem(name, row, cell, f"a text: {SKIPPING}"))
        # Not all at once: a tokenizer may warn of long ones, which are handled here.
        encoded = self.tokenizer(list(texts.values()), verbose=False)["input_ids"] if texts else []
        prompts: dict[int, list[int]] = {}
        for row, tokens in zip(texts, encoded, strict=True):
            if not tokens:
                problems.setdefault(row, window.problem(name, row, texts[row], f"a text with tokens: {SKIPPING}"))
            else:
                prompts[row] = self._cut(window, name, row, list(tokens), problems)
        return prompts

    @property
    def _room(self) -> int:
        """The most tokens of a prompt."""
        limits = [limit for limit in (self.longest, self.max_prompt_tokens) if limit is not None]
        return min(limits, default=2**31)

    def _cut(self, window: Rows, name: str, row: int, tokens: list[int], problems: dict[int, str]) -> list[int]:
        if self.max_prompt_tokens is not None:
            return tokens[-self._room :]
        if self.longest is not None and len(tokens) > self.longest:
            expected = (
                f"at most {self.longest} tokens and not {len(tokens)}, which the model has room for: shorten it, or "
                "keep the latest with max_prompt_tokens="
            )
            problems.setdefault(row, window.problem(name, row, tokens, expected))
        return tokens

    def _read_targets(self, window: Rows, problems: dict[int, str]) -> dict[int, list[Any]]:
        name = self.columns.target
        if name is None:
            return {}
        targets: dict[int, list[Any]] = {}
        for row, cell in enumerate(window.cells(name)):
            is_one = not isinstance(cell, (list, str)) or (self.snapshot.are_strings and isinstance(cell, str))
            items = read_list([cell] if is_one else cell, are_strings=self.snapshot.are_strings)
            if items:
                targets[row] = items
            else:
                expected = f"the id of an item, or a list of them: {SKIPPING}"
                problems.setdefault(row, window.problem(name, row, cell, expected))
        return targets

    def _read_truths(self, window: Rows, name: str | None, problems: dict[int, str]) -> dict[int, bool]:
        """By row the value of a column of true and false, also given as texts or numbers."""
        truths: dict[int, bool] = {}
        for row, cell in enumerate(window.cells(name) if name is not None else ()):
            if (truth := TRUTHS.get(str(cell).lower())) is None:
                problems.setdefault(row, window.problem(name, row, cell, f"true, false, 1 or 0: {SKIPPING}"))  # pyright: ignore
            else:
                truths[row] = truth
        return truths

    def _read_lists(
        self, window: Rows, name: str | None, problems: dict[int, str], *, at_least: int = 0
    ) -> dict[int, list[Any]]:
        """By row the lists of item ids of a column; rows where it is null, if it may be, are omitted."""
        if name is None:
            return {}
        kind = "strings" if self.snapshot.are_strings else "integers"
        lists: dict[int, list[Any]] = {}
        for row, cell in enumerate(window.cells(name)):
            if cell is None and not at_least:
                continue
            items = read_list(cell, are_strings=self.snapshot.are_strings)
            if items is None or len(items) < at_least:
                how_many = f"{at_least} or more " if at_least else ""
                answered = f", {ANSWERED}" if at_least and (items is not None or cell is None) else ""
                expected = f"a list of {how_many}item ids, which are {kind} in the catalogue: {SKIPPING}{answered}"
                problems.setdefault(row, window.problem(name, row, cell, expected))
            else:
                lists[row] = items
        return lists

    def _know(
        self,
        window: Rows,
        name: str | None,
        lists: dict[int, list[Any]],
        known: Container[Any],
        problems: dict[int, str],
        dropped: dict[int, int],
    ) -> None:
        """Drop unknown items from lists, in place, or add a problem for every row that names one."""
        for row, items in lists.items():
            kept = [item for item in items if item in known]
            if len(kept) == len(items):
                continue
            if self.drops_unknown:
                dropped[row] = dropped.get(row, 0) + len(items) - len(kept)
                lists[row] = kept
            elif name is not None:
                unknown = next(item for item in items if item not in known)
                expected = (
                    f"items of the catalogue, which has no {unknown!r}: remove it, {SKIPPING}, or drop such items "
                    "with unknown_items='drop'"
                )
                problems.setdefault(row, window.problem(name, row, items, expected))

    def _living(self, lists: dict[int, list[Any]]) -> set[Any]:
        """The items in some lists that the catalogue has."""
        distinct = list(dict.fromkeys(chain.from_iterable(lists.values())))
        return {item for item, alive in zip(distinct, self.snapshot.has_items(distinct), strict=True) if alive}
