# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The parts of a catalogue, one by one, against plain Python: fanouts, bits, liveness, item ids, and their checks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hf_gr import ConstraintIndex
from hf_gr.catalogue import bits as bits_module
from hf_gr.catalogue import item_ids as item_ids_module
from hf_gr.catalogue import pieces
from hf_gr.catalogue.bits import clear, count, ones, pack, unpack
from hf_gr.catalogue.fanout import Fanout, spans
from hf_gr.catalogue.item_ids import ItemIds
from hf_gr.catalogue.items import Items, Liveness, dead_nodes

EOS = 2
few = settings(deadline=None, max_examples=30)  # the machine is shared: a time limit would be noise
Rows = list[list[int]]

# Fanouts

some_counts = st.lists(st.sampled_from([0, 1, 1, 1, 1, 2, 9]), min_size=1, max_size=40).filter(any)


def dense(counts: list[int]) -> Fanout:
    return Fanout.from_offsets(np.append(0, np.cumsum(counts)))


def sparse(counts: list[int]) -> Fanout:
    """The same with listed exceptions, by plain loops."""
    exceptions = [parent for parent, number in enumerate(counts) if number != 1]
    shifts = [sum(number - 1 for number in counts[:parent]) for parent in [*exceptions, len(counts)]]
    assert shifts[0] == 0
    return replace(dense(counts), offsets=np.array(shifts, np.int16), exceptions=np.array(exceptions, np.int16))


