# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of one level of beams: in two parts against PyTorch's over a mask, as transformers calls it.

The mask's way repeats the keys for every query head, as transformers does beside a mask. No time is printed before
both agree. One layer, one thread, contenders in turns; medians. `LEAST_PAIRS` in `hf_gr/torch/visibility.py` is where
the two meet.

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
CALLS = (
    (1, 16, 4, 2, *SMALL),
    (1, 64, 20, 3, *SMALL),
    (1, 256, 20, 2, *SMALL),
    (1, 256, 50, 2, *SMALL),
    (1, 64, 128, 2, *SMALL),
    (4, 256, 50, 3, *SMALL),
    (1, 512, 128, 3, *SMALL),
    (1, 2048, 128, 3, *SMALL),
    (1, 1024, 512, 3, *SMALL),
    (1, 1000, 256, 2, *LARGE),
)


@dataclass(frozen=True)
class Level:
    """Queries, keys and values of one level, and who sees whom."""

    query: Tensor
    key: Tensor
    value: Tensor
    how: TreeAttention
    mask: Tensor

    @classmethod
    def make(cls, call: tuple[int, ...], dtype: torch.dtype) -> Level:
        """Random ones; every beam goes on from a random beam of the level before."""
        batch, prompt, beams, depth, heads, groups, width = call
        rng = torch.Generator().manual_seed(0)
        tree = Tree.over_prompt(batch, torch.device("cpu"))
        for number in range(depth):
            parents = torch.randint(0, tree.ancestry.shape[1], (batch, beams), generator=rng)
            tree = tree.grow(parents, depth=number + 1)
        seen = tree.attention_mask(torch.ones(batch, prompt, dtype=torch.bool))
        num_keys, room = prompt + tree.num_slots, prompt + beams * 4
        query = torch.randn(batch, beams, heads * groups, width, generator=rng).transpose(1, 2)
        key, value = (torch.randn(batch, heads, room, width, generator=rng)[:, :, :num_keys] for _ in range(2))
        how = TreeAttention(tree.ancestry, tree.is_level, tree.num_slots, None, tree.depth)
        return cls(query.to(dtype), key.to(dtype), value.to(dtype), how, seen)

    def in_parts(self) -> Tensor:
        return tree_attention(self.query, self.key, self.value, self.how, scale=self.query.shape[-1] ** -0.5)

    def by_mask(self) -> Tensor:
        batch, heads, num_keys, width = self.key.shape
        groups = self.query.shape[1] // heads
        key, value = (
            states[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, heads * groups, num_keys, width)
            for states in (self.key, self.value)
        )
        found = torch.nn.functional.scaled_dot_product_attention(self.query, key, value, attn_mask=self.mask)
        return found.transpose(1, 2).contiguous()


def milliseconds(contenders: list[Callable[[], Tensor]], *, repeats: int) -> list[float]:
    """The median times, taken in turns."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for contender, of_contender in zip(contenders, times, strict=True):
            start = time.perf_counter()
            contender()
            of_contender.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(of_contender) for of_contender in times]


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fast", action="store_true", help="three small calls, for CI")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype, rows, results = getattr(torch, options.dtype), [], []
    for call in CALLS[:3] if options.fast else CALLS:
        level = Level.make(call, dtype)
        torch.testing.assert_close(level.in_parts(), level.by_mask(), atol=TOL[dtype], rtol=0)
        parts, mask = milliseconds([level.in_parts, level.by_mask], repeats=3 if options.fast else options.repeats)
        batch, prompt, beams, depth, heads, groups, width = call
        shape, pairs = f"{batch}, {prompt}, {beams}, {depth}", beams * (prompt + beams * depth)
        rows.append((shape, f"{heads} x {groups} x {width}", f"{pairs:,}", f"{parts:.2f}", f"{mask:.2f}"))
        rows[-1] += (f"{parts / mask:.2f}",)
        results.append({"call": call, "pairs": pairs, "parts_ms": parts, "mask_ms": mask})
    header = ("batch, prompt, beams, depth", "heads", "pairs a row", "two parts, ms", "mask, ms", "ratio")
    print_table(header, rows)
    print_json_line("attention", torch.device("cpu"), {"dtype": options.dtype, "results": results})


if __name__ == "__main__":
    with torch.no_grad():
        main()
