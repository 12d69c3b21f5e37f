# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Codes for items that come after a training, beside those of items that are alike. NumPy only.

Axes: N items, M new ones, D features, L levels; the last code tells apart items that share all others.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from .item_ids import ItemId
from .trie import PADDING

WINDOW = 5  # of a history: so far apart are neighbours at most, as where IDs are made from histories
SMOOTHING = 20  # of how often an item is a neighbour, so that a rare one that is met once says little
Codes = tuple[int, ...]
NextCodes = Callable[[Codes], Iterable[int]]  # of a prefix: the codes that may follow it, the most fitting one first


def neighbours_of(
    item_ids: Collection[ItemId], histories: Iterable[Sequence[ItemId]], known: Collection[ItemId]
) -> dict[ItemId, dict[ItemId, float]]:
    """By item: the known items near it in histories, and how much each says: more if it is near less of the others."""
    near: dict[ItemId, Counter[ItemId]] = {item: Counter() for item in item_ids}
    totals = Counter[ItemId]()
    for history in histories:
        for place, item in enumerate(history):
            others = [*history[max(0, place - WINDOW) : place], *history[place + 1 : place + 1 + WINDOW]]
            others = [other for other in others if other != item and other in known]
            totals.update(others)
            if item in near:
                near[item].update(others)
    return {
        item: {other: count / (totals[other] + SMOOTHING) ** 0.5 for other, count in counts.items()}
        for item, counts in near.items()
    }


def by_votes(weights: Sequence[tuple[Codes, float]]) -> NextCodes:
    """The codes of neighbours, given with what each says."""

    def next_codes(prefix: Codes) -> Iterable[int]:
        votes = Counter[int]()
        for codes, weight in weights:
            if codes[: len(prefix)] == prefix and codes[len(prefix)] != PADDING:
                votes[codes[len(prefix)]] += weight  # pyright: ignore[reportArgumentType]  # a Counter takes floats
        return [code for code, _ in votes.most_common()]

    return next_codes


def by_distance(features: np.ndarray, centroids: Sequence[np.ndarray]) -> NextCodes:
    """The nearest centroids of what the codes before leave of the `[D]` features."""

    def next_codes(prefix: Codes) -> Iterable[int]:
        rest = features - sum(table[code] for table, code in zip(centroids, prefix, strict=False))
        return np.argsort(((centroids[len(prefix)] - rest) ** 2).sum(axis=1), kind="stable").tolist()

    return next_codes


def free_codes(next_codes: NextCodes, *, taken: Collection[Codes], allowed: Sequence[Sequence[int]]) -> Codes | None:
    """The most fitting codes that no item has, `allowed` by level; None if every prefix that fits is full.

    The last code is the smallest that is free: a model has seen those most.
    """

    def search(prefix: Codes) -> Codes | None:
        level = len(prefix)
        if level == len(allowed) - 1:
            return next((codes for last in allowed[level] if (codes := (*prefix, last)) not in taken), None)
        found = (search((*prefix, code)) for code in next_codes(prefix) if code in allowed[level])
        return next((codes for codes in found if codes is not None), None)

    return search(())


def as_features(features: Any, num_items: int, num_features: int) -> np.ndarray:
    """`[M, D]` features, rows of NaN where an item has none."""
    array = np.asarray(features, dtype=np.float64)
    if not num_features:
        raise ValueError(
            "features is given, expected None: these semantic IDs were not made from features, or do not say how; "
            "pass histories= alone"
        )
    if array.shape != (num_items, num_features):
        raise ValueError(
            f"features has shape {list(array.shape)}, expected [{num_items}, {num_features}]: a row for each new "
            "item, of the same features as those that the semantic IDs were made from; NaN where an item has none"
        )
    return array
