# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""NEZHA on Amazon Beauty: a draft head against beam search by the same backbone, a small model that one core trains.

The backbone is a plain Qwen3 over semantic IDs, trained in two parts:

- the catalogue: rows of random items, until the model knows which codes follow which. From histories alone it learns
  that last: after 900 steps on them its loss per item was still above that of item frequencies alone. Items that
  nobody bought in the training period are included, as in the constraint;
- histories of the period train: every next token of a window, with some rows of random items in every step. The
  weights that are best on next items of the period valid are kept.

Heads are added to it and trained with it (paper, algorithm 3) on pairs of a history and the item that followed, all
with the same number of steps and the same settings: NEZHA, independent heads (MTP) and the paper's ablations 1 to 3.
Before that, each learns the catalogue from hidden states of the backbone, which the paper does not do. One more head
is trained alone; its backbone is frozen, so that the model can verify what the head drafts. As a control for the extra
training, the backbone alone is also trained further, for as many steps on the same pairs.

Every item of a period is a row to evaluate: at most 20 items before it form the prompt, including those of earlier
rows. Ten items are recommended. H@k is the share of rows with their item among the first k, N@k is the NDCG; a
sequence that is no item keeps its place in the list. Items of the history are not filtered out. Two bounds are printed
beside the backbone: the most popular items, and the items most often bought near those of the history. Unconstrained
beam search is transformers' own, which computes the prompt once per beam and is slow: it runs on some rows only.

Times are of alternating calls, paired: "prefill" is everything up to the end of the first forward, including
transformers' preparation of a call; "decode" is what follows. The bare prefill is the backbone's forward over the
prompt and nothing else.

What to expect: with 500 steps (a third of the pairs) NEZHA reaches 86% of beam search's H@10 at 10 beams and 72% at
50; 94% and 86% where the backbone is trained further as well. One more head, with 1,500 steps, reaches 96% and 104%.
Intervals are some 15% to either side, as one row in a hundred is a hit. Self-speculation scores hundreds of nodes per
row at once, which costs a CPU more than it saves; at 50 beams it is compared on 1,000 rows.

