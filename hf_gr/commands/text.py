# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Text of others in what the commands print: it neither controls the terminal nor is read as Rich's markup."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

import typer
from rich.markup import escape

from hf_gr.files.text import printable

QUOTES = "'"
PLAIN = r"'[\w./@:-]*\w[\w./@:-]*'"  # a value that needs no quotes in a shell
HINT = re.compile(r" \(--[a-z-]+(?:(?:, | and | or )--[a-z-]+| [a-z]+)*\)")  # flags after what names them already


def shown(text: str) -> str:
    """A text as Rich prints it as it is."""
    return escape(printable(text))


def flag_of(name: str) -> str:
    """The flag of an argument, unless it is called otherwise."""
    return f"--{name.replace('_', '-')}"


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """A message about arguments of a function, as one about flags.

    Args:
        message: such as `top_k=0, expected an integer of 1 or more`.
        flags: by argument.

    Example:
        >>> in_flags("num_beams=3, expected 5 or more: pass num_beams=", {"num_beams": "--num-beams"})
        '--num-beams 3, expected 5 or more: pass --num-beams'
        >>> in_flags("is there: pass overwrite=True (--overwrite)", {"overwrite": "--overwrite"})
        'is there: pass --overwrite'
    """
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))

    def as_flag(found: re.Match[str]) -> str:
        flag, value = flags[found["name"]], found["value"]
        if value == "None":
            return f"no {flag}"
        is_bare = message[found.end() : found.end() + 1] in ("", *" ,:;.?)")
        if flag.startswith("--option ") and (value or not is_bare):
            return f"{flag}={value}"
        return flag if value == "True" or (not value and is_bare) else f"{flag} {value.strip(QUOTES)}"

    found = re.sub(rf"(?<![\w.'-])(?P<name>{names})=(?P<value>None\b|True\b|{PLAIN}|)", as_flag, message)
    return HINT.sub("", found)


def fail(what: str, error: BaseException | str, *, code: int = 1, as_json: bool = False) -> typer.Exit:
    """Print an error on one line of stderr, and return what ends the program.

    With `as_json` stdout gets `{"error": ...}`, too, of several processes by the first one.
    """
    message = " ".join(str(error).split())  # the Hub, transformers and pyarrow write several lines
    if as_json and os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps({"error": message}))
    typer.echo(printable(f"{what}: {message}"), err=True)
    return typer.Exit(code)
