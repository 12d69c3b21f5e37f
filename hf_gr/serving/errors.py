# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a failed request is told: its status, its error, and when to come again. Knows no web framework."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from .answers import BrokenAnswer, Closed, Overloaded, TooLate
from .schemas import Error, InvalidBody

# The errors of hf_gr: `num_beams=0, expected 1 or more: omit it`, `exclude has 2 ids, expected ...: ...`.
_FORM = re.compile(
    r"(?:the )?(?P<argument>[a-z_]\w*(?:\[[^\]]*\]|\.\w+)*)(?:=|\s+(?:is|has|was)\s+)(?P<value>.*?)"
    r", expected (?P<expected>.*?)(?:: (?P<fix>.*))?",
    re.DOTALL,
)
CLIENT_GONE = 499  # nginx's number; nobody reads the answer
RETRY_UNREADY = 1.0  # seconds


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Refused(Exception):
    """A request that is refused before anything is computed."""

    def __init__(self, status: int, error: Error, **headers: str) -> None:
        super().__init__(error.message)
        self.failure = Failure(status, error, headers)


@dataclass(frozen=True)
class Failure:
    """A failed request's status, error and headers."""

    status: int
    error: Error
    headers: dict[str, str]


def describe(failure: BaseException) -> Failure:
    """What to tell of an exception; of one that is no answer of the engine's, only that it was."""
    match failure:
        case Refused():
            return failure.failure
        case InvalidBody():
            return Failure(failure.status, failure.error, {})
        case Overloaded():
            return _later(failure, failure.retry_after)
        case Closed():
            return _later(failure, RETRY_UNREADY)
        case TooLate():
            fix = "give a longer timeout_ms, fewer num_beams, or come again"
            return Failure(504, Error(message=str(failure), argument="timeout_ms", fix=fix), {})
        case ClientGone():
            return Failure(CLIENT_GONE, Error(message="the client has gone"), {})
        case BrokenAnswer():
            fix = "the same request will fail again: tell those who run the server"
            return Failure(500, Error(message=str(failure), fix=fix), {})
        case ValueError():
            return Failure(422, read_message(str(failure)), {})
        case _:
            fix = "tell those who run the server: its log has the header x-request-id of this answer"
            return Failure(500, Error(message="the server failed on this request", fix=fix), {})


def read_message(message: str) -> Error:
    """The parts of an error's message, as far as it has hf_gr's form."""
    parts = _FORM.fullmatch(message)
    named: dict[str, Any] = parts.groupdict() if parts else {}
    return Error(message=message, **named)


def _later(failure: BaseException, seconds: float) -> Failure:
    error = Error(message=str(failure), fix=f"come again in {seconds:.3g} seconds", retry_after=seconds)
    return Failure(503, error, {"retry-after": str(max(1, math.ceil(seconds)))})
