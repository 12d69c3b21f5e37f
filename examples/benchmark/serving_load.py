# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""An open-loop client: it keeps to its schedule, whatever the server does. Knows no model; runs in its own process.

A request is due at a moment of a Poisson process, or at a fixed pace; its latency counts from then on, not from when
it was sent. So a server that falls behind cannot slow down its clients, and no wait is left out.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CUT, REFUSED = "cut", "refused by the system"  # statuses of requests without an HTTP status
LAGGING = 0.05  # seconds: a client that sends later than this was itself too slow to measure with
BINS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds: upper ends of a printed histogram


@dataclass(frozen=True)
class Job:
    """What a client does.

    Attributes:
        url: to which bodies are posted.
        bodies: of requests, in order; from the beginning again when they are used up.
        rate: requests a second; 0 for one after the other, each when the last one is answered.
        count: requests in all.
        seed: of the arrivals, and of nothing else: every contender gets the same.
        poisson: otherwise at a fixed pace.
        timeout: seconds until a request is cut.
        bound: seconds; with `give_up_after`, the latency that counts as late.
        give_up_after: stop when more requests than this are late: what is left cannot save the trial.
        keep: answers are kept.
        headers: of every request.
    """

    url: str
    bodies: list[dict[str, Any]]
    rate: float
    count: int
    seed: int = 0
    poisson: bool = True
    timeout: float = 60.0
    bound: float = 1.0
    give_up_after: int | None = None
    keep: bool = False
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """One request: when it was due, sent and done, in seconds since the start; its HTTP status, or what happened."""

    number: int
    due: float
    sent: float
    done: float
    status: int | str
    answer: Any = None

    @property
    def latency(self) -> float:
        """From due to done; infinite if it was not answered."""
        return self.done - self.due if self.status == 200 else math.inf


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least a share of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def arrivals(job: Job) -> list[float]:
    """When requests are due, in seconds since the start."""
    draw = random.Random(job.seed)
    due, times = 0.0, []
    for _ in range(job.count):
        due += draw.expovariate(job.rate) if job.poisson else 1 / job.rate
        times.append(due)
    return times


async def run_job(job: Job) -> list[Done]:
    """Post everything and wait for the last answer."""
    import aiohttp

    loop = asyncio.get_running_loop()
    found: list[Done] = []
    under_way: dict[int, float] = {}
    bodies = [json.dumps(body).encode() for body in job.bodies]
    headers = {"content-type": "application/json", **job.headers}
    timeout = aiohttp.ClientTimeout(total=job.timeout)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        begun = time.perf_counter()

        async def post(number: int, due: float) -> None:
            under_way[number] = due
            sent, answer = time.perf_counter() - begun, None
            try:
                async with session.post(job.url, data=bodies[number % len(bodies)], headers=headers) as response:
                    content = await response.read()
                    status: int | str = response.status
                    if job.keep or status != 200:
                        answer = json.loads(content)
            except asyncio.CancelledError:
                status = CUT
            except aiohttp.ClientConnectorError:
                status = REFUSED
            except Exception as error:  # a client reports whatever happens and goes on
                status = type(error).__name__
            del under_way[number]
            found.append(Done(number, due, sent, time.perf_counter() - begun, status, answer))

        def is_lost() -> bool:
            now = time.perf_counter() - begun
            late = sum(done.latency > job.bound for done in found)
            late += sum(now - due > job.bound for due in under_way.values())
            return job.give_up_after is not None and late > job.give_up_after

        tasks: list[asyncio.Task[None]] = []
        if job.rate:
            for number, due in enumerate(arrivals(job)):
                wait = begun + due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                if number % 8 == 0 and is_lost():
                    break
                tasks.append(loop.create_task(post(number, due)))
            while tasks and (await asyncio.wait(tasks, timeout=0.1))[1]:
                if is_lost():
                    for task in tasks:
                        task.cancel()
            await asyncio.gather(*tasks)
        else:
            for number in range(job.count):
                await post(number, time.perf_counter() - begun)
    return sorted(found, key=lambda done: done.number)


def start_client(job: Job, scratch: Path) -> subprocess.Popen[bytes]:
    """Run a job in a process of its own; `read_client` has what it found."""
    (scratch / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    here = str(Path(__file__).resolve().parent)
    program = f"import sys; sys.path.insert(0, {here!r}); import serving_load; serving_load.main()"
    return subprocess.Popen([sys.executable, "-c", program, str(scratch)])


def read_client(client: subprocess.Popen[bytes], scratch: Path) -> list[Done]:
    if client.wait():
        raise SystemExit(f"the client ended with {client.returncode}")
    with (scratch / "found.jsonl").open(encoding="utf-8") as lines:
        return [Done(**json.loads(line)) for line in lines]


def run_client(job: Job, scratch: Path) -> list[Done]:
    """Every request of a job that was sent, in order."""
    return read_client(start_client(job, scratch), scratch)


def main() -> None:
    scratch = Path(sys.argv[1])
    job = Job(**json.loads((scratch / "job.json").read_text(encoding="utf-8")))
    found = asyncio.run(run_job(job))
    with (scratch / "found.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(done)) + "\n" for done in found)


def summarise(found: Sequence[Done], *, planned: int, gave_up: bool = False) -> dict[str, Any]:
    """Figures of one trial. A request without an answer has an infinite latency, and so have those never sent."""
    latencies = [done.latency for done in found] + [math.inf] * (planned - len(found))
    served = [latency for latency in latencies if latency < math.inf]
    last = max((done.done for done in found), default=0.0)
    return {
        "planned": planned,
        "sent": len(found),
        "answered": len(served),
        "statuses": dict(Counter(str(done.status) for done in found)),
        "first_failure": next((done.answer for done in found if done.status != 200), None),
        "p50": percentile(latencies, 0.5),
        "p90": percentile(latencies, 0.9),
        "p99": percentile(latencies, 0.99),
        "served_p50": percentile(served, 0.5),
        "served_p99": percentile(served, 0.99),
        "answered_per_second": len(served) / last if last else 0.0,
        "client_lag_p99": percentile([done.sent - done.due for done in found], 0.99),
        "histogram": histogram(served),
        "latencies": [round(latency, 5) for latency in served],
    }


def histogram(latencies: Sequence[float]) -> dict[str, int]:
    """How many latencies are in each of `BINS`, and how many above."""
    counts = Counter(next((str(end) for end in BINS if latency <= end), "more") for latency in latencies)
    return {name: counts[name] for name in (*map(str, BINS), "more")}
