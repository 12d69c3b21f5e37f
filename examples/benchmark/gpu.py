# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything there is to measure on a GPU, in one run: answers first, then times beside the least time possible.

    python examples/benchmark/gpu.py --out gpu.jsonl       # on a GPU; goes on where gpu.jsonl ends
    python examples/benchmark/gpu.py --bandwidth 4.8       # a device other than an H100 (see roofline.py)
    python examples/benchmark/gpu.py --parts times --models Qwen3-0.6B --settings 1,1000,256
    python examples/benchmark/gpu.py --fast                # a tiny model, on a CPU if need be: tries the script

Parts, each of which prints its rows as they are measured:

- `parity`: a small model in fp32 against transformers' constrained search, by every way of ours.
- `times`: models of Qwen3's shapes with random weights, in bf16: eager and captured (`cache_implementation="static"`),
  our attention and transformers' under a mask, which repeats the keys, and the prefill alone. Every row compares its
  answer with that of plain decoding and with the raw forwards' scores, and gives peak memory, the roofline and, where
  there is one, a published time.
- `selection`: one top-k against two stages, by size: says whether `beam.DEVICE_BLOCKS_FROM` is right for this device.
- `scores`: log-probabilities of children: compiled, if that works, against pieces, by size.
- `tests`: `pytest -m gpu`.

A row that runs out of memory says so, and the next one follows. Answers that differ are marked, and end the run with
status 1. The last line is JSON.

Axes: B batch, P prompt, K beams, L tokens of an item, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import generate
import roofline
import torch
from generate import METAVAR, PAD, Answer, Bench, Setting, measure
from report import print_json_line, print_table
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.internals import attention_of
from hf_gr.generation.torch import layouts
from hf_gr.generation.torch.captured import PROGRAMS
from hf_gr.torch import log_probs, top_keys
from hf_gr.torch.log_probs import token_log_probs

PARTS = ("parity", "times", "selection", "scores", "tests")
EAGER, CAPTURED, PREFILL = "eager", "captured", "prefill"
IN_PARTS, BY_MASK = "shared keys", "repeated keys"
# What NVIDIA publishes for its engine on an H100: milliseconds by model, batch, prompt, beams and tokens of an item.
PUBLISHED = {("Qwen3-1.7B", 1, 1000, 256, 3): 17.6, ("Qwen3-1.7B", 8, 1000, 256, 3): 93.0}
LENGTHS = {"Qwen3-0.6B": 4, "Qwen3-1.7B": 3}
TINY = roofline.Shape(layers=2, hidden=64, intermediate=96, heads=2, kv_heads=1, head_dim=32, vocab=1_100, itemsize=4)
SETTINGS = [Setting(b, p, k) for b in (1, 4, 8) for p in (1024, 2048, 4096) for k in (128, 256, 512)]
PUBLISHED_SETTINGS = [Setting(batch, prompt, beams) for _, batch, prompt, beams, _ in PUBLISHED]
FAST_SETTINGS = [Setting(1, 20, 4), Setting(2, 20, 6)]
PARITY_SETTINGS, FAST_PARITY = ["1,64,8", "4,256,20", "1,512,64"], ["2,16,8"]
# Rows, candidates of each, candidates kept.
SELECTIONS = [(b, c, k) for b in (1, 8) for c in (2**15, 2**17, 2**19, 2**21, 2**22, 2**23) for k in (128, 512)]
FAST_SELECTIONS = [(2, 2**12, 16)]
SCORES = [(rows, 151_936, 256) for rows in (1, 128, 256, 512, 2048)]
FAST_SCORES = [(3, 1_000, 16)]
# Sums of log-probabilities. With random weights the scores of bf16 differ by tenths between any two sets of kernels.
SCORE_TOL = {torch.float32: 1e-3, torch.bfloat16: 1.0}
MOST_SCORES = 2**30  # that `output_scores` may return: 4 GB in fp32

