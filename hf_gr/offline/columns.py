# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The columns of a table of users, by meaning. Knows no file and no row; imports nothing slow."""

from __future__ import annotations

from dataclasses import asdict, dataclass

PROMPTS = ("history", "tokens", "text")  # columns that make the prompt: one of them


@dataclass(frozen=True)
class UserColumns:
    """The columns to read, by meaning; None for those that do not exist.

    Attributes:
        history: lists of item ids, oldest first.
        tokens: lists of token ids: the prompt itself.
        text: the prompt as a text.
        user: the user's id, of any type; by default the row number.
        exclude: lists of ids of items that must not be recommended to the user.
        filter: lists of ids of the only items that may be recommended to the user; null for any.
        target: the item that came next, or a list of them.
        group: the user's group, such as a country.
        is_new: whether the target is a new item.
    """

    history: str | None = None
    tokens: str | None = None
    text: str | None = None
    user: str | None = None
    exclude: str | None = None
    filter: str | None = None
    target: str | None = None
    group: str | None = None
    is_new: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in PROMPTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"{name}={getattr(self, name)!r}" for name in given) or "no column"
            raise ValueError(
                f"{found} is given, expected one of history=, tokens= and text=: the column that makes the prompt"
            )

    @property
    def roles(self) -> dict[str, str]:
        """The columns, each once, and their meaning: the history may also be the column to exclude."""
        return {name: role for role, name in reversed(asdict(self).items()) if name is not None}