Stages keep their results in the folder `--work` and resume from there. To redo something, remove it there, together
with what follows from it. Nothing from the periods valid and test is trained on.

    python examples/benchmark/nezha.py                    # an hour on one core
    python examples/benchmark/nezha.py --stage backbone   # stop after a stage: a quarter of an hour
    python examples/benchmark/nezha.py --fast             # half a minute: the method, not the numbers
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beauty_data import DEFAULT_DATA, FILES, is_there, read_items, read_users
from report import environment, print_table
from speculation_models import (
    TrainSettings,
    build_model,
    load,
    make_once,
    run_trainer,
    show_progress,
    training_arguments,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, Qwen3ForCausalLM, Trainer, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, SemanticIds, enable
from hf_gr.demo.evaluate import make_prompts, same_answers
from hf_gr.training import DraftHeadCollator, DraftHeadTrainer, InteractionDataset
from hf_gr.training.packing import pad_prompts
from hf_gr.training.recommender import HistoryWindows, pad_batch

WORK = Path("~/.cache/hf_gr/nezha")
STAGES = ("backbone", "heads", "measure")
PERIODS = ("valid", "test")
WINDOW = 20  # items of a history that the model sees
SPARE_ITEMS = 2  # positions after a history: the item that follows, and as many again
METRICS = ("H@5", "H@10", "N@5", "N@10")
LIST_LENGTH = 10  # items recommended per row
NO_ITEM = -1  # stands for a sequence that is no item
# Arguments of `add_draft_head`.
VARIANTS: dict[str, dict[str, Any]] = {
    "nezha": {},
    "mtp": {"use_placeholders": False, "transition": "none"},
    "nezha-1": {"use_state": False, "transition": "none"},
    "nezha-2": {"use_placeholders": False},
    "nezha-3": {"transition": "add"},
}
ALONE, LONGER, CONTINUED = "nezha-alone", "nezha-longer", "backbone-continued"
LONGER_BY = 3


@dataclass(frozen=True)
class BackboneSettings:
    """How the backbone is built and trained.

    Attributes:
        model: Its size; the numbers of steps and the learning rate in it are those of the histories.
        catalogue_steps: Steps on rows of random items, before those on histories.
        catalogue_rows: Rows of such a step, of `catalogue_items` items each.
        catalogue_items: Items of a row.
        catalogue_learning_rate: The largest learning rate of these steps.
        weight_decay: Of matrices, in both parts.
        attention_dropout: On histories only.
        hidden_tokens: Share of the input tokens of histories that the model does not see, but must still predict.
        jitter: Items of a history swap with others up to about this many places away, drawn again for every window.
        mixed_rows: Rows of random items added to a step on histories, as long as its longest, so that the catalogue is
            not forgotten. Their items' first tokens do not count: they are unpredictable.
        check_steps: After this many steps on histories, the loss on next items is compared with the best so far.
        check_rows: Rows of the period valid for that.
    """

    model: TrainSettings
    catalogue_steps: int
    catalogue_rows: int = 128
    catalogue_items: int = 4
    catalogue_learning_rate: float = 6e-3
    weight_decay: float = 0.1
    attention_dropout: float = 0.0
    hidden_tokens: float = 0.0
    jitter: float = 0.0
    mixed_rows: int = 0
    check_steps: int = 400
    check_rows: int = 2000


BACKBONE = BackboneSettings(
    model=TrainSettings(
        hidden_size=128,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        window=WINDOW,
        batch_size=32,
        num_steps=2400,
        learning_rate=2.5e-3,
    ),
    catalogue_steps=600,
    jitter=3.0,
    mixed_rows=8,
)
TINY = BackboneSettings(
    model=replace(BACKBONE.model, hidden_size=32, intermediate_size=64, num_heads=2, num_steps=10),
    catalogue_steps=10,
    hidden_tokens=0.1,
    jitter=3.0,
    mixed_rows=2,
    check_steps=5,
    check_rows=64,
)


@dataclass(frozen=True)
class HeadSettings:
    """How heads are trained, the same for all of them.

    Attributes:
        num_steps: Steps on pairs of a history and the item that followed.
        batch_size: Pairs of a step.
        learning_rate: The largest, of the backbone; also of its own further training.
        embedding_lr: Of the head's embeddings, as a multiple.
        transition_lr: Of its transitions.
        logit_lr: Of its logit heads.
        warm_start: Its logit heads and embeddings start as the backbone's rows of the same codes.
        catalogue_steps: Steps before, on random items after hidden states of random histories, for the head alone.
        catalogue_rows: Items of such a step.
        catalogue_learning_rate: The largest of these steps.
        seeds: Of the head's initial weights and of the order of the pairs; only NEZHA uses those after the first.
    """

    num_steps: int
    batch_size: int = 64
    learning_rate: float = 3e-4
    embedding_lr: float = 10.0
    transition_lr: float = 10.0
    logit_lr: float = 10.0
    warm_start: bool = True
    catalogue_steps: int = 1500
    catalogue_rows: int = 256
    catalogue_learning_rate: float = 5e-3
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    backbone: BackboneSettings
    heads: HeadSettings
    num_beams: tuple[int, ...] = (10, 50)
    users: int | None = None
    rows: int | None = None  # of a period
    unconstrained_rows: int = 500
    strict_rows: tuple[int | None, ...] = (None, 1000)  # by the number of beams
    timed: tuple[tuple[int, int], ...] = ((1, 40), (32, 5))  # rows of a batch, and batches


FULL = Scale(backbone=BACKBONE, heads=HeadSettings(num_steps=500))
FAST = Scale(
    backbone=TINY,
    heads=HeadSettings(num_steps=4, batch_size=8, catalogue_steps=4, seeds=(0, 1)),
    num_beams=(10, 12),
    users=500,
    rows=32,
    unconstrained_rows=8,
    timed=((1, 2), (4, 2)),
)


@dataclass(frozen=True)
class Row:
    """One item to recommend, and what its user bought before it: at most `WINDOW` items, oldest first."""

    history: np.ndarray
    item: int


@dataclass(frozen=True)
class Data:
    """The catalogue, histories to train on, and rows to evaluate: items are numbered from 0."""

    ids: SemanticIds
    tokens: np.ndarray  # [N, L]
    index: ConstraintIndex
    histories: list[np.ndarray]  # train
    rows: dict[str, list[Row]]  # of a period

    @property
    def pad_token_id(self) -> int:
        return int(self.tokens.max()) + 1


def read_data(data: Path, *, num_users: int | None = None, num_rows: int | None = None) -> Data:
    item_ids, codes = read_items(data)
    if item_ids != list(range(len(codes))):
        raise SystemExit(f"the items of {data / 'items.tsv'} are not numbered 0, 1, 2, ...: number them as their rows")
    users = read_users(data)[:num_users]
    ids = SemanticIds(codes, level_sizes=[256] * codes.shape[1])
    return Data(
        ids=ids,
        tokens=ids.token_sequences(),
        index=ids.constraint_index(),
        histories=[np.array(user["train"]) for user in users if user["train"]],
        rows={period: some_of(read_rows(users, period), num_rows) for period in PERIODS},
    )


def read_rows(users: Sequence[dict[str, Any]], period: str) -> list[Row]:
    """Every item of a period with everything its user bought before it. An item with nothing before it is skipped."""
    rows = []
    for user in users:
        before = [*user["train"], *(user["valid"] if period == "test" else [])]
        purchases = [*before, *user[period]]
        for place in range(max(1, len(before)), len(purchases)):
            rows.append(Row(np.array(purchases[max(0, place - WINDOW) : place]), purchases[place]))
    return rows


def some_of(rows: list[Row], count: int | None) -> list[Row]:
    order = np.random.default_rng(1).permutation(len(rows))[:count]
    return [rows[number] for number in order]


def batches_of(rows: Sequence[Row], size: int) -> Iterator[list[int]]:
    """Row numbers, grouped by similar history lengths."""
    order = sorted(range(len(rows)), key=lambda number: len(rows[number].history))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def prompts_of(rows: Sequence[Row], data: Data) -> dict[str, Tensor]:
    """Left-padded `input_ids` and `attention_mask`."""
    histories = [row.history for row in rows]
    return make_prompts(histories, data.tokens, num_films=WINDOW, pad_token_id=data.pad_token_id)


# ---------------------------------------------------------------------------------------------------------- training


@dataclass
class Batch:
    """Right-padded rows. What a row must not see of itself is hidden in the input, not in the labels."""

    input_ids: Tensor
    labels: Tensor


def catalogue_batches(data: Data, settings: BackboneSettings) -> Iterator[Batch]:
    """Rows of random items; every pass has each item once, except a last partial batch."""
    rng = np.random.default_rng(0)
    size = min(settings.catalogue_rows * settings.catalogue_items, len(data.tokens))
    size -= size % settings.catalogue_items
    while True:
        order = rng.permutation(len(data.tokens))
        for start in range(0, len(order) - size + 1, size):
            tokens = data.tokens[order[start : start + size]].reshape(size // settings.catalogue_items, -1)
            yield Batch(torch.from_numpy(tokens), torch.from_numpy(tokens))


def history_batches(data: Data, settings: BackboneSettings) -> Iterator[Batch]:
    """Windows of histories, grouped by similar lengths: less padding, three times faster."""
    rng = np.random.default_rng(0)
    window, size = settings.model.window, settings.model.batch_size
    windows = HistoryWindows(data.histories, data.tokens, window=window, seed=0)
    lengths = windows.lengths
    for epoch in count():
        windows.set_epoch(epoch)
        numbers = rng.permutation(len(windows))
        numbers = numbers[np.argsort(lengths[numbers], kind="stable")]
        batches = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        for place in rng.permutation(len(batches)):
            items = [shuffle_nearby(windows.items_of(int(number)), settings.jitter, rng) for number in batches[place]]
            longest = max(map(len, items))
            items += list(rng.integers(len(data.tokens), size=(settings.mixed_rows, longest)))
            batch = pad_batch([data.tokens[row].ravel() for row in items], pad_token_id=data.pad_token_id)
            batch["labels"][len(batches[place]) :, :: data.tokens.shape[1]] = -100
            hidden = torch.from_numpy(rng.random(tuple(batch["input_ids"].shape)) < settings.hidden_tokens)
            yield Batch(batch["input_ids"].masked_fill(hidden, data.pad_token_id), batch["labels"])


def shuffle_nearby(items: np.ndarray, jitter: float, rng: np.random.Generator) -> np.ndarray:
    return items[np.argsort(np.arange(len(items)) + rng.uniform(0, jitter, len(items)), kind="stable")]


def fit(
    model: Qwen3ForCausalLM,
    batches: Iterator[Batch],
    *,
    name: str,
    num_steps: int,
    learning_rate: float,
    weight_decay: float,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """AdamW with a warm-up of 100 steps, then half a cosine. Only tokens that count go through the head."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))
    warm_up = min(100, max(1, num_steps // 5))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
    )
    start, losses = time.perf_counter(), []
    model.train()
    for step in range(1, num_steps + 1):
        batch = next(batches)
        states = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state[:, :-1]
        labels = batch.labels[:, 1:]
        counted = labels != -100
        loss = F.cross_entropy(model.lm_head(states[counted]), labels[counted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0 or step == num_steps:
            passed = time.perf_counter() - start
            show_progress(f"{name}, step {step}: loss {np.mean(losses[-100:]):.3f}, {passed:.0f} s")
        on_step(step)
    model.eval()


class Best:
    """Keeps the weights with the smallest loss on next items."""

    def __init__(self, model: Qwen3ForCausalLM, data: Data, settings: BackboneSettings) -> None:
        self.model = model
        self.data = data
        self.settings = settings
        self.rows = data.rows["valid"][: settings.check_rows]
        self.loss = math.inf
        self.step = 0
        self.weights: dict[str, Tensor] = {}

    def check(self, step: int) -> None:
        if step % self.settings.check_steps and step != self.settings.model.num_steps:
            return
        self.model.eval()
        losses = next_item_loss(self.model, self.rows, self.data)
        self.model.train()
        show_progress(f"step {step}: next items of valid {losses.sum():.3f}, by level {losses.round(2).tolist()}")
        if losses.sum() < self.loss:
            self.loss, self.step = float(losses.sum()), step
            self.weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def restore(self) -> None:
        self.model.load_state_dict(self.weights)


@torch.inference_mode()
def next_item_loss(model: Qwen3ForCausalLM, rows: Sequence[Row], data: Data) -> np.ndarray:
    """`[L]` mean losses of a row's item, level by level."""
    num_levels = data.tokens.shape[1]
    total = np.zeros(num_levels)
    for numbers in batches_of(rows, 128):
        batch = [rows[number] for number in numbers]
        prompt = prompts_of(batch, data)
        labels = torch.from_numpy(data.tokens[[row.item for row in batch]])
        input_ids = torch.cat([prompt["input_ids"], labels[:, :-1]], dim=1)
        attention_mask = (input_ids != data.pad_token_id).long()
        logits = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=num_levels,
        ).logits
        total += F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").double().sum(0).numpy()
    return total / len(rows)


def train_backbone(folder: Path, data: Data, settings: BackboneSettings) -> None:
    """The catalogue first, then histories; the model goes to `folder`, with the log of its training."""
    start = time.perf_counter()
    size = replace(settings.model, window=settings.model.window + SPARE_ITEMS)
    model = build_model(data.tokens, size, seed=0)
    show_progress(f"backbone: {model.num_parameters() / 1e6:.2f} M parameters")
    fit(
        model,
        catalogue_batches(data, settings),
        name="catalogue",
        num_steps=settings.catalogue_steps,
        learning_rate=settings.catalogue_learning_rate,
        weight_decay=settings.weight_decay,
    )
    set_attention_dropout(model, settings.attention_dropout)
    best = Best(model, data, settings)
    fit(
        model,
        history_batches(data, settings),
        name="histories",
        num_steps=settings.model.num_steps,
        learning_rate=settings.model.learning_rate,
        weight_decay=settings.weight_decay,
        on_step=best.check,
    )
    best.restore()
    model.save_pretrained(folder)
    log = {
        "parameters": model.num_parameters(),
        "best_step": best.step,
        "valid_loss": best.loss,
        "seconds": time.perf_counter() - start,
        "settings": asdict(settings),
    }
    (folder / "training.json").write_text(json.dumps(log), encoding="utf-8")


def set_attention_dropout(model: Qwen3ForCausalLM, share: float) -> None:
    model.config.attention_dropout = share
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = share


# ------------------------------------------------------------------------------------------------------------- heads


def train_head(
    folder: Path,
    backbone: Path,
    data: Data,
    settings: HeadSettings,
    *,
    options: dict[str, Any],
    train_backbone: bool = True,
    seed: int = 0,
) -> None:
    """A head for the backbone, trained with it or alone; both go to `folder`."""
    model = load(backbone)
    set_seed(seed)
    model.add_draft_head(data.ids, **options)
    if settings.warm_start:
        start_from_backbone(model)
    pairs = pairs_of(data)
    start = time.perf_counter()
    loss = learn_catalogue(model, pairs, data, settings)
    show_progress(f"catalogue: loss {loss:.3f} a level after the first, {time.perf_counter() - start:.0f} s")
    trainer = DraftHeadTrainer(
        model=model,
        args=head_arguments(folder, settings, learning_rate=settings.learning_rate, seed=seed),
        train_dataset=pairs,
        train_backbone=train_backbone,
        embedding_lr=settings.embedding_lr,
        transition_lr=settings.transition_lr,
        logit_lr=settings.logit_lr,
    )
    run_timed(trainer, folder.name.removesuffix(".part"), settings)


def start_from_backbone(model: Any) -> None:
    """The best first guess any head can get: what the backbone itself predicts at the prompt's last token."""
    head = model.draft_head
    with torch.no_grad():
        for level in range(head.config.num_levels):
            codes = head.codebook(level)
            head.logit_heads[level].weight.copy_(model.get_output_embeddings().weight[codes])
            if level < len(head.embeddings):
                head.embeddings[level].weight.copy_(model.get_input_embeddings().weight[codes])


def learn_catalogue(model: Any, pairs: InteractionDataset, data: Data, settings: HeadSettings) -> float:
    """Teach a head which codes follow which, as the backbone was taught; returns the last losses' mean.

    The first level is not trained, since no history predicts a random item; nor is the backbone.
    """
    head, collate = model.draft_head, DraftHeadCollator.for_model(model)
    rng = np.random.default_rng(0)
    hidden = []
    with torch.no_grad():
        for numbers in np.array_split(rng.permutation(len(pairs))[:2048], 32):
            batch = collate([pairs[int(number)] for number in numbers])
            states = model.model(**{name: value for name, value in batch.items() if name != "labels"})
            hidden.append(states.last_hidden_state[:, -head.config.num_placeholders - 1 :])
    known, items = torch.cat(hidden), torch.from_numpy(data.tokens)
    optimizer = torch.optim.AdamW(head.parameters(), lr=settings.catalogue_learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / settings.catalogue_steps))
    )
    losses = []
    for _ in range(settings.catalogue_steps):
        labels = items[rng.integers(len(items), size=settings.catalogue_rows)]
        logits = head(known[rng.integers(len(known), size=len(labels))], labels)
        levels = range(1, head.config.num_levels)
        loss = torch.stack(
            [F.cross_entropy(logits[level], head.columns(labels[:, level], level=level)) for level in levels]
        ).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return float(np.mean(losses[-100:]))


