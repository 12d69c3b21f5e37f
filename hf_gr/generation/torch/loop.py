# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' own loop with a logits processor, for models without the tree layout and for several labels.

Marks what is no item there.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_gr.catalogue.sequences import to_host
from hf_gr.generation.call import with_items
from hf_gr.generation.checks import missing_token
from hf_gr.generation.internals import as_it_is
from hf_gr.generation.models import fill_token
from hf_gr.torch.transition import device_catalogue

from .call import Call, output_class
from .constraints import NEARLY_IMPOSSIBLE, Constraint, OneSequence, SeveralLabels
from .logits_process import ConstraintLogitsProcessor

# transformers marks dead beams by adding -1e9, before or after it divides by the length; our mark is far lower.
NO_BEAM = -5e8


def dead(scores: Tensor) -> Tensor:
    """Which scores belong to no answer."""
    return scores < NO_BEAM


def run(generate: Callable[..., Any], call: Call, constraint: Constraint) -> tuple[Any, int]:
    """transformers' own output, with scores, under a constraint, and its generated tokens; changes the call's config.

    `as_asked` turns it into an answer.
    """
    config, end = call.config, call.rules.shared.eos_token_id
    if call.model_kwargs.get("past_key_values") is not None and max(config.num_beams, config.num_return_sequences) > 1:
        raise ValueError(
            "past_key_values is given for several paths a prompt, expected None: this model or these options "
            "decode in transformers' own loop, which needs a row a beam"
        )
    if end not in np.ravel(to_host(config.eos_token_id)):
        config.min_length = config.min_new_tokens = None  # they postpone the end tokens that the config names
    config.eos_token_id = end  # every other end token is an ordinary code here
    config.return_dict_in_generate = config.output_scores = True
    processors = [ConstraintLogitsProcessor._of(constraint), *(call.passed_on["logits_processor"] or ())]
    given = call.passed_on | {"logits_processor": LogitsProcessorList(processors)}
    out = generate(call.inputs, as_it_is(config), **given, **call.model_kwargs)
    indices = getattr(out, "beam_indices", None)
    return out, len(out.scores) if indices is None else indices.shape[1]


def as_asked(out: Any, asked: tuple[bool, bool], items: Any, width: int) -> Any:
    """The answer of a call that asked for an object or not, and for scores or not; its last tokens are `width`."""
    with_details, with_scores = asked
    if not with_details:
        return out.sequences
    # Assigning None would leave the field in the mapping.
    fields = {name: value for name, value in out.items() if with_scores or not name.endswith("scores")}
    is_beam_search = getattr(out, "beam_indices", None) is not None
    made = output_class(is_encoder_decoder=hasattr(out, "decoder_attentions"), is_beam_search=is_beam_search)
    return with_items(made(**fields), items, out.sequences.shape[1] - width)


def generate_by_processor(generate: Callable[..., Any], call: Call) -> Any:
    """Answers of one item each; rows that are no item are marked. Changes the call's config."""
    config, rules, passed_on = call.config, call.rules, call.passed_on
    # Below it transformers' mark of a dead beam, -1e9 divided by the length, outranks real scores.
    least = -math.log(1e5) / math.log(max(rules.shared.max_length, 2))
    if config.num_beams > 1 and config.length_penalty < least:
        raise ValueError(
            f"length_penalty={config.length_penalty}, expected at least {least:.1f} in transformers' own loop, which "
            "this model or these options need"
        )
    end, asked = rules.shared.eos_token_id, (config.return_dict_in_generate, config.output_scores)
    config.max_new_tokens = rules.shared.max_length  # without an end token, any further token makes a row illegal
    out, num_steps = run(generate, call, OneSequence(rules, num_beams=config.num_beams))
    scores: Any = getattr(out, "sequences_scores", None)
    beam_indices: Any = getattr(out, "beam_indices", None)
    prompt, generated = out.sequences.tensor_split([out.sequences.shape[1] - num_steps], dim=1)
    if not num_steps:  # beams of transformers' that all ended before their first token
        num_steps, generated = 1, generated.new_full((len(generated), 1), fill_token(config))
        beam_indices = torch.full_like(generated, -1)
    steps, fill = torch.arange(num_steps, device=generated.device), fill_token(config)
    lengths = steps.new_full((len(generated),), num_steps)
    if end is not None:
        lengths = torch.where(generated == end, steps + 1, num_steps).amin(dim=1)
    if scores is None:
        chosen = [step.gather(1, tokens[:, None]) for step, tokens in zip(out.scores, generated.T, strict=True)]
        is_dead = ((torch.cat(chosen, dim=1) < NEARLY_IMPOSSIBLE) & (steps < lengths[:, None])).any(dim=1)
    else:
        is_dead = dead(scores)
    lengths = lengths.masked_fill(is_dead, 0)
    may_be_shorter = passed_on["stopping_criteria"] or device_catalogue(rules, generated.device).is_ragged
    width = max(int(lengths.max()), 1) if may_be_shorter else num_steps
    is_there = steps[:width] < lengths[:, None]
    generated = torch.where(is_there, generated[:, :width], fill)
    generated = generated.masked_fill(is_dead[:, None], missing_token(rules.shared, fill))
    out.sequences = torch.cat([prompt, generated], dim=1)
    if beam_indices is None:
        out.scores, out.logits = out.scores[:width], out.logits and out.logits[:width]
    else:
        assert scores is not None
        out.sequences_scores = torch.where(is_dead, -torch.inf, scores)
        out.beam_indices = beam_indices[:, :width].masked_fill(~is_there, -1)
        # The beams of a prompt begin as equals; the constraint hides all but the first, which would repeat each other.
        for first in out.scores[:1]:
            equal = first.unflatten(0, (-1, config.num_beams))[:, :1].expand(-1, config.num_beams, -1)
            out.scores = (equal.flatten(0, 1), *out.scores[1:])
    return as_asked(out, asked, rules, width)


def generate_several(generate: Callable[..., Any], call: Call, answers: SeveralLabels) -> Any:
    """Answers of several labels; rows that are none are missing, as elsewhere. This changes the call's config."""
    config, rules, fill = call.config, call.rules, fill_token(call.config)
    asked = config.return_dict_in_generate, config.output_scores
    out, width = run(generate, call, answers)
    beam_indices: Any = getattr(out, "beam_indices", None)
    generated = out.sequences[:, -width:]
    ended = (generated == config.eos_token_id).cumsum(1)
    generated.masked_fill_((ended > 0) & ~((ended == 1) & (generated == config.eos_token_id)), fill)
    if beam_indices is None:
        first = out.scores[0].gather(1, generated[:, :1])
        generated.masked_fill_(first < NEARLY_IMPOSSIBLE, missing_token(rules.shared, fill))
    else:
        lengths = (beam_indices >= 0).sum(1).clamp_min(1)  # by which the mark may have been divided
        sums = out.sequences_scores.double() * lengths**config.length_penalty
        is_dead = dead(out.sequences_scores) | dead(sums)
        generated.masked_fill_(is_dead[:, None], missing_token(rules.shared, fill))
        out.beam_indices = beam_indices.masked_fill(is_dead[:, None], -1)
        out.sequences_scores = out.sequences_scores.masked_fill(is_dead, -torch.inf)
    return as_asked(out, asked, answers.items, width)
