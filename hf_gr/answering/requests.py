# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The request of one user: lists of items, the prompt of a history. Knows no model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING
from hf_gr.tables.cells import integers_in

LATEST = 100  # distinct items of a history that count where no model reads it: its pairs grow with the square


@dataclass(frozen=True)
class Request:
    """The request of one user."""

    tokens: list[int]  # of the prompt; none if the history is empty
    exclude: tuple[Any, ...] = ()  # ids of items that must not be in the answer
    allowed: tuple[Any, ...] | None = None  # ids of the only items that may be in the answer; None for all
    passing: tuple[Any, ...] = ()  # a filter by attributes with the same meaning, as `Attributes.read` returns it
    rule: str | None = None  # the name of a view of the catalogue, with the same meaning
    seed: int | None = None  # of the samples, if the answer is sampled
    num_results: int | None = None  # None for the recommender's, as below
    num_beams: int | None = None
    exact: bool = False  # whether the best items of the whole catalogue are asked for
    max_per_group: int | None = None  # items of one group in the answer
    history: tuple[Any, ...] = ()  # its items that the catalogue knows, those cut included; all, if it knows none
    dropped: tuple[Any, ...] = ()  # items of the history and the filter that the catalogue does not have
    num_cut: int = 0  # items of a history, or tokens of another prompt, that were cut from the left


def tokens_of_items(snapshot: Snapshot, items: Iterable[Any]) -> dict[Any, list[int]]:
    """The tokens of items, without end tokens, by id; items that the catalogue has never had are omitted."""
    distinct = list(dict.fromkeys(items))
    is_known, sequences = snapshot.sequences_of(distinct)
    endings = (PADDING, snapshot.eos_token_id)
    return {
        item: [token for token in sequence if token not in endings]
        for item, known, sequence in zip(distinct, is_known.tolist(), sequences.tolist(), strict=True)
        if known
    }


def latest_that_fit(history: Sequence[Any], tokens_of: Mapping[Any, Sequence[int]], room: int) -> list[Any]:
    """The latest items of a history whose tokens fit: a prompt loses whole items, the oldest first.

    Example:
        >>> latest_that_fit(["ham", "jam", "yam"], {"ham": [5, 7], "jam": [5, 8], "yam": [6, 7]}, 5)
        ['jam', 'yam']
    """
    for position in range(len(history) - 1, -1, -1):
        room -= len(tokens_of[history[position]])
        if room < 0:
            return list(history[position + 1 :])
    return list(history)


def item_list(items: Any, name: str, snapshot: Snapshot) -> list[Any]:
    """Item ids of the catalogue's type."""
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise ValueError(f"{name}={shown(items)}, expected a list of item ids")
    listed, are_strings = [item.item() if hasattr(item, "item") else item for item in items], snapshot.are_strings
    for item in listed:
        if not (isinstance(item, str) if are_strings else is_integer(item) and -(2**63) <= item < 2**63):
            kind = "strings" if are_strings else "integers"
            raise ValueError(f"{name} has {shown(item)}, expected {kind}: the catalogue's item ids are {kind}")
    return listed


def split_items(items: Sequence[Any], index: ConstraintIndex) -> tuple[list[Any], list[Any]]:
    """The items that a catalogue has, and those that it does not have, in order."""
    flags = index.has_items(items).tolist() if len(items) else []
    pairs = list(zip(items, flags, strict=True))
    return [item for item, there in pairs if there], [item for item, there in pairs if not there]


def ids_of_kind(items: Sequence[Any], name: str, snapshot: Snapshot) -> list[Any]:
    """Items as ids of the catalogue's kind: integers may be texts, as they are in CSV."""
    return item_list(items if snapshot.are_strings else integers_in(items), name, snapshot)


def latest_distinct(history: Iterable[Any]) -> list[Any]:
    """The latest distinct items of a history, the last one first."""
    return [*islice(dict.fromkeys(reversed([*history])), LATEST)]


def remove_listed(items: Sequence[Any], index: ConstraintIndex) -> tuple[list[Any], list[Any]]:
    """Remove items from a catalogue, in place: they are no longer recommended, but histories may still name them.

    Returns the items removed, and those that the catalogue does not have, which are ignored.
    """
    removed, missing = split_items(list(dict.fromkeys(ids_of_kind(items, "remove_items", index.snapshot))), index)
    if len(removed) == index.num_items:
        raise ValueError(f"remove_items= has all {index.num_items:,} items of the catalogue, expected some to stay")
    if removed:
        index.remove(removed)
    return removed, missing


def shown(value: Any) -> str:
    """The beginning of a value: a client's may be long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
