# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The files of a run that may be killed at any moment: shards of Parquet that are complete or not there.

A shard is written under another name first, then renamed; what a kill leaves, the next run removes. Each records what
decides its rows, so that those of another run are never mixed in. Of two concurrent runs the second is refused.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hf_gr.files.atomic import replaced_file

from .files import READ_ERRORS, pyarrow

try:
    import fcntl
except ImportError:  # on Windows two concurrent runs are not noticed
    fcntl = None

KEY = b"hf_gr.shard"  # in a shard's metadata: what decides its rows


class Shards:
    """The shards of one run, in a folder that `begin` creates; `settings` is all that decides the rows, as JSON.

    Damaged shards are a `ValueError`, a full disk is an `OSError`.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(settings))  # as read back: tuples become lists
        self._name, self._lock = name, None

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / self._name.format(number)

    def paths(self) -> list[Path]:
        """The files of all finished shards, in order."""
        return sorted(self.folder.glob(re.sub(r"\{.*\}", "[0-9]*", self._name)))

    def has(self, number: int) -> bool:
        """Whether a shard is finished."""
        return self.path(number).exists()

    def begin(self) -> None:
        """Create the folder, lock it until `release`, and remove what a kill left; one process of a run calls this."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        self.clear("*.tmp")

    def release(self) -> None:
        """Release the lock; the system does, too, however a process ends."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def differences(self) -> list[str]:
        """The settings in which the first shard that is there differs from this run, all if it records none."""
        if not (paths := self.paths()):
            return []
        found: dict[str, Any] = {}
        with suppress(ValueError):
            found = self.recorded(paths[0])
        names = {*found, *self.settings} - {"of_shard"}
        return sorted(name for name in names if found.get(name) != self.settings.get(name))

    def recorded(self, path: Path) -> dict[str, Any]:
        """What a shard records: the settings, and its own entries, `of_shard`."""
        metadata = _read(path, lambda: pyarrow.parquet.read_schema(path).metadata) or {}
        if KEY not in metadata:
            raise ValueError(f"{path} does not say what it is of, expected a shard of a run: remove it")
        return json.loads(metadata[KEY])

    def write(self, number: int, table: Any, of_shard: Any = None, **how: Any) -> None:
        """Write a finished shard; `how` are options of pyarrow's `write_table`."""
        record = json.dumps(self.settings | {"of_shard": of_shard}).encode()
        with written(self.path(number), self.folder) as file:
            pyarrow.parquet.write_table(table.replace_schema_metadata({KEY: record}), file, **how)

    def read(self, number: int) -> Any:
        """A shard, as an Arrow table."""
        path = self.path(number)
        return _read(path, lambda: pyarrow.parquet.ParquetFile(path).read().replace_schema_metadata())

    def clear(self, *patterns: str) -> None:
        """Remove files of the folder. The folder stays: it holds the lock."""
        for pattern in patterns:
            for path in self.folder.glob(pattern):
                path.unlink()


@contextmanager
def written(path: Path, folder: Path) -> Iterator[BinaryIO]:
    """A file that gets its name once it is complete, and is in a folder of shards until then."""
    try:
        with replaced_file(path, temporary=folder / f".{path.name}.tmp") as file:
            yield file
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error}), expected room on the disk: what is finished is kept; make room and "
            "repeat the run"
        ) from error


def _read(path: Path, read: Any) -> Any:
    try:
        return read()
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged ({reason}), expected a shard: remove it and repeat the run") from error


def _lock(folder: Path) -> int | None:
    """Lock a folder for this process, until the returned file is closed or the process ends in any way."""
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
