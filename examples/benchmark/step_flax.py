# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`step.py --flax`: our step in Flax against our step in PyTorch, in turn, on one catalogue and the same logits.

Whole decodes of L levels, as in `step.py`: in PyTorch the library's loop, in Flax the functions that its loop calls a
level (children, scores at the children, selection), as one program. Answers are compared before any time is printed.
Times are CPU times of the process, divided by L: both sides use one thread (`XLA_FLAGS` is set for JAX).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import step
import torch
from generate import Answer, difference
from report import print_table

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp

from hf_gr.core.beam import DEAD, Beams, Finished
from hf_gr.flax import decode, ops, transition
from hf_gr.flax.speculation import Scored

TORCH, FLAX = "ours in PyTorch", "ours in Flax"


def run_setting(setting: step.Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Compare both sides' answers, then time them in turn."""
    rows, batch, beams = step.make_rows(setting, options.seed), options.batch, options.beams
    random = torch.Generator().manual_seed(options.seed)
    shapes = [(batch, 1 if level == 0 else beams, setting.vocab) for level in range(step.LENGTH)]
    logits = [step.SPREAD * torch.randn(shape, generator=random) for shape in shapes]
    cpu = torch.device("cpu")
    catalogue = step.load(rows, cpu)
    program, arguments = make_program(rows, [each.numpy() for each in logits], beams)

    def in_torch() -> Answer:
        return step.ours(catalogue, step.MadeBeforehand(logits, step.Clock(cpu)), beams)

    def in_flax() -> Any:
        return jax.block_until_ready(program(*arguments))

    sequences, scores = (torch.from_numpy(np.array(side)) for side in in_flax())
    problem = difference(in_torch(), Answer(sequences, scores), step.SCORE_TOL, exact=True)
    if problem is not None:
        raise SystemExit(f"MISMATCH at {setting}, {TORCH} against {FLAX}: {problem}")
    calls: dict[str, Callable[[], Any]] = {TORCH: in_torch, FLAX: in_flax}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(2 + options.repeat):
        for name in calls if repetition % 2 == 0 else reversed(calls):
            start = time.process_time()
            calls[name]()
            if repetition > 1:
                times[name].append((time.process_time() - start) / step.LENGTH)
    ratio = statistics.median(one / other for one, other in zip(times[FLAX], times[TORCH], strict=True))
    medians = {name: statistics.median(of) for name, of in times.items()}
    return {"name": str(setting), "step_seconds": medians, "flax_per_torch": ratio, "repetitions": options.repeat}


def make_program(rows: np.ndarray, logits: list[np.ndarray], num_beams: int) -> tuple[Any, tuple[Any, Any]]:
    """A whole decode over given logits, compiled, and its arguments."""
    batch_size = len(logits[0])
    rules = combine_rules([ConstraintIndex.from_sequences(rows).snapshot])
    catalogue = transition.device_catalogue(rules, num_rows=batch_size)
    plan = decode.DecodePlan(
        num_beams=num_beams,
        num_return_sequences=num_beams,
        num_kept=2 * num_beams,
        do_sample=False,
        early_stopping=False,
        length_penalty=np.float32(0),
        max_new_tokens=np.int32(step.LENGTH),
    )

    def search(catalogue: Any, logits: Any) -> Any:
        beams = Beams.start(ops, None, batch_size=batch_size, width=1)
        finished = Finished.none_yet(ops, None, batch_size=batch_size, width=num_beams, max_length=step.LENGTH)
        for level, given in enumerate(logits):
            places = jnp.broadcast_to(jnp.arange(given.shape[1], dtype=jnp.int32), given.shape[:2])
            levels = jnp.full(batch_size, level, dtype=jnp.int32)
            scored = Scored.of(given, beams.states, depths=places, made=None, levels=levels, num_live=given.shape[1])
            below = transition.children(beams.states, catalogue, level=level)
            scores = decode.child_scores(scored, places, below, beams, plan, max_length=step.LENGTH)
            scores = jnp.where(below.legal, beams.scores[..., None] + scores, DEAD)
            beams, finished = decode.accept(beams, finished, below, scores, catalogue, plan, level=level)
        return finished.sequences, finished.scores

    arguments = catalogue, [jnp.asarray(each) for each in logits]
    return jax.jit(search).lower(*arguments).compile(), arguments


def print_times(results: list[dict[str, Any]]) -> None:
    rows = []
    for result in results:
        cells = [f"{1000 * seconds:.3f}" for seconds in result["step_seconds"].values()]
        rows.append([result["name"], str(result["repetitions"]), *cells, f"{result['flax_per_torch']:.2f}"])
    print()
    print_table(["catalogue", "repetitions", f"{TORCH}, ms", f"{FLAX}, ms", "Flax / PyTorch"], rows)
    met = all(result["flax_per_torch"] <= 1 for result in results)
    print(f"goal: a step in Flax takes no longer than in PyTorch: {'met' if met else 'MISSED'}")
