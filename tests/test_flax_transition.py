# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The trie step in JAX, against the dictionary."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from flax_catalogues import EOS, TOKENS, VOCABULARY, random_index, random_rows, random_rules
from reference import ReferenceTrie

from hf_gr import ConstraintIndex
from hf_gr.catalogue.fanout import Fanout
from hf_gr.catalogue.rules import BatchRules, combine_rules
from hf_gr.flax import device_trie, transition
from hf_gr.flax.arrays import padded
from hf_gr.flax.device_trie import DeviceTrie, exception_bits
from hf_gr.flax.transition import DeviceCatalogue, device_catalogue

pytestmark = pytest.mark.shapes

WIDTH = 128  # states that are looked at together
FREE = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _step(states: Any, catalogue: DeviceCatalogue, level: int) -> Any:
    """All that there is to know of some states of a level."""
    below = transition.children(states, catalogue, level=level)
    shape = below.tokens.shape
    places = jnp.broadcast_to(jnp.arange(shape[1] * shape[2]), (shape[0], shape[1] * shape[2]))
    scores = below.scores(jnp.zeros((*shape[:2], VOCABULARY)))
    masked = transition.over_vocabulary(scores, below, VOCABULARY)
    every = jnp.tile(jnp.arange(TOKENS + 1), (len(states), states.shape[1]))
    steps = transition.advance(jnp.repeat(states, TOKENS + 1, axis=1), every, catalogue, level=level)
    leaf = catalogue.is_leaf(states, level=level)
    below_states = below.take(places)[1].reshape(shape)
    return below.tokens, below_states, masked, steps.reshape(*states.shape, TOKENS + 1), leaf


step = jax.jit(_step, static_argnums=2)


def legal_sequences(rules: BatchRules, row: int) -> list[list[int]]:
    """The sequences of a row, by asking for the items of each that was ever there."""
    known = {tuple(tokens.tolist()) for tokens in replace(rules.shared, alive=None).rows()}
    cut = [[token for token in tokens if token >= 0] for tokens in known]
    return [tokens for tokens in cut if rules.items(row, tokens)]


def check(rules: BatchRules, *, num_rows: int, eos: int | None, step: Any = step) -> None:
    """Walk every prefix of every row, and compare children, masks, leaves and single steps with the dictionary's."""
    catalogue = device_catalogue(rules, num_rows=num_rows)
    dead = int(catalogue.dead_state)
    for row in range(num_rows):
        reference = ReferenceTrie(legal_sequences(rules, row), eos_token_id=eos)
        prefixes: list[tuple[int, ...]] = [()]
        states = [0]
        for level in range(catalogue.max_length):
            assert len(states) <= WIDTH
            given_states = np.full((num_rows, WIDTH), dead, np.int32)
            given_states[row, : len(states)] = states
            tokens, below, masked, steps, leaf = (np.asarray(x)[row] for x in step(given_states, catalogue, level))
            assert (tokens[len(states) :] < 0).all(), "the dead state has no children"
            assert leaf[len(states) :].all(), "the dead state is a leaf"
            prefixes_below, states_below = [], []
            for place, prefix in enumerate(prefixes):
                allowed = reference.allowed(prefix)
                legal = tokens[place] >= 0
                assert sorted(tokens[place][legal].tolist()) == allowed
                assert np.flatnonzero(np.isfinite(masked[place])).tolist() == allowed
                by_token = dict(zip(tokens[place][legal].tolist(), below[place][legal].tolist(), strict=True))
                for token in range(TOKENS + 1):
                    otherwise = dead if allowed else states[place]
                    assert steps[place, token] == by_token.get(token, otherwise)
                if allowed:
                    assert not leaf[place]
                prefixes_below += [(*prefix, token) for token in by_token]
                states_below += by_token.values()
            prefixes, states = prefixes_below, states_below
        complete = {prefix for prefix in prefixes if not reference.allowed(prefix)}
        assert complete <= {tuple(sequence) for sequence in reference.sequences()}


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
@FREE
@given(seed=st.integers(0, 10**6))
def test_steps_equal_the_dictionary_in_every_state(one_shape: None, ragged: bool, seed: int) -> None:
    rng = random.Random(seed)
    index = random_index(rng, ragged=ragged, largest=100)
    check(random_rules(rng, index), num_rows=2, eos=EOS if ragged else None)


def test_one_rule_and_copies_of_rows() -> None:
    index = ConstraintIndex.from_sequences(random_rows(random.Random(0), 30, ragged=False))
    check(combine_rules([index.snapshot]), num_rows=1, eos=None)
    excluded = device_catalogue(combine_rules([index.snapshot], [[1, 2], [3]]), num_rows=4)
    assert excluded.hidden is not None
    for level in excluded.hidden:
        assert (level[2] == level[0]).all()
        assert (level[3] == level[0]).all()


