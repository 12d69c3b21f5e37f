# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of few tokens, normalised over the whole vocabulary. Knows no trie, no beams and no model.

Two ways, one meaning: PyTorch, in pieces, so that nothing as large as all log-probabilities is ever written; and on
CUDA one Triton kernel (extra `triton`) that reads every logit once. `rows_at_once` sizes the pieces by device.

Axes: R rows (the beams of all requests), V vocabulary, C children.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

logger = logging.getLogger(__name__)

CPU_NUMBERS = 2**21  # log-probabilities computed together on a CPU: 8 MB, which its caches hold (measured)
# On a device each piece costs launches, and a small one leaves it idle: pieces of 64 MB or more, but at most 3. One of
# 3 pieces in fp32 takes two thirds of the memory of all logits in bf16.
DEVICE_NUMBERS, DEVICE_PIECES = 2**24, 3

_works: dict[torch.device, bool] = {}  # devices on which the kernel was tried


def rows_at_once(num_rows: int, vocab_size: int, device: torch.device) -> int:
    """How many rows to normalise together; pieces are equally large, but for the last one.

    Example:
        >>> [rows_at_once(512, 151_936, torch.device(kind)) for kind in ("cpu", "cuda")]
        [13, 171]
    """
    if device.type == "cpu":
        return max(CPU_NUMBERS // vocab_size, 1)
    pieces = min(-(-num_rows * vocab_size // DEVICE_NUMBERS), DEVICE_PIECES)
    return max(-(-num_rows // max(pieces, 1)), 1)


@torch.library.custom_op("hf_gr::token_log_probs", mutates_args=(), schema="(Tensor logits, Tensor tokens) -> Tensor")
def token_log_probs(
    logits: Float[Tensor, "rows vocab"], tokens: Int[Tensor, "rows children"]
) -> Float[Tensor, "rows children"]:
    """Log-probabilities of each row's tokens in fp32, whatever the dtype of the logits; differentiates nothing.

    In plain loops: `for r, c: out[r, c] = logits[r, tokens[r, c]] - log(sum(exp(logits[r])))`. A row of `-inf` alone
    gives `nan`, as log-softmax does.

    On CUDA this is the kernel, which needs Triton; elsewhere it is its slow twin. An operator of PyTorch, so that it
    is compiled, captured and replaced like any other.

    Args:
        logits: fp32, fp16 or bf16, rows at any distance.
        tokens: within the vocabulary.
    """
    return logits.float().log_softmax(-1).gather(-1, tokens)


@token_log_probs.register_fake
def _(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)


@token_log_probs.register_kernel("cuda")
def _on_cuda(logits: Tensor, tokens: Tensor) -> Tensor:
    from .log_probs_triton import token_log_probs as kernel

    with torch.cuda.device(logits.device):
        return kernel(logits, tokens)


def takes_one_pass(logits: Float[Tensor, "rows vocab"]) -> bool:
    """Whether `token_log_probs` is the kernel for these logits. Tried once a device: it needs a C compiler, too."""
    if not logits.is_cuda or logits.requires_grad or torch.compiler.is_compiling():
        return False  # a compiler fuses the two passes on its own
    if logits.device not in _works:
        _works[logits.device] = find_spec("triton") is not None and _runs_on(logits.device)
    return _works[logits.device]


def _runs_on(device: torch.device) -> bool:
    """Whether the kernel compiles and starts. Nothing is read back: it would be waited for."""
    try:
        token_log_probs(torch.zeros((1, 2), device=device), torch.zeros((1, 1), dtype=torch.long, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Whatever is wrong with Triton, scores can do without it.
        logger.warning("Triton is installed, but its kernel does not run on %s: %s", device, error)
        return False
    return True
