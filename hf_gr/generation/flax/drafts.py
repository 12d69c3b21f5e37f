# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafts in Flax: one class each, with the same few methods. Drafts nothing itself.

Knows no PyTorch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.core.widths import STEPS, bucket, plan_first, plan_rest, plan_sizes
from hf_gr.flax.assistants import ModelDrafter
from hf_gr.flax.devices import DATA, replicated, settings_of_ours
from hf_gr.flax.draft_head import HeadScorer
from hf_gr.flax.drafters import TreeDrafter
from hf_gr.flax.model import FlaxModel
from hf_gr.flax.scorers import Params
from hf_gr.flax.scores import DecodePlan
from hf_gr.generation.call import Prompt
from hf_gr.generation.defaults import draft_budget
from hf_gr.generation.drafts import BaseDraft, fastest
from hf_gr.generation.messages import say_once

from .prompts import to_bucket


class Draft(BaseDraft):
    """No draft; and what all kinds in Flax have in common. Serves one call."""

    lacks = ("last_level", "none")

    def not_a_model(self, assistant: Any) -> str | None:
        """See `BaseDraft.not_a_model`."""
        return None if isinstance(assistant, FlaxModel) else "a FlaxModel like the model: load it with backend='flax'"

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
    """The catalogue: as many of its first levels as fit, with the prompt; then its whole subtree below the beams."""

    scores_ahead = True

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        drafter = self.tree(plan, catalogue, num_rows=num_rows)
        return replace(plan, drafter=drafter) if any(drafter.sizes) else plan

    def tree(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> TreeDrafter:
        """What the catalogue drafts."""
        budget = draft_budget(self.config, batch_size=num_rows, vocab_size=self.model.config.vocab_size)
        nodes = _nodes_per_level(catalogue)
        num_first, size = plan_first(nodes[1:-1], plan.width, budget=budget)
        # A search below the prompt may miss a beam on any level, above all where processors rule tokens out.
        first = 1 if self.searches else 1 + num_first
        sizes = plan_sizes(nodes, plan.width, budget=budget, first=first)
        return TreeDrafter((size, *sizes[1:]), num_first, budget=budget, least=plan.width)


class AssistantDraft(TrieDraft):
    """A draft model's beams, and the catalogue below them once that fits the budget."""

    searches = "assistant"
    first_level = 0  # where a search begins
    tail: Any = ()  # tokens that the model reads after the prompt, for the draft

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        num_levels = catalogue.max_length
        if num_levels == 1:  # nothing to draft
            return plan
        tree, nodes = self.tree(plan, catalogue, num_rows=num_rows), _nodes_per_level(catalogue)
        num_beams, first_level = self.draft_beams(plan)
        first_level = max(self.first_level, first_level)
        # In buckets, so that one program serves while a catalogue changes.
        whole = [bucket(number, steps=STEPS) for number in nodes[1:-1][: tree.num_first]]
        drafter = ModelDrafter(
            self.draft_scorer(plan),
            num_beams,
            min(self.config.num_assistant_tokens, num_levels),
            num_levels,
            tree,
            plan_rest(nodes, num_beams, budget=tree.budget, least=plan.width),
            whole=() if first_level else tuple(whole),
            first_level=first_level,
            tail=self.tail,
        )
        return replace(plan, drafter=drafter)

    def draft_scorer(self, plan: DecodePlan) -> Any:
        """The scorer that searches."""
        return self.assistant.scorer

    def draft_params(self, mesh: Mesh | None) -> Params | None:
        """See `Draft.draft_params`."""
        return self.assistant.params_on(mesh)


class HeadDraft(AssistantDraft):
    """The checkpoint's draft head: it decides alone after one prefill of the model, or searches ahead for it."""

    searches = "head"
    first_level = 1  # it continues from the model's own forward over the prompt

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        return plan if self.verification.by_head_alone else super().plan(plan, catalogue, num_rows=num_rows)

    def scorer(self, plan: DecodePlan, mesh: Mesh | None) -> tuple[Any, Params]:
        """See `Draft.scorer`."""
        if self.verification.by_head_alone:
            return self.draft_scorer(plan), self.draft_params(mesh)
        return super().scorer(plan, mesh)

    @property
    def tail(self) -> tuple[int, ...]:
        """See `AssistantDraft.tail`: the placeholders."""
        return tuple(self.model.draft_head.config.placeholder_token_ids)

    def draft_scorer(self, plan: DecodePlan) -> Any:
        """The head's scorer; outputs and processors need scores over the whole vocabulary."""
        model, is_wide = self.model, plan.keeps_steps or plan.processors is not None
        vocab_size = model.spec.vocab_size if is_wide else None
        return HeadScorer(model.draft_head.config, model.scorer, vocab_size=vocab_size)

    def draft_params(self, mesh: Mesh | None) -> Params:
        """See `Draft.draft_params`."""
        return {"model": self.model.params_on(mesh), "head": self.model.draft_head.params_on(replicated(mesh))}


# By what `drafting` calls them; "auto" chooses among these.
KINDS: Mapping[str | None, type[Draft]] = {
    None: Draft,
    "trie": TrieDraft,
    "assistant": AssistantDraft,
    "head": HeadDraft,
}


def draft_of(
    drafts: Mapping[str | None, Draft],
    prompt: Prompt,
    catalogue: Snapshot,
    plan: DecodePlan,
    mesh: Mesh | None,
    *,
    num_rows: int,
) -> Draft:
    """The draft of a call, of several the fastest."""
    draft = next(iter(drafts.values()))
    if draft.config.exact and (draft.searches or draft.config.drafting):
        if draft.searches:
            say_once(f"drafting={draft.searches!r} with exact=True is 'trie' in Flax: what else drafts is not asked")
        draft = TrieDraft(draft.model, draft.config)
        draft.chosen = "trie" if draft.config.drafting == "auto" else None
        return draft
    if draft.config.drafting != "auto":
        return draft
    model, rows = draft.model, num_rows // (1 if mesh is None else mesh.shape[DATA])  # of one device

    @cache
    def prefilled() -> tuple[Any, Params, Any]:
        """A compiled scorer, its parameters, and the cache of the prompts."""
        scorer, params = model.scorer, model.params_on(mesh)
        _, memory = jax.jit(scorer.prefill)(params, to_bucket(prompt.inputs, prompt.mask, prompt.start, rows))
        return jax.jit(scorer.score), params, memory

    def timed_forward(num_nodes: int) -> Callable[[], Any]:
        def forward() -> None:
            with settings_of_ours(mesh):
                score, params, memory = prefilled()
                tokens = jnp.zeros((rows, num_nodes), dtype=jnp.int32)
                visible = jnp.broadcast_to(jnp.eye(num_nodes, dtype=bool), (rows, num_nodes, num_nodes))
                jax.block_until_ready(score(params, memory, tokens, tokens + 1, visible)[0])

        return forward

    return fastest(
        drafts,
        catalogue,
        kind=(mesh, rows),
        num_beams=plan.width,
        budget=draft_budget(draft.config, batch_size=num_rows, vocab_size=model.config.vocab_size),
        below_prompt=True,
        timed_forward=timed_forward,
    )


def _nodes_per_level(catalogue: Snapshot) -> tuple[int, ...]:
    """Nodes with 0 to L - 1 tokens that have children, and those with L; what was removed included."""
    fanouts = catalogue.trie.fanouts
    return (*(int(fanout.num_parents - fanout.num_childless) for fanout in fanouts), int(fanouts[-1].num_children))
