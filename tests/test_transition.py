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

from hf_gr import ConstraintIndex
from hf_gr.catalogue import tables
from hf_gr.catalogue.fanout import Fanout
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch import device_trie, transition
from hf_gr.torch.children import (
    Children,
    ChildrenInColumns,
    JoinedChildren,
    OnlyChildren,
    PlainChildren,
    RootChildren,
    UncheckedChildren,
    WideChildren,
)
from hf_gr.torch.device_trie import DeviceTrie

pytestmark = pytest.mark.shapes

CPU = torch.device("cpu")
rows = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=30)
# Most nodes have one child, some have several or, their end token aside, none: exceptions are listed.
SPARSE = [[1 + number // 6, 1 + number % 6, *[2, 3, 4] * (number % 9 > 0)] for number in range(36)] + [[1, 2, 2, 5]]


def catalogue_of(index: ConstraintIndex) -> transition.DeviceCatalogue:
    return transition.device_catalogue(combine_rules([index.snapshot]), CPU)


def states_of(below: Children) -> torch.Tensor:
    """The state of every child of every beam."""
    shape = below.tokens.shape
    beams = torch.arange(shape[1])[None, :, None].expand(shape).flatten(1)
    children = torch.arange(shape[2]).expand(shape).flatten(1)
    return below.take(beams, children)[1].view(shape)


def check(sequences: list[list[int]]) -> None:
    """Walk every prefix of a catalogue and compare children, masks, leaves and single steps with the dictionary's."""
    index = ConstraintIndex.from_sequences(sequences, eos_token_id=0)
    reference = ReferenceTrie.from_sequences(sequences, eos_token_id=0)
    trie = catalogue_of(index)
    level_prefixes: list[tuple[int, ...]] = [()]
    states = torch.zeros((1, 1), dtype=torch.long)
    for level in range(trie.max_length):
        below = transition.children(states, trie, level=level)
        found = states_of(below)
        masked = transition.mask_illegal(torch.zeros((*states.shape, 8)), below)
        next_prefixes, next_states = [], []
        for position, prefix in enumerate(level_prefixes):
            legal = below.legal[0, position]
            tokens = below.tokens[0, position][legal].tolist()
            assert tokens == reference.allowed(prefix)
            assert masked[0, position].isfinite().nonzero()[:, 0].tolist() == tokens
            assert bool(transition.is_leaf(states[:, position, None], trie, level=level)) == (not tokens)
            for token in range(8):
                step = transition.advance(states[:, position, None], torch.tensor([[token]]), trie, level=level)
                if token in tokens:
                    assert int(step) == int(found[0, position][legal][tokens.index(token)])
                else:
                    assert int(step) == (int(states[0, position]) if not tokens else trie.dead_state)
            next_prefixes += [(*prefix, token) for token in tokens]
            next_states += found[0, position][legal].tolist()
        level_prefixes, states = next_prefixes, torch.tensor([next_states])
    assert bool(transition.is_leaf(states, trie, level=trie.max_length).all())


@settings(max_examples=25, deadline=None)
@given(rows)
@example(SPARSE)
def test_steps_equal_the_dictionary(sequences: list[list[int]]) -> None:
    check(sequences)


def make_all_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "WIDE_FROM", 1)
    monkeypatch.setattr(tables, "WIDE_SHARE", 100)


def make_some_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with three children or more have rows in tables, the others have not."""
    monkeypatch.setattr(tables, "is_wide", lambda *_: False)
    monkeypatch.setattr(tables, "WIDE_FROM", 2)
    monkeypatch.setattr(tables, "TABLE_CALLS", 0)
    monkeypatch.setattr(tables, "TOKENS_A_CHILD", 1e9)


# Nodes with three children and with fewer on every level but the last.
ALL_LARGE = [[a, b, c] for a in (1, 2, 4) for b in range(1, a + 1) for c in range(1, b + 1)]


def random_catalogues() -> list[list[list[int]]]:
    rng = np.random.default_rng(0)
    return [[rng.integers(1, 7, rng.integers(1, 5)).tolist() for _ in range(rng.integers(1, 40))] for _ in range(20)]


@pytest.mark.parametrize("make", [make_all_wide, make_some_wide])
@pytest.mark.parametrize("at_once", [1, 7, 2**20])  # tables are made in pieces of one node, of some, and at once
def test_wide_levels_equal_the_dictionary(at_once: int, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make(monkeypatch)
    monkeypatch.setattr(device_trie, "CHILDREN_AT_ONCE", at_once)
    for sequences in [*random_catalogues(), SPARSE]:
        check(sequences)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        *((field, make_all_wide) for field in ("penalties", "ranks", "first")),
        *((field, make_some_wide) for field in ("penalties", "ranks", "first", "parents", "rest")),
    ],
)
def test_a_planted_error_in_a_wide_level_is_seen(field: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make(monkeypatch)
    right = device_trie._wide_level

    def spoiled(*args: Any) -> Any:
        level = right(*args)
        if level.parents is None and field in ("parents", "rest"):
            return level
        value = level.penalties.roll(1, -1) if field == "penalties" else getattr(level, field) + 1
        value = level.rest - 1 if field == "rest" else value
        return replace(level, **{field: value})

    monkeypatch.setattr(device_trie, "_wide_level", spoiled)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check(ALL_LARGE)


def test_only_levels_with_many_children_are_wide() -> None:
    rng = np.random.default_rng(0)
    index = ConstraintIndex.from_sequences(rng.integers(0, 64, (3000, 3)))
    assert [level is not None for level in catalogue_of(index).base.wide or ()] == [True, True, False]
    assert catalogue_of(index.where([0, 1])).base.wide is None


def some_rules(num_rules: int, *, excludes: bool) -> Any:
    """Rules and exclusions, which end in whole dead branches, over a catalogue with two wide levels."""
    rows = np.random.default_rng(0).integers(0, 64, (3000, 3)) + [0, 64, 30_000]
    index, items = ConstraintIndex.from_sequences(rows), np.arange(3000)
    views = [index.where((items % 3 != rule) & (items > 1000 * rule)) for rule in range(num_rules)] or [index]
    in_branches = [items[rows[:, 0] < 3], items[(rows[:, :2] == rows[5, :2]).all(1)]]
    return combine_rules([view.snapshot for view in views], in_branches if excludes else None)


def children_by_beam(catalogue: transition.DeviceCatalogue, states: torch.Tensor, level: int) -> list[list[tuple]]:
    """The tokens and states of living children, also by their cumulative scores, whatever their order."""
    below = transition.children(states, catalogue, level=level)
    found = states_of(below)
    scores = below.summed(torch.ones(below.tokens.shape), torch.zeros(states.shape), torch.tensor(-torch.inf))
    lists = zip(below.tokens.flatten(0, 1), found.flatten(0, 1), below.legal.flatten(0, 1), strict=True)
    by_beam = [sorted(zip(tokens[legal].tolist(), to[legal].tolist(), strict=True)) for tokens, to, legal in lists]
    start, end = catalogue.base.trie.level_starts[level : level + 2]
    is_node = (states >= start) & (states < end)
    assert torch.equal((scores == 1)[is_node], below.legal[is_node])
    assert torch.equal((scores == -torch.inf)[is_node], ~below.legal[is_node])
    return by_beam


def same_on_wide_levels(num_rules: int, *, excludes: bool, kind: type[Children] = WideChildren) -> bool:
    """Whether rules and exclusions leave the same on wide levels as on others, from every state."""
    rules = some_rules(num_rules, excludes=excludes)
    narrow = transition.device_catalogue(rules, CPU)
    if num_rules:
        assert narrow.base.wide is None  # a table would not pay for a rule that is used once
    else:
        narrow = replace(narrow, base=replace(narrow.base, wide=None))
    wide = transition.device_catalogue(rules, CPU)
    assert [level is not None for level in wide.base.wide or ()] == [True, True, False]
    assert (wide.base.living is not None) == bool(num_rules)
    starts = wide.base.trie.level_starts
    for level in range(2):
        states = torch.arange(starts[level] - 1, starts[level + 1] + 1).expand(2, -1)
        below = transition.children(states, wide, level=level)
        of_root = WideChildren if num_rules or excludes else RootChildren
        assert isinstance(below, kind if level else of_root)
        if children_by_beam(wide, states, level) != children_by_beam(narrow, states, level):
            return False
    return True


@pytest.mark.parametrize("excludes", [False, True])
@pytest.mark.parametrize("num_rules", [0, 1, 2])
def test_rules_and_exclusions_hold_on_wide_levels(num_rules: int, excludes: bool) -> None:
    assert same_on_wide_levels(num_rules, excludes=excludes)


def test_a_root_whose_span_is_too_large_has_a_whole_table() -> None:
    """Its only node is large: nothing is left for windows."""
    first = np.arange(5, 1505, 7)[:200]
    rows = np.stack([first, first % 50, first % 3], axis=1)
    index, items = ConstraintIndex.from_sequences(rows), np.arange(200)
    view = index.where(items % 2 == 0)
    rules = combine_rules([view.snapshot], [[0, 20, 22]])
    transition.device_catalogue(rules, CPU)
    catalogue = transition.device_catalogue(rules, CPU)
    below = transition.children(torch.zeros((1, 1), dtype=torch.long), catalogue, level=0)
    assert (
        sorted(below.tokens[below.legal].tolist())
        == first[[at for at in range(0, 200, 2) if at not in (0, 20, 22)]].tolist()
    )


@pytest.mark.parametrize(("num_short", "large"), [(0, [32_768]), (25_000, [40_000, 3000])])
def test_a_node_with_more_children_than_16_bits_count_is_large(num_short: int, large: list[int]) -> None:
    """Shifts between exceptions are stored in 16 bits, of both signs: childless nodes come first."""
    sizes = np.array([*large, *[1] * 150_000])
    first = 1 + num_short + np.repeat(np.arange(len(sizes)), sizes)
    last = 1 + np.concatenate([*map(np.arange, large), np.arange(150_000) % 32_000])
    rows = [[1 + number] for number in range(num_short)]
    rows += np.stack([first, np.ones_like(first), last], axis=1).tolist()
    catalogue = catalogue_of(ConstraintIndex.from_sequences(rows, eos_token_id=0 if num_short else None))
    trie = catalogue.base.trie
    start, table = trie.level_starts[2], trie.tables[2]
    assert trie.offsets[2].dtype is torch.int16
    assert table is not None
    assert table.parents is not None
    assert table.parents.tolist() == [num_short + number for number in range(len(large))]
    below = transition.children(start + num_short + torch.arange(len(large) + 1)[None], catalogue, level=2)
    assert below.legal.sum(-1).tolist() == [[*large, 1]]


def make_large_nodes_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `some_rules`, about half of the nodes of level 1."""
    monkeypatch.setattr(tables, "is_wide", lambda *_: False)
    monkeypatch.setattr(tables, "TABLE_CALLS", 0)
    monkeypatch.setattr(tables, "TOKENS_A_CHILD", 1e9)


@pytest.mark.parametrize("excludes", [False, True])
@pytest.mark.parametrize("num_rules", [0, 1, 2])
def test_rules_and_exclusions_hold_where_some_nodes_are_wide(
    num_rules: int, excludes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large_nodes_wide(monkeypatch)
    assert same_on_wide_levels(num_rules, excludes=excludes, kind=JoinedChildren)


@pytest.mark.parametrize("num_rules", [0, 2])
def test_more_exclusions_than_a_table_is_wide_hold_without_it(num_rules: int) -> None:
    rows = np.random.default_rng(0).integers(0, 64, (3000, 3))
    index, items = ConstraintIndex.from_sequences(rows), np.arange(3000)
    views = [index.where(items % 3 != rule) for rule in range(num_rules)] or [index]
    bought = [items[::2], items[1::2]]
    for excluded, kind in ((bought, PlainChildren), ([few[:100] for few in bought], WideChildren)):
        rules = combine_rules([view.snapshot for view in views], excluded)
        transition.device_catalogue(rules, CPU)  # a rule's second use makes its bits
        catalogue = transition.device_catalogue(rules, CPU)
        assert catalogue.base.wide is not None
        states = torch.arange(1, 65).expand(2, -1)
        below = transition.children(states, catalogue, level=1)
        assert isinstance(below, kind)
        bare = replace(catalogue, base=replace(catalogue.base, wide=None))
        assert children_by_beam(catalogue, states, 1) == children_by_beam(bare, states, 1)
        for row, beam in ((0, 3), (1, 60)):
            left = ~np.isin(items, excluded[row]) & (items % 3 != (row if num_rules else -1))
            known = set(rows[left & (rows[:, 0] == beam), 1].tolist())
            assert set(below.tokens[row, beam][below.legal[row, beam]].tolist()) == known


@pytest.mark.parametrize("kind", [WideChildren, JoinedChildren])
@pytest.mark.parametrize("spoiled", ["living", "rule", "hidden"])
def test_planted_errors_of_rules_on_wide_levels_are_seen(
    spoiled: str, kind: type[Children], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is JoinedChildren:
        make_large_nodes_wide(monkeypatch)
    right = transition._wide_children
    if spoiled == "living":
        right_bits = device_trie._living
        monkeypatch.setattr(device_trie, "_living", lambda *args: right_bits(*args) | 16)
    else:
        change = {
            "rule": lambda below: {"living": (below.living[0], below.nodes)},
            "hidden": lambda _: {"hidden": None},
        }
        monkeypatch.setattr(
            transition, "_wide_children", lambda *args: replace(found := right(*args), **change[spoiled](found))
        )
    assert not same_on_wide_levels(2, excludes=True, kind=kind)


def test_steps_from_listed_exceptions_and_from_large_tokens_equal_the_dictionary() -> None:
    trie = catalogue_of(ConstraintIndex.from_sequences(SPARSE, eos_token_id=0)).base.trie
    assert [exceptions is None for exceptions in trie.exceptions[:2]] == [True, True]
    assert all(exceptions is not None for exceptions in trie.exceptions[2:])
    index = ConstraintIndex.from_sequences(np.array(SPARSE[1:9]) + 2**31 - 7)
    below = transition.children(torch.zeros((1, 1), dtype=torch.long), catalogue_of(index), level=0)
    assert index.snapshot.trie.tokens.dtype == np.int16
    assert below.tokens[0, 0].tolist() == index.allowed_next_tokens([])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 1, 1, 1, 2, 5]), min_size=1, max_size=40).filter(any))
