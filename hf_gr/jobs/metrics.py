# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranking metrics, one user at a time. Knows lists of item ids and nothing else."""

from collections.abc import Collection, Sequence
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
