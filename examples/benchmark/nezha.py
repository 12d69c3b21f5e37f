# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""NEZHA on Amazon Beauty: the backbone, a small causal model that one core trains in a quarter of an hour.

The backbone is a plain Qwen3 over semantic IDs, trained in two parts:

- the catalogue: rows of random items, until the model knows which codes follow which. From histories alone it learns
  that last: after 900 steps on them it still lost more on an item than someone who knows no more than how often items
  are bought. The items that nobody bought in the training period are among them, as they are in the constraint;
- histories of the period train: every next token of a window. The weights that are best on next items of the period
  valid are kept.

Every item of a period is a row to evaluate: at most 20 items before it as the prompt, those of earlier rows included,
and constrained beam search with 50 beams. H@k is the share of rows with their item among k recommended, N@k is the
NDCG. Items of the history are not filtered out. Two bounds are printed beside the model: the most popular items, and
the items most often bought near those of the history.

Stages keep what they made in the folder `--work` and go on from there. To make something again, remove it there, and
what follows from it. Nothing of the periods valid and test is trained on.

    python examples/benchmark/nezha.py --stage backbone   # twenty minutes on one core
    python examples/benchmark/nezha.py --fast             # seconds: the way, not the numbers
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beauty_data import DEFAULT_DATA, FILES, is_there, read_items, read_users
from report import environment, print_table
from speculation import make_once, show_progress
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from hf_gr import ConstraintIndex, SemanticIds, enable
from hf_gr.demo.evaluate import make_prompts
from hf_gr.demo.train import HistoryWindows, TrainSettings, build_model, pad_batch

WORK = Path("~/.cache/hf_gr/nezha")
STAGES = ("backbone",)
PERIODS = ("valid", "test")
WINDOW = 20  # items of a history that the model sees
SPARE_ITEMS = 2  # positions behind a history: the item that follows, and as much again
METRICS = ("H@5", "H@10", "N@5", "N@10")


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
        hidden_tokens: Share of the input tokens of histories that the model does not get to see; it predicts them
            all the same.
        jitter: Items of a history change places with others up to about this many places away, anew in every window.
        check_steps: After so many steps on histories, the loss on next items is compared with the best so far.
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
        num_steps=7400,
        learning_rate=3e-3,
        max_seconds=math.inf,
    ),
    catalogue_steps=600,
    hidden_tokens=0.1,
    jitter=3.0,
)
TINY = BackboneSettings(
    model=replace(BACKBONE.model, hidden_size=32, intermediate_size=64, num_heads=2, num_steps=10),
    catalogue_steps=10,
    hidden_tokens=0.1,
    jitter=3.0,
    check_steps=5,
    check_rows=64,
)


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    backbone: BackboneSettings
    num_beams: int = 50
    rows: int | None = None  # of a period


FULL = Scale(backbone=BACKBONE)
FAST = Scale(backbone=TINY, num_beams=10, rows=32)


@dataclass(frozen=True)
class Row:
    """One item to recommend, and what its user bought before it: at most `WINDOW` items, oldest first."""

    history: np.ndarray
    item: int


@dataclass(frozen=True)
class Data:
    """The catalogue, histories to train on, and rows to evaluate: items are numbered from 0."""

    tokens: np.ndarray  # [N, L]
    index: ConstraintIndex
    histories: list[np.ndarray]  # train
    rows: dict[str, list[Row]]  # of a period

    @property
    def pad_token_id(self) -> int:
        return int(self.tokens.max()) + 1


def read_data(data: Path, *, num_rows: int | None = None) -> Data:
    item_ids, codes = read_items(data)
    if item_ids != list(range(len(codes))):
        raise SystemExit(f"the items of {data / 'items.tsv'} are not numbered 0, 1, 2, ...: number them as their rows")
    users = read_users(data)
    ids = SemanticIds(codes, level_sizes=[256] * codes.shape[1])
    return Data(
        tokens=ids.token_sequences(),
        index=ids.constraint_index(),
        histories=[np.array(user["train"]) for user in users if user["train"]],
        rows={period: some_of(read_rows(users, period), num_rows) for period in PERIODS},
    )


def read_rows(users: Sequence[dict[str, Any]], period: str) -> list[Row]:
    """Every item of a period with everything its user bought before it. An item with nothing before it is no row."""
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
    """Numbers of rows, those with histories of like lengths together."""
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
    """Right-padded rows. What a row may not see of itself is hidden in the input, not in the labels."""

    input_ids: Tensor
    labels: Tensor


