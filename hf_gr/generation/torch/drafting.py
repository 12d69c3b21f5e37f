# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Who drafts in a call: from its arguments to a drafter. Knows configs and prefills; drafts nothing itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from hf_gr.generation.checks import draft_budget
from hf_gr.torch.costs import WIDER_BY, ForwardCosts, measure_costs, plan_merges
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.draft_head import DraftHead, HeadScorer
from hf_gr.torch.drafters import Assistant, TreeDrafter
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import DeviceCatalogue

from .layouts import base_model, prefilled

DRAFT_BEAMS_PER_BEAM = 2

_COSTS: WeakKeyDictionary[Any, dict[tuple[Any, ...], ForwardCosts]] = WeakKeyDictionary()


def drafting_of(config: Any, assistant: Any) -> str | None:
    """Who drafts: None, or one of `DRAFTING`; a draft model is asked whenever there is one."""
    if assistant is not None and config.drafting != "auto":
        return "assistant"
    return config.drafting


def make_drafter(
    model: Any,
    drafting: str,
    config: Any,
    plan: DecodePlan,
    catalogue: DeviceCatalogue,
    new_scorer: Callable[[], Scorer],
    draft_scorers: Callable[[int], Callable[[], Scorer]] | None,
    *,
    logits_shape: Sequence[int],
) -> TreeDrafter | None:
    """The drafter of a call; None if nothing is to be drafted.

    Args:
        model: the model.
        drafting: what `drafting_of` said.
        config: the prepared config, with our fields.
        plan: what is asked for.
        catalogue: what the rows may be answered with.
        new_scorer: makes another scorer of the model over the same prefill.
        draft_scorers: from the width of a search to what makes scorers of a draft model or head; None for neither.
        logits_shape: [B, 1, V].
    """
    if catalogue.max_length <= 2:  # the prefill decides the first level, one forward the other
        return None
    batch_size, _, vocab_size = logits_shape
    budget = draft_budget(config, batch_size=batch_size, vocab_size=vocab_size)
    merges, worth = None, math.inf
    if drafting == "auto":
        costs = _costs_of(model, new_scorer, plan, wider_by=min(WIDER_BY, budget))
        worth = costs.worth + plan.width
        merges = plan_merges(catalogue.nodes_per_level, plan.width, costs, budget=budget)
    draft_model = None
    if draft_scorers is not None:
        num_beams = config.num_draft_beams or plan.width * (1 if plan.is_relaxed else DRAFT_BEAMS_PER_BEAM)
        search = replace(
            plan,
            num_beams=num_beams,
            num_kept=num_beams,
            num_return_sequences=num_beams,
            do_sample=plan.is_relaxed,
            processor_width=plan.width,
            stopping_criteria=None,
        )
        draft_model = Assistant(draft_scorers(num_beams), search, num_steps=config.num_assistant_tokens)
    return TreeDrafter(
        catalogue,
        budget=budget,
        merges=merges,
        worth=worth,
        assistant=draft_model,
        from_zero=not plan.is_beam_search,
    )


def assistant_scorers(
    assistant: Any, prompt: Tensor, inputs: Tensor | None, attention_mask: Tensor | None
) -> Callable[[int], Callable[[], Scorer]]:
    """Scorers of a draft model, by the width of the search.

    Args:
        assistant: the draft model.
        prompt: the prompt's tokens.
        inputs: tokens that an encoder reads, for a draft model that has one.
        attention_mask: of those, or of the prompt; None for no padding.
    """
    return lambda width: prefilled(base_model(assistant), prompt, inputs, attention_mask, width=width)


def head_scorers(
    head: DraftHead, hidden: Tensor, plan: DecodePlan, vocab_size: int
) -> Callable[[int], Callable[[], Scorer]]:
    """Scorers of a draft head, whatever the width.

    Args:
        head: the head.
        hidden: of the prompt's last token and of the placeholders.
        plan: what is asked for; processors and outputs want scores over the whole vocabulary.
        vocab_size: V.
    """
    hidden = hidden.to(next(head.parameters()))  # its device and type, which may be others than the model's
    is_wide = plan.processors is not None or plan.output_scores or plan.output_logits
    return lambda width: lambda: HeadScorer(head, hidden, vocab_size=vocab_size if is_wide else None)


def _costs_of(model: Any, new_scorer: Callable[[], Scorer], plan: DecodePlan, *, wider_by: int) -> ForwardCosts:
    """Measured once for each shape of prompts, up to a factor of two in their number and their length."""
    shape = tuple(size.bit_length() for size in (*plan.prompt.shape, plan.width))
    key = (model.device, model.dtype, model.config._attn_implementation, *shape)
    known = _COSTS.setdefault(model, {})
    if key not in known:
        known[key] = measure_costs(new_scorer, plan.width, wider_by=wider_by)
    return known[key]
