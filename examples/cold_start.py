# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Cold start: recommend items that the model has never seen by constraining it to them. STATIC, section 6.

The newest items of Amazon Beauty are cold: they are removed from all training data and prompts. Only their semantic ID
is known, which comes from their texts. Each user with a cold item in the test period gets one list from each of these:

- unconstrained: transformers' own beam search;
- constrained to all items;
- random cold items: the exact expectation;
- constrained to cold items: what STATIC does; a score is the sum of log-probabilities over the full vocabulary;
- the same, renormalized: log-probabilities over the legal tokens of each step, so that a token without alternatives
  costs nothing, such as the last of an ID;
- cold items of like semantic ID: no model, only prefixes shared with the IDs of the history.

In the paper an item is as old as its oldest review. Beauty has no dates, but is ordered in two ways: train, valid and
test are cuts in time, and histories are in order of time. So an item is as new as the first period in which anyone
bought it and, within a period, as its smallest relative position in a history.

    python examples/cold_start.py                   # some minutes of one core
    python examples/cold_start.py --period valid    # one period earlier: settings are chosen there, not on test
    python examples/cold_start.py --fast            # seconds: the method, not its quality
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.training import small_recommender, train_recommender

DEFAULT_DATA = Path(os.environ.get("HF_GR_DATA") or "data") / "beauty"
FILES = ("items.tsv", "users.jsonl")
PERIODS = ("train", "valid", "test")  # of every user, in order of time
LIST_LENGTH, BATCH = 10, 64
COUNTS = (1, LIST_LENGTH)  # Recall@1 and @10
MAX_ITEMS = 20  # of a prompt
SIZE = {"hidden_size": 128, "num_hidden_layers": 2}
TRAINING: dict[str, Any] = {"num_train_epochs": 6, "per_device_train_batch_size": 128, "learning_rate": 3e-3}
CHECKS = 500  # users whose last item is the validation
FAST_SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAST_TRAINING: dict[str, Any] = {"max_steps": 40, "per_device_train_batch_size": 32, "learning_rate": 3e-3}
FAST_USERS, FAST_HISTORIES, FAST_CHECKS = 64, 2000, 50

User = dict[str, list[int]]  # the items of each period
Lists = list[list[Any]]  # for each user the best first; None is a sequence that is no item


def newest_first(users: Sequence[User], num_items: int) -> np.ndarray:
    """The items that anyone has bought, by first period, then by smallest relative position in a history."""
    unseen = len(PERIODS)
    periods, places = np.full(num_items, unseen), np.ones(num_items)
    for user in users:
        history = [(item, number) for number, period in enumerate(PERIODS) for item in user[period]]
        for place, (item, number) in enumerate(history):
            periods[item] = min(periods[item], number)
            places[item] = min(places[item], (place + 0.5) / len(history))
    order = np.lexsort((np.arange(num_items), -places, -periods))
    return order[periods[order] < unseen]


def leave_out(
    users: Sequence[User], cold: np.ndarray, period: str
) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """Histories before a period without cold items; for users with a cold item in it, what they had before, and it."""
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
    return histories, prompts, targets


def recommend(
    model: Any, prompts: Sequence[np.ndarray], ids: SemanticIds, names: ConstraintIndex, num_beams: int, **how: Any
) -> Lists:
    """The best items of every prompt, under `constraint_index=` or none; `names` maps sequences to items."""
    tokens, lists, fill = ids.token_sequences(), [], model.config.pad_token_id
    for start in range(0, len(prompts), BATCH):
        rows = [tokens[history[-MAX_ITEMS:]].ravel().tolist() for history in prompts[start : start + BATCH]]
        longest = max(map(len, rows))
        input_ids = torch.tensor([[fill] * (longest - len(row)) + row for row in rows])
        output = model.generate(
            input_ids=input_ids,
            attention_mask=(input_ids != fill).long(),
            max_new_tokens=names.max_length,
            num_beams=num_beams,
            num_return_sequences=LIST_LENGTH,
            **how,
        )
        found = names.items(output[:, longest:])
        for first in range(0, len(found), LIST_LENGTH):
            # A sequence that is no item takes one place in the list; one that is several items takes several.
            items = [item for row in found[first : first + LIST_LENGTH] for item in row or [None]]
            lists.append(items[:LIST_LENGTH])
    return lists


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


