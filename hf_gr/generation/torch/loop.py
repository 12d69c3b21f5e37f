# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' own loop with a logits processor, for what neither layout supports. Repairs that loop's output.

When legal beams run out, transformers continues with illegal ones; they become padding, after the others.

Axes: R returned rows; T generated tokens; V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import LogitsProcessorList

from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.sequences import to_host
from hf_gr.generation.answers import with_items
from hf_gr.generation.checks import missing_token
from hf_gr.generation.internals import as_it_is
from hf_gr.generation.models import fill_token
from hf_gr.torch.transition import device_catalogue

from .call import Call
from .constraints import NEARLY_IMPOSSIBLE
from .logits_process import ConstraintLogitsProcessor
from .outputs import output_class

# transformers marks what is no beam by adding -1e9, before or after it divides by the length.
DEAD_IN_TRANSFORMERS = -5e8
# The most that a score is divided or multiplied by: beyond, live beams and those marks would mix.
LARGEST_PENALTY = 1e5


def generate_by_processor(generate: Callable[..., Any], call: Call) -> Any:
    """Call transformers' `generate` and return what it would for a constrained model.

    Args:
        generate: transformers' own, bound to the model.
        call: the call; its config is changed.

    Raises:
        ValueError: `past_key_values` together with several paths a prompt, which this loop cannot share; a
            `length_penalty` that this loop cannot count with.
    """
    config, rules, fill = call.config, call.rules, fill_token(call.config)
    passed_on = call.passed_on
    if call.model_kwargs.get("past_key_values") is not None and max(config.num_beams, config.num_return_sequences) > 1:
        raise ValueError(
            "past_key_values is given for several paths a prompt, expected None: this model or these options "
            "decode in transformers' own loop, which needs a row a beam"
        )
    if config.num_beams > 1:
        _check_penalty(config.length_penalty, rules.shared.max_length)
    constraint = ConstraintLogitsProcessor._of_rules(rules, num_beams=config.num_beams)
    processors = [constraint, *(passed_on["logits_processor"] or ())]
    passed_on = {**passed_on, "logits_processor": LogitsProcessorList(processors)}
    as_tensor, with_scores = not config.return_dict_in_generate, config.output_scores
    config.return_dict_in_generate = config.output_scores = True
    if rules.shared.eos_token_id not in np.ravel(to_host(config.eos_token_id)):
        config.min_length = config.min_new_tokens = None  # they postpone the end tokens that the config names
    config.eos_token_id = rules.shared.eos_token_id  # every other end token is an ordinary code here
    config.max_new_tokens = rules.shared.max_length  # without an end token, any further token makes a row illegal
    out = generate(call.inputs, as_it_is(config), **passed_on, **call.model_kwargs)

    scores: Any = getattr(out, "sequences_scores", None)
    beam_indices: Any = getattr(out, "beam_indices", None)
    num_steps = len(out.scores) if beam_indices is None else beam_indices.shape[1]
    prompt, generated = out.sequences.tensor_split([out.sequences.shape[1] - num_steps], dim=1)
    generated = generated.masked_fill(generated < 0, fill)  # filling if there is no end token
    may_stop = bool(passed_on["stopping_criteria"]) or config.stop_strings is not None
    lengths = torch.tensor(
        [
            _length(rules, number // config.num_return_sequences, row, fill, may_stop)
            for number, row in enumerate(generated.tolist())
        ],
        device=generated.device,
    )
    if beam_indices is None:
        is_dead = _are_forbidden(generated, lengths, out.scores)
    else:
        is_dead = _are_no_beams(scores, beam_indices, config.length_penalty)
    lengths = lengths.masked_fill(is_dead, 0)
    may_be_shorter = may_stop or device_catalogue(rules, generated.device).is_ragged
    width = max(int(lengths.max()), 1) if may_be_shorter else rules.shared.max_length
    is_there = torch.arange(width, device=generated.device) < lengths[:, None]
    generated = torch.where(is_there, F.pad(generated, (0, width - num_steps)), fill)
    generated = generated.masked_fill(lengths[:, None] == 0, missing_token(rules.shared, fill))
    out.sequences = torch.cat([prompt, generated], dim=1)
    if beam_indices is not None:
        order = (lengths == 0).view(-1, config.num_return_sequences).int().argsort(dim=1, stable=True)
        order = (order + torch.arange(0, len(lengths), order.shape[1], device=order.device)[:, None]).flatten()
        out.sequences = out.sequences[order]
        out.sequences_scores = scores.masked_fill(lengths == 0, -torch.inf)[order] if with_scores else None
        out.beam_indices = torch.where(is_there, F.pad(beam_indices, (0, width - num_steps)), -1)[order]
        # The beams of a prompt begin as equals; the constraint hides all but the first, which would repeat each other.
        equal = out.scores[0].unflatten(0, (-1, config.num_beams))[:, :1].expand(-1, config.num_beams, -1)
        out.scores = (equal.flatten(0, 1), *out.scores[1:])
    if as_tensor:
        return out.sequences
    if beam_indices is None:  # as many as there are tokens
        out.scores, out.logits = out.scores[:width], out.logits and out.logits[:width]
    out.scores = out.scores if with_scores else None
    is_encoder_decoder = hasattr(out, "decoder_attentions")
    made = output_class(is_encoder_decoder=is_encoder_decoder, is_beam_search=beam_indices is not None)
    return with_items(made(**out), rules, prompt.shape[1])


def _check_penalty(length_penalty: float, max_length: int) -> None:
    """Refuse a penalty by which transformers' marks of what is no beam could rank among scores."""
    largest = math.log(LARGEST_PENALTY) / max(math.log(max_length), 1e-9)
    if abs(length_penalty) > largest:
        raise ValueError(
            f"length_penalty={length_penalty}, expected {-largest:.1f} to {largest:.1f} for sequences of "
            f"{max_length} tokens in transformers' own loop: choose one nearer to 0, or options that need no such loop"
        )


def _are_no_beams(
    scores: Float[Tensor, " rows"], beam_indices: Int[Tensor, "rows length"], length_penalty: float
) -> Bool[Tensor, " rows"]:
    """Which returned beams bear transformers' mark, before or after it divided by the length."""
    sums = scores.cpu().double() * (beam_indices >= 0).sum(dim=1).cpu().double() ** length_penalty
    return (scores < DEAD_IN_TRANSFORMERS) | (sums < DEAD_IN_TRANSFORMERS).to(scores.device)


def _are_forbidden(
    generated: Int[Tensor, "rows length"], lengths: Int[Tensor, " rows"], step_scores: Sequence[Tensor]
) -> Bool[Tensor, " rows"]:
    """Which paths have a token that other processors forbid, for want of an allowed one."""
    chosen = [scores.gather(1, tokens[:, None]) for scores, tokens in zip(step_scores, generated.T, strict=True)]
    is_there = torch.arange(len(chosen), device=generated.device) < lengths[:, None]
    return ((torch.cat(chosen, dim=1) < NEARLY_IMPOSSIBLE) & is_there).any(dim=1)


def _length(rules: BatchRules, prompt: int, row: list[int], fill: int, may_stop: bool) -> int:
    """The tokens of a row that are an item, or the prefix of one that the user's own criterion stopped; else 0."""
    end = rules.shared.eos_token_id
    row = row[: row.index(end) + 1] if end in row else row
    if rules.items(prompt, row):
        return len(row)
    while row and row[-1] == fill:
        row = row[:-1]
    return len(row) if may_stop and row and rules.of_row(prompt).next_tokens(row) else 0
