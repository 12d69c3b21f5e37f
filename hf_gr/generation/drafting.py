# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Who drafts in a call: from its arguments to a drafter. Knows configs and prefills; drafts nothing itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_gr.torch.costs import WIDER_BY, ForwardCosts, measure_costs, plan_merges
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.drafters import Assistant, TreeDrafter
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import DeviceCatalogue

from .layouts import base_model, choose_layout, make_scorer, takes_argument

DEFAULT_BUDGET = 512  # nodes of a row beside its beams
LOGITS_AT_ONCE = 2**26  # of all nodes that are scored ahead, by default: 256 MB in fp32
DRAFT_BEAMS_PER_BEAM = 2

_COSTS: WeakKeyDictionary[Any, dict[tuple[Any, ...], ForwardCosts]] = WeakKeyDictionary()


def drafting_of(config: Any, assistant: Any) -> str | None:
    """Who drafts: None, "trie", "assistant" or "auto"; a draft model is asked whenever there is one."""
    if assistant is not None and config.drafting != "auto":
        return "assistant"
    return config.drafting


def make_drafter(
    model: Any,
    assistant: Any,
    config: Any,
    plan: DecodePlan,
    catalogue: DeviceCatalogue,
    new_scorer: Callable[[], Scorer],
    *,
    logits_shape: Sequence[int],
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
        logits_shape: [B, 1, V].
        inputs: tokens that an encoder reads, for a draft model that has one; the prompt otherwise.
        attention_mask: of those; None for no padding.
    """
    drafting = drafting_of(config, assistant)
    if drafting is None or catalogue.max_length <= 2:  # the prefill decides the first level, one forward the other
        return None
    batch_size, _, vocab_size = logits_shape
    budget = config.draft_token_budget or max(min(DEFAULT_BUDGET, LOGITS_AT_ONCE // (batch_size * vocab_size)), 1)
    merges, worth = None, math.inf
    if drafting == "auto":
        costs = _costs_of(model, new_scorer, plan, wider_by=min(WIDER_BY, budget))
        worth = costs.worth + plan.width
        merges = plan_merges(catalogue.nodes_per_level, plan.width, costs, budget=budget)
    draft_model = None
    if assistant is not None:
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
        draft_model = Assistant(
            _prefilled(base_model(assistant), plan.prompt, inputs, attention_mask, width=num_beams),
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
        if attention_mask is not None and takes_argument(model, "position_ids"):
            kwargs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        last = {"logits_to_keep": 1} if takes_argument(model, "logits_to_keep") else {}
        empty = DynamicCache(config=model.config.get_text_config(decoder=True))
        outputs = model(input_ids=prompt, past_key_values=empty, use_cache=True, return_dict=True, **kwargs, **last)
        return outputs, kwargs

    def new_scorer() -> Scorer:
        outputs, kwargs = prefill()
        layout = choose_layout(model)
        assert layout is not None, "checked at the door"
        return make_scorer(model, layout, outputs, kwargs, batch_size=len(prompt), width=width, scores_ahead=True)

    return new_scorer


def _costs_of(model: Any, new_scorer: Callable[[], Scorer], plan: DecodePlan, *, wider_by: int) -> ForwardCosts:
    """Measured once for each shape of prompts, up to a factor of two in their number and their length."""
    shape = tuple(size.bit_length() for size in (*plan.prompt.shape, plan.width))
    key = (model.device, model.dtype, model.config._attn_implementation, *shape)
    known = _COSTS.setdefault(model, {})
    if key not in known:
        known[key] = measure_costs(new_scorer, plan.width, wider_by=wider_by)
    return known[key]
