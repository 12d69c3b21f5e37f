# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules and live updates: what is generated equals what an index built anew from the living items would give."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import EOS, PAD, prompts, shared
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor, enable

SCORE_TOL = 1e-5  # the same additions in the same order
NUM_BEAMS = 6
Pair = tuple[tuple[int, ...], int]


class Catalogue:
    """The slow twin: a list of pairs, from which every index is built anew."""

    def __init__(self, seed: int, *, ragged: bool, num_items: int = 60, width: int = 4) -> None:
        self.random = random.Random(seed)
        self.ragged, self.width = ragged, width
        self.next_id = num_items
        self.pairs: dict[Pair, None] = dict.fromkeys((self.sequence(), item) for item in range(num_items))
        self.index = self.build(self.pairs)

    def sequence(self) -> tuple[int, ...]:
        """Few tokens, so that sequences share prefixes, and some are equal."""
        length = self.random.randint(1, self.width) if self.ragged else self.width
        return tuple(self.random.choice((5, 6, 7, 8, 40)) for _ in range(length))

    def build(self, pairs: Any) -> ConstraintIndex:
        sequences, ids = zip(*pairs, strict=True)
        return ConstraintIndex.from_sequences(sequences, item_ids=ids, eos_token_id=EOS if self.ragged else None)

    @property
    def ids(self) -> list[int]:
        return list(dict.fromkeys(item for _, item in self.pairs))

    def add(self, number: int) -> None:
        new = [(self.sequence(), self.next_id + i) for i in range(number)]
        if self.random.random() < 0.3:  # an item that is there gets a second sequence, or the one that it has
            new.append(
                (self.random.choice([self.sequence(), *(s for s, _ in self.pairs)]), self.random.choice(self.ids))
            )
        self.next_id += number
        self.index.add([sequence for sequence, _ in new], [item for _, item in new])
        self.pairs |= dict.fromkeys(new)

    def remove(self, number: int) -> None:
        gone = self.random.sample(self.ids, min(number, len(self.ids) - 1))
        self.index.remove(gone)
        self.pairs = {pair: None for pair in self.pairs if pair[1] not in gone}

    def update(self) -> None:
        action = self.random.random()
        if action < 0.1:
            self.index.compact()
        elif action < 0.55 or len(self.pairs) < 10:
            self.add(self.random.randint(1, 5))
        else:
            self.remove(self.random.randint(1, 5))


def run(model: Any, row: int, index: Any, **kwargs: Any) -> tuple[list[list[int]], list[float]]:
    """The paths of one prompt, or of all prompts for `row=-1`: tokens and scores."""
    inputs = prompts(3, 6, padded=True)
    if row >= 0:
        inputs = {name: value[row : row + 1] for name, value in inputs.items()}
    settings = {"num_beams": NUM_BEAMS, "num_return_sequences": NUM_BEAMS, "early_stopping": "never"}
    settings |= {"return_dict_in_generate": True, "output_scores": True}
    out = model.generate(**inputs, constraint_index=index, **settings, **kwargs)
    tokens = [[token for token in path if token != PAD] for path in out.sequences[:, 6:].tolist()]
    return tokens, out.sequences_scores.tolist()


def check_same(found: Any, expected: Any) -> None:
    tokens, scores = found
    expected_tokens, expected_scores = expected
    assert tokens == expected_tokens
    np.testing.assert_allclose(scores, expected_scores, atol=SCORE_TOL)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.just(True))
