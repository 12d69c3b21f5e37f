# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Generated rows as items: `index.items` refuses what is no generated row, and outputs have `item_ids`."""

import pickle
import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import DETAILS, EOS, build, prompts, shared

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch.call import GRGenerateDecoderOnlyOutput

FIXED = [[5, 7], [5, 8], [6, 7], [6, 7], [3, 3]]
RAGGED = [[5], [5, 7], [5, 7, 7], [6, 5]]


def reference_goes_on(sequences: list[list[int]], row: list[int], eos_token_id: int | None) -> bool:
    """Whether a row has more after its item than padding, token by token."""
    row = row[: next((place for place, token in enumerate(row) if token < 0), len(row))]
    ends = [[*sequence, *([] if eos_token_id is None else [eos_token_id])] for sequence in sequences]
    for length in range(len(row) + 1):
        if row[:length] in ends:
            tail = row[length:]
            if len(set(tail)) <= 1:
                return False
            begins = tail[0] in [sequence[0] for sequence in sequences]
            return not (eos_token_id is None and not begins and len(set(tail[1:])) == 1)
    return False


@pytest.mark.parametrize(("sequences", "eos_token_id"), [(FIXED, None), (RAGGED, EOS)])
def test_a_row_that_goes_on_after_its_item_is_refused(sequences: list[list[int]], eos_token_id: int | None) -> None:
    index = ConstraintIndex.from_sequences(sequences, eos_token_id=eos_token_id)
    later = ConstraintIndex.from_sequences(sequences[:2], eos_token_id=eos_token_id)
    later.add(sequences[2:], range(2, len(sequences)))
    draw, seen = random.Random(0), set[bool]()
    rows = [[draw.choice([-1, 0, EOS, 3, 5, 5, 6, 7, 7, 8]) for _ in range(draw.randint(1, 7))] for _ in range(300)]
    for row in [[5, 7, 6, 7], [5, 7, EOS, 0, 0], [5, EOS, 5, EOS], *rows]:
        expected = reference_goes_on(sequences, row, eos_token_id)
        for one in (index, later):
            with pytest.raises(ValueError, match="goes on") if expected else nullcontext():
                one.items([row])
        seen.add(expected)
    assert seen == {True, False}


def test_the_error_names_row_and_item_and_says_how_to_cut() -> None:
    index = ConstraintIndex.from_sequences(FIXED, item_ids=["ham", "jam", "yam", "yum", "fig"])
    with pytest.raises(ValueError, match=r"sequences\[1\] is item 'jam' and goes on .*shape\[1\]:.*out\.item_ids"):
        index.items([[0, 0, 0, 0], [5, 8, 6, 7]])
    with pytest.raises(ValueError, match=r"SimpleNamespace, expected its generated tokens: .* read out\.item_ids"):
        index.items(SimpleNamespace(sequences=torch.tensor([[5, 8]])))  # pyright: ignore


def test_a_start_token_that_was_left_on_is_refused() -> None:
    index = ConstraintIndex.from_sequences(FIXED)
    with pytest.raises(ValueError, match=r"each is after its first token, 9, expected .* Pass .*out\[:, 1:\]"):
        index.items([[9, 5, 7], [9, 6, 7], [9, 9, 9]])
    # What a model without the catalogue may write is no mistake.
    for rows in ([[9, 5, 7]], [[9, 5, 7], [8, 6, 7]], [[9, 5, 7], [9, 7, 7]], [[9, 5, 7], [9, 5, 7], [5, 7, 0]]):
        index.items(rows)


ROWS = np.random.default_rng(0).integers(3, 24, size=(200, 3))
NAMES = [f"item {number}" for number in range(200)]
INDEX = ConstraintIndex.from_sequences(ROWS, item_ids=NAMES)
ENDED = ConstraintIndex.from_sequences(
    [row[: 1 + i % 3].tolist() for i, row in enumerate(ROWS)], item_ids=NAMES, eos_token_id=EOS
)


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_outputs_name_their_items_in_every_loop_and_layout(family: str) -> None:
    model, start = enable(shared(family)), 1 if family == "t5" else 6
    for index in (INDEX, ENDED):
        for options in ({"num_beams": 4, "num_return_sequences": 4}, {"do_sample": True, "use_cache": False}):
            out = model.generate(**prompts(2, 6), constraint_index=index, **options, **DETAILS)  # our loop, and theirs
            assert out.item_ids == index.items(out.sequences[:, start:])
            assert all(out.item_ids)


def test_a_pickled_output_has_its_items_and_not_its_catalogue() -> None:
    out = enable(build("qwen3")).generate(**prompts(1, 4), constraint_index=INDEX, num_beams=2, **DETAILS)
    out.past_key_values = None
    there = pickle.loads(pickle.dumps(out))
    assert there.item_ids == INDEX.items(out.sequences[:, 4:])
    assert there._answered is None


def test_item_ids_know_views_exclusions_and_what_was_missing() -> None:
    model = enable(shared("qwen3"))
    twins = ConstraintIndex.from_sequences([[5, 7], [5, 7], [6, 7]], item_ids=["ham", "jam", "yam"])
    view = twins.where(["jam", "yam"])
    how = {"num_beams": 3, "num_return_sequences": 3}
    out = model.generate(
        **prompts(2, 4), constraint_index=[view, twins], exclude_items=[["yam"], ["jam"]], **how, **DETAILS
    )
    twins.remove(["ham"])  # the answer is of the call's catalogue
    first, second = out.item_ids[:3], out.item_ids[3:]
    assert first == [["jam"], [], []]
    assert sorted(second) == [[], ["ham"], ["yam"]]
    assert out.item_ids is out.item_ids
    assert "item_ids" not in out  # no field: transformers' code sees the fields that it knows
    assert GRGenerateDecoderOnlyOutput(sequences=torch.LongTensor([[1, 2]])).item_ids is None


@pytest.mark.parametrize("index", [INDEX, ENDED])
def test_a_history_is_encoded_as_its_items_sequences(index: ConstraintIndex) -> None:
    sequences = {name: [t for t in row if t != EOS] for row in index for name in index.items([row])[0]}
    history = ["item 7", "item 0", "item 8", "item 7"]
    assert index.encode(history) == [token for item in history for token in sequences[item]]
    assert index.encode([]) == []
    # What is no longer sold is still in a history.
    assert index.where(["item 1"]).encode(history) == index.encode(history)


def test_a_history_with_an_unknown_item_is_refused() -> None:
    with pytest.raises(ValueError, match=r"item_ids has 1 id that the catalogue does not have \('spam'\)"):
        INDEX.encode(["item 1", "spam"])
    with pytest.raises(ValueError, match=r"item_ids\[0\]=7, expected strings"):
        INDEX.encode([7])
    with pytest.raises(ValueError, match="expected a list of item ids"):
        INDEX.encode("item 1")
    with pytest.raises(ValueError, match="several histories, expected the ids of one"):
        INDEX.encode([["item 1"], ["item 2"]])  # pyright: ignore
