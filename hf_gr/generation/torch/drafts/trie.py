# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="trie"`: the catalogue drafts wherever all legal nodes fit a budget. Nothing can be missing."""

from __future__ import annotations

from itertools import chain
from typing import Any

from hf_gr.generation.checks import draft_budget
from hf_gr.generation.messages import say_once
from hf_gr.generation.torch.logits_process import keeper_of_state
from hf_gr.generation.torch.models import output_size_of
from hf_gr.torch.decode import Decoded
from hf_gr.torch.drafters import Assistant, TreeDrafter
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import DeviceCatalogue

from .base import Draft, Prepared, Search


class TrieDraft(Draft):
    """All legal continuations of the beams; and what all kinds that draft have in common."""

    scores_ahead = True

    def drafter(self, prepared: Prepared, catalogue: DeviceCatalogue, scorer: Scorer) -> TreeDrafter | None:
        """See `Draft.drafter`."""
        if prepared.synced_gpus:
            say_once("synced_gpus: decoding without a draft: processes would run different numbers of forwards")
            return None
        processors: Any = prepared.plan.processors or ()
        if (keeper := keeper_of_state(chain.from_iterable(processors))) is not None:  # rows go on by themselves
            say_once(f"{type(keeper).__name__} keeps state between levels: decoding without a draft")
            return None
        if catalogue.max_length <= (1 if scorer.takes_prompt else 2):  # every level needs a forward in any case
            return None
        batch_size, vocab_size = len(prepared.input_ids), output_size_of(self.model)
        budget = draft_budget(self.config, batch_size=batch_size, vocab_size=vocab_size)
        return TreeDrafter(budget=budget, assistant=self.searcher(prepared, vocab_size))

    def searcher(self, prepared: Prepared, vocab_size: int) -> Assistant | None:
        """The search that narrows levels too wide for the catalogue; None for no search."""
        return None

    def report(self, search: Search, decoded: Decoded) -> None:
        """Log once that a budget is too small for any level."""
        drafter, happened = search.drafter, decoded.speculation
        if not isinstance(drafter, TreeDrafter) or drafter.assistant is not None:
            return
        if happened.target_forwards and not happened.drafted_steps.any():
            say_once(
                f"draft_token_budget={drafter.budget} is too small for any level of this catalogue with "
                f"num_beams={self.config.num_beams}: decoding without a draft",
                about="draft_token_budget",
            )
