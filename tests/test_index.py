# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`ConstraintIndex`: what it takes, what it answers, and that its files survive whatever happens to them."""

import copy
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

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
    """The catalogues of the golden files: both kinds of item ids and of sequences, duplicates, large tokens.

    They are what users have on their disks: if a test of them fails, the code is wrong, or the format has changed and
    needs version 3, with golden files of its own beside these.
    """
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


def items_of(index: ConstraintIndex) -> Items:
    assert index.snapshot.alive is None
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


golden = pytest.mark.parametrize("name", ["integers", "strings", "sparse", "shared"])


@pytest.mark.parametrize(
    "rows",
    [
        *(np.array(ROWS, dtype=dtype) for dtype in (np.int8, np.uint64, ">i4")),
        tuple(map(tuple, ROWS)),
        [[np.int64(token) for token in row] for row in ROWS],
        [torch.tensor(row) for row in ROWS],
        torch.tensor(ROWS, dtype=torch.int32),
        torch.tensor(ROWS).t().contiguous().t(),
        np.asfortranarray(ROWS),
        np.array([*ROWS, None], dtype=object)[:-1],
    ],
)
def test_sequences_of_any_kind(rows: Any) -> None:
    index = ConstraintIndex.from_sequences(rows)
    assert same(index, ConstraintIndex.from_sequences(ROWS))
    assert index.items(rows) == [[0], [1, 3], [2], [1, 3]]


def test_ragged_sequences_and_generators() -> None:
    expected = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS)
    filled = np.array([row + [-1] * (3 - len(row)) for row in RAGGED])
    ended = [[*row, EOS] for row in RAGGED]
    for rows in (map(tuple, RAGGED), map(np.array, RAGGED), map(torch.tensor, RAGGED), filled, ended):
        assert same(ConstraintIndex.from_sequences(rows, eos_token_id=np.int32(EOS)), expected)
    assert list(expected) == [[5, 2], [5, 7, 7, 2], [5, 8, 2], [9, 2]]
    assert expected.items(RAGGED) == [[0], [1], [2, 4], [3], [2, 4]]
    assert repr(expected) == "ConstraintIndex(4 sequences, 5 items, max_length=4, eos_token_id=2, 0.0 MB)"


def test_the_callers_arrays_are_not_kept() -> None:
    rows, ids = np.array(ROWS), np.array([40, 30, 20, 10])
    index = ConstraintIndex.from_sequences(rows, item_ids=ids, eos_token_id=EOS)
    rows[:], ids[:] = 99, 99
    assert index.items(ROWS) == [[40], [30, 10], [20], [30, 10]]


@pytest.mark.parametrize(
    "ids",
    [
        [2**62, -(2**63), 2**63 - 1, 0],
        torch.tensor([4, 3, 2, 1]),
        [np.int16(4), 3, np.uint64(2), 1],
        ["a", "", "\u5bff\u53f8", "a" * 1000],
        np.array(["a", "bc", "d", "e"], dtype=object),
        ["\x00", "a\x00", np.str_("\n"), "\U0001f600"],
    ],
)
def test_item_ids_of_any_kind_come_back_as_pythons_own(ids: Any, tmp_path: Path) -> None:
    index = ConstraintIndex.from_sequences([[5], [6], [7], [8]], item_ids=ids)
    index.save_pretrained(tmp_path)
    for twin in (index, ConstraintIndex.from_pretrained(tmp_path)):
        found = twin.items([[5], [6], [7], [8]])
        assert found == [[item] for item in (ids if isinstance(ids, list) else ids.tolist())]
        assert {type(item) for items in found for item in items} <= {int, str}


