# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Comparisons of `evaluate`: intervals and baselines against slow twins, several models, and how results are shown."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import jobs_case
import numpy as np
import pyarrow as pa
import pytest
from jobs_case import Case, make_case, make_measured, read, write_users

from hf_gr import ConstraintIndex, evaluate
from hf_gr.answering import requests as requests_module
from hf_gr.answering.requests import Request
from hf_gr.commands.evaluate import _compared
from hf_gr.jobs.baselines import ITEM_TO_ITEM, POPULARITY, Baselines, Histories
from hf_gr.jobs.intervals import FEWEST_USERS, UserValues
from hf_gr.jobs.metrics import metric_names
from hf_gr.jobs.results import Evaluation
from hf_gr.jobs.show import as_text

NUM_USERS = 60
OPTIONS: dict[str, Any] = {"history": "seen", "cutoffs": (1, 5), "num_beams": 6, "sampled_users": 0}
# Two draws of 4,000 resamples: a bound of 95% has a standard error of 0.042 standard deviations in each.
RESAMPLES, BOUND_TOL = 4000, 0.25


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same items under other tokens, and a model of another family."""
    return make_case(tmp_path_factory.mktemp("other"), family="qwen3", eos=2)


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory, case: Case) -> Path:
    return write_users(tmp_path_factory.mktemp("users") / "users.parquet", make_measured(case, NUM_USERS))


PARTS = {"group": "country", "new_items": [100, 103]}


@pytest.fixture(scope="module")
def both(case: Case, other: Case, users: Path) -> Evaluation:
    models, indexes = {"one": case.model, "two": other.model}, {"one": case.index, "two": other.index}
    return evaluate(models, users, constraint_index=indexes, **PARTS, **OPTIONS | {"num_beams": [5, 10]})


@pytest.fixture
def measure(case: Case) -> Callable[..., Evaluation]:
    """`evaluate` of the one model over rows, or a file of them."""

    def measure(rows: Any, **more: Any) -> Evaluation:
        given = {"model": case.model, "constraint_index": case.index} | OPTIONS | more
        return evaluate(users=pa.Table.from_pylist(rows) if isinstance(rows, list) else rows, **given)

    return measure


def reference_bootstrap(rows: np.ndarray, users: np.ndarray, *, num_resamples: int, seed: int) -> np.ndarray:
    """`[N]` values of rows, `[N]` their users -> the bounds: users drawn one by one, each with all rows."""
    draw, names = np.random.default_rng(seed), np.unique(users)
    of_user = [rows[users == name] for name in names]
    means = [
        np.concatenate([of_user[place] for place in draw.integers(0, len(names), len(names))]).mean()
        for _ in range(num_resamples)
    ]
    return np.percentile(means, [2.5, 97.5])


def filled(rows: np.ndarray, users: np.ndarray | None = None) -> UserValues:
    values = UserValues()
    for number, row in enumerate(rows.reshape(len(rows), -1)):
        values.add(tuple(row), None if users is None else int(users[number]))
    return values


def width(bounds: Any) -> float:
    return bounds[1] - bounds[0]


@pytest.mark.parametrize("is_alone", [True, False], ids=["a row each", "several rows"])
def test_intervals_and_differences_are_those_of_users_drawn_one_by_one(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users differ a lot, models little: the pairs know, two separate intervals do not."""
    if is_alone:
        monkeypatch.setattr("hf_gr.jobs.intervals.DRAWN_AT_ONCE", 10_000)  # in many pieces
    draw = np.random.default_rng(0)
    users = np.arange(300) if is_alone else draw.permutation(np.repeat(np.arange(80), draw.integers(1, 9, 80)))
    easy = draw.random(users.max() + 1)[users]  # rows of one user are alike
    some, others = (np.round(easy + draw.normal(0, 0.05, len(users)) + better, 2) for better in (0.02, 0))
    mine, theirs = (filled(rows, None if is_alone else users) for rows in (some, others))
    (alone,) = mine.intervals(num_resamples=RESAMPLES, seed=1)
    means, (paired,) = mine.differences(theirs, num_resamples=RESAMPLES, seed=1)
    assert means == pytest.approx([(some - others).mean()])
    for bounds, rows in ((alone, some), (paired, some - others)):
        expected = reference_bootstrap(rows, users, num_resamples=RESAMPLES, seed=2)
        assert np.abs(np.array(bounds) - expected).max() < BOUND_TOL * width(expected) / 4
    assert paired[0] > 0
    assert width(alone) > 3 * width(paired)
    if not is_alone:  # rows drawn one by one would make intervals too narrow
        (narrow,) = filled(some).intervals(num_resamples=RESAMPLES, seed=1)
        assert width(alone) > 1.2 * width(narrow)


