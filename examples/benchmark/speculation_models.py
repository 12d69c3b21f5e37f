# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Catalogues, prompts, targets and drafts of `speculation.py`: what is trained, and on what. Measures nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beauty_data import read_items, read_users
from experiments import run_trainer, show_progress, training_arguments
from transformers import Qwen3ForCausalLM, Trainer

from hf_gr import ConstraintIndex, SemanticIds, enable
from hf_gr.demo.data import keep_most_rated, leave_one_out, load_movielens
from hf_gr.demo.evaluate import make_prompts
from hf_gr.demo.semantic_ids import film_features
from hf_gr.training import AtSpeedTrainer, TeacherDataset, small_recommender, write_teacher_data
from hf_gr.training.item_codes import residual_kmeans
from hf_gr.training.recommender import HistoryWindows, pad_batch

METHODS = {
    "sft": "SFT",
    "wordkd": "WordKD",
    "tvdkd": "TVDKD",
    "seqkd": "SeqKD",
    "atspeed-s": "AtSpeed-S",
    "atspeed-r": "AtSpeed-R",
}
BASE = "before alignment"


@dataclass(frozen=True)
class TrainSettings:
    """How a model is built and trained on histories, in windows of `window` items."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    window: int = 10
    batch_size: int = 64
    num_steps: int = 1600
    learning_rate: float = 5e-3


@dataclass(frozen=True)
class Training:
    """How large the models are, and how long they train."""

    target: TrainSettings
    draft: TrainSettings
    align_steps: int = 0  # of every method
    methods: tuple[str, ...] = ()
    teacher_prompts: int | None = None


WINDOW = 20
TARGET = TrainSettings(
    hidden_size=384,
    intermediate_size=1024,
    num_layers=6,
    num_heads=6,
    window=WINDOW,
    num_steps=1800,
    learning_rate=1e-3,
)
DRAFT = TrainSettings(window=WINDOW, num_steps=1500, learning_rate=3e-3)
TINY = TrainSettings(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, window=WINDOW, num_steps=20)
TINY_DRAFT = replace(TINY, hidden_size=16, num_steps=5)
BEAUTY = Training(TARGET, DRAFT, align_steps=700, methods=(*METHODS,))
SMALL_TARGET = replace(TARGET, hidden_size=256, intermediate_size=640, num_layers=4, num_heads=4, num_steps=1000)
SMALL_BEAUTY = Training(SMALL_TARGET, DRAFT, align_steps=400, methods=(*METHODS,), teacher_prompts=3000)
MOVIELENS = Training(
    target=replace(DRAFT, num_steps=1000),
    draft=replace(DRAFT, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=2, num_steps=1000),
)
TINY_BEAUTY = Training(
    TINY, TINY_DRAFT, align_steps=3, methods=("seqkd", "atspeed-s", "atspeed-r"), teacher_prompts=64
)
TINY_MOVIELENS = Training(TINY, TINY_DRAFT)


@dataclass(frozen=True)
class Data:
    """The catalogue, training data and prompts: items are numbered from 0, histories oldest first."""

    tokens: np.ndarray  # [N, L]
    index: ConstraintIndex
    histories: list[np.ndarray]  # to train on
    prompts: list[np.ndarray]  # what came before the test items
    answers: list[set[int]]  # the test items


def read_beauty(data: Path, window: int) -> Data:
    """Prompts are the periods train and valid of the users with test items; only the period train is trained on."""
    item_ids, codes = read_items(data)
    if item_ids != list(range(len(codes))):
        raise SystemExit(f"the items of {data / 'items.tsv'} are not numbered 0, 1, 2, ...: number them as their rows")
    users = read_users(data)
    ids = SemanticIds(codes, level_sizes=[256] * codes.shape[1])
    asked = [user for user in users if user["test"] and user["train"] + user["valid"]]
    return Data(
        tokens=ids.token_sequences(),
        index=ids.constraint_index(),
        histories=[np.array(user["train"]) for user in users if user["train"]],
        prompts=[np.array(user["train"] + user["valid"])[-(window - 1) :] for user in asked],
        answers=[set(user["test"]) for user in asked],
    )


def read_movielens(window: int, *, fast: bool = False) -> Data:
    """The films, semantic ids and histories of `hf-gr demo`: the last film of every user is the test item."""
    films = load_movielens()
    films = keep_most_rated(films, 500) if fast else films
    split = leave_one_out(films.histories)
    codes = residual_kmeans(film_features(films, split.train), num_levels=3, num_codes=16 if fast else 128)
    ids = SemanticIds(codes)
    return Data(
        tokens=ids.token_sequences(),
        index=ids.constraint_index(),
        histories=split.train,
        prompts=[history[-(window - 1) :] for history in split.train],
        answers=[{target} for target in split.targets.tolist()],
    )


def prompts_of(model: Any, data: Data, users: Sequence[int]) -> dict[str, torch.Tensor]:
    """A padded batch."""
    return make_prompts(
        [data.prompts[user] for user in users],
        data.tokens,
        num_films=max(len(data.prompts[user]) for user in users),
        pad_token_id=model.config.pad_token_id,
        device=model.device,
    )


def build_model(tokens: np.ndarray, settings: TrainSettings, *, seed: int) -> Any:
    """A model with random weights for the `[N, L]` tokens of the items."""
    return small_recommender(
        tokens,
        max_items=settings.window - 1,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        seed=seed,
    )


def train_on_histories(folder: Path, data: Data, settings: TrainSettings, name: str) -> None:
    """What `train_recommender` does, by the recipe of the paper."""
    model = build_model(data.tokens, settings, seed=0)
    show_progress(f"{name}: {model.num_parameters() / 1e6:.2f} M parameters, {settings.num_steps:,} steps")
    windows = HistoryWindows(data.histories, data.tokens, window=settings.window, seed=0)
    trainer = Trainer(
        model=model,
        args=training_arguments(folder, num_steps=settings.num_steps, learning_rate=settings.learning_rate),
        train_dataset=windows,
        data_collator=lambda rows: pad_batch(
            [row["input_ids"] for row in rows], pad_token_id=model.config.pad_token_id
        ),
    )
    run_trainer(trainer, name)


def write_teacher(folder: Path, data: Data, target: Any, training: Training) -> Path:
    """Every history without its last item as a prompt, that item as its label. Resumes in an existing folder."""
    histories = [history for history in data.histories if len(history) > 1][: training.teacher_prompts]
    prompts = [data.tokens[history[-training.target.window : -1]].ravel().tolist() for history in histories]
    labels = [data.tokens[history[-1]].tolist() for history in histories]
    start = time.perf_counter()
    write_teacher_data(
        target, prompts, data.index, folder, num_beams=10, labels=labels, full_vocabulary=True, progress=True
    )
    show_progress(f"teacher: {len(prompts):,} prompts, {time.perf_counter() - start:.0f} s")
    return folder


def align(folder: Path, data: Data, base: Path, teacher: Path, method: str, training: Training) -> None:
    trainer = AtSpeedTrainer(
        model=Qwen3ForCausalLM.from_pretrained(base),
        args=training_arguments(folder, num_steps=training.align_steps, learning_rate=1e-3),
        train_dataset=TeacherDataset(teacher),
        constraint_index=data.index,
        loss=method,
        alpha=0.5,
    )
    run_trainer(trainer, METHODS[method])


def load(folder: Path) -> Any:
    return enable(Qwen3ForCausalLM.from_pretrained(folder).eval())


def make_random(data: Data, training: Training) -> Any:
    """A draft that nobody trained."""
    return build_model(data.tokens, training.draft, seed=1).eval()
