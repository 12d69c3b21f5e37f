# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate(separator=...)`: answers of several labels, by transformers' own loop with the logits processor.

Axes: R returned rows; T generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_gr.generation.checks import missing_token
from hf_gr.generation.models import fill_token

from .call import Call
from .constraints import NEARLY_IMPOSSIBLE, SeveralLabels
from .loop import as_asked, run

# transformers marks what is no beam by adding -1e9, before or after it divides by the length; ours is far lower.
DEAD = -5e8


def is_dead(scores: Tensor) -> Tensor:
    """Which scores are of no answer."""
    return scores < DEAD


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
        dead = is_dead(out.sequences_scores) | is_dead(sums)
        generated.masked_fill_(dead[:, None], missing_token(rules.shared, fill))
        out.beam_indices = beam_indices.masked_fill(dead[:, None], -1)
        out.sequences_scores = out.sequences_scores.masked_fill(dead, -torch.inf)
    return as_asked(out, asked, answers.items, width)
