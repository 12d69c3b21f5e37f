# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The JSON that the server takes. Knows no engine.

A body is read by pydantic once, strictly: `"5"` is no integer, and an unknown key is an error, not a wish ignored. A
list is read up to its first error: pydantic needs seconds, and a kilobyte, for each thousand.
"""

import re
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictInt, StrictStr, ValidationError, model_validator

from hf_gr.classification.result import Score

from .errors import to_json, wrong


class First(FailFast):
    """`FailFast` that can be in a union."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


ItemId = StrictStr | StrictInt
ItemIds = Annotated[list[ItemId], First()]
Tokens = Annotated[list[int], First()]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Milliseconds = Annotated[int, Field(ge=1, le=600_000)]

_TYPE = re.compile(r"str|int|(list|dict)\[.*")  # in a union
_EMPTY = {"too_short": "one item or more", "string_too_short": "one character or more"}  # by pydantic's names

Body = TypeVar("Body", bound=BaseModel)


class Taken(BaseModel):
    """What the server takes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, value: Any) -> Any:
        """Omit unknown keys but the first: each would be an error."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            known = {name: value[name] for name in cls.model_fields if name in value}
            return known | {next(name for name in value if name not in known): None}
        return value


class RecommendRequest(Taken):
    """One user: a `history`, a `text` or `tokens`, and which items may be recommended."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"history": ["B01", "B02"], "num_results": 10, "exclude": ["B03"]}]}
    )

    history: ItemIds | None = Field(default=None, description="Ids of the user's items, the latest last.")
    text: str | None = Field(default=None, description="A prompt as text, for a model with a tokenizer.")
    tokens: Tokens | None = Field(default=None, description="A prompt as token ids.")
    num_results: Count | None = Field(default=None, description="Items in the answer.")
    num_beams: Count | None = Field(default=None, description="Beams of the search, at least num_results.")
    exclude: ItemIds = Field(default_factory=list, description="Ids of items that must not be in the answer.")
    filter: ItemIds | dict[str, Any] | None = Field(
        default=None,
        description="Ids of the only items that may be in the answer; or, with a table of attributes, their values: "
        '{"category": ["tea"], "price": {"min": 5, "max": 20}}.',
    )
    rule: str | None = Field(
        default=None, description="Name of a rule of the catalogue: only its items may be in the answer."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None, description="Of samples, where they are drawn."
    )
    exact: bool | None = Field(
        default=None, description="True for the best items of the whole catalogue; null for what the server does."
    )
    max_per_group: Count | None = Field(
        default=None,
        description="The most items of one group in the answer: of the option item_groups, or of one first code.",
    )
    timeout_ms: Milliseconds | None = Field(default=None, description="Answer within this time, or not at all.")
    sequences: bool = Field(
        default=False,
        description="Also answer with the tokens of items; null if the catalogue changed twice meanwhile.",
    )


class ClassifyRequest(Taken):
    """One text, for a catalogue of labels."""

    text: str
    num_labels: Count = 5
    score: Score = Field(default="renormalized", description="By what labels are ranked: see hf_gr.classify.")
    threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Omit labels and parents of a smaller probability."
    )
    hierarchy: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="The text between the levels of a label: also answer with parents."
    )
    timeout_ms: Milliseconds | None = None


class NewItem(Taken):
    """An item to add to the catalogue."""

    item_id: ItemId
    sequence: Tokens = Field(min_length=1, description="The item's token ids.")


class CataloguePatch(Taken):
    """Changes of the catalogue: all are made, in one step, or none."""

    remove: ItemIds = Field(default_factory=list, description="Ids of items; they leave every rule.")
    restore: ItemIds = Field(default_factory=list, description="Ids of removed items; they come back to no rule.")
    add: Annotated[list[NewItem], First()] = Field(default_factory=list)
    rules: dict[str, ItemIds | None] = Field(
        default_factory=dict, description="Item ids by name of a rule, which is made or replaced; null deletes it."
    )
    code_book: dict[str, str] | None = Field(
        default=None, description="Tokens of some items, as `hf-gr items extend` writes them; refused if others here."
    )
    idempotency_key: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = Field(
        default=None, description="Of this change alone, such as a UUID: sent again with it, the change is made once."
    )


class CataloguePut(Taken):
    """A new catalogue in place of the old one; rules keep those of their item ids that it has."""

    index: str = Field(min_length=1, description="A saved index: a folder of the server's, or a repository id.")


class ModelPut(Taken):
    """A model and its catalogue in place of the old pair; rules keep those of their item ids that the new one has."""

    model: str = Field(min_length=1, description="A saved model: a folder of the server's, or a repository id.")
    index: str | None = Field(default=None, min_length=1, description="As for a catalogue; null for the model's own.")
    tokenizer: str | None = Field(default=None, min_length=1, description="For texts; null for the model's own.")
    assistant_model: str | None = Field(default=None, min_length=1, description="A new draft model, if there is one.")
    revision: str | None = Field(default=None, min_length=1, description="Of a repository: branch, tag or commit.")


class CatalogueState(BaseModel):
    """The catalogue as it is."""

    version: int
    model_version: str = Field(description="Name of the model that answers with it.")
    num_items: int
    max_length: int = Field(description="Tokens of the longest sequence.")
    rules: dict[str, int] = Field(description="Items by name of a rule.")


def read_json(body: bytes) -> Any:
    """A body as Python objects."""
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        start = body[:80].decode("utf-8", errors="replace")
        raise wrong("body", start, f"JSON ({error})", "send a JSON object in UTF-8") from None


def read_body(kind: type[Body], value: Any, *, at: str = "") -> Body:
    """Check one request; the first error is told, by the argument's name and where in the body it was."""
    names = ", ".join(kind.model_fields)
    if not isinstance(value, dict):
        raise wrong(at or "body", value, "a JSON object", f"its keys are {names}")
    try:
        return kind.model_validate(value)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
    first = errors[0]
    # The message of a union has a part for each of its types: the place is what matters.
    place = [part for part in first["loc"] if isinstance(part, int) or not _TYPE.fullmatch(part)]
    argument = at + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    expected, fix = first["msg"].removeprefix("Input should be "), f"see {kind.__name__} at /docs"
    if first["type"] == "extra_forbidden":
        expected, fix = "no such argument", f"omit it; there are {names}"
    elif first["type"] == "missing":
        expected, fix = "a value", f"give {place[-1]}"
    elif {"str", "int"} <= {error["loc"][-1] for error in errors}:
        expected = "an item id, a string or an integer"
    expected = _EMPTY.get(first["type"], expected)
    shown = None if first["type"] == "missing" else first["input"]
    raise wrong(argument.removeprefix("."), shown, expected, fix) from None


def documented(kind: type[BaseModel], *, most: int = 1) -> dict[str, Any]:
    """The documentation of a body that an endpoint reads itself, after it has looked at the key."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    text = to_json(schema).decode()
    for name, definition in definitions.items():  # one level deep
        text = text.replace(f'{{"$ref":"#/$defs/{name}"}}', to_json(definition).decode())
    schema = read_json(text.encode())
    if most > 1:
        schema = {"oneOf": [schema, {"type": "array", "items": schema, "minItems": 1, "maxItems": most}]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
