# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One level of a draft model's search, and of relaxed verification, in JAX, against PyTorch on random catalogues."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from flax_catalogues import LENGTH, VOCABULARY, random_index, random_rules
from table_scorers import TableModel
from test_decode import CPU, make_plan

from hf_gr.catalogue.rules import BatchRules
from hf_gr.core import beam
from hf_gr.core.beam import Beams
from hf_gr.core.decide import draft_best, draw
from hf_gr.core.verifiers import relaxed_places
from hf_gr.flax import decode, drafters, ops, transition
from hf_gr.flax.children import Children
from hf_gr.flax.noise import DRAFTS, PASSES, Noise
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.speculation import Drawn, Scored
from hf_gr.torch import decode as torch_decode
from hf_gr.torch import drafters as torch_drafters
from hf_gr.torch import noise as torch_noise
from hf_gr.torch import ops as torch_ops
from hf_gr.torch import transition as torch_transition
from hf_gr.torch.speculation import Frontier, Rows

pytestmark = [pytest.mark.shapes, pytest.mark.usefixtures("one_shape")]

TOL = 1e-5  # fp32: at most 4 additions, and two logarithms of noise
NUM_ROWS, NUM_BEAMS, NUMBER, LEVELS = 2, 3, 7, 3
MODES = {
    "beams": {},
    "sampling": {"do_sample": True},
    "paths": {"num_beams": 1},
    "sampled paths": {"num_beams": 1, "num_return_sequences": 3, "do_sample": True},
}


@dataclass
class Case:
    """A random catalogue, and random logits after every prefix, for both sides.

    Attributes:
        rules: of the catalogue.
        logits: by depth.
        seeds: of the noise.
        options: of the plan.
    """

    rules: BatchRules
    logits: list[np.ndarray]
    seeds: np.ndarray
    options: dict[str, Any]

    @classmethod
    def random(cls, seed: int, *, ragged: bool, **options: Any) -> Case:
        rng, numbers = random.Random(seed), np.random.default_rng(seed)
        rules = random_rules(rng, random_index(rng, ragged=ragged, largest=100))
        shapes = [(NUM_ROWS, VOCABULARY**depth, VOCABULARY) for depth in range(LENGTH + 1)]
        logits = [numbers.normal(scale=2.0, size=shape).astype(np.float32) for shape in shapes]
        return cls(rules, logits, numbers.integers(0, 2**62, NUM_ROWS), {"num_beams": NUM_BEAMS} | options)

    def after(self, beams: beam.Beams, *, other: int = 0) -> np.ndarray:
        """The logits after prefixes; with `other` those of another model."""
        tokens = beams.sequences.clamp(min=0).numpy()
        prefixes = (tokens * VOCABULARY ** np.arange(tokens.shape[-1])[::-1]).sum(-1)
        return np.roll(self.logits[tokens.shape[-1]], other, axis=-1)[np.arange(NUM_ROWS)[:, None], prefixes]

    def plan(self) -> Any:
        """The options in PyTorch."""
        num_beams = self.options["num_beams"]
        others = {name: value for name, value in self.options.items() if name != "num_beams"}
        return make_plan(NUM_ROWS, num_beams, noise=torch_noise.Noise(torch.from_numpy(self.seeds)), **others)

    def flax_plan(self) -> DecodePlan:
        """The options in JAX."""
        plan = self.plan()
        names = ("num_beams", "num_return_sequences", "num_kept", "do_sample", "early_stopping")
        return DecodePlan(**{name: getattr(plan, name) for name in names})

    def search(self, kind: Any) -> Any:
        """A draft's search from the root, in PyTorch."""
        catalogue, plan = torch_transition.device_catalogue(self.rules, CPU), self.plan()
        beams = beam.Beams.start(
            torch_ops,
            torch.zeros(1),
            batch_size=NUM_ROWS,
            width=1 if plan.is_beam_search else plan.width,
            independent=True,
        )
        frontier = Frontier(Rows((True,) * NUM_ROWS, CPU), 0, beams, beams.states, catalogue, plan)
        return kind(frontier, TableModel([], NUM_ROWS)())  # which is not asked for logits

    def levels(self, kind: Any) -> Iterator[tuple[Any, Any]]:
        """Of every level: the nodes above it, with `paths` and `behind`; what was drafted, and the search after it."""
        search = self.search(kind)
        for depth in range(1, LEVELS + 1):
            state = search.nodes, getattr(search, "paths", None), getattr(search, "behind", None)
            logits = torch.from_numpy(self.after(search.nodes))
            yield state, (search.step(logits, depth=depth, number=NUMBER), search)


