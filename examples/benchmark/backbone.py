# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A backbone worth decoding from: is it better than popular items, than neighbours, and than TIGER's T5?

Leave-one-out on two data sets: the last item of every user is asked for, given the items before it (`backbone_data`).
Every method learns from the same histories, without the last two items of each user and without a tenth of the users
(`backbone_models`); one row shows what neighbours find that are counted in all prompts instead, which have more items.
Neighbours are hf_gr's item-to-item row as it is, without settings; TIGER's T5 has as much processor time as the
backbone, and its settings were not searched.
Lists have ten items, none of the user's own. Brackets are 95% intervals of a bootstrap over users; a difference is of
the same users, so that its interval is narrower. Settings were chosen on validation rows.

Beauty is the data set of AtSpeed (its table 3), which splits it by time: that is harder; the rows without a model are
printed as well, and `--train-periods` trains one.

    python examples/benchmark/backbone.py            # trains what is not there: an hour of one core; then minutes
    python examples/benchmark/backbone.py --fast     # a minute: the method, not the numbers
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbone_data import PERIODS, STUDIES, TEXTS, Row, Study, has_study, read_study
from backbone_models import backbone_folder, facts, items_folder, load, max_items, t5_folder
from report import environment, print_json_line, print_table

from hf_gr import ConstraintIndex
from hf_gr.answering.requests import Request
from hf_gr.files.atomic import replaced_file
from hf_gr.files.cache import cache_folder
from hf_gr.generation.prompts import pad, padding_side
from hf_gr.offline.baselines import Histories
from hf_gr.offline.intervals import UserValues
from hf_gr.offline.metrics import metric_names, user_metrics

__all__ = ["backbone_folder", "load", "max_items", "read_study"]  # what other experiments take from here

CUTOFFS = (1, 5, 10)
METRICS = {"H@1": "recall@1", "H@5": "recall@5", "H@10": "recall@10", "N@5": "ndcg@5", "N@10": "ndcg@10"}
BACKBONE = "backbone"
STAMPS = ("trained_at", "searched_at")  # commits
RESAMPLES, BATCH = 2000, 64
FAST_ROWS = 100
# What papers print for Beauty, in percent: H@5, H@10, N@5, N@10. No row is of these users with this split.
PRINTED = [
    ("SASRec, in TIGER's table 1", "22,363 users, leave-one-out", "3.87", "6.05", "2.49", "3.18"),
    ("TIGER, its table 1", "22,363 users, leave-one-out", "4.54", "6.48", "3.21", "3.84"),
    ("Llama, beam search, NEZHA's table 3", "52,204 users", "3.92", "5.68", "2.54", "3.11"),
    ("LC-Rec (LLaMA-7B), AtSpeed's table 2", "these users, split by time", "0.56", "0.98", "", ""),
]

Lists = list[list[Any]]


def count_lists(study: Study, rows: Sequence[Row], *, all_prompts: bool = False) -> dict[str, Lists]:
    """Popular items and neighbours, counted in the histories to train on, or in all prompts."""
    histories = Histories()
    histories.add([row.history.tolist() for row in rows] if all_prompts else [known.tolist() for known in study.train])
    learned = histories.baselines(study.index, omit_history=True)
    answers = [learned.answer(Request(0, []), row.history.tolist(), top_k=CUTOFFS[-1]) for row in rows]
    return {name: [answer[name] for answer in answers] for name in answers[0]}