def train_further(folder: Path, backbone: Path, data: Data, settings: HeadSettings) -> None:
    """The backbone on the same pairs for as many steps, with its own loss on the tokens of the item that followed."""
    trainer = Trainer(
        model=load(backbone),
        args=head_arguments(folder, settings, learning_rate=settings.learning_rate, seed=settings.seeds[0]),
        train_dataset=pairs_of(data),
        data_collator=lambda pairs: label_batch(pairs, pad_token_id=data.pad_token_id),
    )
    run_timed(trainer, folder.name.removesuffix(".part"), settings)


def pairs_of(data: Data) -> InteractionDataset:
    return InteractionDataset.from_histories(data.histories, data.tokens, max_items=WINDOW)


def label_batch(pairs: Sequence[dict[str, np.ndarray]], *, pad_token_id: int) -> dict[str, Tensor]:
    """Left-padded rows of a prompt and the item after it; only the item's tokens are labels."""
    rows = [np.concatenate([pair["input_ids"], pair["labels"]]) for pair in pairs]
    input_ids, attention_mask = pad_prompts(rows, pad_token_id=pad_token_id)
    labels = torch.full_like(input_ids, -100)
    num_levels = len(pairs[0]["labels"])
    labels[:, -num_levels:] = input_ids[:, -num_levels:]
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "labels": labels,
    }


