# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate(separator=...)`: answers of several labels, by transformers' own loop with the logits processor.

Axes: R returned rows; T generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_gr.catalogue.sequences import to_host
from hf_gr.generation.answers import with_items
from hf_gr.generation.checks import missing_token
from hf_gr.generation.internals import as_it_is
from hf_gr.generation.models import fill_token

from .call import Call
from .constraints import NEARLY_IMPOSSIBLE, SeveralLabels
from .logits_process import ConstraintLogitsProcessor
from .outputs import output_class

# transformers marks what is no beam by adding -1e9, before or after it divides by the length; ours is far lower.
DEAD = -5e8


def is_dead(scores: Tensor) -> Tensor:
    """Which scores are of no answer."""
    return scores < DEAD


def generate_several(generate: Callable[..., Any], call: Call, answers: SeveralLabels) -> Any:
    """Answers of several labels; rows that are none are missing, as elsewhere. This changes the call's config."""
    config, rules, fill = call.config, call.rules, fill_token(call.config)
    if call.model_kwargs.get("past_key_values") is not None and max(config.num_beams, config.num_return_sequences) > 1:
        raise ValueError("past_key_values is given with separator and several paths a prompt, expected None: omit it")
    processors = [ConstraintLogitsProcessor._of(answers), *(call.passed_on["logits_processor"] or ())]
    if rules.shared.eos_token_id not in np.ravel(to_host(config.eos_token_id)):
        config.min_length = config.min_new_tokens = None  # they postpone the end tokens that the config names
    config.eos_token_id = rules.shared.eos_token_id
    asked = config.return_dict_in_generate, config.output_scores
    config.return_dict_in_generate = config.output_scores = True
    given = {**call.passed_on, "logits_processor": LogitsProcessorList(processors)}
    out = generate(call.inputs, as_it_is(config), **given, **call.model_kwargs)

    beam_indices: Any = getattr(out, "beam_indices", None)
    width = len(out.scores) if beam_indices is None else beam_indices.shape[1]
    generated = out.sequences[:, -width:]
    ended = (generated == config.eos_token_id).cumsum(1)
    generated.masked_fill_((ended > 0) & ~((ended == 1) & (generated == config.eos_token_id)), fill)
    if beam_indices is None:
        first = out.scores[0].gather(1, generated[:, :1])
        generated.masked_fill_(first < NEARLY_IMPOSSIBLE, missing_token(rules.shared, fill))
    else:
        lengths = (beam_indices >= 0).sum(1).clamp_min(1)  # by which the mark may have been divided
        sums = out.sequences_scores.double() * lengths**config.length_penalty
        dead = is_dead(out.sequences_scores) | is_dead(sums)
        generated.masked_fill_(dead[:, None], missing_token(rules.shared, fill))
        out.beam_indices = beam_indices.masked_fill(dead[:, None], -1)
        out.sequences_scores = out.sequences_scores.masked_fill(dead, -torch.inf) if asked[1] else None
    if not asked[0]:
        return out.sequences
    out.scores = out.scores if asked[1] else None
    is_encoder_decoder = hasattr(out, "decoder_attentions")
    made = output_class(is_encoder_decoder=is_encoder_decoder, is_beam_search=beam_indices is not None)
    return with_items(made(**out), answers.items, out.sequences.shape[1] - width)
