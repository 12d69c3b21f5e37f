# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What the demo measures: a recommender's films, hits, invalid items without a constraint, and speed.

Axes: U users, K beams, L tokens of a film. Prompts are the latest films of a history, as tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_gr.catalogue import ConstraintIndex
from hf_gr.generation.prompts import pad

SCORE_TOL = 1e-4  # fp32: sums of L log-probabilities that two programs add in different orders


@dataclass(frozen=True)
class DemoReport:
    """What a run of the demo measured. No list contains a film that its user has rated before.

    Attributes:
        folder: The folder with the model and its catalogue.
        trained_seconds: Seconds of training; None if the model came from the cache.
        model_hits: Users whose last film is among the 10 that the model recommends.
        popular_hits: Users whose last film is among the 10 most popular ones.
        num_users: All users.
        num_beams: Beams of the lists.
        recommend_seconds: Seconds that the model took for the lists of all users.
        invalid_beams: Sequences of beam search that name no film.
        invalid_samples: Sampled sequences that name no film.
        comparison: The time against transformers' own constrained generation.
    """

    folder: Path
    trained_seconds: float | None
    model_hits: int
    popular_hits: int
    num_users: int
    num_beams: int
    recommend_seconds: float
    invalid_beams: InvalidShares
    invalid_samples: InvalidShares
    comparison: Comparison


def item_tokens_of(index: ConstraintIndex, titles: Sequence[str]) -> np.ndarray:
    """`[N, L]` tokens of films, read back from their catalogue."""
    return index.snapshot.sequences_of(list(titles))[1]


def make_prompts(
    histories: Sequence[np.ndarray], item_tokens: np.ndarray, *, num_films: int, pad_token_id: int, device: Any = "cpu"
) -> dict[str, Tensor]:
    """The latest `num_films` films of every history as left-padded `input_ids` and `attention_mask`."""
    rows = [item_tokens[history[-num_films:]].ravel() for history in histories]
    input_ids, mask = map(torch.from_numpy, pad(rows, pad_token_id))
    return {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}