Row = dict[str, Any]
Work = tuple[Row, Callable[[], Row]]  # what tells a row from all others, and what measures it


class Wrong(Exception):
    """Two answers that should be equal are not."""


def parity(options: argparse.Namespace) -> Iterator[Work]:
    """Our ways against transformers' own search, in fp32, where they must agree."""
    bench: list[Bench] = []

    def check(text: str, attention: str, mode: str) -> Row:
        if not bench:
            arguments = ["--device", options.device, *(["--fast"] if options.fast else [])]
            bench.append(generate.make_bench(generate.parse(arguments)))
        setting, [made] = Setting.parse(text), bench
        with attending(made, attention):
            if mode == EAGER:
                prompt = generate.make_prompt(made, setting, options.seed)
                try:
                    # A GPU's kernels add in other orders than a CPU's.
                    with mock.patch.dict(generate.SCORE_TOL, SCORE_TOL):
                        seconds = generate.check_answers(made, prompt, setting, transformers=True)
                except SystemExit as mismatch:
                    raise Wrong(str(mismatch)) from None
                return {"seconds_of_transformers": seconds}
            return answers(made, setting, options, mode)

    for text in FAST_PARITY if options.fast else PARITY_SETTINGS:
        for attention in (IN_PARTS, BY_MASK):
            for mode in (EAGER, CAPTURED):
                row = {"part": "parity", "setting": text, "attention": attention, "mode": mode}
                yield row, lambda text=text, attention=attention, mode=mode: check(text, attention, mode)


def times(options: argparse.Namespace) -> Iterator[Work]:
    """Calls of every size, mode and attention, one model after the other."""
    for name in options.models:
        benches = Models(name, options)
        settings = options.settings + [s for s in PUBLISHED_SETTINGS if name == "Qwen3-1.7B" and not options.given]
        for setting in settings:
            ways = [(IN_PARTS, PREFILL), *((how, mode) for how in (IN_PARTS, BY_MASK) for mode in (EAGER, CAPTURED))]
            for attention, mode in ways:
                alike = [s.beams for s in settings if (s.batch, s.prompt) == (setting.batch, setting.prompt)]
                if mode == PREFILL and setting.beams != min(alike):
                    continue  # it knows no beams
                label = f"{name}, tiny" if options.fast else name
                row = {"part": "times", "model": label, **asdict(setting), "attention": attention, "mode": mode}
                yield row, partial(time_of, benches, setting, attention, mode, options)
        benches.drop()


class Models:
    """One model at a time on the device, made when it is needed first.

    Args:
        name: of its shape.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.shape = TINY if options.fast else roofline.QWEN3[name]
        self.length = LENGTHS[name]
        self._bench: Bench | None = None

    @property
    def bench(self) -> Bench:
        """The model and its catalogue."""
        if self._bench is None:
            options = self.options
            made = argparse.Namespace(
                catalogue="random", seed=options.seed, length=self.length, items=600 if options.fast else 100_000
            )
            torch.manual_seed(options.seed)
            rows = generate.make_catalogue(made)
            plain = make_model(self.shape, options)
            self._bench = Bench(
                plain=plain,
                enabled=enable(copy.copy(plain)),
                index=ConstraintIndex.from_sequences(rows),
                rows=rows,
                allowed={},
            )
        return self._bench

    def drop(self) -> None:
        """Give its memory back."""
        self._bench = None
        PROGRAMS.clear()
        gc.collect()


def make_model(shape: roofline.Shape, options: argparse.Namespace) -> Any:
    """Random weights that make scores differ."""
    dtype = torch.float32 if options.fast else torch.bfloat16
    return Qwen3ForCausalLM._from_config(config_of(shape), dtype=dtype).to(options.device).eval()


def config_of(shape: roofline.Shape) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )


@contextlib.contextmanager
def attending(bench: Bench, attention: str) -> Iterator[None]:
    """Within this context the model's tree nodes attend in this way, whatever would be chosen."""
    model = bench.enabled
    key = (attention_of(model.config.get_text_config(decoder=True)), model.dtype, False)
    before = "parts" if layouts.attends_in_parts(model) else "mask"
    known = layouts._KNOWN[model]
    known[key] = "parts" if attention == IN_PARTS else "mask"
    PROGRAMS.clear()
    try:
        yield
    finally:
        known[key] = before


