# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Text of others in what the commands print: it neither controls the terminal nor is read as Rich's markup."""

from __future__ import annotations

from rich.markup import escape

from hf_gr.files.text import printable


def shown(text: str) -> str:
    """A text as Rich prints it as it is."""
    return escape(printable(text))
