# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`train_recommender`: a small decoder that reads histories as semantic-ID tokens, from nothing. Knows no draft.

A history is the concatenated tokens of its items; a decoder learns to predict every next token of a window of it, an
encoder-decoder to write the items that follow a part of it, by transformers' own Trainer and the model's own loss.
Source: TIGER, section 3.2.

Axes: U users, I items of all histories, N items of the catalogue, L tokens of an item, B batch, P tokens of a window.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, TrainingArguments, set_seed

from hf_gr.catalogue import ConstraintIndex, SemanticIds
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.trie import PADDING
from hf_gr.files.progress import progress_bar
from hf_gr.generation.models import position_limit
from hf_gr.generation.torch.loading import enable
from hf_gr.generation.torch.models import base_model

from .base import LossTrainer
from .interactions import flat_histories
from .packing import pad_token

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

AHEAD = 5  # items that an encoder-decoder learns to write after a prompt
BLOCKS = ("self_attn", "attn", "attention", "mlp")  # what transformers' decoders call the blocks of a layer
Report = Callable[[float, float], None]


def small_recommender(
    items: SemanticIds | Any,
    *,
    max_items: int = 10,
    hidden_size: int = 128,
    intermediate_size: int | None = None,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    seed: int = 0,
) -> Any:
    """A small Qwen3 with random weights, whose vocabulary is the tokens of items and padding.

    Args:
        items: semantic IDs, or the `[N, L]` tokens of items that are numbered from 0.
        max_items: the most items of a prompt.
        hidden_size: its width, a multiple of `num_attention_heads`.
        intermediate_size: the width of its feed-forward blocks, by default twice `hidden_size`.
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
        intermediate_size=2 * hidden_size if intermediate_size is None else intermediate_size,
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
    patience: int = 5,
    dropout: float = 0.0,
    jitter: float = 0.0,
    masked_items: float = 0.0,
    max_seconds: float | None = None,
    output_dir: Any = None,
    seed: int = 0,
    progress: bool = True,
    on_progress: Report | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **arguments: Any,
) -> Any:
    """Train a recommender on histories: a small one from nothing, or any model that has the items' tokens.

    Hold out what you evaluate with: histories without each user's last item. Under a launcher of several processes
    (`accelerate launch`, `python -m torch.distributed.run`), call it in every one: each trains on its own part of
    every batch, and has the whole model afterwards (with FSDP, only `output_dir` has it).

    Args:
        histories: a list of items per user, oldest first; or a dictionary of them, as `read_histories` returns. Those
            of one item teach only its own tokens.
        items: semantic IDs, whose item ids the histories contain; or the `[N, L]` tokens of items that are numbered
            from 0. All have the same number of tokens.
        model: a model to train on, such as yesterday's; by default `small_recommender(items, max_items=max_items)`. An
            encoder-decoder reads the first items of a window, up to a random place, and writes those that follow, five
            at most, so that a step teaches more than one item.
        max_items: the most items of a prompt; a window of training has one more.
        validation: histories whose last item is predicted from those before, such as those of training with the item
            that followed. The loss is taken after every twentieth of the training (`eval_steps`), and the weights with
            the least are returned.
        patience: end the training after as many losses in a row that are no better; needs `validation`.
        dropout: the share of activations that are zeroed in training, of the embeddings and of what each attention and
            feed-forward block adds: Qwen3 and Llama have none of their own. 0.1 to 0.3 where histories are few.
        jitter: items of a training window swap places up to about this many apart, drawn anew in every epoch: what was
            bought together has hardly an order.
        masked_items: the share of a training window's items that the model does not see, but must predict.
        max_seconds: stop after this time, with a complete schedule of learning rates; in one process only.
        output_dir: a folder for the trained model and its catalogue, which the model's generation config names: all
            that `hf-gr serve` and `hf_gr.recommend` need. Checkpoints go there, too (`save_strategy=`).
        seed: of the new model, and of the windows and their order.
        progress: show a bar, in terminals and notebooks; lines in logs.
        on_progress: called after every step with the share of the training that is done and the latest loss.
        callbacks: transformers' own.
        arguments: transformers' `TrainingArguments` in place of the recipe's: 1,600 steps (`max_steps`) of 64 windows
            (`per_device_train_batch_size`), AdamW with `learning_rate=5e-3`, a warm-up of 50 steps, then a cosine;
            `num_train_epochs`, `bf16`, `gradient_accumulation_steps`, `resume_from_checkpoint`, ...

    Returns:
        The model in evaluation mode, with hf_gr's `generate`.

    Raises:
        ValueError: before any work: an item without tokens, items of different lengths, no history; a model whose
            vocabulary or positions are too few; an unknown argument; a clock for several processes; FSDP without
            `output_dir`.

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
    for name, share in {"dropout": dropout, "masked_items": masked_items}.items():
        if not 0 <= share < 1:
            raise ValueError(f"{name}={share}, expected a share from 0 to below 1")
    if jitter < 0 or patience < 1:
        raise ValueError(f"jitter={jitter}, patience={patience}, expected 0 or more, and 1 or more")
    splits = model is not None and base_model(model).config.is_encoder_decoder
    windows = HistoryWindows(
        histories, items, window=max_items + 1, seed=seed, jitter=jitter, masked=masked_items, splits=splits
    )
    asked = None if validation is None else LastItems(validation, items, window=max_items + 1, splits=splits)
    given = _arguments(arguments, max_seconds, validated=asked is not None)
    if model is None:
        model = small_recommender(items, max_items=max_items, seed=seed)
    _check_model(model, windows, max_items)
    with nullcontext(output_dir) if output_dir is not None else tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=str(folder), seed=seed, remove_unused_columns=False, **given)
        if args.world_size > 1 and max_seconds is not None:
            raise ValueError(
                f"max_seconds={max_seconds} in {args.world_size} processes, expected None: their clocks would end "
                "them at different steps; set max_steps"
            )
        trainer = _RecommenderTrainer(
            model=model,
            args=args,
            train_dataset=windows,
            eval_dataset=asked,
            data_collator=lambda rows: pad_rows(rows, pad_token_id=pad_token(model)),
            callbacks=list(callbacks),
            max_seconds=max_seconds,
        )
        if trainer.is_fsdp_enabled and output_dir is None:
            raise ValueError("output_dir=None with FSDP, expected a folder: no process has the whole model at the end")
        if trainer.is_fsdp_enabled and asked is not None:
            raise ValueError(
                "validation= with FSDP, expected None: no process has the whole model to keep the best of"
            )
        trainer.remove_callback(PrinterCallback)
        with progress_bar(
            "Training", lambda: 100, unit="%", shown=progress and on_progress is None and args.process_index == 0
        ) as advance:
            trainer.add_callback(_Progress(trainer, on_progress or _in_percent(advance)))
            if asked is not None:
                trainer.add_callback(_KeepBest(base_model(model), patience))
            with _dropped(base_model(model), dropout):
                trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trained = enable(base_model(trainer.model).eval())
        if output_dir is not None:
            index = _index_of(items, windows.tokens)
            trained.generation_config.constraint_index = "."
            if trainer.is_fsdp_enabled:
                trainer.save_model()  # gathers the pieces
            elif args.should_save:
                trained.save_pretrained(folder)
            if args.should_save:
                index.save_pretrained(folder)
            trainer.accelerator.wait_for_everyone()  # all processes find the folder complete
            trained.config.name_or_path = str(folder)  # where "." finds the catalogue
    return trained