def test_few_users_and_no_resamples_have_no_interval() -> None:
    """Resamples of one user are all the same: an interval of no width would be no sign of certainty."""
    values = np.linspace(0, 1, FEWEST_USERS)
    assert len(filled(values).intervals(num_resamples=10, seed=0)) == 1
    assert filled(values).intervals(num_resamples=0, seed=0) == []
    several = filled(np.arange(100.0) % 2, np.arange(100) % (FEWEST_USERS - 1))
    for few in (UserValues(), filled(values[1:]), several):
        assert few.intervals(num_resamples=10, seed=0) == []
        assert few.differences(few, num_resamples=10, seed=0) == ([], [])


def reference_lists(
    histories: Sequence[Sequence[int]],
    catalogue: Sequence[int],
    history: Sequence[int],
    exclude: Sequence[int],
    allowed: Sequence[int] | None,
    top_k: int,
) -> dict[str, list[int]]:
    """Every pair of items looked up in every history."""
    sets = [set(list(dict.fromkeys(reversed(one)))[: requests_module.LATEST]) for one in histories]
    count = Counter(item for one in sets for item in one)
    seen = list(dict.fromkeys(item for one in histories for item in one))
    order = sorted(seen, key=lambda item: (-count[item], seen.index(item)))
    order += [item for item in (allowed or catalogue) if item not in order]
    scores = {
        item: sum(
            sum(item in one and mine in one for one in sets) / sqrt(count[item] * count[mine])
            for mine in set(list(dict.fromkeys(reversed(history)))[: requests_module.LATEST])
            if mine != item and mine in count
        )
        for item in count
    }
    similar = sorted(order, key=lambda item: (-round(scores.get(item, 0.0), 9), order.index(item)))
    fits = [
        item for item in order if item in catalogue and item not in exclude and (allowed is None or item in allowed)
    ]
    return {POPULARITY: fits[:top_k], ITEM_TO_ITEM: [item for item in similar if item in fits][:top_k]}


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("latest", [3, requests_module.LATEST])
def test_baselines_are_what_the_definitions_say(latest: int, repeats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "LATEST", latest)
    draw = np.random.default_rng(0)
    histories = [draw.choice(25, size=draw.integers(1, 9), replace=repeats).tolist() for _ in range(40)]
    catalogue = draw.permutation(30)[:26].tolist()  # some items of histories have left it, some have no history
    index = ConstraintIndex.from_sequences([[item + 1] for item in range(26)], item_ids=catalogue)
    counted = Histories()
    for start in range(0, 40, 7):
        counted.add(histories[start : start + 7])
    found = Baselines(counted, index)
    assert found.omits_history is not repeats
    for number, history in enumerate([*histories, [99], []]):
        exclude = draw.permutation(30)[: number % 5].tolist()
        allowed = [item for item in catalogue if item % 3 == 0] if number % 4 == 0 else None
        request = Request([], tuple(exclude), None if allowed is None else tuple(allowed))
        omitted = [*exclude, *([] if repeats else history)]
        expected = reference_lists(histories, catalogue, history, omitted, allowed, 10)
        assert found.answer(request, history, top_k=10) == expected, number


