# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Item ids, all integers or all strings, in flat arrays. Knows no tokens.

Axes: I items.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .sequences import is_integer, to_host
from .trie import Array, smallest_dtype

ItemId = int | str


@dataclass(frozen=True, eq=False)
class ItemIds:
    """Packed item ids.

    Attributes:
        values: `[I]` integers, or the UTF-8 text of all strings, one after the other.
        bounds: `[I + 1]`, for strings: id `i` is `values[bounds[i] : bounds[i + 1]]`; None for integers.
    """

    values: npt.NDArray[np.integer]
    bounds: Array | None = None

    @classmethod
    def pack(cls, ids: Array | list[str]) -> ItemIds:
        """Pack checked ids (see `read_item_ids`)."""
        if isinstance(ids, np.ndarray):
            return cls(ids)
        encoded = [item_id.encode() for item_id in ids]
        bounds = np.concatenate(([0], np.cumsum([len(text) for text in encoded], dtype=np.int64)))
        values = np.array(np.frombuffer(b"".join(encoded), dtype=np.uint8))
        return cls(values, bounds.astype(smallest_dtype(len(values))))

    def __len__(self) -> int:
        return len(self.values if self.bounds is None else self.bounds[1:])

    @property
    def are_strings(self) -> bool:
        """Whether the ids are strings."""
        return self.bounds is not None

    def between(self, first: Array, last: Array) -> list[list[ItemId]]:
        """`[R]` lists of the ids `first[r] .. last[r]`, as Python's integers or strings."""
        ranges = zip(first.tolist(), last.tolist(), strict=True)
        if self.bounds is None:
            return [self.values[start:end].tolist() for start, end in ranges]
        return [[self._text(item) for item in range(start, end)] for start, end in ranges]

    def _text(self, item: int) -> str:
        assert self.bounds is not None
        return self.values[self.bounds[item] : self.bounds[item + 1]].tobytes().decode()


def read_item_ids(item_ids: npt.ArrayLike | Iterable[ItemId] | None, num_rows: int) -> Array | list[str]:
    """Check item ids: an integer array or a list of strings; the row numbers for None.

    Raises:
        ValueError: another number of them than rows, mixed or other types, integers beyond 64 bits, text that is no
            Unicode.
    """
    if item_ids is None:
        return np.arange(num_rows, dtype=smallest_dtype(num_rows))
    host: Any = to_host(item_ids)
    values: Any = host.tolist() if isinstance(host, np.ndarray) else host
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise ValueError(
            f"item_ids is {values!r}, expected a list of {num_rows} ids: one for each row, in the same order"
        )
    ids = list(cast("Iterable[Any]", values))
    if len(ids) != num_rows:
        raise ValueError(f"item_ids has {len(ids)} entries, expected {num_rows}: one for each row, in the same order")
    kinds = set(map(type, ids))
    if all(issubclass(kind, str) for kind in kinds):
        return [_check_text(str(item_id), number) for number, item_id in enumerate(ids)]
    if any(kind is bool or not issubclass(kind, (int, np.integer)) for kind in kinds):
        integers = is_integer(ids[0])
        number = next(
            number
            for number, item_id in enumerate(ids)
            if not (is_integer(item_id) if integers else isinstance(item_id, str))
        )
        raise ValueError(
            f"item_ids[{number}]={ids[number]!r}, expected all integers or all strings: convert them first"
        )
    try:
        array = np.array(ids, dtype=np.int64)
    except OverflowError:
        raise ValueError("item_ids has an integer beyond 64 bits, expected less: pass such ids as strings") from None
    return array.astype(smallest_dtype(max(int(array.max()), -int(array.min()) - 1)))


def group_items(
    ids: Array | list[str], order: Array, is_first: npt.NDArray[np.bool_]
) -> tuple[Array | list[str], Array]:
    """Item ids in sequence order with `[S + 1]` offsets; an item given twice on one sequence counts once.

    Args:
        ids: item ids in the order of the rows.
        order: the permutation that sorts the rows, stable.
        is_first: in sorted order, whether a row is the first of its sequence.
    """
    sequence = np.cumsum(is_first) - 1
    shared = np.flatnonzero(np.bincount(sequence)[sequence] > 1)
    if len(shared):
        numbers: dict[str, int] = {}
        codes: Array = (
            ids[order[shared]]
            if isinstance(ids, np.ndarray)
            else np.array([numbers.setdefault(ids[int(row)], len(numbers)) for row in order[shared]])
        )
        by_item = np.lexsort([codes, sequence[shared]])  # stable: of equal ones the first given comes first
        codes, of = codes[by_item], sequence[shared][by_item]
        repeated = (codes[1:] == codes[:-1]) & (of[1:] == of[:-1])
        kept = np.ones(len(order), dtype=bool)
        kept[shared[by_item[1:][repeated]]] = False
        order, sequence = order[kept], sequence[kept]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(sequence))))
    sorted_ids = ids[order] if isinstance(ids, np.ndarray) else [ids[int(row)] for row in order]
    return sorted_ids, offsets.astype(smallest_dtype(int(offsets[-1])))


def _check_text(item_id: str, number: int) -> str:
    if not item_id.isascii():
        try:
            item_id.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"item_ids[{number}]={item_id!r} has a lone surrogate, expected Unicode text: "
                "decode it with its own encoding"
            ) from None
    return item_id
