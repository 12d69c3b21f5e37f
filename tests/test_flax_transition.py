# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The trie step in JAX, against the dictionary."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_catalogues import (
    SPARSE,
    TOKENS,
    VOCABULARY,
    check_steps,
    random_index,
    random_rows,
    random_rules,
    wide_rules,
)

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import BatchRules, combine_rules
from hf_gr.flax import device_trie, transition
from hf_gr.flax.transition import DeviceCatalogue, device_catalogue

pytestmark = pytest.mark.shapes

FREE = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _step(states: Any, catalogue: DeviceCatalogue, level: int, vocabulary: int) -> Any:
    """All that there is to know of some states of a level."""
    below = transition.children(states, catalogue, level=level)
    shape = below.tokens.shape
    places = jnp.broadcast_to(jnp.arange(shape[1] * shape[2]), (shape[0], shape[1] * shape[2]))
    scores = below.scores(jnp.zeros((*shape[:2], vocabulary)))
    masked = transition.over_vocabulary(scores, below, vocabulary)
    every = jnp.tile(jnp.arange(TOKENS + 1), (len(states), states.shape[1]))
    steps = transition.advance(jnp.repeat(states, TOKENS + 1, axis=1), every, catalogue, level=level)
    leaf = catalogue.is_leaf(states, level=level)
    below_states = below.take(places)[1].reshape(shape)
    return below.tokens, below_states, masked, steps.reshape(*states.shape, TOKENS + 1), leaf


step = jax.jit(_step, static_argnums=(2, 3))


def check(rules: BatchRules, *, num_rows: int, vocabulary: int = VOCABULARY, step: Any = step) -> None:
    catalogue = device_catalogue(rules, num_rows=num_rows)
    check_steps(rules, catalogue, lambda states, level: step(states, catalogue, level, vocabulary), num_rows=num_rows)


@pytest.mark.parametrize(
    ("ragged", "parents"),
    [(False, device_trie.PARENTS), (True, device_trie.PARENTS), (True, 0)],
    ids=["fixed", "ragged", "listed exceptions"],
)
@FREE
@given(seed=st.integers(0, 10**6))
def test_steps_equal_the_dictionary_in_every_state(
    one_shape: None, ragged: bool, parents: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_trie, "PARENTS", parents)  # up to so many, every node's first child is stored
    rng = random.Random(seed)
    rules = random_rules(rng, random_index(rng, ragged=ragged, largest=100))
    assert any(one is not None for one in device_catalogue(rules).trie.exceptions) == (parents == 0)
    check(rules, num_rows=2)


def test_one_rule_and_copies_of_rows() -> None:
    index = ConstraintIndex.from_sequences(random_rows(random.Random(0), 30, ragged=False))
    check(combine_rules([index.snapshot]), num_rows=1)
    excluded = device_catalogue(combine_rules([index.snapshot], [[1, 2], [3]]), num_rows=4)
    assert excluded.hidden is not None
    for level in excluded.hidden:
        assert (level[2] == level[0]).all()
        assert (level[3] == level[0]).all()


def test_large_tokens() -> None:
    large = ConstraintIndex.from_sequences(np.array(SPARSE[1:9]) + 2**31 - 7)
    catalogue = device_catalogue(combine_rules([large.snapshot]), num_rows=1)
    tokens = np.asarray(transition.children(jnp.zeros((1, 1), jnp.int32), catalogue, level=0).tokens)
    assert sorted(tokens[tokens >= 0].tolist()) == large.allowed_next_tokens([])


def test_a_node_with_more_children_than_a_word_has_bits() -> None:
    check(wide_rules(), num_rows=2, vocabulary=128)


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
