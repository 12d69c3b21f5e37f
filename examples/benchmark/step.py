# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One constrained beam step against an unconstrained one, STATIC's own and its baselines, in STATIC's setting.

Whole decodes of L levels over precomputed logits, no model: batch 2, 70 beams, 8 tokens, a vocabulary of 2048 and 1e5
to 2e7 uniform items; then vocabularies of 256 to 32k, and a catalogue of Zipf codes whose largest nodes have thousands
of children while most have one. Ours is the library's own loop, without a rule, with one that half of the items meet,
and with 100 items excluded for each request. All contenders take turns, each adds the log-softmax over the full
vocabulary to the beam's score, and all select the next beams by the library's `topk`. They must give the same
beams and scores before any time is printed, and ours under a rule and exclusions those of an index of what is left; if
they do not, the exit status is 1.

A time is the sum of the levels' medians, divided by L; a ratio is the median over repetitions of one decode's time by
that of the unconstrained decode beside it. On a shared processor, threads that wait for each other measure the
scheduler: use one thread, or its CPU time.

    python examples/benchmark/step.py --cpu-time         # everything; about eight minutes, 8 GB of memory
    python examples/benchmark/step.py --items 1e5 1e6 --vocab --skewed-items 0    # two catalogues
    python examples/benchmark/step.py --fast             # small catalogues, a few seconds

Axes: B batch, K beams, V vocabulary, N items, L their tokens.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from baselines import CpuTrie, Method, Ppv, Static, search
from generate import Answer, difference
from report import print_json_line, print_table
from step_parts import (
    LENGTH,
    WITH_RULE,
    Calls,
    Clock,
    FromLastToken,
    MadeBeforehand,
    Setting,
    freed_memory_is_kept,
    load_rules,
    ours,
    read_rows,
)

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch.transition import DeviceCatalogue, device_catalogue

OURS, UNCONSTRAINED = "ours", "unconstrained"
STATIC, TRIE, PPV = "STATIC", "CPU trie", "PPV"
EXACT = (OURS, STATIC, TRIE, PPV)
VOCAB = 2048  # STATIC's
SPREAD = 3.0  # standard deviation of a logit
SCORE_TOL = 1e-4  # fp32: 8 additions to scores of up to 200, each log-softmax rounded in its own order
DEFAULTS: dict[str, Any] = {
    "items": [100_000, 1_000_000, 20_000_000],
    "vocab": [256, 512, 1024, 4096, 8192, 32768],
    "vocab_items": 1_000_000,
    "skewed_items": 1_000_000,
    "repeat": 21,
    "seconds": 4.0,
    "threads": None,
}
FAST: dict[str, Any] = {
    "items": [1000, 5000],
    "vocab": [256],
    "vocab_items": 1000,
    "skewed_items": 2000,
    "repeat": 3,
    "seconds": 0.3,
    "threads": 1,  # the machine of a CI job is shared
}


# The comparison of one setting.


@dataclass(frozen=True)
class Bench:
    """The contenders of one catalogue, and the shape of a step; `left` has the items under each kind of rules."""

    setting: Setting
    catalogues: dict[str, DeviceCatalogue]
    left: dict[str, list[np.ndarray]]
    methods: dict[str, Method]
    batch: int
    beams: int
    device: torch.device

    def run(self, name: str, scorer: Any) -> Answer:
        if name in self.catalogues:
            return ours(self.catalogues[name], scorer, self.beams)
        beams = search(self.methods[name], scorer, self.beams, LENGTH)
        return Answer(beams.sequences, beams.scores)

    @property
    def names(self) -> list[str]:
        return [*self.catalogues, *self.methods]


def make_bench(setting: Setting, rows: np.ndarray, options: argparse.Namespace) -> Bench:
    device = torch.device(options.device)
    index = ConstraintIndex.from_sequences(rows)
    rules = load_rules(index, options.beams, options.batch, device, options.seed)
    whole = device_catalogue(combine_rules([index.snapshot]), device)
    trie = index.snapshot.trie
    methods: dict[str, Method] = {UNCONSTRAINED: Method(), STATIC: Static(trie, setting.vocab, device)}
    if len(rows) <= options.trie_items:
        methods[TRIE] = CpuTrie(rows, setting.vocab)
    methods[PPV] = Ppv(rows, device)
    catalogues = {OURS: whole, **{name: catalogue for name, (catalogue, _) in rules.items()}}
    left = {name: items for name, (_, items) in rules.items()}
    return Bench(setting, catalogues, left, methods, options.batch, options.beams, device)


