# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a failed request is told: its status, its error, and when to retry. Knows no web framework."""

import ast
import json
import math
import re
from contextlib import suppress
from itertools import islice
from typing import Any

import pydantic_core
from pydantic import BaseModel, Field

from .answers import BrokenAnswer, Closed, Overloaded, TooLate

# The errors of hf_gr: `num_beams=0, expected 1 or more: omit it`, `exclude has 2 ids, expected ...: ...`.
_FORM = re.compile(
    r"(?:the )?(?P<argument>[a-z_]\w*(?:\[[^\]]*\]|\.\w+)*)(?:=|\s+(?:is|has|was)\s+)"
    r"(?P<value>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|.*?)"  # a text, whatever it says, or anything else
    r", expected (?P<expected>.*?)(?:: (?P<fix>.*))?",
    re.DOTALL,
)
CLIENT_GONE = 499  # nginx's number; the answer is not read
RETRY_UNREADY = 1.0  # seconds
LONGEST_VALUE = 200  # characters of a wrong value that an error repeats
_ENCODER = json.JSONEncoder(default=repr)


class Error(BaseModel):
    """What went wrong, and what to do about it."""

    message: str
    argument: str | None = None
    value: Any = None
    expected: str | None = None
    fix: str | None = None
    retry_after: float | None = Field(default=None, description="Seconds, as in the header Retry-After.")
    status: int | None = Field(
        default=None, description="The status that the request would have had alone, in a list."
    )


class Errors(BaseModel):
    """The body of every answer that is no success."""

    error: Error


class ClientGone(Exception):
    """The client no longer waits for the answer."""


class Refused(Exception):
    """A request that is answered with an error; what is unknown of any other exception becomes one, too."""

    def __init__(self, status: int, error: Error, **headers: str) -> None:
        super().__init__(error.message)
        self.status, self.error, self.headers = status, error, headers

    @property
    def body(self) -> bytes:
        """The answer's body."""
        return to_json(Errors(error=self.error).model_dump(exclude_none=True))


def wrong(argument: str, value: Any, expected: str, fix: str) -> Refused:
    """A refusal of one argument."""
    text = value if isinstance(value, str) else "".join(islice(_ENCODER.iterencode(value), LONGEST_VALUE + 1))
    shown = text[:LONGEST_VALUE] + "..." if len(text) > LONGEST_VALUE else value
    message = f"{argument}={shown!r}, expected {expected}: {fix}"
    return Refused(422, Error(message=message, argument=argument, value=shown, expected=expected, fix=fix))


def describe(failure: BaseException) -> Refused:
    """What to tell of an exception; of one that is no answer of the engine's, only that it was."""
    match failure:
        case Refused():
            return failure
        case Overloaded():
            return _later(failure, failure.retry_after)
        case Closed():
            return _later(failure, RETRY_UNREADY)
        case TooLate():
            fix = "give a longer timeout_ms, fewer num_beams, or retry later"
            return Refused(504, Error(message=str(failure), argument="timeout_ms", fix=fix))
        case ClientGone():
            return Refused(CLIENT_GONE, Error(message="the client has gone"))
        case BrokenAnswer():
            fix = "the same request will fail again: tell those who run the server"
            return Refused(500, Error(message=str(failure), fix=fix))
        case ValueError():
            return Refused(422, read_message(str(failure)))
        case _:
            fix = "tell those who run the server: its log has the header x-request-id of this answer"
            return Refused(500, Error(message="the server failed on this request", fix=fix))


def read_message(message: str) -> Error:
    """The parts of an error's message, as far as it has hf_gr's form."""
    parts = _FORM.fullmatch(message)
    named: dict[str, Any] = parts.groupdict() if parts else {}
    if str(named.get("value")).startswith(("'", '"')):
        with suppress(ValueError, SyntaxError):  # the text itself, unless it was cut
            named["value"] = ast.literal_eval(named["value"])
    return Error(message=message, **named)


def to_json(value: Any) -> bytes:
    """A body; NumPy's numbers are numbers, and a NaN, which no answer has, would be null."""
    return pydantic_core.to_json(value, fallback=lambda other: other.item() if hasattr(other, "item") else str(other))


def _later(failure: BaseException, seconds: float) -> Refused:
    error = Error(message=str(failure), fix=f"retry in {seconds:.3g} seconds", retry_after=seconds)
    return Refused(503, error, **{"retry-after": str(max(1, math.ceil(seconds)))})
