# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: files and folders get their names once all data is on disk. Knows nothing of the contents.

After an error, a kill or a power failure, each name holds either the old content or the new.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import safetensors


def make_folder(directory: Path) -> None:
    """Create the folder to save to, unless it exists.

    Raises:
        ValueError: a file has that name.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"save_directory={str(directory)!r} is a file, expected a folder: name another one")
    directory.mkdir(parents=True, exist_ok=True)


@contextmanager
def replaced_file(path: Path, *, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends, and is removed if the block fails.

    Args:
        path: its name, in an existing folder.
        temporary: its name until then; by default unique to this process, so that several may write at once. The file
            survives a kill: the caller removes it, or overwrites it the next time.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replaced_files(directory: Path, *, prefix: str, first: Sequence[str] = ()) -> Iterator[Path]:
    """A folder to write into, whose files replace those in `directory` when the block ends.

    All of them are on disk before the first one is replaced; until then the old ones are untouched. They get the usual
    modes of new files, even if a library creates files that only their owner can read.

    Args:
        directory: an existing folder.
        prefix: of the temporary folder's name, inside `directory`.
        first: files to replace before all others, in this order; the rest follow by name.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as temporary:
        work = Path(temporary)
        yield work
        written = {path.name for path in work.iterdir()}
        names = [*first, *sorted(written.difference(first))]
        (work / ".new").touch()
        mode = (work / ".new").stat().st_mode
        for name in names:
            (work / name).chmod(mode)
            _sync(work / name)
        for name in names:
            (work / name).replace(directory / name)
        _sync_folder(directory)


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which replaces `target` when the block ends.

    A reader of `target` finds the old folder, the new one or none, never half of one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        new.mkdir()
        yield new
        for path in new.rglob("*"):
            if path.is_file():
                _sync(path)
        if target.exists():
            target.rename(old)
        try:
            new.replace(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        _sync_folder(target.parent)


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Turn a failed write of safetensors, as on a full disk, into an OSError that names `path`."""
    try:
        yield
    except safetensors.SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a folder's names to disk, if the system can do that for folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