def check_answers(bench: Bench, rows: np.ndarray, seed: int) -> dict[str, float]:
    """Compare the contenders with each other; exit if they differ. Returns the seconds that each answer took."""
    random = torch.Generator().manual_seed(seed)
    shape = (FromLastToken.KEYS + bench.batch, bench.setting.vocab)
    tables = [(SPREAD * torch.randn(shape, generator=random)).to(bench.device) for _ in range(LENGTH)]
    answers, seconds = {}, {}
    for name in bench.names:
        clock = Clock(bench.device)
        answers[name] = bench.run(name, FromLastToken(tables, bench.batch))
        clock.mark()
        seconds[name] = sum(clock.seconds())
    for name in EXACT:
        if name in answers:
            require_same(bench, name, answers[OURS], answers[name])
    for name, left in bench.left.items():
        for row, items in enumerate(left):
            # The same search over an index of what is left to this request.
            exact = Ppv(np.ascontiguousarray(rows[items]), bench.device)
            beams = search(exact, FromLastToken(tables, bench.batch), bench.beams, LENGTH)
            one = Answer(*(part[row : row + 1] for part in (beams.sequences, beams.scores)))
            mine = Answer(*(part[row : row + 1] for part in (answers[name].sequences, answers[name].scores)))
            require_same(bench, name, mine, one)
            if name == WITH_RULE:  # which all requests share
                break
    return seconds


def require_same(bench: Bench, name: str, found: Answer, expected: Answer) -> None:
    problem = difference(found, expected, SCORE_TOL, exact=True)
    if problem is not None:
        raise SystemExit(f"MISMATCH at {bench.setting}, ours against {name}: {problem}")


def run_setting(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Check one setting, then time its contenders in turn."""
    log(f"{setting}: catalogue")
    rows = read_rows(setting, options.seed)
    bench = make_bench(setting, rows, options)
    log(f"{setting}: comparing answers")
    seconds = check_answers(bench, rows, options.seed)
    log(f"{setting}: timing")
    times, calls = time_decodes(bench, seconds, options)
    levels = {name: medians(runs.values()) for name, runs in times.items()}
    step = {name: sum(levels[name]) / LENGTH for name in times}
    return {
        **asdict(setting),
        "name": str(setting),
        "distinct": len(rows),
        "step_seconds": step,
        "level_seconds": levels,
        "ratio": {name: paired(runs, times[UNCONSTRAINED]) for name, runs in times.items()},
        "repetitions": {name: len(runs) for name, runs in times.items()},
        "calls": calls,
    }


@freed_memory_is_kept()
def time_decodes(
    bench: Bench, seconds: dict[str, float], options: argparse.Namespace
) -> tuple[dict[str, dict[int, list[float]]], dict[str, int]]:
    """Seconds of every level, for every contender and each of its repetitions, by number; and calls of PyTorch's."""
    random = torch.Generator().manual_seed(options.seed)
    widths = [1] + [bench.beams] * (LENGTH - 1)
    logits = [
        (SPREAD * torch.randn(bench.batch, width, bench.setting.vocab, generator=random)).to(bench.device)
        for width in widths
    ]
    # A slow contender runs only every so many repetitions.
    every = {name: max(1, int(taken * options.repeat / options.seconds)) for name, taken in seconds.items()}
    every[UNCONSTRAINED] = 1  # the others are compared with the one beside them
    times: dict[str, dict[int, list[float]]] = {name: {} for name in bench.names}
    for repetition in range(options.repeat):
        names = [name for name in bench.names if repetition % every[name] == 0]
        for name in names if repetition % 2 == 0 else reversed(names):
            clock = Clock(bench.device, cpu_time=options.cpu_time)
            bench.run(name, MadeBeforehand(logits, clock))
            clock.mark()
            times[name][repetition] = clock.seconds()
    calls = {}
    for name in bench.names:
        with Calls() as counted:
            bench.run(name, MadeBeforehand(logits, Clock(bench.device)))
        calls[name] = counted.number
    return times, calls


def medians(runs: Iterable[list[float]]) -> list[float]:
    """Level by level, so that a disturbance costs one level of one repetition and not the whole decode."""
    return [statistics.median(level) for level in zip(*runs, strict=True)]


def paired(runs: dict[int, list[float]], others: dict[int, list[float]]) -> float:
    """The median ratio of decodes of one repetition."""
    return statistics.median(sum(run) / sum(others[number]) for number, run in runs.items())


# Reporting.


def print_times(results: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for result in results for name in result["step_seconds"]))
    print("ms per step")
    print_cells(results, names, lambda result, name: f"{1000 * result['step_seconds'][name]:.3f}")
    print("\ntime of a decode by that of the unconstrained one beside it")
    print_cells(results, names, lambda result, name: f"{result['ratio'][name]:.2f}")
    print("\noperations of PyTorch in a decode, of some microseconds each however small they are")
    print_cells(results, names, lambda result, name: str(result["calls"][name]))


