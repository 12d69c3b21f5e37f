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
from reference import ReferenceTrie, reference_beam_search

from hf_gr import ConstraintIndex
from hf_gr.catalogue import pieces
from hf_gr.catalogue.generated import read_generated
from hf_gr.catalogue.trie import PADDING, Trie, build_trie, lexicographic_order

EOS = 2
Rows = list[list[int]]

tokens = st.integers(3, 7) | st.sampled_from([0, 255, 32_767, 40_000, 2**31 - 1])
fixed_rows = st.integers(1, 5).flatmap(
    lambda length: st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=1, max_size=30)
)
ragged_rows = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=30)
catalogues = st.tuples(fixed_rows, st.none()) | st.tuples(fixed_rows | ragged_rows, st.just(EOS))
Catalogue = tuple[Rows, int | None]
# Most nodes have one child, some have many or none, so that exceptions are listed; tokens need a base.
SPARSE = [[70_000 + number, 7, *[5, 5] * (number % 9 > 0)] for number in range(24)] + [[70_020, 7, 5, 4]] * 2


def trie_of(index: ConstraintIndex) -> Trie:
    return index.snapshot.trie


def same_tries(one: Trie, two: Trie) -> bool:
    """Whether two tries are equal to the bit."""
    pairs = [(one.tokens, two.tokens)]
    for mine, other in zip(one.fanouts, two.fanouts, strict=True):
        pairs += [(mine.offsets, other.offsets), (mine.exceptions, other.exceptions)]
    return (
        one.token_bases == two.token_bases
        and one.level_starts == two.level_starts
        and one.leaf_starts == two.leaf_starts
        and one.branching == two.branching
        and all((a is b is None) or (a.dtype == b.dtype and a.tobytes() == b.tobytes()) for a, b in pairs)
    )


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
    # Not by `items`, which refuses rows that go on after their item: tests/test_generated.py.
    found = index.snapshot.items_of(read_generated(queries))
    assert found == [twin.items(query) for query in queries]
    for query in queries:
        end = [] if eos_token_id is None or query[-1] == eos_token_id else [eos_token_id]
        assert (query in index) == ((*query, *end) in sequences), query


def check_shape(trie: Trie) -> None:
    """The facts that the torch side and the items build on, by plain loops."""
    starts = trie.level_starts
    assert starts[:2] == (0, 1)
    assert starts[-1] + max(trie.branching) == len(trie.tokens)  # as many may be read from any node on
    prefixes: dict[int, list[int]] = {0: []}
    leaves: list[int] = []
    for level in range(trie.max_length):
        here = range(starts[level], starts[level + 1])
        assert trie.leaf_starts[max(level - 1, 0)] == len(leaves)
        first, last = trie.children(np.array(here), level)
        assert first[0] == starts[level + 1]
        assert last[-1] == starts[level + 2]
        np.testing.assert_array_equal(first[1:], last[:-1])
        for node, children in zip(here, map(range, first, last), strict=True):
            below = [int(trie.token(np.array(child), level + 1)) for child in children]
            assert below == sorted(set(below))
            prefixes |= {child: [*prefixes[node], token] for child, token in zip(children, below, strict=True)}
            leaves += [] if children else [node]
        assert trie.branching[level] == (last - first).max()
        if level:
            assert trie.has_leaves[level - 1] == bool((first == last).any())
        elsewhere = np.array([node for node in range(-2, starts[-1] + 3) if node not in here])
        first, last = trie.children(elsewhere, level)
        np.testing.assert_array_equal(first, last)
    leaves += range(starts[-2], starts[-1])
    assert trie.has_leaves[-1]
    assert trie.leaf_starts[trie.max_length - 1] == len(leaves) - (starts[-1] - starts[-2])
    assert trie.num_sequences == trie.leaf_starts[-1] == len(leaves)
    nodes = np.arange(-1, starts[-1])
    assert trie.leaves(nodes).tolist() == [leaves.index(node) if node in leaves else -1 for node in nodes]
    for number, node in enumerate(leaves):
        level = len(prefixes[node])
        assert trie.leaf_nodes(level, np.array([number])) + starts[level] == node
        assert trie.find(prefixes[node]) == node
    filled = [prefixes[node] + [PADDING] * (trie.max_length - len(prefixes[node])) for node in leaves]
    for order in (slice(None), slice(None, None, -1), slice(0, 0), slice(0, None, 3)):
        numbers = np.arange(len(leaves))[order]
        assert trie.sequences(numbers).tolist() == filled[order]


@given(catalogues)
@example(([[5]], None))
@example(([[5]], EOS))
@example(([[5], [5, 7], [5, 7, 9]], EOS))
@example(([[5], [3, 3, 3, 3]], EOS))
@example(([[3, 3, 3, 3], [5]], EOS))
@example(([[5, 7], [5, 7], [5, 7]], None))
@example(([[0, 0]], None))
@example(([[2**31 - 1] * 5], EOS))
@example((SPARSE, EOS))
def test_every_answer_equals_the_dict_trie(catalogue: Catalogue) -> None:
    check_against_twin(*catalogue)


