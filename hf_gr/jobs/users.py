# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A table of users: its columns by meaning, and that they hold what they should. Knows no model."""

from __future__ import annotations

from typing import Any

from hf_gr.tables.files import Format, pa
from hf_gr.tables.table import Table, is_text

from .settings import UserColumns

SKIPPING = "drop the row, or skip such rows with on_error='skip'"


class Users(Table):
    """A table of users.

    Args:
        users: see `Table`; a list of histories, too.
        columns: what to read.
        are_strings: whether item ids are strings.
        format: of files.
        delimiter: between the columns of CSV.

    Attributes:
        schema: of the columns that are read.

    Raises:
        ValueError: a file is missing, damaged or of another format, a column is missing or of another type, or there
            is no row.
    """

    def __init__(
        self,
        users: Any,
        columns: UserColumns,
        *,
        are_strings: bool,
        format: Format | None = None,
        delimiter: str | None = None,
    ) -> None:
        item = pa.string() if are_strings else pa.int64()
        types = dict.fromkeys(("history", "exclude", "filter"), pa.list_(item)) | {"tokens": pa.list_(pa.int64())}
        types |= {"target": item, "is_new": pa.bool_()}
        super().__init__(users, columns.roles, name="users", format=format, delimiter=delimiter, types=types)
        self.columns, self.are_strings = columns, are_strings
        first = next(self.windows(1), None)  # also finds a missing column before a model is loaded
        if first is None:
            raise ValueError(f"{self.name} has no row, expected at least one user")
        self.schema = first.columns.schema
        kind, is_id = ("texts", is_text) if are_strings else ("integers", pa.types.is_integer)
        for role in ("history", "exclude", "filter"):
            if (name := getattr(columns, role)) is None:
                continue
            found = self.schema.field(name).type
            value = getattr(found, "value_type", None)
            if not (pa.types.is_null(value or found) or is_text(found) or (value is not None and is_id(value))):
                expected = f"lists of {kind}, as the catalogue's ids are: convert the column"
                raise ValueError(first.problem_of_type(name, expected))