def head_arguments(folder: Path, settings: HeadSettings, *, learning_rate: float, seed: int) -> Any:
    args = training_arguments(folder, num_steps=settings.num_steps, learning_rate=learning_rate)
    args.per_device_train_batch_size = settings.batch_size
    args.remove_unused_columns = False
    args.seed = seed
    return args


def run_timed(trainer: Trainer, name: str, settings: HeadSettings) -> None:
    start = time.perf_counter()
    run_trainer(trainer, name)
    log = {"seconds": time.perf_counter() - start, "pairs": len(trainer.train_dataset), "settings": asdict(settings)}
    (Path(trainer.args.output_dir) / "training.json").write_text(json.dumps(log), encoding="utf-8")


def train_heads(work: Path, backbone: Path, data: Data, settings: HeadSettings) -> dict[str, Path]:
    """Everything that is compared, by folder name."""
    jobs: dict[str, Callable[[Path], None]] = {}

    def add(name: str, **options: Any) -> None:
        jobs[name] = lambda folder: train_head(folder, backbone, data, settings, **options)

    first, *others = settings.seeds
    for name, options in VARIANTS.items():
        add(name, options=options, seed=first)
    jobs[CONTINUED] = lambda folder: train_further(folder, backbone, data, settings)
    add(ALONE, options=VARIANTS["nezha"], train_backbone=False, seed=first)
    longer = replace(settings, num_steps=LONGER_BY * settings.num_steps)
    jobs[LONGER] = lambda folder: train_head(folder, backbone, data, longer, options=VARIANTS["nezha"], seed=first)
    for seed in others:
        add(f"nezha-seed-{seed}", options=VARIANTS["nezha"], seed=seed)
    return {name: make_once(work / name, make) for name, make in jobs.items()}


# --------------------------------------------------------------------------------------------------------- evaluating


