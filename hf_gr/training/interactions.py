# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts and the items that followed, and batches of them for a draft head. Knows no model's weights.

Histories are stored once, as a flat array of tokens; a prompt is cut out of it on access.

Axes: E entries, T tokens of all histories, N items of the catalogue, L levels, P prompt, B batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_gr.catalogue import ConstraintIndex, SemanticIds
from hf_gr.catalogue.fanout import smallest_dtype
from hf_gr.catalogue.item_ids import ItemId, history_lists
from hf_gr.catalogue.sequences import read_catalogue, read_rows, to_host
from hf_gr.catalogue.trie import PADDING
from hf_gr.generation.models import start_token
from hf_gr.generation.prompts import padding_side
from hf_gr.generation.torch.models import base_model, takes_argument
from hf_gr.generation.torch.prompts import positions_of, with_placeholders
from hf_gr.torch.draft_head import IGNORED

from .packing import pad_prompts, pad_token


class InteractionDataset(Dataset):
    """Prompts and the item that followed each: what a draft head learns from.

    An entry is `{"input_ids": tokens [P] of the prompt, "labels": tokens of the item, L at most}`, both NumPy arrays.

    Args:
        prompts: E lists of tokens.
        labels: the tokens of E items, a list each, or `[E, L]` with -1 after the end of short ones.

    Raises:
        ValueError: prompts and labels differ in number, one is empty, or a value is no token.

    Example:
        >>> data = InteractionDataset([[5, 6], [5, 6, 7, 8]], labels=[[7, 8], [5, 9]])
        >>> {name: tokens.tolist() for name, tokens in data[1].items()}
        {'input_ids': [5, 6, 7, 8], 'labels': [5, 9]}
    """

    items: SemanticIds | None = None  # which say what the tokens mean

    def __init__(self, prompts: Iterable[Any], labels: Any) -> None:
        values, bounds = _flatten("prompts", prompts)
        rows = _read_tokens("labels", labels)
        if len(rows) != len(bounds) - 1:
            raise ValueError(f"prompts has {len(bounds) - 1} entries and labels {len(rows)}, expected one for each")
        if (bounds[1:] == bounds[:-1]).any():
            raise ValueError(
                f"prompts[{int((bounds[1:] == bounds[:-1]).argmax())}] is empty, expected a token or more"
            )
        if (values < 0).any():
            row = int(np.searchsorted(bounds, (values < 0).argmax(), side="right")) - 1
            raise ValueError(f"prompts[{row}] has a token below 0, expected token ids: omit padding")
        self._fill(values, bounds[:-1], bounds[1:], rows, np.arange(len(rows)))

    @classmethod
    def from_histories(
        cls,
        histories: Iterable[Iterable[ItemId]],
        items: SemanticIds | Any,
        *,
        max_items: int,
        eos_token_id: int | None = None,
    ) -> InteractionDataset:
        """One entry for every item with earlier items, which are its prompt.

        Args:
            histories: lists of items, oldest first.
            items: semantic IDs, whose item ids the histories contain; or the tokens of items that are numbered from 0,
                `[N, L]` with -1 after the end of short ones.
            max_items: the most items of a prompt, 1 or more; the latest are kept. The model must have positions for
                them and for placeholders.
            eos_token_id: after every label: needed if the catalogue has an end token, or the head would never learn
                to stop.

        Returns:
            The dataset. It takes 24 bytes per entry, and builds prompts on access.

        Raises:
            ValueError: an item is unknown, by history; `items` is a catalogue, which has its own order; there is no
                entry.

        Example:
            >>> data = InteractionDataset.from_histories([[2, 0, 1]], [[5, 7], [5, 8], [6, 7]], max_items=2)
            >>> [data[number]["input_ids"].tolist() for number in range(len(data))]
            [[6, 7], [6, 7, 5, 7]]
        """
        if max_items < 1:
            raise ValueError(f"max_items={max_items}, expected 1 or more: a prompt has an item")
        values, bounds, tokens = flat_histories(histories, items)
        begins = np.repeat(bounds[:-1], np.diff(bounds))
        targets = np.flatnonzero(np.arange(len(values)) > begins)
        if not len(targets):
            raise ValueError("histories has no history of 2 items or more, expected one: a prompt and what followed")
        labels = tokens if eos_token_id is None else read_catalogue(tokens, eos_token_id)
        is_token = (tokens != PADDING)[values]
        places = np.cumsum([0, *is_token.sum(axis=1)])  # of items among the tokens
        starts = places[np.maximum(begins[targets], targets - max_items)]
        made = cls.__new__(cls)
        made.items = items if isinstance(items, SemanticIds) else None
        made._fill(tokens[values][is_token], starts, places[targets], labels, values[targets])
        return made

    def _fill(
        self, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray, labels: np.ndarray, rows: np.ndarray
    ) -> None:
        self._tokens = tokens.astype(smallest_dtype(int(tokens.max())))  # [T]
        self._starts, self._ends = starts, ends  # [E]: where in `_tokens` an entry's prompt begins and ends
        self._label_tokens, self._label_rows = labels, rows  # [N, L], and [E] of its rows

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{number} is out of range for {len(self)} entries")
        prompt = self._tokens[self._starts[number] : self._ends[number]]
        label = self._label_tokens[self._label_rows[number]]
        return {"input_ids": prompt.astype(np.int64), "labels": label[label != PADDING].astype(np.int64)}

    @property
    def lengths(self) -> np.ndarray:
        """`[E]` tokens of the prompts, for sampling by length."""
        return self._ends - self._starts

    @property
    def max_token_id(self) -> int:
        """The largest token of all prompts and labels."""
        return max(int(self._tokens.max()), int(self._label_tokens[np.unique(self._label_rows)].max()))

    def check_labels(self, codebooks: Sequence[np.ndarray]) -> None:
        """Refuse labels outside these codebooks, the tokens of each level."""
        for level in range(self._label_tokens.shape[1]):
            tokens = self._label_tokens[self._label_rows, level]
            codes = codebooks[level] if level < len(codebooks) else ()
            is_bad = ~np.isin(tokens, [PADDING, *codes])
            if is_bad.any():
                entry = int(is_bad.argmax())
                expected = f"one of the {len(codes)} codes" if len(codes) else "no more levels"
                raise ValueError(
                    f"the label of entry {entry} has token {tokens[entry]} at level {level}, expected {expected} of "
                    "the draft head: make it with the codebooks of these items"
                )


