# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches that are computed before the first request: they fit the two costs, and settle drafts. Knows no queue."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hf_gr.answering.batching import num_batch_tokens
from hf_gr.answering.recommender import Recommender
from hf_gr.answering.requests import Request, join_tokens, tokens_of_items
from hf_gr.catalogue import ConstraintIndex

from .costs import Costs
from .workers import Workers

SHAPES = ((1, 16), (1, 128), (4, 32), (4, 128))  # prompts, and the tokens of each
ROUNDS = 3  # the first one warms up
PATIENCE = 30.0  # seconds; a slow model has fewer rounds


def fit_costs(recommender: Recommender, workers: Workers) -> Costs:
    """What batches cost while all workers compute.

    Args:
        recommender: of the usual number of beams.
        workers: where batches are computed.
    """
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
    """For `drafting="auto"`: answer batches of every size, so that its forwards are timed before the first request.

    Args:
        recommender: of the usual number of beams.
        workers: where batches are computed.
        costs: of a batch.
        max_batch: the most requests of a batch.
    """
    began, ahead = time.perf_counter(), recommender.num_beams * (recommender.index.max_length - 1)
    length = min(SHAPES[0][1], recommender.room or SHAPES[0][1])
    tokens = _tokens(recommender.index, length)
    most = min(max_batch, max(costs.token_budget // num_batch_tokens(1, length, ahead), 1))
    for size in (1 << power for power in range(most.bit_length())):  # sizes within a factor of two are one kind
        if time.perf_counter() - began > PATIENCE:
            break
        batch = [Request(row, np.roll(tokens, row).tolist()) for row in range(size)]
        workers.submit(workers.on_stream(recommender.answer), batch).result()


def _tokens(index: ConstraintIndex, count: int) -> npt.NDArray[np.int64]:
    """A history of items of the catalogue, cut to so many tokens; of any token if it is empty, as updates leave it."""
    if not index.num_items:
        return np.zeros(count, dtype=np.int64)
    every = index.item_ids
    items = [every[int(place)] for place in np.random.default_rng(0).integers(0, index.num_items, size=count)]
    return np.array(join_tokens(items, tokens_of_items(index.snapshot, items)))[:count]
