# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr recommend`: from a table of users to a table of items. Takes the options of `hf_gr.recommend`."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from .failures import SKIPPED, is_main, quiet_libraries, say

if TYPE_CHECKING:
    from hf_gr.jobs.run import Recommended


def recommend(
    *,
    model: str,
    users: list[Path],
    output: Path,
    as_json: bool = False,
    drafting: str | None = None,
    option: list[str] | None = None,
    **given: Any,
) -> None:
    """Recommend items to every user of a table.

    Writes a Parquet file with a row for every user, in their order: the user, items (ids, best first) and scores.
    After a kill or an interruption, the same command continues where it stopped. Under `accelerate launch -m hf_gr.cli
    recommend ...` it runs on all GPUs, and under `python -m torch.distributed.run --standalone --nproc_per_node N -m
    hf_gr.cli recommend ...` in N processes on CPUs, where `accelerate launch --cpu` starts one. Exit code 0:
    all rows; 1: stopped, what is finished is kept, and the same command may finish it; 2: refused, an option, a file
    or a row has to be changed first; 3: finished, with skipped rows; 130: interrupted. A launcher of several processes
    turns all codes but 0 into 1.

    Args:
        model: a model's folder or repository.
        users: a table of users: .parquet, .csv, .tsv or .jsonl (also .gz, .bz2, .zst), or a folder of them; may be
            given several times.
    """
    start = perf_counter()
    quiet_libraries()
    from hf_gr import recommend as run

    made: Recommended = run(model, users, output, **given, **of_generate(drafting, option, given))
    if is_main():
        if as_json:
            seconds = round(perf_counter() - start, 3)
            typer.echo(json.dumps(asdict(made) | {"output": str(made.output), "seconds": seconds}))
        else:
            _print(made, perf_counter() - start)
        if made.num_skipped:
            raise typer.Exit(SKIPPED)


def of_generate(drafting: str | None, option: Any, others: Collection[str]) -> dict[str, Any]:
    """The arguments of `generate` that were given, none of which may have a flag of its own, among the `others`."""
    for name in option or ():
        if name in others or name == "drafting":
            raise ValueError(
                f"option={f'{name}={option[name]}'!r}, expected an argument of generate that has no flag of its own"
            )
    return ({} if drafting is None else {"drafting": drafting}) | (option or {})


def _print(made: Recommended, seconds: float) -> None:
    """Print what was written, and what was skipped."""
    answered = made.num_rows - made.num_skipped
    said = {
        f"{answered:,} of {made.num_rows:,} users have recommendations; {seconds:.1f} s with loading.": True,
        "It was already finished: nothing to do.": made.already_finished,
        f"{made.num_resumed:,} windows were finished by an earlier run.": made.num_resumed,
        f"{made.num_fallback:,} users without a known item got the fallback: column is_fallback.": made.num_fallback,
        f"{made.num_dropped:,} items were dropped, which the catalogue does not have: num_dropped.": made.num_dropped,
        f"{made.num_skipped:,} rows were skipped: column error says why.": made.num_skipped,
        f"Saved to {made.output}": True,
    }
    for line, is_said in said.items():
        if is_said:
            say(line)
