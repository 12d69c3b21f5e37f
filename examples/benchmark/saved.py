# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a call does not compute: CPU seconds with it and without, in turns, equal answers; medians and their ratio.

- the output head's rows of tokens that no item has: greedy search and `renormalize_logits=True`, beside the default;
- padding: a batch of unequal prompts in groups of like length;
- what prompts share: equal ones, as of a group of rollouts, and an instruction before each;
- one beam beside transformers' own constrained greedy search.

    OMP_NUM_THREADS=1 python examples/benchmark/saved.py           # five minutes
    OMP_NUM_THREADS=1 python examples/benchmark/saved.py --fast    # seconds: the method, not the numbers
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import generate
import numpy as np
import torch
from report import print_json_line, print_table
from transformers.utils import logging as transformers_logging

from hf_gr.generation.torch import prefill, sliced_head

Call = Callable[[], Any]


def whole_head(call: Call) -> Any:
    """The result of a call that slices no head."""
    with patch.object(sliced_head, "MOST", 0.0):
        return call()


def whole_batch(call: Call) -> Any:
    """The result of a call that splits no batch."""
    with patch.dict(prefill.OF_A_FORWARD, cpu=10**9):
        return call()


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of every call, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name in calls if number % 2 else reversed(calls):
            start = time.process_time()
            calls[name]()
            times[name].append(time.process_time() - start)
    return {name: found[1:] for name, found in times.items()}


def batch(bench: generate.Bench, lengths: Sequence[int], *, equal: int = 0) -> dict[str, Any]:
    """Left-padded prompts, whose first tokens are equal."""
    given = generate.make_prompt(bench, generate.Setting(len(lengths), max(lengths), 1), 0)
    tokens, mask = given["input_ids"], given["attention_mask"]
    first = tokens[0, -lengths[0] :][:equal].clone()
    for row, length in enumerate(lengths):
        mask[row, :-length] = 0
        tokens[row, -length:][:equal] = first
    return {"input_ids": tokens * mask, "attention_mask": mask}


def cases(fast: bool) -> Iterator[tuple[str, str, bool, Call, Call]]:
    """Of every row: what is asked, what is saved, whether answers are equal; a call without it, and with it."""
    small = ["--fast"] if fast else []
    for vocab in (2080,) if fast else (13312, 151936):
        bench = generate.make_bench(generate.parse(["--vocab", str(vocab), *small]))
        for beams in (1, 50):
            prompt = generate.make_prompt(bench, generate.Setting(1, 256, beams), 0)
            default = partial(bench.enabled.generate, **prompt, constraint_index=bench.index, num_beams=beams)
            legal = partial(default, renormalize_logits=True)
            name = f"{beams} beam{'s' * (beams > 1)}, a vocabulary of {vocab:,}"
            yield name, "rows of the head", True, partial(whole_head, legal), legal
            if beams > 1:
                yield name, "beside the default", False, default, legal
    bench = generate.make_bench(generate.parse(small or ["--layers", "4", "--hidden", "256"]))
    ask = partial(bench.enabled.generate, constraint_index=bench.index)
    batches = {
        "16 prompts of 16 to 511 tokens": ("padding", batch(bench, [16 + 33 * n for n in range(16)])),
        "15 prompts of 16 tokens, one of 512": ("padding", batch(bench, [16] * 15 + [512])),
        "8 equal prompts of 256 tokens": ("equal prompts", batch(bench, [256] * 8, equal=256)),
        "8 prompts of 260, 200 of them equal": ("a beginning", batch(bench, [260] * 8, equal=200)),
        "16 prompts of 256 tokens": ("nothing", batch(bench, [256] * 16)),
    }
    for name, (saved, prompts) in batches.items():
        call = partial(ask, **prompts, num_beams=20)
        yield name, saved, True, partial(whole_batch, call), call
    samples = partial(ask, do_sample=True, top_k=0, seed=0)
    alone = partial(samples, **batch(bench, [256]), num_return_sequences=64)
    eight = partial(samples, **batch(bench, [256] * 8, equal=256), num_return_sequences=8)
    yield "8 equal prompts, 8 samples each", "beside 64 of one", False, alone, eight
    bench = generate.make_bench(generate.parse(small))
    for setting in (generate.Setting(1, 64, 1), generate.Setting(1, 256, 1)):
        given = bench, generate.make_prompt(bench, setting, 0), setting
        theirs, ours = partial(generate.constrained, *given), partial(generate.ours, *given)
        yield f"1 beam, a prompt of {setting.prompt}", "beside transformers", True, theirs, ours


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fast", action="store_true", help="a tiny model, twice")
    options = parser.parse_args(arguments)
    rows, results = [], []
    for name, saved, is_equal, without, call in cases(options.fast):
        if is_equal and not torch.equal(without(), call()):
            raise SystemExit(f"{name}: other answers without what is saved")
        times = in_turns({"without": without, "with": call}, 2 if options.fast else options.repeats)
        low, middle, high = np.quantile(np.divide(times["with"], times["without"]), [0.25, 0.5, 0.75])
        medians = [f"{1e3 * statistics.median(one):.1f}" for one in times.values()]
        rows.append([name, saved, *medians, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
        results.append({"call": name, "saved": saved, "seconds": times})
    print_table(["call", "saved, or beside what", "without, ms", "with, ms", "ratio", "quartiles"], rows)
    print_json_line("saved", torch.device("cpu"), {"results": results})


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
