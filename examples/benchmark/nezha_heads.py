# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The models that `nezha.py` compares: what is trained, on what, and for how long. Evaluates nothing.

All begin from one backbone and have one budget: as many steps on the same pairs of a history and the item that
followed, in the same order. The control is the backbone without a head, trained further by its own loss. What is of
the backbone learns equally fast everywhere, what is of a head faster. A seed decides a head's first weights, the
windows and their order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from backbone_data import Study
from backbone_models import load
from experiments import make_once, run_trainer, training_arguments
from nezha_packing import FurtherTrainer, WindowTrainer
from report import commit
from transformers import set_seed

from hf_gr.training import InteractionDataset
from hf_gr.training.windows import HistoryWindows

# Arguments of `add_draft_head`: NEZHA, the independent heads of MTP, and the ablations of the paper's section 4.3.
VARIANTS: dict[str, dict[str, Any]] = {
    "nezha": {},
    "mtp": {"use_placeholders": False, "transition": "none"},
    "nezha-1": {"use_state": False, "transition": "none"},
    "nezha-2": {"use_placeholders": False},
    "nezha-3": {"transition": "add"},
}
ALONE = "nezha-alone"  # its backbone is frozen, so that the model may verify what the head drafts
FURTHER = "backbone-further"  # the control


@dataclass(frozen=True)
class HeadSettings:
    """How every model is trained.

    Attributes:
        window: Items of a prompt at most.
        num_steps: Steps of training.
        batch_size: Windows of a step, each of up to `window` pairs of a history and the item that followed.
        learning_rate: The largest, of the backbone.
        embedding_lr: Of the head's embeddings, as a multiple.
        transition_lr: Of its transitions.
        logit_lr: Of its logit heads.
        warm_start: Logit heads and embeddings start as the backbone's rows of the same codes, which the paper does
            not do: it trains heads together with a language model that knows no item yet.
    """

    window: int
    num_steps: int
    batch_size: int = 16
    learning_rate: float = 1e-3
    embedding_lr: float = 3.0
    transition_lr: float = 3.0
    logit_lr: float = 3.0
    warm_start: bool = True


def train_all(
    work: Path, backbone: Path, study: Study, settings: HeadSettings, *, seeds: Sequence[int], names: Sequence[str]
) -> dict[tuple[str, int], Path]:
    """Folders of models by name and seed; what is in `work` already is not trained again."""
    folders = {}
    for seed in seeds:
        for name in names:
            folder = work / f"{name}-{seed}"
            folders[name, seed] = make_once(folder, _job(name, backbone, study, settings, seed))
    return folders


def _job(name: str, backbone: Path, study: Study, settings: HeadSettings, seed: int) -> Callable[[Path], None]:
    if name == FURTHER:
        return lambda folder: train_further(folder, backbone, study, settings, seed=seed)
    return lambda folder: train_head(
        folder,
        backbone,
        study,
        settings,
        options=VARIANTS.get(name, {}),
        train_backbone=name != ALONE,
        seed=seed,
    )


def train_head(
    folder: Path,
    backbone: Path,
    study: Study,
    settings: HeadSettings,
    *,
    options: dict[str, Any],
    train_backbone: bool = True,
    seed: int = 0,
) -> None:
    """A head for the backbone, trained with it or alone; both go to `folder`. Source: NEZHA, algorithm 3."""
    model = load(backbone)
    set_seed(seed)
    model.add_draft_head(study.ids, **options)
    if settings.warm_start:
        start_from_backbone(model)
    trainer = WindowTrainer(
        windows_of(study, settings, seed=seed),
        model=model,
        args=arguments_of(folder, settings, seed=seed),
        train_dataset=InteractionDataset.from_histories(study.train, study.tokens, max_items=settings.window),
        train_backbone=train_backbone,
        embedding_lr=settings.embedding_lr,
        transition_lr=settings.transition_lr,
        logit_lr=settings.logit_lr,
    )
    run_timed(trainer, folder)


def start_from_backbone(model: Any) -> None:
    """The best first guess any head can get: what the backbone itself predicts at the prompt's last token."""
    head = model.draft_head
    with torch.no_grad():
        for level in range(head.config.num_levels):
            codes = head.codebook(level)
            head.logit_heads[level].weight.copy_(model.get_output_embeddings().weight[codes])
            if level < len(head.embeddings):
                head.embeddings[level].weight.copy_(model.get_input_embeddings().weight[codes])


def train_further(folder: Path, backbone: Path, study: Study, settings: HeadSettings, *, seed: int) -> None:
    """The backbone on the same pairs for as many steps, with its own loss on the tokens of the item that followed."""
    windows = windows_of(study, settings, seed=seed)
    args = arguments_of(folder, settings, seed=seed)
    run_timed(FurtherTrainer(windows, model=load(backbone), args=args), folder)


def windows_of(study: Study, settings: HeadSettings, *, seed: int) -> HistoryWindows:
    """Histories to train on, in windows of a prompt and the item after it."""
    long = [history for history in study.train if len(history) > 1]
    return HistoryWindows(long, study.tokens, window=settings.window + 1, seed=seed)


def arguments_of(folder: Path, settings: HeadSettings, *, seed: int) -> Any:
    args = training_arguments(folder, num_steps=settings.num_steps, learning_rate=settings.learning_rate)
    args.per_device_train_batch_size = settings.batch_size
    args.remove_unused_columns = False
    args.seed = seed
    return args


def run_timed(trainer: FurtherTrainer | WindowTrainer, folder: Path) -> None:
    """Train and save, with the time that it took (of the process: others may have the processor, too)."""
    start = time.process_time()
    run_trainer(trainer, folder.name.removesuffix(".part"))
    log = {"seconds": time.process_time() - start, "pairs": trainer.num_pairs, "commit": commit()}
    (folder / "training.json").write_text(json.dumps(log), encoding="utf-8")
