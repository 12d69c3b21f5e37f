# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a language model on label sets, on one CPU core: lower layers are frozen, and products are in bfloat16.

The loss is on the answer's tokens and the end token, as `classify` scores them; the head sees those places alone.
Embeddings are frozen with them. A checkpoint every `KEEP` steps: a run that was ended goes on from there.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from taxonomy_sets import SEPARATOR, LabelSet
from torch.nn.functional import cross_entropy

from hf_gr import ConstraintIndex

KEEP = 50
Row = tuple[list[int], list[int]]  # tokens of a prompt and of its answer
POOL = 32  # batches whose texts are sorted by length together


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        examples: of every set, in this order; a set is repeated if it has fewer.
        frozen: layers from the bottom that stay as they are, and with them the embeddings; 0 trains everything.
        batch_size: texts of a step.
        learning_rate: its peak, after a twentieth of the steps; it then falls to zero linearly.
        bfloat16: whether products are in bfloat16, and weights that are not trained, too.
        seed: of the order of texts.
    """

    examples: tuple[int, ...]
    frozen: int
    batch_size: int
    learning_rate: float
    bfloat16: bool
    seed: int

    @property
    def digest(self) -> str:
        """Another one for another recipe: part of the name of a folder."""
        return sha256(repr(self).encode()).hexdigest()[:8]


def answer_tokens(labels: Sequence[str], index: ConstraintIndex, tokenizer: Any) -> list[int]:
    """Labels with separators between them, and the end token."""
    between = tokenizer(SEPARATOR, add_special_tokens=False)["input_ids"]
    tokens: list[int] = []
    for number, label in enumerate(labels):
        tokens += [*(between if number else []), *index.encode([label])]
    return [*tokens, tokenizer.eos_token_id]


def make_rows(
    sets: Sequence[LabelSet], indexes: Sequence[ConstraintIndex], tokenizer: Any, recipe: Recipe
) -> list[Row]:
    """What a model is trained on."""
    rows: list[Row] = []
    for one, index, number in zip(sets, indexes, recipe.examples, strict=True):
        for place in range(number):
            text, labels = one.train[place % len(one.train)]
            prompt = tokenizer(one.prompt.replace("{text}", text))["input_ids"]
            rows.append((prompt, answer_tokens(labels, index, tokenizer)))
    return rows


def batches(rows: Sequence[Row], recipe: Recipe) -> Iterator[list[Row]]:
    """All rows once, texts of similar length together, in random order."""
    draw = random.Random(recipe.seed)
    order = draw.sample(range(len(rows)), len(rows))
    for start in range(0, len(order), POOL * recipe.batch_size):
        pool = sorted(order[start : start + POOL * recipe.batch_size], key=lambda row: sum(map(len, rows[row])))
        starts = list(range(0, len(pool), recipe.batch_size))
        draw.shuffle(starts)
        for first in starts:
            yield [rows[row] for row in pool[first : first + recipe.batch_size]]


def loss_of(model: Any, batch: Sequence[Row], *, bfloat16: bool) -> torch.Tensor:
    """The mean over the tokens of the answers."""
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    tokens = torch.zeros((len(batch), width), dtype=torch.long)
    is_answer = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(batch):  # padding on the right, which a causal model never sees
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer])
        is_answer[row, len(prompt) : end] = True
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, :-1][is_answer[:, 1:]])
    return cross_entropy(logits.float(), tokens[is_answer])


def train(
    model: Any,
    tokenizer: Any,
    sets: Sequence[LabelSet],
    indexes: Sequence[ConstraintIndex],
    recipe: Recipe,
    folder: Path,
) -> dict[str, Any]:
    """Train a model in place, once; later calls of the same recipe read what the first one wrote into a folder."""
    described = json.loads(json.dumps(asdict(recipe)))
    told = folder / "training.json"
    if told.is_file() and (known := json.loads(told.read_text(encoding="utf-8")))["recipe"] == described:
        model.load_state_dict(torch.load(folder / "trained.pt"), strict=False)
        return known
    steps = list(batches(make_rows(sets, indexes, tokenizer, recipe), recipe))
    if recipe.bfloat16:
        model.to(torch.bfloat16)
    model.requires_grad_(not recipe.frozen)
    for part in (*model.base_model.layers[recipe.frozen :], model.base_model.norm):
        part.requires_grad_(True).float()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=recipe.learning_rate, weight_decay=0.01)
    warm_up = max(1, len(steps) // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (len(steps) - step) / max(1, len(steps) - warm_up))
    )
    folder.mkdir(parents=True, exist_ok=True)
    first, losses, seconds = 0, [], 0.0
    if (folder / "checkpoint.pt").is_file():
        kept = torch.load(folder / "checkpoint.pt")
        if kept["recipe"] == described:
            model.load_state_dict(kept["weights"], strict=False)
            optimizer.load_state_dict(kept["optimizer"])
            schedule.load_state_dict(kept["schedule"])
            first, losses, seconds = kept["step"], kept["losses"], kept["seconds"]
    model.train()
    for step in range(first, len(steps)):
        since = time.process_time()
        loss = loss_of(model, steps[step], bfloat16=recipe.bfloat16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        seconds += time.process_time() - since
        if (step + 1) % KEEP == 0 or step + 1 == len(steps):
            mean = sum(losses[-KEEP:]) / len(losses[-KEEP:])
            print(f"step {step + 1} of {len(steps)}, loss {mean:.3f}, {seconds:.0f} s", file=sys.stderr, flush=True)
            state = {"weights": trained, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            told_of = {"recipe": described, "step": step + 1, "losses": losses, "seconds": seconds}
            torch.save({**state, **told_of}, folder / "checkpoint.new")
            (folder / "checkpoint.new").replace(folder / "checkpoint.pt")
    model.eval().requires_grad_(False)
    torch.save({name: weight.detach() for name, weight in trained.items()}, folder / "trained.pt")
    found = {
        "recipe": described,
        "steps": len(steps),
        "trained_parameters": sum(weight.numel() for weight in trained.values()),
        "cpu_seconds": seconds,
        "loss": sum(losses[-KEEP:]) / len(losses[-KEEP:]),
    }
    told.write_text(json.dumps(found), encoding="utf-8")
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return found
