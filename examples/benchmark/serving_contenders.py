# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Who serves: `hf_gr.Engine` in several settings, and what a shop writes by hand, behind one and the same HTTP app.

Runs in a process of its own, which `serving.py` starts. The baselines have the interface of `Engine` as far as the app
uses it; they know no deadlines, rules, budgets or updates.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beauty_data import read_items, read_users
from generate import dict_trie, make_catalogue, make_model

from hf_gr import ConstraintIndex, enable
from hf_gr.answering.recommender import Recommender
from hf_gr.answering.requests import Request
from hf_gr.serving.answers import Recommendation
from hf_gr.serving.app import make_app
from hf_gr.serving.catalogues import LiveCatalogue
from hf_gr.serving.observer import Batch, Observer
from hf_gr.serving.run import bind, run

SIZES = {  # of the model: 25.7 M and 0.1 M parameters
    "full": {"layers": 6, "hidden": 512, "vocab": 13312},
    "small": {"layers": 2, "hidden": 64, "vocab": 1040},
}
NUM_RESULTS = 10
SEALED_BATCH, SEALED_WAIT = 8, 0.010  # requests, seconds
INSTRUCTION, RETURNING = 64, 64  # tokens that all prompts share; items of a returning user's first history
PEOPLE, VISITS = 24, 32  # returning users of a trial, and how often each comes
BARE_REPEATS = 3


@dataclass(frozen=True)
class Place:
    """What a contender is run with.

    Attributes:
        contender: a key of `CONTENDERS`.
        size: of the model, a key of `SIZES`.
        num_beams: of every request.
        catalogue: "beauty", or "random" for CI.
        data: the folder of the Beauty data.
        workload: "beauty", "instruction" or "returning".
        added_ms: slept in every batch.
        bare: users whose requests are answered by `generate` alone before the server starts, and timed.
        options: further arguments of `Engine`.
    """

    contender: str
    size: str = "full"
    num_beams: int = 20
    catalogue: str = "beauty"
    data: str = ""
    workload: str = "beauty"
    added_ms: float = 0.0
    bare: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shop:
    """A model, with and without our mixin over the same weights, its catalogue, and the tokens of every item."""

    plain: Any
    model: Any
    index: ConstraintIndex
    rows: np.ndarray
    place: Place

    @property
    def prefix(self) -> list[int]:
        """Tokens of the instruction before every history."""
        if self.place.workload != "instruction":
            return []
        return np.random.default_rng(7).integers(1, self.rows.max(), size=INSTRUCTION).tolist()

    def tokens(self, history: Sequence[int]) -> list[int]:
        """A prompt; items are numbered by their rows."""
        return [*self.prefix, *self.rows[list(history)].ravel().tolist()]


def catalogue_options(place: Place) -> argparse.Namespace:
    """As `generate.py` takes them: its models and catalogues are used here."""
    data = Path(place.data)
    sizes = SIZES[place.size]
    more = {"catalogue": place.catalogue, "data": data, "items": 600, "length": 4, "seed": 0}
    return argparse.Namespace(**sizes, **more, device="cpu", dtype="float32")


def make_shop(place: Place) -> Shop:
    torch.manual_seed(0)
    options = catalogue_options(place)
    rows = make_catalogue(options)
    if place.catalogue == "beauty":
        assert read_items(options.data)[0] == list(range(len(rows)))  # ids are rows
    plain = make_model(options)
    return Shop(
        plain, enable(copy.copy(plain)), ConstraintIndex.from_sequences(rows, item_ids=range(len(rows))), rows, place
    )


def make_histories(place: Place, num_items: int) -> list[list[int]]:
    """What is asked for, in the order of the requests; of returning users see `returning`."""
    draw = np.random.default_rng(1)
    if place.catalogue == "random":
        return [draw.integers(num_items, size=draw.integers(2, 12)).tolist() for _ in range(200)]
    users = [user["train"] for user in read_users(Path(place.data)) if user["train"]]
    return [users[row] for row in draw.permutation(len(users))]


