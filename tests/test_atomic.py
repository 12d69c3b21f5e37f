# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one writer: whatever is interrupted, a name stands for the old content or for the new, which is on the disk."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors

from hf_gr.files import atomic


@contextmanager
def one_file(folder: Path) -> Any:
    with atomic.replaced_file(folder / "a") as file:
        yield lambda name, text: file.write(text.encode())


@contextmanager
def several_files(folder: Path) -> Any:
    with atomic.replaced_files(folder, prefix=".several-", first=("b",)) as work:
        yield lambda name, text: (work / name).write_text(text)


@contextmanager
def whole_folder(folder: Path) -> Any:
    with atomic.replaced_folder(folder / "sub") as work:
        yield lambda name, text: (work / name).write_text(text)


WRITERS = {"one file": (one_file, ["a"]), "files": (several_files, ["a", "b"]), "folder": (whole_folder, ["a", "b"])}
writers = pytest.mark.parametrize(("writer", "names"), WRITERS.values(), ids=WRITERS)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def write(writer: Callable[[Path], Any], names: list[str], text: Any, folder: Path) -> None:
    with writer(folder) as put:
        for name in names:
            put(name, text if isinstance(text, str) else "half")
        if not isinstance(text, str):
            text()


@writers
def test_what_is_written_takes_the_place_of_the_old(writer: Any, names: list[str], tmp_path: Path) -> None:
    for text in ("old", "new"):
        write(writer, names, text, tmp_path)
        assert contents(tmp_path) == dict.fromkeys(names, text)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@writers
@pytest.mark.parametrize("step", ["block", "fsync", "replace", "synced"])
def test_what_is_interrupted_leaves_the_old(
    step: str, writer: Any, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    write(writer, names, "old", tmp_path)
    with monkeypatch.context() as patch:
        if step != "block":
            owner: Any = {"fsync": os, "replace": Path, "synced": atomic}[step]
            patch.setattr(owner, "_sync_folder" if step == "synced" else step, fail)
        with pytest.raises(KeyboardInterrupt):
            write(writer, names, fail if step == "block" else "new", tmp_path)
    assert contents(tmp_path) == dict.fromkeys(names, "new" if step == "synced" else "old")
    assert not hidden_folders(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells the files of descriptors on Linux alone")
@writers
def test_all_is_on_the_disk_before_the_first_name_is_taken(
    writer: Any, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: (steps.append(Path(f"/proc/self/fd/{file}").readlink().name), fsync(file))
    )
    monkeypatch.setattr(Path, "replace", lambda *paths: (steps.append("replace"), replace(*paths))[1])
    write(writer, names, "new", tmp_path)
    first = steps.index("replace")
    assert len(steps[:first]) == len(names)
    assert all(any(name in step for step in steps[:first]) for name in names)
    assert steps[-1] == tmp_path.name  # the folder, which has the names


def test_files_are_replaced_in_the_order_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: (replaced.append(to.name), replace(path, to))[1])
    write(several_files, ["a", "c", "b"], "new", tmp_path)
    assert replaced == ["b", "a", "c"]


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX")
def test_files_have_the_usual_modes(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with atomic.replaced_files(tmp_path, prefix=".private-") as work:
        (work / "a").touch(mode=stat.S_IRUSR | stat.S_IWUSR)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_safetensors_cannot_write_is_an_os_error(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="a.safetensors cannot be written: no space"),
        atomic.os_errors(tmp_path / "a.safetensors"),
    ):
        raise safetensors.SafetensorError("no space")


# What killed writers leave


HIDDEN = {"one file": ".unfinished-", "files": ".several-", "folder": ".unfinished-"}
needs_locks = pytest.mark.skipif(atomic.fcntl is None, reason="no locks, and so nothing is removed, on Windows")


def hidden_folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(".")}


@needs_locks
@pytest.mark.parametrize("kind", WRITERS)
def test_the_next_writer_removes_what_a_killed_one_left(kind: str, tmp_path: Path) -> None:
    writer, names = WRITERS[kind]
    with writer(tmp_path) as put:
        for name in names:
            put(name, "whole")
        (of_living,) = hidden_folders(tmp_path)
        assert of_living.startswith(HIDDEN[kind])
        of_dead, elsewhere = f"{of_living}dead", f"{HIDDEN[kind]}another-{of_living}"
        for name in (of_dead, elsewhere):
            shutil.copytree(tmp_path / of_living, tmp_path / name)  # nobody has locked these
        write(writer, names, "new", tmp_path)
        # A living writer's stays, and so does that of a machine, or boot, whose locks may not be seen here.
        assert hidden_folders(tmp_path) == {of_living, elsewhere}
    assert hidden_folders(tmp_path) == {elsewhere}
    shutil.rmtree(tmp_path / elsewhere)
    assert contents(tmp_path) == dict.fromkeys(names, "whole")


