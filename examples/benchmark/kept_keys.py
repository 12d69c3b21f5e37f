# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What keys that are kept between requests gain: a shared instruction, and users who return with one item more.

Every prompt is answered twice in turn, whole and with kept keys, by the decoder of `hf-gr serve`. Times are CPU
time of one thread, medians over prompts of their own; ratios are medians of pairs. No time is printed before the
answers agree; if they do not, the exit status is 1. New users without a common prefix are the losing row: what keeping
costs where nothing is gained.

    python examples/benchmark/kept_keys.py                        # about five minutes
    python examples/benchmark/kept_keys.py --drafting trie        # with drafts, which a prefill takes along
    python examples/benchmark/kept_keys.py --fast                 # a tiny model, a few seconds

Axes: B batch, K beams.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import generate
import numpy as np
import torch
from report import print_json_line, print_table

from hf_gr import ConstraintIndex, enable
from hf_gr.answering.decoding import Answer, Decoder
from hf_gr.answering.prefix_cache import PrefixCache, prefix_cache
from hf_gr.answering.requests import Request

WITHOUT, WITH = "whole prompts", "kept keys"
TOP_K = 10


@dataclass(frozen=True)
class Case:
    """What a prompt has in common with earlier ones.

    Attributes:
        name: of the row.
        num_known: tokens of it that were in an earlier prompt.
        num_new: its other tokens.
        is_shared: whether all users have the same known tokens, or each their own.
    """

    name: str
    num_known: int
    num_new: int
    is_shared: bool = False


CASES = (
    Case("shared instruction, 64 + 20 tokens", 64, 20, is_shared=True),
    Case("returning users, 256 + 4 tokens", 256, 4),
    Case("new users, 256 tokens", 0, 256),
)
FAST_CASES = (
    Case("shared instruction, 64 + 8 tokens", 64, 8, is_shared=True),
    Case("returning users, 32 + 4 tokens", 32, 4),
    Case("new users, 32 tokens", 0, 32),
)


def draw(random: np.random.Generator, rows: np.ndarray, num_tokens: int) -> list[int]:
    """A history of random items."""
    items = random.integers(len(rows), size=-(-num_tokens // rows.shape[1]))
    return rows[items].flatten()[:num_tokens].tolist()


def difference(found: list[Answer], expected: list[Answer]) -> str | None:
    """How answers differ beyond rounding, or None; items of scores that close may swap, and the last one differ."""
    tolerance = generate.SCORE_TOL[torch.float32]
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        gap = float(np.abs(np.subtract(ours.scores, theirs.scores)).max())
        if not gap <= tolerance:
            return f"row {row}: scores differ by {gap:.2e}, expected at most {tolerance:.0e}"
        ours_of, theirs_of = (dict(zip(one.items, one.scores, strict=True)) for one in (ours, theirs))
        for item in ours_of.keys() ^ theirs_of.keys():
            score = ours_of.get(item, theirs_of.get(item, 0.0))
            if not abs(score - theirs.scores[-1]) <= tolerance:
                return f"row {row}: item {item} of score {score:.6f} is in one answer alone"
    return None


def run_case(
    case: Case, plain: Decoder, keys: PrefixCache, rows: np.ndarray, options: argparse.Namespace, *, batch_size: int
) -> dict[str, Any]:
    """Time a kind of prompts, whole and with kept keys, in turn."""
    random = np.random.default_rng(options.seed)
    keeping = replace(plain, prefix_cache=keys)
    shared = draw(random, rows, case.num_known)
    times: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    num_missing = []
    keys.clear()
    for repetition in range(options.repeats + 1):  # the first one warms up
        known = [shared if case.is_shared else draw(random, rows, case.num_known) for _ in range(batch_size)]
        batch = [Request(row, tokens + draw(random, rows, case.num_new)) for row, tokens in enumerate(known)]
        if case.num_known and not (case.is_shared and repetition):
            keeping.answer([Request(row, tokens) for row, tokens in enumerate(known)])
        num_missing.append(statistics.mean(keys.num_missing(request.tokens) for request in batch))
        ways = [(WITHOUT, plain), (WITH, keeping)]
        answers = {}
        for name, decoder in ways if repetition % 2 else reversed(ways):
            start = time.process_time()
            answers[name] = decoder.answer(batch)
            times[name].append(time.process_time() - start)
        if (problem := difference(answers[WITH], answers[WITHOUT])) is not None:
            raise SystemExit(f"MISMATCH, {case.name}, batch {batch_size}, {plain.num_beams} beams: {problem}")
    times = {name: seconds[1:] for name, seconds in times.items()}
    return {
        "case": case.name,
        "batch": batch_size,
        "beams": plain.num_beams,
        "num_missing": statistics.mean(num_missing[1:]),
        "cpu_seconds": times,
        "median": {name: statistics.median(seconds) for name, seconds in times.items()},
        "ratio": statistics.median(first / second for first, second in zip(*times.values(), strict=True)),
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="B (1 4)")
    parser.add_argument("--beams", type=int, nargs="+", default=[20, 50], help="K (20 50)")
    parser.add_argument("--drafting", choices=("trie",), help="generate's option")
    parser.add_argument("--repeats", type=int, help="pairs of a row (11)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="a tiny model and short prompts, for CI")
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (2 if options.fast else 11)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    described = generate.parse(["--fast"] if options.fast else [])
    torch.manual_seed(options.seed)
    rows = generate.make_catalogue(described)
    model = enable(generate.make_model(described))
    keys = prefix_cache(model)
    assert keys is not None
    decoder = Decoder(model, ConstraintIndex.from_sequences(rows), top_k=TOP_K, num_beams=2, token_budget=0)
    decoder = replace(decoder, options={} if options.drafting is None else {"drafting": options.drafting})
    print(
        f"Qwen3 architecture, {model.num_parameters() / 1e6:.1f} M parameters, float32, one thread; "
        f"{len(rows):,} items of {rows.shape[1]} tokens; drafting={options.drafting}; CPU time, medians",
        flush=True,
    )
    results = []
    for case in FAST_CASES if options.fast else CASES:
        for num_beams in options.beams:
            for batch_size in options.batches:
                print(f"{case.name}: {batch_size}, {num_beams}", file=sys.stderr, flush=True)
                one = replace(decoder, num_beams=num_beams, top_k=min(TOP_K, num_beams))
                results.append(run_case(case, one, keys, rows, options, batch_size=batch_size))
    header = ["prompts", "batch, beams", "tokens computed", f"{WITHOUT} ms", f"{WITH} ms", "ratio"]
    table = [
        [
            result["case"],
            f"{result['batch']}, {result['beams']}",
            f"{result['num_missing']:.0f}",
            *(f"{1000 * result['median'][name]:.1f}" for name in (WITHOUT, WITH)),
            f"{result['ratio']:.2f}",
        ]
        for result in results
    ]
    print_table(header, table)
    model_line = {"parameters": model.num_parameters(), "drafting": options.drafting, "repeats": options.repeats}
    print_json_line("kept_keys", torch.device("cpu"), {"model": model_line, "results": results})


if __name__ == "__main__":
    generate.transformers_logging.set_verbosity_error()
    main()
