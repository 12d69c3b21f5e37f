# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafts in Flax: one class each, with the same few methods. Drafts nothing itself.

Knows no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from jax.sharding import Mesh

from hf_gr.catalogue.buckets import bucket
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.core.widths import STEPS, plan_first, plan_rest, plan_sizes
from hf_gr.flax.assistants import ModelDrafter
from hf_gr.flax.devices import replicated
from hf_gr.flax.draft_head import HeadScorer
from hf_gr.flax.drafters import TreeDrafter
from hf_gr.flax.model import FlaxModel
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.scorers import Params
from hf_gr.generation.checks import (
    check_assistant,
    check_codes,
    check_draft_width,
    check_room_for_drafts,
    check_room_for_placeholders,
    draft_budget,
)
from hf_gr.generation.configuration import VERIFICATION

from .prompts import HostPrompt

DRAFT_BEAMS_PER_BEAM = 2


class Draft:
    """No draft; and what all kinds have in common. Serves one call.

    Args:
        model: the model.
        config: the prepared config, with our fields.
        assistant: the draft model of the call, or None.
    """

    verifications: tuple[str, ...] = ("strict", "relaxed")  # that it has; the first one by default
    scores_ahead = False  # whether nodes of several levels are scored together
    searches = False  # whether a model or a head searches ahead
    calls_model = True  # whether the model decides levels after the prefill
    chosen: str | None = None  # the kind that "auto" has decided on; see `Speculation.chosen`

    def __init__(self, model: Any, config: Any, assistant: Any = None) -> None:
        self.model = model
        self.config = config
        self.assistant = assistant

    def check(self, prompt: HostPrompt, catalogue: Snapshot, *, given: Mapping[str, Any]) -> None:
        """Refuse drafts and verifications that Flax does not have."""
        drafting, verification = self.config.drafting, self.config.verification
        if verification not in (None, *self.verifications):
            what = "assistant_model" if drafting is None and self.assistant is not None else f"drafting={drafting!r}"
            by_head = VERIFICATION[verification].by_head_alone and not isinstance(self, HeadDraft)
            fix = "only a draft head decodes without the model" if by_head else "use backend='torch' for others"
            raise ValueError(
                f"verification={verification!r} with {what}, expected one of {self.verifications}: {fix}; omit it"
            )
        if self.config.verification == "relaxed" and self.config.num_return_sequences > self.config.num_beams:
            raise ValueError(
                f"num_return_sequences={self.config.num_return_sequences}, expected at most "
                f"num_beams={self.config.num_beams}: relaxed verification samples beams"
            )
        if given.get("num_draft_beams") is not None and not self.searches:
            raise ValueError(
                f"num_draft_beams={given['num_draft_beams']} without a draft model, expected both: "
                "pass assistant_model="
            )
        if given.get("draft_token_budget") is not None and not self.scores_ahead:
            raise ValueError(
                f"draft_token_budget={given['draft_token_budget']} without drafting, expected None: pass "
                "drafting='trie'"
            )

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """The plan of a call with its drafter, if there is one."""
        return plan

    def scorer(self, plan: DecodePlan, mesh: Mesh | None) -> tuple[Any, Params]:
        """The scorer that decides, with its parameters."""
        return self.model.scorer, self.model.params_on(mesh)

    def draft_params(self, mesh: Mesh | None) -> Params | None:
        """The parameters of what searches ahead, if something does."""
        return None


