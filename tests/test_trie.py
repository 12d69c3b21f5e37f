# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled catalogue against the dict trie, on random catalogues and at the borders of the types that store it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reference import ReferenceTrie

from hf_gr import ConstraintIndex
from hf_gr.catalogue import pieces
from hf_gr.catalogue.generated import read_generated
from hf_gr.catalogue.trie import Trie

EOS = 2
Rows = list[list[int]]
Catalogue = tuple[Rows, int | None]

tokens = st.integers(3, 7) | st.sampled_from([0, 255, 32_767, 40_000, 2**31 - 1])
fixed_rows = st.integers(1, 5).flatmap(
    lambda length: st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=1, max_size=30)
)
ragged_rows = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=30)
catalogues = st.tuples(fixed_rows, st.none()) | st.tuples(fixed_rows | ragged_rows, st.just(EOS))
# Most nodes have one child, some have many or none, so that exceptions are listed; tokens need a base.
SPARSE = [[70_000 + number, 7, *[5, 5] * (number % 9 > 0)] for number in range(24)] + [[70_020, 7, 5, 4]] * 2


def trie_of(index: ConstraintIndex) -> Trie:
    return index.snapshot.trie


def near_misses(prefixes: list[tuple[int, ...]]) -> Rows:
    """Prefixes, also with one token changed or added, or followed by padding."""
    rows = [list(prefix) for prefix in prefixes if prefix]
    changed = [[*row[:-1], row[-1] + step] for row in rows for step in (-1, 1) if row[-1] + step >= 0]
    longer = [[*row, *tail] for row in rows for tail in ([0], [EOS], [0, 0, 5], [-1, -1], [-100], [-1, 5])]
    return rows + changed + longer + [[0], [2**31 - 1], [-1], [-100, 5], [2**40]]


def check_against_twin(rows: Rows, eos_token_id: int | None) -> None:
    """Everything that an index answers, against the dict trie."""
    index = ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id)
    twin = ReferenceTrie(rows, eos_token_id=eos_token_id)
    sequences = twin.sequences()
    assert list(index) == [list(sequence) for sequence in sequences]
    assert (len(index), index.num_items) == (len(sequences), len(rows))
    assert index.max_length == max(map(len, sequences))
    assert index.max_token_id == max(map(max, sequences))
    prefixes = sorted({sequence[:end] for sequence in sequences for end in range(len(sequence) + 1)})
    for prefix in prefixes:
        assert index.allowed_next_tokens(prefix) == twin.allowed(prefix), prefix
    queries = near_misses(prefixes)
    # Not by `items`, which refuses rows that go on after their item: tests/test_generated.py.
    assert index.snapshot.items_of(read_generated(queries)) == [twin.items(query) for query in queries]
    for query in queries[::3]:
        end = [] if eos_token_id is None or query[-1] == eos_token_id else [eos_token_id]
        assert (query in index) == ((*query, *end) in sequences), query
    trie = trie_of(index)  # as many entries may be read from any node on
    assert len(trie.tokens) == len(prefixes) + max(len(twin.allowed(prefix)) for prefix in prefixes)


@given(catalogues)
@example(([[5]], EOS))
@example(([[5], [5, 7], [5, 7, 9]], EOS))
@example(([[3, 3, 3, 3], [5]], EOS))
@example(([[2**31 - 1] * 5], EOS))
@example((SPARSE, EOS))
def test_every_answer_equals_the_dict_trie(catalogue: Catalogue) -> None:
    check_against_twin(*catalogue)


@given(catalogues, st.randoms(use_true_random=False))
def test_rows_in_any_order_are_the_same_catalogue_to_the_bit(catalogue: Catalogue, random: Any) -> None:
    rows, eos_token_id = catalogue
    one = ConstraintIndex.from_sequences(rows, eos_token_id=eos_token_id)
    for others in (random.sample(rows, len(rows)), list(one)):
        two = ConstraintIndex.from_sequences(others, eos_token_id=eos_token_id)
        kept = [
            {name: (array.dtype, array.tobytes()) for name, array in index.snapshot.items.arrays().items()}
            for index in (one, two)
        ]
        same = [name for name in kept[0] if name.startswith(("tokens", "children"))]
        assert [kept[0][name] for name in same] == [kept[1].get(name) for name in same]
        assert trie_of(one).token_bases == trie_of(two).token_bases


