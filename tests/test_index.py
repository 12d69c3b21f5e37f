# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`ConstraintIndex`: what it takes, what it answers, and that its files survive whatever happens to them."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
import torch
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hf_gr import ConstraintIndex
from hf_gr.catalogue import storage
from hf_gr.catalogue.items import Items

EOS = 2
ROWS = [[5, 7], [5, 8], [6, 7], [5, 8]]
RAGGED = [[9], [5, 7, 7], [5], [5, 8], [5]]
JSON_FILE, ARRAYS_FILE = storage.FILES
GOLDEN = Path(__file__).parent / "golden" / "index_v2"  # with SHA-256 alone
GOLDEN_XXH3 = Path(__file__).parent / "golden" / "index_v2_xxh3"  # as they are saved now
# Most nodes have one child and most sequences one item, so that only exceptions are stored, several of each kind.
SPARSE = [[70_000 + number, 7, *[5, 300] * (number % 5 > 0)] for number in range(20)] + [[70_011, 7, 5, 299]] * 3


def golden_indexes() -> dict[str, ConstraintIndex]:
    """The catalogues of the golden files: both kinds of item ids and of sequences, duplicates, large tokens."""
    return {
        "integers": ConstraintIndex.from_sequences(
            [[7, 300, 12], [7, 301, 12], [5, 300, 12], [7, 300, 12]], item_ids=[-4, 10, 70_000, 3]
        ),
        "strings": ConstraintIndex.from_sequences(
            [[70_000], [9, 8, 70_000], [9], [9, 8], [9]],
            item_ids=["ham", "crème brûlée", "", "寿司", "jam"],
            eos_token_id=1,
        ),
        "sparse": ConstraintIndex.from_sequences(SPARSE, eos_token_id=1),
        "shared": ConstraintIndex.from_sequences(
            [[5, 7], [5, 7], [5, 8], [5, 8], [6, 7]], item_ids=[-4, 10, 300, 301, 70_000]
        ),
    }


def write_golden_files() -> None:
    """Write tests/golden/index_v2_xxh3: `python -c "import test_index; test_index.write_golden_files()"` in tests/.

    Done once, when the digest was added that every load compares; those in index_v2 were written before. What is there
    is what users have on their disks: if a test of it fails, the code is wrong, or the format has changed and needs
    version 3, with golden files of its own beside these.
    """
    for name, index in golden_indexes().items():
        index.save_pretrained(GOLDEN_XXH3 / name)
        (GOLDEN_XXH3 / name / "README.md").unlink()


def items_of(index: ConstraintIndex) -> Items:
    assert index.snapshot.is_compact
    return index.snapshot.items


def same(one: ConstraintIndex, two: ConstraintIndex) -> bool:
    """Whether two indexes are equal to the bit."""
    items, other = items_of(one), items_of(two)
    arrays, others = items.arrays(), other.arrays()
    return (
        one.eos_token_id == two.eos_token_id
        and storage.describe_items(items) == storage.describe_items(other)
        and items.trie.level_starts == other.trie.level_starts
        and items.trie.has_leaves == other.trie.has_leaves
        and arrays.keys() == others.keys()
        and all(arrays[name].dtype == others[name].dtype for name in arrays)
        and all(arrays[name].tobytes() == others[name].tobytes() for name in arrays)
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# What it takes


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_sequences_of_any_numpy_integer(dtype: Any) -> None:
    index = ConstraintIndex.from_sequences(np.array(ROWS, dtype=dtype))
    assert same(index, ConstraintIndex.from_sequences(ROWS))
    assert index.items(np.array(ROWS, dtype=dtype)) == [[0], [1, 3], [2], [1, 3]]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(tuple(map(tuple, ROWS)), id="tuples"),
        pytest.param([np.array(row, dtype=np.int32) for row in ROWS], id="arrays"),
        pytest.param([[np.int64(token) for token in row] for row in ROWS], id="numpy scalars"),
        pytest.param([torch.tensor(row) for row in ROWS], id="list of tensors"),
        pytest.param(torch.tensor(ROWS), id="tensor"),
        pytest.param(torch.tensor(ROWS, dtype=torch.int32), id="int32 tensor"),
        pytest.param(torch.tensor(ROWS).t().contiguous().t(), id="strided tensor"),
        pytest.param(np.asfortranarray(ROWS), id="columns first"),
        pytest.param(np.array([*ROWS, None], dtype=object)[:-1], id="array of lists"),
        pytest.param(np.array(ROWS, dtype=">i4"), id="big-endian"),
    ],
)
def test_sequences_of_any_kind(rows: Any) -> None:
    index = ConstraintIndex.from_sequences(rows)
    assert same(index, ConstraintIndex.from_sequences(ROWS))
    assert index.items(rows) == [[0], [1, 3], [2], [1, 3]]


def test_sequences_and_item_ids_from_generators() -> None:
    index = ConstraintIndex.from_sequences((row for row in ROWS), item_ids=(name for name in "abcd"))
    assert index.items(row for row in ROWS) == [["a"], ["b", "d"], ["c"], ["b", "d"]]


def test_ragged_sequences_of_any_kind() -> None:
    expected = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS)
    for kind in (tuple, np.array, torch.tensor):
        assert same(ConstraintIndex.from_sequences(map(kind, RAGGED), eos_token_id=EOS), expected)
    assert same(ConstraintIndex.from_sequences([[*row, EOS] for row in RAGGED], eos_token_id=np.int32(EOS)), expected)
    assert list(expected) == [[5, 2], [5, 7, 7, 2], [5, 8, 2], [9, 2]]
    assert expected.items(RAGGED) == [[0], [1], [2, 4], [3], [2, 4]]
    assert (expected.max_length, len(expected), expected.num_items, expected.eos_token_id) == (4, 4, 5, EOS)
    assert type(ConstraintIndex.from_sequences(RAGGED, eos_token_id=np.int32(EOS)).eos_token_id) is int


def test_the_callers_arrays_are_neither_kept_nor_changed() -> None:
    rows, ids = np.array(ROWS), np.array([40, 30, 20, 10])
    index = ConstraintIndex.from_sequences(rows, item_ids=ids, eos_token_id=EOS)
    np.testing.assert_array_equal(rows, ROWS)
    rows[:], ids[:] = 99, 99
    assert index.items(ROWS) == [[40], [30, 10], [20], [30, 10]]


