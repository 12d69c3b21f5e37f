# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The scores of children, from logits: of one step, processed, and summed along the path. Decides nothing.

Axes: B batch, K beams, C children, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.core import beam
from hf_gr.core.beam import Beams

from .children import Children
from .log_probs import token_log_probs
from .plan import DecodePlan, Processor
from .scorers import Scorer
from .transition import over_vocabulary


def in_columns(legal: Children, scorer: Scorer, *, level: int) -> Children:
    """Children by their columns in a scorer's logits, if those are not over the vocabulary."""
    if scorer.columns is None:
        return legal
    return replace(legal, tokens=scorer.columns(legal.tokens, level=level))


def child_scores(
    logits: Float[Tensor, "batch beams vocab"], legal: Children, beams: Beams, plan: DecodePlan
) -> Float[Tensor, "batch beams children"]:
    """The scores of one step for the children of every beam; the entries at illegal ones mean nothing.

    Beam methods sum log-softmax values over the *full* vocabulary and then drop invalid tokens; independent paths
    compare logits. Both as in transformers; processors see what they would see there.
    """
    if plan.processors is not None:
        return process_scores(logits, legal, beams, plan).gather(-1, legal.tokens)
    if _is_forced(beams, plan):
        return torch.zeros(legal.shape, device=logits.device)
    if plan.tokens_per_beam is not None and plan.tokens_per_beam < logits.shape[-1]:
        least = logits.topk(plan.tokens_per_beam).values[..., -1:]
        scores = child_scores(logits, legal, beams, replace(plan, tokens_per_beam=None))
        return scores.masked_fill(logits.gather(-1, legal.tokens) < least, beam.DEAD)
    if not plan.is_beam_search:
        return logits.gather(-1, legal.tokens).float()
    return token_log_probs(logits, legal.tokens)


def process_scores(
    logits: Float[Tensor, "batch beams vocab"], legal: Children, beams: Beams, plan: DecodePlan
) -> Float[Tensor, "batch beams vocab"]:
    """Scores over the vocabulary: processors before the constraint, the constraint, processors after it."""
    assert plan.processors is not None
    before, after = plan.processors
    scores = logits.float().log_softmax(dim=-1) if plan.is_beam_search else logits.float()
    scores = _in_groups(before, scores, beams, plan)
    scores = torch.zeros_like(scores) if _is_forced(beams, plan) else scores
    scores = over_vocabulary(scores.gather(-1, legal.tokens), legal, scores.shape[-1])
    return _in_groups(after, scores, beams, plan)


def _is_forced(beams: Beams, plan: DecodePlan) -> bool:
    """Whether the next token is the end token that is certain; the catalogue allows no other there."""
    return plan.forces_end and beams.length + 1 == plan.max_new_tokens


def _in_groups(
    processor: Processor, scores: Float[Tensor, "batch beams vocab"], beams: Beams, plan: DecodePlan
) -> Float[Tensor, "batch beams vocab"]:
    """Processed scores; the processor is called with as many paths of each row at once as it expects.

    transformers' processors store the padding of every row, and a draft has more rows than the model it drafts for.
    """
    num_beams = scores.shape[1]
    sequences, width = beams.sequences, plan.processor_width or num_beams
    if width == num_beams:
        return _processed(processor, sequences, scores, plan)
    places = torch.arange(-(-num_beams // width) * width, device=scores.device) % num_beams
    groups = [_processed(processor, sequences[:, group], scores[:, group], plan) for group in places.split(width)]
    return torch.cat(groups, dim=1)[:, :num_beams]


def _processed(
    processor: Processor,
    sequences: Int[Tensor, "batch beams length"],
    scores: Float[Tensor, "batch beams vocab"],
    plan: DecodePlan,
) -> Float[Tensor, "batch beams vocab"]:
    def checked(full: Tensor, given: Tensor) -> Tensor:
        processed = processor(full, given)
        if getattr(processed, "shape", None) != given.shape:
            found = list(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
            raise ValueError(
                f"logits_processor returned {found}, expected scores of the shape that it got, {list(given.shape)}"
            )
        return processed

    return plan.apply(checked, sequences, scores)
