# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranking metrics, one user at a time. Knows lists of item ids and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any


@dataclass
class RankingTotals:
    """Sums over users; `means` divides them.

    Recall@K is the share of a user's targets among the first K items. NDCG@K gives a target at rank r (from 1)
    1 / log2(r + 1), divided by the most that as many targets could get. MRR is 1 / r of the first target; 0 if the
    list has none.

    Attributes:
        cutoffs: the K.
        num_users: users that were added.

    Example:
        >>> totals = RankingTotals((1, 2))
        >>> totals.add(["jam", "ham"], ["ham"])
        >>> totals.add(["tea", "ham"], ["tea"])
        >>> {name: round(value, 3) for name, value in totals.means().items()}
        {'recall@1': 0.5, 'recall@2': 1.0, 'ndcg@1': 0.5, 'ndcg@2': 0.815, 'mrr': 0.75}
    """

    cutoffs: tuple[int, ...]
    num_users: int = 0
    _sums: dict[str, float] = field(default_factory=dict)

    def add(self, items: Sequence[Any], targets: Collection[Any]) -> None:
        """Add one user's list, best first, and targets (one or more)."""
        wanted = set(targets)
        gains = [1 / log2(rank + 1) if item in wanted else 0.0 for rank, item in enumerate(items, start=1)]
        values: dict[str, float] = {}
        for cutoff in self.cutoffs:
            values[f"recall@{cutoff}"] = sum(gain > 0 for gain in gains[:cutoff]) / len(wanted)
        for cutoff in self.cutoffs:
            best = sum(1 / log2(rank + 1) for rank in range(1, min(cutoff, len(wanted)) + 1))
            values[f"ndcg@{cutoff}"] = sum(gains[:cutoff]) / best
        values["mrr"] = next((1 / rank for rank, gain in enumerate(gains, start=1) if gain > 0), 0.0)
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self.num_users += 1

    def means(self) -> dict[str, float]:
        """The metrics; none without users."""
        return {name: total / self.num_users for name, total in self._sums.items()}
