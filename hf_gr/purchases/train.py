# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`train`: from a table of purchases to a recommender, what it is worth, and a card that says so.

Imports nothing slow before it is called. Source of the split: leave-one-out, as in TIGER (Rajput et al., 2023): a
user's last item is the test, the one before it validates, the rest trains.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hf_gr.jobs.evaluate import evaluate

if TYPE_CHECKING:
    from hf_gr.jobs.results import Evaluation

NUM_BEAMS = 50  # of the measurement
MAX_STEPS = 1600  # of the recipe of `train_recommender`
OF_TRAIN = ("callbacks", "eval_strategy", "load_best_model_at_end", "output_dir", "save_strategy", "validation")
logger = logging.getLogger("hf_gr.progress")


@dataclass(frozen=True, repr=False)
class Trained:
    """What `train` made and measured; its text is all of it.

    Attributes:
        output: the folder of the recommender.
        purchases: what was found in the table and left out, a line each.
        training: how it was trained, a line each.
        evaluation: the model and two baselines on each user's last purchase.
        verdict: whether it is better than each baseline, and what to try next, a line each.
        seconds: of all of it.
    """

    output: Path
    purchases: tuple[str, ...]
    training: tuple[str, ...]
    evaluation: Evaluation
    verdict: tuple[str, ...]
    seconds: float

    def to_json(self) -> str:
        """One JSON object; its fields are those of this class."""
        found = vars(self) | {"output": str(self.output), "evaluation": json.loads(self.evaluation.to_json())}
        return json.dumps(found)

    def __repr__(self) -> str:
        parts = (self.purchases, self.training, [repr(self.evaluation)], self.verdict)
        return "\n\n".join("\n".join(lines) for lines in parts)


