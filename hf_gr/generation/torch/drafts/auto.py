# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: the draft that `hf_gr.core.auto` expects to be the fastest; times forwards for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

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
    prepared: Prepared  # after `start`

    def start(self, prepared: Prepared) -> Search:
        """See `Draft.start`; no process of several may decide otherwise than the others."""
        model, num_rows, self.prepared = self.model, len(prepared.input_ids), prepared
        if prepared.synced_gpus:
            self.candidates = dict([next(iter(self.candidates.items()))])  # the simplest
        draft = self.decide(
            prepared.rules.shared,
            kind=(model.device, model.dtype, attention_of(model.config), num_rows.bit_length()),
            num_beams=prepared.plan.width,
            budget=draft_budget(self.config, batch_size=num_rows, vocab_size=output_size_of(model)),
            below_prompt=self.takes_nodes(prepared),
        )
        self.__dict__.pop("_new_scorer", None)  # frees what was computed of the prompts
        return draft.start(prepared)

    @cached_property
    def _new_scorer(self) -> Callable[[], Scorer]:
        """Makes scorers over prompts of the call's size."""
        model, start, inputs = self.model, self.prepared.input_ids, self.prepared.inputs
        num_rows, length = inputs.shape[:2] if inputs is not None and inputs.ndim > 1 else start.shape
        prompt = ordinary_tokens(model, num_rows * length).view(num_rows, length)
        given = (start, prompt) if model.config.is_encoder_decoder else (prompt, None)
        return prefilled(model, *given, None, width=self.prepared.plan.width)

    def timed_forward(self, num_nodes: int) -> Callable[[], Any]:
        """See `BaseAuto.timed_forward`."""
        scorer = self._new_scorer()
        scorer.begin()
        start = self.prepared.input_ids
        nodes = torch.zeros((len(start), num_nodes), dtype=torch.long, device=start.device)
        one = nodes[:, :1]
        # The second scorer over a prompt first copies its keys. What is in the queue is none of the forward's time.
        scorer.score([Nodes(one, one, one)], depth=1)[0].max().item()
        # `item` waits.
        return lambda: scorer.score([Nodes(nodes, nodes, nodes)], depth=2)[0].max().item()
