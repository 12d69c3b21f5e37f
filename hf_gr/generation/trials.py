# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which of several ways to serve calls is the fastest, by the times of real calls. Knows no model and no draft.

Every way serves one call a round, in an order that rotates from round to round, so that drifts of the machine meet all
of them; the first round warms up. Times are compared within a round. A way that is clearly slower than the best drops
out; what "clearly" is shrinks with the number of rounds. In the end the simplest of the equally fast ones stays.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_ROUNDS = 3  # so that one disturbed call decides nothing
MOST_ROUNDS = 32  # ways that are still there differ by a few percent at most
SPREAD = 0.8  # over the number of rounds: a way this much slower than the best drops out
TIE = 0.01  # a simpler way is kept if it is slower by no more than this


@dataclass(frozen=True)
class Trial:
    """One call: which way serves it, and in which round; `round` is None if the call is not to be timed."""

    name: str
    round: int | None = None


class Trials:
    """The times of one kind of calls. Several threads may share it.

    Args:
        names: of the ways, the simplest first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.left = tuple(names)
        self.chosen = names[0] if len(names) == 1 else None
        self.ratios: dict[str, float] = {}  # of those compared last, time by the mean of their round
        self._rounds: list[dict[str, float]] = []  # NaN for a call that has not ended yet, or has failed
        self._lock = threading.Lock()

    def begin(self) -> Trial:
        """The way of the next call."""
        with self._lock:
            if self.chosen is None and (not self._rounds or all(name in self._rounds[-1] for name in self.left)):
                if len(self._rounds) > FEWEST_ROUNDS + 1:
                    self._drop_failed()
                if len(self._rounds) > MOST_ROUNDS or len(self.left) == 1:  # some calls failed, or are under way
                    self._decide()
                else:
                    self._rounds.append({})
            if self.chosen is not None:
                return Trial(self.chosen)
            number = len(self._rounds) - 1
            turn = number % len(self.left)
            name = next(name for name in (*self.left[turn:], *self.left[:turn]) if name not in self._rounds[-1])
            self._rounds[-1][name] = math.nan
            return Trial(name, number or None)

    def end(self, trial: Trial, seconds: float) -> bool:
        """Report the time of a call; whether it decided which way is the fastest."""
        with self._lock:
            if self.chosen is not None or trial.round is None or trial.name not in self.left:
                return False
            self._rounds[trial.round][trial.name] = seconds
            number = self._compare()
            if number >= FEWEST_ROUNDS:
                slowest = min(self.ratios.values()) * (1.0 + SPREAD / number)
                self.left = tuple(name for name in self.left if self.ratios[name] <= slowest)
                if len(self.left) == 1 or number >= MOST_ROUNDS:
                    self._decide()
            return self.chosen is not None

    def _compare(self) -> int:
        """Compare the ways over the rounds that all of them have ended; their number."""
        rounds = [[times.get(name, math.nan) for name in self.left] for times in self._rounds[1:]]
        rounds = [times for times in rounds if not math.isnan(sum(times))]
        shares = [[time / statistics.fmean(times) for time in times] for times in rounds]
        self.ratios = {name: middle(own) for name, *own in zip(self.left, *shares, strict=True)}
        return len(rounds)

    def _drop_failed(self) -> None:
        """Drop ways none of whose calls have ended; all of them may fail for another reason."""
        ended = [name for name in self.left if any(times.get(name, math.nan) >= 0.0 for times in self._rounds)]
        self.left = tuple(ended) or self.left[:1]

    def _decide(self) -> None:
        """Keep the simplest of the fastest."""
        self._compare()
        fastest = min(self.ratios.values(), default=math.nan)
        self.chosen = next((name for name in self.left if self.ratios[name] <= fastest * (1.0 + TIE)), self.left[0])


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half: of three values the median; of many it also hears of the less usual calls."""
    cut = max(len(values) // 4, 1) if len(values) > 2 else 0
    kept = sorted(values)[cut : len(values) - cut]
    return statistics.fmean(kept) if kept else math.nan
