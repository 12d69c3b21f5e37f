# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A catalogue that several processes serve: what one of them acknowledged, all of them have, whoever is killed."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from hf_gr import ConstraintIndex
from hf_gr.answering.requests import tokens_of_items
from hf_gr.serving import catalogues, update_log
from hf_gr.serving.catalogues import LiveCatalogue, Update
from hf_gr.serving.update_log import UpdateLog

WRITER = """
import sys
from hf_gr.serving.catalogues import LiveCatalogue, Update
from hf_gr.serving import update_log
from hf_gr.serving.update_log import UpdateLog
folder, name, number, most = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
update_log.MOST_UPDATES = most
catalogue = LiveCatalogue(log=UpdateLog(folder))
for step in range(number):
    edition = catalogue.apply(Update(add=[{"item_id": f"{name} {step}", "sequence": [step % 200, 7]}]))
    print(edition.version, f"{name} {step}", flush=True)
catalogue.close()
"""


def small_index() -> ConstraintIndex:
    return ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])


def content(catalogue: LiveCatalogue) -> tuple:
    """What replicas of one version agree on."""
    edition = catalogue.edition
    index, rules = edition.index, edition.rules
    every = np.arange(len(index.snapshot.items))  # those that were removed, too
    pairs = sorted((item, row) for row in index for item in index.items([row])[0])
    return (
        edition.version,
        pairs,
        {name: sorted(view.item_ids) for name, view in rules.items()},
        dict(zip(index.snapshot.items.ids_of(every), index.snapshot.items.rows(every >= 0)[0].tolist(), strict=True)),
    )


def add(name: str, *sequence: int) -> Update:
    return Update(add=[{"item_id": name, "sequence": list(sequence)}])


@pytest.mark.parametrize("seed", range(3))
def test_replicas_agree(seed, tmp_path, monkeypatch):
    """Two replicas that update in turn, new bases and swaps meanwhile, and one that begins at the end."""
    monkeypatch.setattr(update_log, "MOST_UPDATES", 6)
    monkeypatch.setattr(catalogues, "MOST_REMOVED", 3)
    draw = random.Random(seed)
    replicas = [LiveCatalogue(small_index(), {"sweet": ["jam"]}, log=UpdateLog(tmp_path)) for _ in range(2)]
    bases = set()
    for version in range(1, 50):
        one, other = draw.sample(replicas, 2)
        one.refresh()
        there = sorted(set(one.edition.index.item_ids))
        if draw.random() < 0.06:
            one.swap(copy.copy(one.edition.index))
        else:
            remove = draw.sample(there, draw.choice([0, 0, 1])) if len(there) > 2 else []
            item = {"item_id": f"item {draw.randrange(40)}", "sequence": [draw.randrange(4), draw.randrange(9)]}
            left = [name for name in there if name not in remove]
            rules = {"sweet": draw.sample(left, 2)} if draw.random() < 0.2 and len(left) > 1 else {}
            one.apply(Update([item], remove, rules))
        assert one.edition.version == version
        if draw.random() < 0.5:
            other.refresh()
            assert content(other) == content(one)
        bases.add(json.loads((tmp_path / "log.json").read_text())["version"])
    for replica in replicas:
        replica.refresh()
        replica.close()
    late = LiveCatalogue(log=UpdateLog(tmp_path))
    assert content(late) == content(replicas[0]) == content(replicas[1])
    assert len(bases) > 3
    assert len(list(tmp_path.glob("base-*"))) <= 2  # the one before it, for a process that is about to read it
    assert not list(tmp_path.glob(".unfinished-*"))


def test_an_unfinished_line_never_counted(tmp_path):
    """Cut at every byte, or followed by zeros, as after a power failure."""
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    catalogue.apply(add("pie", 6, 9))
    path = tmp_path / "updates-000000000000.jsonl"
    whole = path.read_bytes()
    before = content(catalogue)
    catalogue.apply(Update(remove=["pie"]))
    after, longer = content(catalogue), path.read_bytes()
    for cut in [*range(len(whole), len(longer)), None]:
        path.write_bytes(whole + b"\0" * 500 if cut is None else longer[:cut])
        late = LiveCatalogue(log=UpdateLog(tmp_path))
        assert content(late) == before
        late.apply(Update(remove=["pie"]))
        assert content(late) == content(LiveCatalogue(log=UpdateLog(tmp_path))) == after
        assert path.read_bytes() == longer


def test_damage_is_told_from_a_kill(tmp_path):
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    for number in range(3):
        catalogue.apply(add(f"new {number}", 6, 10 + number))
    path = tmp_path / "updates-000000000000.jsonl"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"new 1", b"now 1"))
    with pytest.raises(ValueError, match=r"updates-0+\.jsonl is damaged: no update 2"):
        LiveCatalogue(log=UpdateLog(tmp_path))
    path.write_bytes(b"".join(good.splitlines(keepends=True)[1:]))
    with pytest.raises(ValueError, match="no update 1"):
        LiveCatalogue(log=UpdateLog(tmp_path))
    path.write_bytes(good)
    (tmp_path / "log.json").write_text('{"format_version": 9, "version": 0}')
    with pytest.raises(ValueError, match="format_version 9, expected at most 1"):
        LiveCatalogue(log=UpdateLog(tmp_path))
    (tmp_path / "log.json").write_text("[]")
    with pytest.raises(ValueError, match="is no log of updates"):
        LiveCatalogue(log=UpdateLog(tmp_path))


