# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A code book: what tokens mean, as some items of a catalogue and their tokens, such as `{"B01": "5 77 300"}`.

A model's config, a draft model's and a draft head carry one of the items that they learned. A catalogue is of another
code book if most items that both know have other tokens there; items that are added or removed change nothing. Without
one, there may be signs that codes of semantic IDs were compiled as tokens: all runs then, but every answer is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from .trie import PADDING

if TYPE_CHECKING:
    from .snapshot import Snapshot

CodeBook = Mapping[str, str]
NUM_ITEMS = 32  # of a code book: they tell catalogues apart whose codes were made twice, and fit a config
FAR_BELOW = 0.5  # of a vocabulary: code tokens are its last ones, or nearly
FIRST_CODES = 1  # codes begin at 0, at 1 in some recipes
WHY = (
    "if these are codes of semantic IDs, compile them as codes (SemanticIds in Python, --codes with --offset or "
    "--tokenizer in hf-gr index build): a model would read them as other tokens, and no answer would be right"
)


@runtime_checkable
class HasTokens(Protocol):
    """A catalogue, or semantic IDs."""

    def tokens_of(self, names: Iterable[str]) -> Mapping[str, set[str]]:
        """By the names that are ids of items: their tokens, several texts where an id has several sequences."""
        ...


def some_items(number: int) -> list[int]:
    """Which of so many items a code book has."""
    return sorted({place * (number - 1) // (NUM_ITEMS - 1) for place in range(NUM_ITEMS)})


def as_text(tokens: Iterable[int], eos_token_id: int | None = None) -> str:
    """The tokens of an item, without its end token."""
    return " ".join(str(token) for token in tokens if token not in (PADDING, eos_token_id))


def compare(book: CodeBook, catalogue: HasTokens, *, whose: str, argument: str) -> str | None:
    """Refuse a catalogue, the `argument`, of another code book; or say why it may be another, None if nothing says so.

    `whose` code book it is, such as `"the model"`, is for messages.
    """
    if not book:
        return (
            f"{whose} has no code book, so that nothing tells whether {argument} is the catalogue that it learned: if "
            "it is, set model.generation_config.code_book = index.code_book(), and save the model"
        )
    known = catalogue.tokens_of(book)
    if not known:
        return (
            f"{argument} has none of the {len(book)} items of the code book of {whose}, so that nothing tells whether "
            "they belong together"
        )
    others = [name for name, tokens in known.items() if book[name] not in tokens]
    if not others:
        return None
    first = others[0]
    found = (
        f"item {first!r} has tokens {min(known[first])} in {argument}, and {whose} learned {book[first]} "
        f"({len(others)} of {len(known)} compared items differ)"
    )
    if 2 * len(others) <= len(known):
        return f"{found}: were these sequences replaced?"
    raise ValueError(
        f"{found}: {argument} has another code book, expected that of {whose}: pass the catalogue of its training, or "
        "train with this one; semantic IDs that are made again are other ones, even of the same items"
    )


def doubts_of(snapshot: Snapshot, *, vocabulary: int | None = None) -> list[str]:
    """Why tokens look like codes; empty if they do not, as the tokens of labels."""
    if snapshot.tokenizer is not None:
        return []
    doubts: list[str] = []
    ends = [] if snapshot.eos_token_id is None else [snapshot.eos_token_id]
    levels = [np.setdiff1d(tokens, ends) for tokens in snapshot.trie.codebooks]
    levels = [tokens for tokens in levels if len(tokens)]
    begin_alike = len(levels) > 1 and all(tokens[0] <= FIRST_CODES for tokens in levels)
    if begin_alike and all(np.intersect1d(one, other).size for one, other in pairwise(levels)):
        first = ", ".join(str(tokens[0]) for tokens in levels)
        doubts.append(
            f"the tokens look like codes: those of every level begin at {first}, and levels share some; {WHY}"
        )
    if vocabulary is not None and snapshot.max_token_id + 1 < FAR_BELOW * vocabulary:
        doubts.append(
            f"the largest token, {snapshot.max_token_id:,}, is far below the model's vocabulary of {vocabulary:,}: "
            f"was it trained with another offset or its tokenizer's tokens?{'' if doubts else f' Or, {WHY}'}"
        )
    return doubts
