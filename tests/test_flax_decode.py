# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The program without a model: scores come from tables, and results are those of PyTorch."""

import random
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax_pairs import processors_of
from flax_table_scorers import TableScorer, prompt_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_catalogues import EOS, LENGTH, VOCABULARY, random_index, random_rows, random_rules, tables
from table_scorers import TableModel, make_plan
from transformers import LogitsProcessorList

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import BatchRules, combine_rules
from hf_gr.flax import decode
from hf_gr.flax.decode import Decoded
from hf_gr.flax.noise import Noise
from hf_gr.flax.scores import DecodePlan
from hf_gr.flax.transition import device_catalogue
from hf_gr.torch import decode as torch_decode
from hf_gr.torch import noise as torch_noise
from hf_gr.torch import transition as torch_transition

pytestmark = pytest.mark.shapes

SCORE_TOL = 1e-4  # fp32, at most 5 additions
CPU = torch.device("cpu")
FILL = 9
SCORER = TableScorer(VOCABULARY)
NUM_ROWS, NUM_BEAMS = 2, 4
FREE = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHARED = tables(0, NUM_ROWS, vocabulary=VOCABULARY, longest=LENGTH + 1)


def plan_of(num_beams: int = NUM_BEAMS, **kwargs: Any) -> DecodePlan:
    """A plan with transformers' defaults."""
    defaults = {"num_return_sequences": num_beams, "num_kept": 2 * num_beams, "do_sample": False}
    defaults |= {"early_stopping": "never", "max_new_tokens": 7, "fill_token_id": FILL, "missing_token_id": FILL}
    return DecodePlan(num_beams=num_beams, **(defaults | kwargs))


def run(rules: BatchRules, plan: DecodePlan, params: Any = SHARED, *, noise: Any = None) -> Decoded:
    catalogue = device_catalogue(rules, num_rows=NUM_ROWS)
    return decode.decode_program(SCORER, params, catalogue, prompt_of(NUM_ROWS), plan, noise)


def check(rules: BatchRules, plan: DecodePlan, params: Any = SHARED, *, seeds: np.ndarray | None = None) -> None:
    """Both sides: the same sequences in the same order, the same scores."""
    noises = (None, None) if seeds is None else (Noise.of(seeds), torch_noise.Noise(torch.from_numpy(seeds)))
    ours = run(rules, plan, params, noise=noises[0])
    names = ("num_return_sequences", "num_kept", "do_sample", "early_stopping", "max_new_tokens", "output_scores")
    shared = {name: getattr(plan, name) for name in (*names, "length_penalty", "output_logits", "forces_end")}
    if processors := processors_of(plan):  # after the constraint
        shared["processors"] = (LogitsProcessorList(), LogitsProcessorList(processors))
    model = TableModel([torch.from_numpy(table) for table in params], NUM_ROWS)
    catalogue = torch_transition.device_catalogue(rules, CPU)
    theirs = torch_decode.decode(model(), catalogue, make_plan(NUM_ROWS, plan.num_beams, noise=noises[1], **shared))
    num_rows, length = theirs.sequences.shape
    sequences = np.asarray(ours.sequences).reshape(num_rows, -1)
    assert sequences[:, :length].tolist() == theirs.sequences.tolist()
    assert (sequences[:, length:] == FILL).all()
    # Powers of 90 in fp32 are exact to some units of the fifth digit.
    np.testing.assert_allclose(np.asarray(ours.scores).ravel(), theirs.scores.numpy(), atol=SCORE_TOL, rtol=1e-4)
    offsets = np.arange(NUM_ROWS)[:, None, None] * plan.width
    paths = np.where(ours.beam_indices >= 0, ours.beam_indices + offsets, -1).reshape(num_rows, -1)
    assert paths[:, :length].tolist() == theirs.beam_indices.tolist()
    if theirs.step_scores is None or theirs.step_logits is None:
        return
    assert ours.num_levels.tolist() == [len(theirs.step_scores)] * NUM_ROWS
    for level, expected in enumerate(theirs.step_scores):
        alive = expected.isfinite().any(-1).numpy()
        scores, logits = (np.asarray(of[level]).reshape(expected.shape) for of in (ours.step_scores, ours.step_logits))
        np.testing.assert_allclose(scores[alive], expected.numpy()[alive], atol=SCORE_TOL, rtol=0)
        assert (scores[~alive] == -np.inf).all()
        np.testing.assert_allclose(logits[alive], theirs.step_logits[level].numpy()[alive], atol=SCORE_TOL, rtol=0)


