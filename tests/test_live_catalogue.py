# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A catalogue that changes while it serves, alone or in several processes, against sets and dicts of Python's."""

import json
import os
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.serving import catalogues, update_log
from hf_gr.serving.answers import Overloaded
from hf_gr.serving.catalogues import Edition, LiveCatalogue, Update
from hf_gr.serving.update_log import UpdateLog

END = 9


def small_index() -> ConstraintIndex:
    return ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=["ham", "jam", "yam"])


def add(name: Any, *sequence: int) -> Update:
    return Update(add=[{"item_id": name, "sequence": list(sequence)}])


def tokens(catalogue: LiveCatalogue, *history: str) -> list[int]:
    """The prompt of a history."""
    return catalogue.edition.index.encode(history)


def remembered(edition: Edition) -> dict[Any, list[int]]:
    """The tokens of all items that histories may name, those that were removed, too."""
    items = edition.index.snapshot.items
    every = np.arange(len(items))
    return dict(zip(items.ids_of(every), items.rows(every >= 0)[0].tolist(), strict=True))


def refuse_large_tokens(index: ConstraintIndex) -> None:
    if index.max_token_id > 50:
        raise ValueError(f"{index.max_token_id} is too large")


class Plain:
    """The same catalogue in sets: what every edition must hold."""

    def __init__(self, items: dict[Any, list[int]], rules: dict[str, list[Any]]) -> None:
        self.items = {item: {tuple(sequence)} for item, sequence in items.items()}
        self.rules = {name: set(ids) for name, ids in rules.items()}
        self.removed: dict[Any, set[tuple[int, ...]]] = {}

    def apply(self, update: Update) -> None:
        self.items |= {item: self.removed.pop(item) for item in update.restore}
        for item in update.remove:
            self.removed[item] = self.items.pop(item)
        for item in update.add:
            self.items.setdefault(item["item_id"], set()).add((*item["sequence"], END))
        self.rules = {name: ids & set(self.items) for name, ids in self.rules.items()} | {
            name: None if ids is None else set(ids) for name, ids in update.rules.items()
        }
        self.rules = {name: ids for name, ids in self.rules.items() if ids is not None}

    def check(self, edition: Edition) -> None:
        held = {None: (edition.index, set(self.items))}
        held |= {name: (edition.rules[name], rule) for name, rule in self.rules.items()}
        assert set(edition.rules) == set(self.rules)
        for index, ids in held.values():
            assert set(index.item_ids) == ids
            assert {tuple(row) for row in index} == {s for item in ids for s in self.items[item]}
            for row, found in zip(index, index.items(list(index)), strict=True):
                assert set(found) == {item for item in ids if tuple(row) in self.items[item]}
        # Rules and the whole catalogue can be mixed in a batch.
        combine_rules([index.snapshot for index, _ in held.values()], [[]] * len(held))


def random_update(draw: random.Random, plain: Plain, ids: list[Any], kept: Iterable[Any]) -> Update:
    there = sorted(plain.items)
    gone = sorted(set(kept) - set(there))
    restore = draw.sample(gone, min(len(gone), draw.choice([0, 1])))
    remove = draw.sample(there, min(len(there), draw.choice([0, 0, 1, 3])))
    added = [
        {"item_id": draw.choice(ids), "sequence": [draw.randrange(4) for _ in range(draw.randint(1, 3))]}
        for _ in range(draw.choice([0, 0, 1, 4]))
    ]
    after = sorted((set(there) | set(restore)) - set(remove) | {item["item_id"] for item in added})
    rules: dict[str, Any] = {}
    if draw.random() < 0.3:
        name = draw.choice("abc")
        is_deleted = name in plain.rules and draw.random() < 0.3
        rules[name] = None if is_deleted else draw.sample(after, draw.randint(0, len(after)))
    return Update(added, remove, rules, restore, idempotency_key=str(draw.random()))


