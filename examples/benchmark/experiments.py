# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""How experiments train: transformers' Trainer by one recipe, and folders that are made once. Knows no model."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

QUIET: dict[str, Any] = {  # a training that only says its loss, on the CPU
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "use_cpu": True,
}


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder unless it is complete; one that an earlier run left half-made is made again."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(part)
        part.rename(folder)
    return folder


def show_progress(text: str) -> None:
    """To stderr: results alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


class Log(TrainerCallback):
    """Prints the loss and the time so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            passed = time.perf_counter() - self.start
            show_progress(f"{self.name}, step {state.global_step}: loss {float(logs['loss']):.3f}, {passed:.0f} s")


def training_arguments(folder: Path, *, num_steps: int, learning_rate: float) -> TrainingArguments:
    """As in the paper, section A.3, apart from the numbers of steps and AdamW's second beta."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=64,
        train_sampling_strategy="group_by_length",
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, num_steps // 5),
        weight_decay=0.1,
        adam_beta2=0.98,
        logging_steps=max(1, num_steps // 40),
        seed=0,
        **QUIET,
    )


def run_trainer(trainer: Trainer, name: str) -> None:
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Log(name))
    trainer.train()
    trainer.model.eval().save_pretrained(trainer.args.output_dir)
