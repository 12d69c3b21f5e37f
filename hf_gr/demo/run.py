# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo from beginning to end: prepare, train or load, recommend, measure. Printing is `show`'s."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hf_gr import recommend
from hf_gr.catalogue import ConstraintIndex
from hf_gr.files.atomic import replaced_folder
from hf_gr.generation.auto import AutoModelForGenerativeRetrieval
from hf_gr.training import semantic_ids_from_features, small_recommender, train_recommender

from . import evaluate, show
from .cache import cache_key, default_folder
from .data import MovieLens, Split, keep_most_rated, leave_one_out, load_movielens, popularity_order
from .semantic_ids import film_features

USERS = "users.jsonl"
CACHE_VERSION = 3  # raise it whenever a code change affects training or what is saved
LIST_LENGTH = 10  # the 10 of HR@10


@dataclass(frozen=True)
class TrainSettings:
    """How the recommender is built and trained; part of the cache's key.

    Attributes:
        hidden_size: Width of the model.
        num_hidden_layers: Depth of the model.
        num_attention_heads: Attention heads per layer.
        max_items: Films of a prompt.
        max_steps: Training steps.
    """

    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_items: int = 9
    max_steps: int = 800


@dataclass(frozen=True)
class DemoSettings:
    """What a run of the demo does.

    Attributes:
        num_shown: Users whose recommendations are printed.
        num_beams: Beams, from which the films that a user has seen are dropped.
        num_levels: Residual levels of the semantic ids; one more code tells apart films that collide.
        num_codes: Codes per level.
        num_compared: Users of the timed comparison with transformers' own generation, in one batch.
        num_films: Keep only that many films, the most often rated ones; None keeps all.
        train: Size and schedule of the model.
        seed: Seed of the semantic ids, of the training, and of the choice of users that are printed.
    """

    num_shown: int = 5
    num_beams: int = 50
    num_levels: int = 3
    num_codes: int = 128
    num_compared: int = 4
    num_films: int | None = None
    train: TrainSettings = field(default_factory=TrainSettings)
    seed: int = 0

    @classmethod
    def fast(cls, **changes: Any) -> DemoSettings:
        """A run of seconds: 500 films, a tiny model, hardly any training. It shows the steps, not the quality."""
        train = TrainSettings(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_items=7, max_steps=100)
        return cls(num_beams=30, num_codes=16, num_compared=2, num_films=500, train=train, **changes)

    @property
    def key(self) -> str:
        """The cached recommender's name: everything that its training depends on, and nothing else."""
        return cache_key(
            version=CACHE_VERSION,
            levels=self.num_levels,
            codes=self.num_codes,
            films=self.num_films,
            train=asdict(self.train),
            seed=self.seed,
        )


def run_demo(
    settings: DemoSettings | None = None,
    *,
    output_dir: Path | None = None,
    retrain: bool = False,
    console: Console | None = None,
) -> evaluate.DemoReport:
    """Run the demo and print what it finds.

    Args:
        settings: What to do; the whole demo by default.
        output_dir: Where trained recommenders are kept; `cache.default_folder()` by default.
        retrain: Train again, and replace what the cache has.
        console: Where to print; the terminal by default.

    Returns:
        The measurements that were printed.

    Raises:
        RuntimeError: The cached recommender cannot be read, or hf_gr and transformers disagree on an answer.
    """
    with _quiet_transformers(), _one_thread():
        return _run(settings or DemoSettings(), output_dir or default_folder(), retrain, console or Console())


