# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts in the one loop, without a model: no draft changes a result, and what is counted is what happened."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from table_scorers import (
    EOS,
    LONGEST,
    TableModel,
    assistant_of,
    catalogue_of,
    fixed_catalogue,
    make_plan,
    noise_of,
    random_catalogue,
    random_rows,
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
from hf_gr.torch.speculation import Frontier, Part
from hf_gr.torch.transition import DeviceCatalogue

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
@example(937)  # a criterion ends paths that the catalogue continues, and the scores of later steps are kept
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
    assert drafted.speculation.target_forwards <= plain.speculation.target_forwards
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


Path = tuple[int, ...]


class Recorder:
    """A drafter that notes the prefixes of the beams it is shown, and of the nodes it drafts, row by row."""

    num_forwards = 0

    def __init__(self, drafter: TreeDrafter | None, dead_state: int) -> None:
        self.drafter, self.dead_state = drafter, dead_state
        self.calls: list[tuple[int, tuple[int, ...], list[list[Path]], list[list[list[Path]]]]] = []

    def draft(self, frontier: Frontier) -> list[Part]:
        parts = [(frontier, [])] if self.drafter is None else self.drafter.draft(frontier)
        self.num_forwards = self.drafter.num_forwards if self.drafter else 0
        for part, drafted in parts:
            above = part.beams.sequences
            levels = [paths(above, part.beams.scores > DEAD)]
            for nodes in drafted:
                above = above.gather(1, nodes.parents[..., None].expand(-1, -1, above.shape[-1]))
                above = torch.cat([above, nodes.tokens[..., None]], dim=-1)
                levels.append(paths(above, nodes.states != self.dead_state))
            here = [row for row, flag in enumerate(part.rows.flags) if flag]
            beams, *below = [[level[row] for row in here] for level in levels]
            self.calls.append((part.level, tuple(here), beams, below))
        return parts


def paths(sequences: torch.Tensor, there: torch.Tensor) -> list[list[Path]]:
    """The prefixes of each row that are there."""
    rows = zip(sequences.tolist(), there.tolist(), strict=True)
    return [[tuple(path) for path, is_there in zip(*row, strict=True) if is_there] for row in rows]


def recorded(
    target: TableModel, catalogue: DeviceCatalogue, plan: DecodePlan, drafter: TreeDrafter | None
) -> tuple[Decoded, Recorder]:
    recorder = Recorder(drafter, catalogue.dead_state)
    return decode(target(), catalogue, plan, recorder), recorder


