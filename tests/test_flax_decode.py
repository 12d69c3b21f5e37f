# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The program without a model: scores come from tables, results from the PyTorch side and from the slow search."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from flax_catalogues import EOS, LENGTH, VOCABULARY, random_index, random_rows, random_rules
from flax_table_scorers import TableScorer, prompt_of, tables
from flax_warpers import processors_of
from reference import reference_beam_search
from table_scorers import TableModel
from test_decode import make_plan
from transformers import LogitsProcessorList

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import BatchRules, combine_rules
from hf_gr.core import beam
from hf_gr.core.beam import Beams
from hf_gr.flax import decode, ops
from hf_gr.flax.decode import Decoded
from hf_gr.flax.noise import Noise
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.transition import DeviceCatalogue, device_catalogue
from hf_gr.torch import decode as torch_decode
from hf_gr.torch import noise as torch_noise
from hf_gr.torch import transition as torch_transition

pytestmark = pytest.mark.shapes

SCORE_TOL = 1e-4  # fp32, at most 5 additions
CPU = torch.device("cpu")
FILL = 9
SCORER = TableScorer(VOCABULARY)
NUM_ROWS, NUM_BEAMS = 2, 4
SLOW = pytest.mark.slow  # what compiles another program for what one has proven already
FREE = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHARED = tables(0, NUM_ROWS, vocabulary=VOCABULARY, longest=LENGTH + 1)
# The catalogue in one state: additions, removals, a rule for every row, exclusions.
SOME_INDEX = random_index(random.Random(2), ragged=True)


def plan_of(num_beams: int = NUM_BEAMS, **kwargs: Any) -> DecodePlan:
    """A plan with transformers' defaults."""
    defaults = {"num_return_sequences": num_beams, "num_kept": 2 * num_beams, "do_sample": False}
    defaults |= {"early_stopping": "never", "max_new_tokens": 7, "fill_token_id": FILL, "missing_token_id": FILL}
    return DecodePlan(num_beams=num_beams, **(defaults | kwargs))


def run(
    rules: BatchRules, plan: DecodePlan, params: Any = SHARED, *, noise: Any = None, fresh: bool = False
) -> Decoded:
    program = jax.jit(lambda *args: decode.decode(SCORER, *args)) if fresh else None
    catalogue = device_catalogue(rules, num_rows=NUM_ROWS)
    if program is not None:
        return program(params, catalogue, prompt_of(NUM_ROWS), plan, noise)
    return decode.decode_program(SCORER, params, catalogue, prompt_of(NUM_ROWS), plan, noise)


def run_torch(
    rules: BatchRules, plan: DecodePlan, params: Any = SHARED, *, noise: torch_noise.Noise | None = None
) -> torch_decode.Decoded:
    """The same call on the other side."""
    names = ("num_return_sequences", "num_kept", "do_sample", "early_stopping", "max_new_tokens", "output_scores")
    shared = {name: getattr(plan, name) for name in (*names, "length_penalty", "output_logits", "forces_end")}
    if processors := processors_of(plan):  # after the constraint
        shared["processors"] = (LogitsProcessorList(), LogitsProcessorList(processors))
    theirs = make_plan(NUM_ROWS, plan.num_beams, noise=noise, **shared)
    model = TableModel([torch.from_numpy(table) for table in params], NUM_ROWS)
    return torch_decode.decode(model(), torch_transition.device_catalogue(rules, CPU), theirs)


def check(
    rules: BatchRules, plan: DecodePlan, params: Any = SHARED, *, seeds: np.ndarray | None = None, fresh: bool = False
) -> None:
    """Both sides: the same sequences in the same order, the same scores."""
    noises = (None, None) if seeds is None else (Noise.of(seeds), torch_noise.Noise(torch.from_numpy(seeds)))
    ours = run(rules, plan, params, noise=noises[0], fresh=fresh)
    theirs = run_torch(rules, plan, params, noise=noises[1])
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


def everything_in(index: ConstraintIndex) -> BatchRules:
    """All of a catalogue, as rules of the shape that others have: one program serves them."""
    ids = index.item_ids.tolist()
    return combine_rules([index.where(ids).snapshot for _ in range(NUM_ROWS)], [[] for _ in range(NUM_ROWS)])


