# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The clock and the logits of `step.py`: scorers that take no time.

Axes: B batch, K beams, V vocabulary.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_gr.torch.tree import Nodes


class Clock:
    """Times between marks: wall-clock time, a CUDA device's own, or the CPU time of this thread."""

    def __init__(self, device: torch.device, *, cpu_time: bool = False) -> None:
        self.on_device = device.type == "cuda"
        self.now = time.thread_time if cpu_time else time.perf_counter
        self.marks: list[Any] = []
        if self.on_device:
            torch.cuda.synchronize(device)
        self.mark()

    def mark(self) -> None:
        if self.on_device:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(self.now())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.on_device:
            return [end - start for start, end in pairs]
        self.marks[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


class MadeBeforehand:
    """The same logits for any first, second, third step: a scorer that takes no time."""

    def __init__(self, levels: list[Tensor], clock: Clock) -> None:
        self.prompt_logits, *self.rest = levels
        self.clock = clock
        self.num_forwards, self.columns, self.takes_prompt = 0, None, False

    def begin(self, levels: Sequence[Nodes] = ()) -> list[Tensor]:
        return [self.prompt_logits]

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Tensor]:
        self.clock.mark()
        self.num_forwards += 1
        return [self.rest[depth - 1]]


class FromLastToken:
    """Logits that depend on the beam's last token and the level, not on its rank, for comparing answers.

    Two methods that round differently may swap two beams whose scores are nearly equal; what follows must not change.
    """

    KEYS = 61

    def __init__(self, tables: list[Tensor], batch_size: int) -> None:
        self.tables = tables
        self.rows = torch.arange(batch_size, device=tables[0].device)[:, None]
        self.prompt_logits = tables[0][self.rows]
        self.num_forwards, self.columns, self.takes_prompt = 0, None, False

    def begin(self, levels: Sequence[Nodes] = ()) -> list[Tensor]:
        return [self.prompt_logits]

    def score(self, levels: Sequence[Nodes], *, depth: int) -> list[Tensor]:
        self.num_forwards += 1
        return [self.tables[depth][(nodes.tokens + 7 * self.rows) % self.KEYS] for nodes in levels]


@contextmanager
def freed_memory_is_kept() -> Iterator[None]:
    """Make glibc keep freed memory, as the CUDA allocator does.

    Depending on its history it returns large blocks to the system, and the next caller pays for new pages: more than
    half of a step at V = 8192, sometimes ours, sometimes another's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    trim_threshold, mmap_max = -1, -4  # of <malloc.h>
    if mallopt is not None:
        mallopt(trim_threshold, -1)
        mallopt(mmap_max, 0)
    yield
    if mallopt is not None:
        mallopt(trim_threshold, 128 * 1024)  # glibc's defaults
        mallopt(mmap_max, 65536)
