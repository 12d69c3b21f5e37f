# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches of prompts of different lengths, with little padding. Knows lengths only."""

from collections.abc import Callable, Sequence

import numpy as np


def num_batch_tokens(num_prompts: int, longest: int, tokens_ahead: int) -> int:
    """The tokens of a batch: its prompts padded to the longest one, and what is generated for each."""
    return num_prompts * (longest + tokens_ahead)


def make_batches(lengths: Sequence[int], *, token_budget: int, tokens_ahead: int) -> list[list[int]]:
    """Divide prompts into batches of similar lengths, as large as a budget of tokens allows.

    A batch costs its tokens, those of padding included (`num_batch_tokens`); a single prompt may cost more. Prompts
    are sorted by length and cut greedily, the longest first: what does not fit a device fails at once.

    Example:
        >>> make_batches([3, 9, 3, 8], token_budget=20, tokens_ahead=1)
        [[1, 3], [0, 2]]
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    batches: list[list[int]] = []
    most = 0
    for row in order:
        if not batches or len(batches[-1]) == most:
            batches.append([])
            most = max(1, token_budget // num_batch_tokens(1, lengths[row], tokens_ahead))
        batches[-1].append(row)
    return batches


def make_even_batches(
    lengths: Sequence[int],
    *,
    token_budget: int,
    tokens_ahead: int,
    padded_length: Callable[[int], int],
    num_devices: int = 1,
) -> list[list[int]]:
    """`make_batches` for compiled programs, each of which serves one shape: few shapes, the longest prompts first.

    The longest prompt of a batch, padded, gives it its number of rows: the largest power of two for each device that
    the budget allows, and no more than all rows need. The last batch is filled by its own first row.

    Example:
        >>> make_even_batches([3, 9, 3, 8, 2], token_budget=20, tokens_ahead=1, padded_length=lambda length: length)
        [[1, 3], [0, 2, 4, 0]]
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    needed = 1 << (-(-len(order) // num_devices) - 1).bit_length() if order else 1
    batches: list[list[int]] = []
    while order:
        cost = num_batch_tokens(1, padded_length(lengths[order[0]]), tokens_ahead)
        each = 1 << (max(token_budget // cost, 1).bit_length() - 1)
        size = num_devices * min(each, needed)
        batch, order = order[:size], order[size:]
        batches.append(batch + batch[:1] * (size - len(batch)))
    return batches
