# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Our contender of `step.py`: everything that it knows of the library's internals is here.

Axes: B batch, K beams, N items.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from generate import Answer
from step_catalogues import LENGTH

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch.decode import DecodePlan, decode
from hf_gr.torch.transition import DeviceCatalogue, device_catalogue

WITH_RULE, WITH_EXCLUSIONS = "ours, a rule", "ours, exclusions"
EXCLUDED = 100  # items of each request


def load(rows: np.ndarray, device: torch.device) -> DeviceCatalogue:
    return device_catalogue(combine_rules([ConstraintIndex.from_sequences(rows).snapshot]), device)


def load_rules(
    index: ConstraintIndex, beams: int, batch: int, device: torch.device, seed: int
) -> dict[str, tuple[DeviceCatalogue, list[np.ndarray]]]:
    """By contender: the catalogue under a rule and under exclusions, and the items that are left to each request."""
    random = np.random.default_rng(seed)
    number = index.num_items
    left = np.ones((batch, number), dtype=bool)
    for row in left:
        row[random.choice(number, min(EXCLUDED, number - beams), replace=False)] = False
    meets = random.random(number) < 0.5 if number > 4 * beams else left[0]
    view = index.where(meets)
    excluded = combine_rules([index.snapshot], [np.flatnonzero(~row) for row in left])
    of_rule = combine_rules([view.snapshot])
    return {
        WITH_RULE: (device_catalogue(of_rule, device), [meets] * batch),
        WITH_EXCLUSIONS: (device_catalogue(excluded, device), list(left)),
    }


@cache  # a call's own, not a step's
def make_plan(batch_size: int, num_beams: int, device: torch.device) -> DecodePlan:
    return DecodePlan(
        prompt=torch.zeros((batch_size, 0), dtype=torch.long, device=device),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        num_kept=2 * num_beams,  # as in transformers
        do_sample=False,
        length_penalty=0.0,  # scores are sums
        early_stopping=False,
        max_new_tokens=LENGTH,
        fill_token_id=0,
        missing_token_id=0,
    )


def ours(catalogue: DeviceCatalogue, scorer: Any, num_beams: int) -> Answer:
    batch_size = len(scorer.prompt_logits)
    plan = make_plan(batch_size, num_beams, scorer.prompt_logits.device)
    decoded = decode(scorer, catalogue, plan)
    shape = (batch_size, num_beams)
    return Answer(decoded.sequences.unflatten(0, shape), decoded.scores.view(shape))