def call_of(bench: Bench, prompt: Row, setting: Setting, mode: str) -> Callable[[], Any]:
    """What is timed."""
    if mode == PREFILL:
        return lambda: next(generate.raw_forwards(bench, prompt, []))
    options: Row = generate.beam_options(setting)
    options |= {"cache_implementation": "static"} if mode == CAPTURED else {}
    return lambda: bench.enabled.generate(**prompt, constraint_index=bench.index, **options)


def answers(bench: Bench, setting: Setting, options: argparse.Namespace, mode: str) -> Row:
    """Compare the answer of a mode with that of plain decoding, and with the raw forwards' scores.

    Of two captured calls both replay what was captured before.
    """
    prompt = generate.make_prompt(bench, setting, options.seed)
    dtype = bench.plain.dtype
    sequences = generate.generated(bench, setting, generate.ours(bench, prompt, setting))
    expected: Answer = generate.raw_answer(bench, prompt, setting, sequences)
    if math.prod(sequences.shape) * bench.plain.config.vocab_size <= MOST_SCORES:
        found = generate.as_answer(bench, prompt, setting, generate.ours(bench, prompt, setting, scores=True))
        problem = generate.difference(found, expected, SCORE_TOL[dtype], exact=dtype is torch.float32)
        if problem is not None:
            raise Wrong(f"plain decoding against the raw forwards: {problem}")
    if mode != CAPTURED:
        return {}
    how = generate.beam_options(setting)
    length = prompt["input_ids"].shape[1]
    [capture] = bench.enabled.warm_up(bench.index, batch_sizes=setting.batch, prompt_lengths=length, **how)
    [program] = PROGRAMS[bench.enabled]
    for number in range(2):
        with mock.patch.object(program.captured, "replay", side_effect=program.captured.replay) as replay:
            output = call_of(bench, prompt, setting, mode)()
        if not replay.called:
            raise Wrong(f"captured call {number + 1} has been decoded eagerly: see the messages above")
        answer = generate.raw_answer(bench, prompt, setting, generate.generated(bench, setting, output))
        problem = generate.difference(answer, expected, SCORE_TOL[dtype], exact=dtype is torch.float32)
        if problem is not None:
            raise Wrong(f"captured call {number + 1} against plain decoding: {problem}")
    return {"capture_seconds": capture.seconds, "graph_bytes": capture.num_bytes}


def time_of(models: Models, setting: Setting, attention: str, mode: str, options: argparse.Namespace) -> Row:
    """Check a call, then time it: the median, the peak of memory, the least time that is possible."""
    with attending(models.bench, attention):
        return _time_of(models, setting, mode, options)


def _time_of(models: Models, setting: Setting, mode: str, options: argparse.Namespace) -> Row:
    bench = models.bench
    found = answers(bench, setting, options, mode) if mode != PREFILL else {}
    call = call_of(bench, generate.make_prompt(bench, setting, options.seed), setting, mode)
    call()
    seconds, peak = [], None
    held = torch.cuda.memory_allocated(bench.device) if bench.device.type == "cuda" else 0
    for _ in range(options.repeats):
        _, took, peak = measure(call, bench.device)
        seconds.append(took)
    least = roofline.limit(
        models.shape,
        roofline.device_of(options),
        batch=setting.batch,
        prompt=setting.prompt,
        beams=setting.beams,
        length=models.length,
    )
    least_ms = 1e3 * (least.prefill if mode == PREFILL else least.total)
    median = 1e3 * statistics.median(seconds)
    published = PUBLISHED.get((models.name, *asdict(setting).values(), models.length))
    return {
        "ms": median,
        "least_ms": least_ms,
        "times_least": median / least_ms,
        "published_ms": None if mode == PREFILL else published,
        "peak_bytes": peak,
        "bytes_above_model": None if peak is None else peak - held,
        "all_ms": [1e3 * each for each in seconds],
        **found,
    }


