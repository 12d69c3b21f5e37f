# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: files and folders get their names once all data is on disk. Knows nothing of the contents.

After an error, a kill or a power failure, each name holds either the old content or the new. Until then the new
content is in a hidden folder next to it, which its writer has locked: the system releases the lock when the writer
dies, however it dies, and the next writer of the same machine removes what is left.
"""

from __future__ import annotations

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
    """A folder to write into, whose files replace those in `directory` when the block ends: `first`, then by name.

    All of them are on disk before the first one is replaced; until then the old ones are untouched. They get the usual
    modes of new files, even if a library creates files that only their owner can read.
    """
    with _hidden_folder(directory) as hidden:
        work = hidden / "new"
        work.mkdir()
        yield work
        names = [*first, *sorted({path.name for path in work.iterdir()}.difference(first))]
        (hidden / "usual").touch()
        mode = (hidden / "usual").stat().st_mode
        for name in names:
            (work / name).chmod(mode)
            _sync(work / name)
        for name in names:
            (work / name).replace(directory / name)
        _sync(directory)


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which replaces `target` when the block ends.

    A reader of `target` finds the old folder, the new one or none, never half of one. If a kill leaves none, the next
    writer there brings the old one back.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(target.parent) as hidden:
        new, old = hidden / "new", hidden / "old" / target.name
        new.mkdir()
        old.parent.mkdir()
        yield new
        for path in new.rglob("*"):
            if path.is_file():
                _sync(path)
        if target.exists():
            target.rename(old)  # an end from here on: see _restore
        new.replace(target)
        _sync(target.parent)


@contextmanager
def _hidden_folder(parent: Path) -> Iterator[Path]:
    """A locked folder of this writer alone, gone when the block ends; first, those of dead writers are removed."""
    # Not every shared disk passes locks on: other machines' folders are left to them.
    prefix = f".unfinished-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"
    taken = _lock(parent, wait=True)  # nobody takes a folder that is not locked yet for a dead writer's
    try:
        for left in parent.glob(f"{prefix}*"):
            lock = _lock(left)
            if lock is not None:
                _restore(left)
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
                with suppress(OSError):
                    left.rmdir()  # a network disk keeps a folder while a file in it is open
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        lock = _lock(Path(made.name))
    finally:
        if taken is not None:
            os.close(taken)
    with made as name:
        try:
            yield Path(name)
        finally:
            _restore(Path(name))
            if lock is not None:
                os.close(lock)


def _restore(hidden: Path) -> None:
    """Give an old folder its name back if its writer ended before the new one had it."""
    for old in hidden.glob("old/*"):
        if not (target := hidden.parent / old.name).exists():
            old.rename(target)


def _lock(folder: Path, *, wait: bool = False) -> int | None:
    """Lock a folder, no link; None if another writer has, or if this disk has no locks."""
    if fcntl is None:
        return None
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (0 if wait else os.O_NOFOLLOW))
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
