# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's recommender: a small Qwen3 that reads histories as semantic-id tokens. Knows no films.

A history is the concatenated tokens of its films; transformers' own `Trainer` teaches the model to predict every next
token of a window of it. Nothing here is specific to hf_gr: any causal language model would do.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


@dataclass(frozen=True)
class TrainSettings:
    """How the recommender is built and trained; part of the cache's key.

    Attributes:
        hidden_size: Width of the model.
        intermediate_size: Width of its feed-forward blocks.
        num_layers: Depth of the model.
        num_heads: Attention heads per layer.
        window: Films of a training window; a prompt is one film shorter, which leaves room for the answer.
        batch_size: Windows per step.
        num_steps: Training steps.
        learning_rate: The largest learning rate, reached after the warm-up.
        max_seconds: Training ends after this time, even if steps are left.
    """

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    window: int = 10
    batch_size: int = 64
    num_steps: int = 1600
    learning_rate: float = 5e-3
    max_seconds: float = 220.0


class HistoryWindows(Dataset):
    """Windows of histories, drawn again at every access. Seeded; read by one process.

    A history of n films gives n / window windows per pass. They start at random positions, so that over the passes
    every film is predicted from contexts of every length. Windows that would cross an end of the history are moved to
    it, so that the first and the last films occur as often as the others.
    """

    def __init__(self, histories: Sequence[np.ndarray], item_tokens: np.ndarray, *, window: int, seed: int) -> None:
        """Prepare the windows.

        Args:
            histories: U arrays of film numbers, oldest first.
            item_tokens: `[N, L]` tokens of every film.
            window: Films of a window.
            seed: Seed of the windows' starts.
        """
        self.histories = histories
        self.item_tokens = item_tokens
        self.window = window
        self.rng = np.random.default_rng(seed)
        counts = [math.ceil(len(history) / window) for history in histories]
        self.owners = np.repeat(np.arange(len(histories)), counts)

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, number: int) -> np.ndarray:
        history = self.histories[self.owners[number]]
        start = int(self.rng.integers(len(history))) - self.window // 2
        start = max(0, min(start, len(history) - self.window))
        return self.item_tokens[history[start : start + self.window]].ravel()


def pad_batch(rows: Sequence[np.ndarray], *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Token rows of any length as a right-padded training batch; padding is neither seen nor predicted."""
    tensors = [torch.from_numpy(row) for row in rows]
    input_ids = pad_sequence(tensors, batch_first=True, padding_value=pad_token_id)
    attention_mask = (input_ids != pad_token_id).long()
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill(attention_mask == 0, -100),
    }


def build_model(vocab_size: int, num_tokens_per_item: int, settings: TrainSettings, *, seed: int) -> Qwen3ForCausalLM:
    """A small Qwen3 with random weights; the last token of the vocabulary is padding."""
    set_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        head_dim=settings.hidden_size // settings.num_heads,
        max_position_embeddings=(settings.window + 1) * num_tokens_per_item,
        tie_word_embeddings=True,
        # transformers' own 0.02 is meant for wider models; this one learns faster from larger weights.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=vocab_size - 1,
    )
    return Qwen3ForCausalLM(config)


def train_model(
    histories: Sequence[np.ndarray],
    item_tokens: np.ndarray,
    settings: TrainSettings,
    *,
    seed: int = 0,
    on_progress: Callable[[float, float], None] = lambda fraction, loss: None,
) -> Qwen3ForCausalLM:
    """Train a recommender on histories.

    Args:
        histories: U arrays of film numbers, oldest first, without the held-out films.
        item_tokens: `[N, L]` tokens of every film; padding gets the first token after them.
        settings: Size and schedule.
        seed: Seed of the weights, the windows and their order.
        on_progress: Called after every step with the share of the training that is done and the latest loss.

    Returns:
        The model, in evaluation mode.
    """
    vocab_size = int(item_tokens.max()) + 2
    model = build_model(vocab_size, item_tokens.shape[1], settings, seed=seed)
    windows = HistoryWindows(histories, item_tokens, window=settings.window, seed=seed)
    schedule = Schedule(settings)
    optimizer = torch.optim.AdamW(_decay_groups(model), lr=settings.learning_rate, betas=(0.9, 0.98))
    # The recommender is saved by the caller; the Trainer's own folder stays empty.
    with tempfile.TemporaryDirectory(prefix="hf_gr_trainer_") as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=settings.num_steps,
                per_device_train_batch_size=settings.batch_size,
                max_grad_norm=1.0,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                use_cpu=not torch.cuda.is_available(),
                seed=seed,
            ),
            train_dataset=windows,
            data_collator=lambda rows: pad_batch(rows, pad_token_id=vocab_size - 1),
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.learning_rate_at)),
            callbacks=[_Progress(schedule, on_progress)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model.eval()


class Schedule:
    """Progress of the training: by steps, or by the clock if that runs out first.

    The learning rate follows whichever is further, so a slow machine gets a shorter but complete schedule, not the
    first part of a longer one.
    """

    def __init__(self, settings: TrainSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock."""
        self.settings = settings
        self.clock = clock
        self.start = clock()

    def fraction_at(self, step: int) -> float:
        """The share of the training that is done, 0 to 1."""
        elapsed = self.clock() - self.start
        return min(1.0, max(step / self.settings.num_steps, elapsed / self.settings.max_seconds))

    def learning_rate_at(self, step: int) -> float:
        """The share of the largest learning rate: a warm-up of 50 steps, then half a cosine."""
        warm_up = min(1.0, (step + 1) / min(50, self.settings.num_steps))
        return warm_up * 0.5 * (1 + math.cos(math.pi * self.fraction_at(step)))


class _Progress(TrainerCallback):
    """Reports every step, and ends the training when the schedule does."""

    def __init__(self, schedule: Schedule, on_progress: Callable[[float, float], None]) -> None:
        self.schedule = schedule
        self.on_progress = on_progress
        self.loss = math.nan

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.loss = float((logs or {}).get("loss", self.loss))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        fraction = self.schedule.fraction_at(state.global_step)
        self.on_progress(fraction, self.loss)
        if fraction >= 1.0:
            control.should_training_stop = True


def _decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
