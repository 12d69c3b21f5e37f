# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers of several labels: what may stand between them, what may follow, how to split them. Knows no tensors.

An answer is `label, separator, label, ..., end token`, every label at most once.

Source: "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy", whose processor lets a label repeat.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from .fanout import Bools
from .sequences import ERRORS_SHOWN
from .snapshot import Snapshot
from .trie import PADDING


def check_separator(snapshot: Snapshot, separator: Sequence[int]) -> None:
    """Check that every answer can be split in one way only, and that this is clear while it is generated.

    That is: a separator occurs in an answer only where it was put, not even across part of a label; and where a label
    ends, no longer label continues with the separator's first token.
    """
    rows, eos_token_id = snapshot.rows(), snapshot.eos_token_id
    assert eos_token_id is not None
    parts = list(separator)
    rows = rows[np.isin(rows, parts).any(axis=1)].astype(np.int64)  # no other label can take part in one
    # Where a label continues with the separator's first token, the tokens before it must not be a label.
    going_on, places = np.nonzero(rows[:, 1:] == parts[0])
    is_before = cast("Bools", places[:, None] >= np.arange(rows.shape[1]))
    before = np.where(is_before, rows[going_on], PADDING)
    goes_on = {int(row) for row, items in zip(going_on, snapshot.items_of(before), strict=True) if items}
    inside: list[list[int]] = []
    for number, row in enumerate(rows.tolist()):
        label = [token for token in row if token not in (PADDING, eos_token_id)]
        if number in goes_on or find([*parts[1:], *label, *parts[:-1]], parts) >= 0:
            inside.append(label)
            if len(inside) == ERRORS_SHOWN:
                break
    if inside:
        names = ", ".join(repr(snapshot.items_of(np.array([label]))[0][0]) for label in inside)
        raise ValueError(
            f"separator={parts} is also inside labels ({names}) or begins there, expected tokens that tell where a "
            "label ends: choose another separator"
        )


def find(tokens: Sequence[int], separator: Sequence[int], start: int = 0) -> int:
    """Where a separator begins, -1 for nowhere."""
    size = len(separator)
    places = range(start, len(tokens) - size + 1)
    return next((place for place in places if list(tokens[place : place + size]) == list(separator)), -1)


def split(tokens: Sequence[int], separator: Sequence[int], eos_token_id: int) -> list[list[int]]:
    """The labels of an answer; everything after its end, or from a negative token on, is padding."""
    end = next((place for place, token in enumerate(tokens) if token < 0 or token == eos_token_id), len(tokens))
    labels: list[list[int]] = []
    start = 0
    while (place := find(tokens[:end], separator, start)) >= 0:
        labels.append(list(tokens[start:place]))
        start = place + len(separator)
    return [*labels, list(tokens[start:end])]


class Answers:
    """Which tokens may follow in answers of one catalogue: a walk over its sorted sequences, from tokens alone.

    A used label is dead, and so is any prefix with nothing else below it. `max_labels` is None for all of them.
    """

    def __init__(self, snapshot: Snapshot, separator: Sequence[int], max_labels: int | None) -> None:
        assert snapshot.eos_token_id is not None
        self.rows, self.separator, self.eos_token_id = snapshot.rows(), list(separator), snapshot.eos_token_id
        self.most = len(self.rows) if max_labels is None else min(max_labels, len(self.rows))

    def next_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The tokens by which an answer may continue; none for one that is finished or invalid."""
        if self.eos_token_id in tokens or min(tokens, default=0) < 0:
            return []
        *complete, last = split(tokens, self.separator, self.eos_token_id)
        used: set[int] = set()
        for label in complete:
            start, end, rest = self._walk([*label, self.eos_token_id])
            if rest or start == end or start in used:
                return []
            used.add(start)
        if len(used) >= max(self.most, 1):
            return []
        start, end, rest = self._walk(last)
        column = self.rows[start:end, len(last) - len(rest)]
        firsts = np.flatnonzero(np.diff(column, prepend=-1))
        counts = np.diff(firsts, append=len(column))
        for number in used:
            if start <= number < end:
                counts[np.searchsorted(firsts, number - start, side="right") - 1] -= 1
        below = column[firsts[counts > 0]].tolist()
        may_go_on = self.eos_token_id in below and len(used) + 1 < self.most
        if rest:  # the beginning of a separator
            return [self.separator[len(rest)]] if may_go_on and rest == self.separator[: len(rest)] else []
        return [*below, *self.separator[:1]] if may_go_on else below

    def _walk(self, tokens: Sequence[int]) -> tuple[int, int, list[int]]:
        """The rows that begin with the first tokens, as many as there are such rows for, and the other tokens."""
        start, end = 0, len(self.rows)
        for depth, token in enumerate(tokens):
            column = self.rows[start:end, depth] if depth < self.rows.shape[1] else self.rows[:0, 0]
            first, last = (int(np.searchsorted(column, token, side=side)) for side in ("left", "right"))
            if first == last:
                return start, end, list(tokens[depth:])
            start, end = start + first, start + last
        return start, end, []
