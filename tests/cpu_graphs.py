# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Captures on a CPU for `hf_gr.torch.graphs`, by `cpu_graph`: what a CUDA device would do, with its hazards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cpu_graph import CpuGraph, poison

from hf_gr.torch.graphs import Entry, GraphCache


@dataclass(frozen=True, eq=False)
class Program:
    graph: CpuGraph
    outputs: Any

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self.graph.memory.values())

    def replay(self) -> Any:
        self.graph.poison()  # as another graph of the pool would leave its memory
        self.graph.replay()
        return self.outputs


class CpuGraphs:
    """A backend that captures by `CpuGraph`."""

    is_capturing = False

    def __init__(self, *, waits: bool = True, device: str = "cpu") -> None:
        self.waits = waits
        self.device = device
        self.num_captures = self.num_launches = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def capture(self, function: Callable[[], Any]) -> Program:
        function()
        graph = CpuGraph(self.device)
        with graph.capture():
            outputs = function()
        self.num_captures, self.num_launches = self.num_captures + 1, graph.launches
        return Program(graph, outputs)

    def settle(self) -> None:
        pass


def poison_buffers(cache: GraphCache) -> list[Entry]:
    """Fill the static buffers of all programs with large finite values."""
    for entry in cache.entries:
        assert entry.recipe is not None
        poison(entry.recipe.buffers)
    return cache.entries