def test_held_out_items_teach_no_baseline(measure: Any) -> None:
    """All users choose item 159 next, which no history has: who has not seen a target cannot recommend it."""
    found = measure([{"seen": [100 + number % 9, 110 + number % 11, 159]} for number in range(40)])
    assert [result.metrics["recall@5"] for result in found.baselines] == [0.0, 0.0]


def test_baselines_omit_histories_as_they_say(users: Path, measure: Any) -> None:
    rows = [{"seen": [100 + number, 101 + number, 102 + number], "next": 100 + number} for number in range(40)]
    omitting = measure(rows, target="next")  # no history repeats an item
    assert omitting.baselines[1].metrics["recall@5"] == 0  # targets are items of the histories
    kept = measure(rows, target="next", omit_history=False)
    assert kept.baselines[1].metrics["recall@5"] > 0.5
    repeating, told = measure(users), measure(users, omit_history=True)
    omits = [found.baselines_omit_history for found in (omitting, kept, repeating, told)]
    assert omits == [True, False, False, True]
    line = "Lists of the baselines omit what their user has had"
    assert [line in repr(found) for found in (omitting, kept)] == [True, False]


def test_cold_users_and_delisted_items_are_on_equal_terms(measure: Any) -> None:
    """Who has no history gets popular items; what the catalogue does not have is in no list and no pair."""
    rows = [{"seen": [100, 7, 101], "next": 105}] * 3 + [{"seen": [101], "next": 100}, {"seen": [], "next": 101}]
    options: dict[str, Any] = {"target": "next", "unknown_items": "drop", "fallback": [159]}
    found = measure(rows, **options)
    (result,) = found.results
    assert (result.num_fallback, result.num_dropped, result.num_users) == (1, 3, 5)
    # 101 is in four histories and 100 in three; their users do not get them again.
    assert [baseline.metrics["recall@1"] for baseline in found.baselines] == pytest.approx([2 / 5, 2 / 5])
    assert "answered by the fallback" in repr(found)
    limits = [{"only": [105, 100]}, {"not": [101]}, {"only": [7]}, {}, {"not": [100]}]
    limited = measure([row | {"not": None, "only": None} | more for row, more in zip(rows, limits, strict=True)],
                      exclude="not", filter="only", **options)  # fmt: skip
    assert [baseline.metrics["recall@1"] for baseline in limited.baselines] == pytest.approx([3 / 5, 3 / 5])
    rows = [{"tokens": [3, 4], "next": 100}, {"tokens": [5], "next": 101}]
    found = measure(rows, history=None, tokens="tokens", target="next")
    assert found.baselines == found.differences == ()  # they need histories
    assert not measure([{"seen": [100, 101]}], baselines=False).baselines


def test_models_side_by_side_are_what_they_are_alone(both: Evaluation, other: Case, users: Path, measure: Any) -> None:
    assert [(result.name, result.num_beams) for result in both.results] == [
        ("one", 5), ("one", 10), ("two", 5), ("two", 10)
    ]  # fmt: skip
    for given, offset in (({}, 0), ({"model": other.model, "constraint_index": other.index}, 2)):
        alone = measure(users, **given, **PARTS, num_beams=[5, 10])
        for mine, beside in zip(alone.results, both.results[offset : offset + 2], strict=True):
            for name in ("metrics", "intervals", "groups", "new_items", "coverage", "filled", "num_users"):
                assert getattr(mine, name) == getattr(beside, name), name
        assert alone.baselines == both.baselines
    assert both.results[0].metrics != both.results[2].metrics


