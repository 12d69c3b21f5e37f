# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`log_probs.token_log_probs` as a Triton kernel: each logit is read once. Imported only where it runs.

One program a row. It keeps the largest logit so far and the sum of exponentials relative to it (the online softmax of
Milakov and Gimelshein, arXiv:1805.02867, algorithm 3), in fp32, and then reads the logits of the row's tokens again.

Axes: R rows, V vocabulary, C children.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise ImportError(
        f'hf_gr.torch.log_probs_triton needs {missing.name}: pip install "hf-gr[triton]"', name=missing.name
    ) from missing

BLOCK = 8192  # logits that a program reads together: 16 for each of its 512 threads
CHILDREN = 1024  # tokens that it looks up together
WARPS = 16


# Levels differ in these: to compile the kernel for each would gain nothing.
@triton.jit(do_not_specialize=["num_children", "tokens_row_stride"])
def token_log_probs_kernel(
    logits,
    tokens,
    out,
    vocab_size,
    num_children,
    logits_row_stride,
    tokens_row_stride,
    tokens_stride,
    BLOCK: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    """The log-probabilities of one row's tokens."""
    row = tl.program_id(0).to(tl.int64)  # a row times its stride may be beyond 2^31
    logits += row * logits_row_stride
    tokens += row * tokens_row_stride
    out += row * num_children
    largest = -float("inf")
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        block = tl.load(logits + at, mask=at < vocab_size, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(block, 0))
        # As long as all are -inf nothing is relative to -inf: that is no number.
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(block - base), 0)
        largest = new_largest
    normaliser = largest + tl.log(total)
    for start in range(0, num_children, CHILDREN):
        at = start + tl.arange(0, CHILDREN)
        is_child = at < num_children
        token = tl.load(tokens + at * tokens_stride, mask=is_child, other=0)
        # A token beyond the vocabulary is nobody's, but reading there would be an illegal access.
        is_token = is_child & (token >= 0) & (token < vocab_size)
        logit = tl.load(logits + token, mask=is_token, other=-float("inf")).to(tl.float32)
        tl.store(out + at, logit - normaliser, mask=is_child)


def token_log_probs(
    logits: Float[Tensor, "rows vocab"], tokens: Int[Tensor, "rows children"]
) -> Float[Tensor, "rows children"]:
    """See `log_probs.token_log_probs`; the device of the logits is the current one."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        token_log_probs_kernel[(len(logits),)](  # pyright: ignore[reportIndexIssue]
            logits,
            tokens,
            out,
            logits.shape[1],
            tokens.shape[1],
            logits.stride(0),
            *tokens.stride(),
            BLOCK=BLOCK,
            CHILDREN=CHILDREN,
            num_warps=WARPS,
        )
    return out