@given(catalogues)
@example((SPARSE, EOS))
def test_the_arrays_have_the_shape_that_a_step_needs(catalogue: Catalogue) -> None:
    rows, eos_token_id = catalogue
    check_shape(trie_of(ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id)))


def test_the_examples_are_of_both_forms() -> None:
    dense, _, sparse, leaves, *_ = trie_of(ConstraintIndex.from_sequences(SPARSE, eos_token_id=EOS)).fanouts
    assert dense.exceptions is None
    assert sparse.exceptions is not None
    assert (len(sparse.exceptions), sparse.num_childless) == (0, 0)
    assert leaves.exceptions is not None
    assert (leaves.largest, leaves.num_childless) == (2, 3)


@given(catalogues, st.randoms(use_true_random=False))
def test_row_order_does_not_matter(catalogue: Catalogue, random: Any) -> None:
    rows, eos_token_id = catalogue
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    one = ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id)
    two = ConstraintIndex.from_sequences(
        [rows[number] for number in shuffled], item_ids=shuffled, eos_token_id=eos_token_id
    )
    assert same_tries(trie_of(one), trie_of(two))
    assert [sorted(items) for items in one.items(rows)] == [sorted(items) for items in two.items(rows)]


@given(catalogues)
def test_compiling_what_was_compiled_changes_nothing(catalogue: Catalogue) -> None:
    rows, eos_token_id = catalogue
    one = ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id)
    two = ConstraintIndex.from_sequences(list(one), eos_token_id=eos_token_id)
    assert list(one) == list(two)
    assert same_tries(trie_of(one), trie_of(two))


@given(catalogues, st.data())
def test_items_come_in_the_order_given_and_once_each(catalogue: Catalogue, data: st.DataObject) -> None:
    rows, eos_token_id = catalogue
    numbers = data.draw(st.lists(st.integers(-3, 3), min_size=len(rows), max_size=len(rows)))
    names = [f"item {number} \u00e9" for number in numbers]
    for ids in (numbers, names):
        index = ConstraintIndex.from_sequences(rows, item_ids=ids, eos_token_id=eos_token_id)
        twin = ReferenceTrie.from_sequences(rows, item_ids=ids, eos_token_id=eos_token_id)
        assert index.items(rows) == [twin.items(row) for row in rows]
        given_once = dict.fromkeys(zip(ids, map(tuple, rows), strict=True))
        assert list(index.item_ids) == [item for item, _ in given_once]


@given(catalogues)
@example((SPARSE, EOS))
def test_advance_and_find_follow_the_same_children(catalogue: Catalogue) -> None:
    rows, eos_token_id = catalogue
    trie = trie_of(ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id))
    states = np.arange(-1, len(trie.tokens) + 2)
    for level in range(trie.max_length):
        below = [
            {int(trie.token(np.array(child), level + 1)): child for child in range(*bounds)}
            for bounds in zip(*trie.children(states, level), strict=True)
        ]
        for token in {-1, 0, EOS, 3, 6, 255, 32_767, 40_000, 70_020, 2**31 - 1, 2**40}:
            expected = [children.get(token, -1) for children in below]
            assert trie.advance(states, np.full_like(states, token), level).tolist() == expected
    for row in rows:
        state = np.zeros(1, dtype=np.int64)
        for level, token in enumerate(row):
            state = trie.advance(state, np.array([token]), level)
            assert trie.find(row[: level + 1]) == state[0]
        assert trie.find([*row, 99]) == -1
        assert trie.find([*row, EOS, 0]) == -1


@given(catalogues)
@example((SPARSE, EOS))
def test_walk_counts_the_tokens_that_it_follows(catalogue: Catalogue) -> None:
    rows, eos_token_id = catalogue
    trie = trie_of(ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id))
    twin = ReferenceTrie.from_sequences(rows, eos_token_id=eos_token_id)
    prefixes = set(every_prefix(twin))
    queries = [query for query in near_misses(twin) if min(query) >= 0]
    padded = np.full((len(queries), max(map(len, queries))), PADDING)
    for row, query in zip(padded, queries, strict=True):
        row[: len(query)] = query
    _, lengths = trie.walk(padded, eos_token_id)
    expected = [max(end for end in range(len(query) + 1) if tuple(query[:end]) in prefixes) for query in queries]
    assert lengths.tolist() == expected


@given(fixed_rows)
def test_packed_keys_sort_like_python(rows: Rows) -> None:
    assert lexicographic_order(np.array(rows)).tolist() == sorted(range(len(rows)), key=lambda number: rows[number])


