# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo from beginning to end: prepare, train or load, recommend, measure. Printing is `show`'s."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from hf_gr import evaluate, recommend
from hf_gr.answering.recommender import Recommender
from hf_gr.catalogue import ConstraintIndex
from hf_gr.files.atomic import replaced_files
from hf_gr.files.cache import cache_folder
from hf_gr.generation.auto import AutoModelForGenerativeRetrieval
from hf_gr.jobs.results import Evaluation
from hf_gr.training import semantic_ids_from_features, small_recommender, train_recommender

from . import show
from .compare import Comparison, compare_with_transformers
from .data import MovieLens, Split, film_features, keep_most_rated, leave_one_out, load_movielens

USERS = "users.jsonl"
CACHE_VERSION = 3  # raise it whenever a code change affects training or what is saved
LIST_LENGTH = 10


@dataclass(frozen=True)
class TrainSettings:
    """How the recommender is built and trained; part of the cache's key. A prompt has `max_items` films."""

    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_items: int = 9
    max_steps: int = 650


@dataclass(frozen=True)
class DemoSettings:
    """What a run of the demo does."""

    num_shown: int = 5  # users whose recommendations are printed
    num_beams: int = 50
    num_levels: int = 3  # of the semantic ids; one more code tells apart films that collide
    num_codes: int = 128  # a level
    num_compared: int = 4  # users of the timed comparison with transformers' own generation, in one batch
    num_films: int | None = None  # the most often rated ones; None keeps all
    train: TrainSettings = field(default_factory=TrainSettings)
    seed: int = 0  # of the semantic ids, of the training, and of the choice of users that are printed

    @classmethod
    def fast(cls, **changes: Any) -> DemoSettings:
        """A run of seconds: 500 films, a tiny model, hardly any training. It shows the steps, not the quality."""
        train = TrainSettings(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_items=7, max_steps=100)
        return cls(num_beams=30, num_codes=16, num_compared=2, num_films=500, train=train, **changes)

    @property
    def key(self) -> str:
        """The cached recommender's name: everything that its training depends on, and nothing else."""
        what = {"levels": self.num_levels, "codes": self.num_codes, "films": self.num_films, "seed": self.seed}
        what |= {"version": CACHE_VERSION, "train": asdict(self.train)}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DemoReport:
    """What a run of the demo measured."""

    folder: Path  # with the model and its catalogue
    trained_seconds: float | None  # None if the model came from the cache
    evaluation: Evaluation  # the model and two baselines; no list has a film that its user has rated before
    comparison: Comparison  # the time against transformers' own constrained generation

    def to_json(self) -> str:
        """One JSON object; its fields are those of this class."""
        found = {"folder": str(self.folder), "trained_seconds": self.trained_seconds}
        found |= {"evaluation": json.loads(self.evaluation.to_json()), "comparison": asdict(self.comparison)}
        return json.dumps(found)


def run_demo(
    settings: DemoSettings | None = None,
    *,
    output_dir: Path | None = None,
    retrain: bool = False,
    console: Console | None = None,
) -> DemoReport:
    """Run the demo, print what it finds, and return it.

    Trained recommenders are kept in `output_dir`, by default `$HF_GR_CACHE/demo` or `~/.cache/hf_gr/demo`.
    """
    settings, console = settings or DemoSettings(), console or Console()
    folder = (output_dir or cache_folder("demo")) / settings.key
    films = load_movielens()
    if settings.num_films is not None:
        films = keep_most_rated(films, settings.num_films)
    split = leave_one_out(films.histories)
    show.print_data(console, films)
    with _one_thread():
        trained_seconds = None
        if retrain or not (folder / USERS).exists():
            # The folder comes first: one that cannot be written fails here, not after minutes of training.
            folder.mkdir(parents=True, exist_ok=True)
            with replaced_files(folder) as unfinished:  # by name: USERS last
                _save_users(films, split, unfinished / USERS)
                trained_seconds = _train(films, split, settings, unfinished, console)
        model, index = load_recommender(folder)
        show.print_recommender(console, model, index, folder, trained_seconds)

        lists = {"constraint_index": index, "num_beams": settings.num_beams, "exclude": "history", "progress": False}
        shown = np.random.default_rng(settings.seed).permutation(len(split.train))[: settings.num_shown]
        shown = sorted(shown.tolist())
        histories = [[films.titles[film] for film in split.train[user]] for user in shown]
        show.print_users(console, films, split, shown, recommend(model, histories, top_k=LIST_LENGTH, **lists))
        with console.status("measuring"):
            how = {"history": "history", "target": "next", "cutoffs": (LIST_LENGTH,), **lists}
            evaluation = evaluate({"the model": model}, folder / USERS, **how)
            recommender = Recommender(model, index)
            compared = [history[-settings.train.max_items :] for history in split.train[: settings.num_compared]]
            requests = [recommender.read(history=[films.titles[film] for film in history]) for history in compared]
            prompts = recommender.prompts(requests)
            comparison = compare_with_transformers(model, index, prompts, num_beams=settings.num_beams)
    report = DemoReport(folder, trained_seconds, evaluation, comparison)
    show.print_measurements(console, evaluation, comparison)
    show.print_next_steps(console, folder, folder / USERS)
    return report


def _save_users(films: MovieLens, split: Split, path: Path) -> None:
    """What users rated before their last film, and that film; also for the commands that are printed at the end."""
    with path.open("w", encoding="utf-8") as file:
        for user, history, target in zip(films.user_ids.tolist(), split.train, split.targets, strict=True):
            row = {"user": user, "history": [films.titles[film] for film in history], "next": films.titles[target]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _train(films: MovieLens, split: Split, settings: DemoSettings, folder: Path, console: Console) -> float:
    """Train, save the model with its catalogue, and return the seconds of training."""
    with console.status("semantic ids: residual k-means on film features"):
        features = film_features(films, split.train, seed=settings.seed)
        semantic_ids = semantic_ids_from_features(
            features, films.titles, num_levels=settings.num_levels, num_codes=settings.num_codes, seed=settings.seed
        )
    size = asdict(settings.train)
    max_steps = size.pop("max_steps")
    model = small_recommender(semantic_ids, seed=settings.seed, **size)
    histories = [[films.titles[film] for film in history] for history in split.train]
    how = {"max_items": settings.train.max_items, "max_steps": max_steps, "seed": settings.seed, "output_dir": folder}
    start = time.perf_counter()
    train_recommender(histories, semantic_ids, model=model, **how)
    return time.perf_counter() - start


def load_recommender(folder: Path) -> tuple[Any, ConstraintIndex]:
    """The saved model and its catalogue, as any user of hf_gr loads them."""
    try:
        index = ConstraintIndex.from_pretrained(folder)
        model = AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="torch")
    except Exception as error:  # every reader raises its own error for a damaged file
        raise RuntimeError(
            f"the cached recommender in {folder} cannot be read ({error}): run again with --retrain to replace it"
        ) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), index


@contextmanager
def _one_thread() -> Iterator[None]:
    """A model this small gains nothing from a second thread, and two that wait for a busy core lose a lot."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
