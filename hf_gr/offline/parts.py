# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's files on disk: a folder of finished parts beside the output, and the output once all are finished.

    recs.parquet.parts/manifest.json            what decides the rows; parts of another run are never mixed in
    recs.parquet.parts/part-00000012.parquet    the rows of window 12, complete: written elsewhere first, then renamed
    recs.parquet                                all parts in order; it gets its name when it is complete

A run killed at any moment leaves these files and maybe a temporary one, which the next run removes. Of two concurrent
runs the second is refused. Knows nothing of the rows' meaning except the columns that are counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hf_gr.files.atomic import replaced_file
from hf_gr.tables.files import READ_ERRORS, pa, pc, pyarrow
from hf_gr.tables.memory import paths_of

try:
    import fcntl
except ImportError:  # on Windows two concurrent runs are not noticed
    fcntl = None

IS_FALLBACK, NUM_DROPPED = "is_fallback", "num_dropped"  # columns of the rows, if they are asked for
MANIFEST, STOPPED = "manifest.json", "stopped"
DIGEST_KEY = b"hf_gr.recommend"  # in the output's metadata: the digest of the run that wrote it
GROUP_ROWS = 2**13  # per row group of the output: small ones take space, large ones memory


@dataclass(frozen=True)
class Totals:
    """What a run's output has: rows, those with an error, those answered by the fallback, and dropped items."""

    num_rows: int
    num_skipped: int = 0
    num_fallback: int = 0
    num_dropped: int = 0