BOTH = [pytest.param(False, marks=SLOW, id="fixed"), pytest.param(True, id="ragged")]
OPTIONS = [
    {"early_stopping": "never"},
    {"early_stopping": False, "num_return_sequences": 3, "forces_end": True, "max_new_tokens": LENGTH + 1},
    {"early_stopping": True, "renormalize_logits": True},
]


@pytest.mark.parametrize("options", [*OPTIONS[:2], pytest.param(OPTIONS[2], marks=SLOW)], ids=str)
@FREE
@given(seed=st.integers(0, 10**6), length_penalty=st.sampled_from([1.0, 0.0, -0.5, 2.0, 30.0, -30.0]))
def test_ragged_catalogues_in_every_state_equal_the_other_side(
    one_shape: None, options: dict[str, Any], seed: int, length_penalty: float
) -> None:
    rng = random.Random(seed)
    params = tables(seed, NUM_ROWS, vocabulary=VOCABULARY, longest=LENGTH + 1)
    rules = random_rules(rng, random_index(rng, ragged=True))
    check(rules, plan_of(length_penalty=length_penalty, **options), params)


@pytest.mark.parametrize("num_beams", [pytest.param(4, marks=SLOW), 40])
@FREE
@given(seed=st.integers(0, 10**6))
def test_fixed_catalogues_in_every_state_equal_the_other_side(one_shape: None, num_beams: int, seed: int) -> None:
    """With 40 beams, upper levels have fewer candidates than beams."""
    rng = random.Random(seed)
    params = tables(seed, NUM_ROWS, vocabulary=VOCABULARY, longest=LENGTH)
    check(random_rules(rng, random_index(rng, ragged=False)), plan_of(num_beams), params)


@pytest.mark.parametrize("ragged", BOTH)
@FREE
@given(seed=st.integers(0, 10**6))
def test_greedy_paths_equal_the_other_side(one_shape: None, ragged: bool, seed: int) -> None:
    rng = random.Random(seed)
    params = tables(seed, NUM_ROWS, vocabulary=VOCABULARY, longest=LENGTH + 1)
    plan = plan_of(1, output_scores=True, output_logits=True)
    check(random_rules(rng, random_index(rng, ragged=ragged)), plan, params)


@pytest.mark.parametrize("ragged", BOTH)
def test_what_is_put_out_equals_the_other_side(one_shape: None, ragged: bool) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        rules = random_rules(rng, random_index(rng, ragged=ragged))
        check(rules, plan_of(8, output_scores=True, output_logits=True, **OPTIONS[2]))


@pytest.mark.parametrize("ragged", BOTH)
def test_beams_equal_the_slow_search(one_shape: None, ragged: bool) -> None:
    rows = random_rows(random.Random(0), 60, ragged=ragged)
    index = ConstraintIndex.from_sequences(rows, eos_token_id=EOS if ragged else None)
    decoded = run(everything_in(index), plan_of())

    def log_probs(row: int, prefix: tuple[int, ...]) -> np.ndarray:
        place = sum(token * VOCABULARY**power for power, token in enumerate(reversed(prefix)))
        logits = SHARED[len(prefix)][row, place].astype(np.float64)
        return logits - np.logaddexp.reduce(logits)

    for row in range(NUM_ROWS):
        expected = reference_beam_search(lambda prefix, row=row: log_probs(row, prefix), list(index), NUM_BEAMS)
        found = [[token for token in path if token != FILL] for path in np.asarray(decoded.sequences)[row].tolist()]
        assert found == [list(sequence) for sequence, _ in expected]
        np.testing.assert_allclose(decoded.scores[row], [score for _, score in expected], atol=SCORE_TOL, rtol=0)


