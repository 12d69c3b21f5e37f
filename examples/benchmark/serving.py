# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A load test of `hf_gr.Engine`: how many requests a second it answers in time, and what it does when there are more.

An open loop: requests arrive by a Poisson process, whatever the engine does, and are real histories of Amazon Beauty,
the same for all contenders: the engine; with its cache of prompts' keys; with batches of one request; and
transformers' `generate(prefix_allowed_tokens_fn=...)` in a queue, one request at a time. These are called inside this
process, so that HTTP costs nothing. `server` is `hf-gr serve`, whose catalogue changes every five seconds, and
`server-attacked` the same beside one client that does its worst within a proxy's limits, `ATTACKS`. The engine's
answers are compared with those of a bare `generate` before a time is printed.

    python examples/benchmark/serving.py                        # three rates
    python examples/benchmark/serving.py --returning            # users who come again with a longer history
    python examples/benchmark/serving.py --rates 35 --timeout 1 --seconds 60    # three times what it can take
    python examples/benchmark/serving.py --contenders server server-attacked --rates 3 --seconds 300    # an attacker
    python examples/benchmark/serving.py --fast                 # a tiny model, seconds, no claim
"""

import argparse
import asyncio
import copy
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from beauty_data import DEFAULT_DATA, is_there, read_users
from generate import dict_trie, make_catalogue, make_model
from report import print_json_line, print_table
from transformers.utils import logging as transformers_logging

import hf_gr

try:  # one of them comes with huggingface_hub
    import httpx2 as httpx
except ImportError:
    import httpx  # pyright: ignore[reportMissingImports]

FULL = {"layers": 6, "hidden": 512, "vocab": 13312}  # 25.7 M parameters
FAST = {"layers": 2, "hidden": 64, "vocab": 1040}
NUM_RESULTS = 10
SCORE_TOL = 1e-4  # fp32: sums of 4 log-probabilities, in batches of different sizes and paddings
CHECKED = 20  # histories whose answers are compared
VISITS, FIRST = 16, 64  # of a returning user; items of the first history
ENGINES: dict[str, dict[str, Any]] = {
    "engine": {"key_cache_bytes": 0},
    "engine-keys": {},
    "engine-one": {"key_cache_bytes": 0, "max_batch": 1},
    "engine-threads": {"key_cache_bytes": 0, "workers": 1, "cores": 2},  # two threads, not two workers
}
NULLS = b"null, " * 170_000  # 1 MB
ATTACKS = {  # one after the other, 20 a second, the limit of examples/deploy/nginx.conf, and not waited for
    "history of 9,000 items": json.dumps({"history": [5] * 9_000, "timeout_ms": 1_000}).encode(),
    "512 beams in 1 ms": json.dumps({"history": [5], "num_beams": 512, "timeout_ms": 1}).encode(),
    "a megabyte of nulls": b'{"history": [%bnull]}' % NULLS,
    "a megabyte of lists": b"[" * 2**20,
    "256 requests at once": json.dumps([{"history": [5] * 900, "timeout_ms": 50}] * 256).encode(),
}
ATTACKS_A_SECOND, IDLE, SLOW = 20.0, 200, 30  # and connections that send nothing, or a byte a second
SERVERS = ["server", "server-attacked"]
Ask = Callable[[list[int]], Awaitable[Any]]


def make_shop(options: argparse.Namespace) -> tuple[Any, Any, np.ndarray]:
    """A model without our mixin, a catalogue whose items are numbered by their rows, and the rows."""
    sizes = FAST if options.fast else FULL
    how = {"catalogue": "random" if options.fast else "beauty", "data": options.data, "items": 600, "length": 4}
    given = argparse.Namespace(**sizes, **how, seed=0, device="cpu", dtype="float32")
    torch.manual_seed(0)
    rows = make_catalogue(given)
    return make_model(given), hf_gr.ConstraintIndex.from_sequences(rows, item_ids=range(len(rows))), rows


def make_histories(options: argparse.Namespace, num_items: int) -> list[list[int]]:
    """What is asked for, in the order of the requests."""
    draw = np.random.default_rng(1)
    if options.fast:
        return [draw.integers(num_items, size=draw.integers(2, 12)).tolist() for _ in range(200)]
    users = [user["train"] for user in read_users(options.data) if user["train"]]
    histories = [users[row] for row in draw.permutation(len(users))]
    if not options.returning:
        return histories
    items = [item for history in histories for item in history]
    length = FIRST + VISITS
    people = [items[start : start + length] for start in range(0, len(items) - length, length)]
    groups = [people[start : start + 24] for start in range(0, len(people), 24)]
    return [person[: FIRST + visit] for group in groups for visit in range(VISITS) for person in group]


def transformers_queue(plain: Any, rows: np.ndarray, num_beams: int) -> Ask:
    """Transformers' own beam search over a dict, one request at a time."""
    after, pool = dict_trie(rows), ThreadPoolExecutor(1)

    def answer(history: list[int]) -> None:
        prompt = torch.from_numpy(rows[history].reshape(1, -1))
        plain.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            prefix_allowed_tokens_fn=lambda _, tokens: after.get(tuple(tokens[prompt.shape[1] :].tolist()), [0]),
            max_new_tokens=rows.shape[1],
            num_beams=num_beams,
            num_return_sequences=NUM_RESULTS,
            do_sample=False,
        )

    return lambda history: asyncio.get_running_loop().run_in_executor(pool, answer, history)