@pytest.mark.parametrize("seed", range(2))
def test_replicas_equal_sets(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that update in turn, with new bases and indexes meanwhile, arrays that forget, and one that begins late."""
    monkeypatch.setattr(update_log, "MOST_UPDATES", 4)
    monkeypatch.setattr(catalogues, "MOST_REMOVED", 3)
    draw = random.Random(seed)
    ids: list[Any] = [f"item {n}" if seed % 2 else n for n in range(40)]
    items = {item: [draw.randrange(4) for _ in range(draw.randint(1, 3))] + [END] for item in ids[:20]}
    index = ConstraintIndex.from_sequences(list(items.values()), item_ids=list(items), eos_token_id=END)
    replicas = [LiveCatalogue(index, {"a": ids[:10]}, log=UpdateLog(tmp_path)) for _ in range(2)]
    plain, taken, bases, edition = Plain(items, {"a": ids[:10]}), [], set(), replicas[0].edition
    for version in range(1, 30):
        one, other = draw.sample(replicas, 2)
        if draw.random() < 0.06:
            one.refresh()
            edition = one.swap(index)
            rules = {name: [item for item in rule if item in items] for name, rule in plain.rules.items()}
            plain = Plain(items, rules)
        else:
            update = random_update(draw, plain, ids, remembered(edition))
            plain.apply(update)
            edition = one.apply(update)
        assert edition.version == version == one.edition.version
        plain.check(edition)
        if draw.random() < 0.2:  # it comes again, since its sender knows nothing
            assert other.apply(update).version == version
        if draw.random() < 0.5:
            plain.check(other.refresh())
            assert remembered(other.edition) == remembered(edition)
        taken.append((edition, list(edition.index), list(edition.index.item_ids)))
        bases.add(json.loads((tmp_path / "log.json").read_text())["version"])
    late = LiveCatalogue(log=UpdateLog(tmp_path))
    plain.check(late.edition)
    for replica in replicas:
        assert remembered(replica.refresh()) == remembered(late.edition)
    for edition, rows, item_ids in taken:  # an edition stays as it was
        assert (list(edition.index), list(edition.index.item_ids)) == (rows, item_ids)
    assert len(bases) > 3
    assert len(list(tmp_path.glob("base-*"))) <= 2  # the one before it, for a process that is about to read it
    assert not list(tmp_path.glob(".unfinished-*"))


def test_another_index_keeps_the_type_of_ids(caplog: pytest.LogCaptureFixture) -> None:
    """Requests that wait name items by it. Who hears of a change cannot undo it."""
    catalogue = LiveCatalogue(small_index(), {"sweet": ["jam", "yam"]})
    sweet = catalogue.edition.rules["sweet"]
    assert catalogue.apply(Update(remove=["ham"])).rules["sweet"] is sweet  # its arrays are on devices
    catalogue.on_change = lambda edition: 1 / 0
    edition = catalogue.swap(ConstraintIndex.from_sequences([[1], [2]], item_ids=["jam", "tea"]))
    assert catalogue.edition is edition
    assert (edition.version, edition.index.item_ids, edition.rules["sweet"].item_ids) == (2, ["jam", "tea"], ["jam"])
    assert "rule 'sweet' has lost 1 item" in caplog.text
    assert "on_change failed for catalogue version 2" in caplog.text
    with pytest.raises(ValueError, match="the index has item ids of integers, expected strings"):
        catalogue.swap(ConstraintIndex.from_sequences([[1], [2]], item_ids=[1, 2]))
    assert catalogue.edition is edition


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"remove": ["ham", "rum"]}, r"remove has 1 id that the catalogue does not have \('rum'\)"),
        ({"remove": [7]}, r"remove\[0\]=7, expected strings"),
        ({"restore": ["rum"]}, r"restore: item_ids has 1 id that the catalogue does not have \('rum'\)"),
        ({"rules": {"sweet": ["pie", "rum"]}}, r"rules\['sweet'\] has 1 id .*'rum'.*omit them, or add them"),
        ({"rules": {"bitter": None}}, r"rules\['bitter'\]=None.*there are 'sweet'"),
        ({"rules": {"": []}}, "rules has the name ''"),
        ({"rules": ["ham"]}, "expected item ids by name"),
        ({"add": [{"item_id": "rum"}]}, r"add\[0\]=.*name both"),
        ({"add": [{"item_id": "rum", "sequence": 5}]}, r"add\[0\]\['sequence'\]=5, expected a list"),
        ({"add": [{"item_id": "rum", "sequence": [5]}]}, "add: sequences have 1 tokens, expected 2"),
        ({"add": [{"item_id": "rum", "sequence": [5, 0.5]}]}, "add: .*0.5"),
        ({"add": [{"item_id": 5, "sequence": [5, 5]}]}, "add: item_ids.*expected strings"),
        ({"add": [{"item_id": "rum", "sequence": [5, 99]}]}, "99 is too large"),
        ({"remov": []}, "'remov' is no field"),
    ],
)
def test_a_refused_update_changes_nothing(update: dict[str, Any], message: str, tmp_path: Path) -> None:
    catalogue = LiveCatalogue(small_index(), {"sweet": ["jam"]}, log=UpdateLog(tmp_path), check=refuse_large_tokens)
    before = catalogue.edition
    with pytest.raises(ValueError, match=message):  # a part that is right does not come in either
        catalogue.apply(Update.from_dict({"add": [{"item_id": "pie", "sequence": [6, 9]}], **update}))
    assert catalogue.edition is before
    assert list(before.index) == [[5, 7], [5, 8], [6, 7]]
    assert (tmp_path / "updates-000000000000.jsonl").read_bytes() == b""


def test_updates_are_json() -> None:
    added = [{"item_id": np.int64(5), "sequence": np.array([1, 2])}]
    update = Update(added, remove=np.array([3, 4]), rules={"a": np.array([5]), "b": None})
    fields = update.to_dict()
    read = {"remove": [3, 4], "add": [{"item_id": 5, "sequence": [1, 2]}], "rules": {"a": [5], "b": None}}
    assert json.loads(json.dumps(fields)) == fields == read
    assert Update.from_dict(fields) == update
    assert Update().to_dict() == {}


def test_a_key_is_one_updates_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogues, "MOST_KEYS", 2)
    catalogue = LiveCatalogue(small_index())
    updates = [Update(rules={"a": [item]}, idempotency_key=item) for item in ("ham", "jam", "yam")]
    assert [catalogue.apply(update).version for update in [*updates, *updates[::-1]]] == [1, 2, 3, 3, 3, 4]
    with pytest.raises(ValueError, match="idempotency_key='yam', expected a new one: another update has had it"):
        catalogue.apply(Update(idempotency_key="yam"))


def test_all_items_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_log, "MOST_UPDATES", 0)
    catalogue = LiveCatalogue(small_index(), {"a": ["ham"]}, log=UpdateLog(tmp_path))
    catalogue.apply(Update(remove=["ham", "jam", "yam"]))
    catalogue = LiveCatalogue(log=UpdateLog(tmp_path))
    assert (len(catalogue.edition.index), len(catalogue.edition.rules["a"])) == (0, 0)
    assert tokens(catalogue, "yam") == [6, 7]
    catalogue.apply(Update(add=[{"item_id": "tea", "sequence": [1, 2]}], rules={"a": ["tea"]}))
    assert list(catalogue.edition.rules["a"]) == [[1, 2]]


def test_histories_keep_what_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until more was removed than is left: an addition forgets it then, all but what the same update removes."""
    ends = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6]], item_ids=["ham", "jam", "yam"], eos_token_id=END)
    catalogue = LiveCatalogue(ends)
    catalogue.apply(add("pie", 6, 8))
    catalogue.apply(Update(remove=["jam", "pie"]))
    assert tokens(catalogue, "pie", "jam", "ham") == [6, 8, 5, 8, 5, 7]
    catalogue.apply(add("pie", 7, 7))
    assert tokens(catalogue, "pie", "jam") == [7, 7, 5, 8]
    catalogue.apply(Update(remove=["pie"]))
    assert tokens(catalogue, "pie") == [7, 7]  # its last sequence, and not the one before
    monkeypatch.setattr(catalogues, "MOST_REMOVED", 0)
    catalogue.apply(add("tea", 6, 7))
    catalogue.apply(Update(remove=["ham"]))
    catalogue.apply(Update(add=[{"item_id": "rye", "sequence": [6, 5]}], remove=["tea"]))
    assert tokens(catalogue, "tea") == [6, 7]
    with pytest.raises(ValueError, match="'jam'"):
        tokens(catalogue, "jam")
    assert len(catalogue.edition.index.snapshot.items) == 3  # yam, rye, and tea of this update: the arrays do not grow


