# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Token sequences, or codes, and item ids of a catalogue's table, as compact NumPy arrays. Knows no trie.

Each batch becomes an array at once, so memory is little more than the result.

Axes: N rows, T tokens of the longest sequence; a batch has n rows and t tokens in its longest one.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_gr.files.progress import progress_bar

from .cells import INT64_MAX
from .files import first_failure, pa, pc
from .table import Rows, Table, is_text

Array = npt.NDArray[np.integer]

PADDING = -1  # in the tail of a shorter sequence, as in the catalogue


def read_sequences(
    data: Any,
    *,
    sequence: str | Sequence[str] = "sequence",
    item_id: str | None = "item_id",
    progress: bool = True,
    argument: str = "sequence",
    read_text: Callable[[Any], Sequence[int]] | None = None,
    **how: Any,
) -> tuple[Array, Array | list[str] | None]:
    """`[N, T]` tokens or codes, -1 in the tail of a shorter sequence, and N item ids, None if no column was named.

    `sequence` is a column of integer lists, in CSV of texts such as `5 7`, `5,7` or `[5, 7]`; or several columns of
    integers, one per level, in which a shorter sequence ends with nulls. Errors call it `argument`. `read_text` gives
    the integers of other texts, or raises `ValueError`. `how` is for `Table`. Integers have the smallest type of 16
    bits or more that holds them all. Whatever is wrong is a `ValueError` with file, column, row and value.

    Example:
        >>> tokens, ids = read_sequences({"sequence": [[5, 7], [5, 8, 9]], "item_id": ["ham", "jam"]})
        >>> tokens.tolist(), ids
        ([[5, 7, -1], [5, 8, 9]], ['ham', 'jam'])
    """
    is_one = isinstance(sequence, str)
    names = [sequence] if isinstance(sequence, str) else list(sequence)
    if not names:
        raise ValueError(f"{argument}=[] names no column, expected one or more: name the columns of the levels")
    if len(set(names)) < len(names):
        raise ValueError(f"{argument}={names} names a column twice, expected one for each level")
    roles = dict.fromkeys(names, argument) | ({} if item_id is None or item_id in names else {item_id: "item_id"})
    types = {"item_id": pa.int64(), argument: pa.list_(pa.int64()) if is_one else pa.int64()}
    table = Table(data, roles, types=types, **how)
    parts: list[Array] = []
    ids: list[Any] = []
    done = 0
    with progress_bar(f"Reading {table.name}", lambda: table.num_bytes, unit="bytes", shown=progress) as advance:
        for rows, end in table.batches():
            if is_one:
                tokens = _read_lists(rows, names[0], argument, table.is_text, read_text)
            else:
                levels = [_read_tokens(rows, name, argument, rows.columns.column(name), int) for name in names]
                tokens = np.stack(levels, axis=1)
            parts.append(_without_gaps(rows, names, tokens))
            if item_id is not None:
                ids.append(_check_ids(rows, item_id, ids))
            advance(end - done)
            done = end
    if not parts:
        raise ValueError(f"{table.name} has no row, expected at least one: a catalogue needs an item")
    tokens = _stack(parts)
    if table.format == "jsonl" and tokens.shape[1] < len(names) and not is_one:
        missing = names[tokens.shape[1]]  # JSON lines only: the other formats list their columns
        raise ValueError(f"{table.name} has {missing!r} in no row, expected it in some: correct {argument}=")
    return tokens, read_ids(pa.chunked_array(ids), table.is_text) if ids else None


def read_ids(column: Any, is_text_only: bool) -> Array | list[str]:
    """Item ids: strings, or integers in the smallest type; in CSV integers if all of them look like integers."""
    if is_text_only:
        with suppress(pa.ArrowInvalid):
            numbers = column.cast(pa.int64())
            if numbers.cast(pa.string()).equals(column):  # Arrow reads 007 and 0x7 as 7
                column = numbers
    if is_text(column.type):
        return column.to_pylist()
    return _smallest(column.to_numpy())


def _check_ids(rows: Rows, name: str, before: Sequence[Any]) -> Any:
    """The ids of a batch, as 64-bit integers or strings."""
    column = rows.columns.column(name)
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py()
        raise ValueError(rows.problem(name, row, None, "an id: give it one, or drop the row"))
    is_number = pa.types.is_integer(column.type)
    if not (is_number or is_text(column.type)):
        expected = "integers or strings: convert it, or name another one with item_id="
        raise ValueError(rows.problem_of_type(name, expected))
    if before and is_number != pa.types.is_integer(before[0].type):
        kind = "strings" if is_number else "integers"
        raise ValueError(rows.problem_of_type(name, f"{kind} as in the files before: convert one of them"))
    try:
        return column.cast(pa.int64() if is_number else pa.string())
    except pa.ArrowInvalid:
        row = first_failure(column, lambda some: some.cast(pa.int64()))
        expected = "an integer of 64 bits: convert the ids to strings"
        raise ValueError(rows.problem(name, row, column[row].as_py(), expected)) from None


