# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The answer to a user whom the model knows nothing of: a list of items, such as the most popular ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.tables.cells import read_integer

from .requests import item_list, split_items


def read_fallback(fallback: Any, snapshot: Snapshot, *, name: str = "fallback") -> list[Any]:
    """Distinct items, in order, as ids of the catalogue's kind: integers may be texts, as they are in CSV."""
    if not snapshot.are_strings and isinstance(fallback, Iterable) and not isinstance(fallback, (str, bytes, Mapping)):
        fallback = list(fallback)
        read = [read_integer(item) if isinstance(item, str) else item for item in fallback]
        fallback = [item if number is None else number for item, number in zip(fallback, read, strict=True)]
    return list(dict.fromkeys(item_list(fallback, name, snapshot)))


def remove_listed(items: Any, index: ConstraintIndex) -> tuple[list[Any], list[Any]]:
    """Remove items from a catalogue, in place: it answers with them no more, and histories still read them.

    Returns those that are removed, and those that it does not have, which are left out.
    """
    removed, missing = split_items(read_fallback(items, index.snapshot, name="remove_items"), index)
    if len(removed) == index.num_items:
        raise ValueError(f"remove_items= has all {index.num_items:,} items of the catalogue, expected some to stay")
    if removed:
        index.remove(removed)
    return removed, missing


def living_fallback(fallback: Any, index: ConstraintIndex) -> tuple[list[Any] | None, list[Any]]:
    """A fallback's items that the catalogue has, at least one, and those that it does not have; None without one."""
    if fallback is None:
        return None, []
    living, missing = split_items(read_fallback(fallback, index.snapshot), index)
    if not living:
        more = ", ..." if len(missing) > 3 else ""
        raise ValueError(
            f"fallback={', '.join(map(repr, missing[:3]))}{more}, expected items of the catalogue, which has none of "
            "them: are these its ids?"
        )
    return living, missing


def first_allowed(
    items: Iterable[Any], *, exclude: Collection[Any], allowed: Collection[Any] | None, at_most: int
) -> list[Any]:
    """The first of some items that a user may get.

    Example:
        >>> first_allowed(["tea", "jam", "rye", "ham"], exclude={"jam"}, allowed=None, at_most=2)
        ['tea', 'rye']
    """
    kept = (item for item in items if item not in exclude and (allowed is None or item in allowed))
    return list(islice(kept, at_most))
