# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Selection, the pool, ancestry and warpers in JAX, against the PyTorch side's and transformers' on small arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import (
    LogitNormalization,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

pytest.importorskip("jax")

import jax.numpy as jnp

from hf_gr.core import beam
from hf_gr.core.beam import DEAD, Beams, Finished
from hf_gr.flax import ops, tree, warpers
from hf_gr.flax.children import Children
from hf_gr.torch import children as torch_children
from hf_gr.torch import ops as torch_ops
from hf_gr.torch import tree as torch_tree

pytestmark = pytest.mark.shapes

BATCH, WIDTH, CHILDREN, LENGTH = 2, 5, 6, 3
FIELDS = ("sequences", "beam_indices", "scores", "states")


def random_beams(seed: int) -> dict[str, np.ndarray]:
    """Fields of beams, one of them dead."""
    rng = np.random.default_rng(seed)
    shape = (BATCH, WIDTH, LENGTH)
    scores = -np.sort(rng.uniform(0.1, 5.0, shape[:2])).astype(np.float32)
    scores[1, -1] = -np.inf
    integers = [rng.integers(0, 9, shape).astype(np.int32) for _ in range(2)]
    return dict(zip(FIELDS, (*integers, scores, rng.integers(0, 9, shape[:2]).astype(np.int32)), strict=True))


def both(fields: dict[str, np.ndarray]) -> tuple[Beams, Beams]:
    theirs = {name: torch.from_numpy(value) for name, value in fields.items()}
    theirs |= {name: value.long() for name, value in theirs.items() if name != "scores"}
    return Beams(ops, **{name: jnp.asarray(value) for name, value in fields.items()}), Beams(torch_ops, **theirs)


def candidates(seed: int) -> tuple[Any, Any, np.ndarray]:
    """Children on both sides, and their scores."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 9, (BATCH, WIDTH, CHILDREN)).astype(np.int32)
    legal = rng.random(tokens.shape) < 0.6
    first = rng.integers(20, 90, (BATCH, WIDTH)).astype(np.int32)
    states = torch.from_numpy(first).long()[..., None] + torch.arange(CHILDREN)
    scores = np.where(legal, rng.normal(size=tokens.shape).astype(np.float32), -np.inf)
    theirs = torch_children.Children(torch.from_numpy(tokens).long(), torch.from_numpy(legal), states)
    return Children(jnp.where(legal, tokens, -1), jnp.asarray(first)), theirs, scores


def check_equal(ours: Any, theirs: Any, names: tuple[str, ...]) -> None:
    """Where beams exist, everything is equal; elsewhere, their scores are."""
    alive = np.isfinite(np.asarray(theirs.scores))
    for name in names:
        mine, other = np.asarray(getattr(ours, name)), getattr(theirs, name).numpy()
        assert mine.shape == other.shape
        if name in ("scores", "may_improve"):
            np.testing.assert_allclose(mine, other, rtol=1e-6)
        else:
            assert (mine[alive] == other[alive]).all(), name


@pytest.mark.parametrize("seed", range(3))
def test_selections_equal_the_other_side(seed: int) -> None:
    (ours, theirs), (legal, their_legal, scores) = both(random_beams(seed)), candidates(seed)
    for name, kwargs in (("select", {"num_kept": 7}), ("choose", {})):
        mine = getattr(beam, name)(ours, legal, jnp.asarray(scores), dead_state=7, **kwargs)
        other = getattr(beam, name)(theirs, their_legal, torch.from_numpy(scores), dead_state=7, **kwargs)
        check_equal(mine, other, FIELDS)
    picked = np.random.default_rng(seed).integers(0, WIDTH * CHILDREN + 1, (BATCH, 9))
    picked[0, :2] = WIDTH * CHILDREN, WIDTH * CHILDREN - 1  # none, and the last child
    mine = beam.select(ours, legal, jnp.asarray(scores), num_kept=9, dead_state=7, picked=jnp.asarray(picked))
    given = (theirs, their_legal, torch.from_numpy(scores))
    other = beam.select(*given, num_kept=9, dead_state=7, picked=torch.from_numpy(picked))
    check_equal(mine, other, FIELDS)
    assert (np.asarray(mine.states)[np.asarray(mine.scores) == DEAD] == 7).all()
    best, their_best = beam.keep_best(ours, 3), beam.keep_best(theirs, 3)
    check_equal(best, their_best, FIELDS)


def test_missing_candidates_are_dead() -> None:
    (ours, _), (legal, _, scores) = both(random_beams(0)), candidates(0)
    kept = beam.select(ours, legal, jnp.asarray(scores), num_kept=99, dead_state=7)
    dead = np.asarray(kept.scores) == DEAD
    assert (np.asarray(kept.states)[dead] == 7).all()
    assert (~dead).sum() == (scores > DEAD).sum()


def none_yet(width: int) -> tuple[Finished, Finished]:
    shape = {"batch_size": BATCH, "width": width, "max_length": 6}
    return Finished.none_yet(ops, jnp.zeros(()), **shape), Finished.none_yet(torch_ops, torch.zeros(()), **shape)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_pools_equal_the_other_side(early_stopping: bool | str) -> None:
    names = ("sequences", "beam_indices", "scores", "may_improve")
    options = {"length_penalty": 0.7, "early_stopping": early_stopping}
    ours, theirs = none_yet(3)
    for seed in range(4):
        mine, other = both(random_beams(seed))
        ends = np.random.default_rng(seed).random((BATCH, WIDTH)) < 0.5
        mine, ours = beam.retire(mine, ours, jnp.asarray(ends), **options)
        other, theirs = beam.retire(other, theirs, torch.from_numpy(ends), **options)
        ours = beam.update_may_improve(mine, ours, max_new_tokens=9, **options)
        theirs = beam.update_may_improve(other, theirs, max_new_tokens=9, **options)
        check_equal(mine, other, FIELDS)
        check_equal(ours, theirs, names)
        assert ours.is_full.tolist() == theirs.is_full.tolist()


def test_paths_finish_in_their_own_places() -> None:
    mine, other = both(random_beams(3))
    ends = np.array([[True, False, True, False, True]] * BATCH)
    pool, their_pool = none_yet(WIDTH)
    ours = beam.retire_in_place(mine, pool, jnp.asarray(ends))
    theirs = beam.retire_in_place(other, their_pool, torch.from_numpy(ends))
    check_equal(ours[0], theirs[0], FIELDS)
    check_equal(ours[1], theirs[1], ("sequences", "beam_indices", "scores"))
    at_once = beam.finish(mine, length_penalty=0.7)
    check_equal(at_once, beam.finish(other, length_penalty=0.7), ("sequences", "beam_indices", "scores"))


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
        (warpers.keep_top_k, TopKLogitsWarper, 3),
        (warpers.keep_top_k, TopKLogitsWarper, 50),
        (warpers.keep_top_p, TopPLogitsWarper, 0.6),
        (warpers.keep_top_p, TopPLogitsWarper, 0.01),
        (warpers.keep_min_p, MinPLogitsWarper, 0.2),
        (warpers.keep_min_p, MinPLogitsWarper, 1.0),
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


def test_renormalisation_is_that_of_transformers() -> None:
    scores = np.random.default_rng(0).normal(size=(BATCH, 3, 5)).astype(np.float32)
    scores[0, 0, 2:] = -np.inf
    expected = LogitNormalization()(None, torch.from_numpy(scores)).numpy()
    np.testing.assert_allclose(warpers.renormalize(jnp.asarray(scores)), expected, atol=1e-6)
    assert (warpers.renormalize(jnp.full((1, 1, 3), DEAD)) == DEAD).all()