def _read_lists(rows: Rows, name: str, argument: str, is_csv: bool, read_text: Any) -> Array:
    """The `[n, t]` tokens of a column of lists, or of texts."""
    column = rows.columns.column(name)
    holds_texts = is_text(getattr(column.type, "value_type", column.type))
    if holds_texts and read_text is not None and not (is_csv and _are_integers(column)):
        found: list[Sequence[int]] = []
        for row, value in enumerate(column.to_pylist()):
            try:
                found.append(read_text(value))
            except ValueError as error:
                raise ValueError(rows.problem(name, row, value, "").removesuffix("expected ") + str(error)) from error
        lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
        return _pad(_smallest(np.fromiter(chain.from_iterable(found), dtype=np.int64)), lengths)
    if is_csv:
        gap = pc.index(pc.match_substring_regex(column, r",\s*,"), True).as_py()
        if gap >= 0:
            expected = "an integer between two commas: fill the gap"
            raise ValueError(rows.problem(name, gap, column[gap].as_py(), expected))
        column = pc.ascii_split_whitespace(pc.replace_substring(pc.ascii_trim(column, " \t,[]()"), ",", " "))
    if not hasattr(column.type, "value_type"):
        expected = f'lists of integers: convert it, or name integer columns, as in {argument}=["c0", "c1"]'
        raise ValueError(rows.problem_of_type(name, expected))
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    # flatten() respects the offset of a slice and omits null lists, unlike .values
    tokens = _read_tokens(rows, name, argument, column.flatten(), lambda at: int(np.searchsorted(ends, at, "right")))
    return _pad(tokens, lengths)


def _are_integers(texts: Any) -> bool:
    return pc.all(pc.match_substring_regex(texts, r"^[0-9\s,\[\]()]*$")).as_py()


def _read_tokens(rows: Rows, name: str, argument: str, values: Any, row_of: Callable[[int], int]) -> Array:
    """Tokens, `PADDING` where they are null. `row_of` gives the row of a value."""

    def refuse(at: int, expected: str) -> ValueError:
        row = row_of(at)
        return ValueError(rows.problem(name, row, rows.columns.column(name)[row].as_py(), expected))

    fix = f'write integers (pandas: .astype("Int64")), or name another column with {argument}='
    if is_text(values.type) and is_text(rows.columns.column(name).type):  # of CSV
        texts = pc.ascii_trim_whitespace(values)
        try:
            values = texts.cast(pa.int64())
        except pa.ArrowInvalid:
            at = first_failure(texts, lambda some: some.cast(pa.int64()))
            raise refuse(at, f"integers of 64 bits and not {texts[at].as_py()!r}: {fix}") from None
    if not (pa.types.is_integer(values.type) or pa.types.is_null(values.type)):
        raise ValueError(rows.problem_of_type(name, f"integers: {fix}"))
    low, high = (bound or 0 for bound in pc.min_max(values).as_py().values())  # None if all are null
    if low < 0 or high > INT64_MAX:
        array = values.fill_null(0).to_numpy(zero_copy_only=False)
        at = int(np.argmax((array < 0) | (array > INT64_MAX)))
        what = "token ids" if argument == "sequence" else argument
        fix = f"are these {what}? Padding is null or omitted"
        raise refuse(at, f"integers from 0 to {INT64_MAX} and not {array[at]}: {fix}")
    dtype = np.promote_types(np.int16, np.min_scalar_type(-high - 1))
    return values.cast(pa.from_numpy_dtype(dtype)).fill_null(PADDING).to_numpy(zero_copy_only=False)


def _without_gaps(rows: Rows, names: Sequence[str], tokens: Array) -> Array:
    """Tokens, whose sequences end where their nulls begin."""
    is_token = tokens >= 0
    lengths = is_token.sum(axis=1)
    gaps = (is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1)
    is_bad = gaps | (lengths == 0)
    if is_bad.any():
        row = int(np.argmax(is_bad))
        cells: list[Any] = [rows.columns.column(name)[row].as_py() for name in names]
        found = (names[0], row, cells[0]) if len(names) == 1 else (names, row, cells)
        expected = "nulls at its end only: fill the gap" if lengths[row] else "at least one token: drop the row"
        raise ValueError(rows.problem(*found, expected))
    return tokens[:, : int(lengths.max())]


def _pad(tokens: Array, lengths: npt.NDArray[np.integer]) -> Array:
    """Sequences, one after the other, as `[n, t]`."""
    width = int(lengths.max())
    if len(tokens) == len(lengths) * width:
        return tokens.reshape(len(lengths), width)
    rows = np.full((len(lengths), width), PADDING, dtype=tokens.dtype)
    rows[np.arange(width) < lengths[:, None]] = tokens
    return rows


def _smallest(array: Array) -> Array:
    """Integers in the smallest type that holds them all."""
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    return array.astype(np.promote_types(np.int16, np.min_scalar_type(min(low, -high - 1))))


def _stack(parts: list[Array]) -> Array:
    """All parts as one array; each is freed once it is copied, and memory is touched only then."""
    num_rows, width = sum(map(len, parts)), max(part.shape[1] for part in parts)
    stacked = np.empty((num_rows, width), dtype=np.result_type(*parts))
    while parts:
        part = parts.pop()
        rows = stacked[num_rows - len(part) : num_rows]
        rows[:, : part.shape[1]], rows[:, part.shape[1] :] = part, PADDING
        num_rows -= len(part)
    return stacked