WARM = np.float32(0.7)
DETAILS = {"output_scores": True, "output_logits": True}
LENGTHS = {"early_stopping": False, "num_return_sequences": 3, "forces_end": True, "max_new_tokens": LENGTH + 1}
STOPPING = {"early_stopping": True, "renormalize_logits": True}
# Beams, whether sequences have several lengths, and options; of 40 beams, upper levels have fewer candidates.
PLANS: list[tuple[int, bool, dict[str, Any]]] = [
    (4, True, {}),
    (4, True, LENGTHS),
    (40, False, {}),
    (1, True, DETAILS),
    (8, True, STOPPING | DETAILS),
    (4, True, {"do_sample": True, "num_kept": 12, "min_tokens_to_keep": 3, "min_p": np.float32(0.05)}),
    (
        1,
        True,
        {"do_sample": True, "num_return_sequences": 5, "temperature": WARM, "top_k": 4, "top_p": np.float32(0.8)},
    ),
]


@pytest.mark.parametrize(
    ("num_beams", "ragged", "options"),
    PLANS,
    ids=str,
)
@FREE
@given(seed=st.integers(0, 2**62), length_penalty=st.sampled_from([1.0, 0.0, -0.5, 2.0, 30.0, -30.0]))
def test_catalogues_in_every_state_equal_the_other_side(
    one_shape: None, num_beams: int, ragged: bool, options: dict[str, Any], seed: int, length_penalty: float
) -> None:
    rng = random.Random(seed)
    params = tables(seed, NUM_ROWS, vocabulary=VOCABULARY, longest=LENGTH + 1)
    rules = random_rules(rng, random_index(rng, ragged=ragged))
    seeds = np.array([seed, -seed]) if options.get("do_sample") else None
    check(rules, plan_of(num_beams, length_penalty=length_penalty, **options), params, seeds=seeds)


def test_a_dead_row_stays_dead_and_the_others_do_not_notice(one_shape: None) -> None:
    index = ConstraintIndex.from_sequences(random_rows(random.Random(0), 100, ragged=False))
    ids = index.item_ids.tolist()
    whole, twin, one = (index.where(some).snapshot for some in (ids, ids, [3]))
    plan = plan_of(40, missing_token_id=7, length_penalty=1.0)
    decoded = run(combine_rules([whole, one], [[], [3]]), plan)
    assert (decoded.sequences[1] == 7).all()
    assert (decoded.scores[1] == -np.inf).all()
    assert np.isfinite(decoded.scores[0]).all()
    alone = run(combine_rules([whole, twin], [[], []]), plan)
    assert np.array_equal(alone.sequences[0], decoded.sequences[0])


def test_nothing_in_it_asks_the_host_and_the_prompt_is_not_copied_when_levels_are_skipped() -> None:
    index = ConstraintIndex.from_sequences([[1], [2], [3, 4, 5, 6]], eos_token_id=EOS)
    catalogue = device_catalogue(combine_rules([index.snapshot]), num_rows=NUM_ROWS)
    jaxpr = jax.make_jaxpr(lambda *args: decode.decode(SCORER, *args))(
        SHARED, catalogue, prompt_of(NUM_ROWS), plan_of(2, early_stopping=True)
    )
    names = {equation.primitive.name for equation in jaxpr.jaxpr.eqns}
    assert "cond" in names
    assert not {name for name in names if "callback" in name}
    params = [table - 50.0 * (np.arange(VOCABULARY) == 3) for table in SHARED]
    skipped = run(combine_rules([index.snapshot]), plan_of(2, early_stopping=True), params)
    assert skipped.num_levels.tolist() == [2, 2]
    assert sorted(skipped.sequences[0, :, 0].tolist()) == [1, 2]
