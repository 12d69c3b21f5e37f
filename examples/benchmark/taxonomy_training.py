# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a language model on label sets, on one CPU core: lower layers are frozen, products are in bfloat16.

The loss is on the answer's tokens and the end token, as `classify` scores them; the head sees those places alone.
Embeddings are frozen with them. A checkpoint every `KEEP` steps: a run that was ended goes on from there.
"""

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
from report import environment
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
        seed: of the order of texts.
    """

    examples: tuple[int, ...]
    frozen: int
    batch_size: int
    learning_rate: float
    seed: int


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


def loss_of(model: Any, batch: Sequence[Row]) -> torch.Tensor:
    """The mean over the tokens of the answers."""
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    tokens = torch.zeros((len(batch), width), dtype=torch.long)
    is_answer = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(batch):  # padding on the right, which a causal model never sees
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer])
        is_answer[row, len(prompt) : end] = True
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, :-1][is_answer[:, 1:]])
    return cross_entropy(logits.float(), tokens[is_answer])


def digest(recipe: Recipe, rows: Sequence[Row]) -> str:
    """Another one for another recipe, and for other rows: part of the name of a folder."""
    return sha256(repr((recipe, rows)).encode()).hexdigest()[:8]


class Run:
    """A model with its optimizer, and how far it has come; kept in a folder.

    Args:
        model: to be trained in place.
        recipe: how.
        num_steps: of the whole training.
        folder: of the checkpoint.
    """

    def __init__(self, model: Any, recipe: Recipe, num_steps: int, folder: Path) -> None:
        self.model, self.path = model, folder / "checkpoint.pt"
        model.requires_grad_(not recipe.frozen)
        for part in (*model.base_model.layers[recipe.frozen :], model.base_model.norm):
            part.requires_grad_(True).float()
        self.trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=recipe.learning_rate, weight_decay=0.01)
        warm_up = max(1, num_steps // 20)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warm_up, (num_steps - step) / max(1, num_steps - warm_up))
        )
        self.losses: list[float] = []
        self.seconds = 0.0
        if self.path.is_file():
            kept = torch.load(self.path)
            model.load_state_dict(kept["weights"], strict=False)
            self.optimizer.load_state_dict(kept["optimizer"])
            self.schedule.load_state_dict(kept["schedule"])
            self.losses, self.seconds = kept["losses"], kept["seconds"]

    def step(self, batch: Sequence[Row]) -> None:
        """Learn a batch."""
        since = time.process_time()
        loss = loss_of(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())
        self.seconds += time.process_time() - since

    def keep(self) -> None:
        """Write a checkpoint."""
        state = {"weights": self.trained, "losses": self.losses, "seconds": self.seconds}
        state |= {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        torch.save(state, self.path.with_suffix(".part"))
        self.path.with_suffix(".part").replace(self.path)

    @property
    def loss(self) -> float:
        """The mean of the last steps."""
        return sum(self.losses[-KEEP:]) / len(self.losses[-KEEP:])


def train(model: Any, rows: Sequence[Row], recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Train a model in place, once.

    Args:
        model: a causal language model.
        rows: from `make_rows`.
        recipe: how.
        folder: what it wrote there is read again by later calls: it must be of these rows and this recipe (`digest`).

    Returns:
        Steps, seconds, the loss, and where and when it ran.
    """
    told = folder / "training.json"
    if told.is_file():
        model.load_state_dict(torch.load(folder / "trained.pt"), strict=False)
        return json.loads(told.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    steps = list(batches(rows, recipe))
    run = Run(model, recipe, len(steps), folder)
    model.train()
    for number in range(len(run.losses), len(steps)):
        run.step(steps[number])
        if (number + 1) % KEEP == 0:
            print(f"step {number + 1} of {len(steps)}, loss {run.loss:.3f}", file=sys.stderr, flush=True)
            run.keep()
    model.eval().requires_grad_(False)
    torch.save({name: weight.detach() for name, weight in run.trained.items()}, folder / "trained.pt")
    found = {
        "recipe": asdict(recipe),
        "steps": len(steps),
        "trained_parameters": sum(weight.numel() for weight in run.trained.values()),
        "cpu_seconds": run.seconds,
        "loss": run.loss,
        **environment(torch.device("cpu")),
    }
    told.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
    told.with_suffix(".part").replace(told)
    run.path.unlink(missing_ok=True)
    return json.loads(told.read_text(encoding="utf-8"))
