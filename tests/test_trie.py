# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The compiled trie against the dict trie, on random catalogues."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_gr import ConstraintIndex
from hf_gr.catalogue import index as index_module
from hf_gr.catalogue import item_ids as item_ids_module
from hf_gr.catalogue import trie as trie_module
from hf_gr.catalogue.trie import Trie, build_trie, lexicographic_order
from hf_gr.reference import ReferenceTrie, reference_beam_search

EOS = 2
Rows = list[list[int]]
settings.register_profile(
    "hf_gr", deadline=None, max_examples=60
)  # the machine is shared: a time limit would be noise
settings.load_profile("hf_gr")

tokens = st.integers(3, 7) | st.sampled_from([0, 255, 40_000, 2**31 - 1])
fixed_rows = st.integers(1, 5).flatmap(
    lambda length: st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=1, max_size=30)
)
ragged_rows = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=30)
catalogues = st.tuples(fixed_rows, st.none()) | st.tuples(fixed_rows | ragged_rows, st.just(EOS))
Catalogue = tuple[Rows, int | None]


def every_prefix(twin: ReferenceTrie) -> list[tuple[int, ...]]:
    return sorted({sequence[:end] for sequence in twin.sequences() for end in range(len(sequence) + 1)})


def near_misses(twin: ReferenceTrie) -> Rows:
    """Sequences, their prefixes, and both with one token changed, added, or followed by padding."""
    prefixes = [list(prefix) for prefix in every_prefix(twin) if prefix]
    changed = [[*prefix[:-1], prefix[-1] + step] for prefix in prefixes for step in (-1, 1) if prefix[-1] + step >= 0]
    longer = [[*prefix, *tail] for prefix in prefixes for tail in ([0], [EOS], [0, 0, 5], [-1, -1], [-100], [-1, 5])]
    return prefixes + changed + longer + [[0], [2**31 - 1], [-1], [-100, 5], [2**40]]


def check_against_twin(rows: Rows, eos_token_id: int | None) -> None:
    """Everything that an index answers, against the dict trie."""
    index = ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id)
    twin = ReferenceTrie.from_sequences(rows, eos_token_id=eos_token_id)
    sequences = twin.sequences()
    assert list(index) == [list(sequence) for sequence in sequences]
    assert len(index) == len(sequences)
    assert index.num_items == len(rows)
    assert index.max_length == max(map(len, sequences))
    assert index.max_token_id == max(map(max, sequences))
    for prefix in every_prefix(twin):
        assert index.allowed_next_tokens(prefix) == twin.allowed(prefix), prefix
    queries = near_misses(twin)
    assert index.items(queries) == [twin.items(query) for query in queries]
    for query in queries:
        end = [] if eos_token_id is None or query[-1] == eos_token_id else [eos_token_id]
        assert (query in index) == ((*query, *end) in sequences), query


def check_shape(trie: Trie) -> None:
    """The facts that the torch side builds on, by plain loops."""
    starts = trie.level_starts
    assert starts[0] == 0
    assert starts[-1] == len(trie.tokens)
    assert trie.dead_state == starts[-2]
    for level in range(trie.max_length):
        counts = [last - first for first, last in map(trie.child_range, range(starts[level], starts[level + 1]))]
        assert trie.branching[level] == max(counts)
        if level:
            assert trie.has_leaves[level - 1] == (0 in counts)
        assert sum(counts) == starts[level + 2] - starts[level + 1]
    assert trie.has_leaves[-1]
    assert trie.child_range(trie.dead_state)[0] == trie.child_range(trie.dead_state)[1]
    for state in range(starts[-2], starts[-1]):
        assert trie.child_range(state)[0] == trie.child_range(state)[1]


@given(catalogues)
@example(([[5]], None))
@example(([[5]], EOS))
@example(([[5], [5, 7], [5, 7, 9]], EOS))
@example(([[5], [3, 3, 3, 3]], EOS))
@example(([[3, 3, 3, 3], [5]], EOS))
@example(([[5, 7], [5, 7], [5, 7]], None))
@example(([[0, 0]], None))
@example(([[2**31 - 1] * 5], EOS))
def test_every_answer_equals_the_dict_trie(catalogue: Catalogue) -> None:
    check_against_twin(*catalogue)


@given(catalogues)
def test_the_arrays_have_the_shape_that_a_step_needs(catalogue: Catalogue) -> None:
    rows, eos_token_id = catalogue
    check_shape(ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id).trie)


@given(catalogues, st.randoms(use_true_random=False))
def test_row_order_does_not_matter(catalogue: Catalogue, random: Any) -> None:
    rows, eos_token_id = catalogue
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    one = ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id)
    two = ConstraintIndex.from_sequences(
        [rows[number] for number in shuffled], item_ids=shuffled, eos_token_id=eos_token_id
    )
    np.testing.assert_array_equal(one.trie.tokens, two.trie.tokens)
    np.testing.assert_array_equal(one.trie.child_offsets, two.trie.child_offsets)
    assert [sorted(items) for items in one.items(rows)] == [sorted(items) for items in two.items(rows)]