async def check(
    ask: Ask, model: Any, index: Any, rows: np.ndarray, histories: Sequence[list[int]], beams: int
) -> None:
    """End the program where an answer's scores are not those of a bare call."""
    for history in histories[:CHECKED]:
        prompt = torch.from_numpy(rows[history].reshape(1, -1))
        how = {"num_beams": beams, "num_return_sequences": beams, "return_dict_in_generate": True}
        bare = model.generate(prompt, constraint_index=index, output_scores=True, **how)
        expected = bare.sequences_scores[: len((found := await ask(history)).scores)]
        gap = float((torch.tensor(found.scores[:3]) - expected[:3]).abs().max())  # further ones may share a sequence
        if gap > SCORE_TOL:
            raise SystemExit(f"MISMATCH for the history {history}: scores differ by {gap:.1e}")


async def trial(ask: Ask, histories: Sequence[list[int]], rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Post requests at a rate and wait for the last answer; one that failed is infinitely late."""
    draw, latencies, statuses = random.Random(0), [], Counter()
    begun = time.perf_counter()

    async def one(history: list[int], due: float) -> None:
        try:
            await ask(history)
            statuses["answered"] += 1
            latencies.append(time.perf_counter() - begun - due)
        except Exception as error:
            statuses[type(error).__name__] += 1
            latencies.append(math.inf)

    tasks, due = [], 0.0
    while due < options.seconds:
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(histories[len(tasks) % len(histories)], due)))
    await asyncio.gather(*tasks)
    ordered = sorted(latencies)
    shares = {name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in SHARES.items()}
    served = [latency for latency in latencies if latency < math.inf]
    lasted = time.perf_counter() - begun
    return {"rate": rate, "requests": len(tasks), "statuses": dict(statuses), **shares, "served": len(served) / lasted}


@asynccontextmanager
async def serve(model: Any, index: Any, options: argparse.Namespace) -> AsyncIterator[httpx.AsyncClient]:
    """`hf-gr serve` in a process of its own, once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        index.save_pretrained(folder)
        command = [sys.executable, "-m", "hf_gr.cli", "serve", folder, "--port=0", "--log-level=error"]
        command += [f"--num-beams={options.num_beams}", f"--timeout={options.timeout}"]
        environment = os.environ | {"HF_GR_ADMIN_KEY": "change"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split(" at ")[1].split(",")[0]
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as http:
                while True:
                    with suppress(httpx.TransportError):
                        if (await http.get("/readyz")).status_code == 200:
                            break
                    await asyncio.sleep(0.1)
                yield http
        finally:
            process.terminate()
            process.wait()


async def attack(http: httpx.AsyncClient, told: Counter[str]) -> None:
    """Do the worst that one client may, until this is cancelled."""
    address = urlsplit(str(http.base_url))

    async def keep_open(waits: float) -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                for byte in b"GET /healthz HTTP/1.1\r\nhost: here\r\ncontent-length: 500\r\n\r\n" + b"x" * 500:
                    await asyncio.sleep(waits)
                    writer.write(bytes([byte]))
                    await writer.drain()
            told["cut"] += 1

    async def send(name: str) -> None:
        answer = await http.post("/v1/recommend", content=ATTACKS[name])
        told[f"{name}: {answer.status_code}"] += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(IDLE + SLOW):
            tasks.create_task(keep_open(3600.0 if number < IDLE else 1.0))
        while True:
            for name in ATTACKS:
                await asyncio.sleep(1 / ATTACKS_A_SECOND)
                tasks.create_task(send(name))


async def change(http: httpx.AsyncClient) -> None:
    """Set a rule every five seconds, until this is cancelled."""
    while True:
        body = {"rules": {"few": [*range(100)]}}
        (await http.patch("/v1/catalogue", json=body, headers={"authorization": "Bearer change"})).raise_for_status()
        await asyncio.sleep(5.0)


async def memory(http: httpx.AsyncClient) -> int:
    """Megabytes that the server has."""
    (resident,) = re.findall(r"^process_resident_memory_bytes (\S+)", (await http.get("/metrics")).text, re.MULTILINE)
    return round(float(resident) / 2**20)


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


async def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All trials of a contender."""
    plain, index, rows = make_shop(options)
    histories = make_histories(options, len(rows))
    if name == "transformers":
        torch.set_num_threads(2)
        ask = transformers_queue(plain, rows, options.num_beams)
        return [{"contender": name, **await trial(ask, histories, rate, options)} for rate in options.rates]
    torch.set_num_threads(1)
    model = hf_gr.enable(copy.copy(plain))
    if name in SERVERS:
        async with serve(model, index, options) as http:

            async def ask_server(history: list[int]) -> Any:
                return SimpleNamespace(
                    **(await http.post("/v1/recommend", json={"history": history})).raise_for_status().json()
                )

            await check(ask_server, model, index, rows, histories, options.num_beams)
            found, told = [], Counter[str]()
            for rate in options.rates:
                beside = [asyncio.create_task(change(http))]
                if name == "server-attacked":
                    beside.append(asyncio.create_task(attack(http, told)))
                before = await memory(http)
                found.append({"contender": name, **await trial(ask_server, histories, rate, options)})
                found[-1] |= {"memory": [before, await memory(http)], "attacks": dict(told)}
                for task in beside:
                    assert not task.done(), task.exception()
                    task.cancel()
            return found
    how = {"num_beams": options.num_beams, "num_results": NUM_RESULTS, "timeout": options.timeout, **ENGINES[name]}
    engine = hf_gr.Engine(model, index, **how)
    await engine.start()
    try:
        await check(lambda history: engine.recommend(history=history), model, index, rows, histories, how["num_beams"])
        alone = []
        for history in histories[:CHECKED]:
            start = time.perf_counter()
            await engine.recommend(history=history)
            alone.append(time.perf_counter() - start)
        found = {"contender": name, "alone": statistics.median(alone)}
        ask = lambda history: engine.recommend(history=history)  # noqa: E731
        return [{**found, **await trial(ask, histories, rate, options)} for rate in options.rates]
    finally:
        await engine.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*ENGINES, *SERVERS, "transformers"]
    parser.add_argument("--contenders", nargs="+", choices=names, default=["engine", "engine-one"])
    parser.add_argument("--rates", type=float, nargs="+", default=[9.31, 11.64, 14.55], help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a trial")
    parser.add_argument("--timeout", type=float, default=60.0, help="of a request, in seconds")
    parser.add_argument("--num-beams", type=int, default=20)
    parser.add_argument("--returning", action="store_true", help="users who come again, with one more item each time")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of the Beauty data")
    parser.add_argument("--fast", action="store_true", help="a tiny model and random histories, seconds, no claim")
    options = parser.parse_args(arguments)
    if options.fast:
        options.rates, options.seconds, options.contenders = (
            [20.0],
            1.0,
            ["engine", "engine-keys", "transformers", *SERVERS],
        )
    else:
        is_there(options.data, fast=False)
    rows = [row for name in options.contenders for row in asyncio.run(measure(name, options))]
    print(
        f"{options.num_beams} beams, {options.seconds:g} s a trial; ms; a request without an answer is infinitely late"
    )
    cells = [
        [
            row["contender"],
            f"{row['rate']:g}",
            *(f"{1e3 * row[share]:.0f}" if share in row else "" for share in ("alone", *SHARES)),
            f"{row['served']:.1f}",
            ", ".join(f"{count} {status}" for status, count in row["statuses"].items()),
            " to ".join(map(str, row.get("memory", []))),
        ]
        for row in rows
    ]
    print_table(["contender", "rate", "alone", "P50", "P90", "P99", "served a second", "requests", "MB"], cells)
    for row in rows:
        for name, count in sorted(row.get("attacks", {}).items()):
            print(f"{row['contender']}: {name}, {count} times")
    print_json_line("serving", torch.device("cpu"), {"num_beams": options.num_beams, "results": rows})


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
