# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""From requests to answers: batches for `model.generate`, and items from its sequences. Knows no files."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.sequences import to_host

from .backends import Backend, backend_of
from .prefix_cache import PrefixCache, Reuse, takes_options
from .requests import Request

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
        rules: views of the catalogue that requests name.
        prefix_cache: keys of earlier prompts, shared by decoders; None to compute every prompt whole.
    """

    model: Any
    index: ConstraintIndex
    top_k: int
    num_beams: int
    token_budget: int
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, ConstraintIndex] = field(default_factory=dict)
    prefix_cache: PrefixCache | None = None
    _views: OrderedDict[tuple[Any, ...], ConstraintIndex] = field(default_factory=OrderedDict, repr=False)

    def answer_all(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] = lambda num_rows: None
    ) -> list[Answer]:
        """Answers in the order of the requests; `on_progress` gets the number of new ones."""
        answers: dict[int, Answer] = {}
        for batch in self.batches(requests):
            for number, answer in zip(batch, self.answer([requests[number] for number in batch]), strict=True):
                answers[number] = answer
            on_progress(len(set(batch)))
        return [answers[number] for number in range(len(requests))]

    def batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """The numbers of the requests to answer together; one may be there twice, to fill a batch."""
        return self._backend.make_batches(
            [len(request.tokens) for request in requests],
            token_budget=self.token_budget,
            tokens_ahead=self.num_beams * (self.index.max_length - 1),
            mesh=self.options.get("mesh"),
        )

    def answer(
        self, batch: Sequence[Request], on_output: Callable[[Any, Reuse], None] = lambda out, reuse: None
    ) -> list[Answer]:
        """Answers to one batch; `on_output` gets what `generate` returned, and what it need not have computed."""
        prompts = self.prompts(batch)
        views = [self._view(request) for request in batch]
        rules: Any = views if any(view is not self.index for view in views) else self.index
        seed = self._seeds(batch)
        cache = self._usable_cache
        given = [request.tokens for request in batch]
        reuse = Reuse() if cache is None else cache.begin(given)
        excluded = [request.exclude for request in batch] if any(request.exclude for request in batch) else None
        out = self.model.generate(
            **prompts,
            **reuse.arguments,
            constraint_index=rules,
            exclude_items=excluded,
            num_beams=self.num_beams,
            num_return_sequences=self.top_k,
            return_dict_in_generate=True,
            output_scores=True,
            _step_scores=False,  # `[batch * beams, vocab]` at every level
            **seed,
            **self.options,
        )
        on_output(out, reuse)
        if cache is not None:
            cache.keep(given, reuse, out)
        length = 1 if self.model.config.is_encoder_decoder else prompts["input_ids"].shape[1]
        found = self.index.items(to_host(out.sequences)[:, length:])
        scores = out.sequences_scores.tolist()
        answers = []
        for number, (request, view) in enumerate(zip(batch, views, strict=True)):
            rows = slice(number * self.top_k, (number + 1) * self.top_k)
            answers.append(self._best_of(request, view, found[rows], scores[rows]))
        return answers

    def option(self, name: str) -> Any:
        """An option of `generate`: from this call, else the config passed to it, else the checkpoint's."""
        if name in self.options:
            return self.options[name]
        own = getattr(self.options.get("generation_config"), name, None)
        return getattr(self.model.generation_config, name, None) if own is None else own

    def prompts(self, batch: Sequence[Request]) -> dict[str, Any]:
        """`input_ids` and `attention_mask` `[B, P]`: decoders need padding on the left, encoders on the right."""
        return self._backend.prompts(self.model, [request.tokens for request in batch])

    @cached_property
    def _backend(self) -> Backend:
        return backend_of(self.model)

    @cached_property
    def _usable_cache(self) -> PrefixCache | None:
        return self.prefix_cache if self.prefix_cache is not None and takes_options(self.options) else None

    def _seeds(self, batch: Sequence[Request]) -> dict[str, Any]:
        """The argument of `generate`: requests without a seed draw one where others have theirs."""
        seeds = [request.seed for request in batch]
        if all(seed is None for seed in seeds):
            return {}
        drawn = self._backend.draw_seeds(len(seeds))
        return {"seed": [new if seed is None else seed for seed, new in zip(seeds, drawn, strict=True)]}

    def _view(self, request: Request) -> ConstraintIndex:
        """What a request may be answered with."""
        if request.allowed is None and request.rule is None:
            return self.index
        if request.rule is not None and request.rule not in self.rules:
            raise ValueError(
                f"rule={request.rule!r}, expected one of {sorted(self.rules)}: name one of them, or omit it"
            )
        whole = self.index if request.rule is None else self.rules[request.rule]
        if request.allowed is None:
            return whole
        key = request.rule, *sorted(set(request.allowed))
        if key not in self._views:
            # What the rule rules out, or what has left the catalogue since, need not be named again.
            living = zip(key[1:], whole.has_items(key[1:]), strict=True)
            self._views[key] = whole.where([item for item, lives in living if lives])
            if len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return self._views[key]

    def _best_of(
        self, request: Request, view: ConstraintIndex, found: Sequence[Sequence[Any]], scores: Sequence[float]
    ) -> Answer:
        """The items allowed for a request, from `top_k` sequences in order: `top_k` at most."""
        exclude, allowed = set(request.exclude), None if request.allowed is None else set(request.allowed)
        best: dict[Any, float] = {}
        for items, score in zip(found, scores, strict=True):
            wanted = [item for item in items if item not in exclude and (allowed is None or item in allowed)]
            if score > -math.inf and request.rule is not None:  # other items may share the sequence
                wanted = [item for item, has in zip(wanted, view.has_items(wanted), strict=True) if has]
            for item in wanted if score > -math.inf else ():  # several if items share a sequence
                best.setdefault(item, score)
        kept = list(best)[: self.top_k]
        is_broken = not kept and view.num_items > int(np.count_nonzero(view.has_items(exclude)))
        return Answer(kept, [best[item] for item in kept], is_broken=is_broken)