@given(catalogues)
def test_compiling_what_was_compiled_changes_nothing(catalogue: Catalogue) -> None:
    rows, eos_token_id = catalogue
    one = ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id)
    two = ConstraintIndex.from_sequences(list(one), eos_token_id=eos_token_id)
    assert list(one) == list(two)
    np.testing.assert_array_equal(one.trie.child_offsets, two.trie.child_offsets)


@given(catalogues, st.data())
def test_items_come_in_the_order_given_and_once_each(catalogue: Catalogue, data: st.DataObject) -> None:
    rows, eos_token_id = catalogue
    numbers = data.draw(st.lists(st.integers(-3, 3), min_size=len(rows), max_size=len(rows)))
    names = [f"item {number} \u00e9" for number in numbers]
    for ids in (numbers, names):
        index = ConstraintIndex.from_sequences(rows, item_ids=ids, eos_token_id=eos_token_id)
        twin = ReferenceTrie.from_sequences(rows, item_ids=ids, eos_token_id=eos_token_id)
        assert index.items(rows) == [twin.items(row) for row in rows]


@given(catalogues)
def test_advance_and_find_follow_the_same_children(catalogue: Catalogue) -> None:
    rows, eos_token_id = catalogue
    trie = ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id).trie
    states = np.arange(-1, len(trie.tokens))
    for token in {0, EOS, 3, 6, 255, 40_000, 2**31 - 1, 2**40}:
        expected = [
            next((child for child in range(*trie.child_range(state)) if trie.tokens[child] == token), -1)
            if state >= 0
            else -1
            for state in states.tolist()
        ]
        assert trie.advance(states, np.full_like(states, token)).tolist() == expected
    for row in rows:
        state = np.zeros(1, dtype=np.int64)
        for token in row:
            state = trie.advance(state, np.array([token]))
        assert trie.find(row) == state[0]


@given(fixed_rows)
def test_packed_keys_sort_like_python(rows: Rows) -> None:
    assert lexicographic_order(np.array(rows)).tolist() == sorted(range(len(rows)), key=lambda number: rows[number])


@pytest.mark.parametrize(("bits", "length"), [(31, 1), (31, 2), (31, 3), (21, 3), (21, 4), (8, 8), (11, 12)])
def test_keys_of_any_width_sort_stably(bits: int, length: int) -> None:
    rng = np.random.default_rng(bits)
    rows = rng.integers(0, 2, (500, length)) * (2**bits - 1)
    rows[:, : length // 2] = rows[0, : length // 2]  # ties in the first key
    assert lexicographic_order(rows).tolist() == sorted(range(500), key=lambda number: rows[number].tolist())


@pytest.mark.parametrize("num_nodes", [16_383, 16_385, 30_000, 32_767, 32_768, 40_000, 70_000])
def test_offsets_beyond_half_of_16_bits(num_nodes: int) -> None:
    """Binary search adds two node numbers; in 16 bits that overflows from node 16,384 on."""
    rows = np.arange(num_nodes)[:, None] * [0, 1] + [7, 0]
    index = ConstraintIndex.from_sequences(rows)
    assert index.items(rows) == [[number] for number in range(num_nodes)]
    assert index.items(rows + [0, num_nodes]) == [[]] * num_nodes


def test_storage_is_small() -> None:
    rows = np.array(list(product(range(30), repeat=3)))
    index = ConstraintIndex.from_sequences(rows)
    assert index.trie.tokens.dtype == index.trie.child_offsets.dtype == np.int16
    assert ConstraintIndex.from_sequences(rows + 32_767).trie.tokens.dtype == np.int32
    assert index.nbytes == 2 * (1 + 30 + 900 + 27_000) + 2 * (1 + 30 + 900 + 2) + 2 * 27_001 + 2 * 27_000


@pytest.mark.parametrize(
    ("tokens", "child_offsets", "fact"),
    [
        ([0, 5], [0, 2, 2], "root"),
        ([0, 5], [1, 2], "root"),
        ([0, 5, 6, 7], [1, 3, 2, 4, 4], "order"),
        ([0, 5, 6], [1, 2, 2], "last child"),
        ([0, 5, 6], [1, 3, 2], "order"),
        ([0, 6, 5], [1, 3, 3], "rise"),
        ([0, 5, 5], [1, 3, 3], "rise"),
        ([0, -5, 5], [1, 3, 3], "rise"),
        ([0, 5, 6, 7], [1, 2, 3, 4, 4, 4], "no children"),
        ([0], [1, 1, 1], "no children"),
        ([0, 5, 6], [1, 1, 3, 3], "every level"),
    ],
)
def test_arrays_that_are_no_trie_are_refused(tokens: list[int], child_offsets: list[int], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        Trie.from_arrays(np.array(tokens), np.array(child_offsets))


def test_many_rows_with_ties_compile_as_numpy_says() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 64, (200_000, 8))
    rows[:, 5:] = 0
    trie, order, is_first = build_trie(rows)
    assert trie.num_sequences == is_first.sum() == len(np.unique(rows, axis=0))
    np.testing.assert_array_equal(trie.sequences(), rows[order][is_first])


def swap(name: str, planted: Callable[..., Any], *modules: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for module in modules:
            patch.setattr(module, name, planted)

    return plant


def no_duplicates(rows: Any) -> Any:
    trie, order, is_first = build_trie(rows)
    return trie, order, np.ones_like(is_first)


def unstable(rows: Any) -> Any:
    trie, order, is_first = build_trie(rows)
    return trie, order[::-1], is_first


def off_by_one(self: Trie, states: Any) -> Any:
    states = np.minimum(states, self.dead_state)
    return self.child_offsets[states].astype(np.int64), self.child_offsets[states + 1].astype(np.int64) - 1


def not_clamped(self: Trie, state: int) -> tuple[int, int]:
    state = state if state < self.dead_state else 0
    return int(self.child_offsets[state]), int(self.child_offsets[state + 1])


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(swap("lexicographic_order", lambda rows: np.arange(len(rows)), trie_module), id="no sort"),
        pytest.param(swap("build_trie", no_duplicates, index_module), id="no duplicates"),
        pytest.param(swap("build_trie", unstable, index_module), id="items in another order"),
        pytest.param(swap("PADDING", -2, trie_module), id="another padding"),
        pytest.param(swap("children", off_by_one, Trie), id="last child lost"),
        pytest.param(swap("child_range", not_clamped, Trie), id="leaves with children"),
        pytest.param(
            swap("group_items", lambda ids, order, _: (ids[order], np.arange(len(order) + 1)), index_module),
            id="items not grouped",
        ),
    ],
)
def test_a_planted_error_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[9, 4], [5], [5, 7], [9, 4], [5, 7, 3], [8], [5]]
    check_against_twin(rows, EOS)
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_against_twin(rows, EOS)


