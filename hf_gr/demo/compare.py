# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The same call by transformers' own constrained generation and by hf_gr: equal answers, then the time."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from hf_gr.catalogue import ConstraintIndex

SCORE_TOL = 1e-4  # fp32: sums of log-probabilities that two programs add in different orders


@dataclass(frozen=True)
class Comparison:
    """The medians of `num_runs` alternating runs of one call."""

    transformers_seconds: float
    hf_gr_seconds: float
    num_runs: int
    batch_size: int
    prompt_length: int
    num_beams: int


def compare_with_transformers(
    model: Any, index: ConstraintIndex, prompts: dict[str, Any], *, num_beams: int, num_runs: int = 3
) -> Comparison:
    """Time both ways to generate from the catalogue: same model, same prompts, same beams, alternating runs.

    transformers gets the fastest function we know for it: one look-up in a dict from prefixes to token lists, which is
    built before the clock starts. The answers are compared first, in a pair of runs that also warms both up.
    """
    batch_size, prompt_length = prompts["input_ids"].shape
    allowed: dict[tuple[int, ...], set[int]] = {}
    for row in index:
        for length, token in enumerate(row):
            allowed.setdefault(tuple(row[:length]), set()).add(token)
    next_tokens = {prefix: sorted(tokens) for prefix, tokens in allowed.items()}
    theirs = {
        "constraint_index": False,
        "prefix_allowed_tokens_fn": lambda row, tokens: next_tokens[tuple(tokens[prompt_length:].tolist())],
        "max_new_tokens": index.max_length,
    }

    def call(**how: Any) -> Any:
        return model.generate(**prompts, num_beams=num_beams, num_return_sequences=num_beams, **how)

    ways: tuple[dict[str, Any], ...] = (theirs, {"constraint_index": index})
    answers = [call(return_dict_in_generate=True, output_scores=True, **way) for way in ways]
    if not same_answers(*answers, num_beams=num_beams):
        raise RuntimeError("hf_gr and transformers' prefix_allowed_tokens_fn give different answers: please report it")
    seconds: tuple[list[float], ...] = ([], [])
    for _ in range(num_runs):
        for way, runs in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            call(**way)
            runs.append(time.perf_counter() - start)
    before, after = map(statistics.median, seconds)
    return Comparison(before, after, num_runs, batch_size, prompt_length, num_beams)


def same_answers(expected: Any, actual: Any, *, num_beams: int) -> bool:
    """Whether two beam searches agree: scores within `SCORE_TOL`, sequences equal unless their scores tie."""
    scores = expected.sequences_scores.view(-1, num_beams)
    if not torch.allclose(scores, actual.sequences_scores.view(-1, num_beams), atol=SCORE_TOL, rtol=0):
        return False
    theirs, ours = (out.sequences.view(len(scores), num_beams, -1).tolist() for out in (expected, actual))
    for row, of_row in enumerate(scores.tolist()):
        # The last ties are left out: one of them may have lost to a sequence that is not there.
        ends = [end for end in range(1, num_beams) if of_row[end - 1] - of_row[end] > SCORE_TOL]
        if any(sorted(ours[row][:end]) != sorted(theirs[row][:end]) for end in ends):
            return False
    return True
