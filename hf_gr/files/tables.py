# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Token sequences and item ids from Parquet, CSV and JSON lines. Knows no trie; pyarrow does the reading.

Files are streamed: each batch becomes a compact NumPy array at once, so memory is little more than the result.

Axes: N rows, T tokens of the longest sequence; a batch has n rows and t tokens in its longest one.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

try:
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet
except ImportError as error:
    raise ImportError('reading tables needs pyarrow: pip install "hf-gr[tables]"') from error

from .progress import progress_bar

Array = npt.NDArray[np.integer]
Format = Literal["parquet", "csv", "jsonl"]

PADDING = -1  # in the tail of a shorter sequence: equals the catalogue's own, as a test checks
BATCH_ROWS = 2**17  # of Parquet
BLOCK_BYTES = 2**20  # of CSV and JSON lines; pyarrow needs a CSV row to take less, and reads 32 blocks ahead
SUFFIXES = {"parquet": (".parquet", ".pq"), "csv": (".csv", ".tsv"), "jsonl": (".jsonl", ".ndjson", ".json")}
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # of CSV and JSON lines; Parquet compresses inside
FIXES = {
    "parquet": "write it again, or name its format",
    "csv": "quote cells that hold the delimiter, or pass delimiter=; text is UTF-8",
    "jsonl": "write it again, or name its format",
}
IN_MEMORY = Path("the table")  # what errors call it
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

pc: Any = pyarrow.compute  # it creates its functions at import, where no type checker sees them


@dataclass(frozen=True, eq=False)
class Table:
    """What `read_table` found.

    Attributes:
        sequences: `[N, T]` tokens, in the smallest of int16, int32 and int64; the tail of a shorter sequence is -1.
        item_ids: `[N]` integers, in the smallest of these types, or N strings; None if no column was named.
    """

    sequences: Array
    item_ids: Array | list[str] | None