def test_a_planted_error_in_grouping_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, ids = [[5, 7], [5, 7], [5, 7]], ["b", "a", "b"]
    assert ConstraintIndex.from_sequences(rows, item_ids=ids).items([[5, 7]]) == [["b", "a"]]
    monkeypatch.setattr(item_ids_module.np, "lexsort", lambda keys: np.arange(len(keys[0])))
    assert ConstraintIndex.from_sequences(rows, item_ids=ids).items([[5, 7]]) != [["b", "a"]]


def random_scores(vocabulary: int, seed: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    def score(prefix: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng([seed, *prefix]).normal(size=vocabulary)
        return logits - np.logaddexp.reduce(logits)

    return score


@given(st.integers(0, 99), st.booleans(), st.sampled_from([0.0, 0.7, 1.0, 2.0]), st.booleans())
@settings(max_examples=20)
def test_reference_beam_search_with_all_beams_ranks_everything(
    seed: int, ragged: bool, length_penalty: float, renormalize: bool
) -> None:
    """With as many beams as sequences nothing is cut off, so ranking every sequence by itself gives the same."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 7, rng.integers(1, 4) if ragged else 3).tolist() for _ in range(12)]
    score_fn = random_scores(8, seed)
    trie = ReferenceTrie.from_sequences(rows, eos_token_id=EOS if ragged else None)
    expected = []
    for sequence in trie.sequences():
        score = 0.0
        for level, token in enumerate(sequence):
            log_probs = score_fn(sequence[:level])
            score += log_probs[token]
            if renormalize:
                score -= np.log(sum(np.exp(log_probs[other]) for other in trie.allowed(sequence[:level])))
        expected.append((score / len(sequence) ** length_penalty, sequence))
    found = reference_beam_search(
        score_fn,
        rows,
        100,
        eos_token_id=trie.eos_token_id,
        length_penalty=length_penalty,
        renormalize_logits=renormalize,
    )
    assert [sequence for sequence, _ in found] == [sequence for _, sequence in sorted(expected, reverse=True)]
    np.testing.assert_allclose([score for _, score in found], sorted((score for score, _ in expected), reverse=True))


def test_reference_beam_search_cuts_off_at_every_level() -> None:
    rows = [[3, 5], [4, 6], [4, 7]]
    scores = {(): [0, 0, 0, -1, -2, 0, 0, 0], (3,): [0] * 5 + [-9, 0, 0], (4,): [0] * 6 + [-1, -2]}
    assert reference_beam_search(lambda prefix: np.array(scores[prefix]), rows, 1, length_penalty=0.0) == [
        ((3, 5), -10)
    ]
    assert reference_beam_search(lambda prefix: np.array(scores[prefix]), rows, 2, length_penalty=0.0) == [
        ((4, 6), -3),
        ((4, 7), -4),
    ]
    nothing = reference_beam_search(lambda prefix: np.full(8, -np.inf), rows, 2)
    assert nothing == []
