# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf_gr.train`: what is left out of a table of purchases, what is held out, the folder, the verdict."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import hf_gr
from hf_gr import SemanticIds
from hf_gr.commands.app import build_app
from hf_gr.purchases.extend import extend
from hf_gr.purchases.train import verdict_of
from hf_gr.serving.catalogues import LiveCatalogue, Update
from hf_gr.tables.items import read_similar
from hf_gr.tables.purchases import clean
from hf_gr.tables.table import Table
from hf_gr.training import semantic_ids_from_histories

AS_IT_IS = dict.fromkeys(("drop_returns", "drop_duplicates", "shuffle_ties"), False)
QUICK: dict[str, Any] = {"max_items": 4, "num_codes": 4, "batch_size": 16}
ROWS = {
    "user": ["ann", "bob", "ann", "ann", "bob", None, "ann", "bob", "cid", "ann"],
    "item": [7.0, 7.0, 8.0, 9.0, 8.0, 7.0, float("nan"), 9.0, 7.0, 8.0],  # as pandas reads integers beside a gap
    "time": [3, 1, 1, 2, 2, 1, 1, 3, 1, 1],
    "quantity": [1, 1, 1, 1, 1, 1, 1, 0, 1, 1],
}
SMALL = {"drop_missing": True, "min_item_count": 1, "min_user_count": 3}


def cleaned(rows: dict[str, list[Any]], **how: Any) -> Any:
    roles = {name: name for name in rows}
    return clean(Table(rows, roles), roles, AS_IT_IS | SMALL | how)


@pytest.mark.parametrize(
    ("how", "histories", "told"),
    [
        ({}, [[8, 8, 9, 7], [7, 8, 9]], "2 with a missing cell"),
        ({"drop_returns": True}, [[8, 8, 9, 7]], "1 with a quantity of 0 or less"),
        ({"drop_duplicates": True}, [[8, 9, 7], [7, 8, 9]], "1 of the same user, item and time"),
        ({"min_item_count": 3}, [], "no row is left"),  # without item 9, bob has two: then item 7 has one
        ({"drop_missing": False}, [], "row 5 has a missing cell"),
    ],
)
def test_what_is_left_out_is_an_option_and_is_told(how: dict[str, Any], histories: Any, told: str) -> None:
    if not histories:
        with pytest.raises(ValueError, match=told):
            cleaned(ROWS, **how)
        return
    found, _, report = cleaned(ROWS, **how)
    assert sorted(found.values()) == sorted(histories)
    assert any(line.startswith(told) for line in report)
    assert report[-1].startswith(f"{sum(map(len, histories))} purchases of 3 items by {len(histories)}")


def test_purchases_of_one_moment_are_in_no_order_of_rows_and_always_the_same() -> None:
    rows = {"user": ["ann"] * 50, "item": list(range(50)), "time": [0] * 25 + [1] * 25}
    history = cleaned(rows, shuffle_ties=True)[0]["ann"]
    assert sorted(history[:25]) == list(range(25)) != history[:25]
    rows = {name: [last, *values] for (name, values), last in zip(rows.items(), ("bob", 1, 0), strict=True)}
    whole = cleaned(rows, shuffle_ties=True, min_user_count=1)[0]["ann"]
    assert cleaned(rows, shuffle_ties=True)[0] == {"ann": whole} == {"ann": history}  # whatever else is in the table


BOUGHT: dict[str, list[Any]] = {
    "who": ["bob", "ann", "ann", "cid", "bob", "ann", "ann", None],
    "what": [104, 103, 100, 107, 105, 101, 103, 100],
    "day": [
        "2026-11-02",
        "2026-11-09",
        "2026-11-01",
        "2026-11-01",
        "2026-11-05",
        "2026-11-02",
        "2026-11-09",
        "2026-11-01",
    ],
}
HISTORIES = {"bob": [104, 105], "ann": [100, 101, 103], "cid": [107]}  # by time, a duplicate and a gap dropped


