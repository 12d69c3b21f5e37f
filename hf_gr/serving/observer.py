# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of itself while it works: for metrics and logs. Knows neither."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger(__name__)

Outcome = Literal["answered", "refused", "late", "cancelled", "failed", "invalid"]


@dataclass(frozen=True)
class Batch:
    """A batch that was computed.

    Attributes:
        num_requests: computed together.
        num_tokens: of the budget, padding and beams counted.
        num_cached_tokens: of prompts that were not computed, since their keys were cached.
        seconds: it took.
        predicted_seconds: it was expected to take.
        target_forwards: forwards of the model besides the prefill; None if unknown.
        accepted: drafted steps that were accepted, all requests together; None without drafts.
    """

    num_requests: int
    num_tokens: int
    num_cached_tokens: int
    seconds: float
    predicted_seconds: float
    target_forwards: int | None = None
    accepted: int | None = None


class Observer:
    """Hears of everything, and does nothing; override what interests you. Called in the event loop's thread."""

    def queued(self, num_waiting: int) -> None:
        """The queue has another length."""

    def computed(self, batch: Batch) -> None:
        """A batch is done."""

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """A request has ended, so many seconds after it arrived."""


class Observers(Observer):
    """Several observers, whose errors are logged: no request fails because of who only watches."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def queued(self, num_waiting: int) -> None:
        """See `Observer.queued`."""
        self._tell("queued", num_waiting)

    def computed(self, batch: Batch) -> None:
        """See `Observer.computed`."""
        self._tell("computed", batch)

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """See `Observer.ended`."""
        self._tell("ended", outcome, seconds)

    def _tell(self, event: str, *told: Any) -> None:
        for observer in self.observers:
            try:
                getattr(observer, event)(*told)
            except Exception:
                logger.exception("an observer failed")
