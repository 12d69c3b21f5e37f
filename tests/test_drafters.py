# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts in the one loop, without a model: no draft changes a result, and what is counted is what happened."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_scorers import (
    LONGEST,
    TableModel,
    assistant_of,
    catalogue_of,
    fixed_catalogue,
    make_plan,
    noise_of,
    random_catalogue,
    relaxed_plan,
    tables,
)

from hf_gr import ConstraintIndex
from hf_gr.core import ops
from hf_gr.core.beam import DEAD, Beams
from hf_gr.core.decide import draft_best
from hf_gr.core.plan import Options
from hf_gr.torch.decode import Decoded, DecodePlan, decode
from hf_gr.torch.drafters import FixedTree, TreeDrafter
from hf_gr.torch.noise import Noise

pytestmark = pytest.mark.shapes

SCORE_TOL = 1e-5  # fp32, at most 5 additions


def assert_same(found: Decoded, expected: Decoded) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.beam_indices.tolist() == expected.beam_indices.tolist()
    torch.testing.assert_close(found.scores, expected.scores, atol=SCORE_TOL, rtol=0)
    for name in ("step_scores", "step_logits"):
        mine, other = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (other is None)
        for step, theirs in zip(mine or (), other or (), strict=True):
            torch.testing.assert_close(step, theirs, atol=SCORE_TOL, rtol=0)


def again(number: float) -> Any:
    """A processor that lowers the token before: it reads prefixes, and any number of rows."""

    def process(sequences: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(sequences) == len(scores)
        last = sequences[:, -1:].clamp(max=scores.shape[1] - 1)
        return scores.scatter_add(1, last, torch.full(last.shape, -number))

    return process


def random_plan(rng: random.Random, num_rows: int) -> DecodePlan:
    num_beams = rng.choice((1, 2, 4, 9))
    kwargs: dict[str, Any] = {}
    if num_beams > 1:
        kwargs["length_penalty"] = rng.choice((1.0, 0.0, 2.0, -1.0))
        kwargs["early_stopping"] = rng.choice((True, False, "never"))
        kwargs["do_sample"] = rng.random() < 0.3
    elif rng.random() < 0.6:
        kwargs |= {"num_return_sequences": 5, "do_sample": rng.random() < 0.7}
    if rng.random() < 0.3:
        kwargs["processors"] = (again(0.7), again(0.2))
    if rng.random() < 0.2:
        kwargs["stopping_criteria"] = lambda sequences: sequences[:, -1] == 3
    if rng.random() < 0.2:
        kwargs["output_scores"] = True
    return make_plan(num_rows, num_beams, noise=noise_of(rng.randrange(2**40), num_rows), **kwargs)


def random_drafter(rng: random.Random, target: TableModel, plan: DecodePlan) -> TreeDrafter:
    """Any draft: the catalogue's within any budget and plan, a model's that is alike, alien or adversarial."""
    assistant = None
    if rng.random() < 0.6:
        kind = rng.choice(("same", "other", "inverted"))
        logits = tables(99, target.num_rows) if kind == "other" else target.logits
        if kind == "inverted":
            logits = [-table for table in logits]
        assistant = assistant_of(
            TableModel(logits, target.num_rows),
            num_beams=plan.num_beams * rng.choice((1, 2, 4)),
            num_steps=rng.choice((1, 2, 9)),
        )
    return TreeDrafter(budget=rng.choice((1, 5, 30, 200, 10**6)), assistant=assistant)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_no_draft_changes_a_result(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.randint(1, 3)
    catalogue = random_catalogue(rng, num_rows, ragged=rng.random() < 0.5)
    plan = replace(random_plan(rng, num_rows), noise=Noise(torch.arange(seed, seed + num_rows)))
    target = TableModel(tables(rng.randint(0, 3), num_rows), num_rows, takes_prompt=rng.random() < 0.8)
    plain, drafted = (
        decode(target(), catalogue, plan, drafter) for drafter in (None, random_drafter(rng, target, plan))
    )
    assert_same(drafted, plain)
    found, forwards = drafted.speculation, plain.speculation.target_forwards
    assert found.target_forwards <= forwards
    assert (found.accepted_nodes <= found.drafted_nodes).all()
    assert (found.accepted_nodes <= found.accepted_steps * max(plan.num_beams, plan.num_return_sequences)).all()
    assert num_rows > 1 or found.target_forwards + int(found.accepted_steps) == forwards
    assert not plain.speculation.drafted_nodes.any()
    assert target.deepest < catalogue.max_length  # others may have no positions


@pytest.mark.parametrize("num_beams", [1, 2])
def test_nothing_follows_a_path_that_a_criterion_ended(num_beams: int) -> None:
    """The first row's paths end with their first token, where two more could follow; the second row's do not."""
    rows = [[first, second, 1] for first in range(1, 7) for second in (1, 2)]
    index = ConstraintIndex.from_sequences(rows)
    catalogue = catalogue_of(*(index.where([(row[0] > 2) == ends for row in rows]) for ends in (True, False)))
    plan = make_plan(2, num_beams, stopping_criteria=lambda sequences: sequences[:, -1] > 2, output_scores=True)
    results = [decode(TableModel(tables(0, 2), 2)(), catalogue, plan, one) for one in (None, TreeDrafter(budget=99))]
    for decoded in results:
        assert (decoded.sequences[:num_beams] == 9).tolist() == [[False, True, True]] * num_beams
        assert decoded.step_scores is not None
        has_scores = [[bool((row > DEAD).any()) for row in step.split(num_beams)] for step in decoded.step_scores]
        assert has_scores == [[True, True], [False, True], [False, True]]
    assert_same(results[1], results[0])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9))
