# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Histories as they are: items that have left the catalogue, users without any, and the list that answers them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
from jobs_case import Case, command, make_users, options_of, read, run, write_users

from hf_gr import ConstraintIndex, evaluate, recommend
from hf_gr.jobs.run import Recommended

NUM_USERS = 40
POPULAR = [999, 107, 100, 103, 998, 104, 105, 111, 112, 102, 101]  # 998 and 999 have left the catalogue
COLD = {3: None, 5: [], 8: [500, 501], 20: [500]}  # histories by row, none of which has a known item


@pytest.fixture(scope="module")
def clean(case: Case) -> list[dict[str, Any]]:
    return make_users(case, NUM_USERS)


@pytest.fixture(scope="module")
def real(clean: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same users, with unknown items in histories and filters, and some that have none else."""
    users = []
    for row, user in enumerate(clean):
        seen, only = list(user["seen"]), user["only"]
        for number in range(row % 4):
            seen.insert(number * 2, 500 + number)
        exclude = [107, *user["not"]] if row in COLD else user["not"]  # the first that the fallback would give
        only = None if only is None else [777, *only]
        users.append(user | {"seen": COLD.get(row, seen), "not": exclude, "only": only})
    return users


def test_what_is_unknown_is_dropped_and_the_rest_answers(case: Case, clean: Any, real: Any, tmp_path: Path) -> None:
    path, output = write_users(tmp_path / "real.parquet", real), tmp_path / "real-recs.parquet"
    options: dict[str, Any] = {"unknown_items": "drop", "fallback": POPULAR}
    made = run(case, path, output, **options)
    rows = read(output)
    expected = read(run(case, write_users(tmp_path / "clean.parquet", clean), tmp_path / "recs.parquet").output)
    assert set(rows[0]) == {"who", "items", "scores", "is_fallback", "num_dropped"}
    num_dropped = 0
    for number, (row, one, user) in enumerate(zip(rows, expected, real, strict=True)):
        unknown = [item for item in [*(user["seen"] or ()), *(user["only"] or ())] if item >= 500]
        num_dropped += len(unknown)
        assert (row["num_dropped"], row["is_fallback"]) == (len(unknown), number in COLD)
        if number in COLD:
            assert row["scores"] is None
            allowed = case.tokens if user["only"] is None else user["only"]
            popular = [item for item in POPULAR if item in case.tokens and item in allowed]
            assert row["items"] == [item for item in popular if item not in user["not"]][:6]
        else:
            assert row["items"] == one["items"]
            assert np.allclose(row["scores"], one["scores"], atol=1e-4)
    assert made == Recommended(output, NUM_USERS, 0, 0, num_fallback=len(COLD), num_dropped=num_dropped)
    assert num_dropped > 30
    again = run(case, path, output, **options)  # what is read from the finished file
    assert again == replace(made, already_finished=True)
    with pytest.raises(ValueError, match="is there already, of another run"):
        run(case, path, output, unknown_items="drop", fallback=POPULAR[::-1])


def test_a_fallback_is_any_list_of_ids(case: Case) -> None:
    frame = pandas.Series(POPULAR)
    texts = [str(item) for item in POPULAR]  # as they are in CSV
    for given in (np.array(POPULAR), frame, texts, [*POPULAR, "107", 103]):  # what is named twice is answered once
        found = recommend(case.model, [[], [100]], constraint_index=case.index, fallback=given, progress=False)
        assert found[0] == [item for item in POPULAR if item in case.tokens]
        assert len(found[1]) == 10


def test_a_fallback_that_cannot_answer_is_refused_before_the_model_is_loaded(case: Case) -> None:
    for options, message in (
        ({"fallback": "popular.parquet"}, "popular.parquet is not there, expected a parquet file"),
        ({"fallback": []}, r"fallback=\[\], expected one item or more"),
        ({"fallback": ["B01"]}, "fallback has 'B01', expected integers: the catalogue's item ids are integers"),
        ({"fallback": [7, 8]}, "fallback=7, 8, expected items of the catalogue, which has none of them"),
        ({"remove_items": "gone.txt"}, "remove_items='gone.txt', expected a list of item ids: read the file"),
        ({"unknown_items": "keep"}, "unknown_items='keep', expected 'refuse' or 'drop'"),
    ):
        with pytest.raises(ValueError, match=message):
            recommend("nowhere/at-all", [[100]], constraint_index=case.index, **options)


TOGETHER = {
    "item_id": [None, 500, 501, 502, 503],  # 999 has left the catalogue
    "similar_items": [[107, 999, 100], [101, 102, 999], [102, 103, 101], [104], [999]],
}


@pytest.mark.parametrize("kind", ["columns", "pandas", "parquet", "csv", "jsonl"])
def test_what_is_bought_with_unknown_items_answers_and_is_marked(case: Case, tmp_path: Path, kind: str) -> None:
    frame, given = pandas.DataFrame(TOGETHER), tmp_path / f"together.{kind}"
    if kind == "parquet":
        frame.to_parquet(given)
    elif kind == "csv":
        frame.astype({"item_id": "Int64"}).to_csv(given, index=False)
    elif kind == "jsonl":
        pandas.concat([frame[1:], frame[:1]]).to_json(given, orient="records", lines=True)
    fallback: Any = {"columns": TOGETHER, "pandas": frame}.get(kind, given)
    users = pa.table(
        {
            "seen": [[500, 501], [501, 500], [502, 600, 502], [600], None, [503], [100, 500]],
            "not": [[], [], [107], [], [], [], []],
        }
    )
    how: dict[str, Any] = {"constraint_index": case.index, "history": "seen", "exclude": "not", "top_k": 4}
    found = recommend(case.model, users, fallback=fallback, unknown_items="drop", progress=False, **how)
    assert found.column("items").to_pylist()[:-1] == [
        [102, 101, 103, 107],  # 102: 1/2 + 1, 101: 1 + 1/3
        [102, 101, 103, 107],
        [104, 100],
        [107, 100],
        [107, 100],
        [107, 100],
    ]
    assert found.column("similar_to").to_pylist() == [[501, 500], [500, 501], [502], [], [], [], None]
    assert found.column("is_fallback").to_pylist() == [True] * 6 + [False]


def test_of_equal_ones_what_goes_with_the_latest_is_first_and_a_list_stays_a_list(case: Case, tmp_path: Path) -> None:
    alone = {"item_id": [500, 501], "similar_items": [[100], [101]]}
    how: dict[str, Any] = {"constraint_index": case.index, "unknown_items": "drop", "progress": False}
    asked = [[500, 501], [501, 500, 501], [501, 500]]
    assert recommend(case.model, asked, fallback=alone, **how) == [[101, 100], [101, 100], [100, 101]]
    (tmp_path / "popular.csv").write_text("item_id\n107\n")
    rows = recommend(case.model, pa.table({"seen": asked}), history="seen", fallback=tmp_path / "popular.csv", **how)
    assert rows.column("items").to_pylist() == [[107]] * 3
    assert "similar_to" not in rows.column_names


@pytest.mark.parametrize(
    ("items", "similar", "message"),
    [
        ([5, 5], [[100], [101]], "fallback, column 'item_id', row 1 is 5, expected each once in fallback=: merge"),
        ([None, None], [[100], [101]], "row 1 is None, expected each once"),
        ([5, 6], [[100], []], r"column 'similar_items', row 1 is \[\], expected a list of one item id or more"),
        ([5], [100], "row 0 is 100, expected a list of one item id"),
        (["B01"], [[100]], "fallback has 'B01', expected integers: the catalogue's item ids are integers"),
        ([5], [[999, 998]], "fallback=999, 998, expected items of the catalogue, which has none of them"),
        ([], [], "fallback= has no row, expected one or more"),
        ([5], None, "fallback has no column 'similar_items', expected one of 'item_id'"),
    ],
)
def test_a_table_that_cannot_answer_is_refused(case: Case, items: Any, similar: Any, message: str) -> None:
    table = {"item_id": items} | ({} if similar is None else {"similar_items": similar})
    with pytest.raises(ValueError, match=message):
        recommend("nowhere/at-all", [[100]], constraint_index=case.index, fallback=table)


def test_evaluate_counts_what_such_users_get(case: Case) -> None:
    """Targets that have left the catalogue are misses; the fallback's hits are hits."""
    histories = [[100, 500, 101, 102], [500, 107], [103], [100, 101, 600], [104, 105]]
    options: dict[str, Any] = {"constraint_index": case.index, "sampled_users": 0, "progress": False}
    options |= {"num_beams": 60, "cutoffs": [60]}
    found = evaluate(case.model, histories, unknown_items="drop", fallback=POPULAR, **options).results[0]
    assert (found.num_users, found.num_skipped) == (5, 0)
    # 60 beams find all 60 items, so that a known target is a hit; the fallback has 107 and 103.
    assert found.metrics["recall@60"] == pytest.approx(4 / 5)
    dropped = evaluate(case.model, [[100, 101, 102], [104, 105]], **options).results[0]
    assert dropped.metrics["recall@60"] == 1
    with pytest.raises(ValueError, match="row 0 cannot be answered: history has 500"):
        evaluate(case.model, histories, fallback=POPULAR, **options)
    # A column of targets means the same.
    users = pa.table({"seen": [history[:-1] for history in histories], "next": [one[-1] for one in histories]})
    columns: dict[str, Any] = {"history": "seen", "target": "next", "unknown_items": "drop", "fallback": POPULAR}
    assert evaluate(case.model, users, **columns, **options).results[0].metrics == found.metrics


def test_items_that_are_removed_are_read_and_not_recommended(case: Case, tmp_path: Path) -> None:
    """The oracle: the whole answer without them. A catalogue saved without them has forgotten them."""
    histories, gone = [[100, 103, 107], [107]], [107, 112]
    options: dict[str, Any] = {"num_beams": 60, "progress": False}
    whole = recommend(case.model, histories, constraint_index=case.index, top_k=60, **options)
    index = ConstraintIndex.from_pretrained(case.index)
    options |= {"constraint_index": index, "top_k": 58}
    for removed in (gone, np.array(gone), [str(item) for item in gone]):
        found = recommend(case.model, histories, remove_items=removed, **options)
        assert [set(items) for items in found] == [set(items) - set(gone) for items in whole]
        assert found[0] == [item for item in whole[0] if item not in gone]
    assert index.has_items(gone).all()  # the given catalogue stays as it is
    index.remove(gone)
    index.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="row 0 cannot be answered: history has 107"):
        recommend(case.model, histories, **options | {"constraint_index": tmp_path})
    with pytest.raises(ValueError, match="remove_items= has all 60 items of the catalogue, expected some to stay"):
        recommend(case.model, histories, constraint_index=case.index, remove_items=list(case.tokens))


