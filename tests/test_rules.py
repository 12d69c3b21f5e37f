# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules and live updates of a catalogue. What is generated under them: tests/fuzz/test_generation.py."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import EOS, prompts, shared
from transformers import LogitsProcessorList

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor, SemanticIds, enable


def test_a_call_keeps_the_catalogue_that_it_began_with() -> None:
    index = ConstraintIndex.from_sequences(np.random.default_rng(3).integers(3, 8, size=(40, 4)))
    model, how = enable(shared("qwen3")), {"num_beams": 6, "num_return_sequences": 6}

    def update(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        index.remove(index.item_ids[1:])
        return scores

    expected = model.generate(**prompts(3, 6), constraint_index=copy.copy(index), **how)
    processors = LogitsProcessorList([update])
    found = model.generate(**prompts(3, 6), constraint_index=index, logits_processor=processors, **how)
    assert found.tolist() == expected.tolist()
    assert index.num_items == 1


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


def test_what_is_saved_is_what_is_served(tmp_path: Path) -> None:
    rows = [[5], [5, 7], [6, 7, 7], [5], [6], [8, 5]]
    updated = ConstraintIndex.from_sequences(rows, item_ids=range(10, 16), eos_token_id=EOS)
    updated.remove([10, 12, 15])
    updated.add([[7, 7, 7, 7], [5, 7], [6], [8, 5]], [20, 11, 11, 15])
    assert list(updated) == [[5, 2], [5, 7, 2], [6, 2], [7, 7, 7, 7, 2], [8, 5, 2]]
    assert updated.items([[5], [6], [8, 5], [6, 7, 7]]) == [[13], [14, 11], [15], []]
    for index in (updated, updated.where([20, 14])):
        index.save_pretrained(tmp_path)
        loaded = ConstraintIndex.from_pretrained(tmp_path)
        assert list(loaded) == list(index)
        assert loaded.items(list(index)) == index.items(list(index))
        assert list(loaded.item_ids) == list(index.item_ids)
        loaded.remove(loaded.item_ids[:1])  # mapped arrays are never written to
        assert list(ConstraintIndex.from_pretrained(tmp_path)) == list(index)


INDEX = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
CODED = SemanticIds([[0, 1], [2, 0]], item_ids=["ham", "jam"], level_sizes=[4, 4], offset=1).constraint_index(
    eos_token_id=0
)
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
        (lambda: CODED.add([[1, 5], [5, 1]], ["a", "b"]), "sequence 1 has token 5 at position 0, expected 1 to 4"),
        (lambda: CODED.add([[1, 9]], ["a"]), "sequence 0 has token 9 at position 1, expected 5 to 8, the codes of th"),
        (lambda: CODED.add([[1, 5, 9]], ["a"]), "sequence 0 has token 9 at position 2"),
        (lambda: CODED.add([[4, 8]], ["ham"]), r"1 id with another semantic ID in the catalogue \('ham'\)"),
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


def test_codes_that_no_item_had_are_added(tmp_path: Path) -> None:
    CODED.save_pretrained(tmp_path)
    index = ConstraintIndex.from_pretrained(tmp_path)
    index.remove(["ham"])
    index.add([[4, 8, 0], [4]], ["ham", "new"])
    assert index.items([[4, 8], [4]]) == [["ham"], ["new"]]
    index.remove(["ham", "new"])
    index.restore(["new"])
    assert index.items([[4, 8], [4]]) == [[], ["new"]]
    with pytest.raises(ValueError, match=r"'rum'.*add them with their sequences"):
        index.restore(["ham", "rum"])
    with pytest.raises(ValueError, match="token 9 at position 1"):
        index.add([[4, 9]], ["other"])


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


def test_copies_and_views_share_the_arrays_and_keep_their_own_time() -> None:
    index = Mine.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])
    then, view = copy.copy(index), index.where(["ham", "yam"])
    assert then.snapshot.items is view.snapshot.items is index.snapshot.items
    index.remove(["ham"])
    index.add([[5, 7]], ["rye"])
    view.add([[9, 9]], ["spam"])
    assert then.items([[5, 7], [5, 8]]) == [["ham"], ["jam"]]
    assert list(then.where(np.array(then.item_ids) == "ham")) == [[5, 7]]
    assert list(index.where(np.array([False, True, False]))) == [[6, 7]]
    assert (view.item_ids, index.item_ids) == (["ham", "yam", "spam"], ["jam", "yam", "rye"])
    assert then.snapshot.items is not index.snapshot.items
    assert [type(one) for one in (then, view, pickle.loads(pickle.dumps(index)))] == [Mine] * 3
