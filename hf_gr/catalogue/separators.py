# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What may stand between the labels of one answer, and how to split the answer again. Knows no tensors.

An answer is `label, separator, label, ..., end token`, every label at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from .fanout import Bools
from .sequences import ERRORS_SHOWN
from .snapshot import Snapshot
from .trie import PADDING


def check_separator(snapshot: Snapshot, separator: Sequence[int]) -> None:
    """Check that every answer can be split in one way only, and that its tokens show at once which.

    That is: a separator occurs in an answer only where it was put, not even across part of a label; and where a label
    ends, no longer label continues with the separator's first token.

    Raises:
        ValueError: names the labels that forbid the separator.
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