def interval(share: float, users: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of users."""
    z = 1.96
    middle, width = share + z**2 / (2 * users), z * (share * (1 - share) / users + z**2 / (4 * users**2)) ** 0.5
    return (middle - width) / (1 + z**2 / users), (middle + width) / (1 + z**2 / users)


def compare(ids: SemanticIds, users: Sequence[User], cold: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Train a model that has never seen a cold item, and compare all methods."""
    histories, prompts, targets = leave_out(users, cold, options.period)
    if options.fast:
        histories, prompts, targets = histories[:FAST_HISTORIES], prompts[:FAST_USERS], targets[:FAST_USERS]
    long = [number for number, history in enumerate(histories) if len(history) > 1]
    held = np.random.default_rng(0).permutation(long)[: FAST_CHECKS if options.fast else CHECKS].tolist()
    known = [history[:-1] if number in set(held) else history for number, history in enumerate(histories)]
    model = small_recommender(ids, max_items=MAX_ITEMS, seed=options.seed, **(FAST_SIZE if options.fast else SIZE))
    how: dict[str, Any] = {"max_items": MAX_ITEMS, "validation": [histories[number] for number in held]}
    how |= FAST_TRAINING if options.fast else TRAINING
    model = train_recommender(known, ids, model=model, seed=options.seed, progress=False, **how)
    catalogue = ids.constraint_index()
    left = catalogue.where(cold)
    ways: dict[str, dict[str, Any]] = {
        "unconstrained": {},
        "constrained to all items": {"constraint_index": catalogue},
        "constrained to cold items": {"constraint_index": left},
        "the same, renormalized": {"constraint_index": left, "renormalize_logits": True},
    }
    found = {name: recommend(model, prompts, ids, catalogue, options.num_beams, **way) for name, way in ways.items()}
    rng = np.random.default_rng(options.seed)
    found["cold items of like semantic ID"] = lists_by_prefix(cold, ids.codes, prompts, rng)
    rows = {"random cold items, on average": {f"recall@{count}": min(count / len(cold), 1.0) for count in COUNTS}}
    for name, lists in found.items():
        items = [item for ranked in lists for item in ranked]
        rows[name] = {"real": sum(item is not None for item in items) / len(items)}
        for count in COUNTS:
            hits = sum(target in ranked[:count] for ranked, target in zip(lists, targets, strict=True))
            rows[name] |= {f"recall@{count}": hits / len(targets)}
    return {"cold_items": len(cold), "users": len(targets), "parameters": model.num_parameters(), "rows": rows}


def show(percent: float, result: dict[str, Any]) -> None:
    print(f"newest {percent:g}%: {result['cold_items']:,} cold items; {result['users']:,} users")
    print(f"{'':32}{'real items':>11}" + "".join(f"{f'Recall@{count}':>11}{'95%':>16}" for count in COUNTS))
    for name, row in result["rows"].items():
        cells = f"{name:32}" + (f"{row['real']:>11.1%}" if "real" in row else " " * 11)
        for count in COUNTS:
            recall = row[f"recall@{count}"]
            low, high = interval(recall, result["users"])
            cells += f"{recall:>11.2%}{f'{low:.1%} to {high:.1%}' if 'real' in row else '':>16}"
        print(cells)
    print()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--percent", type=float, nargs="+", default=[2, 5], help="how many of the items are cold")
    parser.add_argument("--period", choices=PERIODS[1:], default="test", help="what is asked for; training is before")
    parser.add_argument("--num-beams", type=int, default=10, help="for every row; chosen on valid, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help=f"{FAST_USERS} users; skipped without the data")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps such a small model, and slows it down where a core is busy
    if missing := [name for name in FILES if not (options.data / name).is_file()]:
        message = f"no {' and '.join(missing)} in {options.data}: pass the folder of Amazon Beauty with --data"
        if not options.fast:
            raise SystemExit(message)
        print(f"skipped: {message}")
        return
    table = np.loadtxt(options.data / "items.tsv", dtype=np.int64, delimiter="\t", skiprows=1)
    users = [json.loads(line) for line in (options.data / "users.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = SemanticIds(table[:, 1:], level_sizes=[256] * (table.shape[1] - 1))
    newest = newest_first(users, len(table))
    results = []
    for percent in options.percent:
        cold = np.sort(newest[: round(len(newest) * percent / 100)])
        results.append({"percent": percent, **compare(ids, users, cold, options)})
        show(percent, results[-1])
    print(json.dumps({"benchmark": "cold_start", "period": options.period, "results": results}))


if __name__ == "__main__":
    main()
