# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The JSON of the server: what it takes, what it gives, and what it says of errors. Knows no engine.

A body is read by pydantic once, strictly: `"5"` is no integer, and an unknown key is an error, not a wish ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from .answers import Classification, Recommendation

ItemId = StrictStr | StrictInt
Count = Annotated[int, Field(ge=1, lt=2**31)]
Milliseconds = Annotated[int, Field(ge=1, le=600_000)]

LONGEST_VALUE = 200  # characters of a wrong value that an error repeats
_EMPTY = {"too_short": "one item or more", "string_too_short": "one character or more"}  # by pydantic's names

Body = TypeVar("Body", bound=BaseModel)


class Taken(BaseModel):
    """What the server takes."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RecommendRequest(Taken):
    """One user: a `history`, a `text` or `tokens`, and which items may be recommended."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"history": ["B01", "B02"], "num_results": 10, "exclude": ["B03"]}]}
    )

    history: list[ItemId] | None = Field(default=None, description="Ids of the user's items, the latest last.")
    text: str | None = Field(default=None, description="A prompt as text, for a model with a tokenizer.")
    tokens: list[int] | None = Field(default=None, description="A prompt as token ids.")
    num_results: Count | None = Field(default=None, description="Items in the answer.")
    num_beams: Count | None = Field(default=None, description="Beams of the search, at least num_results.")
    exclude: list[ItemId] = Field(default_factory=list, description="Ids of items that must not be in the answer.")
    filter: list[ItemId] | None = Field(default=None, description="Ids of the only items that may be in the answer.")
    rule: str | None = Field(
        default=None, description="Name of a rule of the catalogue: only its items may be in the answer."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None, description="Of samples, where they are drawn."
    )
    timeout_ms: Milliseconds | None = Field(default=None, description="Answer within this time, or not at all.")
    sequences: bool = Field(default=False, description="Also answer with every item's tokens.")


class ClassifyRequest(Taken):
    """One text, for a catalogue of labels."""

    text: str
    num_labels: Count = 5
    timeout_ms: Milliseconds | None = None


class NewItem(Taken):
    """An item to add to the catalogue."""

    item_id: ItemId
    sequence: list[int] = Field(min_length=1, description="The item's token ids.")


class CataloguePatch(Taken):
    """Changes of the catalogue: all are made, in one step, or none."""

    remove: list[ItemId] = Field(default_factory=list, description="Ids of items; they leave every rule.")
    add: list[NewItem] = Field(default_factory=list)
    rules: dict[str, list[ItemId] | None] = Field(
        default_factory=dict, description="Item ids by name of a rule, which is made or replaced; null deletes it."
    )


class CataloguePut(Taken):
    """A new catalogue in place of the old one; rules keep their item ids."""

    index: str = Field(min_length=1, description="A saved index: a folder of the server's, or a repository id.")


class Given(BaseModel):
    """What the server gives."""

    model_config = ConfigDict(from_attributes=True)


class RecommendAnswer(Given):
    """The answer to one request."""

    items: list[ItemId] = Field(description="Ids, best first.")
    scores: list[float] | None = Field(description="Of the items; null for the fallback list.")
    catalogue_version: int = Field(description="Of the catalogue that the answer was made with.")
    dropped: list[ItemId] = Field(default=[], description="Ids of the history that the catalogue does not have.")
    num_cut: int = Field(default=0, description="Items, or tokens, cut from the left of the prompt to fit the model.")
    is_fallback: bool = Field(default=False, description="The history was empty: these are the fallback list.")
    seconds: dict[str, float] | None = Field(default=None, description="In all, in the queue, and in the model.")
    batch_size: int = Field(default=0, description="Requests computed together.")
    sequences: list[list[int] | None] | None = Field(
        default=None,
        description="Every item's tokens, if asked for; null for an item that left the catalogue meanwhile.",
    )


class ClassifyAnswer(Given):
    """The labels of one text, the most probable first."""

    labels: list[str]
    probabilities: list[float]
    catalogue_version: int
    seconds: dict[str, float] | None = None
    batch_size: int = 0


class CatalogueState(Given):
    """The catalogue as it is."""

    version: int
    num_items: int
    max_length: int = Field(description="Tokens of the longest sequence.")
    rules: dict[str, int] = Field(description="Items by name of a rule.")


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


class InvalidBody(ValueError):
    """A body that is no request; `error` says why."""

    def __init__(self, error: Error, status: int = 422) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status


def read_json(body: bytes) -> Any:
    """A body as Python objects.

    Raises:
        InvalidBody: it is no JSON.
    """
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidBody(
            make_error("body", _start_of(body), f"JSON ({error})", "send a JSON object in UTF-8")
        ) from None


def read_body(kind: type[Body], value: Any, *, at: str = "") -> Body:
    """Check one request.

    Args:
        kind: of request.
        value: from `read_json`.
        at: where in the body it was, for errors.

    Raises:
        InvalidBody: it is none; the first error is told, by the argument's name.
    """
    if not isinstance(value, dict):
        raise InvalidBody(make_error(at or "body", value, "a JSON object", f"its keys are {_names(kind)}"))
    try:
        return kind.model_validate(value)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
    first = errors[0]
    # The message of a union has a part for each of its types: the place is what matters.
    place = [part for part in first["loc"] if isinstance(part, int) or part not in ("str", "int")]
    argument = at + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    expected, fix = first["msg"].removeprefix("Input should be "), f"see {kind.__name__} at /docs"
    if first["type"] == "extra_forbidden":
        expected, fix = "no such argument", f"omit it; there are {_names(kind)}"
    elif first["type"] in _EMPTY:
        expected = _EMPTY[first["type"]]
    elif first["type"] == "missing":
        expected, fix = "a value", f"give {place[-1]}"
    elif any(error["loc"][-1:] == ("str",) for error in errors) and any(e["loc"][-1:] == ("int",) for e in errors):
        expected = "an item id, a string or an integer"
    value = None if first["type"] == "missing" else first["input"]
    raise InvalidBody(make_error(argument.removeprefix("."), value, expected, fix)) from None


def make_error(argument: str, value: Any, expected: str, fix: str) -> Error:
    """An error of one argument."""
    shown = value
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    if len(text) > LONGEST_VALUE:
        shown = text[:LONGEST_VALUE] + "..."
    return Error(
        message=f"{argument}={shown!r}, expected {expected}: {fix}",
        argument=argument,
        value=shown,
        expected=expected,
        fix=fix,
    )


def to_recommend_answer(answer: Recommendation, sequences: list[list[int] | None] | None) -> dict[str, Any]:
    """An answer as JSON's objects."""
    made = _fields(answer)
    return made if sequences is None else made | {"sequences": sequences}


def to_classify_answer(answer: Classification) -> dict[str, Any]:
    """An answer as JSON's objects."""
    return _fields(answer)


def to_json(value: Any) -> bytes:
    """A body; NumPy's numbers are numbers, and a NaN, which no answer has, would be null."""
    return pydantic_core.to_json(value, fallback=lambda other: other.item() if hasattr(other, "item") else str(other))


def _fields(answer: Any) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in answer.__dataclass_fields__}


def _names(kind: type[BaseModel]) -> str:
    return ", ".join(kind.model_fields)


def _start_of(body: bytes) -> str:
    return body[:80].decode("utf-8", errors="replace")
