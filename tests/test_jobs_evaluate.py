# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics against formulas written out, `evaluate` against the rows of `recommend`, and both commands."""

import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs_case import Case, command, make_measured, make_users, means_of, options_of, read, run, write_users
from typer.main import get_command as build_command

from hf_gr import ConstraintIndex, evaluate, recommend
from hf_gr.commands import app as cli
from hf_gr.generation.torch.mixin import GRGenerationMixin
from hf_gr.jobs.evaluate import OF_RECOMMEND

NUM_USERS = 60


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory, case: Case) -> Path:
    return write_users(tmp_path_factory.mktemp("users") / "users.parquet", make_measured(case, NUM_USERS))


def reference_metrics(items: list[int], targets: set[int], k: int) -> dict[str, float]:
    """One list, straight from the definitions; an item that it has twice counts once."""
    items = list(dict.fromkeys(items))
    relevance = [int(item in targets) for item in items]
    gain = sum(relevance[i] / math.log2(i + 2) for i in range(min(k, len(items))))
    ideal = sum(sorted(([1] * len(targets) + [0] * k)[:k], reverse=True)[i] / math.log2(i + 2) for i in range(k))
    found = [rank for rank, hit in enumerate(relevance, start=1) if hit]
    return {
        f"recall@{k}": len(targets & set(items[:k])) / len(targets),
        f"ndcg@{k}": gain / ideal,
        "mrr": 1 / found[0] if found else 0.0,
    }


lists = st.lists(st.integers(0, 12), max_size=10)
wanted = st.sets(st.integers(0, 12), min_size=1, max_size=4)


@given(st.lists(st.tuples(lists, wanted), min_size=1, max_size=5), st.integers(1, 12))
def test_metrics_are_means_of_the_definitions(rows: list[tuple[list[int], set[int]]], k: int) -> None:
    expected = [reference_metrics(items, targets, k) for items, targets in rows]
    means = means_of(rows, (k,))
    assert set(means) == set(expected[0])
    for name, value in means.items():
        assert value == pytest.approx(sum(one[name] for one in expected) / len(rows))
        assert 0 <= value <= 1


def test_leave_one_out_is_recommend_over_shorter_histories(tmp_path: Path, case: Case, users: Path) -> None:
    rows = read(users)
    targets = [row["seen"].pop() for row in rows]
    for row, target in zip(rows, targets, strict=True):
        row["not"] = [item for item in row["not"] if item != target]
    made = run(case, write_users(tmp_path / "short.parquet", rows), tmp_path / "recs.parquet", filter=None)
    answers = [row["items"] for row in read(made.output)]
    lists: dict[str, Any] = {name: [] for name in ("all", "de", "fr", "new")}
    for row, target, items in zip(rows, targets, answers, strict=True):
        parts = ["all", row["country"], *(["new"] if target in (100, 103) else [])]
        for name in parts:
            lists[name].append((items, [target]))
    means = {name: means_of(part, (1, 6)) for name, part in lists.items()}
    options = {"exclude": "not", "group": "country", "new_items": [100, 103], "cutoffs": (6, 1), "num_beams": 8}
    how = {"constraint_index": case.index, "history": "seen", "sampled_users": 2, "window_rows": 16}
    found = evaluate(case.model, users, **how, **options)
    (result,) = found.results
    assert found.cutoffs == (1, 6)
    assert result.metrics == pytest.approx(means["all"])
    assert {name: part["num_users"] for name, part in result.groups.items()} == {"de": 20, "fr": 40}
    assert result.groups["de"] == pytest.approx({"num_users": 20, **means["de"]})
    assert result.new_items == pytest.approx({"num_users": len(lists["new"]), **means["new"]})
    assert 0 < len(lists["new"]) < NUM_USERS
    assert result.coverage == pytest.approx(len({item for items in answers for item in items}) / len(case.tokens))
    assert (result.num_users, result.num_skipped, result.filled, result.invalid) == (NUM_USERS, 0, 1.0, 0.0)
    assert 0 < (result.latency_seconds or 0) < 10
    assert result.users_per_second > 0
    assert (result.unconstrained_invalid or 0) > 0.5  # a random model knows no item
    assert json.loads(found.to_json())["results"][0]["metrics"] == result.metrics


def test_lists_of_bounded_searches_and_of_checkpoints_say_what_is_proven(
    tmp_path: Path, case: Case, users: Path
) -> None:
    how = {"constraint_index": case.index, "history": "seen", "cutoffs": [1, 6], "sampled_users": 1}
    bounded = evaluate(case.model, users, **how, exact=True, num_beams=2, max_nodes=4).results[0]
    assert 0 <= (bounded.proven or 0) < 1
    with pytest.raises(ValueError, match=r"num_beams=\[8, 9\] with exact=True, expected one number or none"):
        evaluate(case.model, users, **how, exact=True, num_beams=[8, 9])
    model, index = case.load()
    model.generation_config.exact = True
    model.save_pretrained(tmp_path / "exact")
    flags = ["-m", tmp_path / "exact", "--index", case.index, "-i", users, "--history", "seen", "--json"]
    for flag, is_exact in (("--exact", True), ("--no-exact", False), ("--no-baselines", True)):
        (result,) = json.loads(command("evaluate", *flags, flag).stdout)["results"]
        assert (result["exact"], result["proven"] == 1.0) == (is_exact, is_exact)
    found = recommend(tmp_path / "exact", [[100]], constraint_index=index, exact=False)
    assert len(found) == 1


