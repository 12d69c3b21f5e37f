# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`train_recommender`: a small decoder that reads histories as semantic-ID tokens, from scratch. Knows no draft.

A history is the concatenated tokens of its items. A decoder learns to predict every next token of a window of items,
an encoder-decoder the items that follow a part of the window; with transformers' Trainer and the model's own loss.
Source: TIGER, section 3.2.

Axes: U users, I items of all histories, N items of the catalogue, L tokens of an item, B batch, P tokens of a window.
"""

import math
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_gr.catalogue import ConstraintIndex, SemanticIds
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.storage import JSON_FILE
from hf_gr.files.progress import logger, progress_bar
from hf_gr.generation.models import position_limit
from hf_gr.generation.torch.loading import enable
from hf_gr.generation.torch.models import base_model

from .base import LossTrainer, learn_code_book
from .interactions import flat_histories
from .packing import pad_token
from .windows import HistoryWindows, LastItems, pad_batch

RECIPE: dict[str, Any] = {
    "max_steps": 1600,
    "per_device_train_batch_size": 64,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 50,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "train_sampling_strategy": "group_by_length",
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "ddp_find_unused_parameters": False,
}

PATIENCE = 5  # validation losses


def small_recommender(
    items: SemanticIds | Any,
    *,
    max_items: int = 10,
    hidden_size: int = 128,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    seed: int = 0,
) -> Any:
    """A small Qwen3 with random weights, whose vocabulary is the tokens of items and padding.

    Args:
        items: semantic IDs, or the `[N, L]` tokens of items that are numbered from 0.
        max_items: the most items of a prompt.
        hidden_size: its width, a multiple of `num_attention_heads`; its feed-forward blocks are twice as wide.
        num_hidden_layers: its depth.
        num_attention_heads: in every layer.
        seed: of the weights.

    Returns:
        The model, with hf_gr's `generate`. It has positions for `max_items` items and the one that follows.

    Raises:
        ValueError: a size is not positive, or the width is no multiple of the heads.

    Example:
        >>> model = small_recommender(SemanticIds([[0, 1], [1, 0]]), hidden_size=8)
        >>> model.config.vocab_size, model.config.pad_token_id
        (5, 4)
    """
    sizes = {"max_items": max_items, "hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers}
    for name, value in (sizes | {"num_attention_heads": num_attention_heads}).items():
        if value < 1:
            raise ValueError(f"{name}={value}, expected 1 or more")
    if hidden_size % num_attention_heads:
        raise ValueError(
            f"hidden_size={hidden_size}, expected a multiple of num_attention_heads={num_attention_heads}"
        )
    _, _, tokens = flat_histories([[]], items)
    vocab_size = items.vocab_size if isinstance(items, SemanticIds) else int(tokens.max()) + 1
    set_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size + 1,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_attention_heads,
        head_dim=hidden_size // num_attention_heads,
        max_position_embeddings=(max_items + 2) * tokens.shape[1],
        tie_word_embeddings=True,
        # transformers' own 0.02 is meant for wider models; this one learns faster from larger weights.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=vocab_size,
    )
    return enable(Qwen3ForCausalLM(config))


def train_recommender(
    histories: Iterable[Iterable[ItemId]],
    items: SemanticIds | Any,
    *,
    model: Any = None,
    max_items: int = 10,
    validation: Iterable[Iterable[ItemId]] | None = None,
    patience: int | None = None,
    output_dir: Any = None,
    overwrite: bool = False,
    seed: int = 0,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    **arguments: Any,
) -> Any:
    """Train a recommender on histories: a small one from scratch, or any model that has the items' tokens.

    Hold out what you evaluate with: histories without each user's last item. Under a launcher of several processes
    (`accelerate launch`, `python -m torch.distributed.run`), call it in every one: each trains on its own part of
    every batch, and has the whole model afterwards (with FSDP, only `output_dir` has it).

    Args:
        histories: a list of items per user, oldest first; or a dictionary of them, as `read_histories` returns. Those
            of one item teach only its own tokens.
        items: semantic IDs, whose item ids the histories contain; or the `[N, L]` tokens of items that are numbered
            from 0. All have the same number of tokens.
        model: a model to train on, such as yesterday's, if it knows these items by the same tokens; by default
            `small_recommender(items, max_items=max_items)`. An encoder-decoder reads the first items of a window, up
            to a random place, and writes those that follow, five at most, so that a step teaches more than one item.
            An adapter of `peft.get_peft_model` is trained alone, and then merged into the model.
        max_items: the most items of a prompt; a training window has one more.
        validation: histories whose last item is predicted from those before, such as the training histories plus the
            item that followed. The loss is computed after every 5% of the training (`eval_steps`), and the weights
            with the lowest loss are returned (`load_best_model_at_end`, with a checkpoint each time).
        patience: stop after this many validation losses in a row without improvement, by default 5; with `validation`.
        output_dir: a folder for the trained model and its catalogue, which the model's generation config names: all
            that `hf-gr serve` and `hf_gr.recommend` need, and the semantic IDs. Checkpoints go there, too
            (`save_strategy=`).
        overwrite: replace a finished recommender in `output_dir`; without it, only `resume_from_checkpoint` does.
        seed: of the new model, and of the windows and their order.
        progress: show a bar, in terminals and notebooks; lines in logs.
        callbacks: transformers' own, such as one that is called after every step.
        arguments: transformers' `TrainingArguments` in place of the recipe's: 1,600 steps (`max_steps`) of 64 windows
            (`per_device_train_batch_size`), AdamW with `learning_rate=5e-3`, a warm-up of 50 steps, then a cosine;
            `num_train_epochs`, `bf16`, `gradient_accumulation_steps`, `resume_from_checkpoint`, ...

    Returns:
        The model in evaluation mode, with hf_gr's `generate`.

    Raises:
        ValueError: before any work: an item without tokens, items of different lengths, no history; a model whose
            vocabulary or positions are too few, or that learned other tokens of these items; an unknown argument; an
            invalid `patience`, or one without `validation`; FSDP without `output_dir`.

    Example:
        >>> ids = SemanticIds([[0, 1], [1, 0], [1, 1]], item_ids=["tea", "jam", "ham"])
        >>> model = train_recommender([["tea", "jam"], ["tea", "ham", "jam"]], ids, max_steps=2, use_cpu=True)
        >>> out = model.generate(torch.tensor([ids.encode(["tea"])]), constraint_index=ids.constraint_index())
        >>> ids.constraint_index().items(out[:, 2:]) != [[]]
        True

    Source: TIGER (Rajput et al., 2023), section 3.2: next-item prediction over semantic IDs.
    """
    if max_items < 1:
        raise ValueError(f"max_items={max_items}, expected 1 or more: a prompt has an item")
    if patience is not None and not (is_integer(patience) and patience > 0):
        raise ValueError(f"patience={patience!r}, expected 1 or more losses")
    if patience is not None and validation is None:
        raise ValueError(f"patience={patience} without validation=, expected histories to validate on: pass them")
    is_resumed = bool(arguments.get("resume_from_checkpoint"))
    if output_dir is not None and Path(output_dir, JSON_FILE).exists() and not (overwrite or is_resumed):
        raise ValueError(
            f"output_dir={str(output_dir)!r} has a finished recommender, expected none: pass overwrite=True"
        )
    if hasattr(model, "peft_config") and not hasattr(model, "merge_and_unload"):
        raise ValueError(
            "model has an adapter that cannot be merged, expected one of weights, such as LoRA, by peft.get_peft_model"
        )
    how = {"window": max_items + 1, "splits": model is not None and base_model(model).config.is_encoder_decoder}
    windows = HistoryWindows(histories, items, seed=seed, **how)
    asked = None if validation is None else LastItems(validation, items, **how)
    given = _arguments(arguments, validated=asked is not None)
    if model is None:
        model = small_recommender(items, max_items=max_items, seed=seed)
    _check_model(model, windows, max_items)
    learn_code_book(base_model(model), items if isinstance(items, SemanticIds) else None, argument="items")
    with nullcontext(output_dir) if output_dir is not None else tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=str(folder), seed=seed, remove_unused_columns=False, **given)
        trainer = LossTrainer(
            model=model,
            args=args,
            train_dataset=windows,
            eval_dataset=asked,
            data_collator=lambda rows: pad_batch(rows, pad_token_id=pad_token(model)),
            callbacks=list(callbacks),
        )
        if trainer.is_fsdp_enabled and output_dir is None:
            raise ValueError("output_dir=None with FSDP, expected a folder: no process has the whole model at the end")
        trainer.remove_callback(PrinterCallback)
        if asked is not None:
            trainer.add_callback(EarlyStoppingCallback(PATIENCE if patience is None else patience))
        with ExitStack() as bars:
            trainer.add_callback(_Progress(bars, is_shown=progress and args.process_index == 0))
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        whole = model.merge_and_unload() if hasattr(model, "peft_config") else base_model(trainer.model)
        trained = enable(whole.eval())
        if output_dir is not None:
            is_named = isinstance(items, SemanticIds)
            index = items.constraint_index() if is_named else ConstraintIndex.from_sequences(windows.tokens)
            _save(trainer, trained, [index, *[items] * is_named], folder)
    return trained


class _Progress(TrainerCallback):
    """Shows every step, and a line for every loss of validation."""

    def __init__(self, bars: ExitStack, *, is_shown: bool) -> None:
        self.bars, self.is_shown, self.loss = bars, is_shown, math.nan

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        bar = progress_bar("Training", lambda: state.max_steps, unit="steps", shown=self.is_shown)
        self.advance = self.bars.enter_context(bar)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.loss = float((logs or {}).get("loss", self.loss))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.advance(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self.is_shown:
            losses = {"loss": self.loss, "validation loss": metrics["eval_loss"]}
            told = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if not math.isnan(loss))
            logger.info("step %s of %s: %s", f"{state.global_step:,}", f"{state.max_steps:,}", told)


def _arguments(given: dict[str, Any], *, validated: bool) -> dict[str, Any]:
    """The recipe, with the given arguments in its place."""
    if unknown := sorted(given.keys() - {field.name for field in fields(TrainingArguments) if field.init}):
        raise ValueError(
            f"{unknown[0]}={given[unknown[0]]!r}, expected an argument of train_recommender or of transformers' "
            "TrainingArguments"
        )
    # Several processes on CPUs: transformers' own default would take each for the only one.
    recipe = RECIPE | {"use_cpu": not torch.accelerator.is_available()}
    if validated:
        recipe |= {"eval_strategy": "steps", "eval_steps": 0.05, "per_device_eval_batch_size": 256}
        recipe |= {"save_strategy": given.get("eval_strategy", "steps"), "save_steps": given.get("eval_steps", 0.05)}
        recipe |= {"save_total_limit": 1, "load_best_model_at_end": True}
    if "num_train_epochs" in given:
        del recipe["max_steps"]
    return recipe | given


def _save(trainer: LossTrainer, trained: Any, beside: Sequence[Any], folder: Any) -> None:
    """The model; and beside it its semantic IDs and its catalogue, which the model's generation config names."""
    trained.generation_config.constraint_index = "."
    if trainer.is_fsdp_enabled:
        trainer.save_model()  # gathers the pieces
    elif trainer.args.should_save:
        trained.save_pretrained(folder)
    if trainer.args.should_save:
        for one in beside:
            one.save_pretrained(folder)
    trainer.accelerator.wait_for_everyone()  # all processes find the folder complete
    trained.config.name_or_path = str(folder)  # where "." finds the catalogue


def _check_model(model: Any, windows: HistoryWindows, max_items: int) -> None:
    config = base_model(model).config
    rows = base_model(model).get_input_embeddings().num_embeddings
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        raise ValueError(
            "model.config.decoder_start_token_id is None, expected the first token of what it writes, such as "
            "pad_token_id: set it"
        )
    if windows.tokens.max() >= rows:
        raise ValueError(
            f"model has embeddings of {rows} tokens, expected more than the items' largest, {windows.tokens.max()}: "
            "SemanticIds.from_tokenizer(codes, tokenizer, model=model) adds tokens and resizes them"
        )
    needed, limit = (max_items + 1) * windows.tokens.shape[1], position_limit(config)
    if limit is not None and limit < needed:
        raise ValueError(
            f"max_items={max_items} needs {needed} positions with the item that follows, expected at most {limit}, "
            "the model's max_position_embeddings: lower it"
        )
