# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What stands in a cell: integers and lists of ids in texts. Knows no table and needs no pyarrow."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

INT64_MAX = 2**63 - 1
INTEGER = re.compile("[+-]?[0-9]+")  # int() also reads 1_000 and the digits of every script


def read_integer(text: str) -> int | None:
    """The integer that a text is, in digits from 0 to 9; None for any other text."""
    return int(text) if INTEGER.fullmatch(text) else None


def integers_in(values: Sequence[Any]) -> list[Any]:
    """Integers in the place of the texts that are some, as ids are in CSV; anything else as it is."""
    read = [read_integer(value) if isinstance(value, str) else value for value in values]
    return [value if number is None else number for value, number in zip(values, read, strict=True)]


def read_list(text: str, *, are_strings: bool) -> list[Any] | None:
    """The ids in a text; None if they are to be integers and one is not.

    The text is JSON, or ids separated by spaces or commas, with or without brackets; ids with spaces or commas are in
    quotes.

    Example:
        >>> [read_list(text, are_strings=False) for text in ("5 7", "[5, 7]", "5,x")]
        [[5, 7], [5, 7], None]
        >>> read_list("['rye bread', 'jam']", are_strings=True)
        ['rye bread', 'jam']
    """
    parts = _split(text.strip())
    if are_strings:
        return parts
    numbers = [read_integer(part) for part in parts]
    return None if None in numbers else numbers


def _split(text: str) -> list[str]:
    if text[:1] == "[":
        with suppress(ValueError):  # lists as Python or NumPy print them
            parts = json.loads(text)
            if all(type(part) is str for part in parts):
                return parts
    if (text[:1], text[-1:]) in (("[", "]"), ("(", ")")):
        text = text[1:-1]
    return [
        part[1:-1] if part[0] in "'\"" and len(part) > 1 and part[-1] == part[0] else part
        for part in re.findall(r"""'[^']*'|"[^"]*"|[^\s,]+""", text)
    ]


def shorten(value: object) -> str:
    """A value, shortened for an error."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