def test_what_cannot_be_written_does_not_count(tmp_path, monkeypatch):
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    catalogue.apply(add("pie", 6, 9))
    before, files = catalogue.edition, (tmp_path / "updates-000000000000.jsonl").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            catalogue.apply(add("tea", 6, 8))
        with pytest.raises(OSError, match="No space left"):
            catalogue.swap(small_index())
    assert catalogue.edition is before
    assert (tmp_path / "updates-000000000000.jsonl").read_bytes() == files
    assert catalogue.apply(add("tea", 6, 8)).version == 2
    assert content(LiveCatalogue(log=UpdateLog(tmp_path))) == content(catalogue)


def test_a_refused_update_is_not_written(tmp_path):
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    with pytest.raises(ValueError, match="rum"):
        catalogue.apply(Update(remove=["rum"]))
    assert (tmp_path / "updates-000000000000.jsonl").read_bytes() == b""


def test_an_update_that_this_model_refuses_stays_out(tmp_path):
    """Another process has written it: this one says so, and goes on with what it has."""

    def check(index):
        if index.max_token_id > 50:
            raise ValueError(f"{index.max_token_id} is too large")

    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path), check=check)
    other = LiveCatalogue(log=UpdateLog(tmp_path))
    other.apply(add("pie", 6, 9))
    other.apply(add("tea", 6, 99))
    for _ in range(2):
        with pytest.raises(ValueError, match="version 2: 99 is too large"):
            catalogue.refresh()
        assert catalogue.edition.version == 1
    with pytest.raises(ValueError, match="version 2: 99 is too large"):
        catalogue.apply(add("rum", 6, 10))
    catalogue.check = None
    assert content(catalogue)[0] == 1
    assert catalogue.apply(add("rum", 6, 10)).version == 3
    other.refresh()
    assert content(catalogue) == content(other)


def test_followers_see_updates(tmp_path):
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    other = LiveCatalogue(log=UpdateLog(tmp_path))
    other.follow(0.01)
    catalogue.apply(add("pie", 6, 9))
    deadline = time.monotonic() + 10
    while other.edition.version < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other.close()
    catalogue.apply(add("tea", 6, 8))
    time.sleep(0.05)
    assert other.edition.version == 1


def test_removed_items_are_remembered_for_histories(tmp_path, monkeypatch):
    """Also by a replica that begins with a new base; all items may be removed there."""
    monkeypatch.setattr(update_log, "MOST_UPDATES", 1)
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    catalogue.apply(add("pie", 6, 9))
    catalogue.apply(Update(remove=["ham", "pie"]))
    catalogue.apply(add("ham", 5, 9))
    catalogue.apply(Update(remove=["ham", "jam", "yam"]))
    assert json.loads((tmp_path / "log.json").read_text())["version"] == 4
    for one in (catalogue, LiveCatalogue(log=UpdateLog(tmp_path))):
        assert one.edition.index.num_items == 0
        assert tokens_of_items(one.edition.index.snapshot, ["pie", "yam"]) == {"pie": [6, 9], "yam": [6, 7]}


def test_a_log_needs_a_beginning(tmp_path):
    with pytest.raises(ValueError, match="index=None, expected an index"):
        LiveCatalogue(log=UpdateLog(tmp_path))
    with pytest.raises(ValueError, match="index=None, expected an index"):
        LiveCatalogue()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file, expected a folder"):
        UpdateLog(tmp_path / "file")
    LiveCatalogue(small_index(), version=3, log=UpdateLog(tmp_path))
    other = ConstraintIndex.from_sequences([[1]], item_ids=["rum"])
    assert len(LiveCatalogue(other, version=7, log=UpdateLog(tmp_path)).edition.index) == 3  # the log is the truth


def start_writer(folder, name, number, most=2_000):
    command = [sys.executable, "-c", WRITER, str(folder), name, str(number), str(most)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_several_processes_write(tmp_path):
    """And all of them write new bases; every update has a version of its own."""
    LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    writers = [start_writer(tmp_path, name, 30, most=7) for name in "abc"]
    versions = []
    for writer in writers:
        out, _ = writer.communicate(timeout=60)
        assert writer.returncode == 0
        versions += [int(line.split()[0]) for line in out.splitlines()]
    assert sorted(versions) == list(range(1, 91))
    late = LiveCatalogue(log=UpdateLog(tmp_path))
    assert late.edition.version == 90
    assert set(late.edition.index.item_ids) == {"ham", "jam", "yam"} | {f"{n} {s}" for n in "abc" for s in range(30)}
    assert json.loads((tmp_path / "log.json").read_text())["version"] > 7


@pytest.mark.parametrize("seed", range(2))
def test_what_a_killed_writer_acknowledged_is_kept(seed, tmp_path):
    """kill -9 in the midst of updates and of new bases; the next writer goes on."""
    LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    draw = random.Random(seed)
    said: dict[str, int] = {}
    for round in range(2):
        writer = start_writer(tmp_path, f"w{round}", 10**6, most=5)
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        time.sleep(draw.random() * 0.3)
        writer.kill()
        lines += writer.communicate()[0].splitlines(keepends=True)
        for line in lines:
            if line.endswith("\n"):  # the last one may have been cut
                version, name = line.strip().split(" ", 1)
                said[name] = int(version)
        late = LiveCatalogue(log=UpdateLog(tmp_path))
        assert set(said) <= set(late.edition.index.item_ids)
        assert late.edition.version >= max(said.values())
        assert late.edition.version - max(said.values()) <= round + 1  # written, and killed before it was said
        late.apply(add(f"after {round}", 6, round))
        said[f"after {round}"] = late.edition.version
        late.close()
