# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A backbone worth decoding from: is it better than popular items, than neighbours, and than TIGER's T5?

Leave-one-out on two data sets: the last item of every user is asked for, given the items before it (`backbone_data`).
Models learn from the same histories, without the last two items of each user and without a tenth of the users
(`backbone_models`); popular items and neighbours are `hf_gr.evaluate`'s own, counted in all prompts, which have more.
Each model has as many trials of settings (`--trials`), and TIGER's T5 as much processor time as the backbone. The last
data set is Beauty with the semantic IDs that AtSpeed publishes for it. Lists have ten items, none of the user's own.
Intervals are 95%, by users drawn again; differences are of the same users.

    python examples/benchmark/backbone.py            # trains what is not there: three hours of one core; then minutes
    python examples/benchmark/backbone.py --fast     # a minute: the method, not the numbers
"""

import argparse
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from backbone_data import STUDIES, TEXTS, Study, has_study, read_study
from backbone_models import backbone_folder, facts, items_folder, load, t5_folder, tuned
from report import print_json_line, print_table

import hf_gr
from hf_gr.files.cache import cache_folder

METRICS = ("recall@1", "recall@5", "recall@10", "ndcg@5", "ndcg@10")
FAST_ROWS = 100
# What papers print for Beauty, in percent: H@5, H@10, N@5, N@10. No row is of these users with this split.
PRINTED = [
    ("SASRec, in TIGER's table 1", "22,363 users, leave-one-out", "3.87", "6.05", "2.49", "3.18"),
    ("TIGER, its table 1", "22,363 users, leave-one-out", "4.54", "6.48", "3.21", "3.84"),
    ("Llama, beam search, NEZHA's table 3", "52,204 users", "3.92", "5.68", "2.54", "3.11"),
    ("LC-Rec (LLaMA-7B), AtSpeed's table 2", "these users, split by time", "0.56", "0.98", "", ""),
]


def measure(study: Study, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """All methods on the test rows, and how the models were trained."""
    rows = study.test[: FAST_ROWS if options.fast else None]
    table = pa.table({"before": [row.history.tolist() for row in rows], "next": [row.item for row in rows]})
    ours = partial(backbone_folder, study, options.work, options.fast)
    makers: dict[str, Any] = {"backbone": ours}
    indexes = {"backbone": study.index}
    if not options.backbone_alone:
        makers["T5, equal time"] = partial(t5_folder, study, options.work, options.fast)
        indexes["T5, equal time"] = study.index
        if study.name in STUDIES:
            makers["one token per item (SASRec)"] = partial(items_folder, study, options.work, options.fast)
            single = np.arange(len(study.ids))[:, None]
            indexes["one token per item (SASRec)"] = hf_gr.ConstraintIndex.from_sequences(single)
    folders, chosen = {}, {}
    for name, make in makers.items():
        if "backbone" in folders and name.startswith("T5"):
            make = partial(make, backbone=folders["backbone"])
        folders[name], chosen[name] = tuned(make, options.trials)
    models = {name: load(folder) for name, folder in folders.items()}
    how: dict[str, Any] = {"history": "before", "target": "next", "exclude": "before", "num_beams": options.num_beams}
    found = hf_gr.evaluate(models, table, constraint_index=indexes, sampled_users=0, progress=False, **how)
    return found, {name: facts(folder) | {"chosen": chosen[name]} for name, folder in folders.items()}


def show(study: Study, found: Any, trained: dict[str, Any]) -> None:
    """Percent, with intervals; and the backbone's differences to the others."""
    result = found.results[0]
    print(
        f"\n{study.name}: {len(study.ids):,} items; {len(study.train):,} histories to train on; {result.num_rows:,} "
        "rows; percent"
    )

    def cell(mean: float, bounds: tuple[float, float] | None) -> str:
        return f"{100 * mean:.2f}" + ("" if bounds is None else f" [{100 * bounds[0]:.2f}, {100 * bounds[1]:.2f}]")

    def spent(name: str) -> str:
        made = trained.get(name)
        return (
            made and f"{made['parameters'] / 1e6:.2f} M, {made['steps']:,} steps, {made['cpu_seconds'] / 60:.0f} min"
        )

    cells = [
        [one.name, spent(one.name) or "", *(cell(one.metrics[name], one.intervals.get(name)) for name in METRICS)]
        for one in (*found.baselines, *found.results)
    ]
    print_table(["", "trained", *METRICS], cells)
    for name, made in trained.items():
        if made["chosen"]:
            print(f"{name}: {', '.join(f'{key} {value}' for key, value in made['chosen'].items())}")
    print()
    others = [*found.results[1:], *found.baselines]
    cells = []
    for other in others:
        by_metric = {one.metric: one for one in found.difference(result, other)}
        less = [by_metric.get(name) for name in METRICS]
        cells.append([other.name, *("" if one is None else cell(one.difference, (one.low, one.high)) for one in less)])
    print_table(["backbone, less", *METRICS], cells)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=(*STUDIES, TEXTS), default=[*STUDIES, TEXTS])
    parser.add_argument("--backbone-alone", action="store_true", help="train no model beside it")
    parser.add_argument("--trials", type=int, help="of settings, for each model: 5; 2 with --fast")
    parser.add_argument("--num-beams", type=int, help="50; 10 with --fast")
    parser.add_argument("--work", type=Path, default=cache_folder("experiments"), help="where models are")
    parser.add_argument("--fast", action="store_true", help="few users and items, hardly trained")
    options = parser.parse_args(arguments)
    options.num_beams = options.num_beams or (10 if options.fast else 50)
    options.trials = options.trials or (2 if options.fast else 5)
    torch.set_num_threads(1)  # a second thread hardly helps models this small
    logging.getLogger("hf_gr.evaluate").setLevel(logging.ERROR)
    results = []
    for name in options.studies:
        if not has_study(name):
            print(f"skipped {name}: its data are not there (see beauty_data.py)")
            continue
        study = read_study(name, options.fast)
        found, trained = measure(study, options)
        show(study, found, trained)
        results.append({"study": name, "trained": trained, "evaluation": json.loads(found.to_json())})
    print("\nPrinted for Beauty by papers, each on other users or another split:")
    print_table(["", "", "H@5", "H@10", "N@5", "N@10"], PRINTED)
    print_json_line("backbone", torch.device("cpu"), {"num_beams": options.num_beams, "studies": results})


if __name__ == "__main__":
    main()
