# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The truth about a catalogue that several processes serve: a saved index, and a numbered log of what came after it.

Knows files and JSON; what an update means, `hf_gr.serving.catalogues` knows. In the folder, for a base of version 12:

    log.json                    {"version": 12, "state": "...", "last": [13, "..."], ...}: which base, the digest of
                                its state.json, the last update and the digest of its line; replaced in one step
    base-000000000012/          the saved index, with the items that were removed, and state.json: which, rules, keys,
                                and the model that it is of
    updates-000000000012.jsonl  a line for each update: {"version": 13, "remove": ["B01"], "digest": "..."}
    lock                        held by a writer

An update counts, and is acknowledged, once its line is on the disk and `log.json` names it. What comes after that line
is of a writer that was killed, and the next one removes it; any other line that is not as it was written is damage.
Locks are those of one machine: on a shared disk let one machine write.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hf_gr.catalogue import ConstraintIndex
from hf_gr.files.atomic import make_folder, replaced_file

from .answers import Overloaded

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FORMAT_VERSION = 1
LOG_FILE, STATE_FILE = "log.json", "state.json"
# After a base. A replica repeats them before it is ready; each addition compiles: 80 ms at 100,000 items, 1 s at 1e6.
MOST_UPDATES = 50
MOST_BYTES = 2**24
LOCK_SECONDS = 5.0  # to wait for another writer, which needs a second for a base of a million items


@dataclass(frozen=True)
class Edition:
    """The catalogue of one moment, with which a whole batch is answered: its rules are named views of the index."""

    version: int  # counts updates
    index: ConstraintIndex  # never changed; histories may still name items that were removed
    rules: Mapping[str, ConstraintIndex] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # of the last updates that have one, with their digests
    model: str | None = None  # the folder or repository of the model that it is of, if that is known
    recommender: Any = None  # what answers with it since a swap in this process; not saved


