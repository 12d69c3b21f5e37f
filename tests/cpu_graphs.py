# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Captures on a CPU for `hf_gr.torch.graphs`, by `cpu_graph`: what a CUDA device would do, with its hazards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from cpu_graph import CpuGraph, poison

from hf_gr.generation.torch import captured


class CpuGraphs:
    """A backend that captures by `CpuGraph`."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.num_captures = self.num_replays = self.num_launches = 0
        self._lock = threading.Lock()

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> CpuGraphs:
        """The backend of all decodes that are captured."""
        backend = cls(device)
        monkeypatch.setattr(captured, "backend_of", lambda device: backend)
        return backend

    def turn(self) -> Any:
        return self._lock

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
        function()
        graph = CpuGraph(self.device)
        with graph.capture():
            outputs = function()
        self.num_captures, self.num_launches = self.num_captures + 1, graph.launches

        def replay() -> Any:
            graph.poison()  # as another graph of the pool would leave its memory
            graph.replay()
            self.num_replays += 1
            return outputs

        return replay, sum(block.nbytes for block in graph.memory.values())


def capture(model: Any, inputs: dict[str, Any], **options: Any) -> captured.Program:
    """Capture the decode of such calls, as `model.warm_up` does."""
    with captured.capturing() as found:
        model.generate(**inputs, cache_implementation="static", **options)
    (program,) = found
    return program


def poison_buffers(model: Any) -> list[captured.Program]:
    """Fill the static buffers of all programs with large finite values."""
    programs = captured.PROGRAMS.get(model, [])
    for program in programs:
        poison(program.captured.buffers)
    return programs
