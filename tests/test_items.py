# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A changing catalogue against a list of pairs: what is alive, what a request must not see, and what ids find."""

import copy
import tracemalloc
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor
from hf_gr.catalogue import item_ids as item_ids_module
from hf_gr.catalogue import pieces

EOS = 2
VOCABULARY = 50
Rows = list[list[int]]
Pairs = list[tuple[tuple[int, ...], Any]]  # a sequence with its end token, and an item

tokens = st.integers(3, 6)
fixed_rows = st.integers(1, 5).flatmap(
    lambda length: st.lists(st.lists(tokens, min_size=length, max_size=length), min_size=1, max_size=20)
)
ragged_rows = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=20)
# Levels without branches, and leaves above them; most nodes have one child, so that exceptions are listed.
NARROW = [[3 + number, 5, 5, *[5, 5] * (number % 9 > 0)] for number in range(40)] + [[7, 5, 5, 5, 4]] * 2
catalogues = st.tuples(fixed_rows, st.none()) | st.tuples(ragged_rows | st.just(NARROW), st.just(EOS))

FAR = [2**15 - 1, 2**15, -(2**15), -(2**15) - 1, 2**31, -(2**40), 2**63 - 1, -(2**63), 2**16 + 5]
integers = st.integers(-4, 40) | st.sampled_from(FAR)
long_texts = [start * length + end for start in "a寿" for length in (85, 256, 257, 999) for end in ("", "x", "y")]
some_texts = st.text(max_size=6) | st.sampled_from(["", "a", "\0", "a\0", "寿司", "\U0001f600", *long_texts])


def once(pairs: Iterable[tuple[tuple[int, ...], Any]]) -> Pairs:
    return list(dict.fromkeys(pairs))


def sequences_of(pairs: Pairs) -> Rows:
    return [list(sequence) for sequence in sorted({sequence for sequence, _ in pairs})]


def items_by_sequence(pairs: Pairs) -> dict[tuple[int, ...], list[Any]]:
    found: dict[tuple[int, ...], list[Any]] = {}
    for sequence, item in pairs:
        found.setdefault(sequence, []).append(item)
    return found


def after(prefix: Sequence[int], pairs: Pairs) -> list[int]:
    size = len(prefix)
    return sorted(
        {sequence[size] for sequence, _ in pairs if len(sequence) > size and sequence[:size] == tuple(prefix)}
    )


def check(index: ConstraintIndex, pairs: Pairs, once_there: Pairs) -> None:
    """Everything that an index answers of living items, and of those that were there once."""
    assert list(index) == sequences_of(pairs)
    assert (len(index), index.num_items) == (len(sequences_of(pairs)), len(pairs))
    assert list(index.item_ids) == [item for _, item in pairs]
    rows, expected = sequences_of(once_there), items_by_sequence(pairs)
    assert index.items(rows) == [expected.get(tuple(row), []) for row in rows]
    for prefix in {row[:end] for row in map(tuple, rows) for end in range(len(row) + 1)}:
        assert index.allowed_next_tokens(prefix) == after(prefix, pairs), prefix
    ids = list(dict.fromkeys(item for _, item in once_there))
    living = {item for _, item in pairs}
    assert index.has_items(ids).tolist() == [item in living for item in ids]
    first = {item: sequence for sequence, item in reversed(pairs)}
    for item in living:
        assert index.encode([item]) == [token for token in first[item] if token != EOS]


def check_exclusions(index: ConstraintIndex, pairs: Pairs, excluded: list[list[Any]]) -> None:
    """What each request may write after every prefix, by the processor of transformers' loop."""
    processor = ConstraintLogitsProcessor(index, prompt_length=1, exclude_items=excluded)
    for level in range(index.max_length):
        prefixes = sorted({sequence[:level] for sequence, _ in pairs if len(sequence) > level})
        written = torch.tensor([[1, *prefix] for _ in excluded for prefix in prefixes])
        legal = processor(written, torch.zeros(len(written), VOCABULARY)) == 0 if prefixes else written
        for row, hidden in enumerate(excluded):
            visible = [pair for pair in pairs if pair[1] not in hidden]
            for path, prefix in enumerate(prefixes):
                found = legal[row * len(prefixes) + path].nonzero()[:, 0].tolist()
                assert found == after(prefix, visible), prefix


