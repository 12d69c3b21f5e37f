# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's files on disk: a folder of finished parts next to the output, and the output once all are finished.

    recs.parquet.parts/part-00000012.parquet    the rows of window 12, complete
    recs.parquet                                all parts in order; it gets its name when it is complete

Knows nothing of the rows' meaning except the columns that are counted.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_gr.tables.files import READ_ERRORS, pa, pc, pyarrow
from hf_gr.tables.memory import paths_of
from hf_gr.tables.shards import Shards, written

# Columns of the rows, if they are asked for.
IS_FALLBACK, NUM_DROPPED, NUM_PROVEN, SIMILAR_TO = "is_fallback", "num_dropped", "num_proven", "similar_to"
PART, STOPPED = "part-{:08d}.parquet", "stopped"
DIGEST_KEY = b"hf_gr.recommend"  # in the output's metadata: the digest of the run that wrote it
GROUP_ROWS = 2**13  # per row group of the output: small ones take space, large ones memory


class Parts(Shards):
    """The parts of one run, and its output, which keeps their column `error`, or may have no row with one."""

    def __init__(self, output: Path, settings: Mapping[str, Any], *, with_errors: bool) -> None:
        super().__init__(folder_of(output), PART, settings)
        self.output, self.with_errors = output, with_errors
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        self._mark = f"{digest}{' with errors' if with_errors else ''}".encode()

    def prepare(self, *, overwrite: bool) -> bool:
        """Resume or begin the run; True if it has written the output. One process calls this, and then `release`."""
        if not self._is_done():
            self.begin()
        if self._is_done():
            shutil.rmtree(self.folder, ignore_errors=True)
            return True
        other = self.differences()
        if other and not overwrite:
            raise ValueError(
                f"{self.folder} has parts of another run (with another {', another '.join(other)}), expected one of "
                "the same users, models and settings: repeat that run, or remove the folder, or pass overwrite=True"
            )
        if self.output.exists() and not overwrite:
            with suppress(OSError):
                self.folder.rmdir()  # if it is empty
            raise ValueError(
                f"{self.output} is there already, of another run, expected a new name: name another one, or pass "
                "overwrite=True"
            )
        self.clear(STOPPED, *["part-*.parquet"] * bool(other))
        return False

    def count(self) -> int:
        """How many windows are finished."""
        return len(self.paths())

    def stop(self) -> None:
        """Tell the other processes that this one has failed."""
        with suppress(OSError):  # on a full disk they continue to the end of their rows
            (self.folder / STOPPED).touch()

    @property
    def is_stopped(self) -> bool:
        """Whether one of them has failed."""
        return (self.folder / STOPPED).exists()

    def discard_empty(self) -> None:
        """Remove the folder of a run that failed before it finished a window."""
        if not self.count():
            self.clear("*.tmp", STOPPED)
            with suppress(OSError):  # it has other files
                self.folder.rmdir()

    def merge(self, num_windows: int) -> dict[str, int]:
        """Merge all parts into the output, and remove them; only one process calls this. Returns `totals`."""
        missing = next((number for number in range(num_windows) if not self.has(number)), None)
        if missing is not None:
            raise ValueError(f"{self.path(missing)} is missing, expected {num_windows} parts: repeat the run")
        writer: Any = None
        with written(self.output, self.folder) as file:
            try:
                for tables in self._groups(num_windows):
                    group = pa.concat_tables(tables).combine_chunks().replace_schema_metadata({DIGEST_KEY: self._mark})
                    writer = writer or pyarrow.parquet.ParquetWriter(file, group.schema)
                    writer.write_table(group, row_group_size=len(group))
            finally:
                if writer is not None:
                    writer.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.totals()

    def totals(self) -> dict[str, int]:
        """What the output has: fields of `Recommended`."""
        counted = {"error": "num_skipped", IS_FALLBACK: "num_fallback", NUM_DROPPED: "num_dropped"}
        with pyarrow.parquet.ParquetFile(self.output) as reader:
            found = {"num_rows": reader.metadata.num_rows} | dict.fromkeys(counted.values(), 0)
            there = sorted(counted.keys() & set(reader.schema_arrow.names))
            for batch in reader.iter_batches(columns=there) if there else ():
                for name in there:
                    column = batch.column(name)
                    found[counted[name]] += pc.sum(column.is_valid() if name == "error" else column).as_py() or 0
        return found

    def _groups(self, num_windows: int) -> Iterator[Sequence[Any]]:
        """The output's rows, from all parts in order, several parts at a time."""
        held: list[Any] = []
        for number in range(num_windows):
            table = self.read(number)
            if not self.with_errors:
                errors = table.column("error")
                if errors.null_count < len(errors):
                    raise ValueError(errors.drop_null()[0].as_py())
                table = table.drop_columns(["error"])
            held.append(table)
            if sum(map(len, held)) >= GROUP_ROWS or number == num_windows - 1:
                yield held
                held = []

    def _is_done(self) -> bool:
        try:
            metadata = pyarrow.parquet.read_schema(self.output).metadata or {}
        except READ_ERRORS:
            return False
        return metadata.get(DIGEST_KEY) == self._mark


def folder_of(output: Path) -> Path:
    """The folder of an output's parts until it is complete."""
    return output.with_name(output.name + ".parts")


def check_output(output: Path, users: Any, *, argument: str = "users") -> None:
    """Refuse an output that is no Parquet, cannot be written, or would be read as users, before any work."""
    if output.suffix.lower() not in (".parquet", ".pq"):
        raise ValueError(f"output={str(output)!r}, expected a name that ends in .parquet: it holds lists")
    parent = output.absolute().parent
    if output.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        found = output if output.is_dir() else parent
        raise ValueError(
            f"output={str(output)!r}: {found} is {'a folder' if output.is_dir() else 'no folder to write to'}, "
            "expected a file in a folder that may be written to: name another one"
        )
    for path in map(Path, paths_of(users)):
        if path.resolve() in (output.resolve(), output.resolve().parent):
            raise ValueError(
                f"output={str(output)!r} is {'in ' if path.is_dir() else ''}{argument}={str(path)!r}, expected a "
                f"file elsewhere: it would be read as {argument}"
            )
