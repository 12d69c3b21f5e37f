# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The trie step on tensors, against the dictionary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import ReferenceTrie
from table_scorers import CPU, catalogue_of

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch import transition

pytestmark = pytest.mark.shapes

rows = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=30)
# Most nodes have one child, some have several or, their end token aside, none: exceptions are listed.
SPARSE = [[1 + number // 6, 1 + number % 6, *[2, 3, 4] * (number % 9 > 0)] for number in range(36)] + [[1, 2, 2, 5]]


@settings(max_examples=25, deadline=None)
@given(rows)
@example(SPARSE)
def test_steps_equal_the_dictionary(sequences: list[list[int]]) -> None:
    """Children, masks, leaves and single steps of every prefix."""
    index = ConstraintIndex.from_sequences(sequences, eos_token_id=0)
    reference = ReferenceTrie(sequences, eos_token_id=0)
    trie = catalogue_of(index)
    level_prefixes: list[tuple[int, ...]] = [()]
    states = torch.zeros((1, 1), dtype=torch.long)
    for level in range(trie.max_length):
        below = transition.children(states, trie, level=level)
        found = below.states
        masked = transition.over_vocabulary(torch.zeros(below.shape), below, 8)
        next_prefixes, next_states = [], []
        for position, prefix in enumerate(level_prefixes):
            legal = below.legal[0, position]
            tokens = below.tokens[0, position][legal].tolist()
            assert tokens == reference.allowed(prefix)
            assert masked[0, position].isfinite().nonzero()[:, 0].tolist() == tokens
            assert bool(trie.is_leaf(states[:, position, None], level=level)) == (not tokens)
            for token in range(8):
                step = transition.advance(states[:, position, None], torch.tensor([[token]]), trie, level=level)
                if token in tokens:
                    assert int(step) == int(found[0, position][legal][tokens.index(token)])
                else:
                    assert int(step) == (int(states[0, position]) if not tokens else trie.dead_state)
            next_prefixes += [(*prefix, token) for token in tokens]
            next_states += found[0, position][legal].tolist()
        level_prefixes, states = next_prefixes, torch.tensor([next_states])
    assert bool(trie.is_leaf(states, level=trie.max_length).all())


def some_rules(num_rules: int, *, excludes: int) -> Any:
    """Rules, and exclusions of so many items, which end in whole dead branches."""
    rows = np.random.default_rng(0).integers(0, 64, (3000, 3)) + [0, 64, 30_000]
    index, items = ConstraintIndex.from_sequences(rows), np.arange(3000)
    views = [index.where((items % 3 != rule) & (items > 1000 * rule)) for rule in range(num_rules)] or [index]
    of_branches = [items[rows[:, 0] < 3], items[(rows[:, :2] == rows[5, :2]).all(1)]]
    excluded = [np.unique(np.append(some, items[row:excludes:2])) for row, some in enumerate(of_branches)]
    rules = combine_rules([view.snapshot for view in views], excluded if excludes else None)
    left = np.stack([~np.isin(items, excluded[row]) if excludes else items >= 0 for row in range(2)])
    for row in range(2 if num_rules else 0):
        rule = row % num_rules
        left[row] &= (items % 3 != rule) & (items > 1000 * rule)
    return rules, [rows[kept] for kept in left]


@pytest.mark.parametrize("excludes", [0, 1, 300, 2000])  # a few, and more than a node has children
@pytest.mark.parametrize("num_rules", [0, 1, 2])
def test_rules_and_exclusions_leave_what_is_left(num_rules: int, excludes: int) -> None:
    rules, left = some_rules(num_rules, excludes=excludes)
    catalogue = transition.device_catalogue(rules, CPU)
    states = torch.zeros((2, 1), dtype=torch.long)
    prefixes: list[list[tuple[int, ...]]] = [[()], [()]]
    for level in range(3):
        below = transition.children(states, catalogue, level=level)
        found: list[dict[tuple[int, ...], int]] = []
        for row in range(2):
            nodes = {}
            for place, prefix in enumerate(prefixes[row]):
                legal = below.legal[row, place]
                tokens, to = below.tokens[row, place][legal].tolist(), below.states[row, place][legal].tolist()
                nodes |= {(*prefix, token): state for token, state in zip(tokens, to, strict=True)}
            found.append(nodes)
            assert list(nodes) == sorted({tuple(sequence[: level + 1]) for sequence in left[row].tolist()})
        prefixes, width = [list(nodes) for nodes in found], max(map(len, found))
        rows = [[*nodes.values(), *[catalogue.dead_state] * (width - len(nodes))] for nodes in found]
        states = torch.tensor(rows)


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
