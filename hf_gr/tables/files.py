# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of rows: which ones a path names, their format, and their batches. pyarrow does the reading.

Each format is read by pyarrow's own reader, and not through `pyarrow.dataset`: that reads no `.GZ`, takes the types of
JSON from its first block, and counts the rows of an error from there.
"""

import json
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

try:
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet
except ImportError as error:
    raise ImportError('reading tables needs pyarrow: pip install "hf-gr[tables]"') from error

from .cells import shorten

Format = Literal["parquet", "csv", "jsonl"]
Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
Batches = Iterator[tuple[Any, int]]  # batches of Arrow, and the byte in the file where each ends

SUFFIXES: dict[Format, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".tsv", ".inter"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
}
TABBED = (".tsv", ".inter")  # the latter of RecBole, whose columns are named as `item_id:token`
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # of CSV and JSON lines; Parquet compresses inside
READ_ERRORS = (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError)  # of damaged files, and of other formats
BATCH_ROWS = 2**17  # of Parquet
BLOCK_BYTES = 2**20  # of CSV and JSON lines; pyarrow needs a CSV row to take less, and reads 32 blocks ahead

pc: Any = pyarrow.compute  # it creates its functions at import, where no type checker sees them


def suffix_of(path: str | PathLike[str]) -> str:
    """What a name ends with, without compression and in small letters: `.csv` of `part-0.csv.GZ`."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in CODECS), "")


class NoColumn(ValueError):
    """A table does not have a column."""


def check_columns(place: object, roles: Mapping[str, str], there: Sequence[str]) -> None:
    """Raise unless each column, whose role is the argument that names it, is there exactly once."""
    for name, role in roles.items():
        if there.count(name) == 1:
            continue
        how_many = f"{there.count(name)} columns" if name in there else "no column"
        fix = f"name it with {role}=" if role else "rename the column"
        fix += ", or item_id=None for row numbers" if role == "item_id" else ""
        if len(there) == 1 and (other := next((mark for mark in "\t;|," if mark in there[0]), None)) is not None:
            fix = f"pass delimiter={other!r}, if that separates the columns"
        listed = ", ".join(map(repr, there)) or "(there are none)"
        error = ValueError if name in there else NoColumn
        raise error(f"{place} has {how_many} {name!r}, expected one of {listed}: {fix}")


def find_files(paths: Paths, format: Format | None = None) -> tuple[list[Path], Format]:
    """The files that paths name, folders replaced by their files of the format in order of name; and the format."""
    entries = [Path(path) for path in ([paths] if isinstance(paths, (str, PathLike)) else paths)]
    if not entries:
        raise ValueError("path=[] names no file, expected one or more: list the files")
    # Spark and macOS put other files next to the data; their names begin with these characters.
    held = [
        sorted(file for file in entry.iterdir() if not file.name.startswith((".", "_"))) if entry.is_dir() else [entry]
        for entry in entries
    ]
    if format is None:
        known: dict[str, Format] = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}
        found: set[Format] = {
            known[suffix] for files in held for file in files if (suffix := suffix_of(file)) in known
        }
        if len(found) != 1:
            says = f"has files of {' and '.join(sorted(found))}" if found else "does not say what it is"
            raise ValueError(
                f"{entries[0]} {says}, expected names that end in one of {', '.join(known)}: pass format="
            )
        format = found.pop()
    files: list[Path] = []
    for entry, inside in zip(entries, held, strict=True):
        if entry.is_dir():
            inside = [file for file in inside if suffix_of(file) in SUFFIXES[format]]
            if not inside:
                expected = " or ".join(SUFFIXES[format])
                raise ValueError(f"{entry} is a folder without {format} files, expected some that end in {expected}")
        elif not entry.exists():
            raise ValueError(f"{entry} is not there, expected a {format} file or a folder of them: check the path")
        files += inside
    return files, format


