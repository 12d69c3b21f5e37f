# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of itself while it works: for metrics and logs. Knows neither."""

from __future__ import annotations

import logging
from collections.abc import Callable
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

    def updated(self, catalogue_version: int, num_items: int) -> None:
        """The catalogue has changed."""


class Guarded(Observer):
    """Another observer, whose errors are logged: no request fails because of who only watches."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def queued(self, num_waiting: int) -> None:
        """See `Observer.queued`."""
        _tell(self.observer.queued, num_waiting)

    def computed(self, batch: Batch) -> None:
        """See `Observer.computed`."""
        _tell(self.observer.computed, batch)

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """See `Observer.ended`."""
        _tell(self.observer.ended, outcome, seconds)

    def updated(self, catalogue_version: int, num_items: int) -> None:
        """See `Observer.updated`."""
        _tell(self.observer.updated, catalogue_version, num_items)


def _tell(hear: Callable[..., None], *told: Any) -> None:
    try:
        hear(*told)
    except Exception:
        logger.exception("an observer failed")