@pytest.mark.parametrize("at_once", [7, pieces.AT_ONCE])
@pytest.mark.parametrize(("bits", "length"), [(31, 1), (31, 2), (31, 30), (21, 4), (8, 8), (1, 64)])
def test_rows_of_any_width_are_sorted_and_items_keep_their_order(
    bits: int, length: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sort key holds some 50 bits of a row: half of these differ in their last bits only, or not at all."""
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    rng = np.random.default_rng(bits)
    rows = rng.integers(0, 2**bits, (300, length))
    rows[:150] = rows[rng.integers(0, 3, 150)]
    rows[:150, -1] = (rows[:150, -1] + rng.integers(0, 3, 150)) % 2**bits
    rows[0], rows[1] = 0, 2**bits - 1  # every column is as wide as can be
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows.tolist()):
        numbers.setdefault(tuple(row), []).append(number)
    index = ConstraintIndex.from_sequences(rows)
    assert list(index) == [list(row) for row in sorted(numbers)]
    assert index.items(list(index)) == [numbers[row] for row in sorted(numbers)]


def test_what_a_thread_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 3)
    with pytest.raises(ZeroDivisionError):
        pieces.in_pieces(lambda piece: 1 // (33 - piece.start), 100)


@pytest.mark.parametrize(("num_nodes", "first"), [(32_766, 9), (32_768, 1), (25_000, 15_000)])
def test_node_numbers_at_the_border_of_16_bits(num_nodes: int, first: int) -> None:
    """The first node has many children, one of the last ones several; all others have one."""
    rows = np.array([[0, child] for child in range(1, first)] + [[node, 0] for node in range(num_nodes)])
    rows = np.concatenate([rows, [[num_nodes - 2, 3], [num_nodes - 2, 4]]])
    index = ConstraintIndex.from_sequences(rows)
    assert index.items(rows) == [[number] for number in range(len(rows))]
    assert not any(index.items(rows + [0, 20_000]))
    np.testing.assert_array_equal(index.snapshot.rows(), rows[np.lexsort(rows.T[::-1])])
    kept = np.arange(len(rows)) % 7 == 0
    view = index.where(kept)
    assert view.items(rows) == [[number] if number % 7 == 0 else [] for number in range(len(rows))]
    assert view.allowed_next_tokens([]) == np.unique(rows[kept, 0]).tolist()


def test_storage_is_small() -> None:
    rows = np.array(list(product(range(30), repeat=3)))
    index = ConstraintIndex.from_sequences(rows)
    stored, offsets, numbers = 1 + 30 + 900 + 27_000 + 30, (1 + 1) + (30 + 1) + (900 + 1), 27_000
    assert index.nbytes == 2 * (stored + offsets + 1 + 2 * numbers)
    assert ConstraintIndex.from_sequences(rows + 32_767).nbytes == index.nbytes
    rows = np.arange(1000)[:, None] * [1, 0, 0, 0] + [0, 7, 8, 9]
    one, two = ConstraintIndex.from_sequences(rows), ConstraintIndex.from_sequences(rows[:, :3])
    assert one.nbytes - two.nbytes == 2 * 1000 + 2  # a level without branches: its tokens, and one shift


@pytest.mark.parametrize("least", [0, 1, 32_768, 2**31 - 2**16 - 1])
@pytest.mark.parametrize("span", [0, 32_768, 65_535, 65_536])
def test_a_level_of_large_tokens_is_as_small_as_its_span(least: int, span: int) -> None:
    column = sorted({least, least + span // 2, least + span})
    rows = [[token, 5] for token in column]
    assert trie_of(ConstraintIndex.from_sequences(rows)).tokens.dtype == (np.int16 if span < 2**16 else np.int32)
    check_against_twin(rows, None)
    check_against_twin([*rows, *([token] for token in column)], eos_token_id=9)


@pytest.mark.parametrize("num_tokens", [300, 40_000, 70_000])  # from 32,769 on, bases lie within the level
def test_codebooks_are_the_distinct_tokens_of_every_level(num_tokens: int) -> None:
    tokens = np.arange(7, 7 + num_tokens)
    rows = np.stack([np.where(tokens == 8, 7, tokens), tokens[::-1] + num_tokens], axis=1)
    for column, codes in zip(rows.T, trie_of(ConstraintIndex.from_sequences(rows)).codebooks, strict=True):
        assert np.array_equal(codes, np.unique(column))