def test_threads_that_read_and_write() -> None:
    """No update is lost, and every edition is whole: its rules are within it."""
    catalogue = LiveCatalogue(small_index(), {"all": ["ham", "jam", "yam"]})

    def write(number: int) -> None:
        for step in range(8):
            name = f"{number} {step}"
            catalogue.apply(Update([{"item_id": name, "sequence": [step, number]}], rules={"all": [name]}))
            latest = catalogue.edition
            assert latest.index.has_items(latest.rules["all"].item_ids).all()
            catalogue.apply(Update(remove=[name] if step % 2 else []))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    kept = {f"{number} {step}" for number in range(3) for step in range(0, 8, 2)}
    assert set(catalogue.edition.index.item_ids) == kept | {"ham", "jam", "yam"}
    assert catalogue.edition.version == 3 * 8 * 2


def test_an_unfinished_line_never_counted(tmp_path: Path) -> None:
    """Cut anywhere, or whole and not acknowledged yet, or followed by zeros, as after a power failure."""
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    catalogue.apply(add("pie", 6, 9))
    path = tmp_path / "updates-000000000000.jsonl"
    whole = path.read_bytes()
    catalogue.apply(Update(remove=["pie"]))
    longer = path.read_bytes()
    head = tmp_path / "log.json"
    after = head.read_bytes()
    # As it was once the first update was acknowledged, and no later one.
    fields = json.loads(after) | {"last": [1, update_log._digest(longer.splitlines()[0])]}
    del fields["digest"]
    before = update_log._to_line(fields)
    for cut in [*range(len(whole), len(longer), 7), len(longer), None]:
        head.write_bytes(before)
        path.write_bytes(whole + b"\0" * 500 if cut is None else longer[:cut])
        late = LiveCatalogue(log=UpdateLog(tmp_path))
        assert (late.edition.version, set(late.edition.index.item_ids)) == (1, {"ham", "jam", "yam", "pie"})
        late.apply(Update(remove=["pie"]))
        assert LiveCatalogue(log=UpdateLog(tmp_path)).edition.version == 2
        assert (path.read_bytes(), head.read_bytes()) == (longer, after)