@pytest.mark.parametrize(
    "ids",
    [
        [4, 3, 2, 1],
        [2**62, -(2**63), 2**63 - 1, 0],
        np.array([4, 3, 2, 1], dtype=np.uint8),
        torch.tensor([4, 3, 2, 1]),
        [np.int16(4), 3, np.uint64(2), 1],
        ["a", "", "\u5bff\u53f8", "a" * 1000],
        np.array(["a", "bc", "d", "e"]),
        np.array(["a", "bc", "d", "e"], dtype=object),
        [np.str_("a"), "b", "c", "d"],
        ["\x00", "a\x00", "\n", "\U0001f600"],
    ],
)
def test_item_ids_of_any_kind_come_back_as_pythons_own(ids: Any, tmp_path: Path) -> None:
    index = ConstraintIndex.from_sequences([[5], [6], [7], [8]], item_ids=ids)
    expected = [[item] for item in (ids if isinstance(ids, list) else ids.tolist())]
    index.save_pretrained(tmp_path)
    for twin in (index, ConstraintIndex.from_pretrained(tmp_path)):
        found = twin.items([[5], [6], [7], [8]])
        assert found == expected
        assert {type(item) for items in found for item in items} <= {int, str}


def test_integer_ids_have_64_bits_before_and_after_updates() -> None:
    for ids in (None, [4, 3, 2, 1], np.array([4, 3, 2, 1], dtype=np.int16)):
        index = ConstraintIndex.from_sequences([[5], [6], [7], [8]], item_ids=ids)
        found = [index.item_ids]
        index.add([[9]], [9])
        index.remove([1])
        found += [index.item_ids, index.where([9]).item_ids]
        assert [ids.dtype for ids in found if isinstance(ids, np.ndarray)] == [np.int64] * 3


def test_an_item_on_several_sequences_and_several_items_on_one() -> None:
    index = ConstraintIndex.from_sequences([[5, 7], [6, 7], [5, 7], [5, 7]], item_ids=["ham", "ham", "jam", "ham"])
    assert index.items([[5, 7], [6, 7]]) == [["ham", "jam"], ["ham"]]
    assert (len(index), index.num_items) == (2, 3)


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([], {}, "sequences is empty, expected at least one token sequence"),
        (np.zeros((0, 4), dtype=int), {}, "sequences is empty"),
        (np.zeros(0), {}, "sequences is empty"),
        (torch.zeros((0, 4), dtype=torch.long), {}, "sequences is empty"),
        (np.zeros((3, 0), dtype=int), {}, "sequence 0 is empty, expected at least one token"),
        ([[5], []], {"eos_token_id": EOS}, "sequence 1 is empty"),
        (
            [[5, 7], [5]],
            {},
            "sequences have 1 to 2 tokens and eos_token_id=None, expected one length or an end token: pass",
        ),
        ([[5, 7], [5, -1]], {}, "sequences have 1 to 2 tokens and eos_token_id=None"),
        (np.array([[5, 7, 3], [5, -1, 7]]), {}, "sequence 1 has token -1 at position 1"),
        (
            np.array([[5, -1], [6, -1]]),
            {},
            "sequence 0 has token -1 at position 1, expected 0 to 2147483647: pass ragged",
        ),
        (np.array([[5, 7], [-1, -1]]), {"eos_token_id": EOS}, "sequence 1 is empty"),
        (np.array([[5, -100]]), {}, "sequence 0 has token -100 at position 1"),
        ([[5], [5, -1]], {"eos_token_id": EOS}, "sequence 1 has token -1 at position 1"),
        (
            [[5, 2**31]],
            {},
            "sequence 0 has token 2147483648 at position 1, expected 0 to 2147483647: is it a token id",
        ),
        ([[5], [2**70]], {}, f"sequence 1 has token {2**70} at position 0"),
        (np.array([[5], [2**64 - 1]], dtype=np.uint64), {}, f"sequence 1 has token {2**64 - 1} at position 0"),
        ([[5.0, 7.0]], {}, "sequence 0 has 5.0 at position 0, expected an integer: pass token ids"),
        ([[5, 7], [5, 7.5]], {}, "sequence 1 has 7.5 at position 1"),
        (np.array([[5.0]]), {}, "sequences has dtype float64, expected integers"),
        (torch.tensor([[5.0]]), {}, "sequences has dtype float32, expected integers"),
        ([[5, True]], {}, "sequence 0 has True at position 1, expected an integer"),
        (np.array([[True]]), {}, "sequences has dtype bool"),
        ([["5"]], {}, "sequence 0 has '5' at position 0"),
        (["57"], {}, "sequence 0 is '57', expected a list of token ids: pass token ids, not text"),
        ("57", {}, "sequences is '57', expected"),
        (None, {}, "sequences is None, expected"),
        (5, {}, "sequences is 5, expected"),
        ([[None]], {}, "sequence 0 has None at position 0"),
        ([None], {}, "sequence 0 is None, expected a list of token ids"),
        ([5, 7], {}, "sequence 0 is 5, expected a list of token ids"),
        (np.array([5, 7]), {}, r"sequences has shape \[2\], expected \[N, T\]"),
        (np.zeros((2, 2, 2), dtype=int), {}, r"sequences has shape \[2, 2, 2\], expected \[N, T\]"),
        ([[[5, 7]]], {}, r"sequence 0 has \[5, 7\] at position 0, expected an integer"),
        (ROWS, {"item_ids": [1, 2, 3]}, "item_ids has 3 entries, expected 4: one for each row"),
        (ROWS, {"item_ids": []}, "item_ids has 0 entries, expected 4"),
        (ROWS, {"item_ids": "abcd"}, "item_ids is 'abcd', expected a list of 4 ids"),
        (ROWS, {"item_ids": np.array(4)}, "item_ids is 4, expected a list of 4 ids"),
        (ROWS, {"item_ids": ["a", "b", 3, "d"]}, r"item_ids\[2\]=3, expected all integers or all strings: convert"),
        (ROWS, {"item_ids": [1, "b", 3, 4]}, r"item_ids\[1\]='b', expected all integers or all strings"),
        (ROWS, {"item_ids": [1, 2, True, 4]}, r"item_ids\[2\]=True, expected all integers or all strings"),
        (ROWS, {"item_ids": np.array([True] * 4)}, r"item_ids\[0\]=True"),
        (ROWS, {"item_ids": [1, 2, 3.0, 4]}, r"item_ids\[2\]=3.0, expected"),
        (ROWS, {"item_ids": np.ones((4, 2), dtype=int)}, r"item_ids\[0\]=\[1, 1\]"),
        (ROWS, {"item_ids": [b"a", b"b", b"c", b"d"]}, r"item_ids\[0\]=b'a'"),
        (
            ROWS,
            {"item_ids": [1, 2, 3, 2**63]},
            "item_ids has an integer beyond 64 bits, expected less: pass such ids as str",
        ),
        (
            ROWS,
            {"item_ids": ["a", "b", "\ud800", "d"]},
            r"item_ids\[2\] is '\\ud800', expected Unicode without lone surrogates",
        ),
        ([[5, EOS, 7]], {"eos_token_id": EOS}, r"sequence 0 is \[5, 2, 7\], expected eos_token_id=2 at its end only"),
        (
            [[5, EOS, EOS]],
            {"eos_token_id": EOS},
            r"sequence 0 is \[5, 2, 2\], expected eos_token_id=2 at its end only",
        ),
        ([[5], [EOS]], {"eos_token_id": EOS}, r"sequence 1 is \[2\], .* after at least one other token"),
        (ROWS, {"eos_token_id": [2, 3]}, r"eos_token_id=\[2, 3\], expected one token id: choose one"),
        (ROWS, {"eos_token_id": 2.0}, "eos_token_id=2.0, expected one token id"),
        (ROWS, {"eos_token_id": True}, "eos_token_id=True, expected one token id"),
        (ROWS, {"eos_token_id": "2"}, "eos_token_id='2', expected one token id"),
        (ROWS, {"eos_token_id": -1}, "eos_token_id=-1, expected one token id"),
        (ROWS, {"eos_token_id": 2**31}, "eos_token_id=2147483648, expected one token id"),
    ],
)
def test_bad_catalogues_are_refused(rows: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConstraintIndex.from_sequences(rows, **arguments)


def test_tokens_of_a_type_that_numpy_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="expected integers: pass token ids"):
        ConstraintIndex.from_sequences(ROWS).items(torch.tensor(ROWS, dtype=torch.bfloat16))