@pytest.mark.parametrize(
    ("home", "name", "spoil"),
    [
        pytest.param(decode, "child_scores", lambda scores: -scores, marks=SLOW),
        (beam, "_extend", lambda kept: replace(kept, beam_indices=jnp.roll(kept.beam_indices, 1, 1))),
        pytest.param(DeviceCatalogue, "is_leaf", lambda leaf: leaf & (np.arange(leaf.shape[1]) > 0), marks=SLOW),
        (decode, "can_change", lambda left: left & False),
    ],
)
def test_a_planted_error_is_seen(home: Any, name: str, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(home, name)
    monkeypatch.setattr(home, name, lambda *args, **kwargs: spoil(right(*args, **kwargs)))
    rows = [row[:2] for row in random_rows(random.Random(1), 60, ragged=True)]  # few levels compile sooner
    index = ConstraintIndex.from_sequences(rows, eos_token_id=EOS)
    with pytest.raises((AssertionError, TypeError)):
        check(combine_rules([index.snapshot]), plan_of(5), fresh=True)


def test_a_dead_row_stays_dead_and_the_others_do_not_notice(one_shape: None) -> None:
    index = ConstraintIndex.from_sequences(random_rows(random.Random(0), 100, ragged=False))
    ids = index.item_ids.tolist()
    plan, params = plan_of(40, missing_token_id=7), SHARED[:LENGTH]
    rules = combine_rules([index.where(ids).snapshot, index.where([3]).snapshot], [[], [3]])
    decoded = run(rules, plan, params)
    assert (decoded.sequences[1] == 7).all()
    assert (decoded.scores[1] == -np.inf).all()
    assert np.isfinite(decoded.scores[0]).all()
    assert np.array_equal(run(everything_in(index), plan, params).sequences[0], decoded.sequences[0])


# Sampling


@pytest.mark.parametrize(
    ("num_beams", "ragged", "options"),
    [
        (4, True, {"temperature": np.float32(1.5)}),
        (1, True, {"num_return_sequences": 5, "temperature": np.float32(0.7), "top_k": 4, "top_p": np.float32(0.8)}),
        pytest.param(4, False, {"top_p": np.float32(0.9), "min_p": np.float32(0.05)}, marks=SLOW),
        pytest.param(4, True, {"early_stopping": True, "renormalize_logits": True, "top_k": 3}, marks=SLOW),
        pytest.param(4, True, {"num_kept": 12, "min_tokens_to_keep": 3, "top_p": np.float32(0.5)}, marks=SLOW),
        pytest.param(40, False, {}, marks=SLOW),
        pytest.param(1, False, {"num_return_sequences": 5}, marks=SLOW),
        pytest.param(1, True, {"min_p": np.float32(0.2), "output_scores": True, "output_logits": True}, marks=SLOW),
    ],
    ids=str,
)
@FREE
@given(seed=st.integers(0, 2**62))
def test_samples_of_catalogues_in_every_state_equal_the_other_side(
    one_shape: None, num_beams: int, ragged: bool, options: dict[str, Any], seed: int
) -> None:
    """With additions, removals, views and exclusions of every row; with 40 beams, fewer candidates than beams."""
    rng = random.Random(seed)
    params = tables(seed, NUM_ROWS, vocabulary=VOCABULARY, longest=LENGTH + 1)
    rules = random_rules(rng, random_index(rng, ragged=ragged))
    check(rules, plan_of(num_beams, do_sample=True, **options), params, seeds=np.array([seed, -seed]))


def legal_distribution(
    index: ConstraintIndex, row: int, *, temperature: float = 1.0, top_k: int = 99, top_p: float = 1.0
) -> dict[tuple[int, ...], float]:
    """The probability of every sequence, by walking them all."""
    found: dict[tuple[int, ...], float] = {}

    def visit(prefix: tuple[int, ...], probability: float) -> None:
        legal = index.allowed_next_tokens(prefix)
        if not legal:
            found[prefix] = probability
            return
        place = sum(token * VOCABULARY**power for power, token in enumerate(reversed(prefix)))
        logits = SHARED[len(prefix)][row, place][legal].astype(np.float64) / temperature
        order = np.argsort(-logits)[:top_k]
        weights = np.exp(logits[order]) / np.exp(logits[order]).sum()
        order = order[: int((weights.cumsum() - weights < top_p).sum())]
        weights = np.exp(logits[order]) / np.exp(logits[order]).sum()
        for place_in_order, weight in zip(order, weights, strict=True):
            visit((*prefix, legal[int(place_in_order)]), probability * float(weight))

    visit((), 1.0)
    return found


def noise_of(seed: int) -> Noise:
    """Of rows with seeds of their own, none of which is another call's."""
    return Noise.of(np.arange(NUM_ROWS) + 10**6 * seed)


def check_frequencies(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float], draws: int) -> None:
    assert sum(counts.values()) == draws
    for sequence in {*counts, *expected}:
        p = expected.get(sequence, 0.0)
        # 5 standard deviations: tests of some 60 frequencies fail once in 30,000 runs, and the keys are fixed.
        assert abs(counts.get(sequence, 0) - draws * p) <= 5 * np.sqrt(draws * p * (1 - p)) + 1e-9, sequence


