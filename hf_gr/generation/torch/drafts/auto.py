# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`drafting="auto"`: the catalogue (and a draft model, if there is one) drafts where measurements say it pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.internals import attention_of
from hf_gr.generation.torch.prompts import Prompt
from hf_gr.torch.costs import WIDER_BY, ForwardCosts, measure_costs, plan_merges
from hf_gr.torch.decode import DecodePlan
from hf_gr.torch.drafters import Assistant
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import DeviceCatalogue

from . import Prepared
from .assistant import AssistantDraft
from .trie import TrieDraft

_COSTS: WeakKeyDictionary[Any, dict[tuple[Any, ...], ForwardCosts]] = WeakKeyDictionary()


class AutoDraft(AssistantDraft):
    """The cheapest way down the levels, given the time of a forward and of a node."""

    def check(
        self, prompt: Prompt, catalogue: Snapshot, *, given: Mapping[str, Any], model_kwargs: Mapping[str, Any]
    ) -> None:
        """See `Draft.check`."""
        kind = TrieDraft if self.assistant is None else AssistantDraft
        kind.check(self, prompt, catalogue, given=given, model_kwargs=model_kwargs)

    def searcher(self, prepared: Prepared, vocab_size: int) -> Assistant | None:
        """The draft model, if there is one."""
        return None if self.assistant is None else super().searcher(prepared, vocab_size)

    def limits(
        self, prepared: Prepared, catalogue: DeviceCatalogue, new_scorer: Callable[[], Scorer], *, budget: int
    ) -> dict[str, Any]:
        """See `TrieDraft.limits`; from measured costs."""
        plan = prepared.plan
        costs = _costs_of(self.model, new_scorer, plan, wider_by=min(WIDER_BY, budget))
        merges = plan_merges(catalogue.nodes_per_level, plan.width, costs, budget=budget)
        return {"merges": merges, "worth": costs.worth + plan.width}


def _costs_of(model: Any, new_scorer: Callable[[], Scorer], plan: DecodePlan, *, wider_by: int) -> ForwardCosts:
    """Measured once per prompt shape, up to a factor of two in the number and length of prompts."""
    shape = tuple(size.bit_length() for size in (*plan.prompt.shape, plan.width))
    key = (model.device, model.dtype, attention_of(model.config), *shape)
    known = _COSTS.setdefault(model, {})
    if key not in known:
        known[key] = measure_costs(new_scorer, plan.width, wider_by=wider_by)
    return known[key]