def returning(histories: Sequence[list[int]], group: int) -> tuple[list[list[int]], list[list[int]]]:
    """First visits of a group of users with long histories of real items; later ones, each longer by an item."""
    items = [item for history in histories for item in history]
    length = RETURNING + VISITS
    first = group * PEOPLE * length
    people = [items[first + number * length : first + (number + 1) * length] for number in range(PEOPLE)]
    if len(people[-1]) < length:
        raise SystemExit(f"group {group} of returning users, expected fewer: the data has no more items")
    visits = [[person[: RETURNING + visit] for person in people] for visit in range(VISITS)]
    return visits[0], [history for visit in visits[1:] for history in visit]


def bare_answers(shop: Shop, histories: Sequence[list[int]], generate: dict[str, Any]) -> list[dict[str, Any]]:
    """Each user alone through `model.generate`, with one thread: the answer, and the median of some times."""
    torch.set_num_threads(1)
    options = {"num_results": NUM_RESULTS, "num_beams": shop.place.num_beams, "token_budget": 1 << 30}
    decoder = Recommender(shop.model, shop.index, options=generate, **options)
    answers = []
    for history in histories:
        request, times = Request(0, shop.tokens(history)), []
        for _ in range(1 + BARE_REPEATS):
            begun = time.perf_counter()
            (answer,) = decoder.answer([request])
            times.append(time.perf_counter() - begun)
        answers.append({"items": answer.items, "scores": answer.scores, "seconds": statistics.median(times[1:])})
    return answers


class Baseline:
    """A queue, first come first served, and a pool of threads. `most` requests a batch that arrive within `wait`."""

    def __init__(
        self,
        answer: Callable[[list[Request]], list[Any]],
        shop: Shop,
        *,
        lanes: int,
        most: int = 1,
        wait: float = 0.0,
    ) -> None:
        self.catalogue, self.observer, self.is_ready = LiveCatalogue(shop.index), Observer(), False
        self._answer, self._shop, self._most, self._wait = answer, shop, most, wait
        self._lanes, self._pool = lanes, ThreadPoolExecutor(lanes)
        self._queue: asyncio.Queue[list[tuple[Request, asyncio.Future[Any]]]] = asyncio.Queue()
        self._open: list[tuple[Request, asyncio.Future[Any]]] = []  # a batch that is not sealed yet
        self._workers: list[asyncio.Task[None]] = []

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    async def start(self) -> None:
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._lanes)]
        self.is_ready = True

    async def close(self, *, timeout: float | None = None) -> None:
        self.is_ready = False
        for worker in self._workers:
            worker.cancel()

    async def recommend(self, *, history: Sequence[Any], num_beams: int | None = None, **options: Any) -> Any:
        """What `Engine.recommend` does, for a history alone: other options are ignored."""
        begun = time.perf_counter()
        waiting = (Request(0, self._shop.tokens(history)), asyncio.get_running_loop().create_future())
        if self._most == 1:
            self._queue.put_nowait([waiting])
        else:
            self._open.append(waiting)
            if len(self._open) == 1:
                asyncio.get_running_loop().call_later(self._wait, self._seal, self._open)
            if len(self._open) == self._most:
                self._seal(self._open)
        answer = await waiting[1]
        seconds = {"total": time.perf_counter() - begun, "queued": 0.0, "computed": 0.0}
        return Recommendation(answer.items, answer.scores, self.catalogue.edition.version, seconds=seconds)

    def _seal(self, batch: list[tuple[Request, asyncio.Future[Any]]]) -> None:
        if batch is self._open:
            self._open = []
            self._queue.put_nowait(batch)

    async def _work(self) -> None:
        while True:
            batch = [one for one in await self._queue.get() if not one[1].done()]
            if not batch:
                continue
            requests = [request for request, _ in batch]
            begun = time.perf_counter()
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, requests)
            except Exception as error:  # the whole batch fails, as it does by hand
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            tokens = sum(len(request.tokens) for request in requests)
            self.observer.computed(Batch(len(batch), tokens, 0, time.perf_counter() - begun, 0.0))
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


