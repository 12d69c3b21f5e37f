# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which columns a table must have. Knows no kind of table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def check_columns(place: object, roles: Mapping[str, str], there: Sequence[str]) -> None:
    """Raise unless each column, whose role is the argument that names it, is there exactly once."""
    for name, role in roles.items():
        if there.count(name) == 1:
            continue
        how_many = f"{there.count(name)} columns" if name in there else "no column"
        fix = f"name it with {role}=" if role else "rename the column"
        fix += ", or item_id=None for row numbers" if role == "item_id" else ""
        if len(there) == 1 and (other := next((mark for mark in "\t;|," if mark in there[0]), None)) is not None:
            fix = f"pass delimiter={other!r}, if that separates the columns"
        listed = ", ".join(map(repr, there)) or "(there are none)"
        raise ValueError(f"{place} has {how_many} {name!r}, expected one of {listed}: {fix}")
