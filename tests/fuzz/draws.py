# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Random catalogues with a history of updates, and random batches of prompts with rules. Knows no model.

What is drawn stands beside its slow twin, a list of pairs of a sequence and an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from families import EOS, PAD, VOCABULARY

from hf_gr import ConstraintIndex

FORMS = {False: ("embeddings", "chunks"), True: ("embeddings", "encoder outputs")}  # by "has an encoder"
FIRST = 3  # tokens below are padding and end tokens, which prompts do not contain


class Catalogue:
    """An index and its slow twin; sequences have at most `length` tokens, drawn by default like the other facts."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        length: int | None = None,
        is_ragged: bool | None = None,
        numbers: Sequence[int] = (1, 2, 5, 30, 100, 250),
    ) -> None:
        self.rng = rng
        self.is_ragged = bool(rng.random() < 0.5) if is_ragged is None else is_ragged
        self.length = length or int(rng.integers(1, 6))
        self.tokens = rng.choice(
            [token for token in range(VOCABULARY) if not (self.is_ragged and token == EOS)],
            size=int(rng.choice([1, 2, 3, 6, 20, 40])),
            replace=False,
        )
        self.has_names = bool(rng.random() < 0.3)
        self.num_items = 0
        self.pairs = self.new_pairs(pick(rng, *numbers))
        sequences, ids = zip(*self.pairs, strict=True)
        eos = EOS if self.is_ragged else None
        self.index = ConstraintIndex.from_sequences(sequences, item_ids=ids, eos_token_id=eos)
        for _ in range(int(rng.choice([0, 0, 1, 3]))):
            self.update()

    @property
    def ids(self) -> list[Any]:
        return list(dict.fromkeys(item for _, item in self.pairs))

    def new_pairs(self, number: int) -> list[tuple[list[int], Any]]:
        made = []
        for _ in range(number):
            length = int(self.rng.integers(1, self.length + 1)) if self.is_ragged else self.length
            item = f"item {self.num_items}" if self.has_names else self.num_items
            made.append((self.rng.choice(self.tokens, size=length).tolist(), item))
            self.num_items += 1
        return made

    def update(self) -> None:
        kind = self.rng.choice(["add", "remove", "compact"])
        if kind == "add":
            new = self.new_pairs(int(self.rng.integers(1, 8)))
            sequences, ids = zip(*new, strict=True)
            self.index.add(sequences, ids)
            self.pairs += new
        elif kind == "remove" and len(self.ids) > 1:
            gone = self.some(int(self.rng.integers(1, len(self.ids))))
            self.index.remove(gone)
            self.pairs = [pair for pair in self.pairs if pair[1] not in gone]
        elif kind == "compact":
            self.index.compact()

    def some(self, number: int) -> list[Any]:
        ids = self.ids
        return [ids[place] for place in self.rng.permutation(len(ids))[:number]]

    def legal(self, items: set[Any]) -> list[tuple[int, ...]]:
        """The sequences of some items, with their end tokens."""
        end = (EOS,) if self.is_ragged else ()
        return [(*sequence, *end) for sequence, item in self.pairs if item in items]


@dataclass
class Batch:
    """Prompts, and what is legal for each."""

    inputs: dict[str, torch.Tensor]
    index: Any
    excluded: list[list[Any]] | None
    legal: list[list[tuple[int, ...]]]
    wanted: list[set[Any]]
    start: torch.Tensor  # `[B, Q]` first tokens of an encoder-decoder's answers, after the start token

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        catalogue: Catalogue,
        sizes: tuple[int, ...] = (1, 2, 3, 5),
        *,
        views: bool | None = None,
        excludes: bool | None = None,
    ) -> Batch:
        """Prompts, some padded, each with a view and exclusions or all of the catalogue, as drawn by default."""
        num_rows, length = int(rng.choice(sizes)), int(rng.integers(1, 12))
        lengths = rng.integers(1, length + 1, size=num_rows) if rng.random() < 0.5 else np.full(num_rows, length)
        length = int(lengths.max())
        prompts = [rng.integers(FIRST, VOCABULARY, size=size).tolist() for size in lengths]
        inputs = {
            "input_ids": torch.tensor([[PAD] * (length - len(prompt)) + prompt for prompt in prompts]),
            "attention_mask": torch.tensor([[0] * (length - size) + [1] * size for size in lengths.tolist()]),
        }
        index: Any = catalogue.index
        wanted = [set(catalogue.ids)] * num_rows
        if rng.random() < 0.5 if views is None else views:
            kept = [catalogue.some(int(rng.integers(0, len(catalogue.ids) + 1))) for _ in range(num_rows)]
            kept = [catalogue.ids if rng.random() < 0.3 else some for some in kept]
            wanted = [set(some) for some in kept]
            index = [catalogue.index.where(some) for some in kept]
        excluded = None
        if rng.random() < 0.4 if excludes is None else excludes:
            excluded = [catalogue.some(int(rng.integers(0, len(catalogue.ids) + 1))) for _ in range(num_rows)]
            wanted = [some - set(gone) for some, gone in zip(wanted, excluded, strict=True)]
        start = torch.from_numpy(rng.integers(FIRST, VOCABULARY, size=(num_rows, int(rng.choice([0, 0, 0, 2])))))
        return cls(inputs, index, excluded, [catalogue.legal(some) for some in wanted], wanted, start)

    def given(self, model: Any, form: str | None = None) -> tuple[dict[str, Any], int]:
        """The prompts as arguments of `generate`, in a form of `FORMS`; and the tokens before its answers."""
        given, (ids, mask) = dict(self.inputs), self.inputs.values()
        if form == "embeddings":
            given = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "attention_mask": mask}
        if form == "chunks":
            given["prefill_chunk_size"] = 3
        if not model.config.is_encoder_decoder:
            return given, 0 if form == "embeddings" else ids.shape[1]
        if form == "encoder outputs":
            given = {"encoder_outputs": model.get_encoder()(ids, attention_mask=mask), "attention_mask": mask}
        first = self.start.new_full((len(ids), 1), model.config.decoder_start_token_id)
        started = {"decoder_input_ids": torch.cat([first, self.start], dim=1)} if self.start.shape[1] else {}
        return given | started, 1 + self.start.shape[1]

    def items(self, number: int, rows: list[list[int]]) -> list[tuple[list[int], list[Any]]]:
        """Rows of one prompt with their items, by the call's own view and exclusions."""
        view = self.index[number] if isinstance(self.index, list) else self.index
        excluded = None if self.excluded is None else [self.excluded[number]]
        return list(zip(rows, view.items(rows, exclude_items=excluded), strict=True))


def pick(rng: np.random.Generator, *values: Any) -> Any:
    """One of the values, whatever their types."""
    return values[int(rng.integers(len(values)))]
