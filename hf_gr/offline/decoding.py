# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""From requests to answers: batches for `model.generate`, and items from its sequences. Knows no files."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_gr.catalogue import ConstraintIndex
from hf_gr.generation.models import fill_token
from hf_gr.generation.prompts import pad, padding_side

from .batching import make_batches
from .loading import input_device
from .prompts import Request

MOST_VIEWS = 64  # filters kept for later rows: most tables have few distinct ones


def useful_beams(num_beams: int, index: ConstraintIndex, top_k: int) -> int:
    """The beams of a search that can differ: more than the catalogue has sequences find nothing, but take memory."""
    return min(num_beams, max(len(index), top_k, 2))


@dataclass(frozen=True)
class Answer:
    """The answer to one request, best first: `[k]` items and their scores, k at most `top_k`.

    `is_broken`: there are none although some are allowed, since the model's scores are not numbers.
    """

    items: list[Any]
    scores: list[float]
    is_broken: bool = False


@dataclass(frozen=True)
class Decoder:
    """A model, its catalogue, and how to ask it.

    Attributes:
        model: with `GRGenerationMixin`, in evaluation mode.
        index: the catalogue, a snapshot.
        top_k: items per answer.
        num_beams: of the search.
        token_budget: see `make_batches`.
        options: further arguments of `generate`.
    """

    model: Any
    index: ConstraintIndex
    top_k: int
    num_beams: int
    token_budget: int
    options: Mapping[str, Any] = field(default_factory=dict)
    _views: OrderedDict[tuple[Any, ...], ConstraintIndex] = field(default_factory=OrderedDict, repr=False)

    def answer_all(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] = lambda num_rows: None
    ) -> list[Answer]:
        """Answers in the order of the requests; `on_progress` gets the number of new ones."""
        answers: dict[int, Answer] = {}
        for batch in self.batches(requests):
            for number, answer in zip(batch, self.answer([requests[number] for number in batch]), strict=True):
                answers[number] = answer
            on_progress(len(batch))
        return [answers[number] for number in range(len(requests))]

    def batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """The numbers of the requests to answer together."""
        return make_batches(
            [len(request.tokens) for request in requests],
            token_budget=self.token_budget,
            tokens_ahead=self.num_beams * (self.index.max_length - 1),
        )

    def answer(self, batch: Sequence[Request]) -> list[Answer]:
        """Answers to one batch."""
        prompts = self.prompts(batch)
        rules: Any = self.index
        if any(request.allowed is not None for request in batch):
            rules = [self._view(request.allowed) for request in batch]
        excluded = [request.exclude for request in batch] if any(request.exclude for request in batch) else None
        out = self.model.generate(
            **prompts,
            constraint_index=rules,
            exclude_items=excluded,
            num_beams=self.num_beams,
            num_return_sequences=self.top_k,
            return_dict_in_generate=True,
            output_scores=True,
            _step_scores=False,  # `[batch * beams, vocab]` at every level
            **self.options,
        )
        length = 1 if self.model.config.is_encoder_decoder else prompts["input_ids"].shape[1]
        found = self.index.items(out.sequences[:, length:].cpu())
        scores = out.sequences_scores.tolist()
        answers = []
        for number, request in enumerate(batch):
            rows = slice(number * self.top_k, (number + 1) * self.top_k)
            answers.append(self._best_of(request, found[rows], scores[rows]))
        return answers

    def option(self, name: str) -> Any:
        """An option of `generate`: from this call, else the config passed to it, else the checkpoint's."""
        if name in self.options:
            return self.options[name]
        own = getattr(self.options.get("generation_config"), name, None)
        return getattr(self.model.generation_config, name, None) if own is None else own

    def prompts(self, batch: Sequence[Request]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` `[B, P]`: decoders need padding on the left, encoders on the right."""
        side = padding_side(is_encoder_decoder=self.model.config.is_encoder_decoder)
        fill = max(fill_token(self.model.generation_config), 0)
        input_ids, mask = map(torch.from_numpy, pad([request.tokens for request in batch], fill, side=side))
        device = input_device(self.model)
        return {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}

    def _view(self, allowed: tuple[Any, ...] | None) -> ConstraintIndex:
        if allowed is None:
            return self.index
        key = tuple(sorted(set(allowed)))
        if key not in self._views:
            self._views[key] = self.index.where(key)
            if len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return self._views[key]

    def _best_of(self, request: Request, found: Sequence[Sequence[Any]], scores: Sequence[float]) -> Answer:
        """The items allowed for a request, from `top_k` sequences in order: `top_k` at most."""
        exclude, allowed = set(request.exclude), None if request.allowed is None else set(request.allowed)
        best: dict[Any, float] = {}
        for items, score in zip(found, scores, strict=True):
            for item in items if score > -math.inf else ():  # several if items share a sequence
                if item not in exclude and (allowed is None or item in allowed):
                    best.setdefault(item, score)
        kept = list(best)[: self.top_k]
        some_are_allowed = self.index.num_items > len(exclude) if allowed is None else bool(allowed - exclude)
        return Answer(kept, [best[item] for item in kept], is_broken=some_are_allowed and not kept)