@pytest.mark.parametrize("kind", ["csv", "parquet", "pandas", "arrow"])
def test_purchases_are_taken_as_they_are(case: Any, tmp_path: Path, kind: str, caplog: Any) -> None:
    caplog.set_level("INFO", "hf_gr.progress")
    frame, path = pd.DataFrame(BOUGHT), tmp_path / f"purchases.{kind}"
    in_files = kind in ("csv", "parquet")
    purchases: Any = path if in_files else frame if kind == "pandas" else pa.Table.from_pandas(frame)
    if in_files:
        getattr(frame, f"to_{kind}")(path, index=False)
    how: dict[str, Any] = {"constraint_index": case.index, "exclude": "history", "top_k": 4}
    expected = hf_gr.recommend(case.model, list(HISTORIES.values()), **how)
    columns = {"user": "who", "item": "what", "time": "day"}
    found = hf_gr.recommend(case.model, purchases, tmp_path / "o.parquet" if in_files else None, **columns, **how)
    found = pq.read_table(found.output) if in_files else found
    assert isinstance(found, pd.DataFrame if kind == "pandas" else pa.Table)
    assert [list(found[name]) if kind == "pandas" else found[name].to_pylist() for name in ("who", "items")] == [
        list(HISTORIES),
        expected,
    ]
    assert "1 with a missing cell: dropped" in caplog.messages
    returned = pd.concat([frame.assign(number=1), frame[::-1].assign(number=0)], ignore_index=True)
    kept = hf_gr.recommend(case.model, returned, quantity="number", **columns, **how)
    assert [list(kept[name]) for name in ("who", "items")] == [list(HISTORIES), expected]
    measured: dict[str, Any] = {"constraint_index": case.index, "sampled_users": 0, "cutoffs": [5]}
    long = [history for history in HISTORIES.values() if len(history) > 1]
    alone = hf_gr.evaluate(case.model, long, **measured).results
    made = hf_gr.evaluate(case.model, purchases, **columns, **measured).results
    assert (made[0].metrics, made[0].num_users) == (alone[0].metrics, 2)
    assert any("users with fewer than 2: dropped" in message for message in caplog.messages)