def test_both_forms_of_a_fanout_give_the_same_children(counts: list[int]) -> None:
    dense = Fanout.from_offsets(np.append(0, np.cumsum(counts)))
    listed = np.flatnonzero(np.array(counts) != 1)
    shifts = np.append(0, np.cumsum(np.array(counts)[listed] - 1))
    sparse = replace(dense, offsets=shifts.astype(np.int16), exceptions=listed.astype(np.int16))
    nodes = torch.arange(-2, 1 + len(counts) + sum(counts) + 3)[None]
    found = []
    for fanout in (dense, sparse):
        trie = DeviceTrie(
            tokens=torch.zeros(1 + len(counts) + sum(counts), dtype=torch.int16),
            offsets=(torch.zeros(2, dtype=torch.int16), torch.from_numpy(fanout.offsets)),
            exceptions=(None, None if fanout.exceptions is None else torch.from_numpy(fanout.exceptions)),
            token_bases=(0, 0),
            level_starts=(0, 1, 1 + len(counts), 1 + len(counts) + sum(counts)),
            branching=(len(counts), fanout.largest),
            has_leaves=(0 in counts, True),
        )
        found.append([side[0].tolist() for side in trie.child_range(nodes, level=1)])
    start, end = 1 + len(counts), 1 + len(counts) + sum(counts)
    for first, number in found:
        assert first[3 : start + 2] == [start + sum(counts[:parent]) for parent in range(len(counts))]
        assert number == [0, 0, 0, *counts, *[0] * (sum(counts) + 3)]
        assert all(start <= node <= end for node in first)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([1, 2, 30_000, 40_000, 100_000, 100_001, 165_534]), min_size=1, max_size=4),
        min_size=1,
        max_size=30,
    )
)
@example([[5, 1, 100_000], [5, 2, 100_000], [5, 3, 165_535], [6, 1, 100_000]])
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


