# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafts in Flax: one class each, with the same few methods. Drafts nothing itself.

Knows no PyTorch. Other kinds draft in PyTorch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
from jax.sharding import Mesh

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.flax.decode import Decoded, DecodePlan
from hf_gr.flax.devices import replicated
from hf_gr.flax.draft_head import HeadScorer
from hf_gr.flax.drafters import TreeDrafter, plan_first, plan_sizes
from hf_gr.flax.scorers import Params
from hf_gr.flax.transition import DeviceCatalogue
from hf_gr.generation.checks import check_codes, check_room_for_placeholders, draft_budget

from .prompts import HostPrompt


class Draft:
    """No draft; and what all kinds have in common. Serves one call.

    Args:
        model: the model.
        config: the prepared config, with our fields.
    """

    verification = "strict"
    calls_model = True  # whether the model decides levels after the prefill

    def __init__(self, model: Any, config: Any) -> None:
        self.model = model
        self.config = config

    def check(self, prompt: HostPrompt, catalogue: Snapshot, *, given: Mapping[str, Any]) -> None:
        """Refuse drafts and verifications that Flax does not have.

        Args:
            prompt: the prompt.
            catalogue: the catalogue of any row.
            given: our fields as given in the call itself.

        Raises:
            ValueError: names the field, its value, what is expected, and the fix.
        """
        drafting, verification = self.config.drafting, self.config.verification
        if verification not in (None, self.verification):
            raise ValueError(
                f"verification={verification!r} with drafting={drafting!r}, expected {self.verification!r}: Flax has "
                "no other; omit it, or use backend='torch'"
            )
        if given.get("num_draft_beams") is not None:
            raise ValueError(
                f"num_draft_beams={given['num_draft_beams']}, expected None in Flax, which has no draft beams: omit it"
            )
        if given.get("draft_token_budget") is not None and drafting is None:
            raise ValueError(
                f"draft_token_budget={given['draft_token_budget']} without drafting, expected None: pass "
                "drafting='trie'"
            )

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """The plan of a call with its drafter, if there is one.

        Args:
            plan: the options.
            catalogue: the catalogue of any row.
            num_rows: B of the program.
        """
        return plan

    def scorer(self, plan: DecodePlan, mesh: Mesh | None) -> tuple[Any, Params]:
        """The scorer that decides, with its parameters.

        Args:
            plan: the options.
            mesh: where the program runs.
        """
        return self.model.scorer, self.model.params_on(mesh)

    def report(self, decoded: Decoded, catalogue: DeviceCatalogue) -> None:
        """Note what happened in the call.

        Args:
            decoded: what the program returned.
            catalogue: what it was given.
        """

    @property
    def chosen(self) -> str | None:
        """The kind that "auto" has decided on; see `Speculation.chosen`."""
        return None


class TrieDraft(Draft):
    """The catalogue: its first levels with the prompt, as many as fit the budget; then all of it below the beams."""

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        budget = draft_budget(self.config, batch_size=num_rows, vocab_size=self.model.config.vocab_size)
        num_first, size = plan_first(_open_nodes(catalogue), plan.width, budget=budget)
        sizes = plan_sizes(_nodes_per_level(catalogue), plan.width, budget=budget, first=1 + num_first)
        drafter = TreeDrafter((size, *sizes[1:]), num_first)
        return replace(plan, drafter=drafter) if any(drafter.sizes) else plan


class HeadDraft(Draft):
    """The checkpoint's draft head, which decides alone after one prefill of the model."""

    verification = "catalogue"
    calls_model = False

    def check(self, prompt: HostPrompt, catalogue: Snapshot, *, given: Mapping[str, Any]) -> None:
        """See `Draft.check`; also refuses a head that does not fit the catalogue or the prompt."""
        super().check(prompt, catalogue, given=given)
        head = self.model.draft_head
        if head is None:
            raise ValueError(
                "drafting='head' and the model has no draft head, expected one: load a checkpoint that has one; heads "
                "are made and trained in PyTorch"
            )
        check_codes(head, catalogue)
        check_room_for_placeholders(head, self.model.config, prompt.length)

    def scorer(self, plan: DecodePlan, mesh: Mesh | None) -> tuple[Any, Params]:
        """The head; outputs need scores over the whole vocabulary."""
        model, params = super().scorer(plan, mesh)
        head, is_wide = self.model.draft_head, plan.output_scores or plan.output_logits or plan.processors is not None
        scorer = HeadScorer(head.config, model, vocab_size=self.model.spec.vocab_size if is_wide else None)
        return scorer, {"model": params, "head": head.params_on(replicated(mesh))}


KINDS = {None: Draft, "trie": TrieDraft, "head": HeadDraft}


def draft_of(model: Any, config: Any) -> Draft:
    """The draft of a call.

    Raises:
        ValueError: a kind that drafts in PyTorch only.
    """
    if config.drafting == "auto":
        from .auto import AutoDraft  # which has these kinds

        return AutoDraft(model, config)
    if config.drafting not in KINDS:
        raise ValueError(
            f"drafting={config.drafting!r}, expected None, 'trie', 'head' or 'auto' in Flax: Flax has no other "
            "drafts, or use backend='torch'"
        )
    return KINDS[config.drafting](model, config)


def _nodes_per_level(catalogue: Snapshot) -> tuple[int, ...]:
    """Nodes with 0 to L tokens in the compiled part; additions are few, and would change a program's shapes."""
    starts = catalogue.base.segment.trie.level_starts
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    # Levels that only additions have repeat the last one.
    return tuple(
        counts[-1] if count is None else int(count)
        for count, _ in zip_longest(counts, range(catalogue.max_length + 1))
    )


def _open_nodes(catalogue: Snapshot) -> Iterator[int]:
    """Nodes with children, by level from 1 to L - 1, additions and what was removed included: no request has more."""
    base = catalogue.base.segment.trie
    for level in range(1, catalogue.max_length):
        number = 0
        if level < base.max_length:
            number = base.fanouts[level].num_parents - base.fanouts[level].num_childless
        if catalogue.added is not None and level < catalogue.added.segment.trie.max_length:
            assert catalogue.twins is not None
            trie = catalogue.added.segment.trie
            nodes = np.arange(*trie.level_starts[level : level + 2])
            is_new = np.subtract(*trie.children(nodes, level)) < 0
            if level < base.max_length:
                is_new &= np.subtract(*base.children(catalogue.twins[nodes], level)) == 0
            number += int(np.count_nonzero(is_new))
        yield number