def take_prompts(prompts: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Some rows of a batch."""
    return {name: values[rows] for name, values in prompts.items()}


def best_unseen(ranking: Sequence[int], history: np.ndarray, count: int) -> list[int]:
    """The first `count` films of a ranking that are not in the history. The one rule for every recommender here."""
    seen = set(history.tolist())
    return [film for film in ranking if film not in seen][:count]


def count_hits(lists: Sequence[Sequence[int]], targets: np.ndarray) -> int:
    """Users whose held-out film is in their list."""
    return sum(target in films for films, target in zip(lists, targets.tolist(), strict=True))


@dataclass(frozen=True)
class InvalidShares:
    """How many of `total` generated sequences, `total / num_users` per user, name no film."""

    unconstrained: int
    constrained: int
    total: int
    num_users: int


def invalid_shares(
    model: Any,
    index: ConstraintIndex,
    prompts: dict[str, Tensor],
    *,
    num_sequences: int,
    do_sample: bool,
    seed: int = 0,
) -> InvalidShares:
    """Generate with and without the constraint, everything else equal, and look the results up in the catalogue.

    Beams and samples differ a lot here. A wide beam search keeps the likeliest sequences, which a well-trained model
    has learnt to be films; a sample includes the model's mistakes.

    Args:
        model: The recommender.
        index: Its catalogue.
        prompts: Prompts of some users.
        num_sequences: Beams or samples per user.
        do_sample: Sample from the whole distribution; otherwise beam search.
        seed: Seed of the samples.
    """
    settings: dict[str, Any] = {"num_return_sequences": num_sequences, "do_sample": do_sample}
    settings |= {"top_k": 0, "top_p": 1.0} if do_sample else {"num_beams": num_sequences}
    num_users, prompt_length = prompts["input_ids"].shape
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        free = model.generate(**prompts, **settings, max_new_tokens=index.max_length)
        bound = model.generate(**prompts, **settings, constraint_index=index)
    free_items, bound_items = (index.items(sequences[:, prompt_length:]) for sequences in (free, bound))
    return InvalidShares(
        unconstrained=sum(not items for items in free_items),
        constrained=sum(not items for items in bound_items),
        total=len(free_items),
        num_users=num_users,
    )


@dataclass(frozen=True)
class Comparison:
    """The same call by transformers' `prefix_allowed_tokens_fn` and by hf_gr.

    Attributes:
        transformers_seconds: Median of the runs.
        hf_gr_seconds: Median of the runs.
        num_runs: Runs of each, alternating.
        batch_size: Prompts of the call.
        prompt_length: Tokens of a prompt.
        num_beams: Beams of the call.
    """

    transformers_seconds: float
    hf_gr_seconds: float
    num_runs: int
    batch_size: int
    prompt_length: int
    num_beams: int

    @property
    def ratio(self) -> float:
        """How many times faster hf_gr is."""
        return self.transformers_seconds / self.hf_gr_seconds


def compare_with_transformers(
    model: Any,
    index: ConstraintIndex,
    item_tokens: np.ndarray,
    prompts: dict[str, Tensor],
    *,
    num_beams: int,
    num_runs: int = 3,
) -> Comparison:
    """Time both ways to generate from the catalogue: same model, same prompts, same beams, alternating runs.

    transformers gets the fastest function we know for it: one look-up in a dict from prefixes to token lists, which is
    built before the clock starts. The answers are compared first, in a pair of runs that also warms both up.

    Raises:
        RuntimeError: The answers differ, so the times mean nothing.
    """
    batch_size, prompt_length = prompts["input_ids"].shape
    allowed = _allowed_by_prefix(item_tokens)
    constraints: dict[str, dict[str, Any]] = {
        "transformers": {
            "prefix_allowed_tokens_fn": lambda row, tokens: allowed[tuple(tokens[prompt_length:].tolist())],
            "max_new_tokens": index.max_length,
        },
        "hf_gr": {"constraint_index": index},
    }

    def call(name: str, **settings: Any) -> Any:
        width = {"num_beams": num_beams, "num_return_sequences": num_beams}
        return model.generate(**prompts, **width, **constraints[name], **settings)

    answers = [call(name, return_dict_in_generate=True, output_scores=True) for name in constraints]
    if not same_answers(*answers, num_beams=num_beams):
        raise RuntimeError("hf_gr and transformers' prefix_allowed_tokens_fn give different answers: please report it")
    seconds: dict[str, list[float]] = {name: [] for name in constraints}
    for _ in range(num_runs):
        for name in constraints:
            start = time.perf_counter()
            call(name)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    return Comparison(
        transformers_seconds=medians["transformers"],
        hf_gr_seconds=medians["hf_gr"],
        num_runs=num_runs,
        batch_size=batch_size,
        prompt_length=prompt_length,
        num_beams=num_beams,
    )


def same_answers(expected: Any, actual: Any, *, num_beams: int) -> bool:
    """Whether two beam searches agree: scores within `SCORE_TOL`, sequences equal unless their scores tie."""
    scores = expected.sequences_scores.view(-1, num_beams)
    if not torch.allclose(scores, actual.sequences_scores.view(-1, num_beams), atol=SCORE_TOL, rtol=0):
        return False
    for row, row_scores in enumerate(scores.tolist()):
        rows = slice(row * num_beams, (row + 1) * num_beams)
        ours, theirs = actual.sequences[rows].tolist(), expected.sequences[rows].tolist()
        start = 0
        for end in range(1, num_beams + 1):
            if end == num_beams:
                break  # a tie with the last beam may have lost to an unlisted sequence
            if row_scores[end - 1] - row_scores[end] > SCORE_TOL:
                if sorted(ours[start:end]) != sorted(theirs[start:end]):
                    return False
                start = end
    return True


def _allowed_by_prefix(item_tokens: np.ndarray) -> dict[tuple[int, ...], list[int]]:
    """Token prefixes of films -> the tokens that may follow."""
    allowed: dict[tuple[int, ...], set[int]] = {}
    for row in item_tokens.tolist():
        for length, token in enumerate(row):
            allowed.setdefault(tuple(row[:length]), set()).add(token)
    return {prefix: sorted(tokens) for prefix, tokens in allowed.items()}
