# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals over users: how far a mean would move with other users. Knows numbers and no users.

Users are resampled with replacement. A resample's mean depends only on how often it has each distinct row of values,
and these counts are multinomial: a million users cost no more than a thousand. A user with several rows is drawn with
all of them: rows of one user are alike, and rows drawn one by one would make intervals too narrow. Sources: Efron and
Tibshirani, An Introduction to the Bootstrap, chapter 13 (percentile intervals); Cameron, Gelbach and Miller,
Bootstrap-based improvements for inference with clustered errors, 2008 (resampling whole users).

Axes: N rows of a table, U users, M metrics, D distinct rows of metrics, R resamples.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
FEWEST_USERS = 10  # for an interval: resamples of fewer are too much alike, and those of one are all the same
DIGITS = 9  # sums of a user's values that differ by less are the same: they were added in another order
DRAWN_AT_ONCE = 2**22  # counts: 32 MB


@dataclass
class UserValues:
    """The metrics of a table's rows one by one: a number for each, and the distinct rows of metrics."""

    rows: dict[tuple[float, ...], int] = field(default_factory=dict)  # the distinct ones, numbered
    codes: array[int] = field(default_factory=lambda: array("I"))  # [N] the number of each row's metrics
    users: array[int] = field(default_factory=lambda: array("I"))  # [N] from 0 without gaps; empty if a row is a user

    def add(self, values: tuple[float, ...], user: int | None = None) -> None:
        """Add the next row; all have the number of a user, or none has."""
        self.codes.append(self.rows.setdefault(values, len(self.rows)))
        if user is not None:
            self.users.append(user)

    @property
    def num_users(self) -> int:
        """Users of these rows; as many as rows if users have no numbers."""
        return len(set(self.users)) or len(self.codes)

    @property
    def table(self) -> NDArray[np.float64]:
        """`[D, M]` distinct rows."""
        return np.array(list(self.rows), dtype=np.float64)

    def means(self) -> list[float]:
        """The mean of each metric over rows; none without rows."""
        if not self.codes:
            return []
        return (np.bincount(self.codes, minlength=len(self.rows)) @ self.table / len(self.codes)).tolist()

    def intervals(self, *, num_resamples: int, seed: int) -> list[tuple[float, float]]:
        """An interval of the mean for each metric; none with too few users, or without resamples."""
        if self.num_users < FEWEST_USERS or not num_resamples:
            return []
        by_user = self._by_user(self.table, np.asarray(self.codes, dtype=np.int64))
        return bootstrap(*by_user, num_resamples=num_resamples, seed=seed)

    def differences(
        self, other: UserValues, *, num_resamples: int, seed: int
    ) -> tuple[list[float], list[tuple[float, float]]]:
        """Means of the differences to other values of the same users, `[M]`, and their intervals.

        A resample has both values of a user, so that what is common to both, such as users who are hard to please,
        does not widen the interval. None with too few users, or without resamples.
        """
        if self.num_users < FEWEST_USERS or not num_resamples:
            return [], []
        mine, theirs = (np.asarray(values.codes, dtype=np.int64) for values in (self, other))
        pairs, codes, counts = np.unique(mine * len(other.rows) + theirs, return_inverse=True, return_counts=True)
        values = self.table[pairs // len(other.rows)] - other.table[pairs % len(other.rows)]
        means = (counts @ values / len(mine)).tolist()
        return means, bootstrap(*self._by_user(values, codes), num_resamples=num_resamples, seed=seed)

    def _by_user(self, values: NDArray[np.float64], codes: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """From `[D, M]` values and `[N]` codes: distinct sums over users' rows, with numbers of users and of rows."""
        if not self.users:
            return values, np.bincount(codes, minlength=len(values)), np.ones(len(values))
        users = np.asarray(self.users, dtype=np.int64)
        sums = [np.bincount(users, weights=column[codes]) for column in (*values.T, np.ones(len(values)))]
        distinct, counts = np.unique(np.stack(sums, axis=1).round(DIGITS), axis=0, return_counts=True)
        return distinct[:, :-1], counts, distinct[:, -1]


def bootstrap(
    values: NDArray[np.float64], counts: Any, sizes: NDArray[np.float64], *, num_resamples: int, seed: int
) -> list[tuple[float, float]]:
    """M pairs of bounds, between which `CONFIDENCE` of the resampled means over rows lie.

    `values` are the `[D, M]` distinct sums of users' rows, `counts` how many users have each, and `sizes` of how many
    rows each is the sum.

    Example:
        >>> ((low, high),) = bootstrap(np.eye(2)[:, :1], [100, 900], np.ones(2), num_resamples=1000, seed=0)
        >>> f"{low:.2f} to {high:.2f}"
        '0.08 to 0.12'
    """
    num_users, generator = int(np.sum(counts)), np.random.default_rng(seed)
    shares, at_once = np.asarray(counts) / num_users, max(1, DRAWN_AT_ONCE // len(values))
    summed = np.column_stack([values, sizes])
    sizes_drawn = (min(at_once, num_resamples - start) for start in range(0, num_resamples, at_once))
    sums = np.concatenate([generator.multinomial(num_users, shares, size=size) @ summed for size in sizes_drawn])
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(sums[:, :-1] / sums[:, -1:], [outside, 100 - outside], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))
