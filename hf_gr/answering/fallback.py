# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What answers a user of whom the model knows no item: by item, what is bought with it; by None, what is popular.

Knows no model.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from os import PathLike
from typing import Any

from hf_gr.catalogue import ConstraintIndex

from .requests import ids_of_kind, latest_distinct, shown, split_items

Fallback = Mapping[Any, Sequence[Any]]


def given_fallback(given: Any) -> Fallback:
    """A fallback from a list of item ids, or from a table or file as `read_similar` reads it.

    Raises:
        ValueError: it is neither, or is empty.
    """
    is_table = isinstance(given, (str, PathLike, Mapping)) or hasattr(given, "columns")
    if is_table or hasattr(given, "column_names"):
        from hf_gr.tables.items import read_similar  # needs pyarrow

        return read_similar("fallback", given)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise ValueError(f"fallback={shown(given)}, expected item ids, or a table with item_id and similar_items")
    items: list[Any] = [*given]
    listed = tuple(item.item() if hasattr(item, "item") else item for item in items)
    if not listed:
        raise ValueError("fallback=[], expected one item or more: omit it to refuse empty histories")
    return {None: listed}


def living_fallback(fallback: Fallback | None, index: ConstraintIndex) -> tuple[Fallback | None, list[Any]]:
    """A fallback with ids of the catalogue's kind, and what it offers that the catalogue does not have, never all."""
    if fallback is None:
        return None, []
    keys, offered = [key for key in fallback if key is not None], [*chain(*fallback.values())]
    every = [*offered, *keys]
    names = dict(zip(every, ids_of_kind(every, "fallback", index.snapshot), strict=True)) | {None: None}
    living, missing = split_items(list(dict.fromkeys(names[item] for item in offered)), index)
    if not living:
        more = ", ..." if len(missing) > 3 else ""
        raise ValueError(
            f"fallback={', '.join(map(repr, missing[:3]))}{more}, expected items of the catalogue, which has none of "
            "them: are these its ids?"
        )
    return {names[key]: tuple(dict.fromkeys(names[item] for item in fallback[key])) for key in fallback}, missing


def bought_with(fallback: Fallback, history: Sequence[Any]) -> tuple[list[Any], dict[Any, Sequence[Any]]]:
    """What is bought with the items of a history, best first, and the lists of these items, the latest one's first.

    Each list gives 1 to its first item, 1/2 to the second, 1/3 to the third, and so on. Items are in order of their
    sums; of equal ones, what goes with the later purchase comes first.

    Example:
        >>> bought_with({"rye": ["ham", "jam"], "tea": ["jam", "mate"]}, ["rye", "new", "tea"])[0]
        ['jam', 'ham', 'mate']
    """
    lists = {item: fallback[item] for item in latest_distinct(history) if item in fallback}
    sums: dict[Any, float] = defaultdict(float)
    for similar in lists.values():
        for place, item in enumerate(similar, start=1):
            sums[item] += 1 / place
    return sorted(sums, key=lambda item: -sums[item]), lists
