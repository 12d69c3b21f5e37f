# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`assistant_model=`: a draft model searches the catalogue, until the remaining levels fit the budget (AtSpeed)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.checks import check_assistant, check_draft_width, check_room_for_drafts
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

    reads_assistant = True

    def check(
        self, prompt: Prompt, catalogue: Snapshot, *, given: Mapping[str, Any], model_kwargs: Mapping[str, Any]
    ) -> None:
        """See `Draft.check`."""
        model, assistant, config = self.model, self.assistant, self.config
        self.check_verification()
        if assistant is None:
            raise ValueError("drafting='assistant' without assistant_model, expected both: pass assistant_model=")
        if given.get("drafting") == "trie":
            raise ValueError(
                "drafting='trie' with assistant_model, expected one of them: drafting='assistant' uses both"
            )
        if not hasattr(assistant, "get_output_embeddings"):
            raise ValueError(
                f"assistant_model is a {type(assistant).__name__}, expected a language model of transformers"
            )
        check_assistant(model, assistant)
        if assistant.training:
            raise ValueError("assistant_model is in training mode, expected evaluation: assistant_model.eval()")
        if assistant.device != model.device:
            raise ValueError(
                f"assistant_model is on {assistant.device}, expected {model.device}: assistant_model.to(model.device)"
            )
        if not prompt.is_tokens:
            raise ValueError("the prompt is not given as input_ids, which assistant_model reads: pass input_ids=")
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
        check_draft_width(config)
        assert prompt.inputs is not None
        check_room_for_drafts(assistant, catalogue, prompt.inputs.shape[1], prompt.mask)

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
