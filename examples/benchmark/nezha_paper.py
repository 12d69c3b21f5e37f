# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""NEZHA's search and verification as its paper writes them. Knows no trie and no `generate`.

All items are packed into sorted integers (equation 4). The head searches without any constraint; at the last level the
candidates of all beams are packed, too, and those that a binary search does not find are dropped (equation 5). Source:
NEZHA, algorithm 3, lines 13 to 30. The paper speaks of a hash set; its code searches a sorted array, as here.

Axes: B batch, P prompt, K beams, C best codes of a beam, L levels, T_l codes of level l, N items, H hidden size.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_gr.torch.draft_head import DraftHead


@dataclass(frozen=True)
class Packing:
    """Semantic IDs as integers: mixed-radix numbers whose first digit is the first level's code.

    Attributes:
        sizes: T_l of every level.
        factors: of a level's code in the sum of equation 4.
    """

    sizes: tuple[int, ...]
    factors: tuple[int, ...]

    @classmethod
    def of(cls, head: DraftHead) -> Packing:
        """For the codes of a head.

        Raises:
            ValueError: the largest number does not fit into 64 bits.
        """
        sizes = head.config.codebook_sizes
        if math.prod(sizes) >= 2**63:
            raise ValueError(f"codebooks of {sizes} codes have 2^63 combinations or more, expected fewer: no int64")
        return cls(sizes, tuple(math.prod(sizes[:level]) for level in range(len(sizes))))

    def pack(self, codes: Tensor) -> Tensor:
        """`[..., L]` places of codes in their codebooks -> `[...]`. Source: NEZHA, equation 4."""
        return (codes * torch.tensor(self.factors)).sum(dim=-1)

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse."""
        return torch.stack(
            [packed // factor % size for factor, size in zip(self.factors, self.sizes, strict=True)], dim=-1
        )


@dataclass(frozen=True)
class ValidIds:
    """The set of all valid semantic IDs.

    Attributes:
        packed: `[N]`, sorted.
    """

    packed: Tensor

    @classmethod
    def of(cls, tokens: np.ndarray, head: DraftHead) -> ValidIds:
        """Of the `[N, L]` tokens of a catalogue."""
        columns = [head.columns(torch.from_numpy(level), level=number) for number, level in enumerate(tokens.T)]
        return cls(Packing.of(head).pack(torch.stack(columns, dim=-1)).unique())

    def contain(self, packed: Tensor) -> Tensor:
        """Which numbers are of the set. Source: NEZHA, equation 5."""
        places = torch.searchsorted(self.packed, packed).clamp(max=len(self.packed) - 1)
        return self.packed[places] == packed


@dataclass(frozen=True)
class Found:
    """What a search returns.

    Attributes:
        tokens: `[B, K, L]`, best first.
        scores: `[B, K]` sums of log-probabilities; `-inf` where verification left too few.
        verify_seconds: of equations 4 and 5.
    """

    tokens: Tensor
    scores: Tensor
    verify_seconds: float


@torch.inference_mode()
def read_prompt(model: Any, prompt: dict[str, Tensor]) -> Tensor:
    """`[B, L + 1, H]` hidden states of the prompt's last token and of the placeholders after it: line 13."""
    ids = torch.tensor(model.draft_head.config.placeholder_token_ids, dtype=torch.long)
    input_ids = torch.cat([prompt["input_ids"], ids.expand(len(prompt["input_ids"]), -1)], dim=1)
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, len(ids)), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    states = model.model(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return states.last_hidden_state[:, -len(ids) - 1 :]


@torch.inference_mode()
def search(head: DraftHead, hidden: Tensor, *, num_beams: int, valid: ValidIds | None) -> Found:
    """Beam search by the head alone: lines 14 to 30.

    Args:
        head: the head.
        hidden: `[B, L + 1, H]`, from `read_prompt`.
        num_beams: K.
        valid: what the last level's candidates must be among; None for no verification (NEZHA-4).
    """
    packing = Packing.of(head)
    states, scores = hidden[:, :1], hidden.new_zeros(len(hidden), 1)
    packed = torch.zeros(len(hidden), 1, dtype=torch.long)  # the beams' own, as far as they go
    seconds = 0.0
    for level, (size, factor) in enumerate(zip(packing.sizes, packing.factors, strict=True)):
        log_probs = head.logits(states, hidden, level=level).log_softmax(dim=-1)
        best, codes = log_probs.topk(min(num_beams, size))  # line 19
        candidates = scores[..., None] + best
        start = time.perf_counter()
        longer = packed[..., None] + codes * factor
        if level == head.config.num_levels - 1 and valid is not None:
            candidates = candidates.masked_fill(~valid.contain(longer), -torch.inf)
            seconds = time.perf_counter() - start
        flat = candidates.flatten(1)
        scores, kept = flat.topk(min(num_beams, flat.shape[1]))  # line 27
        packed = longer.flatten(1).gather(1, kept)
        if level < head.config.num_levels - 1:
            parents = (kept // best.shape[2])[..., None].expand(-1, -1, states.shape[-1])
            tokens = head.codebook(level)[codes.flatten(1).gather(1, kept)]
            states = head.advance(states.gather(1, parents), tokens, level=level)
    columns = packing.unpack(packed)
    tokens = [head.codebook(level)[columns[..., level]] for level in range(head.config.num_levels)]
    return Found(torch.stack(tokens, dim=-1), scores, seconds)