# What it answers


@pytest.mark.parametrize(
    ("row", "items"),
    [
        ([5, 2, 2, 2], [2, 4]),
        ([5, 2, 0, 0], [2, 4]),
        ([5, 2, -100, -100], [2, 4]),
        ([5], [2, 4]),
        ([5, -1, -1], [2, 4]),
        ([5, -100], [2, 4]),
        ([5, 7, 7], [1]),
        ([5, 7, 7, 2, 0, 0, 0], [1]),
        ([5, -1, 7, 7], [2, 4]),
        ([5, 0], []),
        ([5, 7], []),
        ([5, 7, 2], []),
        ([0, 0, 0, 0], []),
        ([2, 2, 2, 2], []),
        ([-1, 5, 2], []),
        ([], []),
        ([2**40], []),
    ],
)
def test_items_of_generated_rows(row: list[int], items: list[int]) -> None:
    index = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS)
    array = np.array([row, row], dtype=np.int64)
    for rows in (
        [row, row],
        array,
        torch.tensor(array),
        array.tolist(),
        (row, row),
        [tuple(row), np.array(row, dtype=int)],
    ):
        assert index.items(rows) == [items, items]
    if row:
        assert index.items(row) == index.items(array[0]) == index.items(torch.tensor(row)) == [items]


def test_items_of_rows_of_several_lengths() -> None:
    index = ConstraintIndex.from_sequences(ROWS, item_ids=["a", "b", "c", "d"])
    assert index.items([[5, 8], [6], [], [6, 7, 0, 0], [0]]) == [["b", "d"], [], [], ["c"], []]
    assert index.items([]) == index.items(np.zeros((0, 2), dtype=int)) == index.items(torch.zeros((0, 9)).long()) == []
    assert index.items(torch.zeros((2, 0)).long()) == [[], []]
    assert index.items(np.array([[5, 2**64 - 1 - 2**40]], dtype=np.uint64) % 2**40) == [[]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[5.0, 7.0]], "sequence 0 has 5.0 at position 0, expected an integer"),
        (torch.ones(2, 2), "sequences has dtype float32, expected integers"),
        (torch.ones(2, 2, 2).long(), r"sequences has shape \[2, 2, 2\]"),
        ("ham", "sequences is 'ham'"),
    ],
)
def test_items_refuses_what_are_no_tokens(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConstraintIndex.from_sequences(ROWS).items(rows)


def test_membership() -> None:
    fixed = ConstraintIndex.from_sequences(ROWS)
    for row in ([5, 7], (6, 7), np.array([5, 8]), torch.tensor([5, 8]), [np.int8(5), np.int64(8)]):
        assert row in fixed
    for row in ([5], [5, 7, 0], [], [5, 9], [0, 0], [5.0, 7.0], "57", 57, None, [5, 2**70], [[5, 7], [5, 8]], [5, -1]):
        assert row not in fixed
    ragged = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS)
    for row in ([5], [5, EOS], [5, 7, 7], [9]):
        assert row in ragged
    for row in ([5, 7], [5, EOS, EOS], [5, EOS, 0], [EOS], [5, -1], [-1, 5]):
        assert row not in ragged


