# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The options of one call. Decides nothing."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Bool, Int

from hf_gr.core.plan import Options, static

from .arrays import Number
from .processors import Processors


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodePlan(Options):
    """The options of one call."""

    top_k: int | None = static(default=None)  # number of children to sample from; None for all
    min_tokens_to_keep: int = static(default=1)  # children that every warper keeps
    renormalize_logits: bool = static(default=False)  # normalise scores over the legal tokens of each step
    drafter: Any = static(default=None)  # proposes nodes to score ahead: `drafters.TreeDrafter`; None for no draft
    # the mesh axis over which rows that advance together are sharded; None if these advance alone
    rows_axis: str | None = static(default=None)
    temperature: Number | None = None  # divisor of scores; None for none
    top_p: Number | None = None  # total probability of the children to sample from; None for all
    min_p: Number | None = None  # the least probability of those, relative to the largest; None for any
    processors: Processors | None = None  # what else changes scores or ends sequences; None for nothing

    @property
    def has_criteria(self) -> bool:
        """See `Options.has_criteria`."""
        return self.processors is not None and bool(self.processors.criteria)

    def meets_criteria(
        self, sequences: Int[Array, "batch kept length"], *, max_length: int
    ) -> Bool[Array, "batch kept"]:
        """See `Options.meets_criteria`."""
        assert self.processors is not None
        return self.processors.ended(sequences, room=max_length)