def test_given_targets_one_or_several(tmp_path: Path, case: Case) -> None:
    rows = [{"seen": [100, 101], "next": [105, 110], "new": True}, {"seen": [102], "next": [108], "new": False}]
    path = write_users(tmp_path / "u.parquet", rows)
    options = {"constraint_index": case.index, "history": "seen", "target": "next", "num_beams": 40, "cutoffs": [40]}
    (result,) = evaluate(case.model, path, **options, is_new="new", sampled_users=0).results
    plain = run(case, path, tmp_path / "r.parquet", user=None, exclude=None, filter=None, top_k=40, num_beams=40)
    lists = [(answer["items"], row["next"]) for row, answer in zip(rows, read(plain.output), strict=True)]
    assert result.metrics == pytest.approx(means_of(lists, (40,)))
    assert result.metrics["recall@40"] > 0
    assert result.new_items["num_users"] == 1
    assert (result.latency_seconds, result.unconstrained_invalid) == (None, None)


def test_new_targets_in_every_way_that_tables_have(case: Case) -> None:
    def num_new(truths: list[Any]) -> int:
        table = pa.table({"seen": [[100]] * 2, "next": [105] * 2, "new": truths})
        options = {"constraint_index": case.index, "history": "seen", "target": "next", "cutoffs": [1]}
        return evaluate(case.model, table, **options, is_new="new", sampled_users=0).results[0].new_items["num_users"]

    assert [num_new(truths) for truths in ([True, False], ["True", "false"], ["1", "0"], [1, 0])] == [1] * 4
    with pytest.raises(ValueError, match="row 0 cannot be answered: is_new='yes', expected true, false, 1 or 0"):
        num_new(["yes", "0"])


def test_filters_that_leave_too_few_are_seen(case: Case) -> None:
    table = pa.table({"seen": [[100, 101], [100, 102]], "only": [[103], None]})
    options = {"constraint_index": case.index, "history": "seen", "filter": "only", "num_beams": 10, "cutoffs": [10]}
    (result,) = evaluate(case.model, table, **options, sampled_users=0).results
    assert result.filled == pytest.approx(11 / 20)


