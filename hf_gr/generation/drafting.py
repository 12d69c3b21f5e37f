# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Who drafts in a call: from its arguments to a drafter. Knows configs and prefills; drafts nothing itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_gr.torch.costs import ForwardCosts, measure_costs, plan_merges
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.drafters import Assistant, TreeDrafter
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import DeviceCatalogue

from .layouts import choose_layout, make_scorer

DEFAULT_BUDGET = 512  # nodes of a row beside its beams: their logits are a few megabytes, also of a large vocabulary
DRAFT_BEAMS_PER_BEAM = 2

_COSTS: WeakKeyDictionary[Any, dict[tuple[Any, ...], ForwardCosts]] = WeakKeyDictionary()


def drafts(config: Any, assistant: Any) -> str | None:
    """Who drafts: None, "trie", "assistant" or "auto"; a draft model is asked whenever there is one."""
    return config.drafting or (None if assistant is None else "assistant")


def make_drafter(
    model: Any,
    assistant: Any,
    config: Any,
    plan: DecodePlan,
    catalogue: DeviceCatalogue,
    new_scorer: Callable[[], Scorer],
    *,
    inputs: Tensor | None,
    attention_mask: Tensor | None,
) -> TreeDrafter | None:
    """The drafter of a call; None if nothing is to be drafted.

    Args:
        model: the model.
        assistant: the draft model, or None.
        config: the prepared config, with our fields.
        plan: what is asked for.
        catalogue: what the rows may be answered with.
        new_scorer: makes another scorer of the model over the same prefill.
        inputs: tokens that an encoder reads, for a draft model that has one; the prompt otherwise.
        attention_mask: of those; None for no padding.
    """
    drafting = drafts(config, assistant)
    if drafting is None or catalogue.max_length <= 2:  # the prefill decides the first level, one forward the other
        return None
    budget = DEFAULT_BUDGET if config.draft_token_budget is None else config.draft_token_budget
    merges, worth = None, float("inf")
    if drafting == "auto":
        costs = _costs_of(model, new_scorer, plan)
        worth = costs.worth + plan.width
        merges = plan_merges(catalogue.nodes_per_level, plan.width, costs, budget=budget)
        if assistant is None and not any(merges):
            return None
    draft_model = None
    if assistant is not None:
        num_beams = config.num_draft_beams or DRAFT_BEAMS_PER_BEAM * plan.num_beams
        search = replace(
            plan,
            num_beams=num_beams,
            num_kept=num_beams,
            num_return_sequences=num_beams,
            do_sample=plan.is_relaxed,
            processor_width=plan.width,
            stopping_criteria=None,
        )
        draft_model = Assistant(
            _prefilled(assistant, plan.prompt, inputs, attention_mask, width=num_beams),
            search,
            num_steps=config.num_assistant_tokens,
        )
    return TreeDrafter(
        catalogue,
        budget=budget,
        merges=merges,
        worth=worth,
        assistant=draft_model,
        from_zero=not plan.is_beam_search,
    )


def _prefilled(
    model: Any, prompt: Tensor, inputs: Tensor | None, attention_mask: Tensor | None, *, width: int
) -> Callable[[], Scorer]:
    """Makes scorers of a draft model; the prompt is computed when the first is made."""

    @cache
    def prefill() -> tuple[Any, dict[str, Any]]:
        kwargs: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
        if model.config.is_encoder_decoder:
            kwargs["encoder_outputs"] = model.get_encoder()(input_ids=inputs, return_dict=True, **kwargs)
            return model(decoder_input_ids=prompt, use_cache=True, return_dict=True, **kwargs), kwargs
        parameters = inspect.signature(type(model).forward).parameters
        if attention_mask is not None and "position_ids" in parameters:
            kwargs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        empty = DynamicCache(config=model.config.get_text_config(decoder=True))
        outputs = model(input_ids=prompt, past_key_values=empty, use_cache=True, return_dict=True, **kwargs, **last)
        return outputs, kwargs

    def new_scorer() -> Scorer:
        outputs, kwargs = prefill()
        layout = choose_layout(model)
        assert layout is not None, "checked at the door"
        return make_scorer(model, layout, outputs, kwargs, batch_size=len(prompt), width=width, drafts=True)

    return new_scorer


def _costs_of(model: Any, new_scorer: Callable[[], Scorer], plan: DecodePlan) -> ForwardCosts:
    """Measured once for each shape of prompt, up to a factor of two in its length."""
    batch_size, length = plan.prompt.shape
    key = (model.device, model.dtype, batch_size, plan.width, length.bit_length())
    known = _COSTS.setdefault(model, {})
    if key not in known:
        known[key] = measure_costs(new_scorer, plan.width)
    return known[key]
