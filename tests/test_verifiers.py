# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Verification: places of beams among drafted nodes; relaxed selection against its slow twin, and what it draws."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from random_catalogues import legal_sequences, random_index, random_rules
from reference import reference_relaxed_selection
from table_scorers import CPU, TableModel, assistant_of, catalogue_of, noise_of, relaxed_plan, tables

from hf_gr import ConstraintIndex
from hf_gr.core.beam import DEAD
from hf_gr.core.plan import Speculation
from hf_gr.core.verifiers import relaxed_places
from hf_gr.torch import ops, transition
from hf_gr.torch.decode import Decoded, decode
from hf_gr.torch.drafters import TreeDrafter
from hf_gr.torch.transition import Children
from hf_gr.torch.tree import Nodes

pytestmark = pytest.mark.shapes

DRAWS = 4000
# Every sequence: nothing is forced, so that all levels but the first and the last are the draft's.
EVERY = catalogue_of(ConstraintIndex.from_sequences(list(itertools.product(range(1, 5), repeat=4))))
SIGMAS = 5.0  # standard deviations that a frequency may lie off; false alarms: one in a million comparisons


class Level:
    """The candidates of one level: beams of the target, and N nodes that a draft drew below its own.

    The draft is the target as far as it is `alike`, from 0 to 1; `aliens` are its nodes that are no beam.
    """

    def __init__(
        self, seed: int, num_beams: int, num_children: int, *, alike: float, num_drafted: int, aliens: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.num_beams, self.num_children, self.num_drafted, self.aliens = num_beams, num_children, num_drafted, aliens
        self.own = rng.permutation(num_beams + aliens)[:num_beams]  # where each beam is among the draft's
        scores = rng.normal(scale=1.2, size=(num_beams, num_children))
        self.dead = rng.random((num_beams, num_children)) < 0.15
        self.dead[0, :2] = False
        self.scores = np.where(self.dead, -np.inf, scores)
        other = rng.normal(scale=1.2, size=(num_beams + aliens, num_children))
        other[self.own] = np.where(self.dead, -np.inf, alike * scores + (1 - alike) * other[self.own])
        self.draft_scores = other
        self.tokens = np.sort(
            rng.permuted(np.tile(np.arange(20, dtype=np.int64), (num_beams, 1)), axis=1)[:, :num_children]
        )

    @property
    def p(self) -> dict[Any, float]:
        """By beam and child."""
        weights = np.exp(self.scores)
        return {place: float(weights[place] / weights.sum()) for place in zip(*np.nonzero(weights), strict=True)}

    @property
    def q(self) -> dict[Any, float]:
        """By node of the draft and child, then by the target's beam where it is one."""
        weights = np.exp(self.draft_scores)
        share = weights / weights.sum()
        beam_of = {int(place): beam for beam, place in enumerate(self.own)}
        return {
            (beam_of.get(node, -1 - node), child): float(share[node, child])
            for node, child in zip(*np.nonzero(share), strict=True)
        }

    def draw(self, number: int, generator: torch.Generator) -> torch.Tensor:
        """What the draft drew: places among all children of its nodes."""
        q = torch.tensor(self.draft_scores, dtype=torch.float32).flatten().log_softmax(0)
        keys = q - torch.empty(number, len(q)).exponential_(generator=generator).log()
        return keys.topk(self.num_drafted).indices

    def places(self, drafted: torch.Tensor, num_kept: int, generator: torch.Generator) -> torch.Tensor:
        """`relaxed_places` for rows of what was drafted."""
        number = len(drafted)
        q = torch.tensor(self.draft_scores, dtype=torch.float32).flatten().log_softmax(0)
        parents = drafted // self.num_children
        tokens_of = np.zeros((self.num_beams + self.aliens, self.num_children), dtype=np.int64)
        tokens_of[self.own] = self.tokens
        tokens = torch.tensor(tokens_of).flatten()[drafted]
        legal = torch.tensor(~self.dead).expand(number, -1, -1)
        places = torch.arange(self.num_children)
        # States are places, as those drafted.
        states = (torch.tensor(self.own * self.num_children)[:, None] + places).expand(number, -1, -1)
        candidates = Children(torch.tensor(self.tokens).expand(number, -1, -1), legal, states)
        shape = (self.num_beams + self.aliens, self.num_children)
        nodes = Nodes(tokens, parents, drafted, log_probs=q.view(shape).expand(number, -1, -1))
        return relaxed_places(
            candidates,
            torch.tensor(self.scores, dtype=torch.float32).expand(number, -1, -1),
            nodes,
            nodes.log_probs,
            torch.tensor(self.own).expand(number, -1),
            num_kept=num_kept,
            uniform=torch.rand((number, self.num_beams, self.num_children), generator=generator).clamp_min(1e-9),
            gumbel=-torch.empty(number, self.num_beams, self.num_children).exponential_(generator=generator).log(),
            ops=ops,
        )

    def slow(self, drafted: torch.Tensor, num_kept: int, rng: np.random.Generator) -> list[list[Any]]:
        beam_of = {int(place): beam for beam, place in enumerate(self.own)}
        p, q, found = self.p, self.q, []
        for row in drafted.tolist():
            names = [divmod(place, self.num_children) for place in row]
            named = [(beam_of.get(node, -1 - node), child) for node, child in names]
            found.append(reference_relaxed_selection(p, q, named, num_kept, rng))
        return found


def assert_as_frequent(found: Counter[Any], expected: Counter[Any]) -> None:
    for what in found | expected:
        share = (found[what] + expected[what]) / (2 * DRAWS)
        off = abs(found[what] - expected[what]) / DRAWS
        assert off <= SIGMAS * np.sqrt(2 * share * (1 - share) / DRAWS) + 1 / DRAWS, what


LEVELS: dict[str, Callable[[], tuple[Level, int]]] = {
    "one of one": lambda: (Level(1, 1, 6, alike=0.3, num_drafted=1), 1),
    "several beams": lambda: (Level(2, 3, 3, alike=0.5, num_drafted=4), 2),
    "beams that were not drafted from": lambda: (Level(3, 2, 4, alike=0.5, num_drafted=5, aliens=2), 3),
    "a wide draft": lambda: (Level(4, 2, 4, alike=0.0, num_drafted=7, aliens=1), 2),
    "alike": lambda: (Level(5, 2, 4, alike=1.0, num_drafted=4), 3),
}


@pytest.mark.parametrize("name", LEVELS)
def test_relaxed_selection_is_algorithm_2(name: str) -> None:
    level, num_kept = LEVELS[name]()
    generator = torch.Generator().manual_seed(0)
    drafted = level.draw(DRAWS, generator)
    places = level.places(drafted, num_kept, generator)
    assert places.shape == (DRAWS, num_kept)
    size = level.scores.size
    rows = ([divmod(place, level.num_children) for place in row if place < size] for row in places.tolist())
    found = Counter(map(frozenset, rows))
    expected = Counter(map(frozenset, level.slow(drafted, num_kept, np.random.default_rng(0))))
    assert_as_frequent(found, expected)
    assert_as_frequent(*(Counter(itertools.chain.from_iterable(sets.elements())) for sets in (found, expected)))


def sampled(
    target: list[torch.Tensor], draft: list[torch.Tensor] | None, num_beams: int, num_draft_beams: int, *, seed: int
) -> Decoded:
    """Sampling beams of one prompt, `DRAWS` times."""
    plan = relaxed_plan(DRAWS, num_beams, seed=seed)
    drafter = None
    if draft is not None:
        assistant = assistant_of(TableModel(draft, DRAWS), num_beams=num_draft_beams, num_steps=9)
        drafter = TreeDrafter(budget=1, assistant=assistant)
    return decode(TableModel(target, DRAWS)(), EVERY, plan, drafter)


def inclusion(decoded: Decoded, num_beams: int) -> torch.Tensor:
    """How often each of the 256 items was among the results."""
    assert bool((decoded.scores > DEAD).all())
    numbers = ((decoded.sequences - 1) * torch.tensor([64, 16, 4, 1])).sum(-1).view(DRAWS, num_beams)
    assert int(numbers.sort(-1).values.diff(dim=-1).eq(0).sum()) == 0  # none twice
    return torch.bincount(numbers.flatten(), minlength=256).double() / DRAWS


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Total variation of what a user sees: the share of results that would have to change."""
    return float((found - expected).abs().sum() / 2 / expected.sum())


def noise(expected: torch.Tensor) -> float:
    """What `distance` is between two runs of the same search: its mean, and five standard deviations on top.

    Each frequency is off by a normal with variance 2 f (1 - f) / draws, whose absolute value has mean sqrt(2 / pi)
    and variance 1 - 2 / pi of that.
    """
    variance = 2 * expected * (1 - expected).clamp_min(0.0) / DRAWS
    mean, spread = (2 / np.pi) ** 0.5 * variance.sqrt().sum(), ((1 - 2 / np.pi) * variance.sum()).sqrt()
    return float((mean + 5 * spread) / 2 / expected.sum())


TARGET = tables(0, 1, scale=1.2)
DRAFTS = {
    "same": TARGET,
    "mildly different": [table + 0.5 * other for table, other in zip(TARGET, tables(7, 1, scale=1.0), strict=True)],
    "very different": tables(9, 1, scale=1.2),
}


def check_inclusion(draft: str, num_beams: int, num_draft_beams: int, *, share: float) -> Speculation:
    """Closer to the target's own, K draws a level, than `share` of the way to the draft's."""
    expected = inclusion(sampled(TARGET, None, num_beams, 0, seed=1), num_beams)
    alone = inclusion(sampled(DRAFTS[draft], None, num_beams, 0, seed=2), num_beams) if share else expected
    decoded = sampled(TARGET, DRAFTS[draft], num_beams, num_draft_beams, seed=3)
    found = distance(inclusion(decoded, num_beams), expected)
    assert found <= noise(expected) + share * distance(alone, expected)
    return decoded.speculation


@pytest.mark.parametrize(("num_beams", "times"), [(1, 1), (3, 4), (6, 1), (6, 4)])
def test_the_target_as_its_own_draft_changes_no_frequency(num_beams: int, times: int) -> None:
    happened = check_inclusion("same", num_beams, times * num_beams, share=0.0)
    if times == 1:
        assert happened.accepted_steps.tolist() == happened.drafted_steps.tolist()


@pytest.mark.parametrize(
    ("draft", "num_beams"), [("mildly different", 1), ("mildly different", 6), ("very different", 3)]
)
def test_frequencies_are_close_to_the_targets_own(draft: str, num_beams: int) -> None:
    check_inclusion(draft, num_beams, num_beams, share=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_k_distinct_living_items_or_all_there_are_then_padding(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, num_beams = rng.randint(1, 3), rng.choice((1, 2, 5, 12))
    rules = random_rules(rng, random_index(rng, ragged=bool(seed % 2)), num_rows=num_rows)
    target = tables(seed, num_rows)
    draft = rng.choice((target, tables(seed + 1, num_rows), [-table for table in target]))
    assistant = assistant_of(
        TableModel(draft, num_rows), num_beams=num_beams * rng.choice((1, 4, 20)), num_steps=rng.choice((1, 9))
    )
    drafter = TreeDrafter(budget=rng.choice((1, 8, 10**6)), assistant=assistant)
    catalogue = transition.device_catalogue(rules, CPU)
    plan = relaxed_plan(num_rows, num_beams, early_stopping="never")
    results = []
    for _ in range(2):
        again = replace(plan, noise=noise_of(seed, num_rows))
        results.append(decode(TableModel(target, num_rows)(), catalogue, again, drafter))
    assert results[0].sequences.tolist() == results[1].sequences.tolist()
    for row in range(num_rows):
        items = set(map(tuple, legal_sequences(rules, row)))
        here = slice(row * num_beams, (row + 1) * num_beams)
        paths = [tuple(token for token in path if token != 9) for path in results[0].sequences[here].tolist()]
        number = min(num_beams, len(items))
        assert len(set(paths[:number])) == number
        assert set(paths[:number]) <= items
        assert (results[0].scores[here][:number] > DEAD).all()
        assert (results[0].scores[here][number:] == DEAD).all()
        assert not any(paths[number:])