def recommend(
    model: Any,
    rows: Sequence[Row],
    data: Data,
    *,
    num_beams: int,
    batch_size: int = 64,
    **settings: Any,
) -> list[list[int]]:
    """Ten items a row, best first, by constrained beam search or as `settings` say; `NO_ITEM` for what is none."""
    count = min(LIST_LENGTH, num_beams)
    ranked: list[list[int]] = [[] for _ in rows]
    for numbers in batches_of(rows, batch_size):
        prompt = prompts_of([rows[number] for number in numbers], data)
        sequences = ask(model, prompt, data, num_beams=num_beams, count=count, **settings)
        found = data.index.items(sequences[:, prompt["input_ids"].shape[1] :])
        for number, items in zip(numbers, flat_lists(found, count), strict=True):
            ranked[number] = items
    return ranked


def flat_lists(found: list[list[int]], count: int) -> Iterator[list[int]]:
    """The first ten items of every `count` sequences; a few items share all codes."""
    for start in range(0, len(found), count):
        yield [item for items in found[start : start + count] for item in items or [NO_ITEM]][:LIST_LENGTH]


def ask(
    model: Any,
    prompt: dict[str, Tensor],
    data: Data,
    *,
    num_beams: int,
    count: int,
    is_constrained: bool = True,
    **settings: Any,
) -> Any:
    """One call."""
    catalogue = {"constraint_index": data.index} if is_constrained else {"max_new_tokens": data.index.max_length}
    return model.generate(
        **prompt, **catalogue, num_beams=num_beams, num_return_sequences=count, do_sample=False, **settings
    )


def evaluate(ranked: Sequence[Sequence[int]], rows: Sequence[Row]) -> dict[str, float]:
    """H@k and N@k: a row has one item to find, so the ideal DCG is 1."""
    places = [
        items.index(row.item) if row.item in items else math.inf for items, row in zip(ranked, rows, strict=True)
    ]
    hits = {f"H@{k}": float(np.mean([place < k for place in places])) for k in (5, 10)}
    gains = {
        f"N@{k}": float(np.mean([1 / math.log2(place + 2) if place < k else 0.0 for place in places])) for k in (5, 10)
    }
    return hits | gains


def rank_by_popularity(rows: Sequence[Row], data: Data) -> list[list[int]]:
    """The items bought most often."""
    counts = Counter(item for history in data.histories for item in history.tolist())
    top = [item for item, _ in counts.most_common(10)]
    return [top for _ in rows]


def rank_by_neighbours(rows: Sequence[Row], data: Data) -> list[list[int]]:
    """The items bought most often near those of the history.

    Two items of a history add the inverse of the distance between them to their weight, which is divided by the root
    of both items' popularity. Older items of the history count less: 0.8 of the one after them.
    """
    counts = Counter(item for history in data.histories for item in history.tolist())
    weights: dict[int, Counter[int]] = defaultdict(Counter)
    for history in data.histories:
        items = history.tolist()
        for place, item in enumerate(items):
            for distance, other in enumerate(items[place + 1 : place + 1 + WINDOW], start=1):
                if item != other:
                    weights[item][other] += 1 / distance
                    weights[other][item] += 1 / distance
    for item, others in weights.items():
        for other in others:
            others[other] /= math.sqrt(counts[item] * counts[other])
    ranked = []
    for row in rows:
        scores: Counter[int] = Counter()
        for age, item in enumerate(reversed(row.history.tolist())):
            for other, weight in weights[item].items():
                scores[other] += 0.8**age * weight
        ranked.append([item for item, _ in scores.most_common(10)])
    return ranked


def evaluate_backbone(backbone: Path, data: Data, scale: Scale) -> dict[str, Any]:
    """The model and its lower bounds, on the rows of both periods."""
    model = enable(Qwen3ForCausalLM.from_pretrained(backbone).eval())
    bought = {item for history in data.histories for item in history.tolist()}
    num_beams = scale.num_beams[-1]
    result: dict[str, Any] = {"num_beams": num_beams, "periods": []}
    for period, rows in data.rows.items():
        start = time.perf_counter()
        methods = {
            "popularity": rank_by_popularity(rows, data),
            "neighbours": rank_by_neighbours(rows, data),
            "backbone": recommend(model, rows, data, num_beams=num_beams),
        }
        result["periods"].append(
            {
                "period": period,
                "rows": len(rows),
                "never_bought_in_train": sum(row.item not in bought for row in rows),
                "next_item_loss": next_item_loss(model, rows, data).tolist(),
                "metrics": {name: evaluate(ranked, rows) for name, ranked in methods.items()},
            }
        )
        show_progress(f"{period}: {len(rows):,} rows, {time.perf_counter() - start:.0f} s")
    return result


# --------------------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Method:
    """A row of the table: a model, and how it is called."""

    name: str
    model: str  # its folder
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_constrained(self) -> bool:
        return self.settings.get("is_constrained", True)


HEAD: dict[str, Any] = {"drafting": "head"}
RENORMALISED = {"renormalize_logits": True}  # over the legal tokens: levels without alternatives then have no effect
CONSTRAINED = Method("constrained beam search", "backbone")
FURTHER = Method("constrained, trained further", CONTINUED)
FREE = Method("unconstrained beam search", "backbone", {"is_constrained": False})
ON_FEW = "constrained, on as few rows"
NEZHA = Method("NEZHA", "nezha", HEAD)
PLAIN_ALONE = Method("beam search beside a head", ALONE)
STRICT = Method("self-speculation (strict)", ALONE, HEAD | {"verification": "strict"})
METHODS = (
    CONSTRAINED,
    FURTHER,
    FREE,
    Method("MTP", "mtp", HEAD),
    NEZHA,
    Method("NEZHA-1 (no state)", "nezha-1", HEAD),
    Method("NEZHA-2 (no placeholders)", "nezha-2", HEAD),
    Method("NEZHA-3 (add)", "nezha-3", HEAD),
    Method("NEZHA-4 (no verification)", "nezha", HEAD | {"verification": "none"}),
    Method("NEZHA, last level (paper)", "nezha", HEAD | {"verification": "last_level"}),
    Method("NEZHA, head trained alone", ALONE, HEAD),
    Method(f"NEZHA, {LONGER_BY} times the steps", LONGER, HEAD),
    Method("constrained, renormalised", "backbone", RENORMALISED),
    Method("NEZHA, renormalised", "nezha", HEAD | RENORMALISED),
    Method(f"NEZHA, {LONGER_BY} times, renormalised", LONGER, HEAD | RENORMALISED),
    STRICT,
)