def read_table(
    path: Any,
    *,
    format: Format | None = None,
    sequence: str | Sequence[str] = "sequence",
    item_id: str | None = "item_id",
    delimiter: str | None = None,
    progress: bool = True,
    argument: str = "sequence",
    read_text: Callable[[Any], Sequence[int]] | None = None,
) -> Table:
    r"""Read the token sequences, or codes, and item ids of a catalogue.

    Args:
        path: a file, several files in order, or a folder, whose files of the format are read in order of name. CSV and
            JSON lines may be compressed (`.gz`, `.bz2`, `.zst`). Or a table in memory that Arrow can read.
        format: `"parquet"`, `"csv"` or `"jsonl"`; by default what the files' names end with.
        sequence: a column of integer lists; in CSV, of texts such as `5 7`, `5,7` or `[5, 7]`. Or several columns of
            integers, one per level, in which a shorter sequence ends with nulls (in CSV, empty cells; in JSON lines,
            also missing keys).
        item_id: a column of integers or of strings; None if there is none. CSV has text only: its ids are integers
            if all of them, in all files, look like integers (`7`, but not `007`).
        delimiter: between the columns of CSV; by default a tab in `.tsv` and a comma elsewhere.
        progress: show a bar, on a terminal or in a notebook.
        argument: what errors call `sequence`.
        read_text: the integers of a text, or of a list of texts, in a single column that holds such; it raises
            `ValueError` for others. By default texts are refused, but for those of CSV above.

    Returns:
        The table, its rows in the order of the files.

    Raises:
        ValueError: a file is missing, truncated or of another format; a column is missing or of another type; a
            sequence is empty, has a gap or a negative token; an id is missing or of another type than the first; an
            integer exceeds 64 bits; there is no row. Names file, column, row (from 0 in each file, without the
            header) and value.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "catalogue.csv")
        >>> _ = path.write_text("sequence,item_id\n5 7,ham\n5 8 9,jam\n")
        >>> table = read_table(path, format="csv")
        >>> table.sequences.tolist(), table.item_ids
        ([[5, 7, -1], [5, 8, 9]], ['ham', 'jam'])
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
        raise ValueError(f"delimiter={delimiter!r}, expected one ASCII character: omit it for a tab or comma")
    in_memory = pa.table(path) if hasattr(path, "__arrow_c_stream__") else None
    format = "parquet" if in_memory is not None else format or format_of(path)
    if delimiter is not None and format != "csv":
        raise ValueError(f"delimiter={delimiter!r} is given and the table is no CSV, expected None: omit it")
    is_list = isinstance(sequence, str)
    wanted = _Wanted((sequence,) if is_list else tuple(sequence), is_list, item_id, argument, read_text)
    files = [IN_MEMORY] if in_memory is not None else list_files(path, format)
    rows, ids = _Rows(), _Ids()
    size = sum(file.stat().st_size for file in files) if in_memory is None else 0
    with progress_bar(f"Reading {_name(files)}", lambda: size, unit="bytes", shown=progress) as advance:
        for file in files:
            try:
                for batch in _read_batches(file, format, wanted, delimiter, advance, in_memory):
                    rows.append(_read_sequences(batch, wanted))
                    if item_id is not None:
                        ids.append(batch, item_id)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, UnicodeDecodeError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"{file} cannot be read, expected complete {format}: {reason} ({FIXES[format]})"
                ) from error
    sequences = rows.finish()
    if not len(sequences):
        raise ValueError(f"{_name(files)} has no row, expected at least one: a catalogue needs an item")
    if format == "jsonl" and not is_list and sequences.shape[1] < len(wanted.sequence):
        key = wanted.sequence[sequences.shape[1]]  # JSON lines only: the other formats list their columns
        raise ValueError(f"{_name(files)} has {key!r} in no row, expected it in some: correct {argument}=")
    return Table(sequences, None if item_id is None else ids.finish())


@dataclass(frozen=True)
class _Wanted:
    """The columns to read."""

    sequence: tuple[str, ...]
    is_list: bool
    item_id: str | None
    argument: str = "sequence"
    read_text: Callable[[Any], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if not self.sequence:
            raise ValueError(
                f"{self.argument}=[] names no column, expected one or more: name the columns of the levels"
            )
        if len(set(self.sequence)) < len(self.sequence):
            raise ValueError(
                f"{self.argument}={list(self.sequence)} names a column twice, expected one for each level"
            )

    @property
    def names(self) -> list[str]:
        """The columns, each once: an item of one token may have it as its id."""
        return list(dict.fromkeys(self.sequence if self.item_id is None else (*self.sequence, self.item_id)))

    def check(self, file: Path, names: Sequence[str], there: Sequence[str]) -> None:
        """Raise unless a file has each of these names exactly once."""
        for name in names:
            if there.count(name) != 1:
                how_many = f"{there.count(name)} columns" if name in there else "no column"
                fix = "item_id=, or item_id=None for row numbers" if name == self.item_id else f"{self.argument}="
                fix = f"name it with {fix}"
                listed = ", ".join(map(repr, there)) or "(there are none)"
                if len(there) == 1 and (other := next((c for c in "\t;|," if c in there[0]), None)) is not None:
                    fix = f"pass delimiter={other!r}, if that separates the columns"
                raise ValueError(f"{file} has {how_many} {name!r}, expected one of {listed}: {fix}")


@dataclass(frozen=True)
class _Batch:
    """Some rows of a file, and how an error names them.

    Attributes:
        file: their file.
        first_row: the number of the first one in the file.
        columns: the columns to read.
        is_text: whether every cell is text or null, as in CSV.
    """

    file: Path
    first_row: int
    columns: pa.RecordBatch
    is_text: bool

    def column(self, name: str) -> Any:
        column: Any = self.columns.column(name)
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        if pa.types.is_string_view(column.type):  # Polars has these, also in lists
            return column.cast(pa.string())
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        is_views = is_list and pa.types.is_string_view(column.type.value_type)
        return column.cast(pa.large_list(pa.string())) if is_views else column

    def type_error(self, name: str, expected: str) -> ValueError:
        found = self.columns.column(name).type
        return ValueError(f"{self.file}, column {name!r} has type {found}, expected {expected}")

    def row_error(self, names: Sequence[str], row: int, problem: str) -> ValueError:
        cells = [self.columns.column(name)[row].as_py() for name in names]
        where = f"{self.file}, column{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
        found = shorten(cells if len(names) > 1 else cells[0])
        return ValueError(f"{where}, row {self.first_row + row} is {found}, {problem}")


class _Rows:
    """`[N, T]` integers that grow in place, with more columns or a larger type when a part needs it."""

    def __init__(self) -> None:
        self._array: Array = np.empty((0, 0), dtype=np.int16)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def append(self, part: Array) -> None:
        start, end = self._used, self._used + len(part)
        capacity, width = self._array.shape
        if end > capacity:
            # realloc moves the pages of a large array instead of copying them. Joining parts at the end, or doubling
            # the array, would take twice the memory.
            capacity = end + end // 8
            self._array.resize((capacity, width), refcheck=False)
        dtype = np.promote_types(self._array.dtype, part.dtype)
        if part.shape[1] > width or dtype != self._array.dtype:
            wider = np.empty((capacity, max(width, part.shape[1])), dtype=dtype)
            wider[:start, :width] = self._array[:start]
            wider[:start, width:] = PADDING
            self._array = wider
        self._array[start:end, : part.shape[1]] = part
        self._array[start:end, part.shape[1] :] = PADDING
        self._used = end

    def finish(self) -> Array:
        self._array.resize((self._used, self._array.shape[1]), refcheck=False)
        return self._array


class _Ids:
    """Item ids: all integers or all strings. In CSV, integers until the first other text, then all strings."""

    def __init__(self) -> None:
        self._numbers = _Rows()
        self._texts: list[str] | None = None

    def append(self, batch: _Batch, name: str) -> None:
        column = batch.column(name)
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            raise batch.row_error([name], row, "expected an id: give it one, or drop the row")
        numbers = _parse_ids(batch, name) if self._texts is None or not batch.is_text else None
        if numbers is not None:
            if self._texts is not None:
                raise batch.type_error(name, "strings as in the files before: convert one of them")
            self._numbers.append(numbers[:, None])
            return
        if self._texts is None:
            if len(self._numbers) and not batch.is_text:
                raise batch.type_error(name, "integers as in the files before: convert one of them")
            self._texts = [str(number) for number in self._numbers.finish().ravel().tolist()]
        self._texts += column.to_pylist()

    def finish(self) -> Array | list[str]:
        return self._numbers.finish().ravel() if self._texts is None else self._texts


def _parse_ids(batch: _Batch, name: str) -> Array | None:
    """The `[n]` item ids if they are integers, None if they are strings."""
    column = batch.column(name)
    if batch.is_text:
        try:
            numbers = column.cast(pa.int64())
        except pa.ArrowInvalid:
            return None
        if not numbers.cast(pa.string()).equals(column):  # Arrow reads 007 and 0x7 as 7
            return None
        column = numbers
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return None
    if not pa.types.is_integer(column.type):
        raise batch.type_error(name, "integers or strings: convert it, or name another one with item_id=")
    return _to_numpy(batch, name, column, int, at_least=INT64_MIN, fix="convert the ids to strings")


def _read_sequences(batch: _Batch, wanted: _Wanted) -> Array:
    """The `[n, t]` tokens of a batch."""
    names = wanted.sequence
    if wanted.is_list:
        if wanted.read_text is not None and _has_texts(batch, names[0]):
            return _read_texts(batch, names[0], wanted.read_text)
        lists = _split_texts(batch, names[0]) if batch.is_text else batch.column(names[0])
        if not _is_list(lists.type):
            expected = f'lists of integers: convert it, or name integer columns, as in {wanted.argument}=["c0", "c1"]'
            raise batch.type_error(names[0], expected)
        lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        # flatten() respects the offset of a slice and omits null lists, unlike .values
        tokens = _read_tokens(
            batch, wanted, names[0], lists.flatten(), lambda at: int(np.searchsorted(ends, at, "right"))
        )
        rows = _pad(tokens, lengths)
    else:
        rows = np.stack([_read_tokens(batch, wanted, name, batch.column(name), int) for name in names], axis=1)
    is_token = rows >= 0
    if is_token.all() and rows.shape[1]:
        return rows
    gaps = (is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1)
    if gaps.any():
        raise batch.row_error(names, int(np.argmax(gaps)), "expected nulls at its end only: fill the gap")
    lengths = is_token.sum(axis=1)
    if not lengths.all():
        raise batch.row_error(names, int(np.argmin(lengths)), "expected at least one token: drop the row")
    return rows[:, : int(lengths.max())]


def _split_texts(batch: _Batch, name: str) -> Any:
    """Texts such as `5 7`, `5,7` and `[5, 7]` as lists of texts."""
    texts = batch.column(name)
    gap = pc.index(pc.match_substring_regex(texts, r",\s*,"), True).as_py()
    if gap >= 0:
        raise batch.row_error([name], gap, "expected an integer between two commas: fill the gap")
    return pc.ascii_split_whitespace(pc.replace_substring(pc.ascii_trim(texts, " \t,[]()"), ",", " "))


def _is_list(kind: Any) -> bool:
    return isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


def _has_texts(batch: _Batch, name: str) -> bool:
    """Whether a column holds texts, or lists of them, that are more than integers between spaces or commas."""
    column = batch.column(name)
    kind = column.type.value_type if _is_list(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return False
    return not batch.is_text or not pc.all(pc.match_substring_regex(column, r"^[0-9\s,\[\]()]*$")).as_py()


def _read_texts(batch: _Batch, name: str, read_text: Callable[[Any], Sequence[int]]) -> Array:
    """The `[n, t]` integers that texts, or lists of them, stand for."""
    rows: list[Sequence[int]] = []
    for row, value in enumerate(batch.column(name).to_pylist()):
        try:
            rows.append(read_text(value))
        except ValueError as error:
            raise batch.row_error([name], row, str(error)) from error
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return _pad(np.fromiter(chain.from_iterable(rows), dtype=np.int64), lengths)


def _read_tokens(batch: _Batch, wanted: _Wanted, name: str, values: Any, row_of: Callable[[int], int]) -> Array:
    """Tokens, `PADDING` where they are null. `row_of` gives the row of a value."""
    fix = f'write integers (pandas: .astype("Int64")), or name another column with {wanted.argument}='
    if batch.is_text:
        texts = pc.ascii_trim_whitespace(values)
        try:
            values = texts.cast(pa.int64())
        except pa.ArrowInvalid as error:
            at = first_failure(texts, lambda some: some.cast(pa.int64()))
            expected = f"expected integers of 64 bits and not {texts[at].as_py()!r}: {fix}"
            raise batch.row_error([name], row_of(at), expected) from error
    if not (pa.types.is_integer(values.type) or pa.types.is_null(values.type)):
        raise batch.type_error(name, f"integers: {fix}")
    what = "token ids" if wanted.argument == "sequence" else wanted.argument
    fix = f"are these {what}? Padding is null or omitted"
    return _to_numpy(batch, name, values, row_of, at_least=0, fix=fix)


def _to_numpy(
    batch: _Batch, name: str, values: Any, row_of: Callable[[int], int], *, at_least: int, fix: str
) -> Array:
    """Arrow's integers in the smallest type, null as `PADDING`."""
    low, high = (bound or 0 for bound in pc.min_max(values).as_py().values())  # None if all are null
    if low < at_least or high > INT64_MAX:
        array = values.fill_null(0).to_numpy(zero_copy_only=False)
        at = int(np.argmax((array < at_least) | (array > INT64_MAX)))
        expected = f"expected integers from {at_least} to {INT64_MAX} and not {array[at]}: {fix}"
        raise batch.row_error([name], row_of(at), expected)
    dtype = np.promote_types(np.int16, np.min_scalar_type(min(low, -high - 1)))
    return values.cast(pa.from_numpy_dtype(dtype)).fill_null(PADDING).to_numpy(zero_copy_only=False)