class Parts:
    """The parts of one run.

    Args:
        output: the Parquet file to write.
        with_errors: whether it keeps the parts' column `error`; if not, no row may have one.
    """

    def __init__(self, output: Path, *, with_errors: bool) -> None:
        self.output = output
        self.folder = folder_of(output)
        self.with_errors = with_errors
        self.manifest: dict[str, Any] = {}
        self._lock: int | None = None

    def prepare(self, manifest: Mapping[str, Any], *, overwrite: bool) -> bool:
        """Resume the run or begin it; only one process calls this, and then `release`.

        Args:
            manifest: all that decides the rows, as JSON values.
            overwrite: whether to replace another run's output, and remove its parts.

        Returns:
            Whether there is nothing left to do: the same run has written the output.

        Raises:
            ValueError: another run's output or parts exist, or another run is in progress.
            OSError: the folder cannot be created.
        """
        self.manifest = dict(manifest)
        if not self._is_done():
            self.folder.mkdir(exist_ok=True)
            self._lock = _lock(self.folder)
        if self._is_done():
            shutil.rmtree(self.folder, ignore_errors=True)
            return True
        found = self._read_manifest()
        if found is not None and found["digest"] == self._digest:
            overwrite = overwrite or found["overwrite"]
        elif self.count() and not overwrite:
            raise ValueError(
                f"{self.folder} has parts of another run{_difference(found, self.manifest)}, expected one of the same "
                "users, models and settings: repeat that run, or remove the folder, or pass overwrite=True "
                "(--overwrite)"
            )
        else:
            self._clear("part-*.parquet", MANIFEST)  # in this order: a kill in between leaves another run's parts
        if self.output.exists() and not overwrite:
            with suppress(OSError):
                self.folder.rmdir()  # if it is empty
            raise ValueError(
                f"{self.output} is there already, of another run, expected a new name: name another one, or pass "
                "overwrite=True (--overwrite)"
            )
        self._clear("*.tmp", STOPPED)
        text = json.dumps({"digest": self._digest, "overwrite": overwrite, "run": self.manifest}, indent=2)
        with _written(self.folder / MANIFEST) as file:
            file.write(text.encode())
        return False

    def release(self) -> None:
        """Release the lock on the parts."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def has(self, number: int) -> bool:
        """Whether a window is finished."""
        return self._path(number).exists()

    def count(self) -> int:
        """How many windows are finished."""
        return sum(1 for _ in self.folder.glob("part-*.parquet"))

    def write(self, number: int, table: Any) -> None:
        """Write a finished window.

        Raises:
            OSError: the disk is full or broken.
        """
        with _written(self._path(number)) as file:
            pyarrow.parquet.write_table(table, file)

    def stop(self) -> None:
        """Tell the other processes that this one has failed."""
        try:
            (self.folder / STOPPED).touch()
        except OSError:
            pass  # on a full disk they continue to the end of their rows

    def discard_empty(self) -> None:
        """Remove the folder of a run that failed before it finished a window."""
        if not self.count():
            self._clear("*.tmp", STOPPED, MANIFEST)
            with suppress(OSError):  # it has other files
                self.folder.rmdir()

    @property
    def is_stopped(self) -> bool:
        """Whether any process has failed."""
        return (self.folder / STOPPED).exists()

    def merge(self, num_windows: int) -> Totals:
        """Merge all parts into the output, and remove them; only one process calls this.

        Raises:
            ValueError: a part is missing or damaged, or a row has an error and none may have one.
            OSError: the disk is full or broken.
        """
        missing = next((number for number in range(num_windows) if not self.has(number)), None)
        if missing is not None:
            raise ValueError(f"{self._path(missing)} is missing, expected {num_windows} parts: repeat the run")
        metadata = {DIGEST_KEY: self._mark}
        writer: Any = None
        with _written(self.output, temporary=self.folder / "merged.tmp") as file:
            try:
                for tables in self._groups(num_windows):
                    group = pa.concat_tables(tables).combine_chunks().replace_schema_metadata(metadata)
                    writer = writer or pyarrow.parquet.ParquetWriter(file, group.schema)
                    writer.write_table(group, row_group_size=len(group))
            finally:
                if writer is not None:
                    writer.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.totals()

    def totals(self) -> Totals:
        """What the output has."""
        with pyarrow.parquet.ParquetFile(self.output) as reader:
            there = set(reader.schema_arrow.names) & {IS_FALLBACK, NUM_DROPPED, *["error"] * self.with_errors}
            counts = dict.fromkeys(there, 0)
            for batch in reader.iter_batches(columns=sorted(there)) if there else ():
                for name in there:
                    column = batch.column(name)
                    counts[name] += pc.sum(column.is_valid() if name == "error" else column).as_py() or 0
            return Totals(
                reader.metadata.num_rows,
                num_skipped=counts.get("error", 0),
                num_fallback=counts.get(IS_FALLBACK, 0),
                num_dropped=counts.get(NUM_DROPPED, 0),
            )

    @property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    @property
    def _mark(self) -> bytes:
        """What the output records about the run that wrote it."""
        return f"{self._digest}{' with errors' if self.with_errors else ''}".encode()

    def _groups(self, num_windows: int) -> Iterator[Sequence[Any]]:
        """The output's rows, from all parts in order, several parts at a time."""
        held: list[Any] = []
        for number in range(num_windows):
            table = self._read(number)
            if not self.with_errors:
                errors = table.column("error")
                if errors.null_count < len(errors):
                    raise ValueError(errors.drop_null()[0].as_py())
                table = table.drop_columns(["error"])
            held.append(table)
            if sum(map(len, held)) >= GROUP_ROWS or number == num_windows - 1:
                yield held
                held = []

    def _clear(self, *patterns: str) -> None:
        """Remove files of the folder. The folder stays: it holds the lock."""
        for pattern in patterns:
            for path in self.folder.glob(pattern):
                path.unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.parquet"

    def _read(self, number: int) -> Any:
        path = self._path(number)
        try:
            with pyarrow.parquet.ParquetFile(path) as reader:
                return reader.read()
        except READ_ERRORS as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is damaged ({reason}), expected a part: remove it and repeat the run") from error

    def _is_done(self) -> bool:
        try:
            metadata = pyarrow.parquet.read_schema(self.output).metadata or {}
        except READ_ERRORS:
            return False
        return metadata.get(DIGEST_KEY) == self._mark

    def _read_manifest(self) -> dict[str, Any] | None:
        """The existing manifest; None if it is missing or not a manifest."""
        try:
            found = json.loads((self.folder / MANIFEST).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and {"digest", "overwrite", "run"} <= set(found) else None


def folder_of(output: Path) -> Path:
    """The folder of an output's parts until it is complete."""
    return output.with_name(output.name + ".parts")


def check_output(output: Path, users: Any, *, argument: str = "users") -> None:
    """Refuse an output that cannot be written, or that would be read as users, before any work.

    Raises:
        ValueError: its suffix is not Parquet's, it is a folder, its folder is missing or read-only, or it is one of
            the tables of users or in their folder.
    """
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


@contextmanager
def _written(path: Path, *, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """See `replaced_file`; here the error for a full disk says what to do."""
    try:
        with replaced_file(path, temporary=temporary) as file:
            yield file
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error}), expected room on the disk: what is finished is kept; make room and "
            "repeat the run"
        ) from error


def _lock(folder: Path) -> int | None:
    """Lock a folder for this process, until the returned file is closed or the process ends in any way.

    Raises:
        ValueError: another process holds the lock.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"{folder} is being written to by another run, expected one at a time: wait for it, or name another output"
        ) from None
    except OSError:
        pass  # some network file systems do not have locks
    return descriptor


def _difference(found: dict[str, Any] | None, manifest: Mapping[str, Any]) -> str:
    """What differs between two runs, for a message."""
    if found is None or not isinstance(found["run"], dict):
        return ""
    names = {*found["run"], *manifest}
    other = sorted(name for name in names if found["run"].get(name) != manifest.get(name))
    return f" (with another {', another '.join(other)})" if other else ""
