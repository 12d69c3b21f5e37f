# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One checkpoint on both backends, and one call of `generate` on both: PyTorch's answers are the oracle of Flax's."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax
import numpy as np
import torch
from families import DETAILS, EOS, build
from test_draft_head import new_head
from transformers.generation import (
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable
from hf_gr.flax.scores import DecodePlan
from hf_gr.generation.torch.logits_process import OfLiving

SCORE_TOL = 1e-4  # fp32 sums of at most 5 log-probabilities
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 3))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 3].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)
BEAMS = {"num_beams": 4, "num_return_sequences": 4, **DETAILS}
LAYERS = {"t5": "num_layers", "bart": "decoder_layers"}


@cache
def pair(family: str, *, seed: int = 0, layers: int = 1, head: int = 0, **config: Any) -> tuple[Any, Any, Path]:
    """A model in PyTorch and in Flax, and its checkpoint; `head` is the number of levels of a draft head."""
    number = {LAYERS.get(family, "num_hidden_layers"): layers}
    model = enable(build(family, seed=seed, config=number | config))
    if head:
        model.add_draft_head(new_head(head, transition="rnn"))
    folder = Path(mkdtemp())
    model.save_pretrained(folder)
    return model, AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="flax"), folder


def to_numpy(inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in inputs.items()}


def check(models: Any, inputs: dict[str, torch.Tensor], mine: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Both sides, with what differs in Flax in `mine`: equal sequences, scores, items and steps."""
    theirs = models[0].generate(**inputs, **kwargs)
    with jax.default_matmul_precision("highest"):
        ours = models[1].generate(**to_numpy(inputs), **{**kwargs, **(mine or {})})
    assert isinstance(ours.sequences, jax.Array)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.item_ids == theirs.item_ids
    proven = [None if out.get("num_proven") is None else out.num_proven.tolist() for out in (ours, theirs)]
    assert proven[0] == proven[1]
    if theirs.get("beam_indices") is not None:
        assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()
        np.testing.assert_allclose(ours.sequences_scores, theirs.sequences_scores.numpy(), atol=SCORE_TOL, rtol=0)
    for level, scores in enumerate(theirs.scores or ()):
        alive = np.isfinite(scores.numpy()).any(-1)
        for found, expected in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
            if expected is not None:
                mine, other = np.asarray(found[level]), expected[level].numpy()
                np.testing.assert_allclose(mine[alive], other[alive], atol=SCORE_TOL, rtol=0)
    return ours


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
