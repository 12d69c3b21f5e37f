# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Text of others, such as names in a table, for a terminal. Knows no terminal."""

from __future__ import annotations

import re

# Controls but for tab and newline, line separators, changes of direction, and halves of characters.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The same text, with what would control a terminal spelled as in Python.

    Example:
        >>> print(printable("a name\x1b[2J"))
        a name\x1b[2J
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