def test_differences_are_those_of_the_means(both: Evaluation) -> None:
    by_label = {result.label: result for result in (*both.results, *both.baselines)}
    pairs = {(one.result, one.other) for one in both.differences}
    assert pairs == {
        ("two, 5 beams", "one, 5 beams"),
        ("two, 10 beams", "one, 10 beams"),
        *((f"{name}, 10 beams", baseline) for name in ("one", "two") for baseline in (POPULARITY, ITEM_TO_ITEM)),
    }
    for one in both.differences:
        means = [by_label[label].metrics[one.metric] for label in (one.result, one.other)]
        assert one.difference == pytest.approx(means[0] - means[1])
        assert one.low <= one.difference <= one.high
    assert len(both.differences) == len(pairs) * len(metric_names((1, 5)))
    (width,) = (one for one in both.difference(*both.results[1::-1]) if one.metric == "recall@5")
    assert width.difference == pytest.approx(both.results[1].metrics["recall@5"] - both.results[0].metrics["recall@5"])
    stranger = replace(both.results[0], num_users=1)
    with pytest.raises(ValueError, match="result='one, 5 beams', expected one of this evaluation's"):
        both.difference(stranger, both.results[1])
    with pytest.raises(ValueError, match="other='popular', expected one of this evaluation's results"):
        both.difference(both.results[0], "popular")  # pyright: ignore


def test_users_whom_one_model_cannot_answer_count_for_none(case: Case, other: Case, measure: Any) -> None:
    good = [{"seen": [100, 101, 105]}, {"seen": [102, 105, 106]}]
    known = [item for item in other.tokens if item != 159]
    less = ConstraintIndex.from_sequences([other.tokens[item] for item in known], item_ids=known, eos_token_id=2)
    given = {"model": {"one": case.model, "two": other.model}, "constraint_index": {"one": case.index, "two": less}}
    found = measure([*good, {"seen": [159, 104, 105]}, {"seen": [100]}], **given, on_error="skip")
    clean = measure(good, **given)
    assert [result.metrics for result in found.results] == [result.metrics for result in clean.results]
    assert {(result.num_users, result.num_skipped) for result in (*found.results, *found.baselines)} == {(2, 2)}
    assert sorted((reason.num_rows, "has 159" in reason.example) for reason in found.skipped) == [
        (1, False),
        (1, True),
    ]
    assert "row 2 cannot be answered: history has 159" in repr(found)
    with pytest.raises(ValueError, match="users, row 2 cannot be answered: history has 7"):
        measure([*good, {"seen": [7, 100]}])


def test_skipped_rows_are_counted_by_reason(case: Case, tmp_path: Path, measure: Any) -> None:
    rows = [{"seen": [100, 101]}, *({"seen": [100, 7 + number]} for number in range(3)), {"seen": [100]}]
    found = measure(rows, on_error="skip")
    assert [reason.num_rows for reason in found.skipped] == [3, 1]
    assert "row 1 cannot be answered: history has 7, expected items of the catalogue" in found.skipped[0].example
    done = command(case, write_users(tmp_path / "u.parquet", rows), "--on-error", "skip", "--num-beams", 6)
    assert done.exit_code == 3
    assert "Skipped 3 rows such as this one: " in done.stdout
    assert "expected 2 items or more: the last one is the target" in done.stdout
    none = measure(rows[-1:], on_error="skip")
    assert (none.results[0].num_users, none.results[0].metrics, none.differences) == (0, {}, ())
    assert "Skipped 1 rows" in repr(none)
    none.plot(tmp_path / "nobody.png")


def test_catalogues_of_one_model_are_compared(case: Case, users: Path, measure: Any) -> None:
    index = ConstraintIndex.from_pretrained(case.index)
    half = index.where([item for item in index.item_ids if item < 130])
    found = measure(users, constraint_index={"all": index, "\x1b[2Jhalf": half})
    assert [result.name for result in found.results] == ["all", "\x1b[2Jhalf"]
    assert ("\\x1b[2Jhalf" in repr(found), "\x1b" in repr(found)) == (True, False)  # names control no terminal
    assert found.results[1].metrics == measure(users, constraint_index=half).results[0].metrics


