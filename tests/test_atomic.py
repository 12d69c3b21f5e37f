# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one writer: whatever is interrupted, a name stands for the old content or for the new, which is on the disk."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hf_gr.files import atomic


@contextmanager
def one_file(folder: Path) -> Any:
    with atomic.replaced_file(folder / "a") as file:
        yield lambda name, text: file.write(text.encode())


@contextmanager
def several_files(folder: Path) -> Any:
    with atomic.replaced_files(folder, first=("b",)) as work:
        yield lambda name, text: (work / name).write_text(text)


WRITERS = {"one file": (one_file, ["a"]), "files": (several_files, ["a", "b"])}
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
            sync = atomic._sync
            failing = fail if step != "synced" else lambda path: fail() if path == tmp_path else sync(path)
            patch.setattr(owner, "_sync" if step == "synced" else step, failing)
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
    with atomic.replaced_files(tmp_path) as work:
        (work / "a").touch(mode=stat.S_IRUSR | stat.S_IWUSR)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "other").stat().st_mode


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
        of_dead, elsewhere = f"{of_living}dead", of_living.replace("unfinished-", "unfinished-another")
        for name in (of_dead, elsewhere):
            shutil.copytree(tmp_path / of_living, tmp_path / name)  # nobody has locked these
        write(writer, names, "new", tmp_path)
        # A living writer's stays, and so does that of a machine whose locks may not be seen here.
        assert hidden_folders(tmp_path) == {of_living, elsewhere}
    assert hidden_folders(tmp_path) == {elsewhere}
    shutil.rmtree(tmp_path / elsewhere)
    assert contents(tmp_path) == dict.fromkeys(names, "whole")


@needs_locks
def test_links_in_the_place_of_a_dead_writers_folder_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    with atomic.replaced_files(tmp_path):
        (of_living,) = hidden_folders(tmp_path)
        (tmp_path / f"{of_living}link").symlink_to(elsewhere)
        write(several_files, ["a", "b"], "new", tmp_path)
    assert (elsewhere / "file").exists()


@needs_locks
def test_a_disk_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    write(several_files, ["a", "b"], "new", tmp_path)
    assert contents(tmp_path) == dict.fromkeys("ab", "new")


@needs_locks
def test_a_folder_that_is_not_locked_yet_is_no_dead_writers(tmp_path: Path) -> None:
    """Between a folder and its lock another writer may remove it: then there is another one."""
    code = (
        "import pathlib, time; from hf_gr.files import atomic\n"
        "lock = atomic._lock\n"
        "def slow(folder, **how):\n"
        "    if how: print('made', flush=True); time.sleep(0.5)\n"
        "    return lock(folder, **how)\n"
        "atomic._lock = slow\n"
        f"with atomic.replaced_file(pathlib.Path({str(tmp_path / 'theirs')!r})) as file: file.write(b'x')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        write(several_files, ["a", "b"], "new", tmp_path)
        assert process.communicate()[0] == "made\n"
    assert (process.returncode, (tmp_path / "theirs").read_text()) == (0, "x")
