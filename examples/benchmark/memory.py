# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one call above the loaded model: ours, the prefill alone, and transformers' own beam search.

    python examples/benchmark/memory.py                           # the curve over beams and prompts; minutes
    python examples/benchmark/memory.py --before CHECKOUT         # the same calls of another checkout beside ours
    python examples/benchmark/memory.py --settings 1,1024,256     # one call
    python examples/benchmark/memory.py --device cuda
    python examples/benchmark/memory.py --fast                    # a tiny model, some seconds

Two figures, in a process of its own for every row:

- **allocated**: the most bytes that PyTorch's allocator had given out at once. On a CPU its reports are summed up
  (`profile_memory`), on CUDA it counts itself. The goal is judged by it: it is the same in every run, down to the
  byte, and on every machine. It has no part in what libraries take for themselves, or the allocator keeps for later.
- **resident**: on Linux, how far the process grew: its own peak, which is reset before the call (`clear_refs`), less
  what it held then. It includes everything, but changes by some MiB from run to run with the C library's allocator,
  so it only confirms the first. On CUDA: what the allocator had reserved.

transformers copies the prompt for every beam. What it needs grows with beams times prompt: its smallest row is
measured, and rows that would not fit, or last too long, by that measure are left out, and say so.

Axes: B batch, P prompt, K beams.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import generate
import torch
from generate import CONSTRAINED, METAVAR, OURS, OURS_SCORES, SHAPE, Bench, Setting, log, raw_forwards
from report import print_json_line, print_table
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).resolve().parents[2]
PREFILL, BEFORE = "prefill", "before"
GOAL, GOAL_SETTING = 1.3, Setting(1, 1024, 256)  # of allocated bytes: at most so many times the prefill's own
PROMPTS, BEAMS = (1024, 2048, 4096), (128, 256, 512)
FAST_SETTINGS = (Setting(1, 64, 20),)
MODEL = ("layers", "hidden", "vocab", "items", "length", "dtype", "device", "seed")
# What a failed allocation looks like: PyTorch's words on a CPU and on CUDA, and the status of a process Linux ended.
NO_MEMORY, KILLED = ("not enough memory", "out of memory"), -9


def calls(bench: Bench, setting: Setting, seed: int) -> dict[str, Callable[[], Any]]:
    """By name: what is measured."""
    prompt = generate.make_prompt(bench, setting, seed)
    bench.index.items(bench.rows[:1])
    return {
        PREFILL: lambda: next(raw_forwards(bench, prompt, [])),
        OURS: lambda: generate.ours(bench, prompt, setting),
        OURS_SCORES: lambda: generate.ours(bench, prompt, setting, scores=True),
        CONSTRAINED: lambda: generate.constrained(bench, prompt, setting),
    }


def measure_on_cpu(call: Callable[[], Any], *, twice: bool) -> dict[str, Any]:
    """The peaks of a call; both figures of one call unless `twice`, since a call of transformers takes minutes."""
    resident = peak_resident(call) if twice else None
    start = time.perf_counter()
    allocated = peak_allocated(call)
    return {"allocated": allocated, "resident": resident, "seconds": time.perf_counter() - start}


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


def peak_resident(call: Callable[[], Any]) -> int | None:
    """How far this process grew during a call; None where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
    except OSError:
        return None
    call()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure_on_cuda(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """The peaks of a second call: the first loads kernels and takes their workspaces."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device) - held,
        "resident": torch.cuda.max_memory_reserved(device) - reserved,
        "seconds": time.perf_counter() - start,
    }


def child(options: argparse.Namespace) -> None:
    """One row, in this process; prints its figures."""
    bench = generate.make_bench(options)
    [setting] = options.settings
    call = calls(bench, setting, options.seed)[options.child]
    if bench.device.type == "cuda":
        found = measure_on_cuda(call, bench.device)
    else:
        found = measure_on_cpu(call, twice=options.child != CONSTRAINED)
    print(json.dumps(found))


def run_row(options: argparse.Namespace, name: str, setting: Setting) -> dict[str, Any]:
    """One row in a process of its own: its figures, or why there are none."""
    log(f"memory of {name} at ({setting})")
    command = [sys.executable, __file__, "--child", OURS if name == BEFORE else name]
    command += ["--settings", f"{setting.batch},{setting.prompt},{setting.beams}"]
    command += [text for field in MODEL for text in (f"--{field}", str(getattr(options, field)))]
    checkout = options.before if name == BEFORE else HERE
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode == KILLED or any(words in done.stderr for words in NO_MEMORY):
        return {"left_out": "out of memory"}
    raise SystemExit(f"memory of {name} at ({setting}) failed:\n{done.stderr}")


