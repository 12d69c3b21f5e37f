# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads what a client asks, at the door: whatever is wrong with one request is found before it joins others.

Knows the catalogue, the tokenizer and the limits; no model and no queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_gr.answering.histories import join_tokens, latest_that_fit, tokens_of_items
from hf_gr.answering.requests import Request
from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.seeds import row_seeds

from .catalogues import Edition

UNKNOWN_ITEMS = ("drop", "refuse")


@dataclass(frozen=True)
class Read:
    """A request, and what was done to its prompt.

    Attributes:
        request: for a decoder; None if the history is empty.
        num_results: items that are asked for.
        num_beams: of the search.
        timeout: seconds.
        dropped: items of the history that the catalogue does not have.
        num_cut: items of a history, or tokens of another prompt, that were cut from the left.
    """

    request: Request | None
    num_results: int
    num_beams: int
    timeout: float
    dropped: tuple[Any, ...] = ()
    num_cut: int = 0


@dataclass(frozen=True)
class RequestReader:
    """How requests are read.

    Attributes:
        num_results: items of an answer, by default.
        num_beams: of a search, by default; more if more results are asked for.
        max_beams: the most that a request may ask for.
        timeout: seconds until a deadline, by default.
        unknown_items: what happens to items of a history that the catalogue does not have: `"drop"` or `"refuse"`.
        vocab_size: tokens are below it.
        tokenizer: for texts; None if there is none.
        prefix_tokens: before every prompt made from a history.
        suffix_tokens: after it.
    """

    num_results: int
    num_beams: int
    max_beams: int
    timeout: float
    unknown_items: str
    vocab_size: int | None
    tokenizer: Any = None
    prefix_tokens: tuple[int, ...] = ()
    suffix_tokens: tuple[int, ...] = ()

    def read(
        self,
        edition: Edition,
        *,
        room: int | None,
        history: Any = None,
        text: Any = None,
        tokens: Any = None,
        num_results: Any = None,
        num_beams: Any = None,
        exclude: Any = (),
        allow: Any = None,
        rule: Any = None,
        seed: Any = None,
        timeout: Any = None,
    ) -> Read:
        """Read a request; the arguments are those of `Engine.recommend`, and `room`: the most tokens of a prompt.

        Raises:
            ValueError: names the argument, its value, what is expected and the fix.
        """
        given = [
            name for name, value in (("history", history), ("text", text), ("tokens", tokens)) if value is not None
        ]
        if not given:
            raise ValueError("history=None, expected one of history, text and tokens: send one of them")
        if len(given) > 1:
            raise ValueError(
                f"{given[1]} is given beside {given[0]}, expected one of history, text and tokens: omit one"
            )
        wanted = self.num_results if num_results is None else _count(num_results, "num_results", self.max_beams)
        beams = max(self.num_beams, wanted)
        if num_beams is not None:
            beams = _count(num_beams, "num_beams", self.max_beams, fewest=2)
        if beams < wanted:
            raise ValueError(f"num_beams={beams}, expected at least num_results={wanted}: ask for more beams")
        snapshot = edition.index.snapshot
        excluded = tuple(item_list(exclude, "exclude", snapshot))
        allowed = None if allow is None else tuple(self._allowed(allow, snapshot))
        if rule is not None and (not isinstance(rule, str) or rule not in edition.rules):
            raise ValueError(
                f"rule={shown(rule)}, expected one of {sorted(edition.rules)}: name one of them, or omit it"
            )
        own_seed = None if seed is None else int(row_seeds(seed, 1)[0])
        limit = self.timeout if timeout is None else check_timeout(timeout)
        dropped: tuple[Any, ...] = ()
        if history is not None:
            prompt, dropped, num_cut = self._from_history(history, edition, room)
        else:
            prompt, num_cut = _cut(self._from_text(text) if text is not None else self._from_tokens(tokens), room)
        request = Request(0, prompt, excluded, allowed, rule, own_seed) if prompt else None
        return Read(request, wanted, beams, limit, dropped, num_cut)

    def read_text(self, text: Any, *, timeout: Any = None) -> float:
        """Check a text that is to be classified; the seconds until its deadline."""
        if self.tokenizer is None:
            raise ValueError("text is given and the server has no tokenizer, expected one: serve with a tokenizer")
        if not isinstance(text, str) or not text:
            raise ValueError(f"text={shown(text)}, expected a text that is not empty")
        return self.timeout if timeout is None else check_timeout(timeout)

    def _from_history(
        self, history: Any, edition: Edition, most: int | None
    ) -> tuple[list[int], tuple[Any, ...], int]:
        snapshot = edition.index.snapshot
        items = item_list(history, "history", snapshot)
        tokens_of: Mapping[Any, list[int]] = tokens_of_items(snapshot, items) if items else {}
        known = [item for item in items if item in tokens_of]
        dropped = tuple(dict.fromkeys(item for item in items if item not in tokens_of))
        if dropped and self.unknown_items == "refuse":
            raise ValueError(
                f"history has {shown(dropped[0])}, expected items of the catalogue: remove it, or serve with "
                "unknown_items='drop'"
            )
        room = (2**31 if most is None else most) - len(self.prefix_tokens) - len(self.suffix_tokens)
        latest = latest_that_fit(known, tokens_of, room)
        if known and not latest:
            raise ValueError(
                f"history ends with {shown(known[-1])} of {len(tokens_of[known[-1]])} tokens, expected an item that "
                f"fits the {room} tokens that there is room for: serve a model with more positions"
            )
        if not latest:
            return [], dropped, 0
        prompt = [*self.prefix_tokens, *join_tokens(latest, tokens_of), *self.suffix_tokens]
        return prompt, dropped, len(known) - len(latest)

    def _from_tokens(self, tokens: Any) -> list[int]:
        if not isinstance(tokens, (list, tuple)) or not all(is_integer(token) for token in tokens):
            raise ValueError(f"tokens={shown(tokens)}, expected a list of token ids")
        wrong = next((token for token in tokens if not 0 <= token < (self.vocab_size or 2**31)), None)
        if wrong is not None:
            raise ValueError(
                f"tokens has {wrong}, expected 0 to {(self.vocab_size or 2**31) - 1}: the model's vocabulary"
            )
        return [int(token) for token in tokens]

    def _from_text(self, text: Any) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("text is given and the server has no tokenizer, expected history or tokens")
        if not isinstance(text, str):
            raise ValueError(f"text={shown(text)}, expected a string")
        return list(self.tokenizer(text, verbose=False)["input_ids"]) if text else []

    def _allowed(self, allow: Any, snapshot: Snapshot) -> list[Any]:
        items = item_list(allow, "allow", snapshot)
        unknown = (
            [item for item, has in zip(items, snapshot.has_items(items), strict=True) if not has] if items else []
        )
        if unknown:
            raise ValueError(f"allow has {shown(unknown[0])}, expected items of the catalogue: remove it")
        return items


