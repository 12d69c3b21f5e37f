# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The backbone of the experiments: nothing that is asked for is trained on, and the table counts what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import needs_beauty

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "benchmark"
STUDIES = [pytest.param("beauty", marks=needs_beauty), pytest.param("beauty-texts", marks=needs_beauty), "movielens"]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The scripts, with a cache of their own."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("HF_GR_CACHE", str(tmp_path))
    return {name: import_module(name) for name in ("backbone_data", "backbone_models", "backbone")}


def flat(histories: list[np.ndarray]) -> list[tuple[int, ...]]:
    return [tuple(history.tolist()) for history in histories]


@pytest.mark.parametrize("name", STUDIES)
def test_the_last_two_items_of_a_user_and_a_tenth_of_the_users_are_not_trained_on(modules: Any, name: str) -> None:
    study = modules["backbone_data"].read_study(name, fast=True)
    users = len(study.test)
    assert {row.user for row in study.test} == set(range(users))
    valid = {row.user: row for row in study.valid}
    known = flat(study.train) + flat(study.align)
    assert len(study.align) == pytest.approx(users / 10, rel=0.15)
    for row in study.test:
        before = valid.get(row.user)
        if before is None:
            assert len(row.history) == 1
            continue
        assert row.history.tolist() == [*before.history.tolist(), before.item]
        assert tuple(before.history.tolist()) in known
    assert len(known) == len(study.valid)  # each history once
    tokens = {tuple(row) for row in study.tokens.tolist()}
    assert len(tokens) > 0.99 * len(study.ids)


@needs_beauty
def test_a_split_by_time_asks_for_every_item_after_what_came_before(modules: Any) -> None:
    data = modules["backbone_data"]
    study = data.read_study("beauty-periods", fast=True)
    users = data.read_users(data.DEFAULT_DATA)[: data.FAST_USERS]
    asked = [(row.user, *row.history.tolist(), row.item) for row in study.test]
    expected = [
        (number, *user["train"], *user["valid"], *user["test"][: place + 1])
        for number, user in enumerate(users)
        for place in range(len(user["test"]))
        if user["train"] or user["valid"] or place
    ]
    assert asked == expected
    assert {*flat(study.train), *flat(study.align)} == {tuple(user["train"]) for user in users if user["train"]}


def test_codes_and_validation_know_nothing_of_held_out_users_and_last_items(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, models = modules["backbone_data"], modules["backbone_models"]
    films = data.keep_most_rated(data.load_movielens(), 500)
    first = data.read_study("movielens", fast=True)
    assert not {row.user for row in models.check_rows(first)} & first.held
    assert {tuple(films.histories[user][:-2].tolist()) for user in first.held} == set(flat(first.align))

    def read_with(changed: Callable[[int, np.ndarray], np.ndarray]) -> Any:
        histories = [changed(user, history) for user, history in enumerate(films.histories)]
        monkeypatch.setattr(data, "keep_most_rated", lambda *_: replace(films, histories=histories))
        return data.read_study("movielens", fast=True).tokens

    def reverse(history: np.ndarray) -> np.ndarray:
        return (499 - history)[::-1]

    assert (read_with(lambda user, history: reverse(history) if user in first.held else history) == first.tokens).all()
    ends = read_with(lambda user, history: np.concatenate([history[:-2], reverse(history[-2:])]))
    assert (ends == first.tokens).all()
    other = read_with(lambda user, history: history if user in first.held else reverse(history))
    assert other.shape != first.tokens.shape or (other != first.tokens).any()


def test_codes_are_made_once(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = modules["backbone_data"]
    first = data.read_study("movielens", fast=True)
    monkeypatch.setattr(data, "semantic_ids_from_features", lambda *_, **__: pytest.fail("made again"))
    assert (data.read_study("movielens", fast=True).tokens == first.tokens).all()


def test_an_unknown_study_is_named(modules: Any) -> None:
    with pytest.raises(ValueError, match="name='games', expected one of beauty, movielens"):
        modules["backbone_data"].read_study("games")


def test_lists_become_metrics_in_percent_with_intervals(modules: Any) -> None:
    data, backbone = modules["backbone_data"], modules["backbone"]
    rows = [data.Row(np.array([1]), item=user % 10, user=user) for user in range(40)]
    lists = [list(range(10)) for _ in rows]
    found = backbone.summary(backbone.values_of(lists, rows))
    assert found["H@1"][0] == pytest.approx(10)
    assert found["H@5"][0] == pytest.approx(50)
    assert found["H@10"][0] == pytest.approx(100)
    assert found["H@5"][1] < 50 < found["H@5"][2]
    ideal = 10 * sum(1 / np.log2(rank + 1) for rank in range(1, 11))
    assert found["N@10"][0] == pytest.approx(ideal)
    worse = backbone.values_of([items[::-1] for items in lists], rows)
    less = backbone.difference(backbone.values_of(lists, rows), worse)
    assert less["H@10"] == [0, 0, 0]
    assert less["H@1"][0] == pytest.approx(0)
    assert less["H@1"][1] < 0 < less["H@1"][2]


def test_a_changed_recipe_or_catalogue_trains_again_and_nothing_else_does(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, models = modules["backbone_data"], modules["backbone_models"]
    study = data.read_study("movielens", fast=True)
    trained: list[dict[str, Any]] = []

    def train(study: Any, recipe: dict[str, Any], folder: Path, **_: Any) -> dict[str, Any]:
        trained.append(dict(recipe))
        return {"cpu_seconds": 1.0}

    monkeypatch.setattr(models, "train", train)
    for _ in range(2):
        models.backbone_folder(study, tmp_path, fast=True)
    assert len(trained) == 1
    monkeypatch.setitem(models.FAST, "max_items", 7)
    models.backbone_folder(study, tmp_path, fast=True)
    assert [recipe["max_items"] for recipe in trained] == [8, 7]
    other = data.Study("movielens", type(study.ids)(study.ids.codes[::-1]), study.train, [], study.valid, study.test)
    models.backbone_folder(other, tmp_path, fast=True)
    assert len(trained) == 3


@pytest.mark.slow  # trains four tiny models
@pytest.mark.script("benchmark/backbone.py")
def test_a_fast_run_prints_every_method_and_a_second_one_trains_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"HF_GR_CACHE": str(tmp_path)}
    command = [sys.executable, str(FOLDER / "backbone.py"), "--fast", "--studies", "movielens"]
    reports = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout.splitlines()[-1])["studies"][0])
    assert reports[0] == reports[1]
    assert {"popularity", "neighbours", "backbone", "T5, equal time"} < set(reports[0]["methods"])
    assert "Writing model shards" not in done.stderr  # nothing was saved