class UpdateLog:
    """A folder, created if there is none, with a base and the updates after it, and how far its owner has read them.

    One `LiveCatalogue` owns one; other processes open the folder for themselves.
    """

    def __init__(self, folder: str | Path) -> None:
        if fcntl is None:
            raise ImportError("UpdateLog needs locks of files, which this system lacks: run it on Linux or macOS")
        self.folder = Path(folder)
        make_folder(self.folder)
        self._base: int | None = None  # version of the base whose updates are read
        self._version = -1  # read so far
        self._end = 0  # of what was read of the file of updates
        self._state = ""  # digest of the base's state

    @property
    def is_empty(self) -> bool:
        """Whether the log has no base yet."""
        return not (self.folder / LOG_FILE).exists()

    @property
    def needs_base(self) -> bool:
        """Whether so many updates were read since the base that a new one pays."""
        return self._base is not None and (self._version - self._base > MOST_UPDATES or self._end > MOST_BYTES)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only writer; then `read`, before anything is written.

        Raises:
            Overloaded: another process writes for longer than `LOCK_SECONDS`.
        """
        assert fcntl is not None
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        end = time.monotonic() + LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the system releases if this process ends
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        about = f"another process has held {self.folder / 'lock'} for {LOCK_SECONDS:g} seconds"
                        raise Overloaded(f"{about}: retry later", retry_after=LOCK_SECONDS) from None
                time.sleep(0.001)
            yield
        finally:
            os.close(lock)

    def read(self, since: int) -> tuple[Edition | None, list[dict[str, Any]]]:
        """What is newer than a version: another base to begin with, if there is one, and the updates after it."""
        while True:
            head = self._head()
            try:
                return (None, []) if head is None else self._read(head, since)
            except (OSError, ValueError):
                if self._base_version() == head["version"]:  # pyright: ignore[reportOptionalSubscript]
                    raise  # the base is the same

    def append(self, version: int, fields: Mapping[str, Any]) -> None:
        """Write an update, as the only writer who has read all; it is on the disk when this returns."""
        assert self._base is not None, "read() comes first"
        assert version == self._version + 1, "read() comes first"
        line = _to_line({"version": version, **fields})
        with self._updates(self._base).open("r+b") as file:
            file.truncate(self._end)  # what a killed writer left
            file.seek(self._end)
            try:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._write_head(self._base, self._state, [version, _digest(line)])
            except OSError:
                file.truncate(self._end)
                raise
        self._version, self._end = version, self._end + len(line) + 1

    def begin(self, base: Edition) -> None:
        """Go on with another base, as the only writer who has read all."""
        state = self._save(base)
        with replaced_file(self._updates(base.version)):
            pass
        kept = {self._folder(base.version), self._updates(base.version)}
        if (before := self._base_version()) is not None:  # a process that is about to read it finds it still
            kept |= {self._folder(before), self._updates(before)}
        self._write_head(base.version, state, [base.version, ""])
        self._base, self._version, self._end, self._state = base.version, base.version, 0, state
        for path in {*self.folder.glob("base-*"), *self.folder.glob("updates-*.jsonl")} - kept:
            with suppress(OSError):  # the base is begun: the next one tries again
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _read(self, head: Mapping[str, Any], since: int) -> tuple[Edition | None, list[dict[str, Any]]]:
        base, (last, digest) = head["version"], head["last"]
        path, updates = self._updates(base), []
        number, end = (self._version, self._end) if (base, since) == (self._base, self._version) else (base, 0)
        loaded = self._load(base, head["state"]) if base > since else None
        with path.open("rb") as file:
            is_damaged = number > last or file.seek(0, os.SEEK_END) < end
            file.seek(end)
            lines = file.read().split(b"\n")[:-1][: last - number]
        for line in lines:
            fields = _from_line(line)
            if fields is None or fields.pop("version", None) != number + 1:
                break
            number, end = number + 1, end + len(line) + 1
            is_damaged |= number == last and _digest(line) != digest
            if number > since:
                updates.append(fields)
        if is_damaged or number < last:
            raise ValueError(
                f"{path} is damaged: after update {number} it is not as it was written; "
                "restore the folder from a copy, or begin another one with the last good index"
            )
        self._base, self._version, self._end, self._state = base, number, end, head["state"]
        return loaded, updates

    def _load(self, version: int, digest: str) -> Edition:
        folder = self._folder(version)
        whole = ConstraintIndex.from_pretrained(folder)
        try:
            content = (folder / STATE_FILE).read_bytes()
            if _digest(content) != digest:
                raise ValueError("its digest is another one")
            state = json.loads(content)
            is_living = np.ones(whole.num_items, dtype=bool)
            is_living[state["removed"]] = False
            index = whole if is_living.all() else whole.where(is_living)
            rules = {name: index.where(ids) for name, ids in state["rules"].items()}
            return Edition(version, index, rules, state["keys"], state.get("model"))
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"{folder / STATE_FILE} is damaged ({error}): restore the folder from a copy") from error

    def _save(self, base: Edition) -> str:
        """Write a base, which is not read before `LOG_FILE` names it; the digest of its state."""
        snapshot = base.index.snapshot
        whole = replace(snapshot, alive=None)
        removed = np.flatnonzero(~whole.flags_of(snapshot)).tolist()
        folder = self._folder(base.version)
        ConstraintIndex(whole).save_pretrained(folder)
        rules = {name: np.asarray(view.item_ids, dtype=object).tolist() for name, view in base.rules.items()}
        state = {"rules": rules, "removed": removed, "keys": dict(base.keys), "model": base.model}
        content = json.dumps(state).encode()
        with replaced_file(folder / STATE_FILE) as file:
            file.write(content)
        return _digest(content)

    def _write_head(self, version: int, state: str, last: list[Any]) -> None:
        path = self.folder / LOG_FILE
        head = {"format_version": FORMAT_VERSION, "version": version, "state": state, "last": last}
        try:
            with replaced_file(path, temporary=path.with_name(f".{LOG_FILE}")) as file:  # there is one writer
                file.write(_to_line(head))
        except OSError:
            if self._head() != head:  # else it is in place, and others may have read it
                raise

    def _head(self) -> dict[str, Any] | None:
        """What `LOG_FILE` says; None if there is none."""
        path = self.folder / LOG_FILE
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            newest = int(json.loads(content)["format_version"])
        except (ValueError, KeyError, TypeError):
            newest = 0
        if newest > FORMAT_VERSION:
            raise ValueError(
                f"{path} has format_version {newest}, expected at most {FORMAT_VERSION}: a newer hf_gr wrote it; "
                'pip install -U "hf-gr"'
            )
        if (head := _from_line(content)) is None:
            raise ValueError(f"{path} is damaged, or no log of updates: restore the folder from a copy")
        return head

    def _base_version(self) -> int | None:
        head = self._head()
        return None if head is None else head["version"]

    def _folder(self, version: int) -> Path:
        return self.folder / f"base-{version:012d}"

    def _updates(self, version: int) -> Path:
        return self.folder / f"updates-{version:012d}.jsonl"


def _to_line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({**fields, "digest": digest_of(fields)}, separators=(",", ":")).encode()


def _from_line(line: bytes) -> dict[str, Any] | None:
    """The fields of `_to_line`; None for a line that is another one."""
    try:
        fields = json.loads(line)
        digest = fields.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return fields if digest == digest_of(fields) else None


def digest_of(fields: Mapping[str, Any]) -> str:
    """The digest of what JSON can say, in whatever order."""
    return _digest(json.dumps(fields, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)