def repeated(call: Callable[[], Any], options: argparse.Namespace, device: torch.device) -> float:
    """Milliseconds of one of many calls that follow each other without waiting: the device's, not the host's."""
    call()
    number = 2 if options.fast else 50

    def many() -> None:
        for _ in range(number):
            call()

    return 1e3 * min(measure(many, device)[1] for _ in range(3)) / number


def selection(options: argparse.Namespace) -> Iterator[Work]:
    """One top-k over all candidates against two stages, by size."""
    device = torch.device(options.device)

    def run(rows: int, size: int, number: int) -> Row:
        keys = torch.randn((rows, size), device=device)
        with blocks_from(1, device):
            block = top_keys._block_size(rows, size, number, device)
            in_blocks = repeated(lambda: top_keys.top_keys(keys, number), options, device)
            best, places = top_keys.top_keys(keys, number)
        if not torch.equal(best, keys.topk(number).values) or not torch.equal(best, keys.gather(1, places)):
            raise Wrong("two stages do not find the best")
        return {
            "topk_ms": repeated(lambda: keys.topk(number).indices, options, device),
            "blocks_ms": in_blocks,
            "block": block,
            "chosen": "blocks" if top_keys._block_size(rows, size, number, device) > 1 else "topk",
            "least_ms": 1e3 * roofline.device_of(options).seconds(0, 4 * rows * size),
        }

    for rows, size, number in FAST_SELECTIONS if options.fast else SELECTIONS:
        row = {"part": "selection", "rows": rows, "candidates": size, "kept": number}
        yield row, lambda rows=rows, size=size, number=number: run(rows, size, number)


@contextlib.contextmanager
def blocks_from(number: int, device: torch.device) -> Iterator[None]:
    """Within this context so many candidates are enough for blocks."""
    name = "CPU_BLOCKS_FROM" if device.type == "cpu" else "DEVICE_BLOCKS_FROM"
    before = getattr(top_keys, name)
    setattr(top_keys, name, number)
    try:
        yield
    finally:
        setattr(top_keys, name, before)


def scores(options: argparse.Namespace) -> Iterator[Work]:
    """Log-probabilities of children by pieces and, where it is, compiled."""
    device = torch.device(options.device)

    def run(rows: int, vocab: int, children: int) -> Row:
        logits = torch.randn((rows, vocab), device=device).to(torch.bfloat16)
        tokens = torch.randint(vocab, (rows, children), device=device)

        def in_pieces() -> torch.Tensor:
            with mock.patch.object(log_probs, "_compiled", return_value=None):
                return token_log_probs(logits, tokens)

        found: Row = {"pieces_ms": repeated(in_pieces, options, device), "compiled_ms": None}
        if device.type == "cuda" and log_probs._compiled(device) is not None:
            found["compiled_ms"] = repeated(lambda: token_log_probs(logits, tokens), options, device)
            gap = float((token_log_probs(logits, tokens) - in_pieces()).abs().max())
            if not gap <= 1e-4:
                raise Wrong(f"compiled, they differ by {gap:.1e}")
        return {**found, "least_ms": 1e3 * roofline.device_of(options).seconds(0, 2 * rows * vocab)}

    for rows, vocab, children in FAST_SCORES if options.fast else SCORES:
        row = {"part": "scores", "rows": rows, "vocabulary": vocab, "children": children}
        yield row, lambda rows=rows, vocab=vocab, children=children: run(rows, vocab, children)