def test_purchases_are_refused_where_they_are_taken_for_users(case: Any, tmp_path: Path) -> None:
    frame = pd.DataFrame(BOUGHT)
    frame.to_csv(tmp_path / "purchases.csv", index=False)
    for purchases in (tmp_path / "purchases.csv", pa.Table.from_pandas(frame)):
        for function in (hf_gr.recommend, hf_gr.evaluate):
            more = {"output": tmp_path / "o.parquet"} if function is hf_gr.recommend else {}
            with pytest.raises(ValueError, match="where a row is a purchase, pass item='what'"):
                function(case.model, purchases, constraint_index=case.index, user="who", history="what", **more)
    for columns, message in (
        ({"item": "what"}, "user=None with item='what', expected the columns of purchases: user=, item= and time="),
        ({"item": "what", "user": "who", "filter": "x"}, "filter='x' with item='what'"),
        ({"item": "what", "user": "who", "history": "what"}, "history='what' with item='what'"),
        ({"time": "day", "history": "what"}, "time='day' without item=, expected both"),
        ({"quantity": "n", "history": "what"}, "quantity='n' without item=, expected both"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_gr.recommend(case.model, frame, constraint_index=case.index, **columns)
    columns, unknown = {"user": "who", "item": "what", "time": "day"}, frame.replace({"what": {107: -7}})
    with pytest.raises(ValueError, match=r"^users, user 'cid' cannot be answered: .*-7"):
        hf_gr.recommend(case.model, unknown, constraint_index=case.index, **columns)
    line = (
        f"recommend -m {case.model} --index {case.index} -i {tmp_path}/purchases.csv --user who --item what --time day"
    )
    done = CliRunner().invoke(build_app(), [*line.split(), "-o", str(tmp_path / "o.parquet")])
    assert (done.exit_code, "3 of 3 users have recommendations" in done.stdout) == (0, True)
    assert "6 purchases of 6 items by 3 users are left" in done.stderr


def test_ids_know_no_held_out_item_and_texts_bring_items_together() -> None:
    chains = [[f"i{number}", f"i{(number + 1) % 12}", f"i{(number + 2) % 12}"] for number in range(12)]
    names = sorted({item for chain in chains for item in chain}) + ["new"]
    ids = semantic_ids_from_histories(chains, item_ids=names, num_codes=4)
    assert ids.item_ids == names
    features = np.repeat([[0.0, 1.0], [9.0, 0.0]], [6, 7], axis=0)
    with_features = semantic_ids_from_histories(chains, item_ids=names, features=features, num_codes=2)
    assert with_features.codes_of("new")[0] != with_features.codes_of("i0")[0] == with_features.codes_of("i1")[0]
    for how, message in (
        ({"item_ids": names[1:]}, "has item 'i0', expected one of item_ids"),
        (
            {"item_ids": names, "features": features[:3]},
            r"features has shape \[3, 2\], expected a row for each of 13 items",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            semantic_ids_from_histories(chains, **how)


def test_a_csv_becomes_a_recommender_with_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    learn = hf_gr.training.recommender.train_recommender

    def watched(histories: Any, ids: Any, **how: Any) -> Any:
        seen.update(how, histories=histories)
        return learn(histories, ids, **how | {"learning_rate": 1.0, "logging_steps": 1})  # it soon gets worse

    monkeypatch.setattr("hf_gr.training.recommender.train_recommender", watched)
    encoder = SimpleNamespace(encode=lambda texts: np.array([[float("green" in text)] for text in texts]))
    module = SimpleNamespace(SentenceTransformer=lambda name: encoder, __spec__="there")
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    lines = ["who,what,day,title", "u0,99,0,"]
    lines += [
        f"u{user},{(user + day) % 12},{day},tea {'red' if (user + day) % 12 < 6 else 'green'}"
        for user in range(40)
        for day in range(6)
    ]
    (tmp_path / "purchases.csv").write_text("\n".join(lines))
    (tmp_path / "made" / "checkpoint-99").mkdir(parents=True)  # of a run that was killed
    line = f"train {tmp_path}/purchases.csv --user who --item what --time day --text title -o {tmp_path}/made"
    options = [part for name, value in QUICK.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    told = [*line.split(), *options, "--max-steps", "20", "--json"]
    refused = CliRunner().invoke(build_app(), told)
    assert (refused.exit_code, "is not empty, expected a new folder" in refused.stderr) == (2, True)
    result = CliRunner().invoke(build_app(), [*told, "--overwrite"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [len(history) for history in seen["histories"]] == [4] * 40  # the last two are held out
    assert [len(history) for history in seen["validation"]] == [5] * 40
    assert [one["name"] for one in found["evaluation"]["baselines"]] == ["popularity", "item-to-item"]
    assert re.search(r"step \d of 20: loss \d\.\d+, validation loss \d", result.stderr)
    last, best = re.match(r"trained (\d+) steps, .* kept those of step (\d+),", found["training"][1]).groups()
    assert int(last) > int(best)
    assert f"since step {best} was the best" in found["verdict"][-1]
    folder = tmp_path / "made"
    card = (folder / "README.md").read_text()
    assert all(line in card for line in (*found["purchases"], *found["training"], *found["verdict"]))
    assert "It states neither" not in card
    assert str(tmp_path) not in card
    assert not list(folder.glob("checkpoint-*"))
    assert json.loads((folder / "generation_config.json").read_text())["num_beams"] == 50  # as it was measured
    assert SemanticIds.from_pretrained(folder).item_ids == list(range(12))
    first = SemanticIds.from_pretrained(folder).codes[:, 0]
    assert set(first[:6]).isdisjoint(first[6:])  # the texts tell them apart
    assert len(hf_gr.recommend(folder, [[3, 4]], top_k=3)[0]) == 3
    result = CliRunner().invoke(build_app(), line.split())
    assert (result.exit_code, "pass --overwrite" in result.stderr) == (2, True)
    together = read_similar("fallback", folder / "fallback.parquet")
    assert set(together) == {None, 99, *range(12)}  # 99 is rare, and bought with what one user had
    assert (
        together[99]
        == hf_gr.recommend(folder, [[99]], unknown_items="drop", fallback=folder / "fallback.parquet")[0][:6]
    )
    assert set(together[None]) == set(range(12))
    check_tomorrow(folder)


def check_tomorrow(folder: Path) -> None:
    """Item 12 is bought with item 3, 13 and 14 have texts, 15 is bought once, 16 with nothing that is known."""
    before = SemanticIds.from_pretrained(folder)
    lines = ["who,what,day,title", "ann,3,1,tea red", "ann,12,2,", "ann,13,3,tea green", "bob,14,1,tea red"]
    lines += ["bob,13,2,tea green", "bob,15,3,", "ann,12,4,", "ann,14,5,tea red", "cid,16,1,", "cid,16,2,"]
    today, patch = folder.parent / "today.csv", folder.parent / "patch.json"
    today.write_text("\n".join(lines))
    line = f"items extend {folder} {today} --user who --item what --time day --min-item-count 2 --patch {patch}"
    refused = CliRunner().invoke(build_app(), [*line.split(), "--text", "text"])
    assert (refused.exit_code, "'text'" in refused.stderr) == (2, True)
    result = CliRunner().invoke(build_app(), [*line.split(), "--text", "title"])
    assert result.exit_code == 0, result.output
    for told in (
        "3 new items: 2 by texts, 1 by what they are bought with",
        "1 new item with fewer than 2 purchases: left out (15)",
        "1 new item bought with no known item: left out (16)",
    ):
        assert told in result.stdout
    assert re.search(r"the first codes of \d+% of \d items are those", result.stdout)
    together = read_similar("fallback", folder / "fallback.parquet")
    assert (together[15][:2], 99 in together) == ([13, 14], True)  # with bob's; the row of the training stays
    ids, index = SemanticIds.from_pretrained(folder), hf_gr.ConstraintIndex.from_pretrained(folder)
    assert ids.item_ids == [*before.item_ids, 12, 13, 14]
    assert ids.codes_of(12)[:3] == ids.codes_of(3)[:3]
    assert ids.codes_of(13)[0] in ids.codes[6:12, 0]  # green, as they are
    assert ids.codes_of(14)[0] in ids.codes[:6, 0]
    catalogue = LiveCatalogue(before.constraint_index())
    body = json.loads(patch.read_text())
    assert body.pop("code_book") == ids.code_book()
    catalogue.apply(Update.from_dict(body))
    assert list(catalogue.edition.index) == list(index) == list(ids.constraint_index())
    assert set(hf_gr.recommend(folder, [[3, 12]], top_k=15)[0]) == set(range(15))
    sent = patch.read_text()
    assert "0 new items" in CliRunner().invoke(build_app(), line.split()).stdout
    assert patch.read_text() == sent  # which may not have reached the server yet
    today.write_text("who,what,day\nann,3,1\nann,B01,2")
    for more, told in (
        ([], "has 'B01', expected integers, as the known items are"),
        (["--output", f"{folder.parent}"], ""),
        (["--patch", f"{folder.parent}/none/patch.json"], "expected an existing folder"),
    ):
        done = CliRunner().invoke(build_app(), [*line.split(), *more])
        assert (done.exit_code, told in done.stderr) == (2, True), done.output
    ids.save_pretrained(folder.parent)
    with pytest.raises(ValueError, match="has semantic IDs of its own"):
        extend(folder, today, user="who", item="what", time="day", output=folder.parent)


def test_the_verdict_is_that_of_the_intervals_and_says_what_next() -> None:
    def differing(low: float, high: float) -> Any:
        one = SimpleNamespace(metric="recall@10", difference=(low + high) / 2, low=low, high=high)
        names = [SimpleNamespace(name="popularity")]
        return SimpleNamespace(cutoffs=(5, 10), results=["model"], baselines=names, difference=lambda *_: [one])

    for low, high, word in ((0.01, 0.03, "better than"), (-0.01, 0.03, "level with"), (-0.03, -0.01, "worse than")):
        told, *more = verdict_of(differing(low, high), "train longer")
        assert told.startswith(f"{word} popularity: recall@10 ")
        assert more == ([] if word == "better than" else ["next: train longer"])
