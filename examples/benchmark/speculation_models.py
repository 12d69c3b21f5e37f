# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts, drafts and alignments of `speculation.py` and `atspeed.py`: what is trained, and on what. Measures nothing.

The target is the experiments' common backbone. The draft is a fourteenth of it, trained on the same histories. Teacher
prompts are histories of users of whom neither has seen anything; each method aligns a copy of the draft with them.
What is made is kept under names that tell how it was made, with the commit that made it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbone_data import STUDIES, Row, Study, has_study, read_study
from backbone_models import backbone_folder, load, max_items
from experiments import QUIET, make_once, run_trainer
from report import commit
from torch.utils.data import Subset
from transformers import TrainingArguments

from hf_gr import ConstraintIndex
from hf_gr.demo.evaluate import make_prompts
from hf_gr.files.cache import cache_folder
from hf_gr.training import (
    AtSpeedTrainer,
    TeacherDataset,
    small_recommender,
    train_recommender,
    write_teacher_data,
)
from hf_gr.training.atspeed_trainer import Loss

BASE, RANDOM = "before alignment", "random weights"
NUM_BEAMS = 10  # sequences of a teacher prompt
PROMPTS_SEED = 0  # of the order of teacher prompts: never a run's
# The paper's (section A.3), with a share of the steps for warm-up in the place of 200.
ALIGNMENT: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "train_sampling_strategy": "group_by_length",
}
WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class Plan:
    """How large the draft is, how long it trains, and how much teacher data an alignment sees.

    Attributes:
        draft: sizes, as `small_recommender` takes them.
        draft_steps: of its training on histories.
        prompts: of the teacher, at most.
        epochs: of an alignment, where it has none of its own.
        batch_size: of an alignment.
        is_fast: tiny models.
    """

    draft: dict[str, int] = field(
        default_factory=lambda: {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    draft_steps: int = 1500
    prompts: int = 6784
    epochs: int = 3
    batch_size: int = 64
    is_fast: bool = False


PLANS = {"beauty": Plan(), "movielens": Plan(prompts=2000)}
FAST = Plan(
    draft={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    draft_steps=5,
    prompts=32,
    epochs=2,
    batch_size=8,
    is_fast=True,
)


@dataclass(frozen=True)
class Variant:
    """A way to align a draft.

    Attributes:
        loss: of `AtSpeedTrainer`.
        options: its other arguments.
        data: which teacher data; see `Workshop.teacher`.
        share: of the teacher prompts.
        epochs: over them; None for the plan's.
    """

    loss: Loss
    options: dict[str, Any] = field(default_factory=dict)
    data: str = "plain"
    share: float = 1.0
    epochs: int | None = None


METHODS = {
    "SFT": Variant("sft"),
    "WordKD": Variant("wordkd"),
    "TVDKD": Variant("tvdkd"),
    "SeqKD": Variant("seqkd"),
    "AtSpeed-S": Variant("atspeed-s", {"reduction": "sum", "alpha": 0.5}),  # equations 4 and 5 to the letter
    "AtSpeed-R": Variant("atspeed-r", {"alpha": 0.5}),
    "BeamKD": Variant("beamkd", {"alpha": 1.0}),  # ours
}


@dataclass(frozen=True)
class Data:
    """The catalogue and the prompts: items are numbered from 0, histories oldest first."""

    tokens: np.ndarray  # [N, L]
    index: ConstraintIndex
    prompts: list[np.ndarray]  # what came before the items asked for
    answers: list[set[int]]  # these items
    users: list[int]


def data_of(
    study: Study, *, fast: bool = False, rows: Sequence[Row] | None = None, without: Collection[int] = ()
) -> Data:
    """The test rows (or others) of all users but those whose histories are teacher prompts, and some more."""
    taught = {tuple(history) for history in study.align}
    taught_users = {row.user for row in study.test if tuple(row.history[:-1]) in taught}
    rows = [
        row
        for row in (study.test if rows is None else rows)
        if row.user not in taught_users and row.user not in without
    ]
    return Data(
        tokens=study.tokens,
        index=study.index,
        prompts=[row.history[-max_items(study, fast) :] for row in rows],
        answers=[{row.item} for row in rows],
        users=[row.user for row in rows],
    )


def prompts_of(model: Any, data: Data, users: Sequence[int]) -> dict[str, torch.Tensor]:
    """A padded batch of rows."""
    return make_prompts(
        [data.prompts[user] for user in users],
        data.tokens,
        num_films=max(len(data.prompts[user]) for user in users),
        pad_token_id=model.config.pad_token_id,
        device=model.device,
    )


def teacher_pairs(study: Study, number: int, *, max_length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and labels: beginnings of two or more items of the held-out histories, and what followed each."""
    places = [(history, end) for history in study.align for end in range(2, len(history))]
    order = np.random.default_rng(PROMPTS_SEED).permutation(len(places))[:number].tolist()
    chosen = [places[place] for place in order]
    prompts = [study.tokens[history[max(0, end - max_length) : end]].ravel().tolist() for history, end in chosen]
    return prompts, [study.tokens[history[end]].tolist() for history, end in chosen]


class Workshop:
    """The models and teacher data of one study, made when they are needed and kept in a folder.

    Args:
        study: the data.
        plan: the sizes.
        folder: where all that is made here has a folder for each study, backbone and plan.
        work: the folder of the experiments' backbones; None for the usual one.

    Attributes:
        commits: those that made what was used so far.
    """

    def __init__(self, study: Study, plan: Plan, folder: Path, work: Path | None = None) -> None:
        self.study = study
        self.plan = plan
        backbone = backbone_folder(study, work, fast=plan.is_fast)
        weights = hashlib.sha256((backbone / "model.safetensors").read_bytes()).hexdigest()
        key = digest(weights, asdict(plan), NUM_BEAMS, PROMPTS_SEED, ALIGNMENT, WARMUP_SHARE)
        self.folder = folder / f"{study.name}-{key}"
        self.target = load(backbone)
        self.commits: set[str] = set()

    def base(self, seed: int) -> Path:
        """A draft before its alignment, trained on the histories that the backbone learned from."""

        def make(part: Path) -> None:
            train_recommender(
                self.study.train,
                self.study.ids,
                model=self.untrained(seed),
                max_items=max_items(self.study, self.plan.is_fast),
                max_steps=self.plan.draft_steps,
                output_dir=part,
                seed=seed,
                progress=False,
            )

        return self._made(self.folder / f"draft-{seed}", make)

    def untrained(self, seed: int) -> Any:
        """A draft with random weights."""
        length = max_items(self.study, self.plan.is_fast)
        return small_recommender(self.study.ids, max_items=length, seed=seed, **self.plan.draft).eval()

    def teacher(self, kind: str = "plain") -> TeacherDataset:
        """The target's answers to the held-out prompts.

        `plain`: those of the target alone; `whole`: with its probabilities of all tokens at every position; `lambda
        0.5`, `lambda 0`: sequences of a search by the mixture with the draft of seed 0; `20 beams`.
        """
        length = max_items(self.study, self.plan.is_fast)
        prompts, labels = teacher_pairs(self.study, self.plan.prompts, max_length=length)
        options: dict[str, Any] = {"num_beams": NUM_BEAMS, "full_vocabulary": kind == "plain"}
        if kind == "whole":
            options["full_vocabulary"] = "sequences"
        elif kind.startswith("lambda "):
            options |= {"draft_model": load(self.base(0)), "target_share": float(kind.removeprefix("lambda "))}
        elif kind.endswith(" beams"):
            options["num_beams"] = int(kind.removesuffix(" beams"))
        elif kind != "plain":
            raise ValueError(f"kind={kind!r}, expected 'plain', 'whole', 'lambda NUMBER' or 'NUMBER beams'")
        folder = self.folder / "teacher" / kind.replace(" ", "-")
        write_teacher_data(self.target, prompts, self.study.index, folder, labels=labels, batch_size=64, **options)
        return TeacherDataset(folder)

    def aligned(self, name: str, variant: Variant, *, seed: int) -> Path:
        """The draft of a seed, aligned; the seed is that of the order of prompts, too."""

        def make(part: Path) -> None:
            data = self.teacher(variant.data)
            dataset = data if variant.share == 1 else Subset(data, range(int(len(data) * variant.share)))
            epochs = variant.epochs or self.plan.epochs
            steps = -(-len(dataset) // self.plan.batch_size) * epochs
            args = TrainingArguments(
                output_dir=str(part),
                max_steps=steps,
                per_device_train_batch_size=self.plan.batch_size,
                warmup_steps=int(WARMUP_SHARE * steps),
                logging_steps=max(1, steps // 5),
                seed=seed,
                **QUIET,
                **ALIGNMENT,
            )
            trainer = AtSpeedTrainer(
                model=load(self.base(seed)),
                args=args,
                train_dataset=dataset,
                constraint_index=self.study.index,
                loss=variant.loss,
                **variant.options,
            )
            run_trainer(trainer, f"{self.study.name}, {name}, seed {seed}")

        method = name.partition(",")[0]
        return self._made(self.folder / "aligned" / f"{slug(method)}-{seed}-{digest(asdict(variant))}", make)

    def _made(self, folder: Path, make: Callable[[Path], None]) -> Path:
        def make_and_sign(part: Path) -> None:
            make(part)
            (part / "commit.txt").write_text(commit(), encoding="utf-8")

        make_once(folder, make_and_sign)
        self.commits.add((folder / "commit.txt").read_text(encoding="utf-8"))
        return folder


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which studies, and where their models are."""
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--work", type=Path, help="where stages keep what they make; for --fast nowhere")
    parser.add_argument("--fast", action="store_true", help="tiny models, few users; skips data that are not there")


@contextmanager
def workshops(options: argparse.Namespace) -> Iterator[Iterator[Workshop]]:
    """One for every study that is there; what they make is gone afterwards if it has no folder."""
    with tempfile.TemporaryDirectory(prefix="hf_gr_atspeed_") as nowhere:
        is_kept = options.work is not None or not options.fast
        folder = options.work or (cache_folder("experiments") / "atspeed" if is_kept else Path(nowhere))
        backbones = Path(nowhere) if not is_kept else options.work and options.work / "backbones"

        def all_of_them() -> Iterator[Workshop]:
            for name in options.studies:
                if options.fast and not has_study(name):
                    print(f"skipped: no data of {name}")
                    continue
                plan = FAST if options.fast else PLANS[name]
                yield Workshop(read_study(name, fast=options.fast), plan, folder, backbones)

        yield all_of_them()


def slug(name: str) -> str:
    """A name as part of a file's."""
    return "".join(letter if letter.isalnum() or letter in ".=" else "-" for letter in name.lower())


def digest(*parts: Any) -> str:
    """Eight letters that stand for some values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]
