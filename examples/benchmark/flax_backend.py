# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate.py --backend flax`: our Flax path against our PyTorch path, on one checkpoint, paired in one run.

Answers are compared before any time is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from report import print_table

from hf_gr import AutoModelForGenerativeRetrieval

TORCH, FLAX, DRAFTS = "ours in PyTorch", "ours in Flax", "with drafts"


class Seconds:
    """The times that JAX reports for tracing, lowering and compiling inside this context."""

    def __enter__(self) -> Seconds:
        self.by_event: dict[str, float] = {}
        jax.monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._add)

    def _add(self, event: str, seconds: float, **_: Any) -> None:
        self.by_event[event] = self.by_event.get(event, 0.0) + seconds

    @property
    def compiling(self) -> float:
        return self.by_event.get("/jax/core/compile/backend_compile_duration", 0.0)


def load(plain: Any) -> Any:
    """The same checkpoint, as PyTorch saves it and Flax loads it."""
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        return AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="flax")


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result, once it is on the host, and the seconds."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def run_settings(bench: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both paths at every setting."""
    import generate as plain

    model = load(bench.plain)
    model.params  # noqa: B018  (moves the weights, once)
    tolerance, exact = plain.SCORE_TOL[bench.plain.dtype], bench.plain.dtype is torch.float32
    results = []
    for setting in options.settings:
        prompt = plain.make_prompt(bench, setting, options.seed)
        arrays = {name: tensor.cpu().numpy() for name, tensor in prompt.items()}

        def in_flax(scores: bool = False, setting: Any = setting, arrays: Any = arrays, **drafting: str) -> Any:
            beams = plain.beam_options(setting, scores=scores)
            return model.generate(**arrays, constraint_index=bench.index, **beams, **drafting)

        def in_torch(setting: Any = setting, prompt: Any = prompt) -> Any:
            return plain.ours(bench, prompt, setting)

        log(f"({setting}): compiling, and comparing answers")
        with Seconds() as seconds:
            _, first = timed(in_flax)
        theirs = plain.ours(bench, prompt, setting, scores=True)
        output = in_flax(scores=True)
        found = argparse.Namespace(sequences=torch.from_numpy(np.array(output.sequences)))
        if setting.beams > 1:
            found.sequences_scores = torch.from_numpy(np.array(output.sequences_scores))
        problem = plain.difference(
            plain.as_answer(bench, prompt, setting, found),
            plain.as_answer(bench, prompt, setting, theirs),
            tolerance,
            exact=exact,
        )
        if problem is not None:
            raise SystemExit(f"({setting}): {FLAX} and {TORCH} disagree: {problem}")
        calls: dict[str, Callable[[], Any]] = {TORCH: in_torch, FLAX: in_flax}
        if options.drafts:
            calls[DRAFTS] = partial(in_flax, drafting="trie")
            if not np.array_equal(calls[DRAFTS](), in_flax()):
                raise SystemExit(f"({setting}): drafts change the answer")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for repetition in range(options.repeats):
            log(f"({setting}): repetition {repetition + 1} of {options.repeats}")
            for name in calls if repetition % 2 == 0 else reversed(calls):
                times[name].append(timed(calls[name])[1])
        result = {"compile_seconds": seconds.compiling, "first_call_seconds": first, "seconds": times}
        results.append({**asdict(setting), **result})
    return results


def print_times(results: list[dict[str, Any]], shape: str) -> None:
    names = list(results[0]["seconds"])
    header = [shape, "repetitions", "compile s", "first call s", *(f"{name} s" for name in names), "PyTorch / Flax"]
    rows = []
    for result in results:
        medians = {name: statistics.median(times) for name, times in result["seconds"].items()}
        result["median_seconds"] = medians
        # The calls of one repetition follow each other, so both feel what else the machine does.
        pairs = zip(result["seconds"][TORCH], result["seconds"][FLAX], strict=True)
        result["median_ratio"] = statistics.median(one / other for one, other in pairs)
        cells = [result["compile_seconds"], result["first_call_seconds"]]
        rows.append(
            [
                f"{result['batch']}, {result['prompt']}, {result['beams']}",
                str(len(result["seconds"][FLAX])),
                *(f"{cell:.2f}" for cell in cells),
                *(f"{medians[name]:.4f}" for name in names),
                f"{result['median_ratio']:.2f}",
            ]
        )
    print_table(header, rows)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