def tests(options: argparse.Namespace) -> Iterator[Work]:
    """The tests that need a GPU, in a process of their own."""

    def run() -> Row:
        if options.device == "cpu":
            return {"skipped": "needs a CUDA device"}
        root = Path(__file__).resolve().parents[2]
        files = [str(file) for file in root.glob("tests/test_*.py") if "mark.gpu" in file.read_text(encoding="utf-8")]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *sorted(files)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(f"pytest -m gpu failed:\n{done.stdout[-4000:]}")
        return {"says": done.stdout.splitlines()[-1]}

    yield {"part": "tests"}, run


def run_row(key: Row, work: Callable[[], Row]) -> Row:
    """A row with what was measured, or with what went wrong."""
    began = time.perf_counter()
    try:
        found = work()
    except Wrong as wrong:
        found = {"wrong": str(wrong)}
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "not enough memory" not in str(error):
            raise
        found = {"out_of_memory": str(error).splitlines()[0]}
    if "out_of_memory" in found:  # the error is gone by now, and with it the frames that held tensors
        PROGRAMS.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {**key, **found, "row_seconds": round(time.perf_counter() - began, 3)}


def shown(row: Row) -> str:
    """A row as one line."""
    return "  ".join(
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
        if name not in ("all_ms", "row_seconds") and value is not None
    )


def print_times(rows: list[Row]) -> None:
    """All measured calls, as a table."""
    cells = []
    for row in rows:
        if row["part"] != "times":
            continue
        setting = str(Setting(row["batch"], row["prompt"], row["beams"]))
        start = [row["model"], setting, f"{row['mode']}, {row['attention']}"]
        if "ms" not in row:
            cells.append([*start, next((name for name in ("out_of_memory", "wrong") if name in row), "?"), *[""] * 4])
            continue
        published = "" if row["published_ms"] is None else f"{row['published_ms']:.1f}"
        peak = "" if row["bytes_above_model"] is None else f"{row['bytes_above_model'] / 2**20:.0f}"
        numbers = [f"{row['ms']:.2f}", f"{row['least_ms']:.2f}", f"{row['times_least']:.1f}"]
        cells.append([*start, *numbers, published, peak])
    if cells:
        print()
        header = ["model", generate.SHAPE, "mode, attention", "ms", "least ms", "ms / least", "published ms"]
        print_table([*header, "MiB above the model"], cells)


def has_cuda() -> bool:
    return torch.cuda.is_available()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=list(roofline.QWEN3), default=list(roofline.QWEN3))
    parser.add_argument("--settings", nargs="+", type=Setting.parse, metavar=METAVAR, help="instead of the whole grid")
    parser.add_argument("--repeats", type=int, help="timed calls of every row (10)")
    parser.add_argument("--out", type=Path, help="JSON lines: rows are appended; those that are there, not repeated")
    parser.add_argument("--device", help="cuda; with --fast, the CPU where there is no other")
    parser.add_argument("--without-cudnn", action="store_true", help="no cuDNN attention: it plans every exact shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="a tiny model and tiny settings, to try the script")
    roofline.add_device_arguments(parser)
    options = parser.parse_args(arguments)
    if options.device is None:
        options.device = "cpu" if options.fast and not has_cuda() else "cuda"
    if torch.device(options.device).type == "cuda" and not has_cuda():
        parser.error(f"--device {options.device}, but torch sees no CUDA device: --fast tries the script on a CPU")
    options.given = options.settings is not None or options.fast
    options.settings = options.settings or (FAST_SETTINGS if options.fast else SETTINGS)
    options.repeats = options.repeats or (2 if options.fast else 10)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.without_cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
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
    print_times(rows)
    described = {name: getattr(options, name) for name in ("parts", "models", "fast", "bandwidth", "tflops", "seed")}
    print_json_line("gpu", torch.device(options.device), {"options": described, "rows": rows})
    if wrong := [row for row in rows if "wrong" in row]:
        raise SystemExit(f"{len(wrong)} rows with wrong answers")


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
