# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The least time that a device can take for a call: the arithmetic, or the bytes that have to be moved. Runs nothing.

Every part takes the longer of the two, as if it reached both limits, and nothing else took time: no launches, no
selection, no memory that caches do not hold. A measured time is given as a multiple of it.

    python examples/benchmark/roofline.py                                 # an H100
    python examples/benchmark/roofline.py --bandwidth 4.8 --tflops 800    # another device
    OMP_NUM_THREADS=1 python examples/benchmark/roofline.py --drafts      # which drafts pay, here and on an H100

For drafts a forward of n nodes takes `forward + n * token` seconds, as `drafting="auto"` has it: to read the weights,
or for the host to launch it, and the arithmetic. What counts is how many nodes take as long as the rest of a forward,
and that a model's size does not change. This CPU's two are measured, in fp32.

Axes: B batch, P prompt, K beams, L tokens of an item, V vocabulary.
"""

import argparse
import time
from dataclasses import dataclass
from itertools import product

import torch
from report import print_table

from hf_gr.core.auto import HEAD, Costs, Search, expected_seconds


@dataclass(frozen=True)
class Device:
    """What a device can do.

    Attributes:
        bandwidth: bytes a second that its memory moves.
        flops: operations a second of its matrix units, in the model's dtype, as programs reach them.
    """

    bandwidth: float
    flops: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The longer of both limits."""
        return max(flops / self.flops, num_bytes / self.bandwidth)


@dataclass(frozen=True)
class Shape:
    """A decoder of Qwen3's kind; tied embeddings.

    Attributes:
        itemsize: bytes of a number.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    itemsize: int = 2

    @property
    def weights(self) -> int:
        """Parameters of all layers' matrices."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Parameters that turn hidden states into logits."""
        return self.hidden * self.vocab

    @property
    def key_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Limit:
    """Seconds of a call.

    Attributes:
        prefill: of the prompts, logits included.
        levels: of each later forward and what is done with its logits.
    """

    prefill: float
    levels: tuple[float, ...]

    @property
    def total(self) -> float:
        """All of it."""
        return self.prefill + sum(self.levels)


def limit(shape: Shape, device: Device, *, batch: int, prompt: int, beams: int, length: int) -> Limit:
    """The least time of one call over a prompt that all beams share."""
    return Limit(
        _prefill(shape, device, batch, prompt),
        tuple(_level(shape, device, batch, prompt, beams, depth) for depth in range(1, length)),
    )


def _prefill(shape: Shape, device: Device, batch: int, prompt: int) -> float:
    tokens = batch * prompt
    causal = tokens * prompt / 2
    linear = device.seconds(2 * tokens * shape.weights, shape.weights * shape.itemsize)
    # A product with the keys and one with the values: 4 operations for each number of a query and each key it sees.
    attention = device.seconds(4 * causal * shape.heads * shape.head_dim * shape.layers, 2 * tokens * shape.key_bytes)
    return linear + attention + _logits(shape, device, batch)


def _level(shape: Shape, device: Device, batch: int, prompt: int, beams: int, depth: int) -> float:
    tokens = batch * beams
    linear = device.seconds(2 * tokens * shape.weights, shape.weights * shape.itemsize)
    # Beams read the prompt's keys once together, and each its own ancestors'.
    keys = batch * (prompt + beams * depth) * shape.key_bytes
    attention = device.seconds(4 * tokens * (prompt + depth) * shape.heads * shape.head_dim * shape.layers, keys)
    return linear + attention + _logits(shape, device, tokens)


def _logits(shape: Shape, device: Device, tokens: int) -> float:
    """Logits are written once and read once, for their sum."""
    written = tokens * shape.vocab * shape.itemsize
    made = device.seconds(2 * tokens * shape.head, shape.head * shape.itemsize + written)
    return made + device.seconds(0, written)


QWEN3 = {
    "Qwen3-0.6B": Shape(28, 1024, 3072, 16, 8, 128, 151_936),
    "Qwen3-1.7B": Shape(28, 2048, 6144, 16, 8, 128, 151_936),
}


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bandwidth", type=float, default=3.35, metavar="TB_PER_S", help="of memory; 3.35: an H100")
    parser.add_argument("--tflops", type=float, default=800.0, help="of matrix units in the model's dtype, as reached")


def device_of(options: argparse.Namespace) -> Device:
    """The device that the arguments describe."""
    return Device(options.bandwidth * 1e12, options.tflops * 1e12)


WIDTHS = {  # nodes with 0 to L tokens
    "Beauty": (1, 91, 6539, 11172, 12023),
    "1 M items of 8": (1, 256, 65_536, 970_000, *[1_000_000] * 5),
}


def costs_here() -> Costs:
    """Of a forward of 75 M parameters on this CPU."""
    weights = torch.randn(24, 1024, 3072)

    def seconds(nodes: int) -> float:
        start, given = time.process_time(), torch.randn(nodes, 1024)
        for matrix in weights:
            given @ matrix
        return time.process_time() - start

    few, many = (min(seconds(nodes) for _ in range(5)) for nodes in (8, 128))
    return Costs(forward=few - (many - few) / 15, token=(many - few) / 120)


def print_drafts() -> None:
    """What a call is expected to take after its prompt, by plain search's: trie, draft model, strict head."""
    bytes_and_flops = 2 * (QWEN3["Qwen3-0.6B"].weights + QWEN3["Qwen3-0.6B"].head)
    limits = Costs(bytes_and_flops / 3.35e12, bytes_and_flops / 800e12)
    costs = {"this CPU, a thread": costs_here(), "an H100 at its limits": limits}
    costs["an H100, 28 ms a forward"] = Costs(28e-3, limits.token)  # to launch it without a graph: `gpu.py`
    rows = []
    for (hardware, cost), (catalogue, widths) in product(costs.items(), WIDTHS.items()):
        rows.append([hardware, catalogue, f"{cost.forward / cost.token:,.0f}"])
        for beams in (1, 5, 20, 128):
            searches = [
                Search(name, share, beams, len(widths) - 1, first)
                for name, share, first in (("draft model", 0.1, 0), ("head", HEAD, 1))
            ]
            plain, *others = expected_seconds(widths, beams, cost, budget=512, searches=searches)[0].values()
            rows[-1].append(" ".join(f"{seconds / plain:.2f}" for seconds in others))
    print_table(["hardware", "catalogue", "nodes", "1 beam", "5 beams", "20 beams", "128 beams"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device_arguments(parser)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--drafts", action="store_true", help="which drafts pay, on this CPU and on an H100")
    options = parser.parse_args()
    if options.drafts:
        return print_drafts()
    rows = []
    for (name, shape), length in zip(QWEN3.items(), (4, 3), strict=True):
        for beams in (128, 256, 512):
            found = limit(
                shape, device_of(options), batch=options.batch, prompt=options.prompt, beams=beams, length=length
            )
            numbers = (found.prefill, found.levels[-1], found.total)
            rows.append([name, f"{length} tokens, {beams} beams", *(f"{1e3 * number:.2f}" for number in numbers)])
    print_table(["model", "item", "prefill ms", "a level ms", "call ms"], rows)


if __name__ == "__main__":
    main()
