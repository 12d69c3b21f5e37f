# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The constraint as an ordinary logits processor, for any other loop of transformers. Knows no beams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.snapshot import BatchRules
from hf_gr.torch.transition import advance, children, device_catalogue, mask_illegal

from .naming import batch_rules

# The score of what only fills up, where the type has room for it: far below any sum of log-probabilities, and below
# the -1e9 by which transformers' beam search marks beams that are over.
FILLING = -1e30


class ConstraintLogitsProcessor(LogitsProcessor):
    """Keeps the tokens that continue a sequence of the catalogue, and drops all others to `-inf`.

    `generate(constraint_index=...)` is faster and needs no processor; this one is for models and loops that it cannot
    take. A row that is complete, or that is no prefix of the catalogue, is left one token: the end token (token 0
    without one), with a very low finite score, so that samplers still find a distribution and beams never prefer it.

    Args:
        index: the catalogue as it is now, or a list of one for each prompt (views of one index); rows are taken for as
            many paths of each prompt as there are.
        prompt_length: tokens before the generated ones. By default that of the first call; a call that is not one
            token longer than the one before begins a new generation, so one instance may serve many, one after the
            other.
        exclude_items: item ids for each prompt, as in `generate`.

    Raises:
        ValueError: as `generate` for `constraint_index` and `exclude_items`.

    Example:
        >>> index = ConstraintIndex.from_sequences([[5, 7], [6, 7]])
        >>> scores = ConstraintLogitsProcessor(index)(torch.tensor([[1, 2]]), torch.zeros(1, 8))
        >>> scores.isfinite().nonzero()[:, 1].tolist()
        [5, 6]

    Source: STATIC, section 4.
    """

    def __init__(
        self,
        index: ConstraintIndex | Sequence[ConstraintIndex],
        prompt_length: int | None = None,
        *,
        exclude_items: Sequence[Iterable[ItemId]] | None = None,
    ) -> None:
        for one in index if isinstance(index, (list, tuple)) else [index]:
            if not isinstance(one, ConstraintIndex):
                raise ValueError(f"index is a {type(one).__name__}, expected a ConstraintIndex")
        if prompt_length is not None and prompt_length < 0:
            raise ValueError(f"prompt_length={prompt_length}, expected 0 or more tokens")
        self.rules = batch_rules(index, exclude_items)
        self.prompt_length = prompt_length
        self._start = 0
        self._seen: tuple[int, int] | None = None  # rows and tokens of the last call

    @classmethod
    def _of_rules(cls, rules: BatchRules) -> ConstraintLogitsProcessor:
        processor = cls.__new__(cls)
        processor.rules, processor.prompt_length = rules, None
        processor._start, processor._seen = 0, None
        return processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask `[rows, vocab]` scores by the `[rows, length]` tokens before them."""
        snapshot = self.rules.any
        if snapshot.max_token_id >= scores.shape[-1]:
            raise ValueError(
                f"index has token {snapshot.max_token_id}, expected less than the vocabulary, {scores.shape[-1]}: "
                "is it another model's catalogue, or were the embeddings not resized?"
            )
        num_rows, length = input_ids.shape
        num_prompts = self.rules.num_rows or num_rows
        if num_rows % num_prompts:
            raise ValueError(
                f"scores have {num_rows} rows for {num_prompts} rules, expected one path or more for each prompt"
            )
        if self._seen != (num_rows, length - 1):
            self._start = length
        self._seen = (num_rows, length)
        generated = input_ids[:, self._start if self.prompt_length is None else self.prompt_length :]
        catalogue = device_catalogue(self.rules, scores.device)
        generated = generated[:, : catalogue.max_length].to(scores.device)
        states = torch.zeros((num_prompts, num_rows // num_prompts), dtype=torch.long, device=scores.device)
        for level, tokens in enumerate(generated.T):
            states = advance(states, tokens.reshape(states.shape), catalogue, level=level)
        level = generated.shape[1]
        final = snapshot.eos_token_id or 0
        over = torch.full_like(scores, -torch.inf)
        # Finite still when it is divided by a temperature of 1/16; fp16's -4094 is below its logits all the same.
        over[:, final] = max(FILLING, torch.finfo(scores.dtype).min / 16)
        if level == catalogue.max_length:
            return over
        legal = children(states, catalogue, level=level)
        masked = mask_illegal(scores.view(*states.shape, -1), legal).flatten(0, 1)
        return torch.where(legal.legal.any(dim=-1).flatten()[:, None], masked, over)