class DraftHeadCollator:
    """Batches entries of an `InteractionDataset` for `DraftHeadTrainer`: prompts as in generation.

    Placeholders follow the prompt, which is padded on the left; in an encoder-decoder they are the decoder's input,
    after its start token, and the prompt is padded on the right.

    Args:
        model: the model with the head, also in wrappers for training.

    Raises:
        ValueError: an encoder-decoder has no start token.
    """

    def __init__(self, model: Any) -> None:
        inner = base_model(model)
        config, self.is_encoder_decoder = inner.draft_head.config, inner.config.is_encoder_decoder
        self.placeholder_ids, self.num_levels = config.placeholder_token_ids, config.num_levels
        self.pad_token_id, self.start = pad_token(inner), start_token(inner.generation_config)
        self.takes_positions = takes_argument(inner, "position_ids")
        if self.is_encoder_decoder and self.start is None:
            raise ValueError(
                "model.generation_config.decoder_start_token_id is None, expected a token: set it, as for generate"
            )

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch of tensors; labels are `[B, L]`, -100 after the end of short ones."""
        labels = torch.full((len(samples), self.num_levels), IGNORED)
        for row, sample in enumerate(samples):
            labels[row, : len(sample["labels"])] = torch.as_tensor(sample["labels"])
        prompts = [sample["input_ids"] for sample in samples]
        side = padding_side(is_encoder_decoder=self.is_encoder_decoder)
        input_ids, mask = pad_prompts(prompts, pad_token_id=self.pad_token_id, side=side)
        if self.is_encoder_decoder:
            start = torch.full((len(samples), 1), self.start)
            decoder = {"decoder_input_ids": with_placeholders(start, self.placeholder_ids)}
            return {"input_ids": input_ids, "attention_mask": mask, **decoder, "labels": labels}
        mask = torch.nn.functional.pad(mask, (0, len(self.placeholder_ids)), value=1)
        longer = with_placeholders(input_ids, self.placeholder_ids)
        batch = {"input_ids": longer, "attention_mask": mask, "labels": labels}
        return batch | ({"position_ids": positions_of(mask)} if self.takes_positions else {})


def flat_histories(
    histories: Iterable[Iterable[ItemId]], items: SemanticIds | Any, *, name: str = "histories"
) -> tuple[np.ndarray, ...]:
    """Histories as rows of a table of tokens: `[I]` rows of all, their `[U + 1]` bounds, and the `[N, L]` tokens.

    Histories and items are as for `InteractionDataset.from_histories`; errors call the histories `name`.
    """
    if isinstance(items, ConstraintIndex):
        raise ValueError(
            "items is a ConstraintIndex, expected SemanticIds, or the tokens of items 0, 1, 2, ...: an index has "
            "its sequences in an order of its own"
        )
    if isinstance(items, SemanticIds):
        row_of = {item: row for row, item in enumerate(items.item_ids)}
        histories, tokens = _rows_of(name, histories, row_of), items.token_sequences()
    else:
        histories, tokens = history_lists(histories, name=name), _read_tokens("items", items)
    values, bounds = _flatten(name, histories)
    unknown = (values < 0) | (values >= len(tokens))
    if unknown.any():
        at = int(unknown.argmax())
        history = int(np.searchsorted(bounds, at, side="right")) - 1
        raise ValueError(
            f"{name}[{history}] has item {values[at]}, expected 0 to {len(tokens) - 1}, the rows of items: "
            "pass SemanticIds where items have other ids"
        )
    return values, bounds, tokens


def _rows_of(name: str, histories: Iterable[Iterable[ItemId]], row_of: dict[ItemId, int]) -> list[list[int]]:
    rows = []
    for number, known in enumerate(history_lists(histories, name=name)):
        if unknown := [item for item in known if item not in row_of]:
            raise ValueError(
                f"{name}[{number}] has item {unknown[0]!r}, which has no semantic ID: omit it, or is it a string "
                "where ids are integers?"
            )
        rows.append([row_of[item] for item in known])
    return rows


def _flatten(name: str, rows: Iterable[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The concatenation of lists of integers, and their bounds."""
    arrays = [np.asarray(to_host(row)) for row in rows]
    if not arrays:
        raise ValueError(f"{name} is empty, expected an entry or more")
    for number, array in enumerate(arrays):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"{name}[{number}] has shape {list(array.shape)} and dtype {array.dtype}, expected a list of integers"
            )
    bounds = np.cumsum([0, *map(len, arrays)])
    return np.concatenate([array.astype(np.int64, copy=False) for array in arrays]), bounds


def _read_tokens(name: str, tokens: Any) -> np.ndarray:
    """`[N, L]` tokens, -1 after the end of short rows."""
    try:
        rows, _ = read_rows(tokens)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    is_token = rows != PADDING
    bad = (rows < PADDING).any(axis=1) | (is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1) | ~is_token.any(axis=1)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"{name}[{row}] is {rows[row].tolist()}, expected tokens, and -1 after the last one only")
    return rows
