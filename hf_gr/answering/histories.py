# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Histories of items as prompts. Knows the catalogue, and no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING


def tokens_of_items(snapshot: Snapshot, items: Iterable[Any]) -> dict[Any, list[int]]:
    """The tokens of items in a prompt, without end tokens, by id; items that the catalogue has never had are omitted.

    Raises:
        ValueError: ids of another type than the catalogue's.
    """
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


def join_tokens(items: Iterable[Any], tokens_of: Mapping[Any, Sequence[int]]) -> list[int]:
    """The tokens of items, one after the other."""
    return list(chain.from_iterable(tokens_of[item] for item in items))
