# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged files: each is refused by a `ValueError` that names it, or loads as what was saved.

Damage is any change of bytes. A forgery has valid digests: a head is refused, or it is a sound file of something else,
as it could have been saved; an index may be anything, since its digests alone are compared. Tables
have no digests: what is built of them holds together.
"""

import hashlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hf_gr import ConstraintIndex, DraftHead, DraftHeadConfig
from hf_gr.catalogue import storage
from hf_gr.commands.index_input import compile_index
from hf_gr.files import draft_head as head_files

pytestmark = pytest.mark.slow

PER_CASE = 25  # files: a case alone is still fast, and the choice of a case costs little
GOLDEN = Path(__file__).parents[1] / "golden"
FIXES = ("download it or save it again", 'pip install -U "hf-gr"', "expected both")
ODD = [None, True, False, -1, 0, 1, 2, 7, 2**15, 2**31, 2**63, 2**64, 1e308, -0.5, float("nan"), float("inf")]
ODD += ["", "x", "\ud800", "\0", "F32", "I64", "BOOL", [], {}, [[]], [0], [-1, 5], {"a": 1}, [None] * 3, "9" * 30]

Files = dict[str, bytes]


def damaged(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """The bytes with one to three changes; `other` lends some."""
    for _ in range(int(rng.integers(1, 4))):
        at, end = sorted(rng.integers(0, len(data) + 1, 2).tolist())
        end = min(end, at + int(rng.integers(1, 64)))
        kind = rng.choice(["flip", "flip", "flip", "cut", "zeros", "gone", "twice", "lent"])
        if kind == "flip" and end > at:
            data = data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        else:
            place = int(rng.integers(len(other) + 1))
            block = {"zeros": bytes(end - at), "twice": data[at:end] * 2, "lent": other[place : place + end - at]}
            data = data[:at] + block.get(str(kind), b"") + data[end:]
    return data


def altered(rng: np.random.Generator, value: Any, depth: int = 0) -> Any:
    """JSON with one place changed: a value, a key, or one more or less of them."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = str(rng.choice(list(value)))
        kind = rng.choice(["inside", "inside", "inside", "drop", "name", "more"])
        if kind == "inside":
            return value | {name: altered(rng, value[name], depth + 1)}
        rest = {key: each for key, each in value.items() if key != name}
        return rest if kind == "drop" else (rest if kind == "name" else value) | {name + "x": value[name]}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = int(rng.integers(len(value)))
        kind = rng.choice(["inside", "inside", "drop", "twice"])
        new = {"inside": [altered(rng, value[at], depth + 1)], "drop": [], "twice": [value[at]] * 2}[str(kind)]
        return [*value[:at], *new, *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + int(rng.choice([-2, -1, 1, 2, 256]))
    if isinstance(value, str) and rng.random() < 0.3:
        return value + "\u202e"
    return json.loads("[" * 500 + "]" * 500) if rng.random() < 0.02 else ODD[int(rng.integers(len(ODD)))]


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors, and its tensors' bytes."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


def signed(fields: dict[str, Any], **digests: str) -> str:
    """A description with digests that fit, made without the library's code."""
    fields = {name: value for name, value in fields.items() if name != "sha256"} | digests
    text = json.dumps(fields, sort_keys=True)
    return json.dumps(fields | {"sha256": hashlib.sha256(text.encode()).hexdigest()})


def variants(rng: np.random.Generator, files: Files, other: Files, entry: str) -> Iterator[tuple[str, Files]]:
    """Endless damaged and forged forms of a pair of JSON and safetensors."""
    json_file, tensors_file = files
    while True:
        kind = str(rng.choice(["damage", "damage", "damage", "header", "json", "metadata", "forged", "swap"]))
        made = dict(files)
        if kind == "damage":
            for name in files:
                if rng.random() < (0.7 if name == tensors_file else 0.4):
                    made[name] = damaged(rng, files[name], other[name])
        elif kind == "header":
            header, rest = header_of(files[tensors_file])
            made[tensors_file] = with_header(altered(rng, header), rest)
        elif kind == "json":
            described = json.loads(files[json_file])
            change = altered(rng, described)
            is_signed = isinstance(change, dict) and rng.random() < 0.5
            made[json_file] = (signed(change) if is_signed else json.dumps(change)).encode()
        elif kind == "metadata":  # whatever it is, it is no text that fits
            header, rest = header_of(files[tensors_file])
            header["__metadata__"] = altered(rng, {entry: json.loads(files[json_file])})
            made[tensors_file] = with_header(header, rest)
        elif kind == "forged":
            header, rest = header_of(files[tensors_file])
            change = altered(rng, json.loads(header["__metadata__"][entry]))
            text = signed(change) if isinstance(change, dict) else json.dumps(change)
            header["__metadata__"][entry] = text
            made |= {json_file: text.encode(), tensors_file: with_header(header, rest)}
        else:
            made[json_file] = other[json_file]
        yield kind, made


def refusal(name: Path, load: Callable[[], Any], *, fixes: tuple[str, ...] = ("",)) -> Any:
    """What is loaded; None for a refusal as documented, which names the file and the fix. Anything else fails."""
    try:
        return load()
    except ValueError as error:
        documented = type(error) is ValueError and str(name) in str(error) and any(fix in str(error) for fix in fixes)
        if documented:
            return None
        raise


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def write(folder: Path, files: Files) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


@cache
def indexes() -> list[tuple[Files, ConstraintIndex]]:
    """Files of catalogues of every kind, and the catalogues."""
    rng = np.random.default_rng(0)
    made: list[ConstraintIndex] = []
    for eos in (None, 1, 60_000):
        for ids in (None, "integers", "strings"):
            for width, codes in ((1, 40), (3, 5), (4, 70_000), (6, 3)):
                rows = rng.integers(2, 2 + codes, (int(rng.integers(1, 60)), width)).tolist()
                if eos is not None:
                    rows = [row[: int(rng.integers(1, width + 1))] for row in rows]
                names = {"integers": [*range(9, 9 + len(rows))][::-1], "strings": [f"é{n}" for n in range(len(rows))]}
                made.append(ConstraintIndex.from_sequences(rows, item_ids=names.get(ids or ""), eos_token_id=eos))
    found = [(_saved(index), index) for index in made]
    for folder in sorted(GOLDEN.glob("index_v*/*")):
        files = {name: (folder / name).read_bytes() for name in storage.FILES}
        found.append((files, ConstraintIndex.from_pretrained(folder, verify=True)))
    return found


def _saved(saved: Any) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        names = storage.FILES if isinstance(saved, ConstraintIndex) else head_files.FILES
        return {name: Path(folder, name).read_bytes() for name in names}


def same_index(one: ConstraintIndex, other: ConstraintIndex) -> bool:
    """All of both, to the bit."""
    mine, theirs = (index.snapshot.items for index in (one, other))
    arrays, others = mine.arrays(), theirs.arrays()
    return (
        one.eos_token_id == other.eos_token_id
        and mine.trie.token_bases == theirs.trie.token_bases
        and [fanout.num_children for fanout in mine.trie.fanouts]
        == [fanout.num_children for fanout in theirs.trie.fanouts]
        and arrays.keys() == others.keys()
        and all(arrays[name].dtype == others[name].dtype for name in arrays)
        and all(np.array_equal(arrays[name], others[name]) for name in arrays)
    )


def _check_catalogue(index: ConstraintIndex) -> None:
    """Every item is found by its sequence, and its sequence by it; compiling them gives the same answers."""
    sequences = list(index)
    items: list[list[Any]] = index.items(sequences)
    assert len(sequences) == len(index)
    assert sum(map(len, items)) == index.num_items
    pairs = [(row, item) for row, found in zip(sequences, items, strict=True) for item in found]
    again = ConstraintIndex.from_sequences(
        [row for row, _ in pairs], item_ids=[item for _, item in pairs], eos_token_id=index.eos_token_id
    )
    assert list(again) == sequences
    assert all(index.has_items([item for _, item in pairs]))
    kept = {item for _, item in pairs[::2]}
    assert index.where(list(kept)).items(sequences) == [[item for item in found if item in kept] for found in items]


@cache
def heads() -> list[tuple[Files, DraftHead]]:
    made: list[DraftHead] = []
    for number, transition in enumerate(("rnn", "add", "none")):
        for dtype in (torch.float32, torch.bfloat16):
            config = DraftHeadConfig(4, (3, 2), placeholder_token_ids=(7, 8), transition=transition)
            torch.manual_seed(number)
            made.append(DraftHead(config, [[1, 2, 3], [2, 6]]).to(dtype).eval())
    found = [(_saved(head), head) for head in made]
    for folder in sorted(GOLDEN.glob("head_v*")):
        files = {name: (folder / name).read_bytes() for name in head_files.FILES}
        found.append((files, DraftHead.from_pretrained(folder)))
    return found


def same_head(one: DraftHead, other: DraftHead) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return one.config == other.config and all(torch.equal(mine[name], theirs[name]) for name in {*mine, *theirs})


@pytest.mark.parametrize("kind", ["index", "head"])
def test_files_are_refused_or_equal(kind: str, fuzz: Any, folder: Path) -> None:
    of_index = kind == "index"
    every: list[tuple[Files, Any]] = [*(indexes() if of_index else heads())]
    for case in fuzz:
        rng = case.rng
        files, saved = every[int(rng.integers(len(every)))]
        other, _ = every[int(rng.integers(len(every)))]
        made = variants(rng, files, other, "constraint_index" if of_index else "draft_head")
        for _ in range(PER_CASE):
            change, changed = next(made)
            write(folder, changed)
            how: Any = {"verify": (None, True, False)[int(rng.integers(3))]} if of_index else {}
            loader = ConstraintIndex if of_index else DraftHead
            loaded: Any = refusal(folder, lambda of=loader, how=how: of.from_pretrained(folder, **how), fixes=FIXES)
            fuzz.count(files=1, refused=int(loaded is None))
            if loaded is None:
                continue
            if of_index:
                if change == "forged" or how["verify"] is False and change not in ("json", "swap"):
                    continue  # what is not to be read may be anything, and whoever forges digests is to be trusted
                assert same_index(loaded, saved), f"{change}, {how}: another catalogue"
            elif not same_head(loaded, saved):
                assert change == "forged", f"{change}: another head"
                # A name or a number that the weights do not tell: the head is sound.
                config, dtype = loaded.config, next(loaded.parameters()).dtype
                hidden = torch.zeros(1, 1 + config.num_levels, config.hidden_size, dtype=dtype)
                tokens = torch.tensor([[int(loaded.codebook(level)[0]) for level in range(config.num_levels)]])
                assert all(logits.isfinite().all() for logits in loaded(hidden, tokens))


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_tables_are_refused_or_read(fuzz: Any, ending: str, folder: Path) -> None:
    path = folder / f"items.{ending}"
    for case in fuzz:
        rng = case.rng
        rows = rng.integers(0, 99, (int(rng.integers(1, 12)), 3)).tolist()
        ids = [f"i{number}" if rng.random() < 0.5 else str(number) for number in range(len(rows))]
        if ending == "parquet":
            pq.write_table(pa.table({"sequence": rows, "item_id": ids}), path)
        elif ending == "csv":
            lines = [f"{' '.join(map(str, row))},{item}" for row, item in zip(rows, ids, strict=True)]
            path.write_text("sequence,item_id\n" + "\n".join(lines))
        else:
            lines = [json.dumps({"sequence": row, "item_id": item}) for row, item in zip(rows, ids, strict=True)]
            path.write_text("\n".join(lines))
        whole = path.read_bytes()
        for _ in range(PER_CASE):
            path.write_bytes(damaged(rng, whole, whole))
            index = refusal(
                path, lambda: compile_index([path], format=None, labels=False, given={"eos_token_id": 100})
            )
            fuzz.count(files=1, refused=int(index is None))
            if index is not None:
                _check_catalogue(index)
