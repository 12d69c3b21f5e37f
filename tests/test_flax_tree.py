# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Ancestry and warpers in JAX, against the PyTorch side's and transformers' on small arrays.

Selection and the pool are those of `hf_gr.core`, over operations that test_core_ops.py compares.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_gr.flax import scores, tree
from hf_gr.torch import tree as torch_tree

pytestmark = pytest.mark.shapes

BATCH = 2


def test_who_sees_whom_equals_the_other_side() -> None:
    """Two levels of beams, then nodes of two levels below the second."""
    rng, none = np.random.default_rng(0), torch.zeros((BATCH, 0), dtype=torch.bool)
    chosen, below, lowest = (rng.integers(0, width, (BATCH, 4)) for width in (4, 4, 4))
    theirs = torch_tree.Tree.over_prompt(BATCH, torch.device("cpu"))
    for depth, parents in enumerate((np.zeros_like(chosen), chosen, below, lowest), start=1):
        theirs = theirs.grow(torch.from_numpy(parents), depth=depth)
        if depth == 2:
            of_beams = theirs.attention_mask(none)[:, 0]
    expected = theirs.attention_mask(none)[:, 0]  # of the lowest
    beam_indices = jnp.asarray(np.stack([np.zeros_like(chosen), chosen], axis=-1), jnp.int32)
    of_slots = tree.slots_seen(beam_indices, jnp.full(BATCH, 2), 4)
    assert of_slots.tolist() == of_beams[..., :4].tolist()
    own, of_beam = tree.nodes_seen(jnp.asarray(np.concatenate([below, lowest + 4], axis=1)), 4, num_levels=2)
    of_nodes = np.take_along_axis(np.asarray(of_slots), np.asarray(of_beam)[..., None], axis=1)
    assert np.concatenate([of_nodes, own], axis=-1)[:, -4:].tolist() == expected.tolist()


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize(
    ("ours", "theirs", "value"),
    [
        (scores.keep_top_k, TopKLogitsWarper, 3),
        (scores.keep_top_k, TopKLogitsWarper, 50),
        (scores.keep_top_p, TopPLogitsWarper, 0.6),
        (scores.keep_top_p, TopPLogitsWarper, 0.01),
        (scores.keep_min_p, MinPLogitsWarper, 0.2),
        (scores.keep_min_p, MinPLogitsWarper, 1.0),
    ],
)
def test_warpers_are_those_of_transformers(ours: Any, theirs: Any, value: Any, keep: int) -> None:
    scores = np.random.default_rng(0).normal(scale=2.0, size=(BATCH, 4, 9)).astype(np.float32)
    scores[0, :2, 3:] = -np.inf
    scores[1, 3] = -np.inf  # a dead beam
    found = np.asarray(ours(jnp.asarray(scores), value, min_tokens_to_keep=keep))
    expected = theirs(value, min_tokens_to_keep=keep)(None, torch.from_numpy(scores.reshape(-1, 9)))
    assert not np.isnan(found).any()
    alive = np.isfinite(scores).any(-1).ravel()
    assert (found.reshape(-1, 9)[alive] == expected.numpy()[alive]).all()
    assert (found[1, 3] == -np.inf).all()