def in_jax(beams: beam.Beams, catalogue: Any, *, dead_state: int) -> Beams:
    """The same beams: living states have the same numbers on both sides."""
    states = torch.where(beams.states == dead_state, int(catalogue.dead_state), beams.states)
    fields = (beams.sequences.int(), beams.beam_indices.int(), beams.scores, states.int())
    return Beams(ops, *[jnp.asarray(field.numpy()) for field in fields])


def cumulative_scores(nodes: Beams, logits: Any, legal: Any, plan: Any) -> Any:
    """The children's scores from the logits after each node."""
    states = nodes.states
    own = jnp.broadcast_to(jnp.arange(states.shape[1], dtype=jnp.int32), states.shape)
    scored = Scored.of(logits, states, depths=own, made=None, levels=states[:, 0], num_live=states.shape[1])
    own_scores = decode.child_scores(scored, own, legal, nodes, plan, max_length=LEVELS)
    return jnp.where(legal.legal, nodes.scores[..., None] + own_scores, beam.DEAD)


def _step(
    nodes: Beams, paths: Any, behind: Any, logits: Any, catalogue: Any, plan: Any, noise: Any, *, level: int, kind: str
) -> Any:
    """One level of either search in JAX."""
    legal = transition.children(nodes.states, catalogue, level=level)
    scores = cumulative_scores(nodes, logits, legal, plan)
    how = {"number": NUMBER, "dead_state": catalogue.dead_state}
    if kind == "sample":
        return draw(nodes, legal, scores, noise=noise.stream(DRAFTS), **how)
    is_open = drafters.open_children(legal, catalogue, depth=level + 1)
    return draft_best(nodes, paths, behind, legal, scores, is_open, plan, noise=noise, **how)


step = jax.jit(_step, static_argnames=("level", "kind"))


def names_of(parents: Any, tokens: Any, is_there: Any) -> list[Any]:
    """Nodes by parent and token; None for padding."""
    parents, tokens, is_there = (np.asarray(values).tolist() for values in (parents, tokens, is_there))
    return [(parent, token) if there else None for parent, token, there in zip(parents, tokens, is_there, strict=True)]


def check_best(seed: int, mode: str, *, ragged: bool, step: Any = step) -> int:
    """Compare all levels; returns how many nodes more than the beams' own number were drafted."""
    case, more = Case.random(seed, ragged=ragged, **MODES[mode]), 0
    catalogue = transition.device_catalogue(case.rules, num_rows=NUM_ROWS)
    for level, ((above, paths, behind), (theirs, search)) in enumerate(case.levels(torch_drafters.Best)):
        dead_state = search.catalogue.dead_state
        ours, own, far = step(
            in_jax(above, catalogue, dead_state=dead_state),
            jnp.asarray((torch.zeros_like(above.states) if paths is None else paths).int().numpy()),
            jnp.asarray(behind.numpy()),
            case.after(above),
            catalogue,
            case.flax_plan(),
            Noise.of(case.seeds),
            level=level,
            kind="best",
        )
        assert ours.scores.shape == own.shape == far.shape == (NUM_ROWS, NUMBER)
        is_there = np.asarray(ours.scores) > beam.DEAD
        assert (np.asarray(ours.states)[~is_there] == int(catalogue.dead_state)).all()
        for row in range(NUM_ROWS):
            mine = names_of(ours.parents[row], ours.tokens[row], is_there[row])
            other = names_of(theirs.parents[row], theirs.tokens[row], theirs.states[row] != dead_state)
            missing = NUMBER - len(other)
            if mode in ("beams", "sampling"):
                assert mine == other + [None] * missing
            else:  # the best of every path are equally good
                assert {*mine, None} == {*other, None}
            more += sum(name is not None for name in mine) - NUM_BEAMS
            for k, name in enumerate(other):
                if name is not None:
                    at = mine.index(name)
                    assert abs(float(ours.scores[row, at]) - float(search.nodes.scores[row, k])) < TOL
                    assert int(ours.states[row, at]) == int(theirs.states[row, k])
                    assert paths is None or int(own[row, at]) == int(search.paths[row, k])
    return more