def test_the_command_says_how_many_and_removes_what_a_file_lists(case: Case, real: Any, tmp_path: Path) -> None:
    users, output = write_users(tmp_path / "u.parquet", real), tmp_path / "recs.parquet"
    (tmp_path / "popular.csv").write_text("item_id\n" + "".join(f"{item}\n" for item in POPULAR))
    (tmp_path / "gone.txt").write_text("107\n103\n998\n", encoding="utf-8-sig")  # as Excel writes it
    flags = [*options_of(case, users, output), "--unknown-items", "drop", "--fallback", tmp_path / "popular.csv"]
    flags += ["--remove", tmp_path / "gone.txt"]
    done = command("recommend", *flags)
    assert done.exit_code == 0
    assert "40 of 40 users" in done.stdout
    assert f"{len(COLD)} users without a known item got the fallback" in done.stdout
    assert f"{sum(row['num_dropped'] for row in read(output))} items were dropped" in done.stdout
    assert "has 3 ids, of which the catalogue does not have 1, such as 998: they are left out" in done.stderr
    assert not {103, 107} & {item for row in read(output) for item in row["items"]}
    (tmp_path / "gone.txt").write_text("100\n")  # another night, another run
    other = command("recommend", *flags)
    assert (other.exit_code, "is there already, of another run" in other.stderr) == (2, True)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"x": ["B"]}, {"x": ["C", "D"]}], {"exclude": "x"}, "exclude= has 3 ids, of which the catalogue has none"),
        ([{"s": []}, {"s": [500]}], {"fallback": [107, 100], "unknown_items": "drop"}, "answered all 2 rows"),
        ([{"x": "all"}, {"x": "all"}], {"exclude": "x"}, "all 2 rows are without an item, expected some"),
        ([{"u": "ann"}, {"u": "bob"}, {"u": "ann"}], {"user": "u"}, "user 'ann' has 2 rows among the first 3"),
        ([{}, {}], {"fallback": POPULAR}, "fallback= has 11 ids, of which the catalogue does not have 2, such as 999"),
        ([{}], {"remove_items": [5, 100]}, "remove_items= has 2 ids, of which the catalogue does not have 1"),
    ],
)
@pytest.mark.parametrize("is_wrong", [True, False])
def test_what_looks_like_a_mistake_is_told_once(
    case: Case, rows: Any, options: Any, message: str, is_wrong: bool, caplog: pytest.LogCaptureFixture
) -> None:
    table = []
    for number, row in enumerate(rows):
        seen, exclude = row.get("s", [100]), row.get("x", [])
        exclude = list(case.tokens) if exclude == "all" else [900 + ord(item[0]) for item in exclude]
        table.append({"s": seen, "x": exclude, "u": row.get("u", str(number))})
    if not is_wrong:  # one more row is as it should be
        table = [row | {"u": str(number)} for number, row in enumerate(table)] + [{"s": [101], "x": [102], "u": "eve"}]
        options = options | {name: [100, 101] for name in ("fallback", "remove_items") if name in options}
    given = {"constraint_index": case.index, "history": "s", "progress": False, "window_rows": 3, **options}
    recommend(case.model, pa.Table.from_pylist(table), **given)
    said = [record.getMessage() for record in caplog.records if record.name == "hf_gr.recommend"]
    assert len(said) == int(is_wrong), said
    assert all(message in text for text in said)