def train(
    purchases: Any,
    output: str | Path,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = "time",
    quantity: str | None = None,
    text: str | None = None,
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2",
    drop_missing: bool = True,
    drop_returns: bool = True,
    drop_duplicates: bool = True,
    shuffle_ties: bool = True,
    min_item_count: int = 5,
    min_user_count: int = 3,
    max_items: int = 20,
    num_codes: int = 128,
    batch_size: int = 32,
    max_steps: int = MAX_STEPS,
    seed: int = 0,
    overwrite: bool = False,
    delimiter: str | None = None,
    progress: bool = True,
    **arguments: Any,
) -> Trained:
    """Train a recommender on purchases, and compare it with popular items and with items that go together.

    The last two purchases of every user are held out: the last but one says when to stop, the last measures. Semantic
    IDs come from which items follow each other, and from texts if there are any.

    Args:
        purchases: a table of purchases, one a row: a file of CSV, TSV, Parquet or JSON lines, several, or a folder of
            them; or a table in memory.
        output: the folder to write: the model, its semantic IDs, its catalogue, a card with the measurements, and
            `fallback.parquet`, from all purchases, also of rare items: a table for `fallback` of `recommend`.
        user: column of users.
        item: column of item ids.
        time: column of times, by which a user's rows are sorted: numbers, dates, or texts such as 2026-11-22; empty if
            rows are in order.
        quantity: column of quantities, to find returns by.
        text: column of item texts, such as titles; items whose texts are alike get IDs that begin alike.
        encoder: the model of sentence-transformers that reads texts.
        drop_missing: drop rows with a missing cell; else they are refused.
        drop_returns: drop rows with a quantity of 0 or less.
        drop_duplicates: drop rows with the user, item and time of another.
        shuffle_ties: purchases of a user at the same time are in a random order, always the same: that of rows may
            tell what a recommender cannot know.
        min_item_count: items with fewer purchases are dropped.
        min_user_count: users with fewer purchases are dropped.
        max_items: the most items of a prompt, the latest of a history.
        num_codes: codes of each of three levels of a semantic ID.
        batch_size: windows of histories in a step.
        max_steps: the most steps of training; it ends when validation stops improving.
        seed: of everything random but the split.
        overwrite: write into a folder that is not empty, and replace what an earlier training wrote there.
        delimiter: of CSV; by default a comma, and a tab for .tsv and .inter.
        progress: show a bar, in terminals and notebooks; lines in logs.
        arguments: transformers' `TrainingArguments`, as in `train_recommender`.

    Returns:
        The measurements and the verdict.

    Raises:
        ValueError: the table cannot be read, nothing is left of it, or an argument is invalid.
        ImportError: a package is missing: `pip install "hf-gr[demo]"`, and with `text` `"hf-gr[text]"`.

    Example:
        >>> made = hf_gr.train("purchases.csv", "recommender", time="day")  # doctest: +SKIP
        >>> print(made)  # doctest: +SKIP
    """
    options = locals()
    from transformers import TrainerCallback

    from hf_gr.files.cards import add_measurements
    from hf_gr.files.pairs import CARD_FILE
    from hf_gr.jobs.baselines import FEW_REPEATS
    from hf_gr.tables.purchases import clean, read_purchases
    from hf_gr.training.item_codes import semantic_ids_from_histories
    from hf_gr.training.recommender import train_recommender

    from .extend import agreement, save_fallback, text_features

    start, output = perf_counter(), Path(output)
    if max_steps < 1:
        raise ValueError(f"max_steps={max_steps}, expected 1 or more")
    if min_user_count < 3:
        raise ValueError(f"min_user_count={min_user_count}, expected 3 or more: a user's last two are held out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("train runs in several processes, expected one: for more, see train_recommender")
    if own := [name for name in arguments if name in OF_TRAIN]:
        raise ValueError(f"{own[0]} is given, expected none: train needs it for its measurements")
    if output.is_dir() and any(output.iterdir()) and not (overwrite or arguments.get("resume_from_checkpoint")):
        raise ValueError(
            f"output={str(output)!r} is not empty, expected a new folder: pass overwrite=True to replace what a "
            "training writes, or resume_from_checkpoint=True"
        )
    columns = {"user": user, "item": item, "time": time, "quantity": quantity, "text": text}
    table, roles = read_purchases(purchases, columns, delimiter=delimiter)
    by_user, texts, report = clean(table, roles, options)
    histories = list(by_user.values())
    for line in report:
        logger.info(line)
    known, names = [history[:-2] for history in histories], sorted({item for history in histories for item in history})
    features = None
    if text:
        features = text_features(encoder, [texts.get(name, "") for name in names])
    ids = semantic_ids_from_histories(known, item_ids=names, features=features, num_codes=num_codes, seed=seed)
    ids.encoder = encoder if text else None
    (output / CARD_FILE).unlink(missing_ok=True)  # an earlier card has other measurements
    states: list[Any] = []

    class Keep(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            states.append(state)

    model = train_recommender(
        known,
        ids,
        max_items=max_items,
        validation=[history[:-1] for history in histories],
        output_dir=output,
        overwrite=overwrite,
        seed=seed,
        progress=progress,
        callbacks=[Keep()],
        **{"max_steps": max_steps, "per_device_train_batch_size": batch_size, "learning_rate": 3e-3} | arguments,
    )
    model.generation_config.num_beams = NUM_BEAMS  # as measured below
    model.generation_config.save_pretrained(output)
    everything = clean(table, roles, options | {"min_item_count": 1, "min_user_count": 1})[0]
    save_fallback(output, list(everything.values()), ids.constraint_index())
    last, best = states[0].global_step, states[0].best_global_step
    for checkpoint in output.glob("checkpoint-*"):
        if checkpoint.name.removeprefix("checkpoint-").isdigit():
            shutil.rmtree(checkpoint)
    repeats = 1 - sum(len(set(history)) for history in histories) / sum(map(len, histories))
    may_repeat = repeats >= FEW_REPEATS
    training = (
        f"{model.num_parameters():,} parameters; {len(ids):,} items, codes by level: {ids.level_sizes}",
        f"trained {last:,} steps, {last / MAX_STEPS:.0%} of the recipe's {MAX_STEPS:,}; kept those of step {best:,}, "
        f"with the least validation loss, {states[0].best_metric:.4f}",
        agreement(ids, known),
        f"{repeats:.1%} of purchases are of what users had before; lists {'may have' if may_repeat else 'omit'} that",
    )
    users = {"history": [history[:-1] for history in histories], "next": [history[-1] for history in histories]}
    how: dict[str, Any] = {} if may_repeat else {"exclude": "history"}
    how |= {"num_beams": NUM_BEAMS, "progress": progress}
    evaluation = evaluate({"model": output}, users, history="history", target="next", **how)
    longer = f"raise max_steps={max_steps:,}, since validation improved up to the end"
    other = f"raise max_items={max_items}, or bring a longer period or texts (text=), since step {best:,} was the best"
    fix = f"{longer if best == last else other}; or show item-to-item as a second list"
    made = Trained(output, report, training, evaluation, verdict_of(evaluation, fix), perf_counter() - start)
    card = output / CARD_FILE
    card.write_text(add_measurements(card.read_text(encoding="utf-8"), str(made)), encoding="utf-8")
    return made


def verdict_of(found: Evaluation, next_step: str) -> tuple[str, ...]:
    """By baseline: is recall better, level (zero is in the paired interval) or worse? If not better, what next."""
    lines, is_best, metric = list[str](), True, f"recall@{found.cutoffs[-1]}"
    for baseline in found.baselines:
        for one in found.difference(found.results[0], baseline):
            if one.metric == metric:
                word = "better than" if one.low > 0 else "worse than" if one.high < 0 else "level with"
                told = f"{metric} {one.difference:+.4f} ({one.low:+.4f} to {one.high:+.4f})"
                lines.append(f"{word} {baseline.name}: {told}")
                is_best &= one.low > 0
    return tuple(lines if is_best else [*lines, f"next: {next_step}"])
