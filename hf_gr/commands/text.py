# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Text of others in what the commands print: it neither controls the terminal nor is read as Rich's markup."""

from __future__ import annotations

import typer
from rich.markup import escape

from hf_gr.files.text import printable


def shown(text: str) -> str:
    """A text as Rich prints it as it is."""
    return escape(printable(text))


def fail(what: str, error: BaseException | str, *, code: int = 1) -> typer.Exit:
    """Print an error on one line of stderr, and return what ends the program."""
    message = " ".join(str(error).split())  # the Hub, transformers and pyarrow write several lines
    typer.echo(printable(f"{what}: {message}"), err=True)
    return typer.Exit(code)
