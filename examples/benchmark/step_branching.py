# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The masking of one step over the branching: STATIC's appendix D and figure 4.

From the log-probabilities of 140 beams to those of their legal children, with tokens and next states; no softmax and
no selection. Every node has B children of 2B tokens, drawn at random, so that nothing is saved where all tokens are
legal. Contenders: ours, and STATIC's algorithm 2. Both must give the same children before any time is printed.

    python examples/benchmark/step_branching.py --plots   # half a minute
    python examples/benchmark/step_branching.py --fast

Axes: B children of a node.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from baselines import DEAD, Beams, Static
from report import add_plots_option, print_json_line, print_table
from step_timing import Clock, freed_memory_is_kept

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch.transition import children, device_catalogue

OURS, STATIC = "ours", "STATIC"
NODES, BATCH, BEAMS = 64, 2, 70
CPU = torch.device("cpu")

# Scores of all candidates, and by candidate tokens and states where it is legal.
Masked = tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]


def make_index(branching: int, seed: int) -> ConstraintIndex:
    """64 nodes with so many children each."""
    random = np.random.default_rng(seed)
    below = [np.sort(random.choice(2 * branching, branching, replace=False)) for _ in range(NODES)]
    rows = np.stack([np.arange(NODES).repeat(branching), np.concatenate(below)], axis=1)
    return ConstraintIndex.from_sequences(rows.astype(np.int32))


def contenders(
    index: ConstraintIndex, log_probs: torch.Tensor, first: torch.Tensor
) -> dict[str, Callable[[], Masked]]:
    """By name: the masking of level 1, for beams with these first tokens."""
    whole = device_catalogue(combine_rules([index.snapshot]), CPU)
    states, zeros, dead = first + 1, torch.zeros(first.shape), torch.full((), DEAD)
    trie = index.snapshot.trie
    static = Static(trie, vocab_size=log_probs.shape[-1], device=CPU, dense_levels=1)

    def ours() -> Masked:
        below = children(states, whole, level=1)
        scores, width = log_probs.gather(-1, below.tokens), below.shape[-1]
        summed = torch.where(below.legal, zeros[..., None] + scores, dead)
        return summed, lambda places: below.take(places // width, places % width)

    def theirs() -> Masked:
        beams = Beams(first[..., None], first[..., None], zeros)
        scores, tokens = static.candidates(log_probs, beams, states, 1)
        below = static.below
        assert tokens is not None
        assert below is not None
        return scores, lambda places: (tokens.flatten(1).gather(1, places), below.flatten(1).gather(1, places))

    return {OURS: ours, STATIC: theirs}


def children_of(masked: Masked) -> list[set[tuple[float, int, int]]]:
    """What is legal, by beam: scores, tokens and states."""
    scores, take = masked
    tokens, states = take(torch.arange(scores[0].numel()).expand(len(scores), -1))
    lists = [of.reshape(-1, scores.shape[-1]).tolist() for of in (scores, tokens, states)]
    return [{each for each in zip(*of, strict=True) if each[0] > DEAD} for of in zip(*lists, strict=True)]


def run(branching: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compare and time one branching."""
    random = torch.Generator().manual_seed(options.seed)
    log_probs = torch.randn(BATCH, BEAMS, max(2 * branching, NODES), generator=random)
    first = torch.randint(NODES, (BATCH, BEAMS), generator=random)
    calls = contenders(make_index(branching, options.seed), log_probs, first)
    expected = children_of(calls[STATIC]())
    if children_of(calls[OURS]()) != expected:
        raise SystemExit(f"MISMATCH at {branching} children: {OURS} against {STATIC}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    with freed_memory_is_kept():
        for repetition in range(options.repeat):
            for name in calls if repetition % 2 == 0 else reversed(calls):
                clock = Clock(CPU, cpu_time=True)
                calls[name]()
                clock.mark()
                times[name].append(clock.seconds()[0])
    ratio = {
        name: statistics.median(one / other for one, other in zip(of, times[STATIC], strict=True))
        for name, of in times.items()
    }
    return {"branching": branching, "seconds": {n: statistics.median(of) for n, of in times.items()}, "ratio": ratio}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=32_768, help="the most children of a node")
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="few children, for CI")
    add_plots_option(parser)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.fast:
        options.largest, options.repeat = 64, 3
    torch.set_num_threads(1)
    sizes = [2**power for power in range(1, options.largest.bit_length())]
    results = [run(branching, options) for branching in sizes]
    print(f"batch {BATCH}, {BEAMS} beams, CPU time of one thread; medians, and median ratios of neighbours\n")
    names = (OURS, STATIC)
    rows = [
        [str(result["branching"]), *(f"{1000 * result['seconds'][name]:.3f}" for name in names)]
        + [f"{result['ratio'][OURS]:.2f}"]
        for result in results
    ]
    print_table(["children", *(f"{name}, ms" for name in names), f"{OURS} / {STATIC}"], rows)
    if options.plots:
        from step_plots import plot

        lines = {name: [(r["branching"], 1000 * r["seconds"][name]) for r in results] for name in names}
        plot("step-branching", "children of every node", "ms", lines)
    print_json_line("step_branching", CPU, {"batch": BATCH, "beams": BEAMS, "results": results})


if __name__ == "__main__":
    main()
