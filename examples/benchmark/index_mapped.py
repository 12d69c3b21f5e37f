# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A catalogue that is larger than most machines' memory for one: built from a mapped file, served from another.

`index.py --mapped` runs it. Two processes: one compiles and saves; the other, as a server would, maps the file,
decodes from it (precomputed logits, no model, one thread) and filters it. Every answer is looked up in the input.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from report import print_json_line, print_table
from step import LENGTH, SPREAD, Clock, MadeBeforehand, medians, ours

from hf_gr import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch.transition import device_catalogue

VOCABULARY, BATCH, BEAMS = 2048, 2, 70  # STATIC's setting
SMALL = 100_000  # items of the catalogue whose steps are compared
ROWS_AT_ONCE = 2**20
DECODES = 21

NAMES = {
    "input": "GB of rows, mapped",
    "build": "s",
    "build_memory": "GB beyond the input, at most",
    "save": "s",
    "disk": "GB",
    "load_unread": "s, verify=False",
    "touched": "GB of the file in memory after the decodes",
    "own_memory": "GB of the process's own memory by then, without imports",
    "step": "ms a step",
    "step_small": f"ms a step with {SMALL:,} items",
    "step_view": "ms a step, half of the items filtered out",
    "load": "s, every byte compared with its checksum",
    "where_mask": "s",
    "remove": "s for 1,000 items",
}


def measure_mapped(num_items: int, seed: int, repeat: int, decodes: int = DECODES) -> dict[str, float]:
    """All figures of one uniform catalogue."""
    figures: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for work in (_build, _serve):  # a process each: what one has mapped would be in the other's memory
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                figures |= pool.submit(work, Path(folder), num_items, seed, repeat, decodes).result()
    return {name: figures[name] for name in NAMES}


def print_mapped(num_items: int, figures: dict[str, float]) -> None:
    """The table, and the JSON line."""
    print(
        f"{num_items:,} uniform items of {LENGTH} tokens, V = {VOCABULARY}; batch {BATCH}, {BEAMS} beams, one thread\n"
    )
    print_table(
        ["figure", "unit", "measured"], [[name, NAMES[name], f"{value:.3g}"] for name, value in figures.items()]
    )
    print_json_line("index_mapped", torch.device("cpu"), {"items": num_items, "length": LENGTH, "figures": figures})


def _build(folder: Path, num_items: int, seed: int, repeat: int, decodes: int) -> dict[str, float]:
    from index import PeakMemory, timed

    write_rows(folder / "rows.npy", num_items, seed)
    rows = np.load(folder / "rows.npy", mmap_mode="r")
    with PeakMemory() as memory:
        build, index = timed(lambda: ConstraintIndex.from_sequences(rows))
    save, _ = timed(lambda: index.save_pretrained(folder / "index"))
    disk = sum(file.stat().st_size for file in (folder / "index").iterdir())
    return {
        "input": rows.nbytes / 1e9,
        "build": build,
        "build_memory": memory.gigabytes,
        "save": save,
        "disk": disk / 1e9,
    }


def _serve(folder: Path, num_items: int, seed: int, repeat: int, decodes: int) -> dict[str, float]:
    from index import be_served, timed

    torch.set_num_threads(1)
    small = ConstraintIndex.from_sequences(
        np.random.default_rng(seed).integers(0, VOCABULARY, (SMALL, LENGTH), dtype=np.int16)
    )
    decode_all([small], 1, seed)  # what a first decode allocates is not the catalogue's
    own, mapped = _memory("RssAnon"), _memory("RssFile")
    unread, index = timed(lambda: ConstraintIndex.from_pretrained(folder / "index", verify=False))
    figures = {"load_unread": unread}
    seconds, answers = decode_all([index, small], decodes, seed)
    figures |= {"step": 1000 * seconds[0], "step_small": 1000 * seconds[1]}
    figures["touched"] = (_memory("RssFile") - mapped) / 1e9
    figures["own_memory"] = (_memory("RssAnon") - own) / 1e9
    check_answers(answers, np.load(folder / "rows.npy", mmap_mode="r"))

    figures["load"], _ = timed(lambda: ConstraintIndex.from_pretrained(folder / "index"), repeat)
    mask = np.random.default_rng(seed + 1).random(num_items) < 0.5
    figures["where_mask"], view = timed(lambda: index.where(mask), repeat)
    seconds, answers = decode_all([view], decodes, seed)
    figures["step_view"] = 1000 * seconds[0]
    assert all(any(mask[item] for item in items) for items in index.items(answers)), "a filtered item was generated"
    gone = np.random.default_rng(seed + 2).choice(num_items, 1000, replace=False)
    figures["remove"], _ = timed(lambda: (index.remove(gone), be_served(index)))
    assert not index.has_items(gone).any()
    return figures


def write_rows(path: Path, num_items: int, seed: int) -> None:
    """Random rows, in pieces: they are never in memory as a whole."""
    rng = np.random.default_rng(seed)
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.int16, shape=(num_items, LENGTH))
    for start in range(0, num_items, ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        some[:] = rng.integers(0, VOCABULARY, some.shape, dtype=np.int16)
    rows.flush()


def decode_all(indexes: list[ConstraintIndex], repeat: int, seed: int) -> tuple[list[float], np.ndarray]:
    """Seconds of a step by index, the sum of the levels' medians as in step.py; and the first one's answers."""
    device = torch.device("cpu")
    catalogues = [device_catalogue(combine_rules([index.snapshot]), device) for index in indexes]
    random = torch.Generator().manual_seed(seed)
    widths = [1] + [BEAMS] * (LENGTH - 1)
    logits = [SPREAD * torch.randn(BATCH, width, VOCABULARY, generator=random) for width in widths]
    times: list[list[list[float]]] = [[] for _ in indexes]
    answers: list[Any] = []
    for _ in range(repeat):
        for catalogue, of in zip(catalogues, times, strict=True):
            clock = Clock(device)
            answers.append(ours(catalogue, MadeBeforehand(logits, clock), BEAMS))
            clock.mark()
            of.append(clock.seconds())
    return [sum(medians(of)) / LENGTH for of in times], answers[0].sequences.flatten(0, 1).numpy()


def check_answers(answers: np.ndarray, rows: np.ndarray) -> None:
    """Look every answer up in the input, which is read once from end to end."""
    sought = np.ascontiguousarray(answers.astype(np.int16))
    halves = np.unique(sought.view(np.int64)[:, 0])  # of a row's 16 bytes; they alone tell nearly all rows apart
    found: set[bytes] = set()
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = np.ascontiguousarray(rows[start : start + ROWS_AT_ONCE])
        alike = some[np.isin(some.view(np.int64)[:, 0], halves)]
        found.update(row.tobytes() for row in alike)
    missing = [row for row in sought if row.tobytes() not in found]
    assert not missing, f"{len(missing)} of {len(sought)} answers are no items"


def _memory(kind: str) -> int:
    """Bytes of this process: `RssAnon` its own, `RssFile` of mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(":", 1) for line in lines)[kind].split()[0]) * 1024