@settings(max_examples=25, phases=[Phase.reuse, Phase.generate])  # what fails is small; shrinking it takes minutes
@given(catalogues, st.sampled_from(["integers", "texts", "texts whose hashes collide"]), st.data())
def test_a_catalogue_is_its_living_items(catalogue: tuple[Rows, int | None], kind: str, data: st.DataObject) -> None:
    at_once, most_held = data.draw(st.sampled_from([3, pieces.AT_ONCE])), data.draw(st.sampled_from([3, 2**20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "AT_ONCE", at_once)  # the borders of pieces of work are anywhere
        patch.setattr(item_ids_module, "MOST_HELD", most_held)  # above it, texts are searched without keys
        if "collide" in kind:
            patch.setattr(item_ids_module, "HASH_FACTOR", np.int64(0))
            patch.setattr(item_ids_module, "HASH_BASIS", np.int64(0))
        check_states(integers if kind == "integers" else some_texts, *catalogue, data)


def check_states(ids: Any, rows: Rows, eos_token_id: int | None, data: st.DataObject) -> None:
    """Rules, removals, additions and rebuilding, in any order."""

    def draw_pairs(rows: Rows) -> Pairs:
        drawn = data.draw(st.lists(ids, min_size=len(rows), max_size=len(rows)))
        ended = [(*row, *([] if eos_token_id is None else [eos_token_id])) for row in rows]
        return list(zip(ended, drawn, strict=True))

    given_pairs = draw_pairs(rows)
    sequences, items = zip(*given_pairs, strict=True)
    index = ConstraintIndex.from_sequences(sequences, item_ids=items, eos_token_id=eos_token_id)
    pairs = once_there = once(given_pairs)
    check(index, pairs, once_there)
    for step in data.draw(st.lists(st.sampled_from(["where", "mask", "remove", "add", "compact"]), max_size=4)):
        alive = list(dict.fromkeys(item for _, item in pairs))
        some = data.draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []
        before, expected = copy.copy(index), pairs
        if step == "where":
            index = index.where(some)
            pairs = [pair for pair in pairs if pair[1] in some]
        elif step == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
            index = index.where(np.array(mask, dtype=bool))
            pairs = [pair for pair, is_kept in zip(pairs, mask, strict=True) if is_kept]
        elif step == "remove":
            index.remove(some)
            pairs = [pair for pair in pairs if pair[1] not in some]
        elif step == "add":
            more = draw_pairs(rows[:4])
            index.add([sequence for sequence, _ in more], [item for _, item in more])
            pairs, once_there = once([*pairs, *more]), once([*once_there, *more])
        elif pairs:
            index.compact()
        check(index, pairs, once_there)
        assert list(before) == sequences_of(expected)  # who has read the catalogue keeps what it was
    if pairs:
        choices = st.lists(st.sampled_from([item for _, item in once_there]), unique=True)
        check_exclusions(index, pairs, [data.draw(choices) for _ in range(data.draw(st.integers(1, 3)))])


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_integers_beyond_the_stored_type_are_not_found(dtype: Any) -> None:
    held = np.iinfo(dtype)
    ids = [int(held.min), -5, 0, 5, int(held.max)]
    wrapped = [item + step for item in ids for step in (2**16, -(2**16), 2**32, -(2**32)) if abs(item + step) < 2**63]
    index = ConstraintIndex.from_sequences([[token] for token in range(5)], item_ids=ids)
    assert index.has_items([*ids, *wrapped]).tolist() == [True] * 5 + [item in ids for item in wrapped]


def test_finding_a_few_integers_copies_nothing_of_many() -> None:
    ids = np.random.default_rng(0).permutation(1_000_000).astype(np.int32)
    packed, sought = item_ids_module.ItemIds.pack(ids), np.arange(0, 1_000_000, 1001)
    tracemalloc.start()
    try:
        of, items = packed.find(sought)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # `order` alone has 4 MB
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(ids[items], sought[of])
