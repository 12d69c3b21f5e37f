# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: files and folders get their names once all data is on disk. Knows nothing of the contents.

After an error, a kill or a power failure, each name holds either the old content or the new.

Until then the new content is in a hidden folder beside it. A writer holds a lock on its folder: the system releases it
when the writer dies, however it dies, and the next writer removes what is left. Only a writer on the same machine,
since the same boot, and on the same mount is judged by its lock: not every shared disk passes locks on to others.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import safetensors

try:
    import fcntl
except ImportError:  # Windows: what a killed writer leaves stays
    fcntl = None


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
        temporary: its name until then; by default in a hidden folder, so that several may write at once. A given file
            survives a kill: the caller removes it, or overwrites it the next time.
    """
    if temporary is None:
        with _hidden_folder(path.parent, prefix=".unfinished-") as hidden:
            with replaced_file(path, temporary=hidden / path.name) as file:
                yield file
        return
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
        prefix: of the hidden folder's name, inside `directory`.
        first: files to replace before all others, in this order; the rest follow by name.
    """
    with _hidden_folder(directory, prefix=prefix) as hidden:
        work = hidden / "new"
        work.mkdir()
        yield work
        written = {path.name for path in work.iterdir()}
        names = [*first, *sorted(written.difference(first))]
        (hidden / "usual").touch()
        mode = (hidden / "usual").stat().st_mode
        for name in names:
            (work / name).chmod(mode)
            _sync(work / name)
        for name in names:
            (work / name).replace(directory / name)
        _sync_folder(directory)


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which replaces `target` when the block ends.

    A reader of `target` finds the old folder, the new one or none, never half of one. If a kill leaves none, the next
    writer beside it brings the old one back.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(target.parent, prefix=".unfinished-") as hidden:
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
        _sync_folder(target.parent)


@contextmanager
def _hidden_folder(parent: Path, *, prefix: str) -> Iterator[Path]:
    """A folder of this writer alone, gone when the block ends; first, those of dead writers are removed."""
    prefix = f"{prefix}{_boot()}-{parent.stat().st_dev:x}-"
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        if not left.is_symlink():
            _remove_if_dead(left)
    while True:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
            try:
                lock = _lock(Path(name), wait=True)
            except FileNotFoundError:
                continue  # another writer found it before it was locked
            try:
                yield Path(name)
            finally:
                _restore(Path(name))
                if lock is not None:
                    os.close(lock)
            return


def _remove_if_dead(hidden: Path) -> None:
    """Remove a folder that no living writer has locked."""
    with suppress(OSError):  # it may be another user's, or gone
        lock = _lock(hidden, wait=False)
        if lock is not None:
            try:
                _restore(hidden)
                shutil.rmtree(hidden, ignore_errors=True)
            finally:
                os.close(lock)
            hidden.rmdir()  # a network disk keeps a folder while a file in it is open


def _restore(hidden: Path) -> None:
    """Give an old folder its name back if its writer ended before the new one had it."""
    for old in hidden.glob("old/*"):
        if not (target := hidden.parent / old.name).exists():
            old.rename(target)


def _lock(hidden: Path, *, wait: bool) -> int | None:
    """Lock a hidden folder; None if another writer has, or if this disk has no locks.

    Raises:
        FileNotFoundError: the folder is gone.
        OSError: the file to lock cannot be created.
    """
    if fcntl is None:
        return None
    path = hidden / "lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(lock)
        return None
    try:  # not the number of links: a network disk renames what is removed while it is open
        is_there = os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        is_there = False
    if not is_there:
        os.close(lock)
        raise FileNotFoundError(hidden)
    return lock


@cache
def _boot() -> str:
    """8 letters for this machine since it was started; containers share them with their host, and its locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    except OSError:
        return hashlib.sha256(f"{platform.node()} {uuid.getnode()}".encode()).hexdigest()[:8]


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