def _pad(tokens: Array, lengths: npt.NDArray[np.integer]) -> Array:
    """Sequences, one after the other, as `[n, t]`."""
    width = int(lengths.max())
    if len(tokens) == len(lengths) * width:
        return tokens.reshape(len(lengths), width)
    rows = np.full((len(lengths), width), PADDING, dtype=tokens.dtype)
    rows[np.arange(width) < lengths[:, None]] = tokens
    return rows


def _read_batches(
    file: Path,
    format: Format,
    wanted: _Wanted,
    delimiter: str | None,
    advance: Callable[[int], None],
    in_memory: pa.Table | None,
) -> Iterator[_Batch]:
    """The batches of a file that have rows; calls `advance` with the bytes of each."""
    batches: Batches
    if in_memory is not None:
        wanted.check(file, wanted.names, in_memory.schema.names)
        batches = ((columns, 0) for columns in in_memory.select(wanted.names).to_batches())
    elif format == "parquet":
        batches = read_parquet(file, wanted)
    elif format == "csv":
        batches = read_csv(file, wanted, delimiter)
    else:
        batches = read_jsonl(file, lambda number, line: _json_schema(file, number, line, wanted))
    first_row, position = 0, 0
    for columns, end in batches:
        if columns.num_rows:
            yield _Batch(file, first_row, columns, is_text=format == "csv")
        first_row += columns.num_rows
        advance(end - position)
        position = end