@pytest.mark.parametrize(
    ("home", "name", "spoil"),
    [
        (DeviceTrie, "child_bounds", lambda bounds: bounds + torch.tensor([0, 1])),
        (DeviceTrie, "child_bounds", lambda bounds: torch.minimum(bounds, bounds[..., :1] + 1)),
        (DeviceTrie, "child_bounds", lambda bounds: bounds + 1),
        (transition, "is_leaf", lambda leaf: ~leaf),
        (transition, "is_leaf", torch.zeros_like),
    ],
)
def test_a_planted_error_is_seen(home: Any, name: str, spoil, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(home, name)
    monkeypatch.setattr(home, name, lambda *args, **kwargs: spoil(right(*args, **kwargs)))
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check([[1, 2], [1, 3, 4], [2]])


def test_the_dead_state_has_no_children() -> None:
    trie = catalogue_of(ConstraintIndex.from_sequences([[5, 7], [6, 7]]))
    for level in (0, 1):
        for state in (-1, trie.dead_state, trie.dead_state + 1, *(range(3, 5) if level else range(1, 5))):
            assert not transition.children(torch.tensor([[state]]), trie, level=level).legal.any()


def test_the_dead_state_and_leaves_of_upper_levels_count_as_leaves() -> None:
    trie = catalogue_of(ConstraintIndex.from_sequences([[5], [6, 7], [6, 8, 9]], eos_token_id=0))
    for level in range(trie.max_length + 1):
        assert transition.is_leaf(torch.tensor([[trie.dead_state]]), trie, level=level).all()
    first_end = states_of(transition.children(torch.tensor([[1]]), trie, level=1))[..., 0]
    assert transition.children(torch.tensor([[1]]), trie, level=1).tokens[0, 0, 0] == 0
    for level in range(2, trie.max_length + 1):
        assert transition.is_leaf(first_end, trie, level=level).all()


def test_a_trie_is_moved_once() -> None:
    index = ConstraintIndex.from_sequences([[5, 7], [6, 7]])
    assert catalogue_of(index).base.trie is catalogue_of(index).base.trie
    assert catalogue_of(index.where([True, False])).base.trie is catalogue_of(index).base.trie
    other = ConstraintIndex.from_sequences([[5, 7], [6, 7]])
    assert catalogue_of(other).base.trie is not catalogue_of(index).base.trie


def test_the_bits_of_a_rule_are_moved_once() -> None:
    view = ConstraintIndex.from_sequences([[5, 7], [6, 7]]).where([True, False])
    ours, theirs = catalogue_of(view).base.alive, catalogue_of(view).base.alive
    assert ours is not None
    assert theirs is not None
    assert ours[1] is theirs[1] is None  # every prefix of one token has one child, which is alive where the prefix is
    assert isinstance(ours[0], torch.Tensor)
    assert isinstance(theirs[0], torch.Tensor)
    assert ours[0].data_ptr() == theirs[0].data_ptr()


def test_a_step_compiles_into_one_graph() -> None:
    index = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(0, 9, size=(50, 3)))
    trie = catalogue_of(index)
    states = torch.arange(1, 7)[None]
    compiled = torch.compile(transition.children, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(states, trie, level=1), transition.children(states, trie, level=1)
    for name in ("tokens", "states", "legal"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))