@pytest.mark.parametrize("warpers", [pytest.param({}, marks=SLOW), {"temperature": 2.0, "top_k": 3, "top_p": 0.8}])
def test_independent_draws_follow_the_constrained_distribution(warpers: dict[str, Any]) -> None:
    index = ConstraintIndex.from_sequences(random_rows(random.Random(3), 16, ragged=True), eos_token_id=EOS)
    draws = 2000
    plan = plan_of(1, num_return_sequences=draws, do_sample=True, **warpers)
    decoded = run(combine_rules([index.snapshot]), plan, noise=noise_of(0))
    for row in range(NUM_ROWS):
        counts: dict[tuple[int, ...], int] = {}
        for path in np.asarray(decoded.sequences)[row].tolist():
            sequence = tuple(token for token in path if token != FILL)
            counts[sequence] = counts.get(sequence, 0) + 1
        check_frequencies(counts, legal_distribution(index, row, **warpers), draws)


def test_beam_samples_follow_draws_without_replacement() -> None:
    """Of one level, two beams are two draws without replacement: which pair, is known."""
    index = ConstraintIndex.from_sequences([[token] for token in range(1, 6)])
    plan = plan_of(2, num_kept=2, do_sample=True, temperature=1.5)
    catalogue = device_catalogue(combine_rules([index.snapshot]), num_rows=NUM_ROWS)
    draws = 4000
    many = jax.jit(
        jax.vmap(
            lambda seeds: (
                decode.decode(SCORER, SHARED[:1], catalogue, prompt_of(NUM_ROWS), plan, Noise(seeds)).sequences
            )
        )
    )
    seeds = Noise.of(np.arange(draws * NUM_ROWS)).seeds.reshape(draws, NUM_ROWS, 2)
    found = np.asarray(many(seeds))[..., 0]
    for row in range(NUM_ROWS):
        p = {s[0]: value for s, value in legal_distribution(index, row, temperature=1.5).items()}
        expected: dict[tuple[int, ...], float] = {}
        for one, two in itertools.permutations(p, 2):
            pair = (min(one, two), max(one, two))
            expected[pair] = expected.get(pair, 0.0) + p[one] * p[two] / (1 - p[one])
        counts: dict[tuple[int, ...], int] = {}
        for pair in np.sort(found[:, row], axis=-1).tolist():
            counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
        check_frequencies(counts, expected, draws)


@SLOW
def test_what_a_row_draws_does_not_depend_on_the_others() -> None:
    index = ConstraintIndex.from_sequences(random_rows(random.Random(3), 100, ragged=True), eos_token_id=EOS)
    plan = plan_of(do_sample=True, temperature=np.float32(3.0))
    first = run(combine_rules([index.snapshot]), plan, noise=noise_of(0))
    other = run(combine_rules([index.snapshot]), plan, noise=Noise.of(np.array([0, 9, *range(2, NUM_ROWS)])))
    assert np.array_equal(first.sequences[0], other.sequences[0])
    assert not np.array_equal(first.sequences[1], other.sequences[1])
    assert (np.diff(first.scores, axis=1) <= 0).all()


# Programs


def test_what_changes_from_call_to_call_compiles_nothing(one_shape: None) -> None:
    rng = random.Random(0)
    index = random_index(rng, ragged=True)
    plan = plan_of(length_penalty=1.0, **OPTIONS[1])
    run(random_rules(rng, index), plan)
    before = decode.decode_program._cache_size()
    index.add(random_rows(rng, 3, ragged=True), ["1000", "1001", "1002"] if index.snapshot.are_strings else [1, 2, 3])
    for length_penalty in (1.0, 0.3):
        rules = random_rules(rng, index)
        run(rules, replace(plan, length_penalty=length_penalty, max_new_tokens=5, missing_token_id=3))
        index.remove(index.item_ids.tolist()[:2])
    run(random_rules(rng, index.where(index.item_ids.tolist()[:9])), plan)
    assert decode.decode_program._cache_size() == before
    run(random_rules(rng, index), replace(plan, num_return_sequences=2))
    assert decode.decode_program._cache_size() == before + 1


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


def test_beams_are_a_pytree_of_arrays() -> None:
    assert len(jax.tree.leaves(Beams.start(ops, None, batch_size=2, width=3))) == 4
