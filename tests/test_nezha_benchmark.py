# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The NEZHA benchmark: what is trained on, how lists are judged, the paper's search, and what a short run has."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import needs_beauty

from hf_gr import SemanticIds
from hf_gr.training import small_recommender

ROOT = Path(__file__).resolve().parents[1]

ITEMS = [[0, 1], [0, 2], [1, 0], [1, 1], [2, 2]]  # codes
HISTORIES = [[0, 1, 2, 3, 4], [1, 0, 2], [4, 1, 3]]  # the last two of each are to be found
PAD = 6


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Names of the scripts; what they import is importable, as it is when they are run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmark"))
    names: dict[str, Any] = {}
    for script in ("backbone_data", "nezha_packing", "nezha_heads", "nezha_lists", "nezha_paper", "nezha"):
        names |= vars(import_module(script))
    return SimpleNamespace(**names)


@pytest.fixture
def study(benchmark: Any) -> Any:
    histories = [np.array(history) for history in HISTORIES]
    rows = [benchmark.Row(history[:-1], int(history[-1]), user) for user, history in enumerate(histories)]
    train = [history[:-2] for history in histories]
    return benchmark.Study("beauty", SemanticIds(ITEMS), train=train, align=[], valid=[], test=rows)


def rows_of(benchmark: Any, *items: int) -> list[Any]:
    return [benchmark.Row(np.array([0]), item, user) for user, item in enumerate(items)]


@pytest.mark.parametrize("options", [{}, {"use_placeholders": False}])
def test_pairs_of_a_window_have_the_states_that_they_have_alone(benchmark: Any, options: dict[str, Any]) -> None:
    model, ids = head_of((5, 4, 3), num_items=20, **options)
    head, tokens = model.draft_head, ids.token_sequences()
    histories = [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
    collate = benchmark.WindowCollator(3, head.config.placeholder_token_ids, pad_token_id=model.config.pad_token_id)
    batch = collate([{"input_ids": tokens[history].ravel()} for history in histories])
    given = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
    with torch.no_grad():
        states = model.model(**given, use_cache=False).last_hidden_state
    found = states[batch["rows"][:, None], batch["places"]]
    pairs = [(history[:end], history[end]) for history in histories for end in range(1, len(history))]
    assert batch["labels"].tolist() == [tokens[item].tolist() for _, item in pairs]
    for (known, _), state in zip(pairs, found, strict=True):
        prompt = torch.from_numpy(tokens[known].reshape(1, -1))
        alone = benchmark.read_prompt(model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)})
        assert torch.allclose(state, alone[0], atol=1e-5)


def test_windows_are_of_training_items_and_the_first_of_each_is_no_label(benchmark: Any, study: Any) -> None:
    windows = benchmark.windows_of(study, benchmark.HeadSettings(window=20, num_steps=1), seed=0)
    assert [windows.items_of(number).tolist() for number in range(len(windows))] == [[0, 1, 2]]  # others are too short
    batch = benchmark.next_items([windows[0], {"input_ids": study.tokens[[4, 3]].ravel()}], 2, pad_token_id=PAD)
    tokens = study.tokens.tolist()
    assert batch["input_ids"].tolist() == [[*tokens[0], *tokens[1], *tokens[2]], [*tokens[4], *tokens[3], PAD, PAD]]
    assert batch["labels"].tolist() == [[-100, -100, *tokens[1], *tokens[2]], [-100, -100, *tokens[3], -100, -100]]