def catalogue_batches(data: Data, settings: BackboneSettings) -> Iterator[Batch]:
    """Rows of random items; every pass has all items once, less what does not fill a batch."""
    rng = np.random.default_rng(0)
    size = min(settings.catalogue_rows * settings.catalogue_items, len(data.tokens))
    size -= size % settings.catalogue_items
    while True:
        order = rng.permutation(len(data.tokens))
        for start in range(0, len(order) - size + 1, size):
            tokens = data.tokens[order[start : start + size]].reshape(size // settings.catalogue_items, -1)
            yield Batch(torch.from_numpy(tokens), torch.from_numpy(tokens))


def history_batches(data: Data, settings: BackboneSettings) -> Iterator[Batch]:
    """Windows of histories, those of like lengths together: less padding, three times faster."""
    rng = np.random.default_rng(0)
    window, size = settings.model.window, settings.model.batch_size
    windows = HistoryWindows(data.histories, np.arange(len(data.tokens))[:, None], window=window, seed=0)
    lengths = np.array([min(window, len(data.histories[owner])) for owner in windows.owners])
    while True:
        numbers = rng.permutation(len(windows))
        numbers = numbers[np.argsort(lengths[numbers], kind="stable")]
        batches = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        for place in rng.permutation(len(batches)):
            items = [shuffle_nearby(windows[int(number)], settings.jitter, rng) for number in batches[place]]
            batch = pad_batch([data.tokens[row].ravel() for row in items], pad_token_id=data.pad_token_id)
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
    """The catalogue first, then histories; the model goes to `folder`, with what came of the training."""
    start = time.perf_counter()
    size = replace(settings.model, window=settings.model.window + SPARE_ITEMS)
    model = build_model(data.pad_token_id + 1, data.tokens.shape[1], size, seed=0)
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
    (folder / "training.json").write_text(json.dumps(log, default=str), encoding="utf-8")


def set_attention_dropout(model: Qwen3ForCausalLM, share: float) -> None:
    model.config.attention_dropout = share
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = share


# --------------------------------------------------------------------------------------------------------- evaluating


def recommend(model: Any, rows: Sequence[Row], data: Data, *, num_beams: int, batch_size: int = 64) -> list[list[int]]:
    """Ten items a row, best first, by constrained beam search."""
    count = min(10, num_beams)
    ranked: list[list[int]] = [[] for _ in rows]
    for numbers in batches_of(rows, batch_size):
        prompt = prompts_of([rows[number] for number in numbers], data)
        sequences = model.generate(
            **prompt, constraint_index=data.index, num_beams=num_beams, num_return_sequences=count
        )
        found = data.index.items(sequences[:, prompt["input_ids"].shape[1] :])
        for place, number in enumerate(numbers):
            items = [item for beam in found[place * count : (place + 1) * count] for item in beam]
            ranked[number] = items[:10]  # a few items share all codes
    return ranked


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
    """What was bought most often."""
    counts = Counter(item for history in data.histories for item in history.tolist())
    top = [item for item, _ in counts.most_common(10)]
    return [top for _ in rows]


def rank_by_neighbours(rows: Sequence[Row], data: Data) -> list[list[int]]:
    """What was bought most often near the items of the history.

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
    """The model and what bounds it from below, on the rows of both periods."""
    model = enable(Qwen3ForCausalLM.from_pretrained(backbone).eval())
    bought = {item for history in data.histories for item in history.tolist()}
    result: dict[str, Any] = {"num_beams": scale.num_beams, "periods": []}
    for period, rows in data.rows.items():
        start = time.perf_counter()
        methods = {
            "popularity": rank_by_popularity(rows, data),
            "neighbours": rank_by_neighbours(rows, data),
            "backbone": recommend(model, rows, data, num_beams=scale.num_beams),
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


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--work", type=Path, help=f"where stages keep what they make; {WORK}, for --fast nowhere")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help="the last one to run")
    parser.add_argument("--fast", action="store_true", help="a tiny model, few rows; skipped without the data")
    return parser.parse_args(arguments)


def run(work: Path, data: Data, scale: Scale) -> None:
    backbone = make_once(work / "backbone", lambda folder: train_backbone(folder, data, scale.backbone))
    file = work / "backbone.json"
    if file.exists():
        line = file.read_text(encoding="utf-8")
    else:
        training = json.loads((backbone / "training.json").read_text(encoding="utf-8"))
        result = {"training": training, **evaluate_backbone(backbone, data, scale)}
        line = json.dumps({"benchmark": "nezha backbone", **result, **environment(torch.device("cpu"))})
        file.write_text(line, encoding="utf-8")
    show_backbone(json.loads(line))
    print(line)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not is_there(options.data, fast=options.fast):
        return
    torch.set_num_threads(1)  # a second one gains such small models little, and costs a lot where a core is busy
    disable_progress_bar()  # transformers' own, one for every model that is read or written
    scale = FAST if options.fast else FULL
    data = read_data(options.data, num_rows=scale.rows)
    if options.fast and options.work is None:
        with tempfile.TemporaryDirectory(prefix="hf_gr_nezha_") as folder:
            run(Path(folder), data, scale)
    else:
        run((options.work or WORK).expanduser(), data, scale)


if __name__ == "__main__":
    main()