def slow_speculation(plain: Recorder, drafts: Recorder, num_rows: int) -> dict[str, Any]:
    """What happened, from the beams of a plain search and what was drafted below them: one row, level, node a time."""
    counts = {name: [0] * num_rows for name in ("drafted_nodes", "accepted_nodes", "drafted_steps", "accepted_steps")}
    forwards = 0
    for row in range(num_rows):
        live = {level: beams[rows.index(row)] for level, rows, beams, _ in plain.calls if row in rows}
        calls = [(level, rows.index(row), levels) for level, rows, _, levels in drafts.calls if row in rows]
        level = 0
        for first, place, levels in calls:
            assert first == level, "a forward comes where the beams have not been scored"
            counts["drafted_steps"][row] += len(levels)
            counts["drafted_nodes"][row] += sum(len(nodes[place]) for nodes in levels)
            level += 1
            for nodes in levels:
                if level not in live or not set(live[level]) <= set(nodes[place]):
                    break
                counts["accepted_steps"][row] += 1
                counts["accepted_nodes"][row] += len(live[level])
                level += 1
        assert level not in live
        forwards = max(forwards, len(calls) - 1)  # the first is the prompt's
    return {"target_forwards": forwards, **counts}


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_a_slow_count(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.randint(1, 3)
    catalogue = random_catalogue(rng, num_rows, ragged=bool(seed % 2))
    plan = make_plan(num_rows, rng.choice((2, 4, 9)))
    target = TableModel(tables(0, num_rows), num_rows)
    plain, beams = recorded(target, catalogue, plan, None)
    decoded, drafts = recorded(target, catalogue, plan, random_drafter(rng, target, plan))
    assert_same(decoded, plain)
    assert plain.speculation.target_forwards == len(beams.calls) - 1
    assert not plain.speculation.drafted_nodes.any()
    expected = slow_speculation(beams, drafts, num_rows)
    found = {name: getattr(decoded.speculation, name) for name in expected}
    assert {name: value if isinstance(value, int) else value.tolist() for name, value in found.items()} == expected
    if drafts.drafter is not None and drafts.drafter.assistant is None:
        assert decoded.speculation.draft_forwards == 0


# What the catalogue drafts


def slow_children(sequences: Sequence[Sequence[int]], beams: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """All prefixes one token longer than some beam that something follows upon."""
    return {
        tuple(sequence[: len(beam) + 1])
        for beam in beams
        for sequence in sequences
        if len(sequence) > len(beam) + 1 and tuple(sequence[: len(beam)]) == beam
    }


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("budget", [1, 12, 60])
def test_the_catalogue_drafts_all_that_can_follow_or_nothing(ragged: bool, budget: int) -> None:
    rows = random_rows(random.Random(budget), 300, ragged=ragged, length=4)
    index = ConstraintIndex.from_sequences(rows, eos_token_id=EOS if ragged else None)
    catalogue = catalogue_of(index)
    plan = make_plan(2, 5, early_stopping="never")
    target = TableModel(tables(1, 2), 2)
    _, drafts = recorded(target, catalogue, plan, TreeDrafter(budget=budget))
    for _, rows_there, beams, levels in drafts.calls:
        used = [0] * len(rows_there)
        for number in range(catalogue.max_length):
            expected = [slow_children(list(index), nodes) for nodes in beams]
            counts = [len(nodes) for nodes in expected]
            fits = [count <= max(budget - before, plan.num_beams) for count, before in zip(counts, used, strict=True)]
            assert all(fits) or not any(fits), "what a row drafts depends on others"
            assert (all(fits) and any(counts)) == (number < len(levels))
            if number == len(levels):
                break
            used = [count + before for count, before in zip(counts, used, strict=True)]
            assert [set(nodes) for nodes in levels[number]] == expected
            assert [len(nodes) for nodes in levels[number]] == counts
            beams = levels[number]


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


# What a draft model drafts


@pytest.mark.parametrize("num_steps", [1, 2, 9])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_draft_runs_one_forward_a_level_and_is_always_or_never_right(num_steps: int, is_right: bool) -> None:
    catalogue, target = fixed_catalogue(1, 2000), TableModel(tables(0, 2), 2)
    plan = make_plan(2, 4)
    draft = TableModel([table if is_right else -table for table in target.logits], 2)
    assistant = assistant_of(draft, num_beams=4, num_steps=num_steps)
    decoded, drafts = recorded(target, catalogue, plan, TreeDrafter(budget=1, assistant=assistant))
    assert_same(decoded, decode(target(), catalogue, plan))
    found = decoded.speculation
    # 1 + gamma levels a forward, the prefill included
    assert found.target_forwards == (-(-5 // (1 + num_steps)) - 1 if is_right else 4)
    for accepted, drafted in (
        (found.accepted_steps, found.drafted_steps),
        (found.accepted_nodes, found.drafted_nodes),
    ):
        assert accepted.tolist() == (drafted.tolist() if is_right else [0, 0])
    # The draft's own prefill gives the first level.
    expected = sum(len(levels) - (level == 0) for level, _, _, levels in drafts.calls)
    assert (assistant.num_forwards, len(draft.scored)) == (expected, expected)


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
    results = []
    for drafter in (None, TreeDrafter(budget=10**6)):
        plan = relaxed_plan(2, 4, seed=3)
        results.append(decode(target(), catalogue, plan, drafter))
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