def test_listed_exceptions_large_tokens_and_wide_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trie, "PARENTS", 0)
    sparse = [[1 + n // 6, 1 + n % 6, *[2, 3, 4] * (n % 9 > 0)] for n in range(36)] + [[1, 2, 2, 5]]
    index = ConstraintIndex.from_sequences(sparse, eos_token_id=0)
    rules = combine_rules([index.snapshot], [[0, 7, 9, 36]])
    trie = device_catalogue(rules).trie
    assert any(exceptions is not None for exceptions in trie.exceptions)
    check(rules, num_rows=1, eos=0, step=jax.jit(lambda *args: _step(*args), static_argnums=2))
    large = ConstraintIndex.from_sequences(np.array(sparse[1:9]) + 2**31 - 7)
    catalogue = device_catalogue(combine_rules([large.snapshot]), num_rows=1)
    tokens = np.asarray(transition.children(jnp.zeros((1, 1), jnp.int32), catalogue, level=0).tokens)
    assert sorted(tokens[tokens >= 0].tolist()) == large.allowed_next_tokens([])


def test_a_node_with_more_children_than_a_word_has_bits() -> None:
    rng = random.Random(0)
    index = ConstraintIndex.from_sequences([[3, token] for token in range(100)] + [[5, 1], [5, 99]])
    index.remove([*range(40, 50), 101])
    added = [[3, token] for token in (2, 31, 32, 63, 64, 99, 45)]  # the first six are there
    index.add([*added, [3, 120]], range(1000, 1008))
    index.remove([1003])  # the item that was there has the same tokens, and stays
    excluded = [0, 31, 33, 64, 65, 97, 1002, 1006]
    rules = combine_rules([index.snapshot], [excluded, rng.sample(range(40), 30)])
    catalogue = device_catalogue(rules)
    states = transition.advance(jnp.zeros((2, 1), jnp.int32), jnp.full((2, 1), 3), catalogue, level=0)
    legal = transition.children(states, catalogue, level=1)
    for row in range(2):
        tokens = np.asarray(legal.tokens)[row, 0]
        assert sorted(tokens[tokens >= 0].tolist()) == [u for u in range(128) if rules.items(row, [3, u])]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 1, 1, 1, 2, 5]), min_size=1, max_size=40).filter(any))
def test_both_forms_of_a_fanout_give_the_same_children(counts: list[int]) -> None:
    dense = Fanout.from_offsets(np.append(0, np.cumsum(counts)))
    listed = np.flatnonzero(np.array(counts) != 1)
    bits = padded(exception_bits(listed, len(counts)), 64)
    shifts = np.append(0, np.cumsum(np.array(counts)[listed] - 1))
    start, end, behind = 1, 1 + len(counts), 1 + len(counts) + sum(counts)
    nodes = jnp.arange(-2, 250)[None]
    found = []
    for offsets, exceptions in ((dense.offsets, None), (shifts, bits)):
        trie = DeviceTrie(
            tokens=jnp.zeros(1, jnp.int32),
            offsets=(jnp.zeros(2, jnp.int32), jnp.asarray(padded(offsets.astype(np.int32), 64, offsets[-1]))),
            exceptions=(None, None if exceptions is None else jnp.asarray(exceptions)),
            token_bases=jnp.zeros(2, jnp.int32),
            level_starts=jnp.asarray([0, start, end, behind], jnp.int32),
            branching=(1, 1),
            has_leaves=(True, True),
        )
        found.append([np.asarray(side)[0].tolist() for side in child_range(nodes, trie)])
    firsts = [end + sum(counts[:parent]) for parent in range(len(counts))]
    for first, number in found:
        assert first[3 : 3 + len(counts)] == firsts
        assert number == [0, 0, 0, *counts, *[0] * (249 - len(counts))]


child_range = jax.jit(lambda nodes, trie: trie.child_range(nodes, level=1))


def test_what_is_on_the_device_is_moved_once_and_shared_by_views() -> None:
    index = ConstraintIndex.from_sequences([[5, 7], [6, 7]])
    view = index.where([True, False])

    def of(index: ConstraintIndex) -> DeviceCatalogue:
        return device_catalogue(combine_rules([index.snapshot]), num_rows=1)

    assert of(index).trie is of(view).trie
    assert of(view).alive[0][0] is of(view).alive[0][0]
    assert of(ConstraintIndex.from_sequences([[5, 7], [6, 7]])).trie is not of(index).trie


def shapes_of(catalogue: DeviceCatalogue) -> Any:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(catalogue)], jax.tree.structure(catalogue)


def test_small_updates_other_filters_and_other_exclusions_leave_all_shapes() -> None:
    rng = random.Random(0)
    index = ConstraintIndex.from_sequences(random_rows(rng, 300, ragged=False))
    before = shapes_of(device_catalogue(combine_rules([index.snapshot], [[1], []])))
    index.remove([5, 6])
    assert shapes_of(device_catalogue(combine_rules([index.snapshot], [[], [2, 3, 4]]))) == before
    index.add(random_rows(rng, 2, ragged=False), range(1000, 1002))  # within the room that the arrays have
    assert shapes_of(device_catalogue(combine_rules([index.snapshot], [[1000], [1]]))) == before
    view = index.where(rng.sample(index.item_ids.tolist(), 50))
    assert shapes_of(device_catalogue(combine_rules([view.snapshot], [[1000], [1]]))) == before
    views = [index.where(rng.sample(index.item_ids.tolist(), 50)) for _ in range(4)]
    three = shapes_of(device_catalogue(combine_rules([view.snapshot for view in [*views[:3], views[0]]])))
    assert shapes_of(device_catalogue(combine_rules([view.snapshot for view in views]))) == three


def test_more_nodes_than_32_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transition, "LARGEST_NODE", 10)
    index = ConstraintIndex.from_sequences(random_rows(random.Random(0), 30, ragged=False))
    with pytest.raises(ValueError, match=r"constraint_index has .* nodes, expected at most 10.*backend='torch'"):
        device_catalogue(combine_rules([index.snapshot]), num_rows=1)