def test_integer_ids_have_64_bits_before_and_after_updates() -> None:
    index = ConstraintIndex.from_sequences([[5], [6]], item_ids=np.array([2, 1], dtype=np.int16))
    assert getattr(index.item_ids, "dtype", None) == np.int64
    index.add([[9]], [9])
    assert getattr(index.item_ids, "dtype", None) == np.int64


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([], {}, "sequences is empty, expected at least one token sequence"),
        (np.zeros((3, 0), dtype=int), {}, "sequence 0 is empty, expected at least one token"),
        ([[5, 7], [5]], {}, "sequences have 1 to 2 tokens and eos_token_id=None, expected one length or an end token"),
        (np.array([[5, -1], [6, -1]]), {}, "sequence 0 has token -1 at position 1, expected 0 to 2147483647: pass"),
        (np.array([[5, 7], [-1, -1]]), {"eos_token_id": EOS}, "sequence 1 is empty"),
        ([[5, 2**31]], {}, "sequence 0 has token 2147483648 at position 1, expected 0 to 2147483647: is it"),
        (np.array([[5], [2**64 - 1]], dtype=np.uint64), {}, f"sequence 1 has token {2**64 - 1} at position 0"),
        ([[5, 7], [5, 7.5]], {}, "sequence 1 has 7.5 at position 1"),
        (np.array([[5.0]]), {}, "sequences has dtype float64, expected integers"),
        (torch.tensor(ROWS, dtype=torch.bfloat16), {}, "expected integers: pass token ids"),  # which NumPy lacks
        ([[5, True]], {}, "sequence 0 has True at position 1, expected an integer"),
        (["57"], {}, "sequence 0 is '57', expected a list of token ids: pass token ids, not text"),
        ("57", {}, "sequences is '57', expected"),
        ([5, 7], {}, "sequence 0 is 5, expected a list of token ids"),
        (np.zeros((2, 2, 2), dtype=int), {}, r"sequences has shape \[2, 2, 2\], expected \[N, T\]"),
        ([[[5, 7]]], {}, r"sequence 0 has \[5, 7\] at position 0, expected an integer"),
        (ROWS, {"item_ids": [1, 2, 3]}, "item_ids has 3 entries, expected 4: one for each row"),
        (ROWS, {"item_ids": "abcd"}, "item_ids is 'abcd', expected a list of item ids"),
        (ROWS, {"item_ids": ["a", "b", 3, "d"]}, r"item_ids\[2\]=3, expected all integers or all strings: convert"),
        (ROWS, {"item_ids": [1, 2, True, 4]}, r"item_ids\[2\]=True, expected all integers or all strings"),
        (ROWS, {"item_ids": np.ones((4, 2), dtype=int)}, r"item_ids\[0\]=\[1, 1\]"),
        (ROWS, {"item_ids": np.array([1, 2, 3, 2**63], dtype=np.uint64)}, "item_ids has an integer beyond 64 bits"),
        (ROWS, {"item_ids": ["a", "b", "\ud800", "d"]}, r"item_ids\[2\] is '\\ud800', expected Unicode without"),
        ([[5, EOS, 7]], {"eos_token_id": EOS}, r"sequence 0 is \[5, 2, 7\], expected eos_token_id=2 at its end only"),
        ([[5], [EOS]], {"eos_token_id": EOS}, r"sequence 1 is \[2\], .* after at least one other token"),
        (ROWS, {"eos_token_id": [2, 3]}, r"eos_token_id=\[2, 3\], expected one token id: choose one"),
        (ROWS, {"eos_token_id": -1}, "eos_token_id=-1, expected one token id"),
    ],
)
def test_bad_catalogues_are_refused(rows: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConstraintIndex.from_sequences(rows, **arguments)
    if message.startswith(("sequences has", "expected integers", "sequences is '57'")):
        with pytest.raises(ValueError, match=message):
            ConstraintIndex.from_sequences(ROWS).items(rows)


@pytest.mark.parametrize("row", [[5, 2, 2, 2], [5], [5, -100, -100], [5, -1, 7, 7]])
def test_items_of_generated_rows_of_any_kind(row: list[int]) -> None:
    """Which rows are items: tests/test_trie.py and tests/test_generated.py."""
    index = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS)
    for rows in ([row, row], np.array([row, row]), torch.tensor([row, row]), iter([row, tuple(row)])):
        assert index.items(rows) == [[2, 4], [2, 4]]
    assert index.items(row) == index.items(np.array(row)) == index.items(torch.tensor(row)) == [[2, 4]]
    assert index.items([[5, 7, 7], [6], [], [9, 2, 0, 0]]) == [[1], [], [], [0]]
    assert index.items([]) == index.items(np.zeros((0, 2), dtype=int)) == []
    assert index.items(torch.zeros((2, 0)).long()) == [[], []]


