# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One of several processes that train a model, as a launcher starts them; `test_recommender.py` compares them.

python -m torch.distributed.run --standalone --nproc_per_node 2 tests/train_as_rank.py fsdp atspeed FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import accelerate.state
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainingArguments

from hf_gr import SemanticIds
from hf_gr.training import (
    AtSpeedTrainer,
    DraftHeadTrainer,
    InteractionDataset,
    TeacherDataset,
    small_recommender,
    train_recommender,
    write_teacher_data,
)

IDS = SemanticIds([[number // 8, number % 8] for number in range(64)])
SHARDED = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}


def shard_on_cpus() -> None:
    """Accelerate leaves FSDP out on CPUs. Where it decides that, these are processes of another device."""
    original = accelerate.state.PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    accelerate.state.PartialState.__init__ = init


class Seen(TrainerCallback):
    """Losses, and whether the model is in pieces."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.is_fsdp = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.is_fsdp = type(model).__name__.startswith("FSDP")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self.loss.append(float(logs["loss"]))  # pyright: ignore[reportOptionalSubscript]


def train(way: str, trainer: str, folder: Path) -> dict[str, Any]:
    """Train a few steps; the model is in `folder` afterwards."""
    draw = np.random.default_rng(0)
    histories = [draw.integers(0, 64, size=8).tolist() for _ in range(32)]
    seen = Seen()
    how: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 16 if way == "alone" else 8,
        "train_sampling_strategy": "random",  # the same rows a step, whoever has them
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
        **({"fsdp": True, "fsdp_config": SHARDED} if way.startswith("fsdp") else {}),
    }
    model = small_recommender(IDS, max_items=7, hidden_size=16)
    if trainer == "recommender":
        train_recommender(histories, IDS, model=model, max_items=7, output_dir=folder, callbacks=[seen], **how)
    elif trainer.startswith("head"):
        model = small_recommender(IDS, max_items=9, hidden_size=16)
        torch.manual_seed(0)
        model.add_draft_head(IDS)
        made = DraftHeadTrainer(
            model=model,
            args=TrainingArguments(str(folder), **how),
            train_dataset=InteractionDataset.from_histories(histories, IDS, max_items=7),
            train_backbone=trainer != "head alone",
            embedding_lr=1.0,
            callbacks=[seen],
        )
        made.train()
        made.save_model()
    else:
        index = IDS.constraint_index()
        target = small_recommender(IDS, max_items=7, hidden_size=16, seed=1).eval()
        prompts, labels = ([IDS.encode(row[part]) for row in histories] for part in (slice(-1), slice(-1, None)))
        teacher = write_teacher_data(
            target, prompts, index, folder / "teacher", num_beams=4, labels=labels, shard_size=8
        )
        made = AtSpeedTrainer(
            model=model,
            args=TrainingArguments(str(folder), **how),
            train_dataset=TeacherDataset(teacher),
            constraint_index=index,
            callbacks=[seen],
        )
        made.train()
        made.save_model()
    return {"is_fsdp": seen.is_fsdp, "loss": seen.loss}


if __name__ == "__main__":
    PartialState(cpu=True)
    if sys.argv[1] == "fsdp":
        shard_on_cpus()
    print(json.dumps(train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))) + "\n", end="", flush=True)