def test_damage_is_told_from_a_kill(tmp_path: Path) -> None:
    catalogue = LiveCatalogue(small_index(), {"sweet": ["yam"]}, log=UpdateLog(tmp_path))
    for number in range(3):
        catalogue.apply(add(f"new {number}", 6, 10 + number))
    catalogue.apply(Update(rules={"sweet": ["ham"]}))
    updates, head, state = (
        tmp_path / name for name in ("updates-000000000000.jsonl", "log.json", "base-000000000000/state.json")
    )
    lines = updates.read_bytes().splitlines(keepends=True)
    for path, content, message in (
        (updates, b"".join(lines).replace(b"new 1", b"now 1"), r"updates-0+\.jsonl is damaged: after update 1 "),
        (updates, b"".join(lines[1:]), "after update 0"),
        (updates, b"".join(lines)[:-1], "after update 3"),  # the last one was acknowledged
        (updates, b"".join(lines).replace(b"ham", b"jam"), "after update 3"),
        (updates, b"".join(lines[:2]), "after update 2"),
        (updates, b"", "after update 0"),
        (state, state.read_bytes().replace(b"yam", b"ham"), "state.json is damaged .its digest is another one"),
        (head, b'{"format_version": 9, "version": 0}', "format_version 9, expected at most 1"),
        (head, head.read_bytes().replace(b"[4,", b"[3,"), "is damaged, or no log of updates"),
        (head, b"[]", "is damaged, or no log of updates"),
    ):
        good = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            LiveCatalogue(log=UpdateLog(tmp_path))
        path.write_bytes(good)
    updates.write_bytes(b"".join(lines[:2]))
    for act in (catalogue.refresh, lambda: catalogue.apply(add("tea", 6, 8))):
        with pytest.raises(ValueError, match="is damaged"):  # of a process that has read what is gone
            act()


