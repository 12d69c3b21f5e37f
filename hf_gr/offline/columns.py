# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The columns of a table of users, by meaning. Knows no file and no row; imports nothing slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

PROMPTS = ("history", "tokens", "text")  # columns that make the prompt: one of them
HISTORY = "history"  # the only column of a list of histories


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
                f"{found} is given, expected one of history=, tokens= and text= (--history, --tokens, "
                "--text): the column that makes the prompt"
            )

    @property
    def by_role(self) -> dict[str, str]:
        """The meaning of each column, and its name."""
        return {role: name for role, name in asdict(self).items() if name is not None}

    @property
    def names(self) -> list[str]:
        """The columns, each once: the history may also be the column to exclude."""
        return list(dict.fromkeys(self.by_role.values()))

    def check(self, file: object, names: Sequence[str], there: Sequence[str]) -> None:
        """Raise unless a file has each of these columns exactly once."""
        for name in names:
            if there.count(name) != 1:
                role = next(role for role, column in self.by_role.items() if column == name)
                how_many = f"{there.count(name)} columns" if name in there else "no column"
                listed = ", ".join(map(repr, there)) or "(there are none)"
                raise ValueError(
                    f"{file} has {how_many} {name!r}, expected one of {listed}: name it with {role}= "
                    f"(--{role.replace('_', '-')})"
                )


def is_histories(users: Any) -> bool:
    """Whether users are given as a list of histories, and not as a table, a file or a list of files."""
    return isinstance(users, (list, tuple)) and not (users and all(isinstance(one, (str, PathLike)) for one in users))
