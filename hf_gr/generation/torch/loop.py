# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' own loop with a logits processor, for what neither layout supports. Repairs that loop's output.

When legal beams run out, transformers continues with illegal ones; they become padding, after the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList

from hf_gr.catalogue.snapshot import BatchRules
from hf_gr.generation.internals import as_it_is
from hf_gr.generation.models import fill_token

from .caches import copy_cache
from .call import Call
from .logits_process import ConstraintLogitsProcessor
from .outputs import output_class

# A score below this is transformers' mark for "no such beam", -1e9, divided by a length.
DEAD_IN_TRANSFORMERS = -1e6


def generate_by_processor(generate: Callable[..., Any], call: Call) -> Any:
    """Call transformers' `generate` and return what it would for a constrained model.

    Args:
        generate: transformers' own, bound to the model.
        call: the call; its config is changed.

    Raises:
        ValueError: `past_key_values` together with several paths a prompt, which this loop cannot share.
    """
    config, rules, fill_token_id = call.config, call.rules, fill_token(call.config)
    passed_on, model_kwargs = call.passed_on, call.model_kwargs
    cache = model_kwargs.get("past_key_values")
    if cache is not None:
        if max(config.num_beams, config.num_return_sequences) > 1:
            raise ValueError(
                "past_key_values is given for several paths a prompt, expected None: this model or these options "
                "decode in transformers' own loop, which needs a row a beam"
            )
        model_kwargs = {**model_kwargs, "past_key_values": copy_cache(cache)}
    processors = [ConstraintLogitsProcessor._of_rules(rules), *(passed_on["logits_processor"] or ())]
    passed_on = {**passed_on, "logits_processor": LogitsProcessorList(processors)}
    as_tensor, with_scores = not config.return_dict_in_generate, config.output_scores
    config.return_dict_in_generate = config.output_scores = True
    config.eos_token_id = rules.shared.eos_token_id  # every other end token is an ordinary code here
    if config.renormalize_logits and config.early_stopping is True:
        # Renormalising gives the only token of a beam that has ended probability 1: one more sequence found, which
        # ends the search too early.
        config.early_stopping = False
    out = generate(call.inputs, as_it_is(config), **passed_on, **model_kwargs)

    out.sequences = out.sequences.masked_fill(out.sequences < 0, fill_token_id)  # filling if there is no end token
    scores: Any = getattr(out, "sequences_scores", None)
    beam_indices: Any = getattr(out, "beam_indices", None)
    num_steps = len(out.scores) if beam_indices is None else beam_indices.shape[1]
    prompt_length = out.sequences.shape[1] - num_steps
    may_stop = bool(passed_on["stopping_criteria"]) or config.stop_strings is not None
    rows = out.sequences[:, prompt_length:].tolist()
    wrong = torch.tensor(
        [
            not _is_legal(rules, number // config.num_return_sequences, row, fill_token_id, may_stop)
            for number, row in enumerate(rows)
        ]
    )
    wrong = wrong.to(out.sequences.device)
    if scores is not None:
        wrong |= scores < DEAD_IN_TRANSFORMERS
    requests = wrong.view(-1, config.num_return_sequences).int()
    order = requests.argsort(dim=1, stable=True)
    order = (order + torch.arange(len(order), device=order.device)[:, None] * requests.shape[1]).flatten()
    sequences = out.sequences.clone()
    sequences[wrong, prompt_length:] = fill_token_id
    out.sequences = sequences[order]
    if as_tensor:
        return out.sequences
    if scores is not None and beam_indices is not None:
        out.sequences_scores = scores.masked_fill(wrong, -torch.inf)[order] if with_scores else None
        out.beam_indices = beam_indices.masked_fill(wrong[:, None], -1)[order]
    if not with_scores:
        out.scores = None
    is_encoder_decoder = hasattr(out, "decoder_attentions")
    made = output_class(is_encoder_decoder=is_encoder_decoder, is_beam_search=hasattr(out, "beam_indices"))
    return made(**out)


def _is_legal(rules: BatchRules, prompt: int, row: list[int], fill_token_id: int, may_stop: bool) -> bool:
    """Whether a generated row is an item, or the prefix of one that the user's own criterion stopped."""
    if rules.items(prompt, row):
        return True
    while row and row[-1] == fill_token_id:
        row = row[:-1]
    return may_stop and bool(row) and bool(rules.of_row(prompt).next_tokens(row))
