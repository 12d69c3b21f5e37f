# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The trie step on tensors, against the dictionary."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_catalogues import EOS, SPARSE, TOKENS, VOCABULARY, check_steps, random_index, random_rules, wide_rules
from table_scorers import CPU, catalogue_of

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import BatchRules, combine_rules
from hf_gr.torch import transition

pytestmark = pytest.mark.shapes


def check(rules: BatchRules, *, num_rows: int, vocabulary: int = VOCABULARY) -> None:
    catalogue = transition.device_catalogue(rules, CPU)

    def step(given: np.ndarray, level: int) -> tuple[torch.Tensor, ...]:
        states = torch.from_numpy(given).long()
        below = transition.children(states, catalogue, level=level)
        masked = transition.over_vocabulary(torch.zeros(below.shape), below, vocabulary)
        every = torch.arange(TOKENS + 1).repeat(len(states), states.shape[1])
        above = states.repeat_interleave(TOKENS + 1, dim=1)
        steps = transition.advance(above, every, catalogue, level=level).unflatten(1, (-1, TOKENS + 1))
        tokens = below.tokens.masked_fill(~below.legal, -1)
        return tokens, below.states, masked, steps, catalogue.is_leaf(states, level=level)

    check_steps(rules, catalogue, step, num_rows=num_rows)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), ragged=st.booleans())
def test_steps_equal_the_dictionary_in_every_state(seed: int, ragged: bool) -> None:
    rng = random.Random(seed)
    check(random_rules(rng, random_index(rng, ragged=ragged, largest=100)), num_rows=2)


@pytest.mark.parametrize("excluded", [None, [[0, 7, 9, 36]]])
def test_listed_exceptions(excluded: Any) -> None:
    index = ConstraintIndex.from_sequences(SPARSE, eos_token_id=EOS)
    check(combine_rules([index.snapshot], excluded), num_rows=1)


def test_a_node_with_more_children_than_a_word_has_bits() -> None:
    check(wide_rules(), num_rows=2, vocabulary=128)


@pytest.mark.parametrize(("num_short", "large"), [(0, [32_768]), (25_000, [40_000, 3000])])
def test_a_node_may_have_more_children_than_16_bits_count(num_short: int, large: list[int]) -> None:
    """Shifts between exceptions are stored in 16 bits, of both signs: childless nodes come first."""
    sizes = np.array([*large, *[1] * 150_000])
    first = 1 + num_short + np.repeat(np.arange(len(sizes)), sizes)
    last = 1 + np.concatenate([*map(np.arange, large), np.arange(150_000) % 32_000])
    rows = [[1 + number] for number in range(num_short)]
    rows += np.stack([first, np.ones_like(first), last], axis=1).tolist()
    index = ConstraintIndex.from_sequences(rows, eos_token_id=0 if num_short else None)
    assert index.snapshot.trie.fanouts[2].offsets.dtype == np.int16
    catalogue = catalogue_of(index)
    start = catalogue.trie.level_starts[2]
    below = transition.children(start + num_short + torch.arange(len(large) + 1)[None], catalogue, level=2)
    assert below.legal.sum(-1).tolist() == [[*large, 1]]


@pytest.mark.parametrize(("states", "width"), [([1, 2], 100), ([2, 2], 2), ([2, -1], 2), ([-1, -1], 1)])
def test_a_cpu_reads_no_more_children_than_the_largest_of_the_beams_has(states: list[int], width: int) -> None:
    index = ConstraintIndex.from_sequences([[3, token] for token in range(100)] + [[5, 1], [5, 99]])
    below = transition.children(torch.tensor([states]), catalogue_of(index), level=1)
    assert below.shape == (1, 2, width)
    tokens = [below.tokens[0, place][below.legal[0, place]].tolist() for place in range(2)]
    assert tokens == [{1: [*range(100)], 2: [1, 99]}.get(state, []) for state in states]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([1, 2, 30_000, 40_000, 100_000, 100_001, 165_534]), min_size=1, max_size=4),
        min_size=1,
        max_size=30,
    )
)
@example([[5, 100_000, 30_000], [5, 100_001, 30_000], [5, 165_535, 30_000], [6, 100_000, 30_000]])
def test_what_stands_at_illegal_places_is_some_token(sequences: list[list[int]]) -> None:
    """It is looked up among the scores of the vocabulary like any other."""
    index = ConstraintIndex.from_sequences(sequences, eos_token_id=0)
    catalogue = catalogue_of(index)
    states = torch.arange(-1, catalogue.dead_state + 2)[None]
    for level in range(catalogue.max_length):
        below = transition.children(states, catalogue, level=level)
        assert 0 <= below.tokens.min() <= below.tokens.max() <= index.max_token_id
        assert set(below.tokens[below.legal].tolist()) == {row[level] for row in index if len(row) > level}


def test_the_dead_state_has_no_children_and_counts_as_a_leaf_as_do_those_of_upper_levels() -> None:
    trie = catalogue_of(ConstraintIndex.from_sequences([[5], [6, 7], [6, 8, 9]], eos_token_id=0))
    first_end = transition.children(torch.tensor([[1]]), trie, level=1).states[0, 0, 0]
    for level in range(trie.max_length):
        for state in (-1, trie.dead_state, trie.dead_state + 1):
            assert not transition.children(torch.tensor([[state]]), trie, level=level).legal.any()
    for level in range(trie.max_length + 1):
        dead, end = trie.is_leaf(torch.tensor([[trie.dead_state, first_end]]), level=level)[0].tolist()
        assert dead
        assert end or level < 2


def test_a_trie_and_the_bits_of_a_rule_are_moved_once() -> None:
    index, other = (ConstraintIndex.from_sequences([[5, 7], [6, 7]]) for _ in range(2))
    view = index.where([True, False])
    assert catalogue_of(view).trie is catalogue_of(index).trie is not catalogue_of(other).trie
    (ours, none), (theirs, _) = catalogue_of(view).alive, catalogue_of(view).alive
    assert none is None  # every prefix of one token has one child, which is alive where the prefix is
    assert ours.data_ptr() == theirs.data_ptr()


def test_unchecked_children_lead_where_their_tokens_do() -> None:
    sequences = [[1, 2], [1, 3], [2, 3]]
    checked = catalogue_of(ConstraintIndex.from_sequences(sequences))
    catalogue = replace(checked, unchecked=(torch.arange(4),) * 2)
    states = torch.zeros((1, 1), dtype=torch.long)
    for level in range(2):
        below = transition.children(states, catalogue, level=level)
        tokens, found = below.tokens.flatten(1), below.states.flatten(1)
        assert below.legal.all()
        assert tokens.tolist() == [[0, 1, 2, 3] * states.shape[1]]
        above = states.repeat_interleave(4, dim=1)
        assert torch.equal(found, transition.advance(above, tokens, checked, level=level))
        states = found
    prefixes = [[first, second] for first in range(4) for second in range(4)]
    assert (states[0] != checked.dead_state).tolist() == [prefix in sequences for prefix in prefixes]
