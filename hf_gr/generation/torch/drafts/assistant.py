# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`assistant_model=`: a draft model searches the catalogue, until the remaining levels fit the budget (AtSpeed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.call import Prompt
from hf_gr.generation.torch.layouts import prefilled, takes_tree
from hf_gr.generation.torch.models import base_model
from hf_gr.torch.drafters import Assistant

from .base import Prepared
from .trie import TrieDraft


class AssistantDraft(TrieDraft):
    """A draft model's beams, and the catalogue's subtree below them."""

    searches = "assistant"

    def check_own(self, prompt: Prompt, catalogue: Snapshot, model_kwargs: Mapping[str, Any]) -> None:
        """See `BaseDraft.check_own`."""
        model, assistant, config = self.model, self.assistant, self.config
        if assistant.training:
            raise ValueError("assistant_model is in training mode, expected evaluation: assistant_model.eval()")
        if assistant.device != model.device:
            raise ValueError(
                f"assistant_model is on {assistant.device}, expected {model.device}: assistant_model.to(model.device)"
            )
        if not takes_tree(base_model(assistant)):
            raise ValueError(
                f"assistant_model is a {type(assistant).__name__}, which cannot score the nodes of a tree, "
                "expected another: omit it"
            )
        if config.guidance_scale not in (None, 1.0):
            raise ValueError(
                f"guidance_scale={config.guidance_scale} with assistant_model, expected None: its processor keeps "
                "state of the model's rows, and the draft model has others"
            )

    def searcher(self, prepared: Prepared, vocab_size: int) -> Assistant:
        """The draft model, over a prefill of its own."""
        num_beams, first_level = self.draft_beams(prepared.plan)
        inner, mask = base_model(self.assistant), prepared.model_kwargs.get("attention_mask")
        scorers = prefilled(inner, prepared.plan.prompt, prepared.inputs, mask, width=num_beams)
        num_steps = self.config.num_assistant_tokens
        return Assistant(scorers, num_beams=num_beams, num_steps=num_steps, first_level=first_level)
