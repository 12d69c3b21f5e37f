# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory and time of one call over beams and over prompts: one shared cache, and transformers.

xGR's figures 15 and 16 (memory at 128 to 512 beams over 1k tokens, and at 256 beams over up to 3k tokens), here from 8
to 512 beams and 128 to 4,096 tokens, and the time of the same calls beside them. Contenders:

- ours: beams share the prompt's keys, and nothing is reordered;
- our processor: transformers' beam search with the constraint as a logits processor, which computes the prompt for
  every beam, too: how the library decodes models that take no tree;
- transformers: its beam search with `prefix_allowed_tokens_fn`; and
  without a constraint, which tells what the function costs from what the copies cost;
- the prefill alone: what none can be below.

    python examples/benchmark/xgr.py --plots  # a few minutes of one core; draws both figures
    python examples/benchmark/xgr.py --fast   # a tiny model, seconds

No figure is taken before the answers agree. Memory: the most bytes that PyTorch's allocator had given out at once
above the loaded model (`memory.py`; the same in every run). Time: CPU seconds of the process, the median of the
repetitions (of transformers one) after a first call. A row that would need more than `--limit` GiB, or more than
`--seconds`, by the contender's row before in proportion to beams times prompt, is left out and says so.

Axes: B batch (1), K beams, P prompt.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import generate
import torch
from generate import CONSTRAINED, OURS, UNCONSTRAINED, Bench, Setting, as_answer, difference, log, raw_forwards
from memory import PREFILL, peak_allocated
from report import add_plots_option, print_json_line, print_table, save_plot
from transformers.utils import logging as transformers_logging

from hf_gr import enable
from hf_gr.generation.internals import attention_of
from hf_gr.generation.torch import layouts

COPIES = "our processor"
CONTENDERS = (PREFILL, OURS, COPIES, CONSTRAINED, UNCONSTRAINED)
SLOW = (CONSTRAINED, UNCONSTRAINED)
BEAMS, PROMPTS = (8, 16, 32, 64, 128, 256, 512), (128, 256, 512, 1024, 2048, 4096)
AT_BEAMS, AT_PROMPT = 256, 1024  # xGR's
FAST = {"beams": (4, 16), "prompts": (32, 64), "at_beams": 16, "at_prompt": 32, "repeats": 1}
MODEL = {"layers": 4, "hidden": 256, "vocab": 1040, "items": 12_000}  # 3 M parameters
TOLERANCE = generate.SCORE_TOL[torch.float32]


def with_copies(bench: Bench) -> Bench:
    """The same model as if it took no tree: every beam has a row of its own."""
    model = enable(copy.copy(bench.plain))
    layouts._KNOWN[model] = {(attention_of(model.config), model.dtype, False): None}
    assert not layouts.takes_tree(model)
    return replace(bench, enabled=model)


def calls(bench: Bench, copies: Bench, setting: Setting, seed: int) -> dict[str, Callable[..., Any]]:
    """By name: what is measured. With `scores=True` the output has what answers are compared by."""
    prompt = generate.make_prompt(bench, setting, seed)
    return {
        PREFILL: lambda **_: next(raw_forwards(bench, prompt, [])),
        OURS: lambda **how: generate.ours(bench, prompt, setting, **how),
        COPIES: lambda **how: generate.ours(copies, prompt, setting, **how),
        CONSTRAINED: lambda **how: generate.constrained(bench, prompt, setting, **how),
        UNCONSTRAINED: lambda **_: generate.unconstrained(bench, prompt, setting),
    }


def check(bench: Bench, setting: Setting, seed: int, outputs: dict[str, Any]) -> None:
    """Exit if contenders give different answers."""
    prompt = generate.make_prompt(bench, setting, seed)
    answers = {name: as_answer(bench, prompt, setting, output) for name, output in outputs.items()}
    for name in answers.keys() - {OURS}:
        problem = difference(answers[OURS], answers[name], TOLERANCE, exact=True)
        if problem:
            raise SystemExit(f"MISMATCH at (batch, prompt, beams) = ({setting}), ours against {name}: {problem}")