def answers_of(
    work: Path, models: dict[str, Any], data: Data, method: Method, rows: Sequence[Row], num_beams: int
) -> list[list[int]]:
    """What a method recommends for every row, read from an earlier run if there is one."""
    plain = "".join(letter if letter.isalnum() else "_" for letter in method.name)
    file = work / "answers" / f"{plain}_{num_beams}.json"
    if not file.exists():
        start = time.perf_counter()
        batch_size = 64 if method.is_constrained else 16
        found = recommend(
            models[method.model], rows, data, num_beams=num_beams, batch_size=batch_size, **method.settings
        )
        show_progress(f"{method.name}, {num_beams} beams: {time.perf_counter() - start:.0f} s")
        file.parent.mkdir(exist_ok=True)
        write_json(file, found)
    return json.loads(file.read_text(encoding="utf-8"))


def write_json(file: Path, value: Any) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.rename(file)


def bootstrap_ratio(ours: np.ndarray, theirs: np.ndarray, *, resamples: int = 1000) -> dict[str, float]:
    """The ratio of two means over the same rows, with a 95% interval: rows are resampled in pairs."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(ours), size=(resamples, len(ours)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = ours[drawn].mean(axis=1) / theirs[drawn].mean(axis=1)
        low, high = np.percentile(ratios, [2.5, 97.5])
        return {"ratio": float(ours.mean() / theirs.mean()), "low": float(low), "high": float(high)}


def hits_of(ranked: Sequence[Sequence[int]], rows: Sequence[Row]) -> np.ndarray:
    """Whether a row's item is among those recommended."""
    return np.array([row.item in items for items, row in zip(ranked, rows, strict=True)], dtype=float)


def compare(work: Path, models: dict[str, Any], data: Data, scale: Scale) -> dict[str, Any]:
    """Metrics of all methods, and their hits relative to beam search's."""
    rows = data.rows["test"]
    few = rows[: scale.unconstrained_rows]
    result: dict[str, Any] = {"rows": [], "ratios": [], "strict": []}
    seeds = [Method(f"NEZHA, seed {seed}", f"nezha-seed-{seed}", HEAD) for seed in scale.heads.seeds[1:]]
    for num_beams, strict_rows in zip(scale.num_beams, scale.strict_rows, strict=True):
        strict = strict_of(work, models, data, rows[:strict_rows], num_beams)
        ranked = strict.pop("ranked")
        answers = {STRICT.name: ranked[STRICT.name]}
        for method in (*METHODS, *seeds):
            if method is not STRICT:
                asked = rows if method.is_constrained else few
                answers[method.name] = answers_of(work, models, data, method, asked, num_beams)
        for name, found in answers.items():
            result["rows"].append({"num_beams": num_beams, "method": name, **judge(found, rows[: len(found)])})
        some = judge(answers[CONSTRAINED.name][: len(few)], few)
        result["rows"].append({"num_beams": num_beams, "method": ON_FEW, **some})
        strict["not_as_without_a_head"] = sum(
            one != other for one, other in zip(ranked[PLAIN_ALONE.name], answers[CONSTRAINED.name], strict=False)
        )
        result["strict"].append(strict)
        hits = {name: hits_of(found, rows) for name, found in answers.items() if len(found) == len(rows)}
        if seeds:
            hits["NEZHA, mean of seeds"] = np.mean([hits[method.name] for method in (NEZHA, *seeds)], axis=0)
        result["ratios"] += [
            {"num_beams": num_beams, "method": name, "baseline": baseline, "H@10": float(hits[name].mean())}
            | bootstrap_ratio(hits[name], hits[baseline])
            for baseline in (CONSTRAINED.name, FURTHER.name)
            for name in hits
            if name != baseline and (baseline == CONSTRAINED.name or name.startswith("NEZHA"))
        ]
    order = [method.name for method in METHODS]
    order.insert(1 + order.index(FREE.name), ON_FEW)
    result["rows"].sort(
        key=lambda row: (row["num_beams"], order.index(row["method"]) if row["method"] in order else len(order))
    )
    return result


def judge(found: Sequence[Sequence[int]], rows: Sequence[Row]) -> dict[str, float]:
    valid = float(np.mean([item != NO_ITEM for items in found for item in items]))
    return {"rows": len(rows), **evaluate(found, rows), "valid": valid}


def strict_of(work: Path, models: dict[str, Any], data: Data, rows: Sequence[Row], num_beams: int) -> dict[str, Any]:
    """What `compare_strict` returns, read from an earlier run if there is one."""
    file = work / f"strict_{num_beams}.json"
    if not file.exists():
        start = time.perf_counter()
        write_json(file, compare_strict(models[ALONE], rows, data, num_beams))
        show_progress(f"self-speculation, {num_beams} beams: {time.perf_counter() - start:.0f} s")
    return json.loads(file.read_text(encoding="utf-8"))


