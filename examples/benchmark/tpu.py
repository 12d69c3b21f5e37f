# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything there is to measure on a TPU, in one run: answers first, then times beside the least time possible.

    python examples/benchmark/tpu.py --out tpu.jsonl            # on a TPU; goes on where tpu.jsonl ends
    python examples/benchmark/tpu.py --chip v6e                 # its peaks: see tpu_costs.py
    python examples/benchmark/tpu.py --parts times --settings 1,1000,256 --traces traces
    python examples/benchmark/tpu.py --parts costs --compile-for v5e:2x2   # no TPU: libtpu compiles for one
    python examples/benchmark/tpu.py --fast                     # a tiny model, on a CPU: tries the script

Parts, each of which prints its rows as they are measured:

- `answers`: every program of `tpu_programs.py`, in fp32, against PyTorch on the CPU; a second call with other prompts
  must compile nothing.
- `bf16`: how far answers in bf16 are from those in fp32, within the bounds that the tests state.
- `meshes`: the same calls over four devices, by rows and by weights, against one device.
- `costs`: what the compiler counts in a program: operations, bytes and memory, and what a call must do at least.
- `times`: models of Qwen3's shapes with random weights, in bf16: the compiled program, and all of `generate`.

Answers that differ are marked, and end the run with status 1. The last line is JSON.

Axes: B batch, P prompt, K beams, L tokens of an item.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import roofline
import torch
import tpu_costs
from generate import METAVAR, Setting
from report import print_json_line, print_table
from tpu_programs import ON_MESHES, PROGRAMS, Bench, Program, Size, num_programs, tpu_devices

from hf_gr import AutoModelForGenerativeRetrieval

PARTS = ("answers", "bf16", "meshes", "costs", "times")
SCORE_TOL = 1e-3  # fp32 sums of a few log-probabilities; matrix units add in their own order
# In bf16, over the prompts of BF16_SIZE: the greatest error of a logit, whose standard deviation is about 2; how many
# prompts have the same best item; and how many of the K best are the same. Measured on a CPU: see the tests.
BF16_SIZE = Size(replace(Size().shape, layers=2, hidden=64), items=300, length=2, batch=16, beams=10)
LOGIT_ERROR, SAME_FIRST, SAME_BEAMS = 0.2, 0.85, 0.95
LENGTHS = {"Qwen3-0.6B": 4, "Qwen3-1.7B": 3}
SETTINGS = [Setting(b, p, k) for b in (1, 8) for p in (1000, 4000) for k in (128, 512)]
FAST_SETTINGS = [Setting(1, 20, 4)]
TIMED = ("beams", "sampled beams", "trie", "head")
COUNTED = ("beams", "sampled beams", "trie")

Row = dict[str, Any]
Work = tuple[Row, Callable[[], Row]]  # what tells a row from all others, and what measures it


class Wrong(Exception):
    """Two answers that should be equal are not."""


