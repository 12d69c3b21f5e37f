# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What is saved over and over, state by state, by processes that are killed. Each state says its number.

A child of `jobs_case.SERVER` runs `save_on`; it knows these names without any further import.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_gr import ConstraintIndex, DraftHead, DraftHeadConfig
from hf_gr.files import atomic
from hf_gr.serving.catalogues import LiveCatalogue, Update
from hf_gr.serving.update_log import UpdateLog


class Saver(NamedTuple):
    """One kind of save."""

    save: Callable[[Path, int], Any]  # the state of a number
    load: Callable[[Path], list[int]]  # the numbers of all files that are replaced alone; fails if one is torn
    names: set[str]  # of all files


def index_of(number: int) -> ConstraintIndex:
    rows = [[3 + number % 5, 10 + row, 50 + row % 7] for row in range(3 + number % 40)]
    return ConstraintIndex.from_sequences(rows, item_ids=[1000 * number + row for row in range(len(rows))])


def load_index(folder: Path) -> list[int]:
    index = ConstraintIndex.from_pretrained(folder)
    number = int(index.item_ids[0]) // 1000
    expected = index_of(number)
    assert index.items(list(expected)) == expected.items(list(expected)), (
        f"an index with parts of another than {number}"
    )
    return [number]


def save_head(folder: Path, number: int) -> None:
    sizes = (2, 3 + number % 4)  # the JSON is another one, too
    config = DraftHeadConfig(hidden_size=8, codebook_sizes=sizes, placeholder_token_ids=(), use_placeholders=False)
    head = DraftHead(config, [[3, 4], list(range(5, 5 + sizes[1]))])
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(number)
    head.save_pretrained(folder)


def load_head(folder: Path) -> list[int]:
    head = DraftHead.from_pretrained(folder)
    numbers = {int(value) for parameter in head.parameters() for value in parameter.detach().unique()}
    assert [head.config.codebook_sizes] == [(2, 3 + number % 4) for number in numbers], f"a head of {numbers}"
    return [*numbers]


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (1 + number * 977 % 20_000)


def number_in(path: Path) -> int:
    data = path.read_bytes()
    number = int.from_bytes(data[:4], "big")
    assert data == content(number), f"{path.name} is torn"
    return number


def save_file(folder: Path, number: int) -> None:
    with atomic.replaced_file(folder / "a") as file:
        file.write(content(number))


def save_files(folder: Path, number: int) -> None:
    with atomic.replaced_files(folder, first=("b",)) as work:
        for name in ("a", "b", "c"):
            (work / name).write_bytes(content(number))


def load_files(folder: Path) -> list[int]:
    found = [number_in(folder / name) for name in ("b", "a", "c")]
    assert found == sorted(found, reverse=True), f"{found} in the order in which they are replaced"
    return found


SAVERS = {
    "index": Saver(
        lambda folder, number: index_of(number).save_pretrained(folder),
        load_index,
        {"README.md", "constraint_index.json", "constraint_index.safetensors"},
    ),
    "head": Saver(save_head, load_head, {"README.md", "draft_head_config.json", "draft_head.safetensors"}),
    "file": Saver(save_file, lambda folder: [number_in(folder / "a")], {"a"}),
    "files": Saver(save_files, load_files, {"a", "b", "c"}),
}


def save_on(kind: str, folder: Path, begun: Any, first: int) -> None:
    """Save states from `first` on until killed; `begun` holds the number of the last one begun."""
    torch.set_num_threads(1)
    number = first
    while True:
        begun.value = number
        SAVERS[kind].save(folder, number)
        number += 1


def items_of(number: int) -> list[dict[str, Any]]:
    return [{"item_id": number, "sequence": [4 + number % 9, number]}]


def first_catalogue() -> ConstraintIndex:
    return ConstraintIndex.from_sequences([[3, 7]], item_ids=[0])


def update_on(folder: Path, begun: Any, first: int) -> None:
    """Make one update after the other from `first` on until killed; all before `begun` are acknowledged."""
    catalogue = LiveCatalogue(log=UpdateLog(folder))
    for number in itertools.count(first):
        begun.value = number
        catalogue.apply(Update(items_of(number), idempotency_key=str(number)))
