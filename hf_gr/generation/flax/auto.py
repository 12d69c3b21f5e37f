# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"` in Flax: the draft that `hf_gr.core.auto` expects to be the fastest; times forwards for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.core.auto import decide
from hf_gr.flax.devices import DATA, settings_of_ours
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.scorers import Params
from hf_gr.generation.checks import draft_budget
from hf_gr.generation.drafts import BaseAuto

from .drafts import AssistantDraft, Draft, SearchingHeadDraft, TrieDraft
from .prompts import HostPrompt


class AutoDraft(BaseAuto, Draft):
    """A call served by whichever draft is expected to be the fastest."""

    kinds = {"none": Draft, "trie": TrieDraft, "head": SearchingHeadDraft, "assistant": AssistantDraft}
    served_by: Draft  # after `plan`

    def __init__(self, model: Any, config: Any, assistant: Any, mesh: Mesh | None) -> None:
        super().__init__(model, config, assistant)
        self.mesh = mesh

    def check(
        self,
        prompt: HostPrompt,
        catalogue: Snapshot,
        *,
        given: Mapping[str, Any],
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """See `BaseAuto.check`."""
        self.prompt = prompt
        super().check(prompt, catalogue, given=given, model_kwargs=model_kwargs)

    def plan(self, plan: DecodePlan, catalogue: Snapshot, *, num_rows: int) -> DecodePlan:
        """See `Draft.plan`."""
        config = copy.copy(self.config)
        rows = num_rows // (1 if self.mesh is None else self.mesh.shape[DATA])  # of one device
        self.chosen, config.draft_token_budget = decide(
            self.model,
            self.assistant,
            config,
            self.candidates,
            catalogue,
            self._timed_forwards(rows),
            kind=(self.mesh, rows),
            num_beams=plan.width,
            budget=draft_budget(config, batch_size=num_rows, vocab_size=self.model.config.vocab_size),
            below_prompt=True,
        )
        self.served_by = self.candidates[self.chosen]
        self.served_by.config = config
        return self.served_by.plan(plan, catalogue, num_rows=num_rows)

    def scorer(self, plan: DecodePlan, mesh: Mesh | None) -> tuple[Any, Params]:
        """See `Draft.scorer`."""
        return self.served_by.scorer(plan, mesh)

    def draft_params(self, mesh: Mesh | None) -> Params | None:
        """See `Draft.draft_params`."""
        return self.served_by.draft_params(mesh)

    @property
    def calls_model(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Draft.calls_model`."""
        return self.served_by.calls_model

    def _timed_forwards(self, num_rows: int) -> Callable[[int], Callable[[], None]]:
        """Prepares forwards of nodes after the prompts, which are computed with the first one."""
        model, mesh = self.model, self.mesh
        score = jax.jit(model.scorer.score)

        @cache
        def prefill() -> tuple[Params, Any]:
            params = model.params_on(mesh)
            return params, jax.jit(model.scorer.prefill)(params, self.prompt.to_bucket(num_rows))[1]

        def new_forward(num_nodes: int) -> Callable[[], None]:
            def forward() -> None:
                with settings_of_ours(mesh):
                    params, memory = prefill()
                    depths = jnp.ones((num_rows, num_nodes), dtype=jnp.int32)
                    visible = jnp.broadcast_to(jnp.eye(num_nodes, dtype=bool), (num_rows, num_nodes, num_nodes))
                    jax.block_until_ready(score(params, memory, jnp.zeros_like(depths), depths, visible)[0])

            return forward

        return new_forward