def read_parquet(file: Path, roles: Mapping[str, str], batch_rows: int | None = None) -> Batches:
    """Batches of some columns, named by their roles, of a Parquet file."""
    # By default, pyarrow holds the compressed columns of all row groups; without a buffer size, those of one.
    options: Any = {"pre_buffer": False, "buffer_size": BLOCK_BYTES, "page_checksum_verification": True}
    with pyarrow.parquet.ParquetFile(file, **options) as reader:
        check_columns(file, roles, reader.schema_arrow.names)
        size, num_read, num_rows = file.stat().st_size, 0, max(1, reader.metadata.num_rows)
        for batch in reader.iter_batches(batch_rows or BATCH_ROWS, columns=list(roles)):
            batch.validate(full=True)  # texts may not be UTF-8
            num_read += batch.num_rows
            yield batch.select(list(roles)), size * num_read // num_rows


def read_csv(file: Path, roles: Mapping[str, str], delimiter: str | None) -> Batches:
    """Batches of some columns of a CSV file with a header, every cell as text or null."""
    delimiter = delimiter or ("\t" if suffix_of(file) in TABBED else ",")
    read = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)  # with threads, errors name no row
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    # All as text: a type that pyarrow infers from the first block may not fit the second.
    convert = pyarrow.csv.ConvertOptions(
        include_columns=list(roles),
        column_types=dict.fromkeys(roles, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
    )
    with open_file(file) as (_, stream):  # first: of two columns with one name pyarrow takes one, and says nothing
        check_columns(file, roles, pyarrow.csv.open_csv(stream, read, parse_options=parse).schema.names)
    with open_file(file) as (raw, stream):
        for batch in pyarrow.csv.open_csv(stream, read, parse_options=parse, convert_options=convert):
            yield batch, raw.tell()


def read_jsonl(file: Path, roles: Mapping[str, str], types: Mapping[str, Any]) -> Batches:
    """Batches of some columns of a file of JSON lines, whose types are those of the first line.

    `types` are of roles that are null there. Of several columns of a role, that line need only have the first.
    """
    # Not pyarrow's open_json, which does not report the line of an error and is not in pyarrow 18.
    schema, num_lines = None, 0
    with open_file(file) as (raw, stream):
        for block in _whole_lines(stream):
            if schema is None and block.strip():
                lines = block.split(b"\n")
                first = next(number for number, line in enumerate(lines) if line.strip())
                schema = _first_types(file, num_lines + first, lines[first], roles, types)
            if schema is not None:
                try:
                    table = _parse_json(block, schema)
                except (pa.ArrowInvalid, UnicodeDecodeError) as error:
                    lines = block.split(b"\n")
                    bad = first_failure(lines, lambda some, schema=schema: _parse_json(b"\n".join(some), schema))
                    raise _line_error(file, num_lines + bad, lines[bad], roles, error) from error
                for batch in table.to_batches():
                    yield batch, raw.tell()
            num_lines += block.count(b"\n")


def _first_types(file: Path, number: int, line: bytes, roles: Mapping[str, str], types: Mapping[str, Any]) -> Any:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise _line_error(file, number, line, roles, error) from error
    before: set[str] = set()
    needed = {name: role for name, role in roles.items() if not (role in before or before.add(role))}
    check_columns(file, needed, list(found))
    kinds = {name: pa.scalar(found.get(name)).type for name in roles}
    is_unknown = {name: pa.types.is_null(getattr(kind, "value_type", kind)) for name, kind in kinds.items()}
    return pa.schema(
        {name: types.get(roles[name], pa.string()) if is_unknown[name] else kind for name, kind in kinds.items()}
    )


def _parse_json(block: bytes, schema: Any) -> Any:
    parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    read = pyarrow.json.ReadOptions(block_size=len(block) + 1)  # else a line may be longer than pyarrow's block
    table = pyarrow.json.read_json(pa.BufferReader(block), read_options=read, parse_options=parse)
    table.validate(full=True)  # texts may not be UTF-8
    return table


def _line_error(file: Path, number: int, line: bytes, names: Mapping[str, str], reason: object) -> ValueError:
    reason = str(reason).partition(" in row ")[0]  # counted in the parsed text, not in the file
    return ValueError(
        f"{file}, line {number + 1} is {shorten(line.decode(errors='replace'))}, expected an object with "
        f"{', '.join(map(repr, names))}, of the types in the first line ({reason}): correct it"
    )


def _whole_lines(stream: Any) -> Iterator[bytes]:
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
        except (ValueError, pa.ArrowException):
            return True
        return False

    return bisect(range(1, len(items)), False, key=fails)
