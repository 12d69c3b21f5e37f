# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The training and validation data of a recommender: windows of histories, and last items. Knows no model."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from hf_gr.catalogue import SemanticIds
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.trie import PADDING
from hf_gr.torch.draft_head import IGNORED

from .interactions import flat_histories
from .packing import pad_prompts

AHEAD = 5  # items that an encoder-decoder learns to write after a prompt


class HistoryWindows(Dataset):
    """Windows of histories, drawn again in every epoch; a seed gives the same ones in any process and reading order.

    A history of n items gives n / window windows an epoch, at random places, so that over the epochs every item is
    predicted from contexts of every length. Windows that would cross an end of the history are moved to it, so that
    the first and the last items occur as often as the others.

    With `splits`, for an encoder-decoder, a window's first items are the prompt, up to a random place, and the `AHEAD`
    that follow the labels. Histories of one item teach nothing then.
    """

    def __init__(
        self,
        histories: Iterable[Iterable[ItemId]],
        items: SemanticIds | Any,
        *,
        window: int,
        seed: int,
        splits: bool = False,
    ) -> None:
        self.rows, self.bounds, self.tokens = flat_histories(histories, items)
        if (self.tokens == PADDING).any():
            short = int((self.tokens == PADDING).any(axis=1).argmax())
            raise ValueError(
                f"items: row {short} has fewer tokens than others, expected as many for all: a prompt of items that "
                "differ in length needs an end token after each; give short ones a last code of their own"
            )
        if not len(self.rows):
            raise ValueError("histories has no item, expected a history with two or more")
        self.window, self.seed, self.epoch = window, seed, 0
        self.splits = splits
        counts = -(-np.diff(self.bounds) // window)
        if splits:
            counts[np.diff(self.bounds) < 2] = 0
            if not counts.any():
                raise ValueError(
                    "histories has no history of two items or more, expected one: the first is the prompt"
                )
        self.owners = np.repeat(np.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self.owners)

    def set_epoch(self, epoch: int) -> None:
        """Other windows; the Trainer calls it."""
        self.epoch = epoch

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if not 0 <= number < len(self):
            raise IndexError(f"{number} is out of range for {len(self)} windows")
        begin, end = self.bounds[self.owners[number]], self.bounds[self.owners[number] + 1]
        draw = np.random.default_rng([self.seed, self.epoch, number])
        at = int(draw.integers(end - begin)) - self.window // 2
        start = begin + max(0, min(at, int(end - begin) - self.window))
        items = self.tokens[self.rows[start : min(start + self.window, end)]].astype(np.int64)
        if not self.splits:
            return {"input_ids": items.ravel()}
        place = int(draw.integers(1, len(items)))
        return {"input_ids": items[:place].ravel(), "labels": items[place : place + AHEAD].ravel()}

    @property
    def lengths(self) -> np.ndarray:
        """`[windows]` tokens, for sampling by length."""
        sizes = np.diff(self.bounds)[self.owners]
        return np.minimum(sizes, self.window) * self.tokens.shape[1]


class LastItems(Dataset):
    """The last item of each history, with the items before it: the question that a deployed recommender gets.

    A window has at most so many items, the last one included. With `splits`, as for an encoder-decoder, the last item
    alone is the labels.

    Example:
        >>> asked = LastItems([[0, 1], [1]], [[5, 6], [5, 7]], window=3)
        >>> [{name: tokens.tolist() for name, tokens in row.items()} for row in asked]
        [{'input_ids': [5, 6, 5, 7], 'labels': [-100, -100, 5, 7]}]
    """

    def __init__(
        self, histories: Iterable[Iterable[ItemId]], items: SemanticIds | Any, *, window: int, splits: bool = False
    ) -> None:
        self.splits = splits
        rows, bounds, self.tokens = flat_histories(histories, items, name="validation")
        pairs = zip(bounds[:-1], bounds[1:], strict=True)
        self.histories = [rows[max(begin, end - window) : end] for begin, end in pairs if end - begin > 1]
        if not self.histories:
            raise ValueError(
                "validation has no history of two items or more, expected one: its last item is predicted"
            )

    def __len__(self) -> int:
        return len(self.histories)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        tokens = self.tokens[self.histories[number]].ravel().astype(np.int64)
        is_last = np.arange(len(tokens)) >= len(tokens) - self.tokens.shape[1]
        if self.splits:
            return {"input_ids": tokens[~is_last], "labels": tokens[is_last]}
        return {"input_ids": tokens, "labels": np.where(is_last, tokens, IGNORED)}

    @property
    def lengths(self) -> np.ndarray:
        """`[histories]` tokens, for batches by length."""
        return np.array([len(history) for history in self.histories]) * self.tokens.shape[1]


def pad_batch(rows: Sequence[dict[str, np.ndarray]], *, pad_token_id: int) -> dict[str, Tensor]:
    """Rows of `HistoryWindows` or `LastItems` as a right-padded batch; padding is neither seen nor predicted."""
    input_ids, mask = pad_prompts([row["input_ids"] for row in rows], pad_token_id=pad_token_id, side="right")
    given = [row.get("labels", row["input_ids"]) for row in rows]
    labels, _ = pad_prompts(given, pad_token_id=IGNORED, side="right")
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