@pytest.mark.parametrize(
    ("mode", "ragged"),
    [("beams", False), ("beams", True), ("sampling", True), ("paths", False), ("sampled paths", True)],
)
def test_the_best_equal_the_other_side(mode: str, ragged: bool) -> None:
    assert sum(check_best(seed, mode, ragged=ragged) for seed in range(10)) > 0


def _verified(
    beams: Beams, drawn: Drawn, own: Any, logits: Any, catalogue: Any, plan: Any, noise: Any, *, level: int
) -> Beams:
    """Relaxed verification in JAX: the beams that it keeps."""
    legal = transition.children(beams.states, catalogue, level=level)
    scores = cumulative_scores(beams, logits, legal, plan)
    uniform, gumbel = noise.stream(PASSES).uniform(beams, legal), noise.gumbel(beams, legal)
    picked = relaxed_places(legal, scores, drawn, own, num_kept=plan.num_kept, uniform=uniform, gumbel=gumbel, ops=ops)
    how = {"num_kept": plan.num_kept, "dead_state": catalogue.dead_state, "picked": picked}
    return beam.select(beams, legal, scores, **how)


verified = jax.jit(_verified, static_argnames="level")


def check_samples(seed: int, *, ragged: bool, step: Any = step, verified: Any = verified) -> tuple[int, int]:
    """Compare what a draft draws, and what relaxed verification picks; returns how many passed, and did not."""
    case, counts = Case.random(seed, ragged=ragged, do_sample=True, num_kept=NUM_BEAMS), [0, 0]
    catalogue = transition.device_catalogue(case.rules, num_rows=NUM_ROWS)
    for level, ((above, *_), (theirs, search)) in enumerate(case.levels(torch_drafters.Samples)):
        dead_state = search.catalogue.dead_state
        nodes = in_jax(above, catalogue, dead_state=dead_state)
        given = (case.after(above), catalogue, case.flax_plan(), Noise.of(case.seeds))
        ours, log_probs = step(nodes, None, None, *given, level=level, kind="sample")
        assert ours.scores.shape == (NUM_ROWS, NUMBER)
        is_there, is_theirs = np.asarray(ours.scores) > beam.DEAD, theirs.states.numpy() != dead_state
        for row in range(NUM_ROWS):
            mine = names_of(ours.parents[row], ours.tokens[row], is_there[row])
            assert mine == names_of(theirs.parents[row], theirs.tokens[row], is_theirs[row])
        assert (np.asarray(ours.states)[is_there] == theirs.states.numpy()[is_theirs]).all()
        np.testing.assert_allclose(np.exp(log_probs).sum((1, 2)), is_there.any(1), atol=TOL)
        drawn = Drawn(ours.tokens, ours.parents, ours.states, log_probs)
        for chosen in range(3):
            found = check_places(case, search, above, theirs, nodes, drawn, catalogue, chosen, level, verified)
            counts = [before + more for before, more in zip(counts, found, strict=True)]
    return counts[0], counts[1]


