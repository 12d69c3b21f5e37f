# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The constraint as an ordinary logits processor, for any other loop of transformers. Knows no beams."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_gr.catalogue import ConstraintIndex
from hf_gr.torch.transition import advance, children, device_trie, mask_illegal


class ConstraintLogitsProcessor(LogitsProcessor):
    """Keeps the tokens that continue a sequence of the catalogue, and drops all others to `-inf`.

    `generate(constraint_index=...)` is faster and needs no processor; this one is for models and loops that it cannot
    take. A row that is complete, or that is no prefix of the catalogue, is left one token: the end token (token 0
    without one), with the lowest finite score, so that samplers still find a distribution and beams never prefer it.

    Args:
        index: the catalogue.
        prompt_length: tokens before the generated ones. By default that of the first call; a call that is not one
            token longer than the one before begins a new generation, so one instance may serve many, one after the
            other.

    Example:
        >>> index = ConstraintIndex.from_sequences([[5, 7], [6, 7]])
        >>> scores = ConstraintLogitsProcessor(index)(torch.tensor([[1, 2]]), torch.zeros(1, 8))
        >>> scores.isfinite().nonzero()[:, 1].tolist()
        [5, 6]

    Source: STATIC, section 4.
    """

    def __init__(self, index: ConstraintIndex, prompt_length: int | None = None) -> None:
        if not isinstance(index, ConstraintIndex):
            raise ValueError(f"index is a {type(index).__name__}, expected a ConstraintIndex")
        if prompt_length is not None and prompt_length < 0:
            raise ValueError(f"prompt_length={prompt_length}, expected 0 or more tokens")
        self.index = index
        self.prompt_length = prompt_length
        self._start = 0
        self._seen: tuple[int, int] | None = None  # rows and tokens of the last call

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask `[rows, vocab]` scores by the `[rows, length]` tokens before them."""
        if self.index.max_token_id >= scores.shape[-1]:
            raise ValueError(
                f"index has token {self.index.max_token_id}, expected less than the vocabulary, {scores.shape[-1]}: "
                "is it another model's catalogue, or were the embeddings not resized?"
            )
        length = input_ids.shape[1]
        if self._seen != (input_ids.shape[0], length - 1):
            self._start = length
        self._seen = (input_ids.shape[0], length)
        generated = input_ids[:, self._start if self.prompt_length is None else self.prompt_length :]
        trie = device_trie(self.index, scores.device)
        generated = generated[:, : trie.max_length]
        states = torch.zeros((len(generated), 1), dtype=torch.long, device=scores.device)
        for level, tokens in enumerate(generated.to(scores.device).T):
            states = advance(states, tokens[:, None], trie, level=level)
        level = generated.shape[1]
        final = self.index.eos_token_id or 0
        over = torch.full_like(scores, -torch.inf)
        over[:, final] = torch.finfo(scores.dtype).min
        if level == trie.max_length:
            return over
        legal = children(states, trie, level=level)
        masked = mask_illegal(scores[:, None], legal)[:, 0]
        return torch.where(legal.legal.any(dim=-1), masked, over)