def test_a_tree_of_fixed_widths_changes_nothing_or_says_so(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.randint(1, 3)
    catalogue = random_catalogue(rng, num_rows, ragged=rng.random() < 0.5)
    plan = replace(random_plan(rng, num_rows), exit_early=False, output_scores=False)
    target = TableModel(tables(rng.randint(0, 3), num_rows), num_rows, takes_prompt=rng.random() < 0.5)
    widths = [[rng.choice((1, 4, 30, 300))] * rng.randint(0, LONGEST - level) for level in range(catalogue.max_length)]
    widths = [of_level[: max(catalogue.max_length - 1 - level, 0)] for level, of_level in enumerate(widths)]
    drafter = FixedTree(widths)
    expected, found = decode(target(), catalogue, plan), decode(target(), catalogue, plan, drafter)
    assert found.speculation.target_forwards <= expected.speculation.target_forwards
    if drafter.fits is None or drafter.fits.all():
        assert_same(found, expected)


def test_widths_too_small_are_told_row_by_row() -> None:
    """Below the beams 0 and 1 the first row has 2 and 3 nodes, the second one 2 and 2; the draft has 4 places."""
    rows = [[0, 0, 2], [0, 1, 2], [1, 0, 2], [1, 1, 2], [1, 2, 2]]
    index = ConstraintIndex.from_sequences(rows)
    catalogue = catalogue_of(index, index.where([True, True, True, True, False]))
    drafter = FixedTree([[], [4], []])
    found = decode(TableModel(tables(0, 2), 2)(), catalogue, make_plan(2, 2), drafter)
    assert drafter.fits is not None
    assert drafter.fits.tolist() == [False, True]
    expected = decode(TableModel(tables(0, 2), 2)(), catalogue, make_plan(2, 2))
    assert found.sequences[2:].tolist() == expected.sequences[2:].tolist()


@pytest.mark.parametrize("num_beams", [1, 2, 5])
def test_forced_levels_never_cost_a_forward_of_their_own(num_beams: int) -> None:
    # One way on after the first two tokens: two of five levels are open, the first of them is the prefill's.
    rows = [[a, b, *((a + b + k) % 6 + 1 for k in range(3))] for a in range(1, 7) for b in range(1, 7)]
    index = ConstraintIndex.from_sequences(rows)
    catalogue = catalogue_of(index, index)
    target = TableModel(tables(0, 2), 2)
    plain = decode(target(), catalogue, make_plan(2, num_beams))
    decoded = decode(target(), catalogue, make_plan(2, num_beams), TreeDrafter(budget=1))
    assert_same(decoded, plain)
    assert decoded.speculation.target_forwards == 2  # after the first token, and all that is forced
    assert plain.speculation.target_forwards == 4


@pytest.mark.parametrize("num_steps", [1, 2, 9])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_draft_runs_one_forward_a_level_and_is_always_or_never_right(num_steps: int, is_right: bool) -> None:
    catalogue, target = fixed_catalogue(1, 2000), TableModel(tables(0, 2), 2)
    plan = make_plan(2, 4)
    draft = TableModel([table if is_right else -table for table in target.logits], 2)
    assistant = assistant_of(draft, num_beams=4, num_steps=num_steps)
    decoded = decode(target(), catalogue, plan, TreeDrafter(budget=1, assistant=assistant))
    assert_same(decoded, decode(target(), catalogue, plan))
    found = decoded.speculation
    # 1 + gamma levels a forward, the prefill included
    assert found.target_forwards == (-(-5 // (1 + num_steps)) - 1 if is_right else 4)
    for accepted, drafted in (
        (found.accepted_steps, found.drafted_steps),
        (found.accepted_nodes, found.drafted_nodes),
    ):
        assert accepted.tolist() == (drafted.tolist() if is_right else [0, 0])
    assert assistant.num_forwards == len(draft.scored)


def test_the_catalogue_takes_over_below_a_draft() -> None:
    # The draft narrows the second level, whose nodes' few children then fit the budget.
    catalogue, target = fixed_catalogue(2, 500), TableModel(tables(0, 1), 1)
    plan = make_plan(1, 4)
    assistant = assistant_of(TableModel(target.logits, 1), num_beams=4, num_steps=1)
    together = decode(target(), catalogue, plan, TreeDrafter(budget=23, assistant=assistant)).speculation
    alone = decode(target(), catalogue, plan, TreeDrafter(budget=23)).speculation
    assert together.target_forwards < alone.target_forwards
    assert int(together.drafted_steps) > 1  # one level is the draft's


def test_a_relaxed_search_under_the_catalogues_draft_follows_its_seed() -> None:
    catalogue, target = fixed_catalogue(2, 500), TableModel(tables(0, 2), 2)
    drafters = (None, TreeDrafter(budget=10**6))
    results = [decode(target(), catalogue, relaxed_plan(2, 4, seed=3), drafter) for drafter in drafters]
    assert_same(results[1], results[0])
    assert results[1].speculation.target_forwards == 0


def test_paths_draft_what_is_least_behind_their_own_choice() -> None:
    scores = np.array([[[0.0, -3.0], [-7.0, -7.25], [-2.0, -9.0]]], np.float32)  # of two children of three nodes
    nodes = Beams.start(ops, scores, batch_size=1, width=3, independent=True)
    nothing = np.zeros((1, 3, 2), np.int64)  # nobody reads it
    legal: Any = SimpleNamespace(
        tokens=nothing, legal=nothing > 0, take=lambda places: (places % 2, 10 * (places // 2) + places % 2)
    )
    plan = Options(num_beams=1, num_return_sequences=1, num_kept=1, do_sample=False, early_stopping=False)
    paths, behind, is_open = np.array([[0, 1, 1]]), np.array([[0.0, -0.5, -1.0]], np.float32), scores > -8.0
    how = {"number": 7, "dead_state": 99}
    below, paths, behind = draft_best(nodes, paths, behind, legal, scores, is_open, plan, **how)
    assert below.states.tolist() == [[0, 10, 11, 20, 1, 99, 99]]  # one is not open, one is padding
    assert behind[0, :5].tolist() == [0.0, -0.5, -0.75, -1.0, -3.0]
    assert paths[0, :5].tolist() == [0, 1, 1, 1, 0]
