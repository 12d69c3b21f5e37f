# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts, drafts and alignments of `speculation.py` and `atspeed.py`: what is trained, and on what. Measures nothing.

The target is the experiments' common backbone. The draft is a fourteenth of it, trained on the same histories. Teacher
prompts are histories of users of whom neither has seen anything; each method aligns a copy of the draft with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbone_data import Study
from backbone_models import backbone_folder, load, max_items
from experiments import make_once, run_trainer
from torch.utils.data import Subset
from transformers import TrainingArguments

from hf_gr import ConstraintIndex
from hf_gr.demo.evaluate import make_prompts
from hf_gr.training import (
    AtSpeedTrainer,
    TeacherDataset,
    small_recommender,
    train_recommender,
    write_teacher_data,
)
from hf_gr.training.atspeed_trainer import Loss

BASE, RANDOM = "before alignment", "random weights"
SEED = 0  # of the draft's weights and its training: alignments have seeds of their own
NUM_BEAMS = 10  # sequences of a teacher prompt


@dataclass(frozen=True)
class Plan:
    """How large the draft is, how long it trains, and how much of the teacher data an alignment sees."""

    draft: dict[str, int] = field(
        default_factory=lambda: {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    draft_steps: int = 1500
    prompts: int = 3392
    epochs: int = 3
    batch_size: int = 64
    warmup_steps: int = 50
    is_fast: bool = False


PLANS = {"beauty": Plan(), "movielens": Plan(prompts=1600)}
FAST = Plan(
    draft={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    draft_steps=5,
    prompts=32,
    epochs=2,
    batch_size=8,
    warmup_steps=1,
    is_fast=True,
)


@dataclass(frozen=True)
class Variant:
    """A way to align a draft.

    Attributes:
        loss: of `AtSpeedTrainer`.
        options: its other arguments.
        data: which teacher data; see `Workshop.teacher`.
        share: of the teacher prompts, in as many steps: 0.15 is 20 epochs instead of 3.
    """

    loss: Loss
    options: dict[str, Any] = field(default_factory=dict)
    data: str = "plain"
    share: float = 1.0


METHODS = {
    "SFT": Variant("sft"),
    "WordKD": Variant("wordkd"),
    "TVDKD": Variant("tvdkd"),
    "SeqKD": Variant("seqkd"),
    "AtSpeed-S": Variant("atspeed-s", {"reduction": "sum"}),  # equation 4 to the letter
    "AtSpeed-R": Variant("atspeed-r"),
    "BeamKD": Variant("beamkd", {"alpha": 1.0}),  # ours
}


@dataclass(frozen=True)
class Data:
    """The catalogue and the prompts: items are numbered from 0, histories oldest first."""

    tokens: np.ndarray  # [N, L]
    index: ConstraintIndex
    prompts: list[np.ndarray]  # what came before the test items
    answers: list[set[int]]  # the test items


def data_of(study: Study, *, fast: bool = False) -> Data:
    """The test rows of all users but those whose histories are teacher prompts."""
    taught = {tuple(history) for history in study.align}
    rows = [row for row in study.test if tuple(row.history[:-1]) not in taught]
    return Data(
        tokens=study.tokens,
        index=study.index,
        prompts=[row.history[-max_items(study, fast) :] for row in rows],
        answers=[{row.item} for row in rows],
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


def teacher_pairs(study: Study, number: int, *, max_length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and labels: all beginnings of two or more items of the held-out histories, and what followed each."""
    places = [(history, end) for history in study.align for end in range(2, len(history))]
    order = np.random.default_rng(SEED).permutation(len(places))[:number].tolist()
    chosen = [places[place] for place in order]
    prompts = [study.tokens[history[max(0, end - max_length) : end]].ravel().tolist() for history, end in chosen]
    return prompts, [study.tokens[history[end]].tolist() for history, end in chosen]


class Workshop:
    """The models and teacher data of one study, made when they are needed and kept in a folder.

    Args:
        study: the data.
        plan: the sizes.
        folder: where all that is made here has a folder for each study and backbone.
        work: the folder of the experiments' backbones; None for the usual one.
    """

    def __init__(self, study: Study, plan: Plan, folder: Path, work: Path | None = None) -> None:
        self.study = study
        self.plan = plan
        backbone = backbone_folder(study, work, fast=plan.is_fast)
        weights = hashlib.sha256((backbone / "model.safetensors").read_bytes()).hexdigest()
        self.folder = folder / f"{study.name}-{weights[:8]}"
        self.target = load(backbone)

    @cached_property
    def base(self) -> Path:
        """The draft before its alignment, trained on the histories that the backbone learned from."""

        def make(part: Path) -> None:
            train_recommender(
                self.study.train,
                self.study.ids,
                model=self.untrained(),
                max_items=max_items(self.study, self.plan.is_fast),
                max_steps=self.plan.draft_steps,
                output_dir=part,
                seed=SEED,
                progress=False,
            )

        return make_once(self.folder / "draft", make)

    def untrained(self) -> Any:
        """A draft with random weights."""
        length = max_items(self.study, self.plan.is_fast)
        return small_recommender(self.study.ids, max_items=length, seed=SEED, **self.plan.draft).eval()

    def teacher(self, kind: str) -> TeacherDataset:
        """The target's answers to the held-out prompts.

        `plain`: those of the target alone; `whole`: with its probabilities of all tokens at every position; `lambda
        0.5`, `lambda 0`: sequences of a search by the mixture with the draft before its alignment; `20 beams`.
        """
        length = max_items(self.study, self.plan.is_fast)
        prompts, labels = teacher_pairs(self.study, self.plan.prompts, max_length=length)
        options: dict[str, Any] = {"num_beams": NUM_BEAMS, "full_vocabulary": kind == "plain"}
        if kind == "whole":
            options["full_vocabulary"] = "sequences"
        elif kind.startswith("lambda "):
            options |= {"draft_model": load(self.base), "target_share": float(kind.removeprefix("lambda "))}
        elif kind.endswith(" beams"):
            options["num_beams"] = int(kind.removesuffix(" beams"))
        folder = self.folder / "teacher" / kind.replace(" ", "-")
        if not (folder / "teacher_data.json").exists():
            write_teacher_data(self.target, prompts, self.study.index, folder, labels=labels, batch_size=64, **options)
        return TeacherDataset(folder)

    def aligned(self, name: str, variant: Variant, *, seed: int) -> Path:
        """A copy of the draft, aligned; the seed is that of the order of prompts."""

        def make(part: Path) -> None:
            data = self.teacher(variant.data)
            steps = -(-len(data) // self.plan.batch_size) * self.plan.epochs
            dataset = data if variant.share == 1 else Subset(data, range(int(len(data) * variant.share)))
            trainer = AtSpeedTrainer(
                model=load(self.base),
                args=alignment_arguments(part, self.plan, num_steps=steps, seed=seed),
                train_dataset=dataset,
                constraint_index=self.study.index,
                loss=variant.loss,
                **variant.options,
            )
            run_trainer(trainer, f"{self.study.name}, {name}, seed {seed}")

        return make_once(self.folder / "aligned" / f"{slug(name)}-{seed}", make)


def alignment_arguments(folder: Path, plan: Plan, *, num_steps: int, seed: int) -> TrainingArguments:
    """The paper's (section A.3): AdamW, learning rate 1e-3, batches of 64, a cosine; fewer steps of warm-up."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=plan.batch_size,
        train_sampling_strategy="group_by_length",
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=plan.warmup_steps,
        weight_decay=0.1,
        logging_steps=max(1, num_steps // 5),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        seed=seed,
    )


def slug(name: str) -> str:
    """A name as part of a file's."""
    return "".join(letter if letter.isalnum() or letter in ".=" else "-" for letter in name.lower())
