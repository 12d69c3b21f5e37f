# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: the draft that `hf_gr.core.auto` expects to be the fastest; times forwards for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from hf_gr.generation.checks import draft_budget
from hf_gr.generation.drafts import fastest
from hf_gr.generation.internals import attention_of
from hf_gr.generation.torch.layouts import may_take_nodes, ordinary_tokens, prefilled
from hf_gr.generation.torch.models import output_size_of
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.tree import Nodes

from .base import Draft, Prepared


def draft_of(drafts: Mapping[str | None, Draft], prepared: Prepared) -> Draft:
    """The draft of a call, of several the fastest; no process of several may decide otherwise than the others."""
    name, draft = next(iter(drafts.items()))
    if draft.config.drafting != "auto":
        return draft
    model, start, inputs, width = draft.model, prepared.input_ids, prepared.inputs, prepared.plan.width
    num_rows, length = inputs.shape[:2] if inputs is not None and inputs.ndim > 1 else start.shape

    @cache
    def scorers() -> Callable[[], Scorer]:
        """Makes scorers over prompts of the call's size."""
        prompt = ordinary_tokens(model, num_rows * length).view(num_rows, length)
        given = (start, prompt) if model.config.is_encoder_decoder else (prompt, None)
        return prefilled(model, *given, None, width=width)

    def timed_forward(num_nodes: int) -> Callable[[], Any]:
        scorer = scorers()()
        scorer.begin()
        nodes = torch.zeros((len(start), num_nodes), dtype=torch.long, device=start.device)
        one = nodes[:, :1]
        # The second scorer over a prompt first copies its keys. What is in the queue is none of the forward's time.
        scorer.score([Nodes(one, one, one)], depth=1)[0].max().item()
        # `item` waits.
        return lambda: scorer.score([Nodes(nodes, nodes, nodes)], depth=2)[0].max().item()

    return fastest(
        {name: draft} if prepared.synced_gpus else drafts,
        prepared.rules.shared,
        kind=(model.device, model.dtype, attention_of(model.config), len(start).bit_length()),
        num_beams=width,
        budget=draft_budget(draft.config, batch_size=len(start), vocab_size=output_size_of(model)),
        below_prompt=may_take_nodes(model, prepared.config, prepared.model_kwargs),
        timed_forward=timed_forward,
    )