def compare_strict(model: Any, rows: Sequence[Row], data: Data, num_beams: int) -> dict[str, Any]:
    """Self-speculation against the same model's own beam search, all beams of every row; also what both recommend."""
    not_equal = wrong = 0
    steps: list[int] = []
    forwards: list[int] = []
    ranked: dict[str, list[list[int]]] = {method.name: [[] for _ in rows] for method in (PLAIN_ALONE, STRICT)}
    for numbers in batches_of(rows, 64):
        prompt = prompts_of([rows[number] for number in numbers], data)
        asked = {"num_beams": num_beams, "count": num_beams, "return_dict_in_generate": True, "output_scores": True}
        outputs = {
            method.name: ask(model, prompt, data, **asked, **method.settings) for method in (PLAIN_ALONE, STRICT)
        }
        for name, output in outputs.items():
            found = data.index.items(output.sequences[:, prompt["input_ids"].shape[1] :])
            for number, items in zip(numbers, flat_lists(found, num_beams), strict=True):
                ranked[name][number] = items
        plain, strict = outputs.values()
        steps += strict.speculation.accepted_steps.tolist()
        forwards.append(strict.speculation.target_forwards)
        both = [output.sequences.view(len(numbers), num_beams, -1) for output in (plain, strict)]
        differ = int((both[0] != both[1]).flatten(1).any(dim=1).sum())
        not_equal += differ
        if not same_answers(plain, strict, num_beams=num_beams):
            wrong += max(1, differ)  # the whole batch's scores are compared
    return {
        "num_beams": num_beams,
        "rows": len(rows),
        "not_equal": not_equal,
        "wrong": wrong,
        "accepted_steps": statistics.mean(steps),
        "forwards_of_batches": statistics.mean(forwards),
        "ranked": ranked,
    }


@contextmanager
def timed_prefill(model: Any) -> Iterator[list[float]]:
    """When the forwards of a model end in this context: the first reads the prompt, maybe with drafted nodes."""
    ends: list[float] = []

    def note(*_: Any) -> None:
        ends.append(time.perf_counter())

    handle = model.register_forward_hook(note)
    try:
        yield ends
    finally:
        handle.remove()


def time_methods(models: dict[str, Any], data: Data, scale: Scale) -> list[dict[str, Any]]:
    """Alternating calls: every batch goes through all methods, in an order that rotates from batch to batch."""
    results = []
    for size, num_batches in scale.timed:
        batches = list(batches_of(data.rows["test"], size))
        chosen = np.random.default_rng(0).permutation(len(batches))[:num_batches]
        prompts = [prompts_of([data.rows["test"][n] for n in batches[number]], data) for number in chosen]
        for num_beams in scale.num_beams:
            results.append(time_batches(models, data, prompts, num_beams) | {"batch_size": size})
            show_progress(f"{num_beams} beams, batches of {size}: timed")
    return results


def time_batches(
    models: dict[str, Any], data: Data, prompts: Sequence[dict[str, Tensor]], num_beams: int
) -> dict[str, Any]:
    count = min(LIST_LENGTH, num_beams)
    methods: list[Method | None] = [None, *METHODS]  # None: the bare prefill
    prefill: dict[str, list[float]] = defaultdict(list)
    decode: dict[str, list[float]] = defaultdict(list)
    forwards: list[int] = []
    for number, prompt in enumerate([prompts[0], *prompts], -1):
        for method in (*methods[number % len(methods) :], *methods[: number % len(methods)]):
            if method is None:
                start = time.perf_counter()
                forward_alone(models["backbone"], prompt)
                spans = (time.perf_counter() - start, 0.0)
            else:
                model = models[method.model]
                with timed_prefill(model) as ends:
                    start = time.perf_counter()
                    output = ask(
                        model,
                        prompt,
                        data,
                        num_beams=num_beams,
                        count=count,
                        return_dict_in_generate=True,
                        **method.settings,
                    )
                    end = time.perf_counter()
                spans = (ends[0] - start, end - ends[0])
                if method is STRICT and number >= 0:
                    forwards.append(output.speculation.target_forwards)
            if number >= 0:  # the first one warms up
                name = BARE if method is None else method.name
                prefill[name].append(spans[0])
                decode[name].append(spans[1])

    def paired(above: Sequence[float], below: Sequence[float]) -> float:
        return statistics.median(one / other for one, other in zip(above, below, strict=True))

    calls = {name: [one + other for one, other in zip(prefill[name], decode[name], strict=True)] for name in prefill}
    return {
        "num_beams": num_beams,
        "batches": len(prompts),
        "prompt_tokens": statistics.mean(int(prompt["attention_mask"].sum(dim=1).max()) for prompt in prompts),
        "strict_forwards": statistics.mean(forwards),
        "plain_forwards": data.index.max_length - 1,
        "methods": {
            name: {
                "prefill": statistics.median(prefill[name]),
                "decode": statistics.median(decode[name]),
                "call": statistics.median(calls[name]),
                "times_bare": paired(calls[name], calls[BARE]),
                "decode_ratio": None if name == BARE else paired(decode[CONSTRAINED.name], decode[name]),
            }
            for name in calls
        },
    }


BARE = "bare prefill"


