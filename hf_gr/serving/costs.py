# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a batch costs, and how large it should be, measured before the first request. Knows no queue.

A batch takes `fixed + token * tokens` seconds, where padding and beams are tokens, too (`num_batch_tokens` of
`hf_gr.answering.batching`). On two CPU cores that has a median error of 3%.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_gr.answering.batching import num_batch_tokens
from hf_gr.answering.recommender import OUTPUTS, Recommender
from hf_gr.answering.requests import Request
from hf_gr.catalogue import ConstraintIndex

from .workers import Workers

# A batch is full when its tokens take so many times its fixed cost. With 25.7 M parameters, 2 workers, that is 0.6 s;
# 5.5 times, 1.4 s, answered 6% more requests when there was no end of them.
FULL = 2.5
FEWEST_TOKENS, MOST_TOKENS = 128, 65_536
LEAST_SECONDS = 1e-9  # of a token, where times say nothing
SHAPES = ((1, 16), (1, 128), (4, 32), (4, 128))  # prompts, and the tokens of each
CAPTURED = (16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)  # tokens of prompts: each has a program of its own
ROUNDS = 3  # the first one warms up
PATIENCE = 30.0  # seconds; a slow model has fewer rounds


@dataclass(frozen=True)
class Costs:
    """Seconds of a batch, and of each of its tokens."""

    fixed: float
    token: float

    @classmethod
    def fit(cls, tokens: Sequence[int], seconds: Sequence[float]) -> Costs:
        """The costs that explain measured batches best, as shares of their times; neither is negative.

        Example:
            >>> Costs.fit([100, 200, 400], [0.3, 0.5, 0.9])
            Costs(fixed=0.1, token=0.002)
        """
        took = np.maximum(np.asarray(seconds, dtype=np.float64), LEAST_SECONDS)
        terms = np.stack([np.ones_like(took), np.asarray(tokens, dtype=np.float64)], axis=1)
        fixed, token = np.linalg.lstsq(terms / took[:, None], np.ones_like(took), rcond=None)[0].tolist()
        if token <= 0.0:
            return cls(float(np.median(took)), LEAST_SECONDS)
        if fixed < 0.0:
            return cls(0.0, float(np.median(took / terms[:, 1])))
        return cls(round(fixed, 12), round(token, 12))

    def seconds(self, tokens: float) -> float:
        """What a batch of so many tokens takes."""
        return self.fixed + self.token * tokens

    @property
    def token_budget(self) -> int:
        """The tokens of a full batch."""
        return int(np.clip(FULL * self.fixed / self.token, FEWEST_TOKENS, MOST_TOKENS))


def fit_costs(recommender: Recommender, workers: Workers) -> Costs:
    """What batches cost while all workers compute, with the recommender's usual number of beams."""
    began, ahead = time.perf_counter(), recommender.tokens_ahead(recommender.num_beams)
    shapes = list(dict.fromkeys((rows, min(length, recommender.room or length)) for rows, length in SHAPES))
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(ROUNDS):
        for rows, length in shapes:
            batch = _requests(recommender, rows, length)

            def compute(batch: Sequence[Request] = batch) -> float:
                start = time.perf_counter()
                recommender.answer(batch)
                return time.perf_counter() - start

            times[rows, length].append(float(np.mean(workers.run_on_all(compute))))
        if time.perf_counter() - began > PATIENCE:
            break
    known = [float(np.median(seconds[1:] or seconds)) for seconds in times.values()]
    return Costs.fit([num_batch_tokens(*shape, ahead) for shape in times], known)


def prepare(recommender: Recommender, workers: Workers, costs: Costs, *, max_batch: int) -> None:
    """Do for batches of 1, 2, 4, ... requests what their first one would wait for, while there is patience.

    With `drafting="auto"` answers time the forwards. With `cache_implementation="static"` decodes are captured, of
    requests that exclude their histories; other batches and longer prompts are decoded without a graph.
    """

    def run(act: Callable[[int], object], length: int) -> None:
        began = time.perf_counter()
        cost = num_batch_tokens(1, length, recommender.tokens_ahead(recommender.num_beams))
        most = min(max_batch, max(costs.token_budget // cost, 1))
        for size in (1 << power for power in range(most.bit_length())):  # sizes within a factor of two are one kind
            if time.perf_counter() - began <= PATIENCE:
                workers.submit(act, size).result()

    room, model = recommender.room or CAPTURED[-1], recommender.model
    if recommender.option("drafting") == "auto":
        length = min(SHAPES[0][1], room)
        run(lambda size: recommender.answer(_requests(recommender, size, length)), length)
    is_captured = not (model.config.is_encoder_decoder or recommender.option("exact"))
    if recommender.option("cache_implementation") == "static" and is_captured:
        lengths = [length for length in CAPTURED if length <= room] or [room]
        exclude = _items(recommender.index, lengths[-1] // recommender.index.max_length)
        how: dict[str, Any] = {**recommender.options, "num_beams": recommender.num_beams}
        how |= {"num_return_sequences": recommender.num_results, "prompt_lengths": lengths, **OUTPUTS}
        how.pop("cache_implementation", None)
        run(
            lambda size: model.warm_up(recommender.index, batch_sizes=size, exclude_items=[exclude] * size, **how),
            lengths[-1],
        )


def _requests(recommender: Recommender, number: int, length: int) -> list[Request]:
    """Requests of so many tokens, each of its own: items of the catalogue, or any token if it is empty."""
    tokens = np.zeros(length, dtype=np.int64)
    if items := _items(recommender.index, length):
        tokens = np.array(recommender.index.encode(items))[:length]
    return [Request(np.roll(tokens, row).tolist()) for row in range(number)]


def _items(index: ConstraintIndex, count: int) -> list[Any]:
    """Some items of the catalogue; none if it is empty, as updates leave it."""
    if not index.num_items:
        return []
    every, places = index.item_ids, np.random.default_rng(0).integers(0, index.num_items, size=count)
    return [every[int(place)] for place in places]
