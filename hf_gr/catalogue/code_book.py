# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A code book: what tokens mean, as some items of a catalogue and their tokens, such as `{"B01": "5 77 300"}`.

A model's config, a draft model's and a draft head carry one of the items that they learned. A catalogue is of another
code book if most items that both know have other tokens there; items that are added or removed change nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from .trie import PADDING

CodeBook = Mapping[str, str]
NUM_ITEMS = 32  # of a code book: they tell catalogues apart whose codes were made twice, and fit a config


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
