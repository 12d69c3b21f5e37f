# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of one level of beams: in two parts against PyTorch's over a mask, as transformers calls it.

The mask's way repeats the keys for every query head, as transformers does beside a mask. No time is printed before
both agree. One layer, one thread, contenders in turns; medians.

    python examples/benchmark/attention.py           # heads of a Qwen3 of 25.7 M, and of Qwen3-0.6B
    python examples/benchmark/attention.py --fast    # for CI

Axes: B batch, P prompt, K beams; depth: tokens of a beam.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import print_json_line, print_table
from torch import Tensor

from hf_gr.torch.tree import Tree
from hf_gr.torch.tree_attention import TreeAttention, tree_attention

TOL = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # of values around 1
# Batch, prompt, beams, depth; key heads, query heads of each, width.
SMALL = (4, 2, 64)
LARGE = (8, 2, 128)
CALLS = tuple(
    (*call, *heads)
    for heads in (SMALL, LARGE)
    for call in (
        (1, 16, 4, 3),
        (1, 64, 20, 3),
        (1, 256, 20, 2),
        (1, 64, 128, 2),
        (4, 256, 50, 3),
        (1, 512, 128, 1),
        (1, 512, 128, 3),
        (1, 2048, 128, 3),
        (1, 1024, 512, 3),
    )
)
LAYERS = 6


@dataclass(frozen=True)
class Level:
    """Queries, keys and values of one level, which stand for those of every layer, and the tree of its nodes."""

    query: Tensor
    key: Tensor
    value: Tensor
    tree: Tree
    prompt_mask: Tensor

    @classmethod
    def make(cls, call: tuple[int, ...], dtype: torch.dtype) -> Level:
        """Random ones; every beam goes on from a random beam of the level before."""
        batch, prompt, beams, depth, heads, groups, width = call
        rng = torch.Generator().manual_seed(0)
        tree = Tree.over_prompt(batch, torch.device("cpu"))
        for number in range(depth):
            parents = torch.randint(0, tree.ancestry.shape[1], (batch, beams), generator=rng)
            tree = tree.grow(parents, depth=number + 1)
        num_keys, room = prompt + tree.num_slots, prompt + beams * 4
        query = torch.randn(batch, beams, heads * groups, width, generator=rng).transpose(1, 2)
        key, value = (torch.randn(batch, heads, room, width, generator=rng)[:, :, :num_keys] for _ in range(2))
        prompt_mask = torch.ones(batch, prompt, dtype=torch.bool)
        return cls(query.to(dtype), key.to(dtype), value.to(dtype), tree, prompt_mask)

    def ours(self, layers: int = LAYERS) -> Tensor:
        tree = self.tree
        how = TreeAttention(tree, self.prompt_mask, tree.depth)
        for _ in range(layers):
            found = tree_attention(self.query, self.key, self.value, how, scale=self.query.shape[-1] ** -0.5)
        return found

    def by_mask(self, layers: int = LAYERS) -> Tensor:
        batch, heads, num_keys, width = self.key.shape
        groups = self.query.shape[1] // heads
        mask = self.tree.attention_mask(self.prompt_mask)
        for _ in range(layers):
            key, value = (
                states[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, heads * groups, num_keys, width)
                for states in (self.key, self.value)
            )
            found = torch.nn.functional.scaled_dot_product_attention(self.query, key, value, attn_mask=mask)
            found = found.transpose(1, 2).contiguous()
        return found


def milliseconds(contenders: list[Callable[[], Tensor]], *, repeats: int, clock: Callable[[], float]) -> list[float]:
    """The median times, taken in turns."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for contender, of_contender in zip(contenders, times, strict=True):
            start = clock()
            contender()
            of_contender.append((clock() - start) * 1e3)
    return [statistics.median(of_contender) for of_contender in times]


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread, for a shared machine")
    parser.add_argument("--fast", action="store_true", help="a few small calls, for CI")
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        parser.error(f"--cpu-time is that of one thread, expected --threads 1, not {options.threads}")
    torch.set_num_threads(options.threads)
    repeats, clock = (
        3 if options.fast else options.repeats,
        time.thread_time if options.cpu_time else time.perf_counter,
    )
    dtype, rows, results = getattr(torch, options.dtype), [], []
    for call in CALLS[:3] if options.fast else CALLS:
        level = Level.make(call, dtype)
        torch.testing.assert_close(level.ours(1), level.by_mask(1), atol=TOL[dtype], rtol=0)
        ours, mask = milliseconds([level.ours, level.by_mask], repeats=repeats, clock=clock)
        batch, prompt, beams, depth, heads, groups, width = call
        shape, pairs = f"{batch}, {prompt}, {beams}, {depth}", beams * (prompt + beams * depth)
        rows.append((shape, f"{heads} x {groups} x {width}", f"{pairs:,}", f"{ours:.2f}", f"{mask:.2f}"))
        rows[-1] += (f"{ours / mask:.2f}",)
        results.append({"call": call, "pairs": pairs, "layers": LAYERS, "ours_ms": ours, "mask_ms": mask})
    header = ("batch, prompt, beams, depth", "heads", "pairs a row", "ours, ms", "mask, ms", "ratio")
    print_table(header, rows)
    print_json_line(
        "attention", torch.device("cpu"), {"dtype": options.dtype, "cpu_time": options.cpu_time, "results": results}
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
