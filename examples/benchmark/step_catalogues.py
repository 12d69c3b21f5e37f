# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The catalogues of `step.py`: uniform and Zipf codes, sorted and distinct; large ones are kept in a cache folder.

Axes: N items, L their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

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


def branching(rows: np.ndarray) -> list[tuple[int, float]]:
    """The most children of one node, and the mean, for every level."""
    is_new = np.zeros(len(rows), dtype=bool)
    is_new[0] = True
    levels = []
    for column in rows.T:
        nodes = np.flatnonzero(is_new)
        is_new[1:] |= column[1:] != column[:-1]
        children = np.add.reduceat(is_new, nodes, dtype=np.int64)
        levels.append((int(children.max()), float(children.mean())))
    return levels
