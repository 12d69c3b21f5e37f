# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A catalogue that changes while it serves, against sets and dicts of Python's."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from hf_gr import ConstraintIndex
from hf_gr.answering.requests import join_tokens, tokens_of_items
from hf_gr.catalogue.rules import combine_rules
from hf_gr.serving import catalogues
from hf_gr.serving.catalogues import LiveCatalogue, Update

END = 9


def small_index(strings: bool = True) -> ConstraintIndex:
    ids = ["ham", "jam", "yam"] if strings else [10, 20, 30]
    return ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]], item_ids=ids)


class Plain:
    """The same catalogue in sets: what every edition must hold."""

    def __init__(self, items: dict, rules: dict) -> None:
        self.items, self.rules = {item: {tuple(s)} for item, s in items.items()}, {n: set(r) for n, r in rules.items()}

    def apply(self, update: Update) -> None:
        for item in update.remove:
            self.items.pop(item, None)
        for item in update.add:
            self.items.setdefault(item["item_id"], set()).add((*item["sequence"], END))
        for name in self.rules:
            self.rules[name] &= set(self.items)
        for name, ids in update.rules.items():
            self.rules.pop(name, None)
            if ids is not None:
                self.rules[name] = set(ids)

    def check(self, edition: catalogues.Edition) -> None:
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


def random_update(draw: random.Random, plain: Plain, strings: bool) -> Update:
    there = sorted(plain.items)
    remove = draw.sample(there, min(len(there), draw.choice([0, 0, 1, 3])))
    names = [f"item {n}" if strings else n for n in range(60)]
    add = [
        {"item_id": draw.choice(names), "sequence": [draw.randrange(4) for _ in range(draw.randint(1, 3))]}
        for _ in range(draw.choice([0, 0, 1, 4]))
    ]
    after = sorted((set(there) - set(remove)) | {item["item_id"] for item in add})
    rules = {}
    if draw.random() < 0.3:
        name = draw.choice("abc")
        rules[name] = draw.sample(after, draw.randint(0, len(after)))
        if name in plain.rules and draw.random() < 0.3:
            rules[name] = None
    return Update(add, remove, rules)


@pytest.mark.parametrize("seed", range(4))
def test_updates_equal_sets(seed, monkeypatch):
    """Also where the arrays forget what was removed."""
    monkeypatch.setattr(catalogues, "MOST_REMOVED", 0)
    draw, strings = random.Random(seed), seed % 2 == 0
    ids = [f"item {n}" if strings else n for n in range(30)]
    items = {item: [draw.randrange(4) for _ in range(draw.randint(1, 3))] + [END] for item in ids}
    index = ConstraintIndex.from_sequences(list(items.values()), item_ids=list(items), eos_token_id=END)
    catalogue, plain = LiveCatalogue(index, {"a": ids[:10]}), Plain(items, {"a": ids[:10]})
    taken = []
    for version in range(1, 30):
        update = random_update(draw, plain, strings)
        plain.apply(update)
        edition = catalogue.apply(update)
        assert edition.version == version == catalogue.edition.version
        plain.check(edition)
        plain.check(catalogue.edition)
        taken.append((edition, list(edition.index), list(edition.index.item_ids)))
    for edition, rows, item_ids in taken:  # an edition stays as it was
        assert list(edition.index) == rows
        assert list(edition.index.item_ids) == item_ids


def test_a_new_index_in_place_of_the_old_one(caplog):
    """Rules keep the ids that it has; the type of ids stays, since requests that wait name items by it."""
    catalogue = LiveCatalogue(small_index(), {"sweet": ["jam", "yam"]})
    edition = catalogue.swap(ConstraintIndex.from_sequences([[1], [2]], item_ids=["jam", "tea"]))
    assert catalogue.edition is edition
    assert (edition.version, edition.index.item_ids) == (1, ["jam", "tea"])
    assert edition.rules["sweet"].item_ids == ["jam"]
    assert "rule 'sweet' has lost 1 item" in caplog.text
    with pytest.raises(ValueError, match="the index has item ids of integers, expected strings"):
        catalogue.swap(ConstraintIndex.from_sequences([[1], [2]], item_ids=[1, 2]))
    assert catalogue.edition is edition


def test_a_replaced_sequence_keeps_its_rules():
    catalogue = LiveCatalogue(small_index(), {"sweet": ["jam", "yam"]})
    edition = catalogue.apply(Update(remove=["jam"], add=[{"item_id": "jam", "sequence": [6, 8]}]))
    assert sorted(edition.rules["sweet"]) == [[6, 7], [6, 8]]


def test_a_removal_keeps_the_other_rules():
    """Their arrays on a device stay in use."""
    catalogue = LiveCatalogue(small_index(), {"sweet": ["jam", "yam"], "salty": ["ham"]})
    before, after = catalogue.edition, catalogue.apply(Update(remove=["ham"]))
    assert after.rules["sweet"] is before.rules["sweet"]
    assert len(after.rules["salty"]) == 0


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"remove": ["ham", "rum"]}, r"remove has 1 id that the catalogue does not have \('rum'\)"),
        ({"remove": [7]}, r"remove\[0\]=7, expected strings"),
        ({"remove": "ham"}, r"remove='ham', expected a list"),
        ({"remove": [True]}, r"remove\[0\]=True, expected an item id"),
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
def test_a_refused_update_changes_nothing(update, message):
    def check(index):
        if index.max_token_id > 50:
            raise ValueError(f"{index.max_token_id} is too large")

    catalogue = LiveCatalogue(small_index(), {"sweet": ["jam", "yam"]}, check=check)
    before = catalogue.edition
    # A part that is right does not come in either.
    update = {"add": [{"item_id": "pie", "sequence": [6, 9]}], **update}
    with pytest.raises(ValueError, match=message):
        catalogue.apply(Update.from_dict(update))
    assert catalogue.edition is before
    assert list(before.index) == [[5, 7], [5, 8], [6, 7]]