class Limits:
    """Which of transformers' rows to leave out, judged by its first one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.bytes = options.limit * 2**30 if options.limit is not None else available(options.device)
        self.seconds = options.seconds
        self.first: tuple[Setting, dict[str, Any]] | None = None

    def reason(self, setting: Setting) -> str | None:
        """Why this row is left out; None if it is not."""
        if self.first is None or "left_out" in self.first[1]:
            return None
        at, found = self.first
        times = setting.batch * setting.prompt * setting.beams / (at.batch * at.prompt * at.beams)
        size, seconds = found["allocated"] * times, found["seconds"] * times
        if size > self.bytes:
            return f"would need {size / 2**30:.0f} GiB"
        return f"would take {seconds:.0f} s" if seconds > self.seconds else None


def available(device: str) -> float:
    """Most of the memory that is free now."""
    if torch.device(device).type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(torch.device(device))[0]
    info = Path("/proc/meminfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return 0.7 * free[0] if free else 8 * 2**30


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows; the prefill of a prompt comes before the rows that are compared with it."""
    limits = Limits(options)
    prefills: dict[tuple[int, int], dict[str, Any]] = {}
    for setting in options.settings:
        names = [] if (setting.batch, setting.prompt) in prefills else [PREFILL]
        names += [OURS] + ([BEFORE] if options.before else [])
        names += [OURS_SCORES] if setting == options.settings[0] or setting == GOAL_SETTING else []
        names += [] if options.skip_transformers else [CONSTRAINED]
        for name in names:
            reason = limits.reason(setting) if name == CONSTRAINED else None
            found = {"left_out": reason} if reason else run_row(options, name, setting)
            if name == PREFILL:
                prefills[setting.batch, setting.prompt] = found
            if name == CONSTRAINED and limits.first is None:
                limits.first = setting, found
            prefill = prefills[setting.batch, setting.prompt]
            row = {"name": name, "batch": setting.batch, "prompt": setting.prompt, "beams": setting.beams, **found}
            for figure in ("allocated", "resident"):
                if found.get(figure) and prefill.get(figure):
                    row[f"{figure}_ratio"] = found[figure] / prefill[figure]
            log(json.dumps(row))
            yield row


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table, then how far the goal is met."""

    def cell(row: dict[str, Any], name: str, unit: float = 1, digits: int = 2) -> str:
        return f"{row[name] / unit:.{digits}f}" if row.get(name) else "-"

    print_table(
        [SHAPE, "contender", "allocated MiB", "/ prefill", "resident MiB", "/ prefill", ""],
        [
            [
                f"{row['batch']}, {row['prompt']}, {row['beams'] if row['name'] != PREFILL else '-'}",
                row["name"],
                cell(row, "allocated", 2**20, 1),
                cell(row, "allocated_ratio"),
                cell(row, "resident", 2**20, 1),
                cell(row, "resident_ratio"),
                f"left out: {row['left_out']}" if "left_out" in row else "",
            ]
            for row in rows
        ],
    )
    at_goal = (GOAL_SETTING.batch, GOAL_SETTING.prompt, GOAL_SETTING.beams)
    for row in rows:
        if row["name"] == OURS and (row["batch"], row["prompt"], row["beams"]) == at_goal and "allocated_ratio" in row:
            ratio = row["allocated_ratio"]
            print(f"\ngoal at ({GOAL_SETTING}): at most {GOAL} times the prefill's own; {ratio:.2f}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", type=Setting.parse, metavar=METAVAR, help="instead of the curve")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout, such as an older commit's")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument(
        "--limit", type=float, metavar="GIB", help="memory for transformers' rows (most of what is free)"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="time for one of transformers' rows")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--items", type=int)
    parser.add_argument("--length", type=int, default=4, help="tokens of an item")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="a tiny model and one tiny call, for CI")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = generate.parse(["--fast"] if options.fast else [])
    for name in ("layers", "hidden", "vocab", "items"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(sizes, name))
    if options.before is not None and not (options.before / "hf_gr").is_dir():
        parser.error(
            f"--before {options.before}, expected a checkout of hf_gr: git worktree add {options.before} COMMIT"
        )
    options.catalogue = "random"
    curve = [Setting(1, prompt, beams) for prompt in PROMPTS for beams in BEAMS]
    options.settings = options.settings or list(FAST_SETTINGS if options.fast else curve)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.child:
        child(options)
        return
    described = {name: getattr(options, name) for name in MODEL}
    print(f"Qwen3 architecture: {described}; peaks of one call above the loaded model", flush=True)
    rows = list(run(options))
    print_rows(rows)
    print_json_line("memory", torch.device(options.device), {"model": described, "memory": rows})


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