@example(2, False, False)
@example(3, True, False)
def test_rules_and_updates_equal_an_index_of_the_living(seed: int, ragged: bool, use_cache: bool) -> None:
    """Updates, then a rule of its own and exclusions for every prompt; without a cache in transformers' own loop."""
    catalogue = Catalogue(seed, ragged=ragged)
    model = enable(shared("qwen3"))
    for _ in range(catalogue.random.randint(0, 4)):
        catalogue.update()
    views, excluded, expected = [], [], []
    for row in range(3):
        if row == 2:
            views.append(catalogue.index)
            kept = set(catalogue.ids)
        else:
            kept = set(catalogue.random.sample(catalogue.ids, catalogue.random.randint(1, len(catalogue.ids))))
            mask = np.isin(catalogue.index.item_ids, list(kept))
            views.append(catalogue.index.where(mask if catalogue.random.random() < 0.5 else kept))
        excluded.append(catalogue.random.sample(catalogue.ids, catalogue.random.randint(0, len(catalogue.ids) // 2)))
        excluded[row] += [4000] * row  # which no item has
        pairs = [pair for pair in catalogue.pairs if pair[1] in kept - set(excluded[row])]
        expected.append(
            run(model, row, catalogue.build(pairs)) if pairs else ([[]] * NUM_BEAMS, [-np.inf] * NUM_BEAMS)
        )
    tokens, scores = run(model, -1, views, exclude_items=excluded, use_cache=use_cache)
    for row in range(3):
        here = slice(row * NUM_BEAMS, (row + 1) * NUM_BEAMS)
        check_same((tokens[here], scores[here]), expected[row])
        items = views[row].items(tokens[here], exclude_items=[excluded[row]])
        assert all(bool(item) == bool(path) for item, path in zip(items, tokens[here], strict=True))
        assert not {item for row in items for item in row} & set(excluded[row])


def test_a_call_keeps_the_catalogue_that_it_began_with() -> None:
    catalogue, model = Catalogue(3, ragged=False, num_items=40), enable(shared("qwen3"))
    expected = run(model, 0, catalogue.index)

    def update(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        catalogue.index.remove(catalogue.index.item_ids[1:])
        return scores

    check_same(run(model, 0, catalogue.index, logits_processor=LogitsProcessorList([update])), expected)
    assert catalogue.index.num_items == 1


def test_updates_of_several_threads_are_all_kept() -> None:
    index = ConstraintIndex.from_sequences([[5, 5], [5, 6]])
    rows = [[7 + number // 40, number % 40] for number in range(400)]

    def add(start: int) -> None:
        for number in range(start, 400, 4):
            index.add([rows[number]], [100 + number])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert len(index) == 402
    assert index.items(rows) == [[100 + number] for number in range(400)]


def test_a_view_shares_the_arrays_and_keeps_its_own_time() -> None:
    index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
    view = index.where(["ham", "yam"])
    assert view.snapshot.items is index.snapshot.items
    index.remove(["ham"])
    assert list(index.where(np.array([False, True]))) == [[6, 7]]
    view.add([[9, 9]], ["spam"])
    assert (view.item_ids, list(index)) == (["ham", "yam", "spam"], [[5, 8], [6, 7]])


def test_what_is_saved_is_what_is_served(tmp_path: Path) -> None:
    catalogue = Catalogue(5, ragged=True)
    for _ in range(6):
        catalogue.update()
    for index in (catalogue.index, catalogue.index.where(catalogue.ids[::3])):
        index.save_pretrained(tmp_path)
        loaded = ConstraintIndex.from_pretrained(tmp_path)
        assert list(loaded) == list(index)
        assert loaded.items(list(index)) == index.items(list(index))
        assert list(loaded.item_ids) == list(index.item_ids)
        loaded.remove(loaded.item_ids[:1])  # mapped arrays are never written to
        assert list(ConstraintIndex.from_pretrained(tmp_path)) == list(index)


INDEX = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
NUMBERED = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: INDEX.where(["ham", "spam", "egg"]), r"has 2 ids that the catalogue does not have \('spam', 'egg'\)"),
        (lambda: INDEX.where([True, False]), r"mask has shape \[2\], expected \[3\]"),
        (lambda: INDEX.where([1, 2]), r"^mask_or_item_ids\[0\]=1, expected strings"),
        (lambda: NUMBERED.where(np.array([0, 1, 1])), r"mask has type int64 and 3 entries .* mask.astype\(bool\)"),
        (lambda: NUMBERED.where([3, -1]), r"does not have \(3, -1\)"),
        (lambda: INDEX.add([[5, 9]], ["a", "b"]), "item_ids has 2 entries, expected 1"),
        (lambda: INDEX.add([[5, 9, 9]], ["a"]), "sequences have 3 tokens, expected 2 as in the catalogue"),
        (lambda: INDEX.where([]).compact(), "no item is alive, expected one or more"),
        (lambda: INDEX.items([[5, 7]] * 3, exclude_items=[[], []]), "exclude_items has 2 rows for 3 sequences"),
        (lambda: INDEX.items([[5, 7]], exclude_items=["ham"]), r"exclude_items\[0\] is 'ham', expected a list"),
        (lambda: ConstraintLogitsProcessor([]), "constraint_index has 0 entries, expected 1 or more"),
        (lambda: ConstraintLogitsProcessor(INDEX, exclude_items=[]), "exclude_items has 0 entries, expected 1 or"),
        (lambda: ConstraintLogitsProcessor([INDEX] * 3, exclude_items=[[]] * 2), "exclude_items has 2 entries, expec"),
        (lambda: ConstraintLogitsProcessor(NUMBERED, exclude_items=[[2**70]]), "exclude_items"),
        (
            lambda: ConstraintLogitsProcessor([INDEX, INDEX.where([])])(torch.ones(3, 1).long(), torch.zeros(3, 10)),
            "3 rows for 2 rules",
        ),
    ],
)
def test_bad_rules_and_updates_change_nothing(call: Callable[[], Any], message: str) -> None:
    before = INDEX.snapshot
    with pytest.raises(ValueError, match=message):
        call()
    assert INDEX.snapshot is before


def test_an_addition_that_is_taken_back_leaves_nothing_behind_once_compacted() -> None:
    index = ConstraintIndex.from_sequences([[5], [6]], eos_token_id=EOS)
    index.add([[9999, 4]], [7])
    with_it = index.snapshot
    index.remove([7])
    assert (index.max_token_id, index.max_length, index.encode([7])) == (9999, 3, [9999, 4])
    index.add([[8]], [7])
    index.remove([7])
    assert index.encode([7]) == [8]  # what it was last
    index.compact()
    assert (index.max_token_id, index.max_length, index.snapshot.alive) == (6, 2, None)
    run(enable(shared("qwen3")), 0, index)
    assert with_it.where([0]).compact().max_token_id == 5


def test_exclusions_are_read_alike_everywhere_and_nothing_is_added() -> None:
    index = ConstraintIndex.from_sequences([[5, 7], [5, 7]])
    for excluded in ([torch.tensor([1])], torch.tensor([[1]]), (row for row in [np.array([1, 99])])):
        assert index.items([[5, 7]], exclude_items=excluded) == [[0]]  # pyright: ignore
    before = INDEX.snapshot
    INDEX.add(np.zeros((0, 2), dtype=int), [])
    assert INDEX.snapshot is before


class Mine(ConstraintIndex):
    """A subclass, which copies and views are of, too."""


def test_a_copy_keeps_the_catalogue_of_its_moment() -> None:
    index = Mine.from_sequences([[5, 7], [5, 8]])
    then = copy.copy(index)
    index.remove([0])
    assert then.snapshot.items is index.snapshot.items
    index.add([[5, 7]], [9])
    assert then.items([[5, 7], [5, 8]]) == [[0], [1]]
    assert list(then.where(then.item_ids == 0)) == [[5, 7]]
    assert then.snapshot.items is not index.snapshot.items
    assert [type(one) for one in (then, then.where([0]), pickle.loads(pickle.dumps(index)))] == [Mine] * 3