def search(
    model: Any, index: ConstraintIndex, tokens: np.ndarray, rows: Sequence[Row], *, num_items: int, num_beams: int
) -> Lists:
    """The ten best items of beam search for every row, without those of its history."""
    is_t5, fill = model.config.is_encoder_decoder, model.config.pad_token_id
    order = sorted(range(len(rows)), key=lambda row: min(len(rows[row].history), num_items))
    lists: Lists = [[] for _ in rows]
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        prompts = [tokens[rows[row].history[-num_items:]].ravel() for row in batch]
        input_ids, mask = map(torch.from_numpy, pad(prompts, fill, side=padding_side(is_encoder_decoder=is_t5)))
        out = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            constraint_index=index,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            exclude_items=[rows[row].history.tolist() for row in batch],
        )
        found = index.items(out[:, 1 if is_t5 else input_ids.shape[1] :])
        for place, row in enumerate(batch):
            beams = found[place * num_beams : (place + 1) * num_beams]
            lists[row] = [item for beam in beams for item in beam][: CUTOFFS[-1]]
        if sys.stderr.isatty():
            print(f"\r{start + len(batch):,} of {len(rows):,} rows ", end="", file=sys.stderr, flush=True)
    return lists


def values_of(lists: Lists, rows: Sequence[Row]) -> UserValues:
    """The metrics of every row, for intervals."""
    values = UserValues()
    chosen = [metric_names(CUTOFFS).index(name) for name in METRICS.values()]
    several = len({row.user for row in rows}) < len(rows)
    numbers = {user: number for number, user in enumerate(dict.fromkeys(row.user for row in rows))}
    for items, row in zip(lists, rows, strict=True):
        metrics = user_metrics(items, [row.item], CUTOFFS)
        values.add(tuple(metrics[place] for place in chosen), numbers[row.user] if several else None)
    return values


def summary(values: UserValues) -> dict[str, list[float]]:
    """Mean and interval of each metric, in percent."""
    means = values.table[np.asarray(values.codes, dtype=np.int64)].mean(axis=0)
    bounds = values.intervals(num_resamples=RESAMPLES, seed=0)
    return {
        name: [100 * mean, *(100 * bound for bound in interval)]
        for name, mean, interval in zip(METRICS, means, bounds, strict=True)
    }


def difference(mine: UserValues, other: UserValues) -> dict[str, list[float]]:
    """The same of the differences to another method on the same rows."""
    means, bounds = mine.differences(other, num_resamples=RESAMPLES, seed=0)
    return {
        name: [100 * mean, *(100 * bound for bound in interval)]
        for name, mean, interval in zip(METRICS, means, bounds, strict=True)
    }


class Answers:
    """Lists of methods for the rows of a study, kept in a file each."""

    def __init__(self, study: Study, rows: Sequence[Row], options: argparse.Namespace) -> None:
        self.study, self.rows, self.options = study, rows, options

    def of(self, folder: Path, tokens: np.ndarray, index: ConstraintIndex) -> tuple[Lists, dict[str, Any]]:
        """Beam search by the model in a folder, and where and with which commit it ran."""
        asked = {"beams": self.options.num_beams, "rows": len(self.rows), **facts(folder)}
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        file = self.options.work / "lists" / f"{folder.name}-{key}.json"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            num_items = max_items(self.study, self.options.fast)
            found = search(
                load(folder), index, tokens, self.rows, num_items=num_items, num_beams=self.options.num_beams
            )
            kept = {"lists": found, "environment": environment(torch.device("cpu"))}
            with replaced_file(file) as unfinished:
                unfinished.write(json.dumps(kept).encode())
        kept = json.loads(file.read_text(encoding="utf-8"))
        return kept["lists"], kept["environment"]


