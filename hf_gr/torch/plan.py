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

from .noise import Noise

# (sequences [rows, P + T], scores [rows, V]) -> scores
Processor = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class DecodePlan:
    """The options of one call; names and meanings are transformers'.

    Attributes:
        prompt: the prompt's tokens, for processors and stopping criteria.
        num_beams: K; 1 decodes every path on its own (greedy, or sampling).
        num_return_sequences: R.
        num_kept: candidates kept a level: K, plus spares to replace beams that end here.
        do_sample: sample instead of taking the best.
        length_penalty: exponent of the length that scores are divided by.
        early_stopping: when a row with K complete sequences is done.
        max_new_tokens: the longest sequence that the heuristic of `early_stopping="never"` assumes.
        forces_end: whether the last of those tokens, the end token, is certain: transformers' `forced_eos_token_id`.
        fill_token_id: what follows the end of a sequence.
        missing_token_id: fills a row that has no sequence left; not `fill_token_id` if such a row would be a sequence
            of the catalogue.
        processors: logits processors before the constraint and after it; None if there are none, which saves all work
            as wide as the vocabulary except the normalisation.
        processor_width: paths a row that processors expect; None for as many as there are.
        tokens_per_beam: only so many of each beam's best tokens compete, legal or not (NEZHA, algorithm 3, line 19);
            None for all. Of calls without processors, among which it would be one.
        stopping_criteria: the user's own; sequences that meet them are complete.
        output_scores: keep the processed scores of every level.
        output_logits: keep the logits of every level.
        exit_early: leave the loop once nothing can change; off where several processes must run equally many forwards.
        is_relaxed: sampling beams accept drafted samples by relaxed verification; they compete even if there is only
            one.
        noise: what is drawn comes from; None if nothing is.
    """

    prompt: Int[Tensor, "batch prompt"]
    num_beams: int
    num_return_sequences: int
    num_kept: int
    do_sample: bool
    length_penalty: float
    early_stopping: bool | str
    max_new_tokens: int
    fill_token_id: int
    missing_token_id: int
    forces_end: bool = False
    processors: tuple[Processor, Processor] | None = None
    processor_width: int | None = None
    tokens_per_beam: int | None = None
    stopping_criteria: Callable[[Tensor], Tensor] | None = None
    output_scores: bool = False
    output_logits: bool = False
    exit_early: bool = True
    is_relaxed: bool = False
    noise: Noise | None = None

    @property
    def is_beam_search(self) -> bool:
        """Whether the paths of a row compete."""
        return self.num_beams > 1 or self.is_relaxed

    @property
    def width(self) -> int:
        """Paths a row."""
        return max(self.num_beams, self.num_return_sequences)

    def ends_together(self, *, is_ragged: bool) -> bool:
        """Whether all sequences are complete with the last level, and none before; `is_ragged` is the catalogue's."""
        return self.is_beam_search and not (is_ragged or self.do_sample or self.stopping_criteria is not None)

    @property
    def keeps_steps(self) -> bool:
        """Whether scores or logits of every level are outputs."""
        return self.output_scores or self.output_logits

    def apply(
        self,
        function: Callable[..., Tensor],
        sequences: Int[Tensor, "batch beams length"],
        *others: Float[Tensor, "batch beams *shape"],
    ) -> Tensor:
        """A user's function of full sequences, prompt included, one row a path; and of other values of each path.

        Such a function may know the rows of the call by their numbers: it gets all of them, also those that wait.

        Returns:
            What the function returned for each path.
        """
        num_beams = sequences.shape[1]
        prompt = self.prompt[:, None].expand(-1, num_beams, -1)
        full = torch.cat([prompt, sequences], dim=-1).flatten(0, 1)
        return function(full, *(values.flatten(0, 1) for values in others)).unflatten(0, (-1, num_beams))
