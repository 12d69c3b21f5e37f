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
import numpy.typing as npt

from hf_gr.answering.batching import num_batch_tokens
from hf_gr.answering.recommender import Recommender
from hf_gr.answering.requests import Request, join_tokens, tokens_of_items
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
    began, ahead = time.perf_counter(), recommender.num_beams * (recommender.index.max_length - 1)
    shapes = list(dict.fromkeys((rows, min(length, recommender.room or length)) for rows, length in SHAPES))
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    tokens = _tokens(recommender.index, max(length for _, length in shapes))
    for number in range(ROUNDS):
        for rows, length in shapes:
            batch = [Request(row, np.roll(tokens, row)[:length].tolist()) for row in range(rows)]

            def compute(batch: Sequence[Request] = batch) -> float:
                start = time.perf_counter()
                recommender.answer(batch)
                return time.perf_counter() - start

            took = workers.run_on_all(workers.on_stream(compute))
            if number or time.perf_counter() - began > PATIENCE:
                times[rows, length].append(float(np.mean(took)))
        if number and time.perf_counter() - began > PATIENCE:
            break
    known = {shape: float(np.median(seconds)) for shape, seconds in times.items() if seconds}
    return Costs.fit([num_batch_tokens(*shape, ahead) for shape in known], list(known.values()))


def settle(recommender: Recommender, workers: Workers, costs: Costs, *, max_batch: int) -> None:
    """For `drafting="auto"`: answer batches of every size, so that its forwards are timed before the first request."""
    length = min(SHAPES[0][1], recommender.room or SHAPES[0][1])
    tokens = _tokens(recommender.index, length)

    def answer(size: int) -> None:
        recommender.answer([Request(row, np.roll(tokens, row).tolist()) for row in range(size)])

    _with_every_size(answer, recommender, workers, costs, length=length, max_batch=max_batch)


def capture(recommender: Recommender, workers: Workers, costs: Costs, *, max_batch: int) -> None:
    """For `cache_implementation="static"`: capture batches of 1, 2, 4, ... requests that exclude their histories.

    The arguments are those of `settle`. Other batches, and longer prompts, are decoded without a graph.
    """
    room = recommender.room or CAPTURED[-1]
    lengths = [length for length in CAPTURED if length <= room] or [room]
    exclude = _items(recommender.index, lengths[-1] // recommender.index.max_length)
    options: dict[str, Any] = {**recommender.options, "num_return_sequences": recommender.num_results}
    options.pop("cache_implementation", None)

    def warm_up(size: int) -> None:
        recommender.model.warm_up(
            recommender.index,
            batch_sizes=size,
            prompt_lengths=lengths,
            num_beams=recommender.num_beams,
            exclude_items=[exclude] * size,
            return_dict_in_generate=True,
            output_scores=True,
            _step_scores=False,
            **options,
        )

    _with_every_size(warm_up, recommender, workers, costs, length=lengths[-1], max_batch=max_batch)


def _with_every_size(
    run: Callable[[int], None],
    recommender: Recommender,
    workers: Workers,
    costs: Costs,
    *,
    length: int,
    max_batch: int,
) -> None:
    """Run by a worker with batch sizes of 1, 2, 4, ... that fit the budget, for as long as there is patience."""
    began, ahead = time.perf_counter(), recommender.num_beams * (recommender.index.max_length - 1)
    most = min(max_batch, max(costs.token_budget // num_batch_tokens(1, length, ahead), 1))
    for size in (1 << power for power in range(most.bit_length())):  # sizes within a factor of two are one kind
        if time.perf_counter() - began > PATIENCE:
            break
        workers.submit(workers.on_stream(run), size).result()


def _items(index: ConstraintIndex, count: int) -> list[Any]:
    """Some items of the catalogue; none if it is empty, as updates leave it."""
    if not index.num_items:
        return []
    every, places = index.item_ids, np.random.default_rng(0).integers(0, index.num_items, size=count)
    return [every[int(place)] for place in places]


def _tokens(index: ConstraintIndex, count: int) -> npt.NDArray[np.int64]:
    """A history of items of the catalogue, cut to so many tokens; of any token if it is empty."""
    items = _items(index, count)
    if not items:
        return np.zeros(count, dtype=np.int64)
    return np.array(join_tokens(items, tokens_of_items(index.snapshot, items)))[:count]