KINDS = [PlainChildren, OnlyChildren, WideChildren, JoinedChildren, UncheckedChildren]


def catalogue_with(kind: type[Children], monkeypatch: pytest.MonkeyPatch) -> transition.DeviceCatalogue:
    """A catalogue whose levels 0 and 1 have children of a kind."""
    if kind is WideChildren:
        make_all_wide(monkeypatch)
    if kind is JoinedChildren:
        make_some_wide(monkeypatch)
    rows = np.random.default_rng(0).integers(0, 9, size=(50, 3))
    if kind is OnlyChildren:
        rows = rows[np.unique(rows[:, 0], return_index=True)[1]]
    catalogue = catalogue_of(ConstraintIndex.from_sequences(rows))
    return replace(catalogue, unchecked=(torch.arange(9),) * 2) if kind is UncheckedChildren else catalogue


def take_all(below: Children) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and states of all children of a row."""
    _, num_beams, num_children = below.tokens.shape
    beams = torch.arange(num_beams).repeat_interleave(num_children)[None]
    return below.take(beams, torch.arange(num_children).repeat(num_beams)[None])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_children_compiles_into_one_graph(kind: type[Children], monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = catalogue_with(kind, monkeypatch)

    def step(states: torch.Tensor) -> tuple[Children, tuple[torch.Tensor, torch.Tensor]]:
        below = transition.children(states, catalogue, level=1)
        return below, take_all(below)

    states = torch.arange(1, 7)[None]
    below, taken = step(states)
    assert type(below) is kind
    compiled, compiled_taken = torch.compile(step, fullgraph=True, backend="aot_eager")(states)
    ours, theirs = (compiled.tokens, compiled.legal, *compiled_taken), (below.tokens, below.legal, *taken)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_children_in_columns_are_scored_there_and_are_the_same_children(
    kind: type[Children], monkeypatch: pytest.MonkeyPatch
) -> None:
    below = transition.children(torch.arange(1, 7)[None], catalogue_with(kind, monkeypatch), level=1)
    in_columns = ChildrenInColumns(9 - below.tokens, below.legal, by_token=below)
    scores = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(in_columns.scores(scores), below.scores(scores.flip(-1)))
    assert torch.equal(in_columns.scores(scores[2:4], slice(2, 4)), in_columns.scores(scores)[2:4])
    assert all(map(torch.equal, take_all(in_columns), take_all(below)))
    assert torch.equal(take_all(below)[0][below.legal.flatten(1)], below.tokens[below.legal])


def test_unchecked_children_lead_where_their_tokens_do() -> None:
    sequences = [[1, 2], [1, 3], [2, 3]]
    checked = catalogue_of(ConstraintIndex.from_sequences(sequences))
    catalogue = replace(checked, unchecked=(torch.arange(4),) * 2)
    states = torch.zeros((1, 1), dtype=torch.long)
    for level in range(2):
        below = transition.children(states, catalogue, level=level)
        tokens, found = take_all(below)
        assert below.legal.all()
        assert tokens.tolist() == [[0, 1, 2, 3] * states.shape[1]]
        above = states.repeat_interleave(4, dim=1)
        assert torch.equal(found, transition.advance(above, tokens, checked, level=level))
        states = found
    prefixes = [[first, second] for first in range(4) for second in range(4)]
    assert (states[0] != checked.dead_state).tolist() == [prefix in sequences for prefix in prefixes]
