# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The options of one call, in the loop's terms. Decodes nothing.

Axes: B batch, K beams, V vocabulary, P prompt, T generated tokens, R returned sequences a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.core.plan import Options

from .noise import Noise

# (sequences [rows, P + T], scores [rows, V]) -> scores
Processor = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class DecodePlan(Options):
    """The options of one call."""

    prompt: Int[Tensor, "batch prompt"]  # for processors and stopping criteria
    # Before the constraint and after it; None saves all work as wide as the vocabulary but the normalisation.
    processors: tuple[Processor, Processor] | None = None
    processor_width: int | None = None  # paths a row that processors expect; None for as many as there are
    # Only so many of each beam's best tokens compete, legal or not (NEZHA, algorithm 3, line 19); without processors.
    tokens_per_beam: int | None = None
    stopping_criteria: Callable[[Tensor], Tensor] | None = None  # the user's own
    noise: Noise | None = None  # None if nothing is drawn

    @property
    def has_criteria(self) -> bool:
        """See `Options.has_criteria`."""
        return self.stopping_criteria is not None

    def meets_criteria(self, sequences: Int[Tensor, "batch kept length"], *, max_length: int) -> Tensor:
        """See `Options.meets_criteria`."""
        assert self.stopping_criteria is not None
        return self.apply(self.stopping_criteria, sequences)

    def apply(
        self,
        function: Callable[..., Tensor],
        sequences: Int[Tensor, "batch beams length"],
        *others: Float[Tensor, "batch beams *shape"],
    ) -> Tensor:
        """A user's function of full sequences, one row a path: all rows of the call, also those that wait."""
        num_beams = sequences.shape[1]
        prompt = self.prompt[:, None].expand(-1, num_beams, -1)
        full = torch.cat([prompt, sequences], dim=-1).flatten(0, 1)
        return function(full, *(values.flatten(0, 1) for values in others)).unflatten(0, (-1, num_beams))
