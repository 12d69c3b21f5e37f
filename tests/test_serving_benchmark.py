# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The load test: it keeps to its schedule, counts what is late, finds the highest rate, and sees a wrong answer."""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"


def import_benchmark(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module(name)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    return import_benchmark(monkeypatch, "serving_load")


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Any:
    return import_benchmark(monkeypatch, "serving_updates")


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    for package in ("aiohttp", "fastapi", "prometheus_client", "uvicorn"):
        pytest.importorskip(package)
    return import_benchmark(monkeypatch, "serving")


def done(load: Any, latency: float, status: int = 200, **more: Any) -> Any:
    return load.Done(more.pop("number", 0), 1.0, 1.0, 1.0 + latency, status, **more)


def test_percentiles_are_values_that_occurred(load: Any) -> None:
    values = list(range(1, 101))
    random.Random(0).shuffle(values)
    assert [load.percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert load.percentile([7.0], 0.99) == 7.0
    assert math.isnan(load.percentile([], 0.5))


def test_a_request_without_an_answer_is_infinitely_late(load: Any) -> None:
    found = [done(load, 0.1) for _ in range(98)] + [done(load, 0.001, 503), done(load, 0.3)]
    kept = load.summarise(found[1:], planned=99)
    assert (kept["p50"], kept["p99"]) == (pytest.approx(0.1), math.inf)  # one of 99 is too many
    assert kept["statuses"] == {"200": 98, "503": 1}
    assert kept["served_p99"] == pytest.approx(0.3)
    assert load.summarise(found, planned=100)["p99"] == pytest.approx(0.3)
    assert load.summarise(found, planned=102)["p99"] == math.inf  # those never sent are late, too
    assert load.histogram([0.009, 0.01, 0.3, 99.0])["0.01"] == 2
    assert sum(load.histogram([0.009, 0.01, 0.3, 99.0]).values()) == 4


def test_arrivals_are_the_same_for_everybody_and_as_many_as_asked_for(load: Any) -> None:
    job = load.Job("", [{}], rate=20.0, count=4000, seed=3)
    due = load.arrivals(job)
    assert due == load.arrivals(job)
    assert len(due) == 4000
    assert due[-1] == pytest.approx(200, rel=0.1)
    gaps = np.diff([0.0, *due])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of a Poisson process
    assert np.diff(load.arrivals(load.Job("", [{}], 20.0, 5, poisson=False))).tolist() == [pytest.approx(0.05)] * 4


class SlowServer:
    """Answers one request at a time, each after a fixed time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.seen = seconds, 0
        self._turn = asyncio.Lock()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"ength:" in line)
                await reader.readexactly(size)
                self.seen += 1
                async with self._turn:
                    await asyncio.sleep(self.seconds)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def against(load: Any, server: SlowServer, **job: Any) -> list[Any]:
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
    found = await load.run_job(load.Job(url, [{}], **job))
    listening.close()
    return found


def test_latencies_grow_when_the_server_falls_behind(load: Any) -> None:
    """A closed loop would wait for the server, and see 50 ms each."""
    pytest.importorskip("aiohttp")
    found = asyncio.run(against(load, SlowServer(0.05), rate=100.0, count=20, poisson=False))
    assert [one.number for one in found] == list(range(20))
    assert [one.due for one in found] == pytest.approx([(n + 1) / 100 for n in range(20)])
    assert found[-1].latency > 0.6  # 20 answers take 1 s, the last was due after 0.2 s
    alone = asyncio.run(against(load, SlowServer(0.05), rate=0.0, count=3))
    assert max(one.latency for one in alone) < found[-1].latency


def test_a_lost_trial_ends_early(load: Any) -> None:
    pytest.importorskip("aiohttp")
    server = SlowServer(0.1)
    found = asyncio.run(against(load, server, rate=100.0, count=300, poisson=False, bound=0.15, give_up_after=2))
    assert server.seen < 100
    assert load.summarise(found, planned=300)["p99"] == math.inf
    assert {one.status for one in found} <= {200, load.CUT}


class CannedTrials:
    """Trials that pass up to a capacity, and say at which rates they were made."""

    def __init__(self, serving: Any, capacity: float) -> None:
        class Canned(serving.Trials):
            def at(self, rate: float, bound: float) -> dict[str, Any]:
                self.asked.append(rate)
                return {"p99": 0.1 if rate <= capacity * bound else math.inf}

        place, options = serving.Place("engine"), SimpleNamespace(step=1.25)
        self.trials = Canned(None, place, [], options, None)
        self.trials.asked = []


@pytest.mark.parametrize("start", [0.3, 9.0, 200.0])
def test_the_highest_rate_is_within_a_step_of_the_capacity(serving: Any, start: float) -> None:
    trials = CannedTrials(serving, 10.0).trials
    for bound in (1.0, 0.5):
        highest = trials.highest(start, bound)
        assert highest <= 10.0 * bound < highest * 1.25
        assert highest in trials.asked
        assert any(rate > 10.0 * bound and rate / highest < 1.2501 for rate in trials.asked)


def test_answers_that_differ_beyond_rounding_are_told_apart(serving: Any) -> None:
    right = {"items": [4, 2, 9], "scores": [-1.0, -2.0, -3.0]}
    assert serving.difference(right, right) is None
    swapped = {"items": [4, 9, 2], "scores": [-1.0, -2.0, -2.00005]}
    assert serving.difference(swapped, {"items": [4, 2, 9], "scores": [-1.0, -2.0, -2.00002]}) is None
    for wrong in (
        {"items": [4, 2], "scores": [-1.0, -2.0]},
        {"items": [4, 2, 2], "scores": [-1.0, -2.0, -3.0]},
        {"items": [4, 7, 9], "scores": [-1.0, -2.0, -3.0]},
        {"items": [4, 2, 9], "scores": [-1.0, -2.1, -3.0]},
        {"items": [4, 2, 9], "scores": [-1.0, math.nan, -3.0]},
    ):
        assert serving.difference(wrong, right) is not None


def answered(load: Any, items: list[int], version: int, number: int = 0) -> Any:
    return done(load, 0.1, number=number, answer={"items": items, "catalogue_version": version})


def test_the_judge_sees_every_kind_of_illegal_answer(load: Any, updates: Any) -> None:
    everything = frozenset(range(30))
    ledger = updates.Ledger({0: updates.Edition(everything, {"few": frozenset({1, 2, 3})})}, 0)
    ledger.record(1, updates.Edition(everything - {5}, {"few": frozenset({2, 3})}))
    ten = list(range(10, 20))
    body = {"history": [1]}
    few = {**body, "rule": "few"}
    right = [
        (body, ten, 1),
        (body, [5, *ten[:9]], 0),
        (few, [1, 2, 3], 0),
        (few, [3, 2], 1),
        ({**few, "exclude": [2]}, [3], 1),
        ({**body, "allow": [5, 6]}, [6], 1),
    ]
    wrong = [
        (body, [5, *ten[:9]], 1),  # removed
        (body, ten[:9], 1),  # one is missing
        (body, [*ten[:9], ten[0]], 1),  # twice
        (body, ten, 2),  # of no version
        (few, [1, 2, 3], 1),  # no longer in the rule
        (few, [2], 1),  # one is missing
        ({**body, "exclude": [10]}, ten, 1),
        ({**body, "allow": [5, 6]}, [5, 6], 1),
    ]
    for request, items, version in right:
        assert updates.problem_of(answered(load, items, version), request, ledger) is None
    for request, items, version in wrong:
        assert updates.problem_of(answered(load, items, version), request, ledger) is not None
    assert "503" in updates.problem_of(done(load, 0.1, 503), body, ledger)
    with pytest.raises(SystemExit, match="expected one more"):
        ledger.record(3, updates.Edition(everything, {}))


def test_updates_say_what_they_do(updates: Any) -> None:
    """What is sent, applied to sets by hand, gives the edition that the judge keeps."""
    rows, draw = np.arange(800).reshape(400, 2), random.Random(0)
    rules = {f"rule {number}": frozenset(range(number, 400, 3)) for number in range(updates.NUM_RULES)}
    ledger = updates.Ledger({0: updates.Edition(frozenset(range(400)), rules)}, 0)
    kinds = set()
    for version in range(1, 200):
        before = ledger.now
        update, edition = updates.some_update(ledger, rows, draw)
        gone, new = set(update.get("remove", ())), {one["item_id"] for one in update.get("add", ())}
        assert gone <= before.items
        assert not new & before.items
        assert edition.items == before.items - gone | new
        assert not any(item % updates.STAYING == 0 for item in gone)
        expected = {name: members - gone for name, members in before.rules.items()}
        assert edition.rules == expected | {name: frozenset(ids) for name, ids in update.get("rules", {}).items()}
        kinds |= set(update)
        ledger.record(version, edition)
    assert kinds == {"remove", "add", "rules"}


def run(*arguments: str) -> list[str]:
    command = [sys.executable, str(BENCHMARKS / "serving.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.slow  # several servers, each of which imports torch
def test_a_fast_run_measures_and_its_raw_lines_give_the_same_tables(serving: Any, tmp_path: Path) -> None:
    raw, image = tmp_path / "raw.jsonl", tmp_path / "rates.png"
    measured = run("--fast", "--output", str(raw), "--plot", str(image))
    results = json.loads(measured[-1])["results"]
    assert [r["contender"] for r in results if r["test"] == "highest"] == list(serving.FAST_RATES)
    assert all(r["answered"] == 20 and r["p99"] > 0 for r in results if r["test"] == "rates")
    assert image.stat().st_size > 10_000
    assert run("--from", str(raw))[:-1] == measured[:-1]


@pytest.mark.slow  # as above
def test_fast_runs_of_the_other_tests(serving: Any) -> None:
    tests = ["overload", "updates", "delay", "http"]
    results = json.loads(run("--fast", "--test", *tests)[-1])["results"]
    found = {result["test"]: result for result in results}
    assert set(found) == set(tests)
    assert found["updates"]["wrong"] == 0
    assert found["updates"]["versions"] > 5
    assert found["delay"]["answered"] == found["delay"]["planned"]
    assert found["delay"]["p50"] > 0.15  # it is the delay that is measured
    assert set(found["overload"]["statuses"]) <= {"200", "503", "504"}
