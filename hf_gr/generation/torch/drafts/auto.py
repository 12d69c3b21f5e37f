# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: the draft that `hf_gr.core.auto` expects to be the fastest; times forwards for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hf_gr.core.auto import decide
from hf_gr.generation.checks import draft_budget
from hf_gr.generation.drafts import BaseAuto
from hf_gr.generation.internals import attention_of
from hf_gr.generation.torch.layouts import ordinary_tokens, prefilled
from hf_gr.generation.torch.models import output_size_of
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.tree import Nodes

from . import Draft, Prepared, Search
from .assistant import AssistantDraft
from .head import HeadDraft
from .trie import TrieDraft


class AutoDraft(BaseAuto, Draft):
    """A call served by whichever draft is expected to be the fastest."""

    kinds = {"none": Draft, "trie": TrieDraft, "head": HeadDraft, "assistant": AssistantDraft}

    def start(self, prepared: Prepared) -> Search:
        """See `Draft.start`; no process of several may decide otherwise than the others."""
        model, config, width = self.model, copy.copy(self.config), prepared.plan.width
        num_rows = len(prepared.input_ids)
        budget = draft_budget(config, batch_size=num_rows, vocab_size=output_size_of(model))
        self.chosen, config.draft_token_budget = decide(
            model,
            self.assistant,
            config,
            list(self.candidates)[: 1 if prepared.synced_gpus else None],  # the simplest
            prepared.rules.shared,
            _timed_forwards(model, prepared),
            kind=(model.device, model.dtype, attention_of(model.config), num_rows.bit_length()),
            num_beams=width,
            budget=budget,
            below_prompt=self.takes_nodes(prepared),
        )
        served_by = self.candidates[self.chosen]
        served_by.config = config
        return served_by.start(prepared)


def _timed_forwards(model: Any, prepared: Prepared) -> Callable[[int], Callable[[], None]]:
    """Prepares forwards of nodes after prompts of a call's size, which are computed with the first one."""
    start, inputs = prepared.input_ids, prepared.inputs
    num_rows, length = inputs.shape[:2] if inputs is not None and inputs.ndim > 1 else start.shape

    @cache
    def scorers() -> Callable[[], Scorer]:
        prompt = ordinary_tokens(model, num_rows * length).view(num_rows, length)
        if model.config.is_encoder_decoder:
            return prefilled(model, start, prompt, None, width=prepared.plan.width)
        return prefilled(model, prompt, None, None, width=prepared.plan.width)

    def new_forward(num_nodes: int) -> Callable[[], None]:
        scorer = scorers()()
        scorer.begin()
        nodes = torch.zeros((num_rows, num_nodes), dtype=torch.long, device=start.device)
        one = nodes[:, :1]
        # The second scorer over a prompt first copies its keys. What is in the queue is none of the forward's time.
        scorer.score([Nodes(one, one, one)], depth=1)[0].max().item()

        def forward() -> None:
            scorer.score([Nodes(nodes, nodes, nodes)], depth=2)[0].max().item()  # waits

        return forward

    return new_forward