def starts(counts: list[int], draw: Callable[[int], int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of parents and children, each child and each gap some rows long."""
    rows: list[tuple[bool, bool]] = []
    for number in counts:
        rows += [(child == 0, number > 0) for child in range(max(number, 1))]
        for _ in range(draw(3)):
            rows.insert(len(rows) - draw(max(number, 1)), (False, False))
    parents, children = np.array(rows).T
    return parents, children


def check_fanout(fanout: Fanout, counts: list[int], flags: list[bool] | None = None) -> None:
    """Everything that a fanout answers, by plain loops."""
    children = [[*range(sum(counts[:parent]), sum(counts[: parent + 1]))] for parent in range(len(counts))]
    assert (fanout.num_parents, fanout.num_children) == (len(counts), sum(counts))
    assert (fanout.largest, fanout.num_childless) == (max(counts), counts.count(0))
    for dtype in (np.int16, np.int64):
        parents = np.arange(len(counts), dtype=dtype)
        first, last = fanout.ranges(parents.astype(np.int64))
        assert [[*range(*bounds)] for bounds in zip(first, last, strict=True)] == children
        found = fanout.parents(np.arange(sum(counts), dtype=dtype))
        assert found.tolist() == [parent for parent, below in enumerate(children) for _ in below]
        assert found.dtype == first.dtype == last.dtype == np.int64
    square = np.array([[0, len(counts) - 1], [len(counts) // 2, 0]])
    assert fanout.ranges(square)[1].tolist() == [[int(last[parent]) for parent in row] for row in square]
    assert fanout.childless().tolist() == [parent for parent, below in enumerate(children) if not below]
    assert fanout.first_children().tolist() == [child == 0 for below in children for child in range(len(below))]
    flags = [child % 3 == 0 for child in range(sum(counts))] if flags is None else flags
    array = np.array(flags)
    for at_once in (2, 3, 9, pieces.AT_ONCE):  # the borders of pieces are anywhere
        with patch.object(pieces, "AT_ONCE", at_once):
            assert fanout.any_child(array).tolist() == [any(flags[child] for child in below) for below in children]
    assert array.tolist() == flags
    assert (fanout.largest, fanout.num_childless) == (max(counts), counts.count(0))


@few
@given(some_counts, st.data())
@example([1], None)
@example([0, 0, 3], None)
@example([3, 0, 0], None)
@example([0, 2, 0, 2, 0], None)
@example([1] * 30, None)
@example([40], None)
@example([1, 1, 1, 9, 1, 0, 0, 1, 9, 9, 1], None)
def test_both_forms_of_a_fanout_answer_alike(counts: list[int], data: st.DataObject | None) -> None:
    size = sum(counts)
    flags = data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) if data else [False, True] * size
    check_fanout(dense(counts), counts, flags[:size])
    check_fanout(sparse(counts), counts, flags[:size])


@few
@given(some_counts, st.sampled_from([0, 700]), st.randoms(use_true_random=False))
def test_a_fanout_is_read_off_sorted_rows(counts: list[int], regular: int, random: Any) -> None:
    counts = counts + [1] * regular
    fanout = Fanout.from_starts(*starts(counts, random.randrange))
    check_fanout(fanout, counts)
    if regular:
        assert fanout.exceptions is not None
        assert fanout.exceptions.tolist() == sparse(counts).exceptions.tolist()
        assert fanout.offsets.tolist() == sparse(counts).offsets.tolist()
    elif fanout.exceptions is None:
        assert fanout.offsets.tolist() == dense(counts).offsets.tolist()


def test_exceptions_are_listed_where_they_are_few() -> None:
    for number, is_dense in ((49, False), (50, True)):
        for exception in (0, 2):
            fanout = Fanout.from_starts(*starts([exception, 1] * number + [1] * (100 - 2 * number), lambda _: 0))
            assert (fanout.exceptions is None) == is_dense


@pytest.mark.parametrize(
    ("num_parents", "first"),
    [*product([32_766, 32_767, 32_768, 40_000], [0, 1, 9, 15_000]), (100_000, 40_000)],
)
def test_fanouts_at_the_border_of_16_bits(num_parents: int, first: int) -> None:
    """The first parent has many children, the last ones are exceptions, too."""
    counts = np.ones(num_parents, dtype=np.int64)
    counts[0], counts[-3:] = first, [0, 3, 0]
    offsets = np.append(0, np.cumsum(counts))
    rows = np.repeat(np.arange(num_parents), np.maximum(counts, 1))
    parents = np.append(True, rows[1:] != rows[:-1])
    children = counts[rows] > 0
    listed = Fanout.from_starts(parents, children)
    assert listed.exceptions is not None
    flags = np.arange(offsets[-1]) % 7 == 0
    for fanout in (listed, Fanout.from_offsets(offsets)):
        assert (fanout.largest, fanout.num_childless) == (counts.max(), np.count_nonzero(counts == 0))
        np.testing.assert_array_equal(fanout.ranges(np.arange(num_parents)), [offsets[:-1], offsets[1:]])
        np.testing.assert_array_equal(
            fanout.parents(np.arange(offsets[-1])), np.repeat(np.arange(num_parents), counts)
        )
        np.testing.assert_array_equal(fanout.childless(), np.flatnonzero(counts == 0))
        of = np.bincount(np.repeat(np.arange(num_parents), counts), weights=flags, minlength=num_parents)
        np.testing.assert_array_equal(fanout.any_child(flags), of > 0)


@few
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5))))
def test_spans_are_all_numbers_of_all_ranges(ranges: list[tuple[int, int]]) -> None:
    first = np.array([start for start, _ in ranges], dtype=np.int64)
    size = np.array([size for _, size in ranges], dtype=np.int64)
    assert spans(first, first + size).tolist() == [n for start, size in ranges for n in range(start, start + size)]


# Bits


@few
@given(st.lists(st.booleans(), max_size=70), st.data())
def test_bits_are_flags(flags: list[bool], data: st.DataObject) -> None:
    bits = pack(np.array(flags, dtype=bool))
    assert bits.tolist() == [
        sum(flag << place for place, flag in enumerate(flags[start : start + 8])) for start in range(0, len(flags), 8)
    ]
    assert unpack(bits, len(flags)).tolist() == flags
    assert unpack(bits, len(flags)).dtype == np.bool_
    assume(flags)
    places = data.draw(st.lists(st.integers(0, len(flags) - 1), max_size=20))
    for dtype in (np.int16, np.int64):
        found = bits_module.test(bits, np.array(places, dtype=dtype))
        assert found.tolist() == [flags[place] for place in places]
    before = bits.tolist()
    cleared = clear(bits, np.array(places, dtype=np.int64))
    expected = [flag and place not in places for place, flag in enumerate(flags)]
    assert unpack(cleared, len(flags)).tolist() == expected
    assert bits.tolist() == before
    ranges = data.draw(st.lists(st.tuples(st.integers(0, len(flags)), st.integers(0, len(flags))), max_size=20))
    check_counts(flags, ranges)


def check_counts(flags: list[bool], ranges: list[tuple[int, int]]) -> None:
    first, last = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    found = count(pack(np.array(flags, dtype=bool)), first, last)
    assert found.tolist() == [sum(flags[start:end]) for start, end in ranges]


def test_every_range_is_counted() -> None:
    for flags in ([True] * 34, [False] * 34, [place % 3 == 0 for place in range(34)], [True] * 32):
        check_counts(flags, [(start, end) for start in range(len(flags) + 1) for end in range(len(flags) + 1)])
    check_counts([True] * 9, [])
    check_counts([True] * 9, [(3, 3), (9, 9)])


@pytest.mark.parametrize("size", [*range(1, 18), 64, 65])
def test_all_ones_set_no_bit_beyond_the_last_flag(size: int) -> None:
    np.testing.assert_array_equal(ones(size), pack(np.ones(size, dtype=bool)))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 6, 7, 20])
def test_flags_taken_in_pieces_are_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 3)
    flags = np.arange(size) % 3 == 0
    places = np.arange(size)[::-1].astype(np.int16)
    np.testing.assert_array_equal(pieces.take(flags, places), flags[places])


# What is alive

tokens = st.integers(3, 6)
fixed_rows = st.integers(1, 5).flatmap(
    lambda length: st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=1, max_size=20)
)
ragged_rows = st.lists(st.lists(tokens, min_size=1, max_size=5).map(lambda row: [*row, EOS]), min_size=1, max_size=20)
catalogues = fixed_rows | ragged_rows
# Levels without branches, and leaves above them; most nodes have one child.
NARROW = [[3 + number, 5, 5, *[5, 5] * (number % 9 > 0), EOS] for number in range(40)] + [[7, 5, 5, 5, 4, EOS]] * 2


def items_of(rows: Rows) -> Items:
    ragged = len({len(row) for row in rows}) > 1
    return ConstraintIndex.from_sequences(rows, eos_token_id=EOS if ragged else None).snapshot.items


def in_order(rows: Rows) -> Rows:
    """Rows by the position of their items: leaves are numbered level by level, and in lexicographic order."""
    return [rows[number] for number in sorted(range(len(rows)), key=lambda number: (len(rows[number]), rows[number]))]


def nodes_of(rows: Rows) -> Iterator[list[list[int]]]:
    """By level from 1: the prefix of each node."""
    for level in range(1, max(map(len, rows)) + 1):
        yield sorted(map(list, {tuple(row[:level]) for row in rows if len(row) >= level}))


def check_alive(alive: Liveness, rows: Rows, living: set[int]) -> None:
    """Every bit, by enumeration; `living` are positions."""
    ordered = in_order(rows)
    sequences = [ordered[position] for position in sorted(living)]
    levels = list(nodes_of(rows))
    assert len(alive.nodes) == len(levels)
    for level, (bits, nodes) in enumerate(zip(alive.nodes, levels, strict=True), start=1):
        expected = [any(row[:level] == node for row in sequences) for node in nodes]
        np.testing.assert_array_equal(bits, pack(np.array(expected)))
    flags = [position in living for position in range(len(rows))]
    np.testing.assert_array_equal(alive.items, pack(np.array(flags)))
    assert alive.item_flags().tolist() == flags
    assert alive.num_items == len(living)
    leaves = list(dict.fromkeys(map(tuple, ordered)))
    assert alive.leaf_flags().tolist() == [list(leaf) in sequences for leaf in leaves]


def choose(rows: Rows, data: st.DataObject) -> set[int]:
    return data.draw(st.sets(st.integers(0, len(rows) - 1)))


@few
@given(catalogues, st.data())
def test_items_are_where_the_order_of_leaves_puts_them(rows: Rows, data: st.DataObject) -> None:
    items = items_of(rows)
    assert [rows[number] for number in items.numbers] == in_order(rows)
    assert items.numbers[items.positions].tolist() == list(range(len(rows)))
    found, positions = items.find(np.array([0, -1, len(rows), len(rows) - 1, 2**40]))
    assert (found.tolist(), items.numbers[positions].tolist()) == ([0, 3], [0, len(rows) - 1])
    assert [array.tolist() for array in items.find(["0"])] == [[], []]


def check_liveness(rows: Rows, living: set[int], removed: set[int]) -> None:
    items = items_of(rows)
    flags = np.array([position in living for position in range(len(rows))])
    alive = Liveness.from_items(items, flags)
    assert [position in living for position in range(len(rows))] == flags.tolist()
    check_alive(alive, rows, living)
    check_alive(alive.without(np.array(sorted(removed), dtype=np.int64)), rows, living - removed)
    check_alive(alive, rows, living)
    check_alive(items.all_alive, rows, set(range(len(rows))))
    check_alive(
        items.all_alive.without(np.array([*removed, *removed], dtype=np.int64)), rows, {*range(len(rows))} - removed
    )


@few
@given(catalogues, st.data())
def test_a_node_is_alive_while_an_item_below_it_is(rows: Rows, data: st.DataObject) -> None:
    check_liveness(rows, choose(rows, data), choose(rows, data))


@few
@given(st.data())
def test_a_node_of_a_narrow_catalogue_is_alive_while_an_item_below_it_is(data: st.DataObject) -> None:
    check_liveness(NARROW, choose(NARROW, data), choose(NARROW, data))


def test_nothing_and_everything_alive() -> None:
    everything = set(range(len(NARROW)))
    for living in (set[int](), everything):
        for removed in (set[int](), everything):
            check_liveness(NARROW, living, removed)


def test_levels_without_branches_share_their_bits() -> None:
    rows = [[number, 5, 5, 5] for number in range(100)]
    alive = Liveness.from_items(items_of(rows), np.arange(100) % 2 == 0)
    assert len({id(bits) for bits in alive.nodes}) == 1
    assert alive.nbytes == 13 + 13


# What one request must not see


def check_dead_nodes(rows: Rows, living: set[int] | None, excluded: list[set[int]]) -> None:
    """The living nodes without an item that a row may see, by enumeration."""
    items = items_of(rows)
    alive = None
    if living is not None:
        alive = Liveness.from_items(items, np.array([position in living for position in range(len(rows))]))
    living = set(range(len(rows))) if living is None else living
    pairs = [(row, position) for row, positions in enumerate(excluded) for position in sorted(positions & living)]
    of, positions = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    found = dead_nodes(items, alive, of, positions)

    ordered = in_order(rows)
    levels = list(nodes_of(rows))
    assert len(found) == len(levels)

    def is_dead(row: int, node: list[int]) -> bool:
        below = {position for position in living if ordered[position][: len(node)] == node}
        return bool(below) and below <= excluded[row]

    for nodes, (in_rows, at) in zip(levels, found, strict=True):
        expected = [
            (row, number) for row in range(len(excluded)) for number, node in enumerate(nodes) if is_dead(row, node)
        ]
        assert sorted(zip(in_rows.tolist(), at.tolist(), strict=True)) == expected


@few
@given(catalogues, st.booleans(), st.data())
def test_hidden_are_the_living_nodes_without_visible_items(rows: Rows, filtered: bool, data: st.DataObject) -> None:
    living = choose(rows, data) if filtered else None
    check_dead_nodes(rows, living, [choose(rows, data) for _ in range(data.draw(st.integers(1, 3)))])


@few
@given(st.booleans(), st.data())
def test_hidden_are_those_of_a_narrow_catalogue(filtered: bool, data: st.DataObject) -> None:
    living = choose(NARROW, data) if filtered else None
    check_dead_nodes(NARROW, living, [choose(NARROW, data) for _ in range(3)])


def test_nothing_and_everything_hidden() -> None:
    everything = set(range(len(NARROW)))
    for living in (None, set[int](), {5}, everything):
        check_dead_nodes(NARROW, living, [set(), everything, {5}, everything - {5}])
        check_dead_nodes(NARROW, living, [set()])


# Item ids


def check_find(packed: ItemIds, ids: list[Any], queries: list[Any]) -> None:
    """Look all queries up at once, against a dictionary."""
    numbers: dict[Any, list[int]] = {}
    for number, item in enumerate(ids):
        numbers.setdefault(item, []).append(number)
    strings = isinstance(ids[0], str)
    of, found = packed.find(queries if strings else np.array(queries, dtype=np.int64))
    assert of.tolist() == [place for place, query in enumerate(queries) for _ in numbers.get(query, [])]
    assert found.tolist() == [number for query in queries for number in numbers.get(query, [])]
    assert of.dtype == found.dtype == np.int64
    everything = np.arange(len(ids))
    assert packed.take(everything) == list(packed.select(everything)) == ids
    assert len(packed) == len(ids)
    assert packed.are_strings == strings


FAR = [0, -1, 2**15 - 1, 2**15, -(2**15), -(2**15) - 1, 2**31, -(2**40), 2**63 - 1, -(2**63), 2**16 + 5, 5]


@few
@given(st.lists(st.integers(-4, 20) | st.sampled_from(FAR), min_size=1, max_size=40), st.data())
def test_integers_are_found(ids: list[int], data: st.DataObject) -> None:
    for given_ids in (ids, sorted(ids), sorted(set(ids)), ids[::-1]):
        array = item_ids_module.check_item_ids(given_ids)
        assert isinstance(array, np.ndarray)
        packed = ItemIds.pack(array)
        assert (packed.order is None) == all(a < b for a, b in zip(given_ids, given_ids[1:], strict=False))
        check_find(packed, given_ids, data.draw(st.lists(st.integers(-5, 21) | st.sampled_from(FAR))))
        check_find(packed, given_ids, given_ids)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_integers_beyond_the_stored_type_are_not_found(dtype: Any) -> None:
    held = np.iinfo(dtype)
    ids = [int(held.min), -5, 0, 5, int(held.max)]
    packed = ItemIds.pack(np.array(ids, dtype=dtype))
    wrapped = [item + step for item in ids for step in (2**16, -(2**16), 2**32, -(2**32)) if abs(item + step) < 2**63]
    check_find(packed, ids, [*ids, *wrapped, *FAR])


some_text = st.text(max_size=6) | st.sampled_from(
    ["", "a", "b", "aa", "a" * 999, "\0", "a\0", "\u5bff\u53f8", "\U0001f600"]
)


@pytest.mark.parametrize("collide", [False, True], ids=["hashes", "hashes that all collide"])
@few
@given(ids=st.lists(some_text, min_size=1, max_size=30), queries=st.lists(some_text, max_size=10))
def test_strings_are_found(collide: bool, ids: list[str], queries: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(item_ids_module, "HASH_FACTOR", np.int64(0))
            patch.setattr(item_ids_module, "HASH_BASIS", np.int64(0))
        packed = ItemIds.pack([*ids, *ids[:3]])
        assert collide <= (len(set(packed._hashes(np.arange(len(packed))).tolist())) == 1)
        check_find(packed, [*ids, *ids[:3]], [*ids, *queries, *ids[:2]])
        check_find(packed, [*ids, *ids[:3]], [])


def test_hashes_of_different_texts_differ() -> None:
    texts = [f"item-{number}" for number in range(5000)] + ["", "a", "item-"]
    assert len(set(ItemIds.pack(texts)._hashes(np.arange(len(texts))).tolist())) == len(texts)


@pytest.mark.parametrize("start", ["a", "\u5bff"])
def test_texts_of_one_long_start_are_found(start: str) -> None:
    texts = [start * length + end for length in (0, 85, 86, 255, 256, 257, 999) for end in ("", "x", "y", "xy")]
    check_find(ItemIds.pack(texts), texts, [*texts, start * 500, start * 255 + "z", start * 999 + "z"])


def test_a_long_text_is_hashed_in_few_steps() -> None:
    long = ItemIds.pack(["a" * 1_000_000, "b"])
    start = ItemIds.pack(["a" * 256 + "b" * 999_744, "a" * 256])
    assert long._hashes(np.array([0])) == start._hashes(np.array([0])) != start._hashes(np.array([1]))


def test_finding_a_few_integers_copies_nothing_of_many() -> None:
    ids = np.random.default_rng(0).permutation(1_000_000).astype(np.int32)
    packed = ItemIds.pack(ids)
    sought = np.arange(-500, 1_000_500, 1001)
    tracemalloc.start()
    try:
        of, items = packed.find(sought)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # `order` alone has 4 MB
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(of, np.flatnonzero((sought >= 0) & (sought < len(ids))))
    np.testing.assert_array_equal(ids[items], sought[of])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (5, "boosted is 5, expected a list of"),
        ([1, "b"], r"boosted\[1\]='b', expected all integers"),
        (["a", "\ud800"], r"boosted\[1\] is '\\ud800', expected Unicode without lone surrogates"),
        ([1, 2**63], "boosted has an integer beyond 64 bits"),
        (np.array([1, 2**63], dtype=np.uint64), "boosted has an integer beyond 64 bits"),
    ],
)
def test_messages_name_the_argument(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        item_ids_module.check_item_ids(ids, argument="boosted")
    with pytest.raises(ValueError, match=message):
        item_ids_module.read_item_ids(ids, 2, argument="boosted")
    with pytest.raises(ValueError, match="boosted has 1 entries, expected 2"):
        item_ids_module.read_item_ids([1], 2, argument="boosted")


def test_ids_of_another_kind_are_not_found() -> None:
    rows = [[5], [6]]
    strings = ConstraintIndex.from_sequences(rows, item_ids=["0", "1"]).snapshot.items
    integers = ConstraintIndex.from_sequences(rows, item_ids=[4, 3]).snapshot.items
    for items, ids in ((strings, np.array([0, 1])), (integers, ["4", "3"])):
        assert [array.tolist() for array in items.find(ids)] == [[], []]