class TrieDraft(Draft):
    """The catalogue: its first levels with the prompt, as many as fit the budget; then all of it below the beams."""

    scores_ahead = True

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        drafter = self.tree(plan, catalogue, num_rows=num_rows)
        return replace(plan, drafter=drafter) if any(drafter.sizes) else plan

    def tree(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> TreeDrafter:
        """What the catalogue drafts."""
        budget = draft_budget(self.config, batch_size=num_rows, vocab_size=self.model.config.vocab_size)
        num_first, size = plan_first(_open_nodes(catalogue), plan.width, budget=budget)
        # A search below the prompt may miss a beam on any level, above all where processors rule tokens out.
        first = 1 if self.searches else 1 + num_first
        sizes = plan_sizes(_nodes_per_level(catalogue), plan.width, budget=budget, first=first)
        return TreeDrafter((size, *sizes[1:]), num_first, budget=budget, least=plan.width)


class AssistantDraft(TrieDraft):
    """A draft model's beams, and the catalogue below them once that fits the budget."""

    searches = True
    first_level = 0  # where a search begins

    def check(self, prompt: HostPrompt, catalogue: Snapshot, *, given: Mapping[str, Any]) -> None:
        """See `Draft.check`; also refuses models that cannot draft for this one."""
        super().check(prompt, catalogue, given=given)
        assistant = self.assistant
        if assistant is None:
            raise ValueError("drafting='assistant' without assistant_model, expected both: pass assistant_model=")
        if given.get("drafting") == "trie":
            raise ValueError(
                "drafting='trie' with assistant_model, expected one of them: drafting='assistant' uses both"
            )
        if not isinstance(assistant, FlaxModel):
            raise ValueError(
                f"assistant_model is a {type(assistant).__name__}, expected a FlaxModel like the model: load it with "
                "backend='flax'"
            )
        check_assistant(self.model, assistant)
        check_draft_width(self.config)
        check_room_for_drafts(assistant, catalogue, prompt.input_ids.shape[1], prompt.mask)

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        num_levels = catalogue.max_length
        if num_levels == 1:  # nothing to draft
            return plan
        tree = self.tree(plan, catalogue, num_rows=num_rows)
        num_beams = self.config.num_draft_beams or plan.width * (1 if plan.is_relaxed else DRAFT_BEAMS_PER_BEAM)
        # Relaxed answers would be further from the model's own with every level that is drafted: the first is exact.
        first_level = max(self.first_level, int(plan.is_relaxed))
        # In buckets, so that one program serves while a catalogue changes.
        whole = [bucket(number, steps=STEPS) for number in islice(_open_nodes(catalogue), tree.num_first)]
        drafter = ModelDrafter(
            self.draft_scorer(plan),
            num_beams,
            min(self.config.num_assistant_tokens, num_levels),
            num_levels,
            tree,
            plan_rest(_nodes_per_level(catalogue), num_beams, budget=tree.budget, least=plan.width),
            whole=() if first_level else tuple(whole),
            first_level=first_level,
            tail=self.tail,
        )
        return replace(plan, drafter=drafter)

    @property
    def tail(self) -> tuple[int, ...]:
        """What the model reads behind the prompt for the draft."""
        return ()

    def draft_scorer(self, plan: DecodePlan) -> Any:
        """The scorer that searches."""
        return self.assistant.scorer

    def draft_params(self, mesh: Mesh | None) -> Params | None:
        """See `Draft.draft_params`."""
        return self.assistant.params_on(mesh)


class HeadDraft(Draft):
    """The checkpoint's draft head, which decides alone after one prefill of the model."""

    verifications = ("catalogue", "strict", "relaxed")  # the last two by `SearchingHeadDraft`
    calls_model = False

    def check(self, prompt: HostPrompt, catalogue: Snapshot, *, given: Mapping[str, Any]) -> None:
        """See `Draft.check`; also refuses a head that does not fit the catalogue or the prompt."""
        super().check(prompt, catalogue, given=given)
        _check_head(self.model, prompt, catalogue, self.assistant)

    def scorer(self, plan: DecodePlan, mesh: Mesh | None) -> tuple[Any, Params]:
        """The head."""
        model, _ = super().scorer(plan, mesh)
        return _head_scorer(self.model, plan, model), _head_params(self.model, mesh)


class SearchingHeadDraft(AssistantDraft):
    """The checkpoint's draft head, which searches ahead; the model verifies, and reads the head's placeholders."""

    first_level = 1  # it continues from the model's own forward over the prompt

    def check(self, prompt: HostPrompt, catalogue: Snapshot, *, given: Mapping[str, Any]) -> None:
        """See `Draft.check`; also refuses a head that does not fit the catalogue or the prompt."""
        Draft.check(self, prompt, catalogue, given=given)
        _check_head(self.model, prompt, catalogue, self.assistant)
        check_draft_width(self.config)

    @property
    def tail(self) -> tuple[int, ...]:
        """See `AssistantDraft.tail`: the placeholders."""
        return tuple(self.model.draft_head.config.placeholder_token_ids)

    def draft_scorer(self, plan: DecodePlan) -> Any:
        """See `AssistantDraft.draft_scorer`."""
        return _head_scorer(self.model, plan, self.model.scorer)

    def draft_params(self, mesh: Mesh | None) -> Params | None:
        """See `Draft.draft_params`."""
        return _head_params(self.model, mesh)


def _check_head(model: Any, prompt: HostPrompt, catalogue: Snapshot, assistant: Any) -> None:
    if assistant is not None:
        raise ValueError("assistant_model is given with drafting='head', expected None: the head drafts; omit one")
    if model.draft_head is None:
        raise ValueError(
            "drafting='head' and the model has no draft head, expected one: load a checkpoint that has one; heads "
            "are made and trained in PyTorch"
        )
    check_codes(model.draft_head, catalogue)
    check_room_for_placeholders(model.draft_head, model.config, prompt.length)


def _head_scorer(model: Any, plan: DecodePlan, reader: Any) -> HeadScorer:
    """The head's scorer; outputs and processors need scores over the whole vocabulary."""
    is_wide = plan.output_scores or plan.output_logits or plan.processors is not None
    return HeadScorer(model.draft_head.config, reader, vocab_size=model.spec.vocab_size if is_wide else None)


def _head_params(model: Any, mesh: Mesh | None) -> Params:
    return {"model": model.params_on(mesh), "head": model.draft_head.params_on(replicated(mesh))}


KINDS: dict[str | None, type[Draft]] = {
    None: Draft,
    "trie": TrieDraft,
    "assistant": AssistantDraft,
    "head": HeadDraft,
}


def draft_of(model: Any, config: Any, assistant: Any = None, mesh: Mesh | None = None) -> Draft:
    """The draft of a call: a draft model is used whenever there is one."""
    if config.drafting == "auto":
        from .auto import AutoDraft  # which has these kinds

        return AutoDraft(model, config, assistant, mesh)
    kind = KINDS[config.drafting]
    if config.drafting == "head" and config.verification in SearchingHeadDraft.verifications:
        kind = SearchingHeadDraft
    elif assistant is not None and config.drafting in (None, "trie"):
        kind = AssistantDraft
    return kind(model, config, assistant)


def _nodes_per_level(catalogue: Snapshot) -> tuple[int, ...]:
    """Nodes with 0 to L - 1 tokens that have children, and those with L."""
    fanouts = catalogue.trie.fanouts
    return (*(int(fanout.num_parents - fanout.num_childless) for fanout in fanouts), int(fanouts[-1].num_children))


def _open_nodes(catalogue: Snapshot) -> Iterator[int]:
    """Nodes with children, by level from 1 to L - 1, what was removed included: no request has more."""
    return iter(_nodes_per_level(catalogue)[1:-1])