def wanted(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those programs that were asked for."""
    return [name for name in names if options.programs is None or name in options.programs]


def answers(options: argparse.Namespace) -> Iterator[Work]:
    """Every program against PyTorch, then again with other prompts."""
    bench = Bench(seed=options.seed)
    others: dict[Any, Any] = {}

    def in_torch(model: Any) -> Any:
        """The same weights."""
        if id(model) not in others:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                others[id(model)] = AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="torch")
        return others[id(model)]

    def run(program: Program) -> Row:
        details = {"return_dict_in_generate": True, "output_scores": True}
        with jax.default_matmul_precision("highest"):
            began = time.perf_counter()
            ours = bench.call(program, **details)
            first, error = time.perf_counter() - began, None
            if program.catalogue != "none" or not program.options.get("do_sample"):  # else PyTorch draws by itself
                model = in_torch(bench.model(program.family, program.has_head))
                assistant = in_torch(bench.assistant) if program.has_assistant else None
                error = difference(ours, bench.call(program, model=model, assistant=assistant, **details))
            before = num_programs()
            again = bench.call(program, seed=1, **details)
            compiled = num_programs() - before
        if compiled:
            raise Wrong(f"a second call compiled {compiled} more programs")
        if np.array_equal(again.sequences, ours.sequences):
            raise Wrong("other prompts have the same answer")
        return {"score_error": error, "first_call_seconds": first}

    for name in wanted(options, PROGRAMS):
        program = PROGRAMS[name]
        yield {"part": "answers", "program": name}, lambda program=program: run(program)


def difference(ours: Any, theirs: Any) -> float:
    """The greatest difference of two answers' scores.

    Raises:
        Wrong: other sequences, or scores that differ by more than `SCORE_TOL`.
    """
    mine, others = (np.asarray(answer.sequences) for answer in (ours, theirs))
    if not np.array_equal(mine, others):
        rows = np.flatnonzero((mine != others).any(-1)).tolist() if mine.shape == others.shape else "all"
        raise Wrong(f"other sequences in rows {rows}")
    if getattr(theirs, "sequences_scores", None) is None:
        return 0.0
    mine, others = (np.asarray(answer.sequences_scores) for answer in (ours, theirs))
    is_there = np.isfinite(others)  # where fewer items are left than beams, there is none
    error = float(np.abs(mine[is_there] - others[is_there]).max(initial=0.0))
    if error > SCORE_TOL or not np.array_equal(np.isfinite(mine), is_there):
        raise Wrong(f"scores differ by {error:.2g}, expected at most {SCORE_TOL}")
    return error


def bf16(options: argparse.Namespace) -> Iterator[Work]:
    """Half precision against fp32."""

    def run() -> Row:
        found = bf16_differences(options.seed)
        for name, is_within, bound in (
            ("logit_error", found["logit_error"] <= LOGIT_ERROR, LOGIT_ERROR),
            ("same_first", found["same_first"] >= SAME_FIRST, SAME_FIRST),
            ("same_beams", found["same_beams"] >= SAME_BEAMS, SAME_BEAMS),
        ):
            if not is_within:
                raise Wrong(f"{name} is {found[name]:.3f}, expected within {bound}")
        return found

    yield {"part": "bf16"}, run


def bf16_differences(seed: int = 0) -> Row:
    """Of one batch's beams: the error of the first level's logits, and the share of items that stay."""
    found = []
    for dtype in ("float32", "bfloat16"):
        bench = Bench(BF16_SIZE, dtype=dtype, seed=seed)
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            found.append(bench.call(PROGRAMS["all scores"]))
    shape = (BF16_SIZE.batch, BF16_SIZE.beams, -1)
    logits = [np.asarray(answer.logits[0], dtype=np.float32) for answer in found]
    items = [np.asarray(answer.sequences)[:, -BF16_SIZE.length :].reshape(shape) for answer in found]
    sets = [[set(map(tuple, row)) for row in some.tolist()] for some in items]
    return {
        "logit_error": float(np.abs(logits[0] - logits[1]).max()),
        "logit_deviation": float(logits[0].std()),
        "same_first": float((items[0][:, 0] == items[1][:, 0]).all(-1).mean()),
        "same_beams": float(np.mean([len(one & other) / len(one) for one, other in zip(*sets, strict=True)])),
    }


def meshes(options: argparse.Namespace) -> Iterator[Work]:
    """Several devices against one."""
    bench = Bench(Size(batch=6), seed=options.seed)

    def run(program: Program) -> Row:
        if len(jax.devices()) < 4:
            return {"skipped": f"needs 4 devices, has {len(jax.devices())}"}
        details = {"return_dict_in_generate": True, "output_scores": True}
        with jax.default_matmul_precision("highest"):
            alone = bench.call(replace(program, mesh=(1, 1)), **details)
            return {"score_error": difference(bench.call(program, **details), alone)}

    for name in wanted(options, ON_MESHES):
        program = ON_MESHES[name]
        yield {"part": "meshes", "program": name, "mesh": program.mesh}, lambda program=program: run(program)


def size_of(name: str, setting: Setting, options: argparse.Namespace) -> Size:
    """A model's shape and a call's."""
    full = Size() if options.fast else Size(roofline.QWEN3[name], items=100_000, codes=256)
    return replace(full, batch=setting.batch, prompt=setting.prompt, beams=setting.beams, length=LENGTHS[name])


def cases(options: argparse.Namespace, names: Iterable[str]) -> Iterator[tuple[Row, Size, Program]]:
    """Every model, setting and program."""
    for model in options.models:
        for setting in options.settings:
            for name in wanted(options, names):
                label = f"{model}, tiny" if options.fast else model
                row = {"model": label, **asdict(setting), "program": name}
                yield row, size_of(model, setting, options), PROGRAMS[name]


def costs(options: argparse.Namespace) -> Iterator[Work]:
    """What the compiler counts; a call is taken to have L - 1 forwards, of which drafts leave fewer."""
    devices = None if options.compile_for is None else tpu_devices(options.compile_for)

    def run(size: Size, program: Program) -> Row:
        counted = tpu_costs.count(size, program, dtype=options.dtype, devices=devices)
        call, least = counted.call(size.length - 1), tpu_costs.needed(size)
        return {
            "prefill_gflop": counted.prefill.flops / 1e9,
            "forward_gflop": counted.forward.flops / 1e9,
            "call_gflop": call.flops / 1e9,
            "needed_gflop": least.flops / 1e9,
            "prefill_gb": counted.prefill.num_bytes / 1e9,
            "forward_gb": counted.forward.num_bytes / 1e9,
            "call_gb": call.num_bytes / 1e9,
            "needed_gb": least.num_bytes / 1e9,
            "counted_ms": 1e3 * options.device.seconds(call.flops, call.num_bytes),
            "least_ms": 1e3 * tpu_costs.least_seconds(size, options.device),
            "temporary_mib": counted.temporary_bytes / 2**20,
            "compile_seconds": counted.compile_seconds,
        }

    for row, size, program in cases(options, COUNTED):
        target = options.compile_for or jax.devices()[0].device_kind
        row = {"part": "costs", **row, "dtype": options.dtype, "compiled_for": target}
        yield row, lambda size=size, program=program: run(size, program)


def times(options: argparse.Namespace) -> Iterator[Work]:
    """The compiled program, and all of `generate`, beside the least time of plain decoding."""
    known: dict[Size, Bench] = {}

    def run(row: Row, size: Size, program: Program) -> Row:
        if size not in known:
            known.clear()  # one model at a time
            known[size] = Bench(size, dtype=options.dtype, seed=options.seed)
        bench = known[size]
        details = {"return_dict_in_generate": True}
        began = time.perf_counter()
        answer = bench.call(program, **details)
        first = time.perf_counter() - began
        taken = bench.take(program, **details)
        calls = {
            "program": lambda: jax.block_until_ready(taken.function(*taken.arguments)),
            "generate": lambda: bench.call(program, **details),
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        before = num_programs()
        for _ in range(options.repeats):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - began)
        if num_programs() != before:
            raise Wrong("calls of one shape compiled again")
        if options.traces is not None:
            where = options.traces / f"{row['model']} {row['program']} {size.batch},{size.prompt},{size.beams}"
            with jax.profiler.trace(str(where)):
                calls["program"]()
        least = 1e3 * tpu_costs.least_seconds(size, options.device)
        median = {name: 1e3 * statistics.median(of) for name, of in seconds.items()}
        return {
            "ms": median["program"],
            "generate_ms": median["generate"],
            "least_ms": least,
            "times_least": median["program"] / least,
            "forwards": answer.speculation.target_forwards,
            "first_call_seconds": first,
            "all_ms": [1e3 * each for each in seconds["program"]],
        }

    for row, size, program in cases(options, TIMED):
        row = {"part": "times", **row}
        yield row, lambda row=row, size=size, program=program: run(row, size, program)


def run_row(key: Row, work: Callable[[], Row]) -> Row:
    """A row with what was measured, or with what went wrong."""
    began = time.perf_counter()
    try:
        found = work()
    except Wrong as wrong:
        found = {"wrong": str(wrong)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = {"out_of_memory": str(error).splitlines()[0]}
    return {**key, **found, "row_seconds": round(time.perf_counter() - began, 3)}


def shown(row: Row) -> str:
    """A row as one line."""
    return "  ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
        if name not in ("all_ms", "row_seconds") and value is not None
    )


def print_rows(rows: list[Row], part: str, columns: dict[str, str]) -> None:
    """One part as a table; columns by name in a row."""
    cells = []
    for row in rows:
        if row["part"] == part:
            setting = Setting(row["batch"], row["prompt"], row["beams"])
            told = next((name for name in ("out_of_memory", "wrong") if name in row), "")
            numbers = [f"{row[name]:.4g}" if name in row else told for name in columns]
            cells.append([f"{row['model']}, {setting}", row["program"], *numbers])
    if cells:
        print()
        print_table(["model, batch, prompt, beams", "program", *columns.values()], cells)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=list(roofline.QWEN3), default=list(roofline.QWEN3))
    parser.add_argument("--programs", nargs="+", metavar="NAME", help="some of tpu_programs.py instead of all")
    parser.add_argument("--settings", nargs="+", type=Setting.parse, metavar=METAVAR, help="instead of the whole grid")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of costs and times (bfloat16)")
    parser.add_argument("--repeats", type=int, help="timed calls of every row (20)")
    parser.add_argument("--chip", choices=list(tpu_costs.CHIPS), default="v5e", help="whose peaks the least time has")
    parser.add_argument("--compile-for", metavar="TOPOLOGY", help="costs of a TPU that is not there, as v5e:2x2")
    parser.add_argument("--traces", type=Path, help="folder for a profile of each timed program")
    parser.add_argument("--out", type=Path, help="JSON lines: rows are appended; those that are there, not repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="a tiny model, on a CPU if need be: tries the script")
    options = parser.parse_args(arguments)
    if unknown := set(options.programs or ()) - {*PROGRAMS, *ON_MESHES}:
        parser.error(f"--programs {sorted(unknown)}, expected some of {[*PROGRAMS, *ON_MESHES]}")
    platform = jax.devices()[0].platform
    needs_tpu = [part for part in options.parts if part != "costs" or options.compile_for is None]
    if needs_tpu and platform != "tpu" and not options.fast:
        parser.error(
            f"JAX has no TPU, only {platform}: --fast tries the script, --parts costs --compile-for needs none"
        )
    options.settings = options.settings or (FAST_SETTINGS if options.fast else SETTINGS)
    options.repeats = options.repeats or (2 if options.fast else 20)
    options.dtype = options.dtype or ("float32" if options.fast else "bfloat16")
    options.device = tpu_costs.CHIPS[options.chip]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    known: dict[str, Row] = {}
    if options.out is not None and options.out.exists():
        for line in options.out.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            known[json.dumps(row["key"])] = row["row"]
    rows: list[Row] = []
    for part in options.parts:
        for key, work in globals()[part](options):
            name = json.dumps(key)
            if name not in known:
                row = run_row(key, work)
                print(shown(row), flush=True)
                if options.out is not None:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"key": key, "row": row}) + "\n")
            else:
                row = known[name]
            rows.append(row)
    counted = {"call_gflop": "GFLOP", "needed_gflop": "needed", "call_gb": "GB", "needed_gb": "needed"}
    counted |= {"counted_ms": "ms of these", "least_ms": "least ms", "temporary_mib": "MiB", "compile_seconds": "s"}
    print_rows(rows, "costs", counted)
    timed = {"ms": "ms", "generate_ms": "generate ms", "least_ms": "least ms", "times_least": "ms / least"}
    print_rows(rows, "times", timed)
    described = {name: getattr(options, name) for name in ("parts", "models", "fast", "chip", "dtype", "seed")}
    described["devices"] = [device.device_kind for device in jax.devices()]
    print_json_line(
        "tpu", torch.device("cpu"), {"options": described, "rows": rows}, packages=("jax", "jaxlib", "flax")
    )
    if wrong := [row for row in rows if "wrong" in row]:
        raise SystemExit(f"{len(wrong)} rows with wrong answers")


if __name__ == "__main__":
    main()
