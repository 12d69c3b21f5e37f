# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`assistant_model=`: a draft model searches the catalogue, until the remaining levels fit the budget (AtSpeed)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.torch.layouts import prefilled, takes_tree
from hf_gr.generation.torch.models import base_model
from hf_gr.generation.torch.prompts import Prompt
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.drafters import Assistant
from hf_gr.torch.scorers import Scorer

from . import Prepared
from .trie import TrieDraft

DRAFT_BEAMS_PER_BEAM = 2


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
                f"assistant_model is a {type(assistant).__name__}, which cannot score the nodes of a tree "
                "(`hf-gr env --model`), expected another: omit it"
            )
        if config.guidance_scale not in (None, 1.0):
            raise ValueError(
                f"guidance_scale={config.guidance_scale} with assistant_model, expected None: its processor keeps "
                "state of the model's rows, and the draft model has others"
            )

    def searcher(self, prepared: Prepared, vocab_size: int) -> Assistant | None:
        """The draft model, over a prefill of its own."""
        inner, mask = base_model(self.assistant), prepared.model_kwargs.get("attention_mask")
        return make_searcher(
            self.config,
            prepared.plan,
            lambda width: prefilled(inner, prepared.plan.prompt, prepared.inputs, mask, width=width),
        )


def make_searcher(
    config: Any, plan: DecodePlan, scorers: Callable[[int], Callable[[], Scorer]], *, first_level: int = 0
) -> Assistant:
    """A search that drafts, with the width of the config; `scorers` makes scorers for a width."""
    num_beams = config.num_draft_beams or plan.width * (1 if plan.is_relaxed else DRAFT_BEAMS_PER_BEAM)
    # Relaxed answers would be further from the model's own with every level that is drafted: the first one is exact.
    first_level = max(first_level, int(plan.is_relaxed))
    num_steps = config.num_assistant_tokens
    return Assistant(scorers(num_beams), num_beams=num_beams, num_steps=num_steps, first_level=first_level)