class Limits:
    """Which rows to leave out, by the contender's row before.

    Args:
        gib: memory.
        seconds: of one call.
    """

    def __init__(self, gib: float, seconds: float) -> None:
        self.bytes, self.seconds = gib * 2**30, seconds
        self.last: dict[str, tuple[int, dict[str, Any]]] = {}

    def reason(self, name: str, setting: Setting) -> str | None:
        """Why this row is left out; None if it is not."""
        if name not in (COPIES, *SLOW) or name not in self.last:
            return None
        size, found = self.last[name]
        times = setting.beams * setting.prompt / size
        if found["allocated"] * times > self.bytes:
            return f"would need {found['allocated'] * times / 2**30:.0f} GiB"
        seconds = found["seconds"] * times
        return f"would take {seconds:.0f} s" if seconds > self.seconds else None

    def keep(self, name: str, setting: Setting, found: dict[str, Any]) -> None:
        """Remember a measured row."""
        self.last[name] = setting.beams * setting.prompt, found


def cpu_seconds(call: Callable[[], Any]) -> float:
    since = time.process_time()
    call()
    return time.process_time() - since


def measure(bench: Bench, copies: Bench, setting: Setting, limits: Limits, options: argparse.Namespace) -> list[dict]:
    """The rows of one setting; contenders take turns."""
    contenders = calls(bench, copies, setting, options.seed)
    if options.skip_transformers:
        contenders = {name: call for name, call in contenders.items() if name not in SLOW}
    reasons = {name: limits.reason(name, setting) for name in contenders}
    running = {name: call for name, call in contenders.items() if reasons[name] is None}
    log(f"({setting}): {', '.join(running)}")
    outputs = {name: call(scores=True) for name, call in running.items()}  # also warms up
    check(bench, setting, options.seed, {name: outputs[name] for name in running.keys() - {PREFILL, UNCONSTRAINED}})
    outputs.clear()
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for repetition in range(options.repeats):
        for name, call in running.items():
            if repetition == 0 or name not in SLOW:
                seconds[name].append(cpu_seconds(call))
    rows: list[dict[str, Any]] = []
    for name in contenders:
        row: dict[str, Any] = {"name": name, "prompt": setting.prompt, "beams": setting.beams}
        if name in running:
            gc.collect()
            found = {"allocated": peak_allocated(running[name]), "seconds": statistics.median(seconds[name])}
            limits.keep(name, setting, found)
            row |= found
        else:
            row["left_out"] = reasons[name]
        rows.append(row)
    return rows


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of both sweeps; a setting of both is measured once."""
    bench = generate.make_bench(options)
    copies = with_copies(bench)
    sweeps = [
        [Setting(1, options.at_prompt, beams) for beams in options.beams],
        [Setting(1, prompt, options.at_beams) for prompt in options.prompts],
    ]
    rows: dict[Setting, list[dict[str, Any]]] = {}
    for sweep in sweeps:
        limits = Limits(options.limit, options.seconds)
        for setting in sweep:
            if setting not in rows:
                rows[setting] = measure(bench, copies, setting, limits, options)
    return [row for of_setting in rows.values() for row in of_setting]


def of_sweep(rows: Sequence[dict[str, Any]], axis: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows over beams, or over prompts, ascending."""
    fixed, value = ("prompt", options.at_prompt) if axis == "beams" else ("beams", options.at_beams)
    return sorted((row for row in rows if row[fixed] == value), key=lambda row: row[axis])