def test_arguments_of_evaluate_are_checked(case: Case, users: Path) -> None:
    for options, message in (
        ({"cutoffs": []}, "cutoffs=.*expected integers of 1 or more"),
        ({"cutoffs": [30], "num_beams": [40, 20]}, "has 30, expected at most num_beams=20, .*: use num_beams=30"),
        ({"cutoffs": "10"}, "cutoffs='10', expected integers of 1 or more"),
        ({"cutofs": (1,)}, r"cutofs= is given, expected an option or an argument .*: did you mean cutoffs=\?"),
        ({"options": 1}, "options= is given, expected an option or an argument of generate"),
        ({"num_beams": []}, "expected one number or more"),
        ({"sampled_users": -1}, "sampled_users=-1, expected an integer of 0 or more"),
        ({"history": None, "tokens": "seen"}, "target=None without history="),
        ({"is_new": "country", "new_items": [1]}, "expected one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(case.model, users, **({"constraint_index": case.index, "history": "seen"} | options))


def test_no_more_beams_are_searched_than_there_are_sequences(
    case: Case, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99,999 beams without the catalogue took 40 GB; those beyond the sequences find nothing."""
    asked: set[int] = set()
    generate = GRGenerationMixin.generate

    def counted(*arguments: Any, **options: Any) -> Any:
        asked.add(options["num_beams"])
        assert not options.get("_step_scores")  # scores of all steps are never kept
        return generate(*arguments, **options)

    index = ConstraintIndex.from_pretrained(case.index)
    monkeypatch.setattr(GRGenerationMixin, "generate", counted)
    options = {"constraint_index": index, "history": "seen", "cutoffs": [4], "sampled_users": 1}
    found = evaluate(case.model, users, num_beams=[4, len(index), 99_999, 100_000], **options)
    assert [result.num_beams for result in found.results] == [4, len(index)]
    assert asked == {4, len(index)}
    wide = run(case, users, tmp_path / "wide.parquet", num_beams=99_999)
    assert read(wide.output) == read(run(case, users, tmp_path / "all.parquet", num_beams=len(index)).output)


@pytest.mark.parametrize("function", [recommend, evaluate])
def test_every_argument_has_a_flag(function: Any) -> None:
    """And help, and the same default; every flag is an argument, but for what writes the report."""
    renamed = {"constraint_index": "index", "assistant_model": "draft_model", "users": "input"}
    renamed |= {"options": "option", "remove_items": "remove"}
    arguments = {name: inspect.signature(recommend).parameters[name] for name in OF_RECOMMEND}
    arguments |= dict(inspect.signature(function).parameters)
    arguments.pop("arguments", None)
    flags = {flag.name: flag for flag in build_command(cli.build_app()).commands[function.__name__].params}
    for name, argument in arguments.items():
        flag = flags.pop({"options": "option"}.get(name, name))
        assert flag.opts[0] == f"--{renamed.get(name, name)}".replace("_", "-")
        assert flag.help
        if isinstance(argument.default, (bool, int, str)):
            assert flag.default == argument.default
    # Of the options of `generate`, drafting has a flag of its own.
    assert set(flags) - {"option"} == {"drafting", "as_json"} | ({"plot"} if function is evaluate else set())


def test_numpy_integers_are_integers(case: Case, users: Path, tmp_path: Path) -> None:
    options = {"top_k": 6, "num_beams": 8, "window_rows": 16, "prefix_tokens": [1, 2], "token_budget": 4096}
    numpy = {name: np.int64(value) for name, value in options.items() if isinstance(value, int)}
    numpy |= {"prefix_tokens": np.array(options["prefix_tokens"])}
    plain = run(case, users, tmp_path / "plain.parquet", **options)
    assert run(case, users, tmp_path / "numpy.parquet", **numpy).output.read_bytes() == plain.output.read_bytes()
    assert run(case, users, plain.output, **numpy).num_resumed == 0  # the same run: it is refused if it is another
    found = evaluate(case.model, users, constraint_index=case.index, history="seen", cutoffs=np.array([5, 1]))
    assert found.cutoffs == (1, 5)


def test_flags_reach_the_function(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "u.csv"
    path.write_text("seen;not\n100 101;[102]\n")
    columns = ["--model", case.model, "--index", case.index, "--input", path, "--history", "seen", "--exclude", "not"]
    flags = ["--prefix-tokens", "1,2", "--suffix-tokens", "3", "--delimiter", ";", "--top-k", 3, "--num-beams", 4]
    draft = ["--draft-model", case.model, "--drafting", "assistant", "--option", "length_penalty=0.5"]
    done = command("recommend", *columns, "--output", tmp_path / "a.parquet", *flags, *draft)
    assert (done.exit_code, done.stderr) == (0, "")
    same = {"prefix_tokens": [1, 2], "suffix_tokens": [3], "delimiter": ";", "top_k": 3, "num_beams": 4}
    same |= {"assistant_model": case.model, "drafting": "assistant", "length_penalty": 0.5}
    columns = {"constraint_index": case.index, "history": "seen", "exclude": "not"}
    made = recommend(case.model, path, tmp_path / "b.parquet", **columns, **same)
    assert made.output.read_bytes() == (tmp_path / "a.parquet").read_bytes()  # and so what decides the rows
    schema = pq.read_schema(made.output)
    assert schema.names == ["row", "items", "scores"]
    assert schema.types[1:] == [pa.list_(pa.int64()), pa.list_(pa.float32())]


def test_exit_codes_say_what_became_of_rows(tmp_path: Path, case: Case) -> None:
    rows = make_users(case, 40)
    rows[30]["seen"] = [7]
    users, output = write_users(tmp_path / "u.parquet", rows), tmp_path / "recs.parquet"
    stopped = command("recommend", *options_of(case, users, output), "--window-rows", 16)
    assert stopped.exit_code == 2
    assert "row 30 cannot be answered: history has 7, expected items of the catalogue" in stopped.stderr
    assert stopped.stderr.count("\n") == 1
    assert len(list((tmp_path / "recs.parquet.parts").glob("part-*"))) == 1
    skipped = command("recommend", *options_of(case, users, output), "--window-rows", 16, "--on-error", "skip")
    assert skipped.exit_code == 3
    assert "1 windows were finished by an earlier run" in skipped.stdout
    assert "1 rows were skipped" in skipped.stdout
    assert [number for number, row in enumerate(read(output)) if row["error"]] == [30]


def test_names_in_a_table_do_not_control_the_terminal(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "users\x1b[1m.parquet"
    pq.write_table(pa.table({"seen": [[100, 101]] * 2, "\x1b[31mof": ["\x1b[2Jfr", "a [red]b\x9b1m"]}), path)
    where = ["--model", f"\x1b[2Jmine={case.model}", "--index", case.index, "--input", path, "--history", "seen"]
    where += ["--num-beams", 5, "--cutoffs", "5"]
    done = command("evaluate", *where, "--group", "\x1b[31mof", "--sampled-users", 0)
    assert done.exit_code == 0
    for text in ("group \\x1b[2Jfr", "group a [red]b\\x9b1m", "\\x1b[2Jmine, 5 beams"):
        assert text in done.stdout
    wrong = command("evaluate", *where, "--target", "\x1b[31m\x1b")
    assert wrong.exit_code == 2
    assert "users\\x1b[1m.parquet has no column" in wrong.stderr
    assert not {"\x1b", "\x9b"} & set(done.output + wrong.output)
