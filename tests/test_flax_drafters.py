# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Trie drafting in Flax changes nothing but the number of forwards, be it with the prompt or after it."""

import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax_table_scorers import TableScorer, prompt_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_catalogues import LENGTH, VOCABULARY, random_index, random_rules, tables

from hf_gr.catalogue.generated import items_of
from hf_gr.core.beam import Beams
from hf_gr.flax import ops
from hf_gr.flax.decode import decode_program
from hf_gr.flax.drafters import TreeDrafter
from hf_gr.flax.noise import Noise
from hf_gr.flax.scores import DecodePlan
from hf_gr.flax.speculation import Context
from hf_gr.flax.transition import device_catalogue

pytestmark = pytest.mark.shapes

SCORE_TOL = 1e-5  # fp32: the same sums in another order
FILL, NUM_ROWS, NUM_BEAMS = 9, 2, 4
FREE = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = (0, 96, 24)  # from the second token on, if beams have small subtrees; else from the third on
PLAN = DecodePlan(
    num_beams=NUM_BEAMS,
    num_return_sequences=NUM_BEAMS,
    num_kept=2 * NUM_BEAMS,
    do_sample=False,
    early_stopping="never",
    max_new_tokens=7,
    fill_token_id=FILL,
    missing_token_id=FILL,
)
DRAFTING = replace(PLAN, drafter=TreeDrafter(SIZES))
ONCE = replace(PLAN, drafter=TreeDrafter(SIZES[:2]))  # a program compiles the faster, the fewer levels may draft
FIRST = replace(PLAN, drafter=TreeDrafter((8, 0, 24), 1))  # one level with the prompt, then all that fits
WHOLE = replace(PLAN, drafter=TreeDrafter((48,), 2))  # two levels with the prompt


def check(seed: int, plan: DecodePlan, *, ragged: bool, noise: Any = None) -> tuple[int, int]:
    """A call without and with drafts: equal results; the forwards of both."""
    rng = random.Random(seed)
    params = tables(seed, NUM_ROWS, vocabulary=VOCABULARY, longest=LENGTH + 1)
    catalogue = device_catalogue(random_rules(rng, random_index(rng, ragged=ragged)), num_rows=NUM_ROWS)
    plain, ours = (
        decode_program(TableScorer(VOCABULARY), params, catalogue, prompt_of(NUM_ROWS), one, noise)
        for one in (replace(plan, drafter=None), plan)
    )
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.beam_indices.tolist() == plain.beam_indices.tolist()
    np.testing.assert_allclose(ours.scores, plain.scores, atol=SCORE_TOL, rtol=0)
    assert ours.num_levels.tolist() == plain.num_levels.tolist()
    happened, before = ours.speculation, plain.speculation
    assert before.target_forwards.tolist() == (plain.num_levels - 1).tolist()
    assert not np.asarray(before.drafted_nodes).any()
    forwards = int(happened.target_forwards[0]), int(before.target_forwards[0])
    # The row that needs most decides; of sequences of several lengths it may be done before its last level.
    needed = int((forwards[1] - happened.accepted_steps).max())
    assert forwards[0] <= needed if ragged else forwards[0] == needed
    assert (happened.accepted_nodes <= happened.drafted_nodes).all()
    assert (happened.accepted_nodes <= NUM_BEAMS * happened.accepted_steps).all()
    assert (happened.drafted_steps >= happened.accepted_steps).all()
    return forwards


@pytest.mark.parametrize(
    ("plan", "ragged"),
    [
        pytest.param(DRAFTING, False, marks=pytest.mark.slow),
        pytest.param(ONCE, True, marks=pytest.mark.slow),
        pytest.param(WHOLE, True, marks=pytest.mark.slow),
        pytest.param(FIRST, False, marks=pytest.mark.slow),
        (FIRST, True),
    ],
    ids=["fixed", "once", "whole", "fixed-first", "ragged"],
)
@FREE
@given(seed=st.integers(0, 10**6))
def test_drafts_change_nothing(one_shape: None, plan: DecodePlan, ragged: bool, seed: int) -> None:
    check(seed, plan, ragged=ragged)


def test_drafts_of_samples_save_forwards(one_shape: None) -> None:
    """Of paths that start as one node each."""
    plan = replace(WHOLE, num_beams=1, num_kept=2, do_sample=True, early_stopping=False, temperature=np.float32(2))
    noises = [Noise.of(np.arange(NUM_ROWS) + 10**6 * seed) for seed in range(10)]
    runs = [check(seed, plan, ragged=False, noise=noise) for seed, noise in enumerate(noises)]
    assert set(runs) == {(LENGTH - 3, LENGTH - 1)}  # never a level less, whatever a filter leaves


def test_a_draft_with_the_prompt_is_all_that_is_legal_and_has_children(one_shape: None) -> None:
    """Against a walk through what every row may be answered with."""
    drafter = WHOLE.drafter
    assert isinstance(drafter, TreeDrafter)
    root, levels = Beams.start(ops, None, batch_size=NUM_ROWS, width=1), jax.numpy.zeros(NUM_ROWS, np.int32)
    draft = jax.jit(lambda catalogue: drafter.draft(root, levels, levels == 0, Context(catalogue, WHOLE)))
    for seed in range(8):
        rng = random.Random(seed)
        index = random_index(rng, ragged=True)
        rules = random_rules(rng, index)
        catalogue = device_catalogue(rules, num_rows=NUM_ROWS)
        made = draft(catalogue)
        drafted, num_steps = made.nodes, made.num_steps
        tokens, parents, states, of_nodes = jax.device_get(
            (drafted.tokens, drafted.parents, drafted.states, drafted.depths)
        )
        for row in range(NUM_ROWS):
            sequences = [tuple(s) for s in index if any(items_of(rules, np.array([s]), np.array([row])))]
            legal = {s[:depth] for s in sequences for depth in (1, 2) if len(s) > depth}
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(tokens[row], parents[row], strict=True):
                paths.append((*paths[parent], int(token)))
            is_there = states[row] != int(catalogue.dead_state)
            found = [path for path, real in zip(paths[1:], is_there, strict=True) if real]
            assert sorted(found) == sorted(legal)
            depths = [len(path) for path in found]
            assert depths == of_nodes[row][is_there].tolist()
            assert num_steps[row] == max(depths, default=0)
