# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of users: the columns that settings name, and that they hold what they should. Knows no model."""

from __future__ import annotations

from typing import Any

from hf_gr.tables.files import pa
from hf_gr.tables.table import Table, is_text

from .settings import Settings


class Users(Table):
    """A table of users, in files or in memory; `are_strings` is whether item ids are strings.

    Raises:
        ValueError: a file is missing, damaged or of another format, a column is missing or of another type, or there
            is no row.
    """

    def __init__(self, users: Any, settings: Settings, *, are_strings: bool) -> None:
        item = pa.string() if are_strings else pa.int64()
        types = dict.fromkeys(("history", "exclude", "filter"), pa.list_(item)) | {"tokens": pa.list_(pa.int64())}
        types |= {"target": item, "is_new": pa.bool_()}
        how = {"format": settings.format, "delimiter": settings.delimiter}
        super().__init__(users, settings.roles, name="users", types=types, **how)
        first = next(self.windows(1), None)  # also finds a missing column before a model is loaded
        if first is None:
            raise ValueError(f"{self.name} has no row, expected at least one user")
        kind, is_id = ("texts", is_text) if are_strings else ("integers", pa.types.is_integer)
        for name in (settings.history, settings.exclude, settings.filter):
            found = pa.null() if name is None else first.columns.schema.field(name).type
            value = getattr(found, "value_type", None)
            if not (pa.types.is_null(value or found) or is_text(found) or (value is not None and is_id(value))):
                expected = f"lists of {kind}, as the catalogue's ids are: convert the column"
                raise ValueError(first.problem_of_type(name or "", expected))