def test_updates_are_json(tmp_path):
    add = [{"item_id": np.int64(5), "sequence": np.array([1, 2])}]
    update = Update(add, remove=np.array([3, 4]), rules={"a": np.array([5]), "b": None})
    fields = update.to_dict()
    assert fields == {
        "remove": [3, 4],
        "add": [{"item_id": 5, "sequence": [1, 2]}],
        "rules": {"a": [5], "b": None},
    }
    assert {type(value) for value in (*fields["remove"], fields["add"][0]["item_id"])} == {int}
    assert Update.from_dict(fields) == update
    assert Update().to_dict() == {}


def test_all_items_may_go():
    catalogue = LiveCatalogue(small_index(strings=False), {"a": [10]})
    edition = catalogue.apply(Update(remove=[10, 20, 30]))
    assert (len(edition.index), len(edition.rules["a"])) == (0, 0)
    edition = catalogue.apply(Update(add=[{"item_id": 7, "sequence": [1, 2]}], rules={"a": [7]}))
    assert list(edition.rules["a"]) == [[1, 2]]


def test_readers_and_writers_in_threads():
    """Every edition that a reader takes is whole: its rules are within it, and versions only rise."""
    catalogue = LiveCatalogue(small_index(), {"sweet": ["jam"], "all": ["ham", "jam", "yam"]})
    done = threading.Event()
    failures: list[BaseException] = []

    def read():
        last = 0
        try:
            while not done.is_set():
                edition = catalogue.edition
                assert edition.version >= last
                last = edition.version
                combine_rules([edition.index.snapshot, *(view.snapshot for view in edition.rules.values())])
                assert edition.index.has_items(edition.rules["all"].item_ids).all()
        except BaseException as error:
            failures.append(error)

    def write(number):
        try:
            for step in range(16):
                name = f"{number} {step}"
                catalogue.apply(
                    Update(add=[{"item_id": name, "sequence": [step, number]}], rules={"all": ["jam", name]})
                )
                if step % 2:
                    catalogue.apply(Update(remove=[name]))
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not failures
    assert catalogue.edition.version == 3 * (16 + 8)
    kept = {f"{number} {step}" for number in range(3) for step in range(0, 16, 2)}
    assert set(catalogue.edition.index.item_ids) == kept | {"ham", "jam", "yam"}


def test_histories_keep_what_was_removed(monkeypatch):
    """Until more was removed than is left: an addition forgets it then, all but what the same update removes."""
    ends = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6]], item_ids=["ham", "jam", "yam"], eos_token_id=END)
    catalogue = LiveCatalogue(ends)

    def tokens(*history):
        return join_tokens(history, tokens_of_items(catalogue.edition.index.snapshot, history))

    catalogue.apply(Update(add=[{"item_id": "pie", "sequence": [6, 8]}]))
    catalogue.apply(Update(remove=["jam", "pie"]))
    assert tokens("pie", "jam", "ham") == [6, 8, 5, 8, 5, 7]
    catalogue.apply(Update(add=[{"item_id": "pie", "sequence": [7, 7]}]))
    assert tokens("pie", "jam") == [7, 7, 5, 8]
    catalogue.apply(Update(remove=["pie"]))
    assert tokens("pie") == [7, 7]  # its last sequence, and not the one before
    catalogue.apply(Update(add=[{"item_id": "pie", "sequence": [7, 7]}]))
    monkeypatch.setattr(catalogues, "MOST_REMOVED", 0)
    catalogue.apply(Update(add=[{"item_id": "tea", "sequence": [6, 7]}]))
    catalogue.apply(Update(remove=["ham", "pie"]))
    assert tokens("jam", "ham") == [5, 8, 5, 7]
    catalogue.apply(Update(add=[{"item_id": "rye", "sequence": [6, 5]}], remove=["tea"]))
    assert tokens("tea") == [6, 7]
    with pytest.raises(KeyError):
        tokens("jam")
    before = "rye"
    for step in range(20):  # the arrays do not grow with every update
        catalogue.apply(Update(add=[{"item_id": f"{step}", "sequence": [step + 10]}], remove=[before]))
        before = f"{step}"
    assert len(catalogue.edition.index.snapshot.items) < 8


def test_who_hears_of_a_change_cannot_undo_it(caplog: pytest.LogCaptureFixture) -> None:
    catalogue = LiveCatalogue(small_index())

    def fail(edition: catalogues.Edition) -> None:
        raise OSError("no network")

    catalogue.on_change = fail
    edition = catalogue.apply(Update(remove=["jam"]))
    assert (edition.version, catalogue.edition) == (1, edition)
    assert "not everybody was told of catalogue version 1" in caplog.text