def test_models_and_their_names_are_checked_before_the_first_runs(
    case: Case, users: Path, tmp_path: Path, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_gr.jobs.evaluation.make_job", lambda *_: pytest.fail("a model was loaded"))
    for model, index, message in (
        ({}, None, "expected one text or more"),
        ({1: "x"}, None, r"names \[1\], expected one text"),
        ({"a": "x", "b": "x"}, {"a": "i", "c": "i"}, "expected the same names"),
        (["x", "y"], None, "model is a list, expected one or a dictionary by name"),
        ("x", ["i"], "constraint_index is a list"),
        ({"popularity": "x"}, None, "called 'popularity', expected another name"),
        ({"a": case.model, "b": tmp_path}, None, "has no config.json"),
        ({"a": case.model, "b": "no such/model/at all"}, None, "is no folder here"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(users, model=model, constraint_index=index)


def test_numbers_that_look_wrong_are_said_so(users: Path, measure: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_gr.evaluate"):
        found = measure(users, sampled_users=2)
    assert found.results[0].unconstrained_invalid == 1.0  # a random model
    (warning,) = found.warnings
    assert "without the catalogue no beam is an item" in warning
    assert caplog.messages == [warning]
    assert warning in json.loads(found.to_json())["warnings"]
    assert f"Warning: {warning}" in repr(found)


def test_codes_compiled_as_tokens_are_said(measure: Any) -> None:
    """The catalogue of somebody who took codes for token ids: every answer is an item, and all are wrong."""
    rows = np.unique(np.random.default_rng(0).integers(0, 8, (40, 3)), axis=0)
    index = ConstraintIndex.from_sequences(rows, item_ids=range(100, 100 + len(rows)))
    found = measure([{"seen": [100, 101, 102]}], constraint_index=index)
    assert [doubt in " ".join(found.warnings) for doubt in ("look like codes", "far below")] == [True, True]


def test_beams_that_go_on_after_an_item_are_counted(case: Case, measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items end with a token at which the model itself does not stop."""
    rows = [*([token] for token in range(3, 50)), [60, 61, 62]]
    index = ConstraintIndex.from_sequences(rows, item_ids=range(100, 148), eos_token_id=2)
    model, _ = case.load()
    model.generation_config.eos_token_id = None
    generate = type(model).generate

    def going_on(self: Any, **options: Any) -> Any:
        out = generate(self, **options)
        if options["constraint_index"] is False:
            out[:, -4:] = out.new_tensor([3, 2, 7, 8])
        return out

    monkeypatch.setattr(type(model), "generate", going_on)
    found = measure([{"seen": [100, 101]}], model=model, constraint_index=index, sampled_users=1)
    assert found.results[0].unconstrained_invalid == 0.0


def test_targets_that_cannot_be_found_are_said(measure: Any) -> None:
    found = measure([{"seen": [100, 101], "only": [102], "next": 103}], filter="only", target="next")
    assert ["recall@5 is 0 for all 1 users" in warning for warning in found.warnings] == [True]
    rows = [{"seen": [100, 101], "next": [105, 7] if number < 3 else [100 + number]} for number in range(30)]
    found = measure(rows, target="next", num_beams=50, cutoffs=(50,))
    assert {result.num_unknown_targets for result in (*found.results, *found.baselines)} == {3}
    (warning,) = found.warnings
    assert "the catalogue does not have the targets of 3 of 30 users" in warning
    assert "with an unknown target" in repr(found)
    found = measure([row | {"next": [7]} for row in rows], target="next", num_beams=50, cutoffs=(50,))
    (warning,) = found.warnings  # and no word of tokens
    assert "the targets of 30 of 30 users" in warning


def test_targets_that_were_excluded_are_misses_and_said(measure: Any) -> None:
    rows = [{"seen": [100, 101, 102 + number % 2, 103], "not": [103] * (number < 4)} for number in range(20)]

    def check(number: int, rows: Any = rows, **options: Any) -> None:
        found = measure(rows, num_beams=60, cutoffs=(60,), **options)  # all items are found
        told = [
            warning for warning in found.warnings if f"exclude= has the targets of {number} of 20 users" in warning
        ]
        assert (len(told), "with an excluded target" in repr(found)) == (number > 0, number > 0)
        for result in (*found.results, *found.baselines):
            assert result.num_excluded_targets == number
            assert result.metrics["recall@60"] == 1 - number / 20

    check(10, exclude="seen")  # half have 103 twice; all others only as what is held out
    check(4, exclude="not", omit_history=False)
    check(0, omit_history=False)
    rows = [row | {"next": 101 if number < 7 else 120} for number, row in enumerate(rows)]
    check(7, rows, exclude="seen", target="next")


def test_several_rows_of_a_user(users: Path, measure: Any) -> None:
    rows = [row | {"who": None if number < 2 else str(number % 12)} for number, row in enumerate(read(users))]
    plain, found = (measure(rows, group="country", **more) for more in ({}, {"user": "who"}))
    for one, other in zip((*plain.results, *plain.baselines), (*found.results, *found.baselines), strict=True):
        assert (one.metrics, one.num_users, one.num_rows) == (other.metrics, NUM_USERS, NUM_USERS)
        assert (other.num_users, other.num_rows) == (14, NUM_USERS)  # rows without a user are users of their own
        assert other.groups["de"]["num_users"] == len({row["who"] for row in rows[3:] if row["country"] == "de"}) + 1
    assert plain.results[0].intervals != found.results[0].intervals
    assert not plain.warnings
    (warning,) = found.warnings
    assert warning.startswith("60 rows are of 14 users: intervals resample users")
    assert ["\nrows " in repr(each) for each in (plain, found)] == [False, True]
    few = measure([row | {"who": "me"} for row in rows], user="who")
    assert (few.results[0].intervals, few.differences) == ({}, ())
    assert "Too few users for an interval: 1, expected 10 or more." in repr(few)
    assert len(few.plot().axes) == 2


def test_the_same_seed_gives_the_same_intervals(users: Path, measure: Any) -> None:
    found = [measure(users, bootstrap_seed=seed).results[0].intervals for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    none = measure(users, num_resamples=0)
    assert (none.results[0].intervals, none.differences) == ({}, ())
    assert " to 0." not in repr(none)
    labels = none.plot().axes[0].get_legend_handles_labels()[1]
    assert labels == [POPULARITY, ITEM_TO_ITEM, "model"]


def test_json_and_the_data_frame_have_every_number(both: Evaluation) -> None:
    found, table = json.loads(both.to_json()), both.to_pandas()
    assert set(found) == {name for name in Evaluation.__dataclass_fields__ if name != "_values"}
    assert found["baselines"][0]["intervals"]["mrr"] == list(both.baselines[0].intervals["mrr"])
    assert len(table) == 6 * (1 + 2 + 1)
    rows = table[table.users == "all"].to_dict("records")
    for result, row in zip((*both.results, *both.baselines), rows, strict=True):
        for metric, value in result.metrics.items():
            assert (row[metric], row[f"{metric}_low"], row[f"{metric}_high"]) == (value, *result.intervals[metric])
        assert (row["name"], row["coverage"], row["num_users"]) == (result.name, result.coverage, result.num_users)
    assert table[(table.name == "one") & (table.users == "group de")]["num_users"].tolist() == [20, 20]


def test_the_text_has_every_result(both: Evaluation) -> None:
    text = repr(both)
    for result in (*both.results, *both.baselines):
        low, high = result.intervals["recall@5"]
        assert f"{result.metrics['recall@5']:.4f} ({low:.4f} to {high:.4f})" in text
        assert result.label in text
    parts = ("group de", "target is new", "95% bootstrap", "1,000 resamples, seed 0", "two, 10 beams - popularity")
    assert all(part in text for part in parts)
    assert len({len(line) for line in text.split("\n\n")[0].splitlines()}) == 1  # columns end at the same place
    narrow = as_text(both, width=80)
    assert all(len(line) <= 80 for line in narrow.partition("\n\n" + both.hardware)[0].splitlines())
    numbers = (sorted(re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", one)) for one in (narrow, text))
    assert next(numbers) == next(numbers)  # no column is lost


def test_models_differ_in_more_than_colour(both: Evaluation, tmp_path: Path) -> None:
    figure: Any = both.plot(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    lines = [line for line in figure.axes[0].lines if line.get_marker() in "os^Dv"]
    assert [list(line.get_ydata()) for line in lines] == [
        [result.metrics["recall@5"] for result in both.results[start : start + 2]] for start in (0, 2)
    ]
    assert len({line.get_linestyle() for line in lines}) == len({line.get_marker() for line in lines}) == 2
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert both.plot(metric="mrr").axes[0].get_title(loc="left") == "mrr by beams"
    with pytest.raises(ValueError, match="metric='recall@7', expected one of recall@1, recall@5"):
        both.plot(metric="recall@7")
    with pytest.raises(ValueError, match=r"path=.*, expected a name that ends in one of .png, .svg, .pdf"):
        both.plot(tmp_path / "plot.gif")


def command(case: Case, users: Path, *arguments: Any, **how: Any) -> Any:
    given = ["--model", case.model, "--index", case.index, "--input", users, "--history", "seen", "--cutoffs", "1,5"]
    return jobs_case.command("evaluate", *given, "--sampled-users", 0, *arguments, **how)


def test_the_command_compares_models(case: Case, other: Case, users: Path, both: Evaluation, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("100\n103\n")
    more = ["--model", f"two={other.model}", "--index", other.index, "--num-beams", "5,10", "--group", "country"]
    more += ["--new-items", tmp_path / "new.txt", "--plot", tmp_path / "m.png"]
    done = command(case, users, *more)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    for text in ("popularity", "item-to-item", "two, 10 beams", "95% bootstrap", "group de", "target is new"):
        assert text in done.stdout
    assert "..." not in done.stdout
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(command(case, users, *more, "--json").stdout)
    names = [(one["name"], one["num_beams"]) for one in found["results"]]
    assert names == [("model", 5), ("model", 10), ("two", 5), ("two", 10)]
    assert [one["new_items"] for one in found["results"]] == [result.new_items for result in both.results]


def test_progress_counts_the_users_of_a_file(case: Case, users: Path, tmp_path: Path) -> None:
    """JSON lines do not tell how many there are, and a window has room for many more."""
    path = tmp_path / "u.jsonl"
    path.write_text("".join(json.dumps({"seen": row["seen"]}) + "\n" for row in read(users)))
    for more, expected in (([], ["60 users"]), (["--window-rows", 40], ["40 users", "60 users"])):
        lines = command(case, path, "--num-beams", 6, *more, progress=True).stderr
        assert re.findall(r"Recommending: ([\d,]+ users)", lines) == expected


def test_names_of_models_on_the_command_line(tmp_path: Path) -> None:
    for name in ("a/last", "b/last", "c"):
        (tmp_path / name).mkdir(parents=True)
    a, b, c = (str(tmp_path / name) for name in ("a/last", "b/last", "c"))
    for models, indexes, expected in (
        ([a], [], (a, None)),
        ([a], [c], (a, c)),
        ([f"new={a}"], [], ({"new": a}, None)),
        ([a, b, c], [], ({a: a, b: b, "c": c}, None)),
        ([f"last={a}", b, "me/model"], [c], ({"last": a, b: b, "me/model": "me/model"}, c)),
        ([a], [b, c], (a, {"last": b, "c": c})),
        ([a, c], [b, a], ({"last": a, "c": c}, {"last": b, "c": a})),
    ):
        assert _compared(models, indexes) == expected