def print_sweep(rows: Sequence[dict[str, Any]], axis: str, options: argparse.Namespace) -> None:
    """One line a size: memory and time of every contender, and theirs by ours."""
    fixed = f"{options.at_prompt} tokens" if axis == "beams" else f"{options.at_beams} beams"
    names = [name for name in CONTENDERS if any(row["name"] == name for row in rows)]
    sizes = dict.fromkeys(row[axis] for row in of_sweep(rows, axis, options))
    found = {(row[axis], row["name"]): row for row in of_sweep(rows, axis, options)}
    for title, figure, unit, digits in (("MiB", "allocated", 2**20, 1), ("CPU seconds", "seconds", 1.0, 3)):
        print(f"\n{title} over {axis}, {fixed}")
        lines: list[list[str]] = []
        for size in sizes:
            ours = found[size, OURS][figure]
            cells = [
                f"{found[size, name][figure] / unit:,.{digits}f}" if figure in found[size, name] else "-"
                for name in names
            ]
            others = [found[size, name] for name in names if name in (COPIES, *SLOW)]
            ratios = [f"{row[figure] / ours:.1f}" if figure in row else row["left_out"] for row in others]
            lines.append([f"{size:,}", *cells, *ratios])
        ratios = [f"{name} / ours" for name in names if name in (COPIES, *SLOW)]
        print_table([axis, *names, *ratios], lines)


def draw(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """`plots/xgr-memory.svg` and `plots/xgr-time.svg`, each over beams and over prompts."""
    from matplotlib import pyplot

    memory = ("memory", "allocated", 2**20, "MiB above the model")
    for name, measured, unit, label in (memory, ("time", "seconds", 1, "CPU seconds")):
        figure, sides = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
        for axes, axis in zip(sides, ("beams", "prompt"), strict=True):
            for contender in CONTENDERS:
                found = [row for row in of_sweep(rows, axis, options) if row["name"] == contender and measured in row]
                values = [row[measured] / unit for row in found]
                axes.plot([row[axis] for row in found], values, "o-", label=contender)
            axes.set(xscale="log", yscale="log")
            axes.set_xscale("log", base=2)
            fixed = f"{options.at_prompt:,} tokens" if axis == "beams" else f"{options.at_beams} beams"
            axes.set_xlabel(f"{'beams' if axis == 'beams' else 'tokens of the prompt'} ({fixed})")
            axes.grid(visible=True, alpha=0.3)
        sides[0].set_ylabel(label)
        sides[0].legend()
        save_plot(f"xgr-{name}", figure)
        pyplot.close(figure)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, nargs="+", help=f"at --at-prompt: {BEAMS}")
    parser.add_argument("--prompts", type=int, nargs="+", help=f"at --at-beams: {PROMPTS}")
    parser.add_argument("--at-beams", type=int, help=f"{AT_BEAMS}")
    parser.add_argument("--at-prompt", type=int, help=f"{AT_PROMPT}")
    parser.add_argument("--repeats", type=int, help="timed calls of a contender: 3")
    parser.add_argument("--limit", type=float, default=4.0, help="GiB of a row")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one call")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--items", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="a tiny model and few sizes, for CI")
    add_plots_option(parser)
    options = parser.parse_args(arguments)
    defaults = {"beams": BEAMS, "prompts": PROMPTS, "at_beams": AT_BEAMS, "at_prompt": AT_PROMPT, "repeats": 3}
    tiny = {name: value for name, value in generate.FAST.items() if name in MODEL}
    for name, value in ({**FAST, **tiny} if options.fast else {**defaults, **MODEL}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.length, options.dtype, options.device, options.catalogue = 4, "float32", "cpu", "random"
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    described = {name: getattr(options, name) for name in (*MODEL, "length", "seed")}
    print(f"Qwen3 architecture: {described}; one call, fp32, {torch.get_num_threads()} threads", flush=True)
    rows = run(options)
    for axis in ("beams", "prompt"):
        print_sweep(rows, axis, options)
    if options.plots:
        draw(rows, options)
    print_json_line("xgr", torch.device("cpu"), {"model": described, "xgr": rows})


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
