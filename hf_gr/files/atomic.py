# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: files get their names once all data is on disk. Knows nothing of the contents.

After an error, a kill or a power failure, each name holds either the old content or the new. Until then the new
content is in a hidden folder in the same place, which its writer has locked: the system releases the lock however the
writer dies, and the next writer of the same machine removes the folder.
"""

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

import safetensors

try:
    import fcntl
except ImportError:  # Windows: what a killed writer leaves stays
    fcntl = None


def make_folder(directory: Path) -> None:
    """Create the folder to save to, unless it exists; a `ValueError` if a file has that name."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"save_directory={str(directory)!r} is a file, expected a folder: name another one")
    directory.mkdir(parents=True, exist_ok=True)


@contextmanager
def replaced_file(path: Path, *, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends, and is removed if the block fails.

    Until then it is in a hidden folder, so that several may write at once; or it is `temporary`, which survives a
    kill: the caller removes it, or overwrites it the next time.
    """
    if temporary is None:
        with _hidden_folder(path.parent) as hidden, replaced_file(path, temporary=hidden / path.name) as file:
            yield file
        return
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replaced_files(directory: Path, *, first: Sequence[str] = ()) -> Iterator[Path]:
    """A folder to write files into, which replace those in `directory` when the block ends: `first`, then by name.

    All of them are on disk before the first one is replaced; until then the old ones are untouched. They get the usual
    modes of new files, even if a library creates files that only their owner can read.
    """
    with _hidden_folder(directory) as hidden:
        work = hidden / "new"
        work.mkdir()
        yield work
        names = [*first, *sorted({path.name for path in work.iterdir()}.difference(first))]
        for name in names:
            (work / name).chmod(work.stat().st_mode & 0o666)
            _sync(work / name)
        for name in names:
            (work / name).replace(directory / name)
        _sync(directory)


@contextmanager
def _hidden_folder(parent: Path) -> Iterator[Path]:
    """A locked folder of this writer alone, removed when the block ends; first, those of dead writers are removed."""
    # Not every shared disk passes locks on: other machines' folders are left to them.
    prefix = f".unfinished-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"
    for left in parent.glob(f"{prefix}*"):
        if (lock := _lock(left)) is not None:
            _remove(left, lock)
    while True:
        hidden = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _lock(hidden, wait=True)
        if hidden.exists():
            break
        if lock is not None:  # before it was locked, another writer took it for a dead one's
            os.close(lock)
    try:
        yield hidden
    finally:
        _remove(hidden, lock)


def _remove(hidden: Path, lock: int | None) -> None:
    shutil.rmtree(hidden, ignore_errors=True)
    if lock is not None:
        os.close(lock)
    with suppress(OSError):
        hidden.rmdir()  # a network disk keeps a folder while a file in it is open


def _lock(folder: Path, *, wait: bool = False) -> int | None:
    """Lock a folder that is no link; None if it is gone, if another writer has it, or if this disk has no locks."""
    if fcntl is None:
        return None
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(lock)
        return None
    return lock


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Turn a failed write of safetensors, as on a full disk, into an OSError that names `path`."""
    try:
        yield
    except safetensors.SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _sync(path: Path) -> None:
    """Flush a file, or a folder's names, to disk, if the system can do that for folders."""
    is_folder = path.is_dir()
    with suppress(OSError) if is_folder else nullcontext():
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
