# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The options of one call. Decides nothing.

Axes: B batch, K beams, R returned sequences a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from .arrays import Number, WholeNumber, static
from .processors import Processors
from .speculation import Drafter


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The options of one call; names and meanings are transformers'.

    Attributes:
        num_beams: K; 1 decodes every path on its own (greedy, or sampling). Static, as are all up to `rows_axis`.
        num_return_sequences: R.
        num_kept: candidates kept a level: K, plus spares to replace beams that end here.
        do_sample: sample instead of taking the best.
        early_stopping: when a row with K complete sequences is done.
        top_k: number of children to sample from; None for all.
        min_tokens_to_keep: children that every warper keeps.
        renormalize_logits: normalise scores over the legal tokens of each step.
        forces_end: whether the longest sequences' last token, the end token, is certain: transformers'
            `forced_eos_token_id`.
        output_scores: keep the processed scores of every level.
        output_logits: keep the logits of every level.
        exit_early: skip levels once nothing can change.
        drafter: proposes nodes to score ahead; None for no draft.
        is_relaxed: sampling beams accept drafted samples by relaxed verification; they compete even if there is only
            one.
        rows_axis: the mesh axis over which rows that advance together are sharded; None if these advance alone.
        length_penalty: exponent of the length that scores are divided by. This and the following may change from call
            to call without a new program.
        max_new_tokens: the longest sequence that the heuristic of `early_stopping="never"` assumes.
        fill_token_id: what follows the end of a sequence.
        missing_token_id: fills a row that has no sequence left; not `fill_token_id` if such a row would be a sequence
            of the catalogue.
        temperature: divisor of scores; None for none.
        top_p: total probability of the children to sample from; None for all.
        min_p: the least probability of those, relative to the largest; None for any.
        processors: what else changes scores or ends sequences; None for nothing, which is faster.
    """

    num_beams: int = static()
    num_return_sequences: int = static()
    num_kept: int = static()
    do_sample: bool = static()
    early_stopping: bool | str = static()
    top_k: int | None = static(default=None)
    min_tokens_to_keep: int = static(default=1)
    renormalize_logits: bool = static(default=False)
    forces_end: bool = static(default=False)
    output_scores: bool = static(default=False)
    output_logits: bool = static(default=False)
    exit_early: bool = static(default=True)
    drafter: Drafter | None = static(default=None)
    is_relaxed: bool = static(default=False)
    rows_axis: str | None = static(default=None)
    length_penalty: Number = 1.0
    max_new_tokens: WholeNumber = 0
    fill_token_id: WholeNumber = -1
    missing_token_id: WholeNumber = -1
    temperature: Number | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    processors: Processors | None = None

    @property
    def is_beam_search(self) -> bool:
        """Whether the paths of a row compete."""
        return self.num_beams > 1 or self.is_relaxed

    @property
    def keeps_steps(self) -> bool:
        """Whether outputs of every level are wanted."""
        return self.output_scores or self.output_logits

    @property
    def has_criteria(self) -> bool:
        """Whether sequences may end before the catalogue's."""
        return self.processors is not None and bool(self.processors.criteria)

    @property
    def width(self) -> int:
        """Paths a row."""
        return max(self.num_beams, self.num_return_sequences)
