# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory and time of one call over beams and over prompts: one shared cache, and transformers.

xGR's figures 15 and 16 (memory at 128 to 512 beams over 1k tokens, and at 256 beams over up to 3k tokens), here from 8
to 512 beams and 128 to 4,096 tokens, and the time of the same calls. Ours shares the prompt's keys between beams;
transformers' beam search, with `prefix_allowed_tokens_fn`, computes the prompt for every beam; the prefill alone is
what neither can be below.

    python examples/benchmark/xgr.py          # a few minutes of one core
    python examples/benchmark/xgr.py --fast   # a tiny model, seconds

No figure is taken before the answers agree. Memory: the most bytes that PyTorch's allocator had given out at once
above the loaded model. Time: CPU seconds of the process, the median of the repetitions (of transformers one) after a
first call. Rows of transformers of more than `--most` beams times tokens are left out.

Axes: B batch (1), K beams, P prompt.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import generate
import torch
from generate import CONSTRAINED, OURS, Bench, Setting, as_answer, difference, log, raw_forwards
from report import print_json_line, print_table
from transformers.utils import logging as transformers_logging

PREFILL = "prefill"
BEAMS, PROMPTS = (8, 16, 32, 64, 128, 256, 512), (128, 256, 512, 1024, 2048, 4096)
AT_BEAMS, AT_PROMPT = 256, 1024  # xGR's
FAST = {"beams": (4, 16), "prompts": (32, 64), "at_beams": 16, "at_prompt": 32, "repeats": 1}
MODEL = {"layers": 4, "hidden": 256, "vocab": 1040, "items": 12_000}  # 3 M parameters
TOLERANCE = generate.SCORE_TOL[torch.float32]


def peak_allocated(call: Callable[[], Any]) -> int:
    """The most bytes of a CPU that were allocated and not yet freed at once, from the allocator's own reports."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = call()
    del result
    events = found.profiler.kineto_results.events()
    reports = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert reports, "nothing was allocated: does this PyTorch report it?"
    now = peak = 0
    for _, size in reports:
        now += size
        peak = max(peak, now)
    return peak


def cpu_seconds(call: Callable[[], Any]) -> float:
    since = time.process_time()
    call()
    return time.process_time() - since


def measure(bench: Bench, setting: Setting, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one setting; contenders take turns."""
    prompt = generate.make_prompt(bench, setting, options.seed)
    calls: dict[str, Callable[..., Any]] = {
        PREFILL: lambda **_: next(raw_forwards(bench, prompt, [])),
        OURS: lambda **how: generate.ours(bench, prompt, setting, **how),
    }
    if setting.beams * setting.prompt <= options.most:
        calls[CONSTRAINED] = lambda **how: generate.constrained(bench, prompt, setting, **how)
    log(f"({setting}): {', '.join(calls)}")
    outputs = {name: call(scores=True) for name, call in calls.items()}  # also warms up
    if CONSTRAINED in outputs:
        ours, theirs = (as_answer(bench, prompt, setting, outputs[name]) for name in (OURS, CONSTRAINED))
        if problem := difference(ours, theirs, TOLERANCE, exact=True):
            raise SystemExit(
                f"MISMATCH at (batch, prompt, beams) = ({setting}), ours against {CONSTRAINED}: {problem}"
            )
    outputs.clear()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(options.repeats):
        for name, call in calls.items():
            if repetition == 0 or name != CONSTRAINED:
                seconds[name].append(cpu_seconds(call))
    rows: list[dict[str, Any]] = []
    for name, call in calls.items():
        gc.collect()
        row = {"name": name, "prompt": setting.prompt, "beams": setting.beams, "allocated": peak_allocated(call)}
        rows.append(row | {"seconds": statistics.median(seconds[name])})
    return rows


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of both sweeps; a setting of both is measured once."""
    bench = generate.make_bench(options)
    settings = [Setting(1, options.at_prompt, beams) for beams in options.beams]
    settings += [Setting(1, prompt, options.at_beams) for prompt in options.prompts]
    return [row for setting in dict.fromkeys(settings) for row in measure(bench, setting, options)]


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One line a size: memory and time of every contender, and transformers' by ours."""
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["prompt"], row["beams"]), {})[row["name"]] = row
    lines = []
    for (prompt, beams), by_name in found.items():
        cells = [f"{prompt:,}, {beams}"]
        for figure, unit, digits in (("allocated", 2**20, 1), ("seconds", 1.0, 3)):
            values = [by_name.get(name, {}).get(figure) for name in (PREFILL, OURS, CONSTRAINED)]
            cells += ["-" if value is None else f"{value / unit:,.{digits}f}" for value in values]
            cells.append("-" if values[2] is None else f"{values[2] / values[1]:.1f}")
        lines.append(cells)
    names = [PREFILL, OURS, "transformers", "transformers / ours"]
    print_table(["prompt, beams", *(f"{name}{unit}" for unit in (", MiB", ", s") for name in names)], lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, nargs="+", help=f"at --at-prompt: {BEAMS}")
    parser.add_argument("--prompts", type=int, nargs="+", help=f"at --at-beams: {PROMPTS}")
    parser.add_argument("--at-beams", type=int, help=f"{AT_BEAMS}")
    parser.add_argument("--at-prompt", type=int, help=f"{AT_PROMPT}")
    parser.add_argument("--repeats", type=int, help="timed calls of a contender: 3")
    parser.add_argument("--most", type=int, default=2**16, help="beams times tokens of transformers' calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="a tiny model and few sizes, for CI")
    options = parser.parse_args(arguments)
    defaults = {"beams": BEAMS, "prompts": PROMPTS, "at_beams": AT_BEAMS, "at_prompt": AT_PROMPT, "repeats": 3}
    for name, value in (FAST if options.fast else defaults).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name, value in MODEL.items():
        setattr(options, name, generate.FAST[name] if options.fast else value)
    options.length, options.dtype, options.device, options.catalogue = 4, "float32", "cpu", "random"
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    described = {name: getattr(options, name) for name in (*MODEL, "length", "seed")}
    print(f"Qwen3 architecture: {described}; one call, fp32, {torch.get_num_threads()} threads", flush=True)
    rows = run(options)
    print_rows(rows)
    print_json_line("xgr", torch.device("cpu"), {"model": described, "xgr": rows})


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