@dataclass(frozen=True)
class Found:
    items: list[Any]
    scores: list[float]


def transformers_answer(shop: Shop) -> Callable[[list[Request]], list[Found]]:
    """Transformers' own beam search with `prefix_allowed_tokens_fn` over a dict, one request at a time."""
    after = dict_trie(shop.rows)
    items: dict[tuple[int, ...], list[int]] = {}
    for item, row in enumerate(shop.rows.tolist()):
        items.setdefault(tuple(row), []).append(item)
    length, num_beams = shop.rows.shape[1], shop.place.num_beams

    def answer(requests: list[Request]) -> list[Found]:
        (request,) = requests
        prompt = torch.tensor([request.tokens])
        output = shop.plain.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            prefix_allowed_tokens_fn=lambda _, tokens: after.get(tuple(tokens[prompt.shape[1] :].tolist()), [0]),
            max_new_tokens=length,
            num_beams=num_beams,
            num_return_sequences=NUM_RESULTS,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        best: dict[int, float] = {}
        found = output.sequences[:, prompt.shape[1] :].tolist()
        for row, score in zip(found, output.sequences_scores.tolist(), strict=True):
            for item in items[tuple(row)]:
                best.setdefault(item, score)
        kept = list(best)[:NUM_RESULTS]
        return [Found(kept, [best[item] for item in kept])]

    return answer


def by_hand(shop: Shop, **options: Any) -> Baseline:
    """Our `generate`, one call a batch, without our engine."""
    most = {"num_results": NUM_RESULTS, "num_beams": shop.place.num_beams, "token_budget": 1 << 30}
    return Baseline(Recommender(shop.model, shop.index, **most).answer, shop, **options)


def engine(shop: Shop, **options: Any) -> Any:
    """Ours."""
    from hf_gr import Engine

    options = {"num_beams": shop.place.num_beams, "num_results": NUM_RESULTS, "prefix_tokens": shop.prefix, **options}
    return Engine(shop.model, shop.index, **{**options, **shop.place.options})


class NoModel:
    """Answers at once: what HTTP costs without an engine."""

    def __init__(self, shop: Shop) -> None:
        self.catalogue, self.observer, self.is_ready, self.num_waiting = (
            LiveCatalogue(shop.index),
            Observer(),
            False,
            0,
        )
        self._items = list(range(NUM_RESULTS))
        self._scores = [-float(item) for item in self._items]

    async def start(self) -> None:
        self.is_ready = True

    async def close(self, *, timeout: float | None = None) -> None:
        self.is_ready = False

    async def recommend(self, **options: Any) -> Recommendation:
        return Recommendation(self._items, self._scores, self.catalogue.edition.version)


@dataclass(frozen=True)
class Contender:
    """Its name in tables, threads of a call, how it is made, and options of `generate` that change its answers."""

    name: str
    threads: int
    make: Callable[[Shop], Any]
    generate: dict[str, Any] = field(default_factory=dict)