def check_places(
    case: Case,
    search: Any,
    above: beam.Beams,
    theirs: Any,
    nodes: Beams,
    drawn: Drawn,
    catalogue: Any,
    chosen: int,
    level: int,
    verified: Any,
) -> tuple[int, int]:
    """The target's beams are some of the draft's nodes of the level above, with other scores; some are dead."""
    rng = np.random.default_rng(chosen)
    width = above.scores.shape[1]
    own = None if not level else np.stack([rng.permutation(width)[:NUM_BEAMS] for _ in range(NUM_ROWS)])
    there = torch.arange(width).expand(NUM_ROWS, -1) if own is None else torch.from_numpy(own)
    beams = above.take(there)
    scores = torch.from_numpy(rng.normal(size=beams.scores.shape).astype(np.float32))
    is_dead = (beams.scores == beam.DEAD) | torch.from_numpy(rng.random(scores.shape) < 0.2 * bool(level))
    dead_state = search.catalogue.dead_state
    beams = Beams(
        torch_ops,
        beams.sequences,
        beams.beam_indices,
        scores.masked_fill(is_dead, beam.DEAD),
        beams.states.masked_fill(is_dead, dead_state),
    )
    logits = case.after(beams, other=1 + chosen)
    plan, noise = search.plan, search.plan.noise
    legal = torch_transition.children(beams.states, search.catalogue, level=level)
    own_scores = torch_decode.child_scores(torch.from_numpy(logits), legal, beams, plan)
    own_scores = torch.where(legal.legal, beams.scores[..., None] + own_scores, beam.DEAD)
    picked = relaxed_places(
        legal,
        own_scores,
        theirs,
        None if own is None else torch.from_numpy(own),
        num_kept=plan.num_kept,
        uniform=noise.stream(torch_noise.PASSES).uniform(beams, legal),
        gumbel=noise.gumbel(beams, legal),
        ops=torch_ops,
    )
    how = {"num_kept": plan.num_kept, "dead_state": dead_state, "picked": picked}
    expected = beam.select(beams, legal, own_scores, **how)
    of_beams = in_jax(beams, catalogue, dead_state=dead_state)
    given = (None if own is None else jnp.asarray(own), logits, catalogue, case.flax_plan(), Noise.of(case.seeds))
    found = verified(of_beams, drawn, *given, level=level)
    passed = failed = 0
    for row in range(NUM_ROWS):
        is_theirs = expected.scores[row] > beam.DEAD
        mine = names_of(found.parents[row], found.tokens[row], np.asarray(found.scores[row]) > beam.DEAD)
        assert mine == names_of(expected.parents[row], expected.tokens[row], is_theirs)
        np.testing.assert_allclose(found.scores[row], expected.scores[row], atol=TOL, rtol=0)
        assert (np.asarray(found.states[row])[is_theirs] == expected.states[row][is_theirs].numpy()).all()
        drafted = set(theirs.states[row].tolist())
        kept = expected.states[row][is_theirs].tolist()
        passed += sum(state in drafted for state in kept)
        failed += sum(state not in drafted for state in kept)
    return passed, failed


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_samples_and_what_passes_equal_the_other_side(ragged: bool) -> None:
    counts = np.array([check_samples(seed, ragged=ragged) for seed in range(10)])
    assert (counts.sum(0) > 50).all()


def test_rows_without_candidates_stay_without() -> None:
    nothing, zeros = jnp.full((2, 3, 4), beam.DEAD), jnp.zeros((2, 6), jnp.int32)
    candidates = Children(jnp.full((2, 3, 4), -1), jnp.zeros((2, 3), jnp.int32))
    given = {"uniform": jnp.full((2, 3, 4), 0.5), "gumbel": jnp.zeros((2, 3, 4))}
    drawn = Drawn(zeros - 1, zeros, zeros, nothing)
    assert (relaxed_places(candidates, nothing, drawn, None, num_kept=5, ops=ops, **given) == 12).all()
