# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The request of one user. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """The request of one user.

    Attributes:
        row: the user's, counted from the first of those that are asked together.
        tokens: of the prompt.
        exclude: ids of items that must not be in the answer.
        allowed: ids of the only items that may be in the answer; None for all.
        rule: the name of a view of the catalogue, the items of which alone may be in the answer; None for all.
        seed: of the samples, if the answer is sampled.
    """

    row: int
    tokens: list[int]
    exclude: tuple[Any, ...] = ()
    allowed: tuple[Any, ...] | None = None
    rule: str | None = None
    seed: int | None = None
