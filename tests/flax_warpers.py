# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a plan in Flax does to scores, as transformers' processors."""

from __future__ import annotations

from typing import Any

from transformers.generation import (
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_gr.flax.plan import DecodePlan
from hf_gr.generation.torch.logits_process import OfLiving


def processors_of(plan: DecodePlan) -> list[Any]:
    """transformers' processors of what a plan says."""
    keep: dict[str, Any] = {"min_tokens_to_keep": plan.min_tokens_to_keep}
    made = [
        None if plan.temperature is None else TemperatureLogitsWarper(float(plan.temperature)),
        None if plan.top_k is None else TopKLogitsWarper(plan.top_k, **keep),
        None if plan.top_p is None else TopPLogitsWarper(float(plan.top_p), **keep),
        None if plan.min_p is None else MinPLogitsWarper(float(plan.min_p), **keep),
        OfLiving(LogitNormalization()) if plan.renormalize_logits else None,
    ]
    return [processor for processor in made if processor is not None]