def check_timeout(timeout: Any) -> float:
    """Seconds until a deadline."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0.0 < timeout < math.inf:
        raise ValueError(f"timeout={shown(timeout)}, expected a number of seconds above 0")
    return float(timeout)


def _count(value: Any, name: str, most: int, *, fewest: int = 1) -> int:
    if not is_integer(value) or not fewest <= value <= most:
        raise ValueError(f"{name}={shown(value)}, expected an integer from {fewest} to {most}")
    return int(value)


def item_list(items: Any, name: str, snapshot: Snapshot) -> list[Any]:
    """Item ids of the catalogue's type."""
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise ValueError(f"{name}={shown(items)}, expected a list of item ids")
    listed = list(items)
    for item in listed:
        if not (isinstance(item, str) if snapshot.are_strings else is_integer(item) and -(2**63) <= item < 2**63):
            kind = "strings" if snapshot.are_strings else "integers"
            raise ValueError(f"{name} has {shown(item)}, expected {kind} as the catalogue's item ids are")
    return listed


def _cut(tokens: list[int], room: int | None) -> tuple[list[int], int]:
    """The latest tokens that fit, and how many do not."""
    num_cut = 0 if room is None else max(0, len(tokens) - room)
    return tokens[num_cut:], num_cut


def shown(value: Any) -> str:
    """The beginning of a value: a client's may be long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