def _run(settings: DemoSettings, output_dir: Path, retrain: bool, console: Console) -> evaluate.DemoReport:
    films = load_movielens()
    if settings.num_films is not None:
        films = keep_most_rated(films, settings.num_films)
    split = leave_one_out(films.histories)
    show.print_data(console, films)

    folder = output_dir / settings.key
    trained_seconds = None
    if retrain or not folder.exists():
        trained_seconds = train_and_save(films, split, settings, folder, console)
    model, index = load_recommender(folder)
    show.print_recommender(console, model, index, folder, trained_seconds)

    item_tokens = evaluate.item_tokens_of(index, films.titles)
    prompts = evaluate.make_prompts(
        split.train,
        item_tokens,
        num_films=settings.train.max_items,
        pad_token_id=model.config.pad_token_id,
        device=model.device,
    )
    histories = [[films.titles[film] for film in history] for history in split.train]
    start = time.perf_counter()
    with console.status("recommending"):
        ranked = recommend(
            model,
            histories,
            constraint_index=index,
            exclude="history",
            top_k=LIST_LENGTH,
            num_beams=settings.num_beams,
            max_prompt_tokens=settings.train.max_items * index.max_length,
            progress=False,
        )
    recommend_seconds = time.perf_counter() - start
    number_of = {title: number for number, title in enumerate(films.titles)}
    lists = [[number_of[title] for title in titles] for titles in ranked]
    popular = popularity_order(split.train, len(films)).tolist()
    show.print_users(console, films, split, lists, num_users=settings.num_shown, seed=settings.seed)

    with console.status("comparing with transformers' own generation"):
        some = evaluate.take_prompts(prompts, slice(32))
        count = settings.num_beams
        invalid_beams = evaluate.invalid_shares(model, index, some, num_sequences=count, do_sample=False)
        invalid_samples = evaluate.invalid_shares(
            model, index, some, num_sequences=count, do_sample=True, seed=settings.seed
        )
        comparison = evaluate.compare_with_transformers(
            model,
            index,
            item_tokens,
            evaluate.take_prompts(prompts, slice(settings.num_compared)),
            num_beams=settings.num_beams,
        )
    report = evaluate.DemoReport(
        folder=folder,
        trained_seconds=trained_seconds,
        model_hits=evaluate.count_hits(lists, split.targets),
        popular_hits=evaluate.count_hits(_unseen([popular] * len(lists), split), split.targets),
        num_users=len(lists),
        num_beams=settings.num_beams,
        recommend_seconds=recommend_seconds,
        invalid_beams=invalid_beams,
        invalid_samples=invalid_samples,
        comparison=comparison,
    )
    show.print_report(console, report, list_length=LIST_LENGTH)
    show.print_next_steps(console, folder, folder / USERS)
    return report


def train_and_save(films: MovieLens, split: Split, settings: DemoSettings, folder: Path, console: Console) -> float:
    """Make semantic ids, train on them, and save all in one folder; returns the seconds of training."""
    # Create the folder first: one that cannot be written fails here, not after minutes of training.
    with replaced_folder(folder) as unfinished:
        _save_users(films, split, unfinished / USERS)
        return _train(films, split, settings, unfinished, console)


def _save_users(films: MovieLens, split: Split, path: Path) -> None:
    """What users rated before their last film, and that film, for the commands that are printed at the end."""
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
    show.print_semantic_ids(console, semantic_ids)

    how = settings.train
    model = small_recommender(
        semantic_ids,
        max_items=how.max_items,
        hidden_size=how.hidden_size,
        num_hidden_layers=how.num_hidden_layers,
        num_attention_heads=how.num_attention_heads,
        seed=settings.seed,
    )
    start = time.perf_counter()
    with show.training_bar(console) as on_progress:
        train_recommender(
            [[films.titles[film] for film in history] for history in split.train],
            semantic_ids,
            model=model,
            max_items=how.max_items,
            max_steps=how.max_steps,
            output_dir=folder,
            seed=settings.seed,
            on_progress=on_progress,
        )
    return time.perf_counter() - start


def load_recommender(folder: Path) -> tuple[Any, ConstraintIndex]:
    """The saved model and its catalogue, as any user of hf_gr loads them.

    Raises:
        RuntimeError: The folder cannot be read.
    """
    try:
        index = ConstraintIndex.from_pretrained(folder)
        model = AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="torch")
    except Exception as error:  # every reader raises its own error for a damaged file
        raise RuntimeError(
            f"the cached recommender in {folder} cannot be read ({error}): run again with --retrain to replace it"
        ) from error
    model.generation_config.constraint_index = None  # here every call says itself whether it has a catalogue
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


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' messages and progress bars out of what the demo prints."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _unseen(rankings: Sequence[Sequence[int]], split: Split) -> list[list[int]]:
    """Every user's first 10 films that the user has not rated before."""
    pairs = zip(rankings, split.train, strict=True)
    return [evaluate.best_unseen(ranking, history, LIST_LENGTH) for ranking, history in pairs]