@pytest.mark.parametrize(("bits", "length"), [(31, 1), (31, 2), (31, 3), (21, 3), (21, 4), (8, 8), (11, 12)])
def test_keys_of_any_width_sort_stably(bits: int, length: int) -> None:
    rng = np.random.default_rng(bits)
    rows = rng.integers(0, 2, (500, length)) * (2**bits - 1)
    rows[:, : length // 2] = rows[0, : length // 2]  # ties in the first key
    assert lexicographic_order(rows).tolist() == sorted(range(500), key=lambda number: rows[number].tolist())


@pytest.mark.parametrize("length", [1, 3, 8, 30])
@pytest.mark.parametrize("tied", [0.0, 0.5, 1.0], ids=["none tied", "half tied", "all tied"])
@pytest.mark.parametrize("at_once", [7, pieces.AT_ONCE])
def test_rows_that_tie_for_several_rounds_sort_stably(
    length: int, tied: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round takes some 50 bits of a row: these differ in the last bits, or not at all, or never tie."""
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    rng = np.random.default_rng(length)
    rows = rng.integers(0, 2**31, (300, length))
    twins = rng.integers(0, 3, 300)[: int(300 * tied)]
    rows[: len(twins)] = rows[twins]
    rows[: len(twins), -1] += rng.integers(-1, 2, len(twins))
    rows[0, :], rows[1, :] = 0, 2**31 - 1  # every column is as wide as can be
    assert lexicographic_order(rows).tolist() == sorted(range(300), key=lambda number: rows[number].tolist())


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_one_row_and_equal_rows_keep_their_order(dtype: Any) -> None:
    for rows in ([[7, -1]], [[7, 7]] * 9, [[0]] * 2, [[32_767, -1, -1]] * 70):
        assert lexicographic_order(np.array(rows, dtype=dtype)).tolist() == list(range(len(rows)))


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
    tokens, offsets, numbers = 1 + 30 + 900 + 27_000 + 30, (1 + 1) + (30 + 1) + (900 + 1), 27_000
    assert index.nbytes == 2 * (tokens + offsets + 1 + 2 * numbers)
    assert ConstraintIndex.from_sequences(rows + 32_767).nbytes == index.nbytes
    assert trie_of(ConstraintIndex.from_sequences(rows * 32_768)).tokens.dtype == np.int32


def test_a_level_without_branches_takes_no_room() -> None:
    rows = np.arange(1000)[:, None] * [1, 0, 0, 0] + [0, 7, 8, 9]
    one, two = ConstraintIndex.from_sequences(rows), ConstraintIndex.from_sequences(rows[:, :3])
    assert one.nbytes - two.nbytes == 2 * 1000 + 2  # the tokens, and one shift
    rows[::100, 3] = 3
    three = ConstraintIndex.from_sequences(np.concatenate([rows, rows[::50] + [0, 0, 0, 1]]))
    fanout = trie_of(three).fanouts[3]
    assert fanout.exceptions is not None
    assert fanout.exceptions.tolist() == list(range(0, 1000, 50))
    assert fanout.nbytes == 2 * 20 + 2 * 21


@pytest.mark.parametrize("least", [0, 1, 32_767, 32_768, 40_000, 65_536, 2**31 - 2**16 - 1])
@pytest.mark.parametrize("span", [0, 1, 32_767, 32_768, 65_535, 65_536])
def test_a_level_of_large_tokens_is_as_small_as_its_span(least: int, span: int) -> None:
    column = sorted({least, least + span // 2, least + span})
    rows = [[token, 5] for token in column]
    index = ConstraintIndex.from_sequences(rows)
    assert trie_of(index).tokens.dtype == (np.int16 if span < 2**16 else np.int32)
    check_against_twin(rows, None)
    check_against_twin([*rows, *([token] for token in column)], eos_token_id=9)
    check_shape(trie_of(index))


def test_a_shifted_level_uses_all_of_16_bits() -> None:
    tokens = trie_of(ConstraintIndex.from_sequences([[100_000], [165_535]])).tokens
    assert tokens[1:3].tolist() == [-32_768, 32_767]


def test_many_rows_with_ties_compile_as_numpy_says() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 64, (200_000, 8))
    rows[:, 5:] = 0
    trie, order, is_first = build_trie(rows)
    assert trie.num_sequences == is_first.sum() == len(np.unique(rows, axis=0))
    np.testing.assert_array_equal(trie.sequences(np.arange(trie.num_sequences)), rows[order][is_first])


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


@pytest.mark.parametrize("num_tokens", [300, 40_000, 65_536, 70_000])  # from 32,769 on, bases lie within the level
def test_codebooks_are_the_distinct_tokens_of_every_level(num_tokens: int) -> None:
    tokens = np.arange(7, 7 + num_tokens)
    rows = np.stack([np.where(tokens == 8, 7, tokens), tokens[::-1] + num_tokens], axis=1)
    for column, codes in zip(rows.T, trie_of(ConstraintIndex.from_sequences(rows)).codebooks, strict=True):
        assert np.array_equal(codes, np.unique(column))
