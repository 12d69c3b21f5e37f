# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The tree of prefixes against a plain list of all sequences, and what it forgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gr.answering import prefixes
from hf_gr.answering.prefixes import PrefixTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def make_tree(capacity: int = 10**6) -> PrefixTree[tuple[int, ...]]:
    """Parts are the tokens themselves."""
    return PrefixTree(capacity=capacity, size=len, cut=lambda part, start, stop: part[start:stop])


def add(tree: PrefixTree[tuple[int, ...]], tokens: list[int]) -> None:
    tree.add(tokens, lambda start: tuple(tokens[start:]))


def num_common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(first), len(second)))


@given(SEQUENCES, SEQUENCES)
def test_what_is_found_is_the_longest_common_prefix(kept: list[list[int]], asked: list[list[int]]) -> None:
    tree = make_tree()
    for number, tokens in enumerate(kept, start=1):
        add(tree, tokens)
        # Every prefix is kept once.
        assert tree.size == len({tuple(one[: at + 1]) for one in kept[:number] for at in range(len(one))})
    for tokens in asked + kept:
        expected = max(num_common(tokens, one) for one in kept)
        assert tree.num_known(tokens) == expected
        length, parts = tree.find(tokens)
        assert length == expected
        assert [token for part in parts for token in part][:length] == tokens[:expected]


@given(SEQUENCES, st.integers(1, 12))
def test_the_capacity_holds_and_what_remains_is_right(kept: list[list[int]], capacity: int) -> None:
    tree = make_tree(capacity)
    for number, tokens in enumerate(kept, start=1):
        add(tree, tokens)
        assert tree.size <= capacity
        if len(tokens) <= capacity:
            assert tree.num_known(tokens) == len(tokens)
        length, parts = tree.find(kept[number // 2])
        assert [token for part in parts for token in part][:length] == kept[number // 2][:length]
    tree.clear()
    assert (tree.size, len(tree)) == (0, 0)
    assert not tree.num_known(kept[0])


def test_the_least_recently_used_goes_first_and_never_what_others_begin_with() -> None:
    tree = make_tree(10)
    for tokens in ([1, 1, 2, 2, 2], [1, 1, 3, 3, 3]):
        add(tree, tokens)
    tree.find([1, 1, 2, 2, 2])
    add(tree, [1, 1, 4, 4, 4])
    assert [tree.num_known([1, 1, token, token, token]) for token in (2, 3, 4)] == [5, 2, 5]
    assert tree.size == 8


def test_asking_how_much_is_known_is_no_use() -> None:
    tree = make_tree(4)
    add(tree, [1, 1])
    add(tree, [2, 2])
    assert tree.num_known([1, 1]) == 2
    add(tree, [3, 3])
    assert [tree.num_known([token, token]) for token in (1, 2, 3)] == [0, 2, 2]


def test_what_is_larger_than_all_room_forgets_nothing() -> None:
    tree = make_tree(4)
    add(tree, [1, 1])
    add(tree, [1, 2, 2, 2, 2, 2])
    assert tree.num_known([1, 2]) == 1
    assert tree.num_known([1, 1]) == 2


def test_a_wrong_length_of_what_is_common_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_num_common", lambda edge, tokens, start: len(edge))
    tree = make_tree()
    add(tree, [1, 2])
    assert tree.num_known([1, 3]) != num_common([1, 3], [1, 2])