def test_allowed_next_tokens() -> None:
    index = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS)
    assert index.allowed_next_tokens([]) == index.allowed_next_tokens(torch.zeros(0, dtype=torch.long)) == [5, 9]
    for prefix in ([5], (5,), np.array([5]), torch.tensor([5], dtype=torch.int32)):
        assert index.allowed_next_tokens(prefix) == [EOS, 7, 8]
    for prefix in ([5, EOS], [6], [5, EOS, 7], [-1], [2**40], [5, -1, 7]):
        assert index.allowed_next_tokens(prefix) == []
    assert all(type(token) is int for token in index.allowed_next_tokens([]))
    with pytest.raises(ValueError, match="has 5.5 at position 0"):
        index.allowed_next_tokens([5.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"prefix has shape \[2, 1\], expected one sequence"):
        index.allowed_next_tokens([[5], [5]])  # type: ignore[list-item]


def test_repr_and_sizes_say_what_is_there() -> None:
    index = ConstraintIndex.from_sequences(ROWS)
    assert repr(index) == "ConstraintIndex(3 sequences, 4 items, max_length=2, eos_token_id=None, 0.0 MB)"
    assert index.nbytes == sum(array.nbytes for array in items_of(index).arrays().values())
    assert (index.max_length, index.max_token_id) == (2, 8)
    view = index.where([True, False, True, True])
    assert view.nbytes == index.nbytes + 1 + 1 + 1  # a bit for each node of a level and each item


# Copies and threads


@pytest.mark.parametrize("name", ["integers", "strings", "sparse", "shared"])
def test_copies_answer_alike(name: str) -> None:
    index = golden_indexes()[name]
    rows = list(index)
    for _ in range(2):  # the second time with whatever the first answers left behind
        for twin in (pickle.loads(pickle.dumps(index)), copy.copy(index), copy.deepcopy(index)):
            assert same(twin, index)
            assert twin.items(rows) == index.items(rows)


@pytest.mark.parametrize("copied", [lambda index: pickle.loads(pickle.dumps(index)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", ["integers", "strings", "sparse", "shared"])
def test_copies_of_an_updated_index_answer_alike_and_go_their_own_ways(name: str, copied: Any, tmp_path: Path) -> None:
    golden_indexes()[name].save_pretrained(tmp_path)
    for index in (golden_indexes()[name], ConstraintIndex.from_pretrained(tmp_path)):
        rows, ids = list(index), list(index.item_ids)
        new: Any = "new" if isinstance(ids[0], str) else 999
        row = [*rows[0][:-2], 77, rows[0][-1]]
        index.remove(ids[1:2])
        index.add([row, rows[-1]], [new, ids[1]])
        view = index.where([*ids[2:], new])
        for one in (index, view):
            twin = copied(one)
            assert list(twin) == list(one)
            assert twin.items([*rows, row]) == one.items([*rows, row])
            assert list(twin.item_ids) == list(one.item_ids)
            assert (twin.num_items, twin.nbytes, repr(twin)) == (one.num_items, one.nbytes, repr(one))
        twin.remove([new])
        assert view.items([row]) == [[new]] != twin.items([row])
        view.remove(ids[2:3])
        assert twin.has_items(ids[2:3]).all()
        index.compact()
        index.save_pretrained(tmp_path / "saved")
        assert same(ConstraintIndex.from_pretrained(tmp_path / "saved"), copied(index))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["integers", "strings", "sparse", "shared"])
def test_torch_may_share_the_arrays_of_a_loaded_index(name: str, tmp_path: Path) -> None:
    """torch.from_numpy warns of arrays that cannot be written to."""
    golden_indexes()[name].save_pretrained(tmp_path)
    loaded = ConstraintIndex.from_pretrained(tmp_path)
    for index in (loaded, pickle.loads(pickle.dumps(loaded)), golden_indexes()[name]):
        for array in items_of(index).arrays().values():
            torch.from_numpy(array)


def test_writing_to_a_loaded_index_leaves_the_file_alone(tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path)
    before = contents(tmp_path)
    loaded = ConstraintIndex.from_pretrained(tmp_path)
    for array in items_of(loaded).arrays().values():
        torch.from_numpy(array).zero_()
        assert not array.any()
    assert contents(tmp_path) == before
    assert same(ConstraintIndex.from_pretrained(tmp_path), golden_indexes()["strings"])


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps files that are mapped")
def test_a_loaded_index_outlives_its_file(tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path)
    loaded = ConstraintIndex.from_pretrained(tmp_path)
    golden_indexes()["integers"].save_pretrained(tmp_path)
    assert same(loaded, golden_indexes()["strings"])
    for path in tmp_path.iterdir():
        path.unlink()
    assert same(loaded, golden_indexes()["strings"])


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps files that are open")
def test_a_save_while_an_index_is_loaded_mixes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = golden_indexes()["strings"], golden_indexes()["sparse"]
    old.save_pretrained(tmp_path / "index")
    new.save_pretrained(tmp_path / "new")
    real = Path.open

    def open_and_replace(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = real(path, *args, **kwargs)
        if path == tmp_path / "index" / ARRAYS_FILE:
            (tmp_path / "new" / ARRAYS_FILE).replace(path)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_and_replace)
        assert same(ConstraintIndex.from_pretrained(tmp_path / "index"), old)
    assert same(ConstraintIndex.from_pretrained(tmp_path / "index"), new)


def test_threads_share_an_index() -> None:
    index = ConstraintIndex.from_sequences(
        [[5, 7, row % 50] if row % 2 else [row % 50 + 3] for row in range(500)], eos_token_id=EOS
    )
    rows = list(index)
    twin = copy.deepcopy(index)
    expected = twin.items(rows)
    with ThreadPoolExecutor(8) as pool:
        assert all(items == expected for items in pool.map(lambda _: index.items(rows), range(64)))


# Files


@pytest.mark.parametrize("name", ["integers", "strings", "sparse", "shared"])
def test_a_saved_index_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    index = golden_indexes()[name]
    index.save_pretrained(tmp_path / "new" / "folder")
    assert sorted(contents(tmp_path / "new" / "folder")) == ["README.md", JSON_FILE, ARRAYS_FILE]
    loaded = ConstraintIndex.from_pretrained(str(tmp_path / "new" / "folder"))
    assert same(loaded, index)
    assert loaded.items(list(index)) == index.items(list(index))
    loaded.save_pretrained(tmp_path / "again")
    assert {**contents(tmp_path / "again"), "README.md": b""} == {
        **contents(tmp_path / "new" / "folder"),
        "README.md": b"",
    }
    assert same(ConstraintIndex.from_pretrained(tmp_path, subfolder="new/folder"), index)


@pytest.mark.parametrize("golden", [GOLDEN, GOLDEN_XXH3], ids=["sha256", "xxh3"])
@pytest.mark.parametrize("name", ["integers", "strings", "sparse", "shared"])
def test_golden_files_of_format_version_2(name: str, golden: Path, tmp_path: Path) -> None:
    index, loaded = golden_indexes()[name], ConstraintIndex.from_pretrained(golden / name)
    assert same(loaded, index)
    assert loaded.items(list(index)) == index.items(list(index))
    loaded.save_pretrained(tmp_path / "loaded")
    index.save_pretrained(tmp_path / "compiled")
    for folder in ("loaded", "compiled"):
        for file in storage.FILES:
            assert (tmp_path / folder / file).read_bytes() == (GOLDEN_XXH3 / name / file).read_bytes()


def test_the_golden_files_hold_every_kind_of_array() -> None:
    arrays = {name: items_of(index).arrays() for name, index in golden_indexes().items()}
    kinds = {re.sub(r"\d", "N", name) for name in chain(*arrays.values())}
    assert kinds == {
        "tokens",
        "children.N.offsets",
        "children.N.exceptions",
        "items.offsets",
        "items.exceptions",
        "items.numbers",
        "items.positions",
        "item_ids.values",
        "item_ids.bounds",
        "item_ids.order",
    }
    assert arrays["shared"]["items.offsets"].tolist() == [0, 2, 4, 5]
    assert "items.exceptions" not in arrays["shared"]
    assert "item_ids.order" not in arrays["shared"]
    assert not [name for name in arrays["sparse"] if name.startswith("item_ids")]
    assert arrays["sparse"]["children.3.exceptions"].tolist() == [0, 5, 10, 11, 15]
    assert arrays["sparse"]["children.3.offsets"].tolist() == [0, -1, -2, -3, -2, -3]
    assert arrays["sparse"]["children.2.exceptions"].tolist() == []
    assert arrays["sparse"]["children.2.offsets"].tolist() == [0]
    assert arrays["sparse"]["items.exceptions"].tolist() == [12]
    assert arrays["sparse"]["items.offsets"].tolist() == [0, 2]
    assert items_of(golden_indexes()["sparse"]).trie.token_bases == (70_019, 0, 0, 0, 0)


def test_the_json_tells_people_what_is_inside() -> None:
    described = json.loads((GOLDEN_XXH3 / "strings" / JSON_FILE).read_text(encoding="utf-8"))
    assert {"arrays_xxh3", "arrays_sha256", "sha256"} <= described.keys()
    assert {name: value for name, value in described.items() if "sha256" not in name and "xxh3" not in name} == {
        "format_version": 2,
        "num_sequences": 4,
        "num_items": 5,
        "max_length": 4,
        "eos_token_id": 1,
        "item_id_type": "string",
        "level_sizes": [2, 3, 2, 1],
        "branching": [2, 2, 2, 1],
        "childless": [0, 0, 2, 1],
        "token_bases": [0, 0, 0, 0],
        "items_of_a_sequence": 2,
    }


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")
def test_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    ConstraintIndex.from_sequences(ROWS).save_pretrained(tmp_path)
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def edit(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | fields, indent=2).encode()


def with_metadata(value: Any) -> Callable[[bytes], bytes]:
    """Other metadata in the header of a safetensors; safetensors itself writes texts only."""

    def damage(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.dumps(json.loads(data[8 : 8 + length]) | {"__metadata__": value}).encode()
        return len(header).to_bytes(8, "little") + header + data[8 + length :]

    return damage


def other_tensors(data: bytes) -> bytes:
    return safetensors.numpy.save({"weight": np.zeros(3)})


def relabel(data: bytes) -> bytes:
    """The right header on other arrays."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    arrays = safetensors.numpy.load(data)
    return safetensors.numpy.save({**arrays, "tokens": arrays["tokens"] + 1}, metadata=header["__metadata__"])


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


DAMAGES = [
    *[
        pytest.param(ARRAYS_FILE, lambda data, n=n: data[:n], "cut short", id=f"cut to {n}")
        for n in (0, 7, 8, 100, -1)
    ],
    pytest.param(ARRAYS_FILE, lambda data: data + b"\0", "no safetensors file", id="a byte too many"),
    pytest.param(ARRAYS_FILE, other_tensors, "holds no constraint index", id="another safetensors"),
    *[
        pytest.param(
            ARRAYS_FILE, with_metadata(value), "holds no constraint index, expected|no safetensors file", id=f"{value}"
        )
        for value in (
            None,
            7,
            "constraint_index",
            ["constraint_index"],
            {"constraint_index": {}},
            {"constraint_index": 7},
        )
    ],
    pytest.param(ARRAYS_FILE, with_metadata({"constraint_index": "\ud800"}), "is no description", id="surrogate"),
    pytest.param(ARRAYS_FILE, with_metadata({"constraint_index": "[" * 9999}), "is no description", id="deep text"),
    pytest.param(ARRAYS_FILE, relabel, "was altered after it was saved", id="other arrays"),
    pytest.param(JSON_FILE, lambda data: b"", "is no description of a constraint index", id="empty json"),
    pytest.param(JSON_FILE, lambda data: data[:-5], "is no description of a constraint index", id="cut json"),
    pytest.param(JSON_FILE, lambda data: b"[" * 100_000, "is no description", id="deep json"),
    pytest.param(JSON_FILE, lambda data: b"[1]", "is no description", id="json of a list"),
    pytest.param(JSON_FILE, lambda data: b"\xff\xfe\0", "is no description", id="json of no text"),
    pytest.param(JSON_FILE, edit(eos_token_id=7), "was altered after it was saved", id="eos"),
    pytest.param(JSON_FILE, edit(num_items=7), "was altered after it was saved", id="num_items"),
    pytest.param(JSON_FILE, edit(branching=[9]), "was altered after it was saved", id="branching"),
    pytest.param(JSON_FILE, edit(sha256="0" * 64), "was altered after it was saved", id="digest"),
    pytest.param(JSON_FILE, edit(arrays_xxh3="0" * 32), "was altered after it was saved", id="digest of arrays"),
    pytest.param(JSON_FILE, edit(format_version="1"), "was altered after it was saved", id="version of text"),
    pytest.param(JSON_FILE, edit(format_version=1), "was altered after it was saved", id="version 1"),
    pytest.param(JSON_FILE, edit(format_version=0), "was altered after it was saved", id="version 0"),
    pytest.param(JSON_FILE, edit(extra=1), "was altered after it was saved", id="extra field"),
    pytest.param(
        JSON_FILE, edit(format_version=3), "has format_version 3, expected at most 2: .*pip install", id="newer"
    ),
]


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGES)
def test_damaged_files_are_refused(file: str, damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path)
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes()))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        ConstraintIndex.from_pretrained(tmp_path)
    assert str(path) in str(caught.value)
    assert ": download it or save it again" in str(caught.value) or "pip install" in str(caught.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("file", storage.FILES)
@pytest.mark.parametrize("bit", [0, 5])
def test_any_flipped_bit_is_refused(file: str, bit: int, tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path)
    data = (tmp_path / file).read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << bit
        (tmp_path / file).write_bytes(flipped)
        with pytest.raises(ValueError, match="download it or save it again|pip install"):
            ConstraintIndex.from_pretrained(tmp_path)


def test_a_safetensors_of_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ConstraintIndex.from_sequences(ROWS)
    index.save_pretrained(tmp_path)
    old_json = (tmp_path / JSON_FILE).read_bytes()
    monkeypatch.setattr(storage, "FORMAT_VERSION", 3)
    index.save_pretrained(tmp_path)
    monkeypatch.undo()
    for _ in range(2):  # the second time with the JSON that an interrupted save leaves
        with pytest.raises(ValueError, match=r"has format_version 3, expected at most 2: a newer hf_gr wrote it"):
            ConstraintIndex.from_pretrained(tmp_path)
        (tmp_path / JSON_FILE).write_bytes(old_json)


@pytest.mark.parametrize("file", storage.FILES)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_is_never_loaded(file: str, protocol: int, tmp_path: Path) -> None:
    ConstraintIndex.from_sequences(ROWS).save_pretrained(tmp_path)
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung), protocol=protocol)
    pickle.loads(trap).close()
    assert sprung.exists()  # the trap works
    sprung.unlink()
    (tmp_path / file).write_bytes(trap)
    with pytest.raises(ValueError, match=f"{file} is no"):
        ConstraintIndex.from_pretrained(tmp_path)
    assert not sprung.exists()


@pytest.mark.parametrize("file", storage.FILES)
def test_a_missing_file_is_named(file: str, tmp_path: Path) -> None:
    ConstraintIndex.from_sequences(ROWS).save_pretrained(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} has no {file}, expected both"):
        ConstraintIndex.from_pretrained(tmp_path)


def plant_in(index: ConstraintIndex, folder: Path, name: str, value: Any) -> None:
    """Save an index with one array or field replaced, or omitted for None, and with digests that fit."""
    items = items_of(index)
    fields = {"num_items": index.num_items, "num_sequences": len(index), "max_length": index.max_length}
    fields |= {"eos_token_id": index.eos_token_id, **storage.describe_items(items)}
    arrays: dict[str, Any] = items.arrays()
    changed: Any = arrays if name in arrays or "." in name else fields
    changed[name] = value(changed[name]) if callable(value) else value
    if value is None:
        del changed[name]
    storage.save(folder, fields, arrays, card="")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", None),
        ("children.0.offsets", None),
        ("items.positions", None),
        ("tokens", lambda a: a.astype(np.float64)),
        ("level_sizes", None),
        ("branching", lambda sizes: sizes[:-1]),
        ("eos_token_id", lambda _: "2"),
    ],
)
def test_a_file_that_lacks_something_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    """The digests fit, since whoever makes a file can make them: only what cannot be read at all is refused then."""
    index = ConstraintIndex.from_sequences(SPARSE, item_ids=[f"n{number}" for number in range(23)], eos_token_id=EOS)
    plant_in(index, tmp_path, "num_items", 23)
    assert same(ConstraintIndex.from_pretrained(tmp_path), index)
    plant_in(index, tmp_path, name, value)
    with pytest.raises(ValueError, match=r"holds no constraint index|no safetensors file"):
        ConstraintIndex.from_pretrained(tmp_path)


# What is compared with a digest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An index's folder."""
    golden_indexes()["sparse"].save_pretrained(tmp_path)
    return tmp_path


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_unless_nothing_is_to_be_read(saved: Path) -> None:
    """Of 163 generations with a catalogue larger than 64 MB and a flipped bit, 10 named no item."""
    assert same(ConstraintIndex.from_pretrained(saved), golden_indexes()["sparse"])
    flip_last_bit(saved / ARRAYS_FILE)
    for verify in (None, True):
        with pytest.raises(ValueError, match="was altered after it was saved"):
            ConstraintIndex.from_pretrained(saved, verify=verify)
    assert not same(ConstraintIndex.from_pretrained(saved, verify=False), golden_indexes()["sparse"])


def test_a_file_without_the_fast_digest_is_compared_with_the_one_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(GOLDEN / "sparse", tmp_path / "old")
    assert same(ConstraintIndex.from_pretrained(folder), golden_indexes()["sparse"])
    flip_last_bit(folder / ARRAYS_FILE)
    with pytest.raises(ValueError, match="was altered after it was saved"):
        ConstraintIndex.from_pretrained(folder)


@pytest.mark.parametrize("dropped", [["arrays_xxh3"], ["arrays_sha256"], ["arrays_xxh3", "arrays_sha256"]])
def test_a_file_without_any_digest_is_refused(
    dropped: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "DIGESTS", {n: d for n, d in storage.DIGESTS.items() if n not in dropped})
    golden_indexes()["sparse"].save_pretrained(tmp_path)
    monkeypatch.undo()
    if len(dropped) == 1:
        assert same(ConstraintIndex.from_pretrained(tmp_path, verify=True), golden_indexes()["sparse"])
    else:
        with pytest.raises(ValueError, match="was altered after it was saved"):
            ConstraintIndex.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("verify", "reads"),
    [(None, ["arrays_xxh3"]), (False, []), (True, ["arrays_xxh3", "arrays_sha256"])],
)
def test_what_is_read_of_a_file(
    verify: bool | None, reads: list[str], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    digest = storage.arrays_digest
    monkeypatch.setattr(storage, "arrays_digest", lambda arrays, name: calls.append(name) or digest(arrays, name))
    loaded = ConstraintIndex.from_pretrained(saved, verify=verify)
    assert calls == reads
    assert loaded.allowed_next_tokens([70_011, 7, 5]) == [299, 300]


@pytest.mark.parametrize("verify", [None, False, True])
def test_a_file_that_is_cut_short_is_always_found(verify: bool | None, saved: Path) -> None:
    data = (saved / ARRAYS_FILE).read_bytes()
    for size in {*range(0, len(data), 7), len(data) - 1, len(data) - 2}:
        (saved / ARRAYS_FILE).write_bytes(data[:size])
        with pytest.raises(ValueError, match="is cut short"):
            ConstraintIndex.from_pretrained(saved, verify=verify)


def test_arrays_of_a_file_may_lie_at_odd_places(tmp_path: Path) -> None:
    """safetensors aligns them; nobody else needs to."""
    index = golden_indexes()["strings"]
    index.save_pretrained(tmp_path)
    data = (tmp_path / ARRAYS_FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    for spaces in range(8):
        padded = (length + spaces).to_bytes(8, "little") + data[8 : 8 + length] + b" " * spaces + data[8 + length :]
        (tmp_path / ARRAYS_FILE).write_bytes(padded)
        assert same(ConstraintIndex.from_pretrained(tmp_path), index)


class Interrupted(BaseException):
    """Like KeyboardInterrupt: nobody catches it."""


STEPS = [
    ("save_file", 1),
    ("fsync", 1),
    ("fsync", 2),
    ("fsync", 3),
    ("replace", 1),
    ("replace", 2),
    ("replace", 3),
]
ERRORS = [OSError(errno.ENOSPC, "No space left on device"), Interrupted()]


def fail_at(monkeypatch: pytest.MonkeyPatch, step: str, number: int, error: BaseException) -> list[int]:
    owner: Any = {"save_file": safetensors.numpy, "fsync": os, "replace": Path, "write_text": Path}[step]
    real = getattr(owner, step)
    calls: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == number:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, step, fail)
    return calls


@pytest.mark.parametrize("error", ERRORS, ids=["disk full", "interrupted"])
@pytest.mark.parametrize(("step", "number"), [*STEPS, ("write_text", 1), ("write_text", 2)])
def test_a_save_that_fails_leaves_an_index_and_nothing_else(
    step: str, number: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS), ConstraintIndex.from_sequences(ROWS)
    old.save_pretrained(tmp_path)
    (tmp_path / "README.md").unlink()
    with monkeypatch.context() as patch:
        calls = fail_at(patch, step, number, error)
        with pytest.raises(type(error)):
            new.save_pretrained(tmp_path)
        assert len(calls) == number
    assert sorted(path.name for path in tmp_path.iterdir()) == [JSON_FILE, ARRAYS_FILE]
    replaced = step == "replace" and number > 1
    assert same(ConstraintIndex.from_pretrained(tmp_path), new if replaced else old)
    new.save_pretrained(tmp_path)
    assert same(ConstraintIndex.from_pretrained(tmp_path), new)


FULL_DISK = """
import resource, signal, sys
from hf_gr import ConstraintIndex
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
index = ConstraintIndex.from_sequences([[token, 7] for token in range(9000)])
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    index.save_pretrained(sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit of a file's size")
def test_a_disk_that_is_full_is_an_os_error(tmp_path: Path) -> None:
    old = golden_indexes()["strings"]
    old.save_pretrained(tmp_path)
    before = contents(tmp_path)
    run = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"{ARRAYS_FILE} cannot be written: " in run.stdout
    assert contents(tmp_path) == before
    assert same(ConstraintIndex.from_pretrained(tmp_path), old)


@pytest.mark.parametrize(("step", "number"), [*STEPS, ("write_text", 1)])
def test_a_first_save_that_fails_leaves_no_half_index(
    step: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = ConstraintIndex.from_sequences(ROWS)
    with monkeypatch.context() as patch:
        fail_at(patch, step, number, ERRORS[0])
        with pytest.raises(OSError, match="No space left"):
            index.save_pretrained(tmp_path)
    if step == "replace" and number == 3:  # only the card is missing
        assert same(ConstraintIndex.from_pretrained(tmp_path), index)
    else:
        with pytest.raises(ValueError, match=f"has no {JSON_FILE}"):
            ConstraintIndex.from_pretrained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize("order", [storage.FILES, storage.FILES[::-1]])
def test_a_crash_between_the_two_files_leaves_an_index(order: tuple[str, str], tmp_path: Path) -> None:
    """After a power failure either file may be the new one."""
    old, new = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS), ConstraintIndex.from_sequences(ROWS)
    old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    (tmp_path / "old" / order[0]).write_bytes((tmp_path / "new" / order[0]).read_bytes())
    assert same(ConstraintIndex.from_pretrained(tmp_path / "old"), new if order[0] == ARRAYS_FILE else old)


def test_saving_over_a_damaged_index_mends_it(tmp_path: Path) -> None:
    index = ConstraintIndex.from_sequences(ROWS)
    for file in storage.FILES:
        (tmp_path / file).write_bytes(b"damaged")
    index.save_pretrained(tmp_path)
    assert same(ConstraintIndex.from_pretrained(tmp_path), index)


def test_an_index_lives_in_a_models_folder(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("the model's card")
    (tmp_path / "config.json").write_text("{}")
    ConstraintIndex.from_sequences(ROWS).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "the model's card"
    assert (tmp_path / "config.json").read_text() == "{}"
    assert sorted(contents(tmp_path)) == sorted(["README.md", "config.json", *storage.FILES])


def test_saving_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="save_directory='.*file' is a file, expected a folder: name another one"):
        ConstraintIndex.from_sequences(ROWS).save_pretrained(tmp_path / "file")
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("folder", ["catalogue", 'a "b" {c}'])
def test_the_card_is_a_model_card(folder: str, tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path / folder)
    card = huggingface_hub.ModelCard.load(tmp_path / folder / "README.md")
    assert card.data.library_name == "hf_gr"
    assert "generative-recommendation" in card.data.tags
    assert f"ConstraintIndex.from_pretrained({json.dumps(folder)})" in card.text
    text = " ".join(card.text.split())
    assert "4 token sequences for 5 items, up to 4 tokens each including the end token 1" in text
    assert "| 2 | 3 | 1.50 | 2 |" in card.text
    assert "at least 70001 tokens" in card.text
    code = card.text.split("```python")[1].split("```")[0]
    compile(code, "README.md", "exec")


def test_the_card_names_the_folder_even_for_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "catalogue").mkdir()
    monkeypatch.chdir(tmp_path / "catalogue")
    ConstraintIndex.from_sequences(ROWS).save_pretrained(".")
    assert 'from_pretrained("catalogue")' in Path("README.md").read_text(encoding="utf-8")
    assert len(ConstraintIndex.from_pretrained(".")) == 3


# The Hub


class FakeApi:
    """What `push_to_hub` needs of HfApi, and a note of what it was asked."""

    asked: dict[str, Any]
    uploaded: dict[str, bytes]
    has_card = False

    def __init__(self, token: Any = None) -> None:
        type(self).asked, type(self).uploaded = {"token": token}, {}

    def create_repo(self, repo_id: str, **arguments: Any) -> Any:
        self.asked["create_repo"] = (repo_id, arguments)
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def create_branch(self, repo_id: str, **arguments: Any) -> None:
        self.asked["create_branch"] = (repo_id, arguments)

    def file_exists(self, repo_id: str, filename: str, **arguments: Any) -> bool:
        self.asked["file_exists"] = (repo_id, filename, arguments)
        return self.has_card

    def upload_folder(self, *, folder_path: str, ignore_patterns: list[str] | None, **arguments: Any) -> Any:
        self.asked["upload_folder"] = arguments
        files = contents(Path(folder_path)).items()
        self.uploaded.update({name: data for name, data in files if name not in (ignore_patterns or ())})
        return SimpleNamespace(commit_url="https://huggingface.co/me/catalogue/commit/1")


@pytest.mark.parametrize("repo_id", ["me/catalogue", "catalogue"])
def test_push_to_hub_makes_a_repository_and_uploads_three_files(
    repo_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    index = ConstraintIndex.from_sequences(ROWS)
    assert index.push_to_hub(repo_id, private=True, token="secret", commit_message="hello").endswith("/commit/1")
    assert FakeApi.asked["token"] == "secret"
    assert FakeApi.asked["create_repo"] == (repo_id, {"private": True, "exist_ok": True})
    assert "create_branch" not in FakeApi.asked
    assert FakeApi.asked["upload_folder"] == {
        "repo_id": "me/catalogue",
        "revision": None,
        "commit_message": "hello",
        "create_pr": False,
    }
    assert sorted(FakeApi.uploaded) == ["README.md", JSON_FILE, ARRAYS_FILE]
    assert b'ConstraintIndex.from_pretrained("me/catalogue")' in FakeApi.uploaded["README.md"]
    for name, data in FakeApi.uploaded.items():
        (tmp_path / name).write_bytes(data)
    assert same(ConstraintIndex.from_pretrained(tmp_path), index)


def test_push_to_hub_keeps_a_card_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "has_card", True)
    ConstraintIndex.from_sequences(ROWS).push_to_hub("me/catalogue", revision="next")
    assert FakeApi.asked["create_branch"] == ("me/catalogue", {"branch": "next", "exist_ok": True})
    assert FakeApi.asked["file_exists"] == ("me/catalogue", "README.md", {"revision": "next"})
    assert sorted(FakeApi.uploaded) == [JSON_FILE, ARRAYS_FILE]


def test_a_pull_request_makes_no_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    ConstraintIndex.from_sequences(ROWS).push_to_hub("me/catalogue", revision="main", create_pr=True)
    assert "create_branch" not in FakeApi.asked
    assert FakeApi.asked["upload_folder"]["create_pr"] is True


def test_from_pretrained_downloads_with_every_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ConstraintIndex.from_sequences(ROWS)
    index.save_pretrained(tmp_path / "snapshot")
    asked: list[Any] = []

    def download(repo_id: str, filename: str, **arguments: Any) -> str:
        asked.append((repo_id, filename, arguments))
        return str(tmp_path / "snapshot" / filename)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    arguments = {"revision": "v1", "token": "t", "cache_dir": "cache", "local_files_only": True, "subfolder": "folder"}
    assert same(ConstraintIndex.from_pretrained("me/catalogue", **arguments), index)
    assert asked == [("me/catalogue", file, arguments) for file in storage.FILES]


def http_error(kind: Any) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "404 Client Error")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HFValidationError("Repo id must be"), "is no folder here and no repository id, expected one of them"),
        (http_error(RepositoryNotFoundError), "the Hub gives no .*json for such a repository .*404.*: check the name"),
        (http_error(RevisionNotFoundError), "check the name, revision= and subfolder="),
        (http_error(EntryNotFoundError), "check the name, revision= and subfolder="),
        (
            http_error(LocalEntryNotFoundError),
            "is not in the cache, expected one of them: check the path, or download",
        ),
        (OfflineModeIsEnabled("offline"), "is not in the cache, expected one of them: check the path, or download"),
    ],
)
def test_what_the_hub_lacks_is_a_clear_error(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ValueError, match=f"'me/catalogue' .*{message}"):
        ConstraintIndex.from_pretrained("me/catalogue")


def test_a_path_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in [
        (tmp_path / "nowhere", "nowhere' is not there, expected a folder that holds constraint_index.json and"),
        (str(tmp_path / "nowhere"), "nowhere' is no folder here and no repository id, expected one of them"),
        ("./no/such/folder", "'./no/such/folder' is no folder here and no repository id"),
        (tmp_path / "file", "file' is a file, expected a folder"),
        (str(tmp_path / "file"), "file' is a file, expected a folder"),
        (tmp_path, "has no constraint_index.json"),
    ]:
        with pytest.raises(ValueError, match=message):
            ConstraintIndex.from_pretrained(path)
    with pytest.raises(ValueError, match=r"me/catalogue-of-nobody' is no folder here"):
        ConstraintIndex.from_pretrained("me/catalogue-of-nobody", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(ValueError, match="nowhere has no constraint_index.json"):
        ConstraintIndex.from_pretrained(tmp_path, subfolder="nowhere")
