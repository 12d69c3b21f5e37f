# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run has on the disk: a folder of finished parts beside the output, and the output once all are there.

    recs.parquet.parts/manifest.json            what decides the rows; parts of another run are never mixed in
    recs.parquet.parts/part-00000012.parquet    the rows of window 12, complete: written elsewhere first, then renamed
    recs.parquet                                all parts in order; it takes its name when it is whole

Killed at any moment, the run leaves that and maybe a temporary file, which the next one removes. Of two runs at once
the second is refused. Knows no rows' meaning, but for their column `error`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hf_gr.files.atomic import replaced_file
from hf_gr.files.tables import pa, pyarrow

from .users import READ_ERRORS, Paths

try:
    import fcntl
except ImportError:  # not on Windows, where two runs at once are not noticed
    fcntl = None

MANIFEST, STOPPED = "manifest.json", "stopped"
DIGEST_KEY = b"hf_gr.recommend"  # of the output's metadata: the digest of the run that made it
GROUP_ROWS = 2**13  # of the output's row groups: small ones take space, large ones memory


class Parts:
    """The parts of one run.

    Args:
        output: the Parquet file to be made.
        with_errors: whether it has the parts' column `error`; without, no row may have one.
    """

    def __init__(self, output: Path, *, with_errors: bool) -> None:
        self.output = output
        self.folder = folder_of(output)
        self.with_errors = with_errors
        self.manifest: dict[str, Any] = {}
        self._lock: int | None = None

    def prepare(self, manifest: Mapping[str, Any], *, overwrite: bool) -> bool:
        """Take up the run where it stopped, or begin it; by one process alone, which then calls `release`.

        Args:
            manifest: all that decides the rows, as JSON has it.
            overwrite: whether an output of another run may be replaced, and its parts removed.

        Returns:
            Whether there is nothing left to do: the output is there, made by the same run.

        Raises:
            ValueError: another run's output or parts are there, or another run is at work.
            OSError: the folder cannot be made.
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
            self._clear("part-*.parquet", MANIFEST)  # in this order: killed between, the parts are still another's
        if self.output.exists() and not overwrite:
            with suppress(OSError):
                self.folder.rmdir()  # where there is nothing in it
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
        """Let others have the parts."""
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
        """Put down a finished window.

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
            pass  # on a full disk they go on to the end of their rows

    def discard_empty(self) -> None:
        """Remove the folder of a run that has failed without finishing a window."""
        if not self.count():
            self._clear("*.tmp", STOPPED, MANIFEST)
            with suppress(OSError):  # where there is something of somebody else's
                self.folder.rmdir()

    @property
    def is_stopped(self) -> bool:
        """Whether some process has failed."""
        return (self.folder / STOPPED).exists()

    def merge(self, num_windows: int) -> tuple[int, int]:
        """Make the output of all parts, and remove these; by one process alone.

        Returns:
            The number of rows, and of those with an error.

        Raises:
            ValueError: a part that is missing or damaged, or a row with an error where there may be none.
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

    def totals(self) -> tuple[int, int]:
        """The rows of the output, and how many have an error."""
        with pyarrow.parquet.ParquetFile(self.output) as reader:
            num_rows, num_errors = reader.metadata.num_rows, 0
            if self.with_errors:
                for batch in reader.iter_batches(columns=["error"]):
                    num_errors += batch.num_rows - batch.column(0).null_count
        return num_rows, num_errors

    @property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    @property
    def _mark(self) -> bytes:
        """What the output says of the run that made it."""
        return f"{self._digest}{' with errors' if self.with_errors else ''}".encode()

    def _groups(self, num_windows: int) -> Iterator[Sequence[Any]]:
        """The rows of all parts in order, as the output has them, some parts at a time."""
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
        """Remove files of the folder. The folder stays: it is what is locked."""
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
        """The manifest that is there; None for none, or for one that is no manifest."""
        try:
            found = json.loads((self.folder / MANIFEST).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and {"digest", "overwrite", "run"} <= set(found) else None


def folder_of(output: Path) -> Path:
    """Where the parts of an output are until it is whole."""
    return output.with_name(output.name + ".parts")


def check_output(output: Path, users: Paths) -> None:
    """Refuse an output that cannot be written, or that would be read as users, before any work.

    Raises:
        ValueError: another ending than Parquet's, a folder in its place, a folder that is missing or read-only, or
            one of the tables of users or their folder.
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
    given = [users] if isinstance(users, (str, os.PathLike)) else users
    for path in map(Path, given):
        if path.resolve() in (output.resolve(), output.resolve().parent):
            raise ValueError(
                f"output={str(output)!r} is {'in ' if path.is_dir() else ''}users={str(path)!r}, expected a file "
                "elsewhere: it would be read as users"
            )


@contextmanager
def _written(path: Path, *, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """See `replaced_file`; here a full disk is told with what to do."""
    try:
        with replaced_file(path, temporary=temporary) as file:
            yield file
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error}), expected room on the disk: what is finished is kept; make room and "
            "repeat the run"
        ) from error


def _lock(folder: Path) -> int | None:
    """Take a folder for this process, until what is returned is closed or the process ends, however it does.

    Raises:
        ValueError: another process has it.
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
        pass  # some network file systems have no locks
    return descriptor


def _difference(found: dict[str, Any] | None, manifest: Mapping[str, Any]) -> str:
    """What differs between two runs, for a message."""
    if found is None or not isinstance(found["run"], dict):
        return ""
    names = {*found["run"], *manifest}
    other = sorted(name for name in names if found["run"].get(name) != manifest.get(name))
    return f" (with another {', another '.join(other)})" if other else ""