HEAD = {"drafting": "head"}
CONTENDERS = {
    "transformers": Contender(
        "transformers, one at a time, 2 threads", 2, lambda shop: Baseline(transformers_answer(shop), shop, lanes=1)
    ),
    "one-2-threads": Contender("one at a time, 2 threads", 2, lambda shop: by_hand(shop, lanes=1)),
    "one-2-lanes": Contender("one at a time, 2 lanes", 1, lambda shop: by_hand(shop, lanes=2)),
    "sealed": Contender(
        "sealed batches, 2 threads", 2, lambda shop: by_hand(shop, lanes=1, most=SEALED_BATCH, wait=SEALED_WAIT)
    ),
    "engine-one": Contender("Engine, batches of 1", 1, lambda shop: engine(shop, max_batch=1, key_cache_bytes=0)),
    "engine": Contender("Engine, token capacity", 1, lambda shop: engine(shop, key_cache_bytes=0)),
    "engine-keys": Contender("Engine, kept keys", 1, lambda shop: engine(shop)),
    "engine-trie": Contender(
        "Engine, drafting trie", 1, lambda shop: engine(shop, key_cache_bytes=0, drafting="trie")
    ),
    # The head decides, and its time does not depend on what it has learnt; neither do its answers equal the model's.
    "engine-head": Contender(
        "Engine, draft head", 1, lambda shop: engine(shop, key_cache_bytes=0, **HEAD), generate=HEAD
    ),
    "ray-no-op": Contender("no model, Ray Serve with HAProxy", 1, NoModel),
    "no-op": Contender("no model", 1, NoModel),
    "engine-no-op": Contender("Engine, no model", 1, lambda shop: no_op_engine(shop)),
}


def no_op_engine(shop: Shop) -> Any:
    """Our engine over a `generate` that computes a prompt's shape once: what the engine and HTTP cost together."""
    generate, known = shop.model.generate, {}

    def remember(*arguments: Any, **options: Any) -> Any:
        key = tuple(options["input_ids"].shape), options["num_beams"]
        if key not in known:
            known[key] = generate(*arguments, **options)
        return known[key]

    shop.model.generate = remember
    return engine(shop, key_cache_bytes=0)


def add_delay(model: Any, seconds: float) -> None:
    """Every call of `generate` takes longer, without using the processor: as if a device were slower."""
    generate = model.generate

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return generate(*arguments, **options)

    model.generate = slow


def serve(place: Place, say: Callable[[dict[str, Any]], None]) -> None:
    """Answer over HTTP until SIGTERM; `say` gets the port and the bare answers."""
    shop = make_shop(place)
    contender = CONTENDERS[place.contender]
    histories = make_histories(place, len(shop.rows))
    if contender.generate == HEAD:
        shop.model.add_draft_head(shop.index)
    bare = bare_answers(shop, histories[: place.bare], contender.generate)
    torch.set_num_threads(contender.threads)
    if place.added_ms:
        add_delay(shop.model, place.added_ms / 1e3)
    made = contender.make(shop)
    listening = bind("127.0.0.1", 0)
    listening.listen(2048)
    say({"port": listening.getsockname()[1], "bare": bare, "threads": torch.get_num_threads()})
    failure = run(lambda on_failure: make_app(made, on_failure=on_failure), listening, drain_timeout=5.0)
    if failure is not None:
        raise failure


def free_ports(count: int) -> list[int]:
    """Of this machine, just now."""
    held = [bind("127.0.0.1", 0) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def serve_on_ray(place: Place, say: Callable[[dict[str, Any]], None]) -> None:
    """The same app without a model, in one replica of Ray Serve behind HAProxy, until SIGTERM."""
    here = str(Path(__file__).resolve().parent)
    paths = os.pathsep.join([here, str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"  # nobody is under way at the end
    port, metrics, stats = free_ports(3)
    os.environ |= {"RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics), "RAY_SERVE_HAPROXY_STATS_PORT": str(stats)}
    import ray
    from ray import serve as ray_serve

    @ray_serve.deployment(max_ongoing_requests=1024)
    @ray_serve.ingress()
    class NoOp:
        def __init__(self) -> None:
            self._app = make_app(NoModel(make_shop(place)))

        def __serve_build_asgi_app__(self) -> Any:
            return self._app

    ray.init(num_cpus=2, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
        ray_serve.run(NoOp.bind(), name="no-op", route_prefix="/")
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        say({"port": port, "bare": [], "threads": 1})
        ended.wait()
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def main() -> None:
    place = Place(**json.loads(sys.argv[1]))
    (serve_on_ray if place.contender.startswith("ray") else serve)(
        place, lambda said: print(json.dumps(said), flush=True)
    )
