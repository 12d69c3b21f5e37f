# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The catalogue at full size: build, rules, updates, files. Every time is a median; every result is checked first.

    python examples/benchmark/index.py                        # 20 million items of 8 tokens, three kinds of catalogue
    python examples/benchmark/index.py --items 1e6 --kinds uniform

Kinds: "uniform", each token at random, as in STATIC's experiments; "skewed", tokens by Zipf's law (exponent 1.3): some
prefixes have thousands of children, and many sequences are equal; "ragged", 4 to 8 tokens and an end token.

An update is timed until the next call of `generate` could begin, with the catalogue on the device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import print_json_line, print_table

from hf_gr import ConstraintIndex
from hf_gr.catalogue import storage
from hf_gr.catalogue.rules import combine_rules
from hf_gr.torch.transition import device_catalogue

VOCABULARY, LENGTH, EOS = 2048, 8, 1
UPDATE = 1000  # items per update
REQUESTS, SEEN = 64, 100  # batch size, and items that each user already has
CHECKED = 200  # items looked up after every step

UNITS = {  # seconds, if not here
    "build_memory": "GB beyond the input",
    "item_bytes": "bytes an item, a rule included",
    "disk_bytes": "bytes an item on disk",
    "load": "s, every byte compared with its checksum",
    "load_unread": "s, verify=False",
    "remove": f"s for {UPDATE:,} items",
    "add": f"s for {UPDATE:,} items",
    "exclude": f"s for {REQUESTS} x {SEEN} items",
}


