# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Trie drafting against plain constrained beam search, by the same model over the same catalogue.

Plain search takes one forward per level after the prefill. `drafting="trie"` also scores the whole legal subtree below
the beams, wherever it fits the budget; `drafting="auto"` does so where its plan says that it pays. Answers are
compared before any time is printed, and times are paired: the contenders take turns. The model has random weights, so
its beams fit no user; the number of forwards depends on the catalogue, their time on the machine.

    python examples/benchmark/drafting.py         # Beauty (skipped without the data), and 1 M items of 8 tokens
    python examples/benchmark/drafting.py --device cuda --dtype bfloat16 --layers 28 --hidden 1024
    python examples/benchmark/drafting.py --fast  # a tiny model, a few seconds
"""

from __future__ import annotations

import argparse
import copy
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from beauty_data import DEFAULT_DATA, FILES, is_there
from generate import METAVAR, SCORE_TOL, Answer, Bench, Setting, difference, make_catalogue, make_model, make_prompt
from generate import measure as timed
from report import print_json_line, print_table

from hf_gr import ConstraintIndex, enable

SETTINGS = ("1,256,20", "1,256,128", "8,256,20")
FAST_SETTINGS = ("1,16,8", "2,16,20")
CATALOGUES = {  # name: --catalogue, items, tokens of an item
    "Beauty": ("beauty", 0, 4),
    "1 M items of 8 tokens": ("random", 1_000_000, 8),
}
FAST_CATALOGUES = {"3,000 items of 6 tokens": ("random", 3000, 6)}
PLAIN = "plain"


def contenders(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is passed to `generate` besides the rest."""
    budgets = {f"trie, {budget}": {"drafting": "trie", "draft_token_budget": budget} for budget in options.budgets}
    return {PLAIN: {}, **budgets, "auto": {"drafting": "auto"}}


def make_bench(catalogue: tuple[str, int, int], options: argparse.Namespace) -> Bench:
    """The model and a catalogue, without the dictionary that only transformers' own search needs."""
    options.catalogue, options.items, options.length = catalogue
    torch.manual_seed(options.seed)
    rows = make_catalogue(options)
    options.vocab = int(rows.max()) + 1
    plain = make_model(options)
    return Bench(plain, enable(copy.copy(plain)), ConstraintIndex.from_sequences(rows), rows, allowed={})


def run_setting(bench: Bench, setting: Setting, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per contender: forwards, nodes scored ahead, seconds, and the ratio of alternating times."""
    prompt = make_prompt(bench, setting, options.seed)
    prompt_length = prompt["input_ids"].shape[1]

    def ask(extra: dict[str, Any], *, scores: bool = False) -> Any:
        return bench.enabled.generate(
            **prompt,
            constraint_index=bench.index,
            num_beams=setting.beams,
            num_return_sequences=setting.beams,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=scores,
            **extra,
        )

    asked = contenders(options)
    answers: dict[str, Answer] = {}
    happened = {}
    for name, extra in asked.items():
        out = ask(extra, scores=True)
        shape = (setting.batch, setting.beams)
        answers[name] = Answer(
            out.sequences[:, prompt_length:].view(*shape, bench.length), out.sequences_scores.view(shape)
        )
        happened[name] = out.speculation
        exact = bench.plain.dtype is torch.float32
        wrong = difference(answers[name], answers[PLAIN], SCORE_TOL[bench.plain.dtype], exact=exact)
        if wrong is not None:
            raise SystemExit(f"({setting}): {name} does not answer what plain search answers: {wrong}")
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    for repeat in range(options.repeats + 1):
        turn = list(asked)
        for name in turn if repeat % 2 else reversed(turn):
            taken = timed(lambda extra=asked[name]: ask(extra), bench.device)[1]
            if repeat:  # the first round warms up
                seconds[name].append(taken)
    return [
        {
            **asdict(setting),
            "contender": name,
            "target_forwards": happened[name].target_forwards,
            "drafted_nodes": float(happened[name].drafted_nodes.float().mean()),
            "seconds": statistics.median(seconds[name]),
            "of_plain": statistics.median(
                ours / plain for ours, plain in zip(seconds[name], seconds[PLAIN], strict=True)
            ),
        }
        for name in asked
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--settings", type=Setting.parse, nargs="+", metavar=METAVAR, default=None)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512], help="budget of drafting='trie', in nodes")
    parser.add_argument("--hidden", type=int, default=None, help="512; 64 with --fast")
    parser.add_argument("--layers", type=int, default=None, help="6; 2 with --fast")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=None, help="timed calls of each; 15, or 2 with --fast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args(arguments)
    defaults = (("hidden", 512, 64), ("layers", 6, 2), ("repeats", 15, 2))
    for name, full, fast in defaults:
        if getattr(options, name) is None:
            setattr(options, name, fast if options.fast else full)
    if options.settings is None:
        options.settings = [Setting.parse(text) for text in (FAST_SETTINGS if options.fast else SETTINGS)]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.device = torch.device(options.device)
    results = []
    for name, catalogue in (FAST_CATALOGUES if options.fast else CATALOGUES).items():
        if catalogue[0] == "beauty" and not is_there(options.data, fast=True):
            continue
        bench = make_bench(catalogue, options)
        rows = [row for setting in options.settings for row in run_setting(bench, setting, options)]
        million = bench.plain.num_parameters() / 1e6
        print(f"{name}; {million:.1f} M parameters, {options.dtype}, {bench.length - 1} forwards after the prefill")
        print_table(
            [f"{METAVAR.lower()}", "drafting", "forwards", "nodes ahead", "seconds", "/ plain"],
            [
                [
                    f"{row['batch']}, {row['prompt']}, {row['beams']}",
                    row["contender"],
                    str(row["target_forwards"]),
                    f"{row['drafted_nodes']:.0f}",
                    f"{row['seconds']:.4f}",
                    f"{row['of_plain']:.2f}",
                ]
                for row in rows
            ],
        )
        print()
        results.append({"catalogue": name, "parameters": bench.plain.num_parameters(), "rows": rows})
    settings = {"dtype": options.dtype, "repeats": options.repeats, "seed": options.seed}
    print_json_line("drafting", options.device, {**settings, "results": results})


if __name__ == "__main__":
    main()