def test_membership() -> None:
    fixed = ConstraintIndex.from_sequences(ROWS)
    assert all(row in fixed for row in ([5, 7], (6, 7), np.array([5, 8]), torch.tensor([5, 8])))
    others = ([5], [5, 7, 0], [], [5.0, 7.0], "57", None, [5, 2**70], [[5, 7], [5, 8]], [5, -1])
    assert not any(row in fixed for row in others)


def test_allowed_next_tokens_of_prefixes_of_any_kind() -> None:
    index = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS)
    assert index.allowed_next_tokens([]) == index.allowed_next_tokens(torch.zeros(0, dtype=torch.long)) == [5, 9]
    for prefix in ((5,), np.array([5]), torch.tensor([5], dtype=torch.int32)):
        assert index.allowed_next_tokens(prefix) == [EOS, 7, 8]
    for prefix in ([5, EOS], [-1], [2**40], [5, EOS, 7, 7, 7, 7]):
        assert index.allowed_next_tokens(prefix) == []
    with pytest.raises(ValueError, match=r"prefix has shape \[2, 1\], expected one sequence"):
        index.allowed_next_tokens([[5], [5]])  # type: ignore[list-item]


@pytest.mark.parametrize("copied", [lambda index: pickle.loads(pickle.dumps(index)), copy.copy, copy.deepcopy])
def test_copies_of_an_updated_index_answer_alike_and_go_their_own_ways(copied: Any, tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path)
    for index in (golden_indexes()["strings"], ConstraintIndex.from_pretrained(tmp_path)):
        assert same(copied(index), index)
        rows, ids = list(index), list(index.item_ids)
        index.remove(ids[1:2])
        index.add([[9, 77], rows[-1]], ["new", ids[1]])
        view = index.where([*ids[2:], "new"])
        for one in (index, view):
            twin = copied(one)
            assert list(twin) == list(one)
            assert twin.items([*rows, [9, 77]]) == one.items([*rows, [9, 77]])
            assert twin.item_ids == one.item_ids
        twin.remove(["new"])
        assert view.items([[9, 77]]) == [["new"]] != twin.items([[9, 77]])


@pytest.mark.filterwarnings("error")
def test_torch_may_share_and_change_the_arrays_and_the_file_stays(tmp_path: Path) -> None:
    """torch.from_numpy warns of arrays that cannot be written to."""
    golden_indexes()["strings"].save_pretrained(tmp_path)
    before = contents(tmp_path)
    loaded = ConstraintIndex.from_pretrained(tmp_path)
    for index in (pickle.loads(pickle.dumps(loaded)), golden_indexes()["strings"], loaded):
        for array in items_of(index).arrays().values():
            torch.from_numpy(array).zero_()
            assert not array.any()
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps files that are mapped")
def test_a_loaded_index_outlives_its_file(tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path)
    loaded = ConstraintIndex.from_pretrained(tmp_path)
    golden_indexes()["integers"].save_pretrained(tmp_path)
    assert same(loaded, golden_indexes()["strings"])
    shutil.rmtree(tmp_path)
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


@golden
def test_golden_files_of_format_version_2_and_the_way_back(name: str, tmp_path: Path) -> None:
    index = golden_indexes()[name]
    index.save_pretrained(tmp_path / "compiled" / "here")
    for folder in (GOLDEN / name, GOLDEN_XXH3 / name, tmp_path / "compiled" / "here"):
        loaded = ConstraintIndex.from_pretrained(str(folder))
        assert same(loaded, index)
        assert loaded.items(list(index)) == index.items(list(index))
        loaded.save_pretrained(tmp_path / "again")
        assert sorted(contents(tmp_path / "again")) == ["README.md", JSON_FILE, ARRAYS_FILE]
        for file in storage.FILES:
            assert (tmp_path / "again" / file).read_bytes() == (GOLDEN_XXH3 / name / file).read_bytes()
    assert same(ConstraintIndex.from_pretrained(tmp_path, subfolder="compiled/here"), index)


