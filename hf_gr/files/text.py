# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Text for people: names on a terminal, counts, and names of files in errors about their contents."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Controls but for tab and newline, line separators, changes of direction, and halves of characters.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The same text, with what would control a terminal spelled as in Python.

    Example:
        >>> print(printable("a name\x1b[2J"))
        a name\x1b[2J
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown_share(share: float) -> str:
    """Such as `97.1%`; only exact values read 0% or 100%."""
    if 0.9995 <= share < 1:
        return ">99.9%"
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def counted(number: int, noun: str) -> str:
    """A number of things, such as `1 item` and `12,000 items`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def named_in_errors(files: Sequence[object]) -> Iterator[None]:
    """Begin the errors about what files hold with their names, unless they have one."""
    try:
        yield
    except ValueError as error:
        names = list(map(str, files))
        if not names or any(name in str(error) for name in names):
            raise
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(f"{names[0]}{more}: {error}") from error