def test_heads_and_the_control_learn_the_same_pairs_in_the_same_order(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, ids = model_of((5, 4, 3), num_items=20)
    model.save_pretrained(tmp_path / "backbone")
    rng = np.random.default_rng(0)
    histories = [rng.integers(20, size=size) for size in (2, 3, 9, 4, 12, 5, 2, 7)]
    study = benchmark.Study("beauty", ids, train=histories, align=[], valid=[], test=[])
    settings = benchmark.HeadSettings(window=4, num_steps=9, batch_size=2)
    seen: dict[str, list[Any]] = {}

    def spy(owner: Any, name: str, kind: str) -> None:
        real = getattr(owner, name)

        def loss(trainer: Any, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            labels = inputs["labels"]
            seen.setdefault(kind, []).append(labels[labels != -100].view(-1, 3).tolist())
            return real(trainer, model, inputs)

        monkeypatch.setattr(owner, name, loss)

    spy(benchmark.WindowTrainer, "_loss", "head")
    spy(benchmark.FurtherTrainer, "_loss", "control")
    benchmark.train_head(tmp_path / "head", tmp_path / "backbone", study, settings, options={}, seed=1)
    benchmark.train_further(tmp_path / "further", tmp_path / "backbone", study, settings, seed=1)
    assert len(seen["head"]) == 9
    assert seen["head"] == seen["control"]
    logs = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("head", "further")]
    assert logs[0]["pairs"] == logs[1]["pairs"] == sum(map(len, seen["head"]))
    before, after = model.state_dict(), benchmark.load(tmp_path / "further").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_hits_and_gains_are_of_the_place(benchmark: Any) -> None:
    lists = [[3, 0], [0, 4], [0, 1, 2, 3, 4, 5], [0]]
    found = benchmark.values_of(lists, rows_of(benchmark, 3, 4, 5, 9))
    assert found["H@5"].tolist() == [1, 1, 0, 0]
    assert found["H@10"].tolist() == [1, 1, 1, 0]
    assert found["N@5"] == pytest.approx(np.array([1, 1 / math.log2(3), 0, 0]))
    assert found["N@10"] == pytest.approx(np.array([1, 1 / math.log2(3), 1 / math.log2(7), 0]))


def test_seeds_are_averaged_row_by_row(benchmark: Any) -> None:
    lists = [benchmark.Lists([[3], [0]], valid=1.0), benchmark.Lists([[3], [4]], valid=0.5)]
    found, hits = benchmark.summary(lists, rows_of(benchmark, 3, 4))
    assert hits.tolist() == [1.0, 0.5]
    assert (found["H@10"], found["seeds"], found["valid"], found["rows"]) == (0.75, [0.5, 1.0], 0.75, 2)


def test_what_is_no_item_keeps_its_place(benchmark: Any, study: Any) -> None:
    class Canned:
        config = SimpleNamespace(pad_token_id=PAD)

        def generate(self, *, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
            assert settings == {"attention_mask": settings["attention_mask"], "constraint_index": study.index} | {
                "num_beams": 3,
                "num_return_sequences": 3,
                "do_sample": False,
            }
            no_item = [study.tokens[0][0], study.tokens[2][1]]
            answers = torch.tensor(np.array([study.tokens[4], no_item, study.tokens[3]]))
            return torch.cat([input_ids.repeat_interleave(3, 0), answers.repeat(len(input_ids), 1)], dim=1)

    found = benchmark.recommend(Canned(), study.test, study, window=20, num_beams=3)
    assert found.ranked == [[4, benchmark.NO_ITEM, 3]] * 3
    assert found.valid == pytest.approx(2 / 3)


def test_a_ratio_is_of_the_same_rows(benchmark: Any) -> None:
    rng = np.random.default_rng(0)
    theirs = (rng.random(2000) < 0.1).astype(float)
    assert benchmark.interval(theirs, theirs) == (1.0, 1.0)
    ours = theirs * (rng.random(2000) < 0.8)
    # Of those hit by beam search 80% are hit: a binomial share.
    share = ours.sum() / theirs.sum()
    width = 1.96 * math.sqrt(share * (1 - share) / theirs.sum())
    assert benchmark.interval(ours, theirs) == pytest.approx((share - width, share + width), abs=0.03)
    width = 1.96 * math.sqrt(ours.mean() * (1 - ours.mean()) / len(ours))
    assert benchmark.interval(ours) == pytest.approx((ours.mean() - width, ours.mean() + width), abs=0.003)


def strict_against(benchmark: Any, study: Any, scores: list[float], others: list[float], swapped: bool) -> Any:
    def output(order: list[int], scores: list[float], rows: int, width: int) -> Any:
        sequences = torch.cat([torch.zeros(2, width, dtype=torch.long), torch.from_numpy(study.tokens[order])], dim=1)
        happened = SimpleNamespace(accepted_steps=torch.ones(rows), target_forwards=1)
        return SimpleNamespace(
            sequences=sequences.repeat(rows, 1), sequences_scores=torch.tensor(scores * rows), speculation=happened
        )

    class Canned:
        config = SimpleNamespace(pad_token_id=PAD)

        def generate(self, *, input_ids: torch.Tensor, **settings: Any) -> Any:
            is_strict = settings.get("verification") == "strict"
            order = [1, 0] if is_strict and swapped else [0, 1]
            return output(order, others if is_strict else scores, *input_ids.shape)

    return benchmark.compare_strict(Canned(), study.test, study, window=20, num_beams=2)


def test_strict_answers_that_differ_are_counted_and_forgiven_only_for_rounding(benchmark: Any, study: Any) -> None:
    lists, same = strict_against(benchmark, study, [-1.0, -2.0], [-1.0, -2.0], swapped=False)
    assert lists.ranked == [[0, 1]] * 3
    assert (same.rows, same.not_equal, same.wrong, same.means()["accepted_steps"]) == (3, 0, 0, 1)
    _, tied = strict_against(benchmark, study, [-1.0, -1.00001], [-1.0, -1.00001], swapped=True)
    assert (tied.not_equal, tied.wrong) == (3, 0)
    _, lost = strict_against(benchmark, study, [-1.0, -2.0], [-1.0, -2.0], swapped=True)
    assert (lost.not_equal, lost.wrong) == (3, 3)


def test_other_weights_or_settings_are_another_experiment(benchmark: Any, tmp_path: Path) -> None:
    def name(weights: bytes, steps: int) -> str:
        (tmp_path / "model.safetensors").write_bytes(weights)
        return benchmark.fingerprint(tmp_path, benchmark.HeadSettings(window=20, num_steps=steps))

    assert name(b"a", 1) == name(b"a", 1)
    assert len({name(b"a", 1), name(b"b", 1), name(b"a", 2)}) == 3


# The paper's search


def model_of(sizes: tuple[int, ...], *, num_items: int) -> tuple[Any, SemanticIds]:
    """A tiny model, and as many distinct items."""
    rng = np.random.default_rng(0)
    rows = np.unique(np.stack([rng.integers(size, size=4 * num_items) for size in sizes], axis=1), axis=0)
    ids = SemanticIds(rows[rng.permutation(len(rows))[:num_items]], level_sizes=list(sizes))
    return small_recommender(ids, max_items=4, hidden_size=32, num_hidden_layers=1).eval(), ids


def head_of(sizes: tuple[int, ...], *, num_items: int, **options: Any) -> tuple[Any, SemanticIds]:
    """The same, with a head that has learned nothing."""
    model, ids = model_of(sizes, num_items=num_items)
    head = model.add_draft_head(ids, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.5)
    return model, ids


def test_the_papers_example_is_packed_as_in_the_paper(benchmark: Any) -> None:
    head = SimpleNamespace(config=SimpleNamespace(codebook_sizes=(512, 512, 512)))
    packing = benchmark.Packing.of(head)
    codes = torch.tensor([[243, 129, 3], [0, 346, 122]])
    assert packing.pack(codes).tolist() == [852723, 346 * 512 + 122 * 512**2]  # the first as in section 3.3
    assert packing.unpack(packing.pack(codes)).tolist() == codes.tolist()
    head.config.codebook_sizes = (2**16,) * 4
    with pytest.raises(ValueError, match=r"2\^63 combinations or more"):
        benchmark.Packing.of(head)


def test_valid_ids_are_those_of_items(benchmark: Any) -> None:
    model, ids = head_of((5, 4, 3), num_items=20)
    valid = benchmark.ValidIds.of(ids.token_sequences(), model.draft_head)
    all_codes = torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(3))
    found = valid.contain(benchmark.Packing.of(model.draft_head).pack(all_codes))
    assert [codes for codes, is_item in zip(all_codes.tolist(), found.tolist(), strict=True) if is_item] == sorted(
        ids.codes.tolist()
    )


@pytest.mark.parametrize("num_beams", [3, 12])
@pytest.mark.parametrize(("verification", "is_valid"), [("last_level", True), ("none", False)])
def test_the_papers_search_finds_what_generate_finds_in_its_form(
    benchmark: Any, num_beams: int, verification: str, is_valid: bool
) -> None:
    """With three beams, valid codes are not among a beam's three best: both lose the same."""
    model, ids = head_of((8, 12, 16), num_items=400)
    valid = benchmark.ValidIds.of(ids.token_sequences(), model.draft_head) if is_valid else None
    tokens = torch.from_numpy(ids.token_sequences()[:16].reshape(8, -1))
    prompt = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    hidden = benchmark.read_prompt(model, prompt)
    found = benchmark.search(model.draft_head, hidden, num_beams=num_beams, valid=valid)
    out = model.generate(
        **prompt,
        constraint_index=ids.constraint_index(),
        drafting="head",
        verification=verification,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = out.sequences_scores.view(8, num_beams)
    assert torch.allclose(found.scores, scores, atol=1e-4, rtol=0)
    assert bool(found.scores.isinf().any()) == (is_valid and num_beams == 3)
    is_there = scores.isfinite()
    theirs = out.sequences[:, tokens.shape[1] :].view(8, num_beams, 3)
    assert found.tokens[is_there].tolist() == theirs[is_there].tolist()


def test_all_work_of_the_catalogue_is_timed_and_only_inside(benchmark: Any) -> None:
    times, index_of = import_module("nezha_times"), SemanticIds.constraint_index
    places = [(times.DeviceCatalogue, "is_leaf"), (times.Children, "take"), (times.drafters, "children")]
    before = [getattr(owner, name) for owner, name in places]
    model, ids = model_of((5, 4, 3), num_items=20)
    prompt = torch.from_numpy(ids.token_sequences()[:2].reshape(1, -1))
    with times.timed_constraint() as seconds:
        start = perf_counter()
        model.generate(prompt, constraint_index=index_of(ids), num_beams=3, do_sample=False)
        whole = perf_counter() - start
    assert len(seconds) >= 3 * 3  # of every level: children, columns, chosen ones
    assert 0 < sum(seconds) < whole
    assert [getattr(owner, name) for owner, name in places] == before


def test_without_data_it_is_skipped_in_fast_mode_and_an_error_otherwise(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["nezha"], "has_study", lambda name: False)
    benchmark.main(["--fast", "--studies", "beauty", "--work", str(tmp_path)])
    assert "skipped: no data for 'beauty'" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no data for 'beauty': set HF_GR_DATA"):
        benchmark.main(["--studies", "beauty", "--work", str(tmp_path)])


@pytest.mark.slow  # trains some thirty tiny models
@needs_beauty
def test_fast_run_compares_all_and_stages_are_not_run_again(tmp_path: Path) -> None:
    def run(script: str) -> str:
        command = [sys.executable, str(ROOT / "examples" / "benchmark" / script), "--fast", "--work", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first, second = run("nezha.py"), run("nezha.py")
    assert first.splitlines()[:-1] == second.splitlines()[:-1]  # the load of the machine may differ
    report = json.loads(first.splitlines()[-1])
    assert report["versions"]
    assert [(result["study"], result["early"]) for result in report["results"]] == [
        (study, early) for early in (False, True) for study in ("beauty", "movielens")
    ]
    unchecked = {
        "unconstrained beam search",
        "unconstrained, trained further",
        "NEZHA-4 (no verification)",
        "NEZHA, last level (paper)",
    }
    for result in report["results"]:
        for table in result["tables"]:
            rows = {row["method"]: row for row in table["methods"]}
            assert len(rows) == (8 if result["early"] else 14)
            assert all(row["valid"] == 1.0 for name, row in rows.items() if name not in unchecked)
            assert all(len(row["seeds"]) == 2 for name, row in rows.items() if "NEZHA" in name)
            assert all(one["wrong"] == 0 for one in table["strict"])
        assert len(result["commits"]) == 1
    for name in unchecked:  # with so few codes a search may find nothing but items in one of the tables
        tables = [table for result in report["results"] for table in result["tables"]]
        assert min(row["valid"] for table in tables for row in table["methods"] if row["method"] == name) < 1.0, name
    times = json.loads(run("nezha_times.py").splitlines()[-1])["results"]
    assert [len(one["methods"]) for one in times] == [14, 14, 7, 7]
    for one in times:
        assert all(row["total"] > 0 for row in one["methods"].values())
        assert one["methods"]["paper's code, equations 4 and 5"]["verify"] > 0
