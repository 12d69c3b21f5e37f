# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of a catalogue's memory is the bytes of the arrays on the device; what is said before building holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from hf_gr import ConstraintIndex
from hf_gr.catalogue import memory_plan, size_estimates
from hf_gr.catalogue.memory_plan import Backend, MemoryPlan, plan_memory
from hf_gr.catalogue.snapshot import BatchRules, combine_rules
from hf_gr.catalogue.tables import table_shape
from hf_gr.torch import device_trie as torch_device
from hf_gr.torch import transition as torch_transition

ITEMS, LENGTH, EOS = 3000, 5, 1
EXPECTED_TOL = 0.02  # of a random catalogue of 20,000 items: some 1 / sqrt(20,000) a level


def uniform(rng: np.random.Generator) -> ConstraintIndex:
    return ConstraintIndex.from_sequences(rng.integers(2, 64, (ITEMS, LENGTH)))


def skewed(rng: np.random.Generator) -> ConstraintIndex:
    return ConstraintIndex.from_sequences(np.minimum(rng.zipf(1.3, (ITEMS, LENGTH)), 2000))


def offset(rng: np.random.Generator) -> ConstraintIndex:
    """Tokens beyond 16 bits, which are stored less a base, with ids that are texts."""
    rows = rng.integers(0, 300, (ITEMS, LENGTH)) + 70_000 + 300 * np.arange(LENGTH)
    return ConstraintIndex.from_sequences(rows, item_ids=[f"item {number}" for number in range(ITEMS)])


def ragged(rng: np.random.Generator) -> ConstraintIndex:
    rows = rng.integers(2, 64, (ITEMS, LENGTH))
    rows[np.arange(LENGTH) >= rng.integers(2, LENGTH + 1, ITEMS)[:, None]] = -1
    return ConstraintIndex.from_sequences(rows, eos_token_id=EOS)


def tiny(rng: np.random.Generator) -> ConstraintIndex:
    return ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]])


def wide(rng: np.random.Generator) -> ConstraintIndex:
    """More tokens at the root than 16 bits count."""
    return ConstraintIndex.from_sequences(np.stack([np.arange(40_000), np.arange(40_000) % 7], axis=1))


def few_large(rng: np.random.Generator) -> ConstraintIndex:
    """One node of many has 2,000 children: it alone has a row in a table."""
    large, small = np.arange(2000), np.arange(1, 9001)
    pairs = [np.stack([0 * large, large], axis=1), np.stack([small, small % 2000], axis=1)]
    rows = np.concatenate(pairs)
    index = ConstraintIndex.from_sequences(np.concatenate([rows, rows[:, 1:] % 7], axis=1))
    table = table_shape(index.snapshot.base.segment.trie, 1)
    assert table is not None
    assert table.parents is not None
    assert (table.parents.tolist(), table.rest) == ([0], 1)
    return index


KINDS = [uniform, skewed, offset, ragged, tiny, wide, few_large]


def as_it_is(index: ConstraintIndex, rng: np.random.Generator) -> BatchRules:
    return combine_rules([index.snapshot])


def a_view(index: ConstraintIndex, rng: np.random.Generator) -> BatchRules:
    return combine_rules([index.where(rng.random(index.num_items) < 0.5).snapshot])


def several_views(index: ConstraintIndex, rng: np.random.Generator) -> BatchRules:
    views = [index.where(rng.random(index.num_items) < share) for share in (0.2, 0.7)]
    return combine_rules([views[0].snapshot, index.snapshot, views[1].snapshot, views[0].snapshot])


def exclusions(index: ConstraintIndex, rng: np.random.Generator) -> BatchRules:
    return combine_rules([index.snapshot], [some_ids(index, rng, 1), some_ids(index, rng, 40), []])