def edit(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | fields, indent=2).encode()


def other_tensors(data: bytes) -> bytes:
    return safetensors.numpy.save({"weight": np.zeros(3)})


def relabel(data: bytes) -> bytes:
    """The right header on other arrays."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    arrays = safetensors.numpy.load(data)
    return safetensors.numpy.save({**arrays, "tokens": arrays["tokens"] + 1}, metadata=header["__metadata__"])


DAMAGES: list[tuple[str, Callable[[bytes], bytes | None], str]] = [
    (ARRAYS_FILE, lambda data: data + b"\0", "no safetensors file"),
    (ARRAYS_FILE, other_tensors, "holds no constraint index"),
    (ARRAYS_FILE, relabel, "was altered after it was saved"),
    (ARRAYS_FILE, lambda data: None, f"has no {ARRAYS_FILE}, expected both"),
    (JSON_FILE, lambda data: None, f"has no {JSON_FILE}, expected both"),
    (JSON_FILE, lambda data: b"[" * 100_000, "is no description of a constraint index"),
    (JSON_FILE, lambda data: b"\xff\xfe\0", "is no description"),
    (JSON_FILE, edit(eos_token_id=7), "was altered after it was saved"),
    (JSON_FILE, edit(format_version=3), "has format_version 3, expected at most 2: .*pip install"),
]


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_damaged_files_are_refused(file: str, damage: Any, message: str, tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path)
    path = tmp_path / file
    if (damaged := damage(path.read_bytes())) is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        ConstraintIndex.from_pretrained(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("file", storage.FILES)
def test_any_flipped_bit_is_refused(file: str, tmp_path: Path) -> None:
    golden_indexes()["strings"].save_pretrained(tmp_path)
    data = (tmp_path / file).read_bytes()
    for position in range(0, len(data), 11):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        (tmp_path / file).write_bytes(flipped)
        with pytest.raises(ValueError, match="download it or save it again|pip install"):
            ConstraintIndex.from_pretrained(tmp_path)


def save_with(folder: Path, index: ConstraintIndex, name: str = "", value: Any = None, **how: Any) -> None:
    """Save an index with one array or field replaced, or omitted for None; digests fit."""
    items = items_of(index)
    fields = {"num_items": index.num_items, "num_sequences": len(index), "max_length": index.max_length}
    fields |= {"eos_token_id": index.eos_token_id, **storage.describe_items(items)}
    arrays: dict[str, Any] = items.arrays()
    for held in (fields, arrays):
        if name in held:
            held[name] = value(held[name]) if value else None
            held.pop(name) if value is None else None
    storage.save(folder, fields, arrays, card="", **how)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", None),
        ("children.0.offsets", None),
        ("tokens", lambda a: a.astype(np.float64)),
        ("level_sizes", None),
        ("branching", lambda sizes: sizes[:-1]),
        ("eos_token_id", lambda _: "2"),
    ],
)
def test_a_file_that_lacks_something_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    """The digests fit, since whoever makes a file can make them: only what cannot be read at all is refused then."""
    save_with(tmp_path, golden_indexes()["strings"])
    assert same(ConstraintIndex.from_pretrained(tmp_path), golden_indexes()["strings"])
    save_with(tmp_path, golden_indexes()["strings"], name, value)
    with pytest.raises(ValueError, match=r"holds no constraint index|no safetensors file"):
        ConstraintIndex.from_pretrained(tmp_path)


def test_a_safetensors_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """Also beside the JSON of an older one, as an interrupted save leaves it."""
    save_with(tmp_path, golden_indexes()["strings"])
    old_json = (tmp_path / JSON_FILE).read_bytes()
    save_with(tmp_path, golden_indexes()["strings"], version=3)
    (tmp_path / JSON_FILE).write_bytes(old_json)
    with pytest.raises(ValueError, match=r"has format_version 3, expected at most 2: a newer hf_gr wrote it"):
        ConstraintIndex.from_pretrained(tmp_path)


@golden
def test_altered_arrays_are_refused_unless_nothing_is_to_be_read(name: str, tmp_path: Path) -> None:
    """Of 163 generations with a catalogue larger than 64 MB and a flipped bit, 10 named no item."""
    for folder in (GOLDEN / name, GOLDEN_XXH3 / name):  # the older have no XXH3
        copied = shutil.copytree(folder, tmp_path / folder.parent.name)
        data = bytearray((copied / ARRAYS_FILE).read_bytes())
        data[-1] ^= 1
        (copied / ARRAYS_FILE).write_bytes(data)
        for verify in (None, True):
            with pytest.raises(ValueError, match="was altered after it was saved"):
                ConstraintIndex.from_pretrained(copied, verify=verify)
        assert not same(ConstraintIndex.from_pretrained(copied, verify=False), golden_indexes()[name])


def test_sha256_is_compared_on_request_and_some_digest_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = golden_indexes()["sparse"]
    monkeypatch.setitem(storage.DIGESTS, "arrays_sha256", lambda: hashlib.sha256(b"of other arrays"))
    index.save_pretrained(tmp_path / "xxh3")
    monkeypatch.undo()
    index.save_pretrained(tmp_path / "none")
    save_with(tmp_path / "none", index, digests=[])
    assert same(ConstraintIndex.from_pretrained(tmp_path / "xxh3"), index)
    for folder, verify in (("xxh3", True), ("none", None)):
        with pytest.raises(ValueError, match="was altered after it was saved"):
            ConstraintIndex.from_pretrained(tmp_path / folder, verify=verify)


def test_a_file_that_is_cut_short_is_always_found(tmp_path: Path) -> None:
    golden_indexes()["sparse"].save_pretrained(tmp_path)
    data = (tmp_path / ARRAYS_FILE).read_bytes()
    for size in {*range(0, len(data), 49), 7, 8, len(data) - 1}:
        (tmp_path / ARRAYS_FILE).write_bytes(data[:size])
        for verify in (None, False, True):
            with pytest.raises(ValueError, match="is cut short"):
                ConstraintIndex.from_pretrained(tmp_path, verify=verify)


@pytest.mark.parametrize("order", [storage.FILES, storage.FILES[::-1]])
def test_a_crash_between_the_two_files_leaves_an_index(order: tuple[str, str], tmp_path: Path) -> None:
    """After a power failure either file may be the new one."""
    old, new = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS), ConstraintIndex.from_sequences(ROWS)
    old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    (tmp_path / "old" / order[0]).write_bytes((tmp_path / "new" / order[0]).read_bytes())
    assert same(ConstraintIndex.from_pretrained(tmp_path / "old"), new if order[0] == ARRAYS_FILE else old)


def test_saving_mends_a_damaged_index_and_replaces_no_file(tmp_path: Path) -> None:
    index = ConstraintIndex.from_sequences(ROWS)
    for file in storage.FILES:
        (tmp_path / file).write_bytes(b"damaged")
    index.save_pretrained(tmp_path)
    assert same(ConstraintIndex.from_pretrained(tmp_path), index)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="save_directory='.*file' is a file, expected a folder: name another one"):
        index.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_path_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in [
        (tmp_path / "nowhere", "nowhere' is not there, expected a folder that holds constraint_index.json and"),
        (str(tmp_path / "nowhere"), "nowhere' is no folder here and no repository id, expected one of them"),
        (tmp_path / "file", "file' is a file, expected a folder"),
        (tmp_path, "has no constraint_index.json"),
    ]:
        with pytest.raises(ValueError, match=message):
            ConstraintIndex.from_pretrained(path)
    with pytest.raises(ValueError, match=r"me/catalogue-of-nobody' is no folder here"):
        ConstraintIndex.from_pretrained("me/catalogue-of-nobody", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(ValueError, match="nowhere has no constraint_index.json"):
        ConstraintIndex.from_pretrained(tmp_path, subfolder="nowhere")
