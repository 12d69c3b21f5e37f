# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"` in Flax: the draft that `hf_gr.core.auto` expects to be the fastest; times forwards for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.flax.devices import DATA, settings_of_ours
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.scorers import Params
from hf_gr.generation.checks import draft_budget
from hf_gr.generation.drafts import BaseAuto

from .drafts import AssistantDraft, Draft, SearchingHeadDraft, TrieDraft


class AutoDraft(BaseAuto, Draft):
    """A call served by whichever draft is expected to be the fastest."""

    kinds = {"none": Draft, "trie": TrieDraft, "head": SearchingHeadDraft, "assistant": AssistantDraft}
    served_by: Draft  # after `plan`

    def __init__(self, model: Any, config: Any, assistant: Any, mesh: Mesh | None) -> None:
        super().__init__(model, config, assistant)
        self.mesh = mesh

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        self.num_rows = num_rows // (1 if self.mesh is None else self.mesh.shape[DATA])  # of one device
        self.served_by = self.decide(
            catalogue,
            kind=(self.mesh, self.num_rows),
            num_beams=plan.width,
            budget=draft_budget(self.config, batch_size=num_rows, vocab_size=self.model.config.vocab_size),
            below_prompt=True,
        )
        self.__dict__.pop("_prefilled", None)  # frees what was computed of the prompts
        return self.served_by.plan(plan, catalogue, num_rows=num_rows)

    def draft_params(self, mesh: Mesh | None) -> Params | None:
        """See `Draft.draft_params`."""
        return self.served_by.draft_params(mesh)

    @cached_property
    def _prefilled(self) -> tuple[Any, Params, Any]:
        """A compiled scorer, its parameters, and the cache of the prompts."""
        scorer, params = self.model.scorer, self.model.params_on(self.mesh)
        _, memory = jax.jit(scorer.prefill)(params, self.prompt.to_bucket(self.num_rows))
        return jax.jit(scorer.score), params, memory

    def timed_forward(self, num_nodes: int) -> Callable[[], Any]:
        """See `BaseAuto.timed_forward`."""
        shape = self.num_rows, num_nodes

        def forward() -> None:
            with settings_of_ours(self.mesh):
                score, params, memory = self._prefilled
                tokens = jnp.zeros(shape, dtype=jnp.int32)
                visible = jnp.broadcast_to(jnp.eye(num_nodes, dtype=bool), (*shape, num_nodes))
                jax.block_until_ready(score(params, memory, tokens, tokens + 1, visible)[0])

        return forward