Batches = Iterator[tuple[pa.RecordBatch, int]]  # and the byte in the file where each ends


class Columns(Protocol):
    """Columns to read, and the check that a file has them."""

    @property
    def names(self) -> list[str]:
        """The columns, in the order to read them."""
        ...

    def check(self, file: Path, names: Sequence[str], there: Sequence[str]) -> None:
        """Raise if a file lacks any of `names` among the columns that are `there`."""
        ...


def read_parquet(file: Path, wanted: Columns, *, batch_rows: int | None = None) -> Batches:
    """Batches of some columns of a Parquet file, of `BATCH_ROWS` rows by default."""
    # By default, pyarrow holds the compressed columns of all row groups; without a buffer size, those of one.
    options: Any = {"pre_buffer": False, "buffer_size": BLOCK_BYTES, "page_checksum_verification": True}
    with pyarrow.parquet.ParquetFile(file, **options) as reader:
        wanted.check(file, wanted.names, reader.schema_arrow.names)
        size, num_read, num_rows = file.stat().st_size, 0, max(1, reader.metadata.num_rows)
        for columns in reader.iter_batches(batch_rows or BATCH_ROWS, columns=wanted.names):
            num_read += columns.num_rows
            yield columns, size * num_read // num_rows


def read_csv(file: Path, wanted: Columns, delimiter: str | None) -> Batches:
    """Batches of some columns of a CSV file with a header, every cell as text or null."""
    if delimiter is None:
        delimiter = "\t" if ".tsv" in file.suffixes[-2:] else ","
    read = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)  # with threads, errors name no row
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    # All as text: a type that pyarrow infers from the first block may not fit the second.
    convert = pyarrow.csv.ConvertOptions(
        include_columns=wanted.names,
        column_types=dict.fromkeys(wanted.names, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
    )
    with open_file(file) as (_, stream):  # first: of two columns with one name pyarrow takes one, and says nothing
        wanted.check(file, wanted.names, pyarrow.csv.open_csv(stream, read, parse_options=parse).schema.names)
    with open_file(file) as (raw, stream):
        reader = pyarrow.csv.open_csv(stream, read, parse_options=parse, convert_options=convert)
        for columns in reader:
            yield columns, raw.tell()


def read_jsonl(file: Path, make_schema: Callable[[int, bytes], pa.Schema]) -> Batches:
    """Batches of a file of JSON lines; `make_schema` gets the first line, and its number from 0."""
    # Not pyarrow's open_json, which does not report the line of an error and is not in pyarrow 18.
    schema, num_lines = None, 0
    with open_file(file) as (raw, stream):
        for block in _read_lines(stream):
            if schema is None:
                lines = block.split(b"\n")
                first = next((number for number, line in enumerate(lines) if line.strip()), None)
                if first is not None:
                    schema = make_schema(num_lines + first, lines[first])
            if schema is not None:
                try:
                    table = _parse_json(block, schema)
                except (pa.ArrowInvalid, UnicodeDecodeError) as error:
                    lines = block.split(b"\n")
                    bad = first_failure(lines, lambda some, schema=schema: _parse_json(b"\n".join(some), schema))
                    raise _line_error(file, num_lines + bad, lines[bad], schema, error) from error
                for columns in table.to_batches():
                    yield columns, raw.tell()
            num_lines += block.count(b"\n")


def _json_schema(file: Path, number: int, line: bytes, wanted: _Wanted) -> pa.Schema:
    """The types of the columns to read; the first line decides whether ids are integers or strings."""
    types: dict[str, pa.DataType] = dict.fromkeys(wanted.names, pa.int64())
    if wanted.is_list:
        types[wanted.sequence[0]] = pa.list_(pa.int64())
    first = read_object(file, number, line, pa.schema(types))
    value = first.get(wanted.sequence[0])
    if wanted.is_list and wanted.read_text is not None:
        if isinstance(value, str):
            types[wanted.sequence[0]] = pa.string()
        elif isinstance(value, list) and value and isinstance(value[0], str):
            types[wanted.sequence[0]] = pa.list_(pa.string())
    # The first line may have a short sequence, and lack the keys of deeper levels.
    wanted.check(file, [wanted.sequence[0], *([] if wanted.item_id is None else [wanted.item_id])], list(first))
    if wanted.item_id is not None and isinstance(first[wanted.item_id], str):
        types[wanted.item_id] = pa.string()
    return pa.schema(types)


def read_object(file: Path, number: int, line: bytes, schema: pa.Schema) -> dict[str, Any]:
    """One line of JSON; an error shows an object with the fields of `schema`."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise _line_error(file, number, line, schema, error) from error
    if not isinstance(found, dict):
        raise _line_error(file, number, line, schema, "it is no object")
    return found


def _parse_json(block: bytes, schema: pa.Schema) -> pa.Table:
    parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    read = pyarrow.json.ReadOptions(block_size=len(block) + 1)  # else a line may be longer than pyarrow's block
    return pyarrow.json.read_json(pa.BufferReader(block), read_options=read, parse_options=parse)


def _line_error(file: Path, number: int, line: bytes, schema: pa.Schema, reason: object) -> ValueError:
    cells = {pa.int64(): 5, pa.string(): "ham", pa.list_(pa.string()): ["ham", "jam"], pa.bool_(): True}
    example = json.dumps(
        {name: cells.get(kind, [5, 7]) for name, kind in zip(schema.names, schema.types, strict=True)}
    )
    found = shorten(line.decode(errors="replace"))
    reason = str(reason).partition(" in row ")[0]  # counted in the parsed text, not in the file
    return ValueError(
        f"{file}, line {number + 1} is {found}, expected an object such as {example} ({reason}): correct it"
    )


def _read_lines(stream: Any) -> Iterator[bytes]:
    """Blocks of whole lines."""
    rest = b""
    while data := stream.read(BLOCK_BYTES):
        lines, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield lines + newline
    if rest:
        yield rest


@contextmanager
def open_file(file: Path) -> Iterator[tuple[Any, Any]]:
    """A file, whose position shows how much has been read, and its decompressed text."""
    codec = CODECS.get(file.suffix.lower())
    with pa.OSFile(str(file), "rb") as raw:
        if codec is None:
            yield raw, raw
        else:
            with pa.CompressedInputStream(raw, codec) as stream:
                yield raw, stream


def first_failure(items: Any, parse: Callable[[Any], object]) -> int:
    """The first item that makes `parse` fail, found in few calls."""

    def fails(end: int) -> bool:
        try:
            parse(items[:end])
        except ValueError:
            return True
        return False

    return bisect(range(1, len(items)), False, key=fails)


def list_files(path: str | PathLike[str] | Sequence[str | PathLike[str]], format: Format) -> list[Path]:
    """The files that `path` stands for, folders replaced by what they hold."""
    suffixes = tuple(suffix + codec for suffix in SUFFIXES[format] for codec in ("", *CODECS))
    files: list[Path] = []
    for entry in map(Path, [path] if isinstance(path, (str, PathLike)) else path):
        if entry.is_dir():
            # Spark and macOS put other files beside the data; their names begin with these characters.
            names = [file for file in entry.iterdir() if not file.name.startswith((".", "_"))]
            found = sorted(file for file in names if file.name.lower().endswith(suffixes))
            if not found:
                expected = " or ".join(SUFFIXES[format])
                raise ValueError(f"{entry} is a folder without {format} files, expected some that end in {expected}")
            files += found
        elif entry.exists():
            files.append(entry)
        else:
            raise ValueError(f"{entry} is not there, expected a {format} file or a folder of them: check the path")
    if not files:
        raise ValueError("path=[] names no file, expected one or more: list the files")
    return files


def format_of(paths: Any) -> Format:
    """The format, from the suffix of the first of some files."""
    first = Path(paths if isinstance(paths, (str, PathLike)) else next(iter(paths), ""))
    names = sorted(file.name for file in first.iterdir()) if first.is_dir() else [first.name]
    for name in names:
        endings = [ending for ending in Path(name.lower()).suffixes if ending not in CODECS]
        for format, suffixes in SUFFIXES.items():
            if endings and endings[-1] in suffixes and not name.startswith((".", "_")):
                return format  # pyright: ignore[reportReturnType]
    expected = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    raise ValueError(f"{first} does not say what it is, expected a name that ends in one of {expected}: pass format=")


def names_of(table: Any) -> list[Any]:
    """What errors call a table: its files; nothing, if it is in memory."""
    if hasattr(table, "__arrow_c_stream__"):
        return []
    return [table] if isinstance(table, (str, PathLike)) else list(table)


def shorten(value: object) -> str:
    """A value, shortened for an error."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _name(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