def test_a_lock_that_stays_held_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_log, "LOCK_SECONDS", 0.05)
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    with UpdateLog(tmp_path).writing():
        for act in (lambda: catalogue.apply(add("pie", 6, 9)), lambda: catalogue.swap(small_index())):
            with pytest.raises(Overloaded, match="lock for 0.05 seconds: retry later"):
                act()
        assert catalogue.refresh().version == 0  # readers need no lock
    assert catalogue.apply(add("pie", 6, 9)).version == 1


def test_what_cannot_be_written_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    before = catalogue.apply(add("pie", 6, 9))
    files = (tmp_path / "updates-000000000000.jsonl").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for change in (lambda: catalogue.apply(add("tea", 6, 8)), lambda: catalogue.swap(small_index())):
            with pytest.raises(OSError, match="No space left"):
                change()
    assert catalogue.edition is before
    assert (tmp_path / "updates-000000000000.jsonl").read_bytes() == files
    assert catalogue.apply(add("tea", 6, 8)).version == 2
    assert "tea" in LiveCatalogue(log=UpdateLog(tmp_path)).edition.index.item_ids


def test_an_update_that_this_model_refuses_stays_out(tmp_path: Path) -> None:
    """Another process has written it: this one says so, and goes on with what it has."""
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path), check=refuse_large_tokens)
    other = LiveCatalogue(log=UpdateLog(tmp_path))
    other.apply(add("pie", 6, 9))
    other.apply(add("tea", 6, 99))
    for act in (catalogue.refresh, catalogue.refresh, lambda: catalogue.apply(add("rum", 6, 10))):
        with pytest.raises(ValueError, match="version 2: 99 is too large"):
            act()
        assert catalogue.edition.version == 1
    catalogue.check = lambda index: None
    assert catalogue.apply(add("rum", 6, 10)).version == 3
    assert set(other.refresh().index.item_ids) == set(catalogue.edition.index.item_ids)


def test_the_catalogue_of_another_model_is_refused_where_another_process_swapped_it(tmp_path: Path) -> None:
    one, other = (LiveCatalogue(small_index(), log=UpdateLog(tmp_path), model="m1") for _ in range(2))
    one.swap(small_index(), model="m2", check=lambda index: None)
    for call in (other.refresh, lambda: other.apply(add("new", 5, 9))):
        with pytest.raises(ValueError, match="it is of the model m2, expected m1, which answers here"):
            call()
    assert other.edition.version == 0
    assert LiveCatalogue(log=UpdateLog(tmp_path)).edition.model == "m2"


def test_what_was_removed_stays_so_under_another_model() -> None:
    catalogue = LiveCatalogue(small_index())
    for _ in range(2):  # a list of what has gone is sent every night
        catalogue.apply(Update(remove=["jam"]))
    assert catalogue.swap(small_index(), model="m2", check=lambda index: None).index.item_ids == ["ham", "yam"]
    assert catalogue.apply(Update(restore=["jam"])).index.num_items == 3
    catalogue.apply(Update(remove=["jam"]))
    assert catalogue.swap(small_index()).index.num_items == 3  # this index is the catalogue


def test_followers_see_updates(tmp_path: Path) -> None:
    catalogue = LiveCatalogue(small_index(), log=UpdateLog(tmp_path))
    other = LiveCatalogue(log=UpdateLog(tmp_path))
    other.follow(0.01)
    catalogue.apply(add("pie", 6, 9))
    deadline = time.monotonic() + 10
    while other.edition.version == 0:
        assert time.monotonic() < deadline
    other.close()
    catalogue.apply(add("tea", 6, 8))
    time.sleep(0.05)
    assert other.edition.version == 1


def test_a_log_needs_a_beginning(tmp_path: Path) -> None:
    for log in (None, UpdateLog(tmp_path)):
        with pytest.raises(ValueError, match="index=None, expected an index"):
            LiveCatalogue(log=log)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file, expected a folder"):
        UpdateLog(tmp_path / "file")
    LiveCatalogue(small_index(), version=3, log=UpdateLog(tmp_path))
    other = ConstraintIndex.from_sequences([[1]], item_ids=["rum"])
    assert len(LiveCatalogue(other, version=7, log=UpdateLog(tmp_path)).edition.index) == 3  # the log is the truth
