# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of few tokens, normalised over the whole vocabulary. Knows no trie, no beams and no model.

Nothing as large as all log-probabilities is ever written: rows are normalised in pieces or, on CUDA, in one compiled
kernel.

Axes: R rows (the beams of all requests), V vocabulary, C children.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

logger = logging.getLogger(__name__)

# Log-probabilities computed together: on a CPU 8 MB, which its caches hold (measured). Elsewhere each piece costs
# launches, and a small one leaves the device idle.
CPU_NUMBERS, DEVICE_NUMBERS = 2**21, 2**24
NOT_COMPILED: set[torch.device] = set()  # where compiling has failed


def rows_at_once(rows: Float[Tensor, "*rows vocab"]) -> int:
    """How many rows to normalise together."""
    numbers = CPU_NUMBERS if rows.device.type == "cpu" else DEVICE_NUMBERS
    return max(numbers // rows.shape[-1], 1)


def token_log_probs(
    logits: Float[Tensor, "*rows vocab"], tokens: Int[Tensor, "*rows children"]
) -> Float[Tensor, "*rows children"]:
    """Log-probabilities of each row's tokens, in fp32 for any dtype of the logits; `nan` for a row of `-inf` alone."""
    at_once = rows_at_once(logits)
    if logits.shape[:-1].numel() <= at_once or torch.compiler.is_compiling():
        return _log_probs(logits, tokens)
    rows, of_rows = logits.flatten(0, -2), tokens.flatten(0, -2)
    if logits.is_cuda and logits.device not in NOT_COMPILED:
        try:
            return _compiled()(rows, of_rows).view(tokens.shape)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # it needs Triton and a C compiler, and scores can do without
            NOT_COMPILED.add(logits.device)
            logger.warning(
                "log-probabilities are computed in pieces, torch.compile fails on %s: %s", logits.device, error
            )
    pieces = zip(rows.split(at_once), of_rows.split(at_once), strict=True)
    return torch.cat([_log_probs(*piece) for piece in pieces]).view(tokens.shape)


def _log_probs(
    logits: Float[Tensor, "*rows vocab"], tokens: Int[Tensor, "*rows children"]
) -> Float[Tensor, "*rows children"]:
    return logits.float().log_softmax(-1).gather(-1, tokens)


@cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    """`_log_probs` in one kernel: it writes what it returns and two numbers a row."""
    return torch.compile(_log_probs, dynamic=True)
