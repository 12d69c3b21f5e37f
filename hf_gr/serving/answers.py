# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What an engine answers, how it refuses, and what it tells observers. Knows no model, no queue and no HTTP."""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

from hf_gr.classification.result import Ranked


@dataclass(frozen=True)
class Recommendation:
    """The answer to one request.

    Attributes:
        items: ids, best first; fewer than `num_results` if fewer are allowed.
        scores: of the items, as `sequences_scores`; items of one sequence have one score. None for a fallback.
        catalogue_version: of the catalogue that the answer was made with.
        model_version: the name of the model: its folder's last part, or its repository with the revision, if given.
        dropped: items of the history that the catalogue does not have, if these are dropped.
        num_proven: how many of the first items are certainly the best that may be recommended; None if unknown.
        num_cut: items (or tokens, of a prompt of tokens or text) that were cut from the left of the prompt to fit.
        is_fallback: the history has no item that the model knows, and `items` are the fallback's.
        similar_to: of a fallback, the items of the history that some of `items` are bought with, the latest first;
            none where all `items` are from the list for anybody.
        seconds: in all, in the queue, and in the model: `{"total", "queued", "computed"}`.
        batch_size: requests that were computed together.
    """

    items: list[Any]
    scores: list[float] | None
    catalogue_version: int
    model_version: str = ""
    dropped: tuple[Any, ...] = ()
    num_proven: int | None = None
    num_cut: int = 0
    is_fallback: bool = False
    similar_to: tuple[Any, ...] = ()
    seconds: dict[str, float] | None = None
    batch_size: int = 0


@dataclass(frozen=True)
class Classification:
    """The labels of one text, the best first, with their probabilities.

    Attributes:
        method: how they were found, and `mass_left` what others may have at most: see `RankedLabels`.
        parents: with `hierarchy`, for every level the parents and their probabilities, best first.
    """

    labels: list[str]
    probabilities: list[float]
    catalogue_version: int
    model_version: str = ""
    method: str = "exact"
    mass_left: float = 0.0
    parents: list[Ranked] | None = None
    seconds: dict[str, float] | None = None
    batch_size: int = 0


class Overloaded(RuntimeError):
    """The queue is full, or what is in it leaves no time until the deadline: retry in `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooLate(Exception):
    """The deadline passed before the answer was there."""


class Closed(Exception):
    """The engine is not ready yet, or draining."""


class BrokenAnswer(Exception):
    """The model's scores are not numbers, or options of generate leave nothing: an error of the server's."""


Outcome = Literal["answered", "refused", "late", "cancelled", "failed", "invalid"]


def outcome_of(error: BaseException) -> Outcome:
    """How a request has ended that raised this."""
    match error:
        case asyncio.CancelledError():
            return "cancelled"
        case Overloaded() | Closed():
            return "refused"
        case TooLate():
            return "late"
        case ValueError():
            return "invalid"
    return "failed"


@dataclass(frozen=True)
class Batch:
    """A batch that was computed.

    Attributes:
        num_requests: computed together.
        num_tokens: of the budget, padding and beams counted.
        seconds: it took.
        predicted_seconds: it was expected to take.
        num_cached_tokens: of prompts that were not computed, since their keys were cached.
        target_forwards: forwards of the model after the prefill; None if unknown.
        accepted: drafted steps that were accepted, all requests together; None without drafts.
    """

    num_requests: int
    num_tokens: int
    seconds: float
    predicted_seconds: float
    num_cached_tokens: int = 0
    target_forwards: int | None = None
    accepted: int | None = None


class Observer:
    """Hears of everything, and does nothing; override what interests you. Called in the event loop's thread."""

    def queued(self, num_waiting: int) -> None:
        """The queue has another length."""

    def working(self, num_busy: int) -> None:
        """So many workers compute a batch now."""

    def computed(self, batch: Batch) -> None:
        """A batch is done."""

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """A request has ended, so many seconds after it arrived."""
