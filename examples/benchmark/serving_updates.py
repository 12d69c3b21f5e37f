# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls with changing rules while the catalogue changes: is every answer legal in the version that it names?

The judge keeps plain sets of item ids for every version, made from what was sent, and shares no code with the server.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serving_load import Done, Job, percentile, read_client, start_client, summarise

NUM_RESULTS, NUM_RULES = 10, 8
STAYING = 5  # one item of so many is never removed: histories, exclusions and lists of allowed items name only these
SWAP_SHARE = 0.1  # of the items, that are not in the catalogue of the swap


@dataclass(frozen=True)
class Edition:
    """What may be recommended in one version: all items, and those of every rule."""

    items: frozenset[int]
    rules: dict[str, frozenset[int]]


@dataclass
class Ledger:
    """Every version that was, by its number."""

    editions: dict[int, Edition]
    version: int

    @property
    def now(self) -> Edition:
        return self.editions[self.version]

    def record(self, version: int, edition: Edition) -> None:
        if version != self.version + 1:
            raise SystemExit(f"an update made version {version} of version {self.version}, expected one more")
        self.editions[version], self.version = edition, version


def allowed(edition: Edition, body: dict[str, Any]) -> frozenset[int]:
    """The items that may be in the answer to a request."""
    items = edition.items
    if "rule" in body:
        items &= edition.rules[body["rule"]]
    if "filter" in body:
        items &= frozenset(body["filter"])
    return items - frozenset(body.get("exclude", ()))


def problem_of(done: Done, body: dict[str, Any], ledger: Ledger) -> str | None:
    """What is wrong with an answer, or None."""
    if done.status != 200:
        return f"status {done.status}: {done.answer}"
    items, version = done.answer["items"], done.answer["catalogue_version"]
    if version not in ledger.editions:
        return f"version {version} never was"
    legal = allowed(ledger.editions[version], body)
    if not legal.issuperset(items):
        return f"items {sorted(set(items) - legal)} are illegal in version {version}"
    if len(set(items)) != min(NUM_RESULTS, len(legal)):
        return f"{len(set(items))} items of {len(legal)} legal ones in version {version}"
    return None


def make_bodies(histories: Sequence[list[int]], num_items: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Requests with all kinds of rules; most of them are unlike any other."""
    draw = random.Random(seed)
    staying = range(0, num_items, STAYING)
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        history = [item - item % STAYING for item in histories[number % len(histories)]][-20:]
        body: dict[str, Any] = {"history": history, "num_results": NUM_RESULTS}
        kind = draw.random()
        if kind < 0.4:
            body["rule"] = f"rule {draw.randrange(NUM_RULES)}"
        elif kind < 0.6:
            body["filter"] = draw.sample(staying, draw.choice((3, 30, 100)))
        if draw.random() < 0.5:
            body["exclude"] = draw.sample(staying, draw.randrange(1, 30))
        bodies.append(body)
    return bodies


def some_update(ledger: Ledger, rows: np.ndarray, draw: random.Random) -> tuple[dict[str, Any], Edition]:
    """A change of the catalogue, and the edition that it makes."""
    items, rules = set(ledger.now.items), dict(ledger.now.rules)
    update: dict[str, Any] = {}
    leaving = [item for item in range(len(rows)) if item % STAYING]
    known = draw.sample(leaving, 6)
    remove, add = [i for i in known[:3] if i in items], [i for i in known[3:] if i not in items]
    if remove:
        update["remove"] = remove
    if add:
        update["add"] = [{"item_id": item, "sequence": rows[item].tolist()} for item in add]
    items = items - set(remove) | set(add)
    rules = {name: members - set(remove) for name, members in rules.items()}
    if draw.random() < 0.3 or not update:
        name = f"rule {draw.randrange(NUM_RULES)}"
        rules[name] = frozenset(draw.sample(sorted(items), draw.choice((15, 200))))
        update["rules"] = {name: sorted(rules[name])}
    return update, Edition(frozenset(items), rules)


def change(server: Any, method: str, body: dict[str, Any]) -> int:
    """Change the catalogue; its version."""
    status, answer = server.ask(method, "/v1/catalogue", body)
    if status != 200:
        raise SystemExit(f"{method} /v1/catalogue got {status}: {json.dumps(answer)[:2000]}")
    return answer["version"]


def swap(server: Any, ledger: Ledger, rows: np.ndarray, folder: str, draw: random.Random) -> None:
    """A new index in place of the old one; rules keep those of their items that are in it."""
    from hf_gr import ConstraintIndex

    kept = {name: set(members) for name, members in ledger.now.rules.items()}
    needed = set().union(*kept.values())  # a rule may only name items that are there
    gone = {i for i in range(len(rows)) if i % STAYING and i not in needed and draw.random() < SWAP_SHARE}
    items = sorted(set(range(len(rows))) - gone)
    ConstraintIndex.from_sequences(rows[items], item_ids=items).save_pretrained(folder)
    version = change(server, "PUT", {"index": folder})
    ledger.record(version, Edition(frozenset(items), dict(ledger.now.rules)))


def run(server: Any, rows: np.ndarray, histories: Sequence[list[int]], options: Any) -> dict[str, Any]:
    """Calls at a rate, updates spread over their time, a swap in the middle; then the judgement."""
    draw = random.Random(options.seed)
    everything = frozenset(range(len(rows)))
    rules = {f"rule {n}": frozenset(draw.sample(range(len(rows)), min(200, len(rows) // 3))) for n in range(NUM_RULES)}
    version = server.ask("GET", "/v1/catalogue")[1]["version"]
    ledger = Ledger({version: Edition(everything, {})}, version)
    made = {"rules": {name: sorted(members) for name, members in rules.items()}}
    ledger.record(change(server, "PATCH", made), Edition(everything, rules))

    bodies = make_bodies(histories, len(rows), options.calls, options.seed)
    took, memory = [], []
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as folder:
        job = Job(server.url, bodies, options.update_rate, options.calls, seed=options.seed, keep=True)
        client = start_client(job, Path(scratch))
        begun, pace = time.monotonic(), options.calls / options.update_rate / (options.updates + 1)
        for number in range(options.updates):
            time.sleep(max(0.0, begun + (number + 1) * pace - time.monotonic()))
            before = time.perf_counter()
            if number == options.updates // 2:
                swap(server, ledger, rows, folder, draw)
            else:
                update, edition = some_update(ledger, rows, draw)
                ledger.record(change(server, "PATCH", update), edition)
                took.append(time.perf_counter() - before)
            memory.append(server.memory())
        found = read_client(client, Path(scratch))
    problems = [(done, problem_of(done, bodies[done.number], ledger)) for done in found]
    wrong = [(done.number, problem) for done, problem in problems if problem is not None]
    quarter = max(1, len(memory) // 4)
    return {
        **summarise(found, planned=options.calls),
        "updates": options.updates,
        "swaps": 1,
        "wrong": len(wrong) + options.calls - len(found),
        "first_wrong": None if not wrong else f"call {wrong[0][0]}, {bodies[wrong[0][0]]}: {wrong[0][1]}",
        "versions": len({done.answer["catalogue_version"] for done in found if done.status == 200}),
        "update_p50": percentile(took, 0.5),
        "update_p99": percentile(took, 0.99),
        "memory_before": memory[quarter],
        "memory_after": memory[-1],
        "metrics": server.metrics(),
    }
