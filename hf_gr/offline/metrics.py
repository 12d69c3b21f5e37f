# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranking metrics, one user at a time. Knows lists of item ids and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any


def metric_names(cutoffs: Sequence[int]) -> tuple[str, ...]:
    """The names of a user's metrics, in their order.

    Example:
        >>> metric_names((5, 10))
        ('recall@5', 'recall@10', 'ndcg@5', 'ndcg@10', 'mrr')
    """
    return (*(f"recall@{cutoff}" for cutoff in cutoffs), *(f"ndcg@{cutoff}" for cutoff in cutoffs), "mrr")


def user_metrics(items: Sequence[Any], targets: Collection[Any], cutoffs: Sequence[int]) -> tuple[float, ...]:
    """The metrics of one user's list, best first, in the order of `metric_names`.

    Recall@K is the share of a user's targets among the first K items. NDCG@K gives a target at rank r (from 1)
    1 / log2(r + 1), divided by the most that as many targets could get. MRR is 1 / r of the first target; 0 if the
    list has none.

    Example:
        >>> user_metrics(["tea", "ham"], ["ham"], (1, 2))
        (0.0, 1.0, 0.0, 0.6309297535714575, 0.5)
    """
    wanted = set(targets)
    ranks = [rank for rank, item in enumerate(dict.fromkeys(items), start=1) if item in wanted]
    recall, ndcg = [], []
    for cutoff in cutoffs:
        within = [rank for rank in ranks if rank <= cutoff]
        best = sum(1 / log2(rank + 1) for rank in range(1, min(cutoff, len(wanted)) + 1))
        recall.append(len(within) / len(wanted))
        ndcg.append(sum(1 / log2(rank + 1) for rank in within) / best)
    return (*recall, *ndcg, 1 / ranks[0] if ranks else 0.0)


@dataclass
class RankingTotals:
    """Sums of `user_metrics` over lists; `means` divides them.

    Attributes:
        cutoffs: the K.
        num_rows: lists that were added.

    Example:
        >>> totals = RankingTotals((1, 2))
        >>> _ = totals.add(["jam", "ham"], ["ham"])
        >>> _ = totals.add(["tea", "ham"], ["tea"])
        >>> {name: round(value, 3) for name, value in totals.means().items()}
        {'recall@1': 0.5, 'recall@2': 1.0, 'ndcg@1': 0.5, 'ndcg@2': 0.815, 'mrr': 0.75}
    """

    cutoffs: tuple[int, ...]
    num_rows: int = 0
    _sums: list[float] = field(default_factory=list)
    _users: set[int] = field(default_factory=set)

    @property
    def num_users(self) -> int:
        """Users whose lists were added; as many as lists if users have no numbers."""
        return len(self._users) or self.num_rows

    def add(self, items: Sequence[Any], targets: Collection[Any], user: int | None = None) -> tuple[float, ...]:
        """Add one list, best first, and its targets (one or more); return its metrics.

        A user with several lists has a number; all users have one, or none has.
        """
        values = user_metrics(items, targets, self.cutoffs)
        self._sums = [total + value for total, value in zip(self._sums or [0.0] * len(values), values, strict=True)]
        self.num_rows += 1
        if user is not None:
            self._users.add(user)
        return values

    def means(self) -> dict[str, float]:
        """The metrics: means over lists; none without lists."""
        return {
            name: total / self.num_rows for name, total in zip(metric_names(self.cutoffs), self._sums, strict=False)
        }
