# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""How long to train a draft head: NEZHA, a head alone and the control with several times the steps of `nezha.py`.

One seed, ten beams; everything else is as there, and so are the columns.

    python examples/benchmark/nezha_budgets.py          # ten minutes of one core, after nezha.py
    python examples/benchmark/nezha_budgets.py --fast   # seconds: the method, not the numbers
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from backbone_data import STUDIES, has_study
from nezha import CONSTRAINED, CONTROL, FAST, FULL, HEADS, NEZHA, Scale, comparison_of, shares, span
from nezha_heads import ALONE, FURTHER
from nezha_lists import ratio, some_of, summary
from report import print_json_line, print_table
from transformers.utils.logging import disable_progress_bar

from hf_gr.files.cache import cache_folder

METHODS = (CONTROL, *(method for method in HEADS if method.name in ("NEZHA", "NEZHA, head trained alone")))
NUM_BEAMS, ROWS = 10, 8000


def measure(work: Path, name: str, scale: Scale, factors: Sequence[int], *, fast: bool) -> list[dict[str, Any]]:
    """A row for each method and number of steps."""
    found = []
    for factor in factors:
        longer = replace(scale, steps={study: factor * steps for study, steps in scale.steps.items()}, seeds=(0,))
        ours = comparison_of(work, name, longer, fast=fast, early=False)
        ours.train([NEZHA, FURTHER, ALONE])
        rows = some_of(ours.study.test, 32 if fast else ROWS)
        base = summary(ours.lists(CONSTRAINED, rows, NUM_BEAMS), rows)[1]
        seconds = ours.training()["seconds"]
        for method in METHODS:
            own, hits = summary(ours.lists(method, rows, NUM_BEAMS), rows)
            found.append(
                {
                    "steps": ours.settings.num_steps,
                    "method": method.name,
                    "seconds": seconds[method.model],
                    **own,
                    "share": ratio(hits, base),
                }
            )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--factors", nargs="+", type=int, default=[1, 2, 4], help="of the steps of nezha.py")
    parser.add_argument("--work", type=Path, help="where nezha.py keeps its models; for --fast nowhere by default")
    parser.add_argument("--fast", action="store_true", help="tiny models, few rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as in nezha.py
    disable_progress_bar()
    results = {}
    with tempfile.TemporaryDirectory(prefix="hf_gr_nezha_") as folder:
        work = options.work or (Path(folder) if options.fast else cache_folder("experiments"))
        for name in options.studies:
            if not has_study(name):
                print(f"skipped {name}: no data")
                continue
            scale = FAST if options.fast else FULL
            results[name] = measure(work, name, scale, options.factors, fast=options.fast)
            print(f"\n{name}, {NUM_BEAMS} beams")
            print_table(
                ["steps", "method", "seconds", "rows", "H@10", "95%", "/ beam search", "95%"],
                [
                    [
                        f"{row['steps']:,}",
                        row["method"],
                        f"{row['seconds']:.0f}",
                        f"{row['rows']:,}",
                        f"{row['H@10']:.2%}",
                        span(row["interval"]),
                        *shares(row["share"]),
                    ]
                    for row in results[name]
                ],
            )
    print_json_line("nezha_budgets", torch.device("cpu"), {"results": results})


if __name__ == "__main__":
    main()