class HistoryWindows(Dataset):
    """Windows of histories, drawn anew in every epoch; the same for a seed, whoever reads them and in what order.

    A history of n items gives n / window windows per epoch. They start at random positions, so that over the epochs
    every item is predicted from contexts of every length. Windows that would cross an end of the history are moved to
    it, so that the first and the last items occur as often as the others.

    Args:
        histories: lists of items, oldest first.
        items: as for `train_recommender`.
        window: items of a window.
        seed: of the windows' starts, and of the noise.
        jitter: the standard deviation of what is added to items' places before they are sorted by it.
        masked: the share of items that are not seen.
        splits: for an encoder-decoder: a window's first items are the prompt, up to a random place, and the `AHEAD`
            that follow the labels. Histories of one item teach nothing.
    """

    def __init__(
        self,
        histories: Iterable[Iterable[ItemId]],
        items: SemanticIds | Any,
        *,
        window: int,
        seed: int,
        jitter: float = 0.0,
        masked: float = 0.0,
        splits: bool = False,
    ) -> None:
        self.rows, self.bounds, self.tokens = flat_histories(histories, items)
        if (self.tokens == PADDING).any():
            short = int((self.tokens == PADDING).any(axis=1).argmax())
            raise ValueError(
                f"items: row {short} has fewer tokens than others, expected as many for all: a prompt of items that "
                "differ in length needs an end token after each; give short ones a last code of their own"
            )
        if not len(self.rows):
            raise ValueError("histories has no item, expected a history with two or more")
        self.window, self.seed, self.epoch = window, seed, 0
        self.jitter, self.masked, self.splits = jitter, masked, splits
        counts = -(-np.diff(self.bounds) // window)
        if splits:
            counts[np.diff(self.bounds) < 2] = 0
            if not counts.any():
                raise ValueError(
                    "histories has no history of two items or more, expected one: the first is the prompt"
                )
        self.owners = np.repeat(np.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self.owners)

    def set_epoch(self, epoch: int) -> None:
        """Other windows; the Trainer calls it."""
        self.epoch = epoch

    def items_of(self, number: int) -> np.ndarray:
        """The rows of a window's items."""
        return self._draw(number)[0]

    def _draw(self, number: int) -> tuple[np.ndarray, np.ndarray, int]:
        """A window's items, which of them are not seen, and how many are the prompt of an encoder-decoder."""
        begin, end = self.bounds[self.owners[number]], self.bounds[self.owners[number] + 1]
        draw = np.random.default_rng([self.seed, self.epoch, number])
        at = int(draw.integers(end - begin)) - self.window // 2
        start = begin + max(0, min(at, int(end - begin) - self.window))
        items = self.rows[start : min(start + self.window, end)]
        if self.jitter:
            items = items[np.argsort(np.arange(len(items)) + draw.normal(0, self.jitter, len(items)), kind="stable")]
        unseen = draw.random(len(items)) < self.masked
        return items, unseen, int(draw.integers(1, len(items))) if self.splits else len(items)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if not 0 <= number < len(self):
            raise IndexError(f"{number} is out of range for {len(self)} windows")
        items, unseen, place = self._draw(number)
        row = {"input_ids": self.tokens[items[:place]].ravel()}
        if self.splits:
            row["labels"] = self.tokens[items[place : place + AHEAD]].ravel().astype(np.int64)
        return row | {"unseen": unseen[:place].repeat(self.tokens.shape[1])} if self.masked else row

    @property
    def lengths(self) -> np.ndarray:
        """`[windows]` tokens, for sampling by length."""
        sizes = np.diff(self.bounds)[self.owners]
        return np.minimum(sizes, self.window) * self.tokens.shape[1]


class LastItems(Dataset):
    """The last item of each history, with the items before it: what is asked of a recommender in use.

    Args:
        histories: lists of items, oldest first; those of one item are omitted.
        items: as for `train_recommender`.
        window: the most items, the last one included.
        splits: the last item alone is the labels, as for an encoder-decoder.

    Example:
        >>> asked = LastItems([[0, 1], [1]], [[5, 6], [5, 7]], window=3)
        >>> [{name: tokens.tolist() for name, tokens in row.items()} for row in asked]
        [{'input_ids': [5, 6, 5, 7], 'labels': [-100, -100, 5, 7]}]
    """

    def __init__(
        self, histories: Iterable[Iterable[ItemId]], items: SemanticIds | Any, *, window: int, splits: bool = False
    ) -> None:
        self.splits = splits
        rows, bounds, self.tokens = flat_histories(histories, items)
        pairs = zip(bounds[:-1], bounds[1:], strict=True)
        self.histories = [rows[max(begin, end - window) : end] for begin, end in pairs if end - begin > 1]
        if not self.histories:
            raise ValueError(
                "validation has no history of two items or more, expected one: its last item is predicted"
            )

    def __len__(self) -> int:
        return len(self.histories)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        tokens = self.tokens[self.histories[number]].ravel().astype(np.int64)
        is_last = np.arange(len(tokens)) >= len(tokens) - self.tokens.shape[1]
        if self.splits:
            return {"input_ids": tokens[~is_last], "labels": tokens[is_last]}
        return {"input_ids": tokens, "labels": np.where(is_last, tokens, -100)}

    @property
    def lengths(self) -> np.ndarray:
        """`[histories]` tokens, for batches by length."""
        return np.array([len(history) for history in self.histories]) * self.tokens.shape[1]


def pad_rows(rows: Sequence[dict[str, np.ndarray]], *, pad_token_id: int) -> dict[str, Tensor]:
    """Rows of `HistoryWindows` or `LastItems` as a batch: unseen tokens are replaced by padding, yet attended to."""
    batch = pad_batch([row["input_ids"] for row in rows], pad_token_id=pad_token_id)
    for ids, row in zip(batch["input_ids"], rows, strict=True):
        if "unseen" in row:
            ids[: len(row["unseen"])].masked_fill_(torch.from_numpy(row["unseen"]), pad_token_id)
    if "labels" in rows[0]:
        labels = [torch.from_numpy(row["labels"]) for row in rows]
        batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
    return batch


def pad_batch(rows: Sequence[np.ndarray], *, pad_token_id: int) -> dict[str, Tensor]:
    """Token rows of any length as a right-padded training batch; padding is neither seen nor predicted."""
    tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
    input_ids = pad_sequence(tensors, batch_first=True, padding_value=pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    is_token = torch.arange(input_ids.shape[1]) < lengths[:, None]
    return {
        "input_ids": input_ids,
        "attention_mask": is_token.long(),
        "labels": input_ids.masked_fill(~is_token, -100),
    }


class Schedule:
    """Progress of a training: by steps, or by the clock if that runs out first.

    The learning rate follows whichever is further, so a slow machine gets a shorter but complete schedule, not the
    first part of a longer one.
    """

    def __init__(self, max_seconds: float, *, warmup_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_seconds, self.warmup_steps, self.clock = max_seconds, warmup_steps, clock
        self.start = clock()

    def fraction_at(self, step: int, max_steps: int) -> float:
        """The share of the training that is done, 0 to 1."""
        return min(1.0, max(step / max_steps, (self.clock() - self.start) / self.max_seconds))

    def learning_rate_at(self, step: int, max_steps: int) -> float:
        """The share of the largest learning rate: a warm-up, then half a cosine."""
        warm_up = min(1.0, (step + 1) / max(1, min(self.warmup_steps, max_steps)))
        return warm_up * 0.5 * (1 + math.cos(math.pi * self.fraction_at(step, max_steps)))


class _RecommenderTrainer(LossTrainer):
    """transformers' Trainer with the model's own loss, batches by length, and a clock that may end it."""

    def __init__(self, *args: Any, max_seconds: float | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_seconds = max_seconds
        self.schedule: Schedule | None = None

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return model(**inputs, use_cache=False).loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """transformers' own, or one that follows the clock."""
        if self.max_seconds is None:
            return super().create_scheduler(num_training_steps, optimizer)
        schedule = Schedule(self.max_seconds, warmup_steps=int(self.args.warmup_steps))
        self.schedule = schedule
        steps: Any = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            steps, lambda step: schedule.learning_rate_at(step, num_training_steps)
        )
        return self.lr_scheduler


class _KeepBest(TrainerCallback):
    """Keeps the weights with the least validation loss, and ends a training that gets no better."""

    def __init__(self, model: Any, patience: int) -> None:
        self.model, self.patience = model, patience
        self.least, self.since = math.inf, 0
        self.weights: dict[str, Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps or control.should_training_stop:
            control.should_evaluate = True  # the last weights may be the best

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.since += 1
        if metrics["eval_loss"] < self.least:
            self.least, self.since = metrics["eval_loss"], 0
            self.weights = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        if self.since >= self.patience:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.weights:
            self.model.load_state_dict(self.weights)


@contextmanager
def _dropped(model: Any, share: float) -> Iterator[None]:
    """Zero a share of what the embeddings and the blocks of every layer give, while the model is in training mode."""

    def drop(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # attention: its weights follow
            return (drop(module, inputs, output[0]), *output[1:])
        return torch.nn.functional.dropout(output, share, training=module.training)

    blocks = [module for name, module in model.named_modules() if name.rpartition(".")[2] in BLOCKS]
    if share and not blocks:
        raise ValueError(
            f"dropout={share} for a {type(model).__name__}, expected 0: it has no blocks called {' or '.join(BLOCKS)}"
        )
    hooks = [block.register_forward_hook(drop) for block in (model.get_input_embeddings(), *blocks) if share]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Progress(TrainerCallback):
    """Reports every step, and ends the training when the clock does."""

    def __init__(self, trainer: _RecommenderTrainer, report: Report) -> None:
        self.trainer, self.report = trainer, report
        self.loss = math.nan

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.loss = float((logs or {}).get("loss", self.loss))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        fraction = min(1.0, state.global_step / state.max_steps)
        if self.trainer.schedule is not None:
            fraction = self.trainer.schedule.fraction_at(state.global_step, state.max_steps)
            if fraction >= 1.0:
                control.should_training_stop = True
        self.report(fraction, self.loss)


def _in_percent(advance: Callable[[int], None]) -> Report:
    shown = 0

    def report(fraction: float, loss: float) -> None:
        nonlocal shown
        if (now := int(100 * fraction)) > shown:
            advance(now - shown)
            shown = now

    return report


def _arguments(given: dict[str, Any], max_seconds: float | None, *, validated: bool) -> dict[str, Any]:
    """The recipe, with what was given in its place."""
    known = {field.name for field in fields(TrainingArguments) if field.init}
    if unknown := sorted(given.keys() - known):
        own = signature(train_recommender).parameters.keys() - {"arguments"}
        close = get_close_matches(unknown[0], sorted(own | known), n=1)
        raise ValueError(
            f"{unknown[0]}={given[unknown[0]]!r}, expected an argument of transformers' TrainingArguments"
            + (f": did you mean {close[0]}=?" if close else "")
        )
    if max_seconds is not None and not max_seconds > 0:
        raise ValueError(f"max_seconds={max_seconds}, expected more than 0, or None for no clock")
    # Several processes on CPUs: transformers' own default would take each for the only one.
    recipe = RECIPE | {"use_cpu": not torch.accelerator.is_available()}
    if validated:
        recipe |= {"eval_strategy": "steps", "eval_steps": 0.05, "per_device_eval_batch_size": 256}
    if "num_train_epochs" in given:
        del recipe["max_steps"]
    return recipe | given


def _check_model(model: Any, windows: HistoryWindows, max_items: int) -> None:
    config = base_model(model).config
    rows = base_model(model).get_input_embeddings().num_embeddings
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


def _index_of(items: SemanticIds | Any, tokens: np.ndarray) -> ConstraintIndex:
    if isinstance(items, SemanticIds):
        return items.constraint_index()
    return ConstraintIndex.from_sequences(tokens)
