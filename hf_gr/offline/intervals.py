# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals over users: how far a mean would move with other users. Knows numbers and no users.

Users are resampled with replacement, as many as there are. A resample's mean depends only on how often it has each
distinct row of values, and these counts are multinomial: with lists of ten items and one target there are eleven
rows, and a million users cost no more than a thousand. Source: Efron and Tibshirani, An Introduction to the
Bootstrap, chapter 13 (percentile intervals).

Axes: U users, M metrics, D distinct rows of metrics, R resamples.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
DRAWN_AT_ONCE = 2**22  # counts: 32 MB


@dataclass
class UserValues:
    """The metrics of users one by one: a number for each user, and the distinct rows of metrics.

    Example:
        >>> values = UserValues()
        >>> for row in [(1.0, 0.5), (0.0, 0.0), (1.0, 0.5)]:
        ...     values.add(row)
        >>> values.rows, list(values.codes)
        ({(1.0, 0.5): 0, (0.0, 0.0): 1}, [0, 1, 0])
    """

    rows: dict[tuple[float, ...], int] = field(default_factory=dict)
    codes: array[int] = field(default_factory=lambda: array("I"))

    def add(self, values: tuple[float, ...]) -> None:
        """Add the next user."""
        self.codes.append(self.rows.setdefault(values, len(self.rows)))

    @property
    def table(self) -> NDArray[np.float64]:
        """`[D, M]` distinct rows."""
        return np.array(list(self.rows), dtype=np.float64)

    def intervals(self, *, num_resamples: int, seed: int) -> list[tuple[float, float]]:
        """An interval of the mean for each metric; none without users or resamples."""
        if not (len(self.codes) and num_resamples):
            return []
        return bootstrap(self.table, np.bincount(self.codes), num_resamples=num_resamples, seed=seed)

    def differences(
        self, other: UserValues, *, num_resamples: int, seed: int
    ) -> tuple[list[float], list[tuple[float, float]]]:
        """Means of the differences to other values of the same users, `[M]`, and their intervals.

        A resample has both values of a user, so that what is common to both, such as users who are hard to please,
        does not widen the interval. None without users or resamples.
        """
        if not (len(self.codes) and num_resamples):
            return [], []
        mine, theirs = (np.asarray(values.codes, dtype=np.int64) for values in (self, other))
        pairs, counts = np.unique(mine * len(other.rows) + theirs, return_counts=True)
        values = self.table[pairs // len(other.rows)] - other.table[pairs % len(other.rows)]
        means = (counts @ values / len(mine)).tolist()
        return means, bootstrap(values, counts, num_resamples=num_resamples, seed=seed)


def bootstrap(
    values: NDArray[np.float64], counts: Sequence[int] | NDArray[np.integer], *, num_resamples: int, seed: int
) -> list[tuple[float, float]]:
    """Percentile intervals of the means over users.

    Args:
        values: `[D, M]` distinct rows of values.
        counts: `[D]` how many users have each.
        num_resamples: R.
        seed: of the resamples.

    Returns:
        M pairs of bounds, between which `CONFIDENCE` of the resampled means lie.

    Example:
        >>> ((low, high),) = bootstrap(np.array([[0.0], [1.0]]), [900, 100], num_resamples=1000, seed=0)
        >>> f"{low:.2f} to {high:.2f}"
        '0.08 to 0.12'
    """
    num_users = int(np.sum(counts))
    generator = np.random.default_rng(seed)
    shares, at_once = np.asarray(counts) / num_users, max(1, DRAWN_AT_ONCE // len(values))
    sums = [
        generator.multinomial(num_users, shares, size=min(at_once, num_resamples - start)) @ values
        for start in range(0, num_resamples, at_once)
    ]
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(sums) / num_users, [outside, 100 - outside], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))