@needs_locks
@pytest.mark.parametrize("name", ["sub", "other"])
def test_a_folder_whose_writer_was_killed_between_its_names_comes_back(name: str, tmp_path: Path) -> None:
    """The only copy of the old one is in the hidden folder, which any writer beside it removes."""
    write(whole_folder, ["a"], "old", tmp_path)
    with atomic.replaced_folder(tmp_path / "unrelated"):
        (of_living,) = hidden_folders(tmp_path)
        of_dead = tmp_path / f"{of_living}dead"
        (of_dead / "new").mkdir(parents=True)
        (of_dead / "old").mkdir()
        (tmp_path / "sub").rename(of_dead / "old" / "sub")
        with pytest.raises(KeyboardInterrupt), atomic.replaced_folder(tmp_path / name):
            raise KeyboardInterrupt
        assert contents(tmp_path / "sub") == {"a": "old"}
        assert hidden_folders(tmp_path) == {of_living}


@needs_locks
def test_links_in_the_place_of_a_dead_writers_folder_or_lock_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with atomic.replaced_folder(tmp_path / "sub"):
        (of_living,) = hidden_folders(tmp_path)
        (tmp_path / f"{of_living}link").symlink_to(elsewhere)
        (tmp_path / f"{of_living}lock").mkdir()
        (tmp_path / f"{of_living}lock" / "lock").symlink_to(elsewhere / "made")
        write(whole_folder, ["a"], "new", tmp_path)
    assert not list(elsewhere.iterdir())


@needs_locks
def test_a_writer_of_another_mount_stays(tmp_path: Path) -> None:
    """Two containers that mount one disk in user space do not see each other's locks; mounts have numbers."""
    with atomic.replaced_folder(tmp_path / "sub"):
        (of_living,) = hidden_folders(tmp_path)
        of_mount = f"-{tmp_path.stat().st_dev:x}-"
        assert of_mount in of_living
        other = tmp_path / of_living.replace(of_mount, "-0-")
        other.mkdir()
        write(whole_folder, ["a"], "new", tmp_path)
        assert other.is_dir()


@needs_locks
def test_a_lock_that_was_renamed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network disk does with a file that is removed while it is open: its links stay."""
    flock = atomic.fcntl.flock

    def flock_late(lock: int, how: int) -> None:
        flock(lock, how)
        (tmp_path / "lock").rename(tmp_path / ".nfs0001")

    monkeypatch.setattr(atomic.fcntl, "flock", flock_late)
    with pytest.raises(FileNotFoundError):
        atomic._lock(tmp_path, wait=True)


@pytest.mark.parametrize("letters", ["a", "é"])
def test_names_may_be_as_long_as_the_system_allows(letters: str, tmp_path: Path) -> None:
    path = tmp_path / (letters * (255 // len(letters.encode())))
    with atomic.replaced_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_machines_without_a_boot_have_names_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that of one begins that of another."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError))
    names = []
    for node in ("mac", "mac-2"):
        monkeypatch.setattr(atomic.platform, "node", lambda node=node: node)
        atomic._boot.cache_clear()
        names.append(atomic._boot())
    atomic._boot.cache_clear()
    assert len(set(names)) == 2
    assert len({len(name) for name in names}) == 1


@needs_locks
def test_a_killed_process_leaves_a_folder_that_the_next_one_removes(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal; from hf_gr.files import atomic\n"
        f"with atomic.replaced_files(pathlib.Path({str(tmp_path)!r}), prefix='.several-'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len(hidden_folders(tmp_path)) == 1
    write(several_files, ["a", "b"], "new", tmp_path)
    assert not hidden_folders(tmp_path)


@needs_locks
def test_a_writer_whose_folder_is_taken_for_a_dead_ones_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a folder and its lock there is a moment; and a disk may have no locks at all."""
    lock, found = atomic._lock, []

    def removed_at_first(hidden: Path, *, wait: bool) -> int | None:
        found.append(hidden)
        if len(found) == 1:
            atomic._remove_if_dead(hidden)  # asks for the lock, too
        return lock(hidden, wait=wait)

    monkeypatch.setattr(atomic, "_lock", removed_at_first)
    write(several_files, ["a", "b"], "new", tmp_path)
    assert len(found) == 3
    assert found[0] != found[2]
    assert contents(tmp_path) == dict.fromkeys("ab", "new")
    assert not hidden_folders(tmp_path)
    monkeypatch.setattr(atomic.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    write(several_files, ["a", "b"], "newer", tmp_path)
    assert contents(tmp_path) == dict.fromkeys("ab", "newer")