def print_cells(
    results: list[dict[str, Any]], names: Sequence[str], cell: Callable[[dict[str, Any], str], str]
) -> None:
    """A row for each catalogue, a column for each contender."""
    rows = [
        [result["name"], *(cell(result, name) if name in result["step_seconds"] else "-" for name in names)]
        for result in results
    ]
    print_table(["catalogue", *names], rows)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", nargs="*", type=count, help=f"sizes at V = {VOCAB} (1e5 1e6 2e7)")
    parser.add_argument("--vocab", nargs="*", type=count, help="other vocabularies (256 512 1024 4096 8192 32768)")
    parser.add_argument("--vocab-items", type=count, help="their items (1e6)")
    parser.add_argument("--skewed-items", type=count, help="items of the Zipf catalogue (1e6), 0: none")
    parser.add_argument("--skewed-vocab", type=count, default=8192)
    parser.add_argument("--trie-items", type=count, default=1_000_000, help="most items of the CPU trie")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--beams", type=int, default=70)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread instead of wall-clock time")
    parser.add_argument("--repeat", type=int, help="timed repetitions (21)")
    parser.add_argument("--seconds", type=float, help="time for a slow contender's repetitions (4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="small catalogues, for CI")
    options = parser.parse_args(arguments)
    for name, value in (FAST if options.fast else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.cpu_time:
        if options.device != "cpu" or options.threads not in (None, 1):
            parser.error("--cpu-time is that of one thread: it goes with --device cpu and no other --threads")
        options.threads = 1
    for items in (*options.items, options.vocab_items, options.skewed_items or options.beams):
        if items < options.beams:
            parser.error(f"{items} items, expected no fewer than the {options.beams} beams")
    for vocab in (*options.vocab, options.skewed_vocab):
        if not 2 <= vocab <= 2**15:
            parser.error(f"a vocabulary of {vocab}, expected 2 to 32768: codes are kept in 16 bits")
    return options


def count(text: str) -> int:
    """An integer that may be written as 1e6."""
    return int(float(text))


def make_settings(options: argparse.Namespace) -> list[Setting]:
    settings = [Setting("uniform", items, VOCAB) for items in options.items]
    settings += [Setting("uniform", options.vocab_items, vocab) for vocab in options.vocab]
    if options.skewed_items:
        settings.append(Setting("zipf", options.skewed_items, options.skewed_vocab))
    return settings


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    results = []
    for setting in make_settings(options):
        results.append(run_setting(setting, options))
        gc.collect()
    device = torch.device(options.device)
    clock = "CPU time of one thread" if options.cpu_time else f"{torch.get_num_threads()} threads"
    print(f"batch {options.batch}, {options.beams} beams, {LENGTH} levels, {device}, {clock}; medians")
    print_times(results)
    shape = {"batch": options.batch, "beams": options.beams, "length": LENGTH, "cpu_time": options.cpu_time}
    print_json_line("step", device, {**shape, "results": results})


if __name__ == "__main__":
    main()
