# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""All pairs of a window in one forward: what NEZHA's heads learn from costs a tenth of one prompt a pair.

A window of n items holds n - 1 pairs of a history and the item that followed. Its first n - 1 items are read once;
after them stand the placeholders of every prefix, which see their own prefix and each other, at the positions that
they would have there. Hidden states and loss are those of algorithm 3. Knows no budget.

Axes: B windows, n items of a window, L levels, P placeholders of a prefix, S tokens of a row, E pairs of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_gr.training import DraftHeadTrainer
from hf_gr.training.base import LossTrainer
from hf_gr.training.windows import HistoryWindows, pad_batch

IGNORED = -100  # transformers' own


class WindowCollator:
    """Batches of windows for a draft head.

    Args:
        num_levels: L.
        placeholder_ids: the head's; may be none.
        pad_token_id: fills short rows.
    """

    def __init__(self, num_levels: int, placeholder_ids: Sequence[int], *, pad_token_id: int) -> None:
        self.num_levels = num_levels
        self.placeholder_ids = torch.tensor(placeholder_ids, dtype=torch.long)
        self.pad_token_id = pad_token_id

    def __call__(self, windows: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
        """A batch.

        Returns:
            `input_ids` and `position_ids` `[B, S]`, `attention_mask` `[B, 1, S, S]` of what each token sees; and the
            pairs: `labels` `[E, L]`, the `rows` `[E]` that they are in, and the `places` `[E, P + 1]` of the states of
            the prompt's last token and of the placeholders.
        """
        length, extra = self.num_levels, len(self.placeholder_ids)
        tokens = [torch.from_numpy(window["input_ids"].astype(np.int64)).view(-1, length) for window in windows]
        context = (max(map(len, tokens)) - 1) * length
        most = context // length  # pairs of a row
        size = context + most * extra
        input_ids = torch.full((len(tokens), size), self.pad_token_id)
        input_ids[:, context:] = self.placeholder_ids.repeat(most)
        position_ids = torch.arange(size).repeat(len(tokens), 1)
        # The number of context tokens that a token sees; those of its own prefix's placeholders come on top.
        prefixes = torch.arange(1, most + 1).repeat_interleave(extra)  # of the placeholders
        own = torch.arange(extra).repeat(most)
        position_ids[:, context:] = prefixes * length + own
        sees = torch.zeros(size, size, dtype=torch.bool)
        sees[:context, :context] = torch.ones(context, context).tril().bool()
        sees[context:, :context] = torch.arange(context) < (prefixes * length)[:, None]
        sees[context:, context:] = (prefixes[:, None] == prefixes) & (own[:, None] >= own)
        rows, places, labels = [], [], []
        for row, items in enumerate(tokens):
            num_pairs = len(items) - 1
            input_ids[row, : num_pairs * length] = items[:-1].flatten()
            after = context + torch.arange(num_pairs * extra).view(num_pairs, extra)
            places.append(torch.cat([torch.arange(1, num_pairs + 1)[:, None] * length - 1, after], dim=1))
            rows.append(torch.full((num_pairs,), row))
            labels.append(items[1:])
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "attention_mask": sees.expand(len(tokens), 1, size, size),
            "labels": torch.cat(labels),
            "rows": torch.cat(rows),
            "places": torch.cat(places),
        }


class WindowTrainer(DraftHeadTrainer):
    """`DraftHeadTrainer` on whole windows. Its loss is that of the same pairs, one by one.

    Args:
        windows: of two items or more.
        kwargs: as of `DraftHeadTrainer`; `train_dataset` are the pairs, which it checks.
    """

    def __init__(self, windows: HistoryWindows, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        config = self.model.draft_head.config
        self.train_dataset = windows
        self.data_collator = WindowCollator(
            config.num_levels, config.placeholder_token_ids, pad_token_id=self.model.config.pad_token_id
        )
        self.num_pairs = 0

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        pairs = {name: inputs[name] for name in ("labels", "rows", "places")}
        given = {name: values for name, values in inputs.items() if name not in pairs}
        hidden = model.model(**given, use_cache=False).last_hidden_state
        self.num_pairs += len(pairs["labels"])
        return model.draft_head.loss(hidden[pairs["rows"][:, None], pairs["places"]], pairs["labels"])


class FurtherTrainer(LossTrainer):
    """The control: the backbone alone, by its own loss, on the same windows in the same order as heads.

    Args:
        windows: of two items or more.
        kwargs: transformers' own.
    """

    def __init__(self, windows: HistoryWindows, **kwargs: Any) -> None:
        self.num_levels, self.num_pairs = windows.tokens.shape[1], 0
        super().__init__(train_dataset=windows, data_collator=self._collate, **kwargs)

    def _collate(self, windows: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
        return next_items(windows, self.num_levels, pad_token_id=self.model.config.pad_token_id)

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.num_pairs += int((inputs["labels"] != IGNORED).sum()) // self.num_levels
        return model(**inputs, use_cache=False).loss


def next_items(windows: Sequence[dict[str, np.ndarray]], num_levels: int, *, pad_token_id: int) -> dict[str, Tensor]:
    """The same pairs for the backbone's own loss: every token is a label but those of a window's first item."""
    batch = pad_batch([window["input_ids"] for window in windows], pad_token_id=pad_token_id)
    batch["labels"][:, :num_levels] = IGNORED
    return batch
