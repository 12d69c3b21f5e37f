# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `step.py` decodes: catalogues of uniform and Zipf codes, our contender, and scorers that take no time.

Everything that the benchmark knows of the library's internals is here and in `baselines.py`.
Axes: B batch, K beams, V vocabulary, N items, L their tokens.
"""

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generate import Answer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch.decode import DecodePlan, decode
from hf_gr.torch.transition import DeviceCatalogue, device_catalogue
from hf_gr.torch.tree import Nodes

LENGTH = 8
KEPT_FROM = 5_000_000  # items; sorting more takes longer than reading them
CACHE = Path.home() / ".cache" / "hf_gr" / "experiments" / "step"


@dataclass(frozen=True)
class Setting:
    """A catalogue; `codes` says how its codes are drawn."""

    codes: str
    items: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.codes}, {self.items:.0e} items, V = {self.vocab}".replace("e+0", "e")


def read_rows(setting: Setting, seed: int) -> np.ndarray:
    """`make_rows`, from the cache if they are there."""
    if setting.items < KEPT_FROM:
        return make_rows(setting, seed)
    file = CACHE / f"{setting.codes}-{setting.items}-{setting.vocab}-{LENGTH}-{seed}.npy"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.npy")
        np.save(part, make_rows(setting, seed))
        part.rename(file)
    return np.load(file, mmap_mode="r")


def make_rows(setting: Setting, seed: int) -> np.ndarray:
    """`[N, L]` distinct rows in lexicographic order, a little fewer than asked for where some were drawn twice.

    `uniform` draws all codes equally often. `zipf` draws code c of a level, in the level's own order, in proportion to
    1 / c.
    """
    random = np.random.default_rng(seed)
    if setting.codes == "uniform":
        rows = random.integers(setting.vocab, size=(setting.items, LENGTH), dtype=np.int16)
    else:
        share = np.cumsum(1 / np.arange(1, setting.vocab + 1))
        rows = np.empty((setting.items, LENGTH), dtype=np.int16)
        for column in rows.T:
            ranks = np.searchsorted(share, random.random(setting.items) * share[-1], side="right")
            column[:] = random.permutation(setting.vocab)[np.minimum(ranks, setting.vocab - 1)]
    return sorted_distinct(rows, setting.vocab)


def sorted_distinct(rows: np.ndarray, vocab_size: int) -> np.ndarray:
    bits = (vocab_size - 1).bit_length()
    keys = []
    for start in range(0, rows.shape[1], 63 // bits):
        key = np.zeros(len(rows), dtype=np.int64)
        for column in rows[:, start : start + 63 // bits].T:
            key = key << bits | column
        keys.append(key)
    rows = rows[np.lexsort(keys[::-1])]
    return rows[np.append(True, (rows[1:] != rows[:-1]).any(axis=1))]


WITH_RULE, WITH_EXCLUSIONS = "ours, a rule", "ours, exclusions"
EXCLUDED = 100  # items of each request


def load_rules(
    index: ConstraintIndex, beams: int, batch: int, device: torch.device, seed: int
) -> dict[str, tuple[DeviceCatalogue, list[np.ndarray]]]:
    """By contender: the catalogue under a rule and under exclusions, and the items that are left to each request."""
    random = np.random.default_rng(seed)
    number = index.num_items
    left = np.ones((batch, number), dtype=bool)
    for row in left:
        row[random.choice(number, min(EXCLUDED, number - beams), replace=False)] = False
    meets = random.random(number) < 0.5 if number > 4 * beams else left[0]
    view = index.where(meets)
    excluded = combine_rules([index.snapshot], [np.flatnonzero(~row) for row in left])
    of_rule = combine_rules([view.snapshot])
    return {
        WITH_RULE: (device_catalogue(of_rule, device), [meets] * batch),
        WITH_EXCLUSIONS: (device_catalogue(excluded, device), list(left)),
    }


@cache  # a call's own, not a step's
def make_plan(batch_size: int, num_beams: int, device: torch.device) -> DecodePlan:
    return DecodePlan(
        prompt=torch.zeros((batch_size, 0), dtype=torch.long, device=device),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        num_kept=2 * num_beams,  # as in transformers
        do_sample=False,
        length_penalty=0.0,  # scores are sums
        early_stopping=False,
        max_new_tokens=LENGTH,
        fill_token_id=0,
        missing_token_id=0,
    )


def ours(catalogue: DeviceCatalogue, scorer: Any, num_beams: int) -> Answer:
    batch_size = len(scorer.prompt_logits)
    plan = make_plan(batch_size, num_beams, scorer.prompt_logits.device)
    decoded = decode(scorer, catalogue, plan)
    shape = (batch_size, num_beams)
    return Answer(decoded.sequences.unflatten(0, shape), decoded.scores.view(shape))


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


class Calls(TorchDispatchMode):
    """Counts operations while it is entered."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


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
