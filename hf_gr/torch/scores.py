# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The options of one call, and by them the scores of children, from logits. Decides nothing.

Axes: B batch, K beams, C children, V vocabulary, P prompt, T generated tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.core import beam
from hf_gr.core.beam import Beams
from hf_gr.core.plan import Options

from .log_probs import token_log_probs
from .noise import Noise
from .transition import Children, over_vocabulary

# (sequences [rows, P + T], scores [rows, V]) -> scores
Processor = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class DecodePlan(Options):
    """The options of one call."""

    prompt: Int[Tensor, "batch prompt"]  # for processors and stopping criteria
    # Before the constraint and after it; None saves all work as wide as the vocabulary but the normalisation.
    processors: tuple[Processor, Processor] | None = None
    processor_width: int | None = None  # paths a row that processors expect; None for as many as there are
    # Only so many of each beam's best tokens compete, legal or not (NEZHA, algorithm 3, line 19); without processors.
    tokens_per_beam: int | None = None
    stopping_criteria: Callable[[Tensor], Tensor] | None = None  # the user's own
    noise: Noise | None = None  # None if nothing is drawn
    temperature: float = 1.0  # of `exact=True`; else a processor does it
    renormalizes: bool = False  # over the legal tokens of each step; for other processors one of them does it

    @property
    def has_criteria(self) -> bool:
        """See `Options.has_criteria`."""
        return self.stopping_criteria is not None

    @property
    def compares_legal(self) -> bool:
        """Whether no other token's logit matters."""
        sees_all = self.processors is not None or self.keeps_steps or self.tokens_per_beam is not None
        return (self.renormalizes or not (self.is_beam_search or self.max_nodes)) and not sees_all

    def meets_criteria(self, sequences: Int[Tensor, "batch kept length"], *, max_length: int) -> Tensor:
        """See `Options.meets_criteria`."""
        assert self.stopping_criteria is not None
        return self.apply(self.stopping_criteria, sequences)

    def apply(
        self,
        function: Callable[..., Tensor],
        sequences: Int[Tensor, "batch beams length"],
        *others: Float[Tensor, "batch beams *shape"],
    ) -> Tensor:
        """A user's function of full sequences, one row a path: all rows of the call, also those that wait."""
        num_beams = sequences.shape[1]
        prompt = self.prompt[:, None].expand(-1, num_beams, -1)
        full = torch.cat([prompt, sequences], dim=-1).flatten(0, 1)
        return function(full, *(values.flatten(0, 1) for values in others)).unflatten(0, (-1, num_beams))


def child_scores(
    logits: Float[Tensor, "batch beams vocab"],
    legal: Children,
    beams: Beams,
    plan: DecodePlan,
    columns: Callable[..., Tensor] | None = None,  # of tokens in the logits, if those are not over the vocabulary
) -> Float[Tensor, "batch beams children"]:
    """The scores of one step for the children of every beam; the entries at illegal ones mean nothing.

    Beam methods sum log-softmax values over the *full* vocabulary and then drop invalid tokens; independent paths
    compare logits. Both as in transformers; processors see what they would see there.
    """
    tokens = legal.tokens if columns is None else columns(legal.tokens, level=beams.length)
    # Whether the next token is the end token that is certain; the catalogue allows no other there.
    is_forced = plan.forces_end and beams.length + 1 == plan.max_new_tokens
    if plan.processors is not None:
        return process_scores(logits, legal, beams, plan, is_forced=is_forced).gather(-1, tokens)
    if is_forced:
        return torch.zeros(tokens.shape, device=logits.device)
    if plan.renormalizes:
        return renormalized(logits, tokens, legal)
    scores = token_log_probs(logits, tokens) if plan.is_beam_search else logits.gather(-1, tokens).float()
    if plan.tokens_per_beam is None or plan.tokens_per_beam >= logits.shape[-1]:
        return scores
    least = logits.topk(plan.tokens_per_beam).values[..., -1:]
    return scores.masked_fill(logits.gather(-1, tokens) < least, beam.DEAD)


def renormalized(
    logits: Float[Tensor, "batch beams _"], tokens: Int[Tensor, "batch beams children"], legal: Children
) -> Float[Tensor, "batch beams children"]:
    """Log-probabilities among the legal tokens of each step, from where those are in the logits."""
    return logits.gather(-1, tokens).float().masked_fill(~legal.legal, beam.DEAD).log_softmax(-1)


def process_scores(
    logits: Float[Tensor, "batch beams vocab"], legal: Children, beams: Beams, plan: DecodePlan, *, is_forced: bool
) -> Float[Tensor, "batch beams vocab"]:
    """Scores over the vocabulary: processors before the constraint, the constraint, processors after it."""
    assert plan.processors is not None
    before, after = plan.processors
    scores = logits.float().log_softmax(dim=-1) if plan.is_beam_search else logits.float()
    scores = _in_groups(before, scores, beams, plan)
    scores = torch.zeros_like(scores) if is_forced else scores
    scores = over_vocabulary(scores.gather(-1, legal.tokens), legal, scores.shape[-1])
    return _in_groups(after, scores, beams, plan)


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