class PeakMemory:
    """The peak resident memory of this process while it is measured, in GB above that at the start."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self.start, self.peak = _resident(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.gigabytes = (max(self.peak, _resident()) - self.start) / 1e9

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, _resident())


def _resident() -> int:
    """Bytes of this process in memory that are not part of a mapped file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def make_rows(kind: str, num_items: int, rng: np.random.Generator) -> np.ndarray:
    """`[N, 8]` tokens, in no order."""
    if kind == "skewed":
        return np.minimum(rng.zipf(1.3, (num_items, LENGTH)) - 1, VOCABULARY - 1).astype(np.int16)
    rows = rng.integers(EOS + 1, VOCABULARY, (num_items, LENGTH), dtype=np.int16)
    if kind == "ragged":
        lengths = rng.integers(LENGTH // 2, LENGTH + 1, num_items)
        rows[np.arange(LENGTH) >= lengths[:, None]] = -1
    return rows


def timed(work: Callable[[], Any], repeat: int = 1) -> tuple[float, Any]:
    """The median time of some work, and its last result."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def be_served(index: ConstraintIndex) -> None:
    """What a call of `generate` does with its catalogue before the first step."""
    device_catalogue(combine_rules([index.snapshot]), torch.device("cpu"))


def check_items(index: ConstraintIndex, rows: np.ndarray, alive: np.ndarray, rng: np.random.Generator) -> None:
    """Check by their sequences that items are found if and only if they are alive."""
    numbers = rng.choice(len(rows), CHECKED, replace=False)
    found = index.items(rows[numbers].tolist())
    for number, items in zip(numbers.tolist(), found, strict=True):
        assert (number in items) == bool(alive[number]), (
            f"item {number} is {'there' if number in items else 'missing'}"
        )
        assert all(item >= len(rows) or alive[item] for item in items), f"{items} are not all alive"


def measure_load(folder: Path, repeat: int) -> tuple[dict[str, float], ConstraintIndex]:
    """Times of loading, in turns: without reading, and compared with the checksum. The file is in the cache."""
    load = ConstraintIndex.from_pretrained
    ways = {"load_unread": {"verify": False}, "load": {}}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, how in ways.items():
            times[name].append(timed(lambda how=how: load(folder, **how))[0])
    index = load(folder)
    damage(folder)
    try:
        load(folder)
    except ValueError:
        return {name: statistics.median(found) for name, found in times.items()}, index
    raise AssertionError("a flipped bit was not found")


def damage(folder: Path) -> None:
    """Flip a bit in the middle of a copy of the arrays: the loaded ones keep their file."""
    path = folder / storage.ARRAYS_FILE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    copy = path.with_suffix(".new")
    copy.write_bytes(data)
    copy.replace(path)


def measure(kind: str, num_items: int, seed: int, repeat: int) -> dict[str, float]:
    """All figures of one kind of catalogue."""
    rng = np.random.default_rng(seed)
    rows = make_rows(kind, num_items, rng)
    eos = EOS if kind == "ragged" else None
    with PeakMemory() as memory:
        build, index = timed(lambda: ConstraintIndex.from_sequences(rows, eos_token_id=eos))
    figures = {"build": build, "build_memory": memory.gigabytes}
    alive = np.ones(num_items, dtype=bool)
    check_items(index, rows, alive, rng)

    mask = rng.random(num_items) < 0.5
    figures["where_mask"], view = timed(lambda: index.where(mask), repeat)
    check_items(view, rows, mask, rng)
    figures["item_bytes"] = view.nbytes / num_items
    chosen = rng.choice(num_items, num_items // 20, replace=False)
    figures["where_ids"], view = timed(lambda: index.where(chosen), repeat)
    check_items(view, rows, np.isin(np.arange(num_items), chosen), rng)

    seen = [rng.choice(num_items, SEEN, replace=False).tolist() for _ in range(REQUESTS)]
    figures["exclude"], _ = timed(lambda: combine_rules([index.snapshot], seen), repeat)
    with tempfile.TemporaryDirectory() as folder:
        figures["save"], _ = timed(lambda: index.save_pretrained(folder))
        figures["disk_bytes"] = sum(file.stat().st_size for file in Path(folder).iterdir()) / num_items
        more, loaded = measure_load(Path(folder), repeat)
        figures |= more
        check_items(loaded, rows, alive, rng)
        figures["remove_after_load"], _ = timed(lambda: (loaded.remove([0]), be_served(loaded)))

    removals, additions = [], []
    for step in range(repeat):
        gone = rng.choice(np.flatnonzero(alive), UPDATE, replace=False)
        removals.append(timed(lambda gone=gone: (index.remove(gone), be_served(index)))[0])
        alive[gone] = False
        new = rng.integers(EOS + 1, VOCABULARY, (UPDATE, LENGTH))
        ids = num_items + step * UPDATE + np.arange(UPDATE)
        additions.append(timed(lambda new=new, ids=ids: (index.add(new, ids), be_served(index)))[0])
        assert all(item in items for item, items in zip(ids, index.items(new), strict=True)), (
            "an added item is missing"
        )
    check_items(index, rows, alive, rng)
    figures["remove"], figures["add"] = statistics.median(removals), statistics.median(additions)
    figures["compact"], _ = timed(index.compact)
    assert index.num_items == np.count_nonzero(alive) + repeat * UPDATE
    check_items(index, rows, alive, rng)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=float, default=2e7)
    parser.add_argument("--kinds", nargs="+", default=["uniform", "skewed", "ragged"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="200,000 items: does it still work?")
    arguments = parser.parse_args()
    num_items = 200_000 if arguments.fast else int(arguments.items)
    # One process each: memory that one has freed would hide what the next one takes.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = {
            kind: pool.submit(measure, kind, num_items, arguments.seed, arguments.repeat) for kind in arguments.kinds
        }
        results = {kind: job.result() for kind, job in jobs.items()}
    names = next(iter(results.values()))
    print(f"{num_items:,} items of up to {LENGTH} tokens, V = {VOCABULARY}\n")
    print_table(
        ["figure", "unit", *results],
        [[name, UNITS.get(name, "s"), *(f"{figures[name]:.3g}" for figures in results.values())] for name in names],
    )
    print_json_line("index", torch.device("cpu"), {"items": num_items, "length": LENGTH, "figures": results})


if __name__ == "__main__":
    main()