def measure(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    """All methods on the test rows of a study, and the backbone's differences to the others."""
    rows = study.test[: FAST_ROWS if options.fast else None]
    answers = Answers(study, rows, options)
    counted = count_lists(study, rows)
    lists = {"popularity": counted["popularity"], "neighbours": counted["item-to-item"]}
    if study.name != PERIODS:  # there, later prompts of a user have the items that earlier ones are asked for
        lists["neighbours, of all prompts"] = count_lists(study, rows, all_prompts=True)["item-to-item"]
    single = np.arange(len(study.ids))[:, None]
    models: dict[str, Callable[[], tuple[Path, np.ndarray, ConstraintIndex]]] = {}
    if study.name in STUDIES and not options.backbone_alone:
        models["one token per item (SASRec)"] = lambda: (
            items_folder(study, options.work, options.fast),
            single,
            ConstraintIndex.from_sequences(single),
        )
        models["T5, equal time"] = lambda: (t5_folder(study, options.work, options.fast), study.tokens, study.index)
    if study.name != PERIODS or options.train_periods:
        models[BACKBONE] = lambda: (backbone_folder(study, options.work, options.fast), study.tokens, study.index)
    trained: dict[str, Any] = {}
    for name, make in models.items():
        folder, tokens, index = make()
        lists[name], made = answers.of(folder, tokens, index)
        trained[name] = {fact: facts(folder)[fact] for fact in ("parameters", "steps", "cpu_seconds")}
        trained[name] |= {"trained_at": facts(folder).get("commit"), "searched_at": made["commit"]}
    values = {name: values_of(found, rows) for name, found in lists.items()}
    return {
        "study": study.name,
        "rows": len(rows),
        "users": len({row.user for row in rows}),
        "unseen": float(np.mean(~np.isin([row.item for row in rows], np.concatenate(study.train)))),
        "trained": trained,
        "methods": {name: summary(found) for name, found in values.items()},
        "differences": {
            name: difference(values[BACKBONE], found)
            for name, found in values.items()
            if BACKBONE in values and name != BACKBONE
        },
    }


def show(study: Study, result: dict[str, Any]) -> None:
    print(
        f"\n{study.name}: {len(study.ids):,} items; {len(study.train):,} histories to train on; {result['rows']:,} "
        f"rows of {result['users']:,} users, {result['unseen']:.0%} of them with an item that training has not seen; "
        "percent"
    )
    cells = [
        [name, spent(result["trained"].get(name)), *map(with_bounds, metrics.values())]
        for name, metrics in result["methods"].items()
    ]
    print_table(["", "trained", *METRICS], cells)
    if not result["differences"]:
        return
    print()
    cells = [[name, "", *map(with_bounds, metrics.values())] for name, metrics in result["differences"].items()]
    print_table(["backbone, less", "", *METRICS], cells)


def with_bounds(values: Sequence[float]) -> str:
    mean, low, high = values
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def spent(trained: dict[str, Any] | None) -> str:
    if trained is None:
        return ""
    return f"{trained['parameters'] / 1e6:.2f} M, {trained['steps']:,} steps, {trained['cpu_seconds'] / 60:.0f} min"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*STUDIES, TEXTS, PERIODS)
    parser.add_argument("--studies", nargs="+", choices=names, default=list(names), help="what to measure")
    parser.add_argument("--backbone-alone", action="store_true", help="train no model beside it")
    parser.add_argument("--train-periods", action="store_true", help=f"train a backbone for {PERIODS}, too")
    parser.add_argument("--num-beams", type=int, default=50)
    parser.add_argument("--work", type=Path, default=cache_folder("experiments"), help="where models and lists are")
    parser.add_argument("--fast", action="store_true", help="few users and items, hardly trained")
    options = parser.parse_args(arguments)
    if options.fast:
        options.num_beams = 10
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps models this small
    results = []
    for name in options.studies:
        if not has_study(name):
            print(f"skipped {name}: its data are not there (see beauty_data.py)")
            continue
        study = read_study(name, options.fast)
        results.append(measure(study, options))
        show(study, results[-1])
    stamps = [made[stamp] for result in results for made in result["trained"].values() for stamp in STAMPS]
    print(f"\ntrained and searched at {', '.join(sorted({str(stamp) for stamp in stamps}))}")
    print("\nPrinted for Beauty by papers, each on other users or another split:")
    print_table(["", "", "H@5", "H@10", "N@5", "N@10"], PRINTED)
    print_json_line("backbone", torch.device("cpu"), {"num_beams": options.num_beams, "studies": results})


if __name__ == "__main__":
    main()