@torch.inference_mode()
def forward_alone(model: Any, prompt: dict[str, Tensor]) -> None:
    """One forward over the prompt with a cache."""
    positions = (prompt["attention_mask"].cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    model(**prompt, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)


def measure(work: Path, folders: dict[str, Path], data: Data, scale: Scale) -> dict[str, Any]:
    models = {
        name: (load if name in ("backbone", CONTINUED) else load_with_head)(folder) for name, folder in folders.items()
    }
    result: dict[str, Any] = {
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "training": {
            name: json.loads((folder / "training.json").read_text(encoding="utf-8"))
            for name, folder in folders.items()
        },
        **compare(work, models, data, scale),
    }
    file = work / "times.json"
    if not file.exists():
        write_json(file, {"times": time_methods(models, data, scale), **environment(torch.device("cpu"))})
    return result | json.loads(file.read_text(encoding="utf-8"))


def load_with_head(folder: Path) -> Any:
    return AutoModelForGenerativeRetrieval.from_pretrained(folder).eval()


# ---------------------------------------------------------------------------------------------------------- reporting


def show_backbone(result: dict[str, Any]) -> None:
    training = result["training"]
    print(
        f"backbone: {training['parameters'] / 1e6:.2f} M parameters, trained in {training['seconds']:.0f} s, best on "
        f"valid after {training['best_step']:,} steps on histories; {result['num_beams']} beams"
    )
    for period in result["periods"]:
        losses = ", ".join(format(loss, ".2f") for loss in period["next_item_loss"])
        print(
            f"{period['period']}: {period['rows']:,} rows, the items of {period['never_bought_in_train']:,} of them "
            f"bought by nobody in train; loss by level {losses}"
        )
    print(flush=True)
    print_table(
        ["period", "method", *METRICS],
        [
            [period["period"], method, *(format(metrics[name], ".2%") for name in METRICS)]
            for period in result["periods"]
            for method, metrics in period["metrics"].items()
        ],
    )


def show_measure(result: dict[str, Any]) -> None:
    sizes = result["parameters"]
    nezha = result["training"]["nezha"]
    settings = nezha["settings"]
    seconds = ", ".join(f"{name} {log['seconds']:.0f}" for name, log in result["training"].items())
    print(
        f"\nparameters: backbone {sizes['backbone'] / 1e6:.2f} M, with NEZHA's head {sizes['nezha'] / 1e6:.2f} M; "
        f"heads trained for {settings['num_steps']:,} steps of {settings['batch_size']} on {nezha['pairs']:,} pairs; "
        f"seconds: {seconds}\n"
        f"valid: the share of the {LIST_LENGTH} asked for that are items; what the paper's form loses counts as none\n"
    )
    print_table(
        ["beams", "method", "rows", *METRICS, "valid"],
        [
            [
                str(row["num_beams"]),
                row["method"],
                f"{row['rows']:,}",
                *(format(row[name], ".2%") for name in METRICS),
                format(row["valid"], ".2%"),
            ]
            for row in result["rows"]
        ],
    )
    print("\nH@10 as a share of beam search's, with 95% intervals (rows drawn again in pairs, 1,000 times)")
    print_table(
        ["beams", "method", "H@10", "baseline", "share", "from", "to"],
        [
            [
                str(row["num_beams"]),
                row["method"],
                format(row["H@10"], ".2%"),
                row["baseline"],
                *(format(row[name], ".1%") for name in ("ratio", "low", "high")),
            ]
            for row in result["ratios"]
        ],
    )
    print(
        "\nself-speculation against the same model's own beam search, all its beams; on the right, to how many of "
        "these rows the backbone recommends other items without a head and its placeholders in the vocabulary"
    )
    print_table(
        ["beams", "rows", "not equal", "beyond rounding", "accepted steps", "forwards of 64", "not as without head"],
        [
            [
                str(row["num_beams"]),
                f"{row['rows']:,}",
                str(row["not_equal"]),
                str(row["wrong"]),
                format(row["accepted_steps"], ".2f"),
                format(row["forwards_of_batches"], ".2f"),
                str(row["not_as_without_a_head"]),
            ]
            for row in result["strict"]
        ],
    )
    for times in result["times"]:
        print(
            f"\nmilliseconds of a call: {times['batch_size']} rows, {times['num_beams']} beams; medians of "
            f"{times['batches']} batches, {times['prompt_tokens']:.0f} tokens of prompt; self-speculation "
            f"takes {times['strict_forwards']:.2f} forwards after the prefill, beam search "
            f"{times['plain_forwards']}; load {result['hardware']['load']}"
        )
        print_table(
            ["", "method", "prefill", "decode", "call", "call a row", "calls / bare prefill", "decodes faster by"],
            [
                [
                    "",
                    name,
                    *(format(1e3 * row[part], ".2f") for part in ("prefill", "decode", "call")),
                    format(1e3 * row["call"] / times["batch_size"], ".2f"),
                    format(row["times_bare"], ".2f"),
                    "" if row["decode_ratio"] is None else format(row["decode_ratio"], ".1f"),
                ]
                for name, row in times["methods"].items()
            ],
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--work", type=Path, help=f"where stages keep what they make; {WORK}, for --fast nowhere")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help="the last one to run")
    parser.add_argument("--fast", action="store_true", help="tiny models, few rows; skipped without the data")
    return parser.parse_args(arguments)


def run(work: Path, data: Data, scale: Scale, *, stage: str) -> None:
    stages = STAGES[: STAGES.index(stage) + 1]
    backbone = make_once(work / "backbone", lambda folder: train_backbone(folder, data, scale.backbone))
    file = work / "backbone.json"
    if not file.exists():
        training = json.loads((backbone / "training.json").read_text(encoding="utf-8"))
        write_json(file, {"training": training, **evaluate_backbone(backbone, data, scale)})
    result = {"backbone": json.loads(file.read_text(encoding="utf-8"))}
    show_backbone(result["backbone"])
    if "heads" in stages:
        folders = {"backbone": backbone, **train_heads(work, backbone, data, scale.heads)}
    if "measure" in stages:
        result |= measure(work, folders, data, scale)
        show_measure(result)
    else:
        result |= environment(torch.device("cpu"))
    print(json.dumps({"benchmark": "nezha", **result}))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not is_there(options.data, fast=options.fast):
        return
    torch.set_num_threads(1)  # a second thread hardly helps such small models, and costs a lot where a core is busy
    disable_progress_bar()  # transformers' progress bars, one per model read or written
    scale = FAST if options.fast else FULL
    data = read_data(options.data, num_users=scale.users, num_rows=scale.rows)
    if options.fast and options.work is None:
        with tempfile.TemporaryDirectory(prefix="hf_gr_nezha_") as folder:
            run(Path(folder), data, scale, stage=options.stage)
    else:
        run((options.work or WORK).expanduser(), data, scale, stage=options.stage)


if __name__ == "__main__":
    main()