def removed_and_added(index: ConstraintIndex, rng: np.random.Generator) -> BatchRules:
    index.remove(some_ids(index, rng, min(20, index.num_items // 2)))
    rows = [[*index.encode(some_ids(index, rng, 1))[:-1], 3] for _ in range(50)]
    index.add(rows, [f"new {i}" if index.snapshot.are_strings else 10**6 + i for i in range(50)])
    return combine_rules([index.snapshot], [some_ids(index, rng, 3), []])


def some_ids(index: ConstraintIndex, rng: np.random.Generator, number: int) -> list[Any]:
    return [index.item_ids[place] for place in rng.choice(index.num_items, min(number, index.num_items), False)]


BATCHES = [as_it_is, a_view, several_views, exclusions, removed_and_added]


def bytes_of(found: Any, seen: set[int]) -> int:
    """Bytes of all tensors of an object that were not counted yet; views of one array are one array."""
    if isinstance(found, torch.Tensor):
        place = found.untyped_storage().data_ptr()
        is_new = place not in seen and bool(found.numel())
        seen.add(place)
        return found.untyped_storage().nbytes() if is_new else 0
    if isinstance(found, (list, tuple)):
        return sum(bytes_of(part, seen) for part in found)
    if is_dataclass(found):
        return sum(bytes_of(getattr(found, field.name), seen) for field in fields(found))
    return 0


def check_torch(rules: BatchRules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the tensors of a batch, and those made for it that are kept: bits of each rule."""
    moved: list[Any] = []
    of_batch: list[Any] = []
    to_device = torch_device.to_device

    def copied(into: list[Any]) -> Callable[[Any, torch.device], torch.Tensor]:
        def copy(numbers: Any, device: torch.device) -> torch.Tensor:
            into.append(to_device(numbers, device).clone())  # as on a GPU: nothing is shared with the host
            return into[-1]

        return copy

    monkeypatch.setattr(torch_device, "to_device", copied(moved))
    monkeypatch.setattr(torch_transition, "to_device", copied(of_batch))
    device = torch.device("cpu")
    catalogue = torch_transition.device_catalogue(rules, device)
    lives = [snapshot.base.alive or snapshot.base.segment.all_alive for snapshot in rules.snapshots]
    if any(snapshot.base.alive is not None for snapshot in rules.snapshots):  # tables serve rules that are used again
        of_batch.clear()
        catalogue = torch_transition.device_catalogue(rules, device)
    plan = plan_memory(rules)
    trie = catalogue.base.trie
    kept = [torch_device._LIVING.get(live, {}).get(device) for live in lives]
    spread = [bits.spread for bits in catalogue.base.living or () if bits is not None][:1]
    tries = [part.trie for part in (catalogue.base, catalogue.added) if part is not None]
    made = [(trie.constants, trie.root) for trie in tries]
    assert plan.nbytes == bytes_of([catalogue, moved, of_batch, made, kept], set())
    trie = catalogue.base.trie
    assert plan.tokens == trie.tokens.nbytes
    assert plan.offsets == bytes_of([trie.offsets, trie.exceptions], set())
    assert plan.tables == bytes_of([catalogue.base.wide, spread, made[0]], set())
    assert plan.edges == trie.edges.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_plan_is_what_is_on_the_device(
    kind: Callable[..., ConstraintIndex], batch: Callable[..., BatchRules], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    check_torch(batch(kind(rng), rng), monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("parents", [memory_plan.PARENTS, 8])
def test_the_plan_in_flax_is_what_is_on_the_device(
    kind: Callable[..., ConstraintIndex],
    batch: Callable[..., BatchRules],
    parents: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jax = pytest.importorskip("jax")
    from hf_gr.flax import device_trie, transition

    for module in (memory_plan, device_trie):
        monkeypatch.setattr(module, "PARENTS", parents)
    rng = np.random.default_rng(0)
    rules = batch(kind(rng), rng)
    num_rows = rules.num_rows or 3
    catalogue = transition.device_catalogue(rules, num_rows=num_rows)
    plan = plan_memory(rules, backend="flax", num_rows=num_rows)
    trie, added = catalogue.base.trie, catalogue.added

    def nbytes(tree: Any, *, as_arguments: bool = False) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(leaf.nbytes for leaf in (leaves if as_arguments else {id(leaf): leaf for leaf in leaves}.values()))

    assert plan.tokens == trie.tokens.nbytes
    assert plan.offsets == nbytes((trie.offsets, trie.exceptions, trie.token_bases, trie.level_starts))
    assert plan.rules == nbytes(catalogue.base.alive)
    assert plan.additions == nbytes((added.trie, added.tokens))
    # A program takes an array for each argument, even where the host has one for several.
    assert plan.requests == nbytes((catalogue.base.hidden, added.hidden, catalogue.rule_of_row), as_arguments=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["torch", "flax"])
def test_each_further_view_takes_what_is_said(kind: Callable[..., ConstraintIndex], backend: Backend) -> None:
    rng = np.random.default_rng(0)
    index = kind(rng)
    plan, view = index.memory_plan(backend), index.where(rng.random(index.num_items) < 0.6).memory_plan(backend)
    assert view.rules == plan.each_view


def test_the_plan_of_an_index_is_that_of_a_batch() -> None:
    index = uniform(np.random.default_rng(0))
    assert index.memory_plan() == plan_memory(as_it_is(index, np.random.default_rng(0)))
    few = tiny(np.random.default_rng(0))
    assert few.memory_plan(exclude_items=[[0], [2], []]).requests == 8 * 3 * (1 + 1), "6 and its 7 go, and the first 7"
    with pytest.raises(ValueError, match="backend='jax', expected 'torch' or 'flax'"):
        index.memory_plan("jax")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", KINDS)
def test_no_catalogue_takes_more_than_the_bound(kind: Callable[..., ConstraintIndex]) -> None:
    index = kind(np.random.default_rng(0))
    bound = size_estimates.at_most(index.num_items, index.max_length, index.max_token_id + 1)
    plan = index.memory_plan()
    assert plan.nbytes - plan.tables <= bound.torch
    assert plan.tables <= bound.tables
    assert plan.each_view <= bound.each_view
    plan = index.memory_plan("flax")
    assert plan.tokens + plan.offsets + plan.rules <= bound.flax
    arrays = index.snapshot.base.segment.arrays()
    assert sum(array.nbytes for name, array in arrays.items() if not name.startswith("item_ids.")) <= bound.host


@pytest.mark.parametrize(
    ("num_items", "num_levels", "vocab_size"), [(20_000, 5, 256), (20_000, 8, 40), (20_000, 3, 16), (50_000, 2, 2048)]
)
def test_a_random_catalogue_takes_what_is_expected(num_items: int, num_levels: int, vocab_size: int) -> None:
    rows = np.random.default_rng(0).integers(0, vocab_size, (num_items, num_levels))
    index = ConstraintIndex.from_sequences(rows)
    expected = size_estimates.expected(num_items, num_levels, vocab_size)
    plan = index.memory_plan("flax")
    assert expected.nodes == pytest.approx(index.snapshot.base.segment.trie.level_starts[-1], rel=EXPECTED_TOL)
    assert expected.host == pytest.approx(index.nbytes, rel=EXPECTED_TOL)
    in_torch = index.memory_plan()
    assert expected.torch == pytest.approx(in_torch.nbytes - in_torch.tables, rel=EXPECTED_TOL)
    assert expected.tables == pytest.approx(in_torch.tables, rel=EXPECTED_TOL)
    assert expected.flax == pytest.approx(plan.tokens + plan.offsets + plan.rules, rel=1 / 8)  # sizes of buckets
    assert expected.each_view == pytest.approx(index.memory_plan().each_view, rel=EXPECTED_TOL)


def test_the_papers_model_gives_the_papers_figures() -> None:
    """Appendix B: 17 MB for the dense levels, 1.44 GB for the others, some 90 MB for a million items."""
    assert size_estimates.static_model(20_000_000, 8, 2048) == 17_301_504 + 6 * 20_000_000 * 12
    assert size_estimates.static_model(10**6, 8, 2048) == pytest.approx(90e6, rel=0.01)
    assert size_estimates.static_model(100, 3, 4) == round(4.125 * 16) + 12 * 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 8, 8), "num_items=0"),
        ((8, 0, 8), "num_levels=0"),
        ((8, 8, 0), "vocab_size=0"),
        ((8, 10**8, 8), "10000000"),
    ],
)
def test_sizes_that_are_none_are_refused(arguments: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        size_estimates.expected(*arguments)


def test_a_wrong_plan_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rules: BatchRules) -> MemoryPlan:
        plan = memory_plan.plan_memory(rules)
        return replace(plan, offsets=plan.offsets + 2)

    rng = np.random.default_rng(0)
    rules = as_it_is(uniform(rng), rng)
    monkeypatch.setitem(globals(), "plan_memory", wrong)
    with pytest.raises(AssertionError):
        check_torch(rules, monkeypatch)
