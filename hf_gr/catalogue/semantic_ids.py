# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Items <-> code tuples <-> token ids. NumPy only: tokenizers and models are used by their methods, never imported.

Axes: N items, L levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .index import ConstraintIndex
from .item_ids import ItemId, read_item_ids
from .sequences import read_rows, to_host

LEVEL_NAMES = "abcdefghijklmnopqrstuvwxyz"


class SemanticIds:
    """The semantic IDs of a set of items, and the tokens that a model knows them by.

    Code `c` of level `l` is a token of its own: by default `offset + level_sizes[0] + ... + level_sizes[l - 1] + c`,
    which suits a model trained from scratch; with `from_tokenizer` the tokenizer's own added token, such as `<a_47>`.

    Example:
        >>> ids = SemanticIds([[0, 1], [2, 0]], item_ids=["ham", "jam"], offset=3)
        >>> ids.level_sizes, ids.vocab_size
        ((3, 2), 8)
        >>> ids.encode(["jam", "ham"])
        [5, 6, 3, 7]
        >>> ids.decode([3, 7, 5, 6])
        [['ham'], ['jam']]
    """

    def __init__(
        self,
        codes: npt.ArrayLike,
        *,
        item_ids: npt.ArrayLike | Iterable[ItemId] | None = None,
        level_sizes: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None:
        """Give every level its own range of tokens.

        Args:
            codes: `[N, L]` integers from 0, one row an item. Several items may have one code tuple.
            item_ids: N distinct item ids, all integers or all strings; the row numbers by default.
            level_sizes: L codebook sizes; the largest code of each level plus one by default.
            offset: the first token of the first level: the number of tokens that are something else.

        Raises:
            ValueError: codes of another shape, type or range, or item ids that are not N distinct ones.
        """
        array = _rectangular(codes)
        if array.ndim != 2 or not array.size or array.dtype.kind not in "iu":
            raise ValueError(f"codes has shape {list(array.shape)} and dtype {array.dtype}, expected [N, L] integers")
        largest = array.max(axis=0)
        sizes = tuple(int(size) for size in (largest + 1 if level_sizes is None else level_sizes))
        if len(sizes) != array.shape[1]:
            raise ValueError(f"level_sizes has {len(sizes)} entries, expected {array.shape[1]}: one for each level")
        for level, size in enumerate(sizes):
            if array[:, level].min() < 0 or largest[level] >= size:
                item = int(np.argmax((array[:, level] < 0) | (array[:, level] >= size)))
                raise ValueError(
                    f"item {item} has code {array[item, level]} at level {level}, expected 0 to {size - 1}: "
                    "was the level offset added already?"
                )
        if offset < 0:
            raise ValueError(f"offset={offset}, expected 0 or more: the number of tokens before the first code")
        self.codes: npt.NDArray[np.int64] = array.astype(np.int64)
        self.level_sizes = sizes
        ids = read_item_ids(item_ids, len(array))
        self.item_ids: list[ItemId] = [*ids] if isinstance(ids, list) else ids.tolist()
        if len(set(self.item_ids)) != len(array):
            raise ValueError(
                f"item_ids has {len(array)} entries, {len(set(self.item_ids))} of them distinct, expected all: "
                "an item has one semantic ID"
            )
        starts = offset + np.concatenate(([0], np.cumsum(sizes)))
        self._tokens: list[npt.NDArray[np.int64]] = [
            np.arange(start, end, dtype=np.int64) for start, end in zip(starts, starts[1:], strict=False)
        ]

    @classmethod
    def from_tokenizer(
        cls,
        codes: npt.ArrayLike,
        tokenizer: Any,
        *,
        item_ids: npt.ArrayLike | Iterable[ItemId] | None = None,
        level_sizes: Sequence[int] | None = None,
        template: str = "<{level}_{code}>",
        model: Any = None,
    ) -> SemanticIds:
        """Use a tokenizer's own tokens, one for every code of every level, and add those that it lacks.

        Args:
            codes: as in the constructor.
            tokenizer: a tokenizer of transformers. Missing tokens are added to it, as non-special tokens.
            item_ids: as in the constructor.
            level_sizes: as in the constructor.
            template: a token's text, with `{level}` (a, b, c, ...) and `{code}`.
            model: a model whose embeddings are resized where they do not hold the tokens; needed where tokens are
                missing.

        Raises:
            ValueError: tokens are missing and no model was given; nothing is added in that case. Or a template that
                does not tell levels and codes apart, or more levels than letters.
        """
        ids = cls(codes, item_ids=item_ids, level_sizes=level_sizes)
        texts = _token_texts(template, ids.level_sizes)
        flat = [text for level in texts for text in level]
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        missing = [text for text in flat if text not in vocabulary]
        if missing and model is None:
            raise ValueError(
                f"the tokenizer lacks {len(missing)} of {len(flat)} code tokens, such as {missing[0]!r}, and "
                "model=None: pass model=, so that they are added and its embeddings resized"
            )
        if missing:
            tokenizer.add_tokens(missing)
            vocabulary = tokenizer.get_vocab()
        ids._tokens = [np.array([vocabulary[text] for text in level], dtype=np.int64) for level in texts]
        if model is not None and ids.vocab_size > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(max(ids.vocab_size, len(tokenizer)))
        return ids

    def __len__(self) -> int:
        """The number of items."""
        return len(self.item_ids)

    @property
    def num_levels(self) -> int:
        """Tokens of one item."""
        return len(self.level_sizes)

    @property
    def vocab_size(self) -> int:
        """The smallest vocabulary that holds every code token: the largest of them plus one."""
        return max(int(tokens.max()) for tokens in self._tokens) + 1

    def token_sequences(self) -> npt.NDArray[np.int64]:
        """The `[N, L]` tokens of every item, for `ConstraintIndex.from_sequences`."""
        return np.stack([tokens[self.codes[:, level]] for level, tokens in enumerate(self._tokens)], axis=1)

    def constraint_index(self, *, eos_token_id: int | None = None) -> ConstraintIndex:
        """Compile the catalogue of these items."""
        return ConstraintIndex.from_sequences(
            self.token_sequences(), item_ids=self.item_ids, eos_token_id=eos_token_id
        )

    def encode(self, item_ids: Iterable[ItemId]) -> list[int]:
        """A history as one list of tokens: L of them an item.

        Raises:
            ValueError: an item that has no semantic ID, by name.
        """
        return self._sequences[[self._row(item_id) for item_id in item_ids]].reshape(-1).tolist()

    def decode(self, token_ids: npt.ArrayLike | Sequence[int]) -> list[list[ItemId]]:
        """The items of every L tokens, empty where those are no item's.

        Raises:
            ValueError: a number of tokens that is no multiple of L.
        """
        rows, _ = read_rows(token_ids, one_is_enough=True)
        if len(rows) > 1 or rows.size % self.num_levels:
            raise ValueError(
                f"token_ids has shape {list(rows.shape)}, expected one list of a multiple of {self.num_levels} "
                "tokens: cut the prompt and the end token off, and decode one row at a time"
            )
        return [list(self._items_of.get(tuple(row), [])) for row in rows.reshape(-1, self.num_levels).tolist()]

    def codes_of(self, item_id: ItemId) -> tuple[int, ...]:
        """The code tuple of an item.

        Raises:
            ValueError: an item that has no semantic ID.
        """
        return tuple(self.codes[self._row(item_id)].tolist())

    def _row(self, item_id: ItemId) -> int:
        if item_id not in self._row_of:
            raise ValueError(
                f"item {item_id!r} has no semantic ID, expected one of the {len(self)} known items: leave it away"
            )
        return self._row_of[item_id]

    @cached_property
    def _sequences(self) -> npt.NDArray[np.int64]:
        return self.token_sequences()

    @cached_property
    def _row_of(self) -> dict[ItemId, int]:
        return {item_id: row for row, item_id in enumerate(self.item_ids)}

    @cached_property
    def _items_of(self) -> dict[tuple[int, ...], list[ItemId]]:
        items: dict[tuple[int, ...], list[ItemId]] = {}
        for item_id, row in zip(self.item_ids, self._sequences.tolist(), strict=True):
            items.setdefault(tuple(row), []).append(item_id)
        return items


def _rectangular(codes: Any) -> npt.NDArray[Any]:
    host = to_host(codes)
    try:
        return np.asarray(host)
    except ValueError as error:
        raise ValueError(f"codes has rows of several lengths, expected [N, L] integers: {error}") from error


def _token_texts(template: str, level_sizes: tuple[int, ...]) -> list[list[str]]:
    """The text of every code's token, by level."""
    if len(level_sizes) > len(LEVEL_NAMES):
        raise ValueError(
            f"codes has {len(level_sizes)} levels, expected at most {len(LEVEL_NAMES)}: levels are named by letters"
        )
    try:
        texts = [
            [template.format(level=LEVEL_NAMES[level], code=code) for code in range(size)]
            for level, size in enumerate(level_sizes)
        ]
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"template={template!r} fails with {error!r}, expected {{level}} and {{code}} only, "
            "such as '<{level}_{code}>'"
        ) from error
    if len({text for level in texts for text in level}) != sum(level_sizes):
        raise ValueError(f"template={template!r} gives one text to several codes: use both {{level}} and {{code}}")
    return texts
