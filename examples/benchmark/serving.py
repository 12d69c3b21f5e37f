# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A load test of `hf-gr serve`: how many requests a second it answers in time, and what it does when there are more.

An open loop: requests arrive by a Poisson process, whatever the server does, over HTTP on this machine, from a process
of their own. They are real histories of Amazon Beauty. All contenders have the same app, model, arrivals and users. A
contender's answers are compared with those of a bare `generate` before a time is printed.

    python examples/benchmark/serving.py                       # highest rates with P99 within bounds, and a plot
    python examples/benchmark/serving.py --contenders one-2-threads engine --num-beams 50
    python examples/benchmark/serving.py --workload returning --contenders engine engine-keys
    python examples/benchmark/serving.py --test overload       # 3 times the highest rate, for a minute
    python examples/benchmark/serving.py --test updates        # rules, updates and a swap under load
    python examples/benchmark/serving.py --test delay          # 150 ms more in every batch
    python examples/benchmark/serving.py --test http           # what the engine and HTTP cost
    python examples/benchmark/serving.py --from raw.jsonl --plot rates.png  # the tables of an earlier run
    python examples/benchmark/serving.py --fast                # a tiny model, seconds, no claim

Raw results go to --output, a line a trial, with every latency. `serving_contenders.py` says who is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import serving_updates
import torch
from beauty_data import DEFAULT_DATA, is_there
from generate import make_catalogue
from report import environment, print_json_line
from serving_contenders import CONTENDERS, Place, catalogue_options, make_histories, returning
from serving_load import LAGGING, Job, percentile, read_client, run_client, start_client, summarise
from serving_report import plot, print_results

BOUNDS = (1.0, 0.5)  # seconds, for P99
SCORE_TOL = 1e-4  # fp32: sums of 4 log-probabilities, in batches of different sizes and paddings
MOST_TRIALS = 24  # of one search
BY_HAND = ("transformers", "one-2-threads", "one-2-lanes", "sealed")
RATES = (*BY_HAND, "engine-one", "engine", "engine-keys", "engine-trie", "engine-head")
FAST_RATES = ("one-2-lanes", "engine-keys")
LIGHT = 0.1  # of the highest rate


@dataclass(frozen=True)
class Server:
    """A contender that serves, in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    bare: list[dict[str, Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/recommend"

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and content; JSON where it is some."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        try:
            return response.status, json.loads(content)
        except json.JSONDecodeError:
            return response.status, content

    def recommend(self, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = self.ask("POST", "/v1/recommend", body)
        if status != 200:
            raise SystemExit(f"{body} got {status}: {answer}")
        return answer

    def metrics(self) -> dict[str, float]:
        """Counters and sums of `/metrics`, buckets left out."""
        _, text = self.ask("GET", "/metrics")
        pairs = [line.rpartition(" ") for line in str(text).splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs if name.startswith("hf_gr") and "_bucket" not in name}

    def cpu_seconds(self) -> float:
        """Of the server and its children."""
        family = [psutil.Process(self.process.pid)]
        family += family[0].children(recursive=True)
        times = [one.cpu_times() for one in family]
        return sum(time.user + time.system for time in times)

    def memory(self) -> int:
        """Resident bytes."""
        return psutil.Process(self.process.pid).memory_info().rss


@contextmanager
def running(place: Place) -> Iterator[Server]:
    """Start a contender, wait until it is ready, and stop it as a supervisor would: by SIGTERM."""
    here = str(Path(__file__).resolve().parent)
    program = f"import sys; sys.path.insert(0, {here!r}); import serving_contenders; serving_contenders.main()"
    command = [sys.executable, "-c", program, json.dumps(asdict(place))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), None)  # Ray says other things, too
        if line is None:
            raise SystemExit(f"{place.contender} ended with {process.wait()} before it served")
        said = json.loads(line)
        server = Server(process, said["port"], said["bare"])
        until = time.monotonic() + 120
        while not _is_ready(server):
            if process.poll() is not None:
                raise SystemExit(f"{place.contender} ended with {process.returncode} before it was ready")
            if time.monotonic() > until:
                raise SystemExit(f"{place.contender} is not ready after 120 s")
            time.sleep(0.05)
        yield server
        process.terminate()
        process.wait(timeout=90)
    finally:
        process.kill()
        process.wait()


def _is_ready(server: Server) -> bool:
    try:
        return server.ask("GET", "/readyz")[0] == 200
    except OSError:
        return False


def place_of(given: argparse.Namespace, contender: str, **changes: Any) -> Place:
    where = {"size": given.size, "catalogue": given.catalogue, "data": str(given.data)}
    how = {"num_beams": given.num_beams, "workload": given.workload, "options": given.engine}
    return Place(contender, **{**where, **how, **changes})


def check_answers(server: Server, place: Place, histories: Sequence[list[int]]) -> list[float]:
    """Compare with bare answers, and end the program if one differs; seconds of every request, alone.

    Items whose scores differ by no more than rounding may swap places, and be cut off at the end of a list.
    """
    seconds = []
    for history, bare in zip(histories, server.bare, strict=False):
        begun = time.perf_counter()
        answer = server.recommend({"history": history, "num_results": len(bare["items"])})
        seconds.append(time.perf_counter() - begun)
        problem = difference(answer, bare)
        if problem is not None:
            raise SystemExit(f"MISMATCH: {place.contender} for the history {history}: {problem}")
    return seconds


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """How an answer differs from another one beyond rounding, or None."""
    if len(found["items"]) != len(expected["items"]):
        return f"{len(found['items'])} items, expected {len(expected['items'])}"
    gaps = [abs(one - other) for one, other in zip(found["scores"], expected["scores"], strict=True)]
    if not all(gap <= SCORE_TOL for gap in gaps):
        return f"scores differ by {max(gaps):.1e}, expected at most {SCORE_TOL:.0e}"
    first, second = (dict(zip(one["items"], one["scores"], strict=True)) for one in (found, expected))
    if len(first) < len(found["items"]):
        return "an item twice"
    last = min(second.values(), default=0.0)
    for item in first.keys() ^ second.keys():
        if abs(first.get(item, last) - second.get(item, last)) > SCORE_TOL:
            return f"item {item} is in one of them only"
    return None


class Trials:
    """Trials of one server at different rates, each once."""

    def __init__(self, server: Server, place: Place, histories: Sequence[list[int]], options: Any, sink: Any) -> None:
        self.server, self.place, self.histories, self.options, self.sink = server, place, histories, options, sink
        self.done: dict[float, dict[str, Any]] = {}
        self.group = 0

    def at(self, rate: float, bound: float) -> dict[str, Any]:
        """A trial at a rate, given up when P99 cannot stay within a bound any more."""
        known = self.done.get(rate)
        if known is not None and (not known["gave_up"] or known["bound"] >= bound):
            return known
        bodies = self.bodies()
        count = max(self.options.least, round(rate * self.options.seconds))
        most_late = count - math.ceil(0.99 * count)
        job = Job(self.server.url, bodies, rate, count, seed=self.options.seed, bound=bound, give_up_after=most_late)
        before, used = self.server.metrics(), self.server.cpu_seconds()
        with tempfile.TemporaryDirectory() as scratch:
            found = run_client(job, Path(scratch))
        self.server.recommend(bodies[0])  # what is still computed would slow down the next trial
        after = self.server.metrics()
        trial = summarise(found, planned=count)
        trial |= {"rate": rate, "bound": bound, "gave_up": trial["answered"] < count}
        trial |= {"cpu_seconds": self.server.cpu_seconds() - used}
        trial |= {"metrics": {name: value - before.get(name, 0.0) for name, value in after.items()}}
        self.done[rate] = trial
        self.sink({"test": "rates", **described(self.place), **trial})
        log(
            f"{self.place.contender}: {rate:.2f}/s, P50 {trial['p50'] * 1e3:.0f} ms, P99 {trial['p99'] * 1e3:.0f} ms, "
            f"{trial['answered']} of {count} answered"
        )
        if trial["client_lag_p99"] > LAGGING:
            log(f"the client was late by {trial['client_lag_p99'] * 1e3:.0f} ms itself: this machine is too busy")
        return trial

    def bodies(self) -> list[dict[str, Any]]:
        """Of returning users other ones in every trial, who have been here once."""
        if self.place.workload != "returning":
            return [{"history": history} for history in self.histories]
        first, later = returning(self.histories, self.group)
        self.group += 1
        for history in first:
            self.server.recommend({"history": history})
        return [{"history": history} for history in later]

    def highest(self, start: float, bound: float) -> float:
        """The highest rate of a grid with P99 within a bound; the trials below and above it have been made."""
        step = self.options.step
        level = round(math.log(start, step))
        passed = self.at(step**level, bound)["p99"] <= bound
        for _ in range(MOST_TRIALS):
            level += 1 if passed else -1
            if (self.at(step**level, bound)["p99"] <= bound) != passed:
                break
        else:
            log(f"{self.place.contender}: no end of the search within {MOST_TRIALS} trials")
            return math.nan
        return step ** (level - 1 if passed else level)


def described(place: Place) -> dict[str, Any]:
    keys = ("contender", "num_beams", "workload", "size", "catalogue", "options")
    return {key: asdict(place)[key] for key in keys}


def run_rates(options: argparse.Namespace, sink: Callable[[dict[str, Any]], None]) -> None:
    """Search every contender's highest rates, then measure it at a tenth of that."""
    for contender in options.contenders:
        place = place_of(options, contender, bare=options.bare)
        histories = make_histories(place, options.num_items)
        with running(place) as server:
            alone = check_answers(server, place, histories)
            alone = check_answers(server, place, histories)  # now without first calls
            trials = Trials(server, place, histories, options, sink)
            bare = [answer["seconds"] for answer in server.bare]
            found: dict[str, Any] = {"bare_p50": statistics.median(bare), "alone_p50": statistics.median(alone)}
            if options.rates:
                for rate in options.rates:
                    trials.at(rate, 60.0)
            else:
                start = 0.7 / statistics.mean(alone)
                for bound in sorted(options.bounds, reverse=True):
                    start = trials.highest(start, bound)
                    found[f"highest_{bound:g}"] = start
                    if math.isnan(start):
                        break
            light = LIGHT * (options.rates[0] if options.rates else found[f"highest_{max(options.bounds):g}"])
            if place.workload != "returning" and light > 0:
                job = Job(server.url, [{"history": h} for h in histories[: options.bare]], light, options.bare)
                with tempfile.TemporaryDirectory() as scratch:
                    found |= {"light": light, "light_p50": summarise(run_client(job, Path(scratch)), planned=1)["p50"]}
            found |= {"memory": server.memory()}
        sink({"test": "highest", **described(place), **found})


def run_overload(options: argparse.Namespace, sink: Callable[[dict[str, Any]], None]) -> None:
    """Much more than can be answered: who is served is served in time, the rest hears so at once; then it recovers."""
    for contender in options.contenders:
        place = place_of(options, contender)
        bodies = [
            {"history": h, "timeout_ms": round(1000 * options.deadline)}
            for h in make_histories(place, options.num_items)
        ]
        with running(place) as server, tempfile.TemporaryDirectory() as scratch:
            for body in bodies[:5]:
                server.recommend({"history": body["history"]})
            rate = options.overload * options.capacity
            client = start_client(Job(server.url, bodies, rate, round(rate * options.minute)), Path(scratch))
            memory = []
            while client.poll() is None:
                memory.append(server.memory())
                time.sleep(0.5)
            found = read_client(client, Path(scratch))
            light = LIGHT * options.capacity
            job = Job(server.url, bodies, max(light, 2.0), max(20, round(10 * light)), poisson=False, keep=False)
            after = run_client(job, Path(scratch))
            metrics = server.metrics()
        refused = [done.done - done.sent for done in found if done.status == 503]
        quarter = memory[len(memory) // 4 : len(memory) // 2]
        result = summarise(found, planned=len(found))
        result |= {
            "rate": rate,
            "refused": len(refused),
            "refused_p50": percentile(refused, 0.5),
            "refused_p99": percentile(refused, 0.99),
            "memory_before": statistics.mean(quarter or memory),
            "memory_after": statistics.mean(memory[-len(quarter or memory) :]),
            "after_failed": sum(done.status != 200 for done in after if done.due > 1.0),
            "after_p50": percentile([done.latency for done in after if done.due > 1.0], 0.5),
            "deadline": options.deadline,
            "metrics": metrics,
        }
        sink({"test": "overload", **described(place), **result})


def run_delay(options: argparse.Namespace, sink: Callable[[dict[str, Any]], None]) -> None:
    """Batches that take long for another reason than the processor: none of 240 requests at 30/s may be refused."""
    for contender in options.contenders:
        place = place_of(options, contender, added_ms=options.added_ms)
        bodies = [{"history": history} for history in make_histories(place, options.num_items)]
        with running(place) as server, tempfile.TemporaryDirectory() as scratch:
            before = server.metrics()
            found = run_client(Job(server.url, bodies, 30.0, options.delay_count, poisson=False), Path(scratch))
            after = server.metrics()
        result = summarise(found, planned=options.delay_count)
        result |= {"metrics": {name: value - before.get(name, 0.0) for name, value in after.items()}}
        sink({"test": "delay", **described(place), "added_ms": options.added_ms, **result})


def run_http(options: argparse.Namespace, sink: Callable[[dict[str, Any]], None]) -> None:
    """One request after the other, without a model: milliseconds that engine and HTTP add to a request."""
    contenders = ["no-op", "engine-no-op"]
    if options.ray:
        contenders.append("ray-no-op")
    for contender in contenders:
        place = place_of(options, contender)
        with running(place) as server, tempfile.TemporaryDirectory() as scratch:
            bodies = [{"history": [0, 1, 2]}]
            run_client(Job(server.url, bodies, 0.0, 50), Path(scratch))
            used = server.cpu_seconds()
            found = run_client(Job(server.url, bodies, 0.0, options.http_count), Path(scratch))
            cpu = (server.cpu_seconds() - used) / options.http_count
        sink(
            {
                "test": "http",
                **described(place),
                **summarise(found, planned=options.http_count),
                "cpu_seconds_each": cpu,
            }
        )


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def run_updates(options: argparse.Namespace, sink: Callable[[dict[str, Any]], None]) -> None:
    for contender in options.contenders:
        place = place_of(options, contender, options={"unknown_items": "drop", **options.engine})
        rows = catalogue_rows(options)
        with running(place) as server:
            result = serving_updates.run(server, rows, make_histories(place, options.num_items), options)
        sink({"test": "updates", **described(place), **result})
        if result["wrong"]:
            raise SystemExit(f"{result['wrong']} wrong answers, the first: {result['first_wrong']}")


TESTS = {
    "rates": run_rates,
    "overload": run_overload,
    "updates": run_updates,
    "delay": run_delay,
    "http": run_http,
}


def catalogue_rows(options: argparse.Namespace) -> Any:
    return make_catalogue(catalogue_options(place_of(options, "engine")))


def finite(value: Any) -> Any:
    """What JSON can say: None for an infinite time."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", choices=TESTS, nargs="+", default=["rates"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help=f"for rates: {' '.join(RATES)}")
    parser.add_argument("--workload", choices=("beauty", "instruction", "returning"), default="beauty")
    parser.add_argument("--num-beams", type=int, default=20)
    parser.add_argument("--bounds", type=float, nargs="+", default=list(BOUNDS), help="of P99, in seconds")
    parser.add_argument("--rates", type=float, nargs="+", help="these rates, without a search")
    parser.add_argument("--step", type=float, default=1.25, help="from one rate to the next of a search")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a trial")
    parser.add_argument("--least", type=int, default=100, help="requests of a trial")
    parser.add_argument("--bare", type=int, default=40, help="users whose answers are compared and timed alone")
    parser.add_argument("--capacity", type=float, default=20.0, help="for overload: the highest rate")
    parser.add_argument("--overload", type=float, default=3.0, help="times the capacity")
    parser.add_argument("--minute", type=float, default=60.0, help="seconds of overload")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds, of requests in overload")
    parser.add_argument("--added-ms", type=float, default=150.0, help="for delay")
    parser.add_argument("--delay-count", type=int, default=240, help="requests of delay")
    parser.add_argument("--http-count", type=int, default=2000, help="requests of http")
    parser.add_argument("--ray", action="store_true", help="http: on Ray Serve, too")
    parser.add_argument("--calls", type=int, default=10_000, help="of updates")
    parser.add_argument("--updates", type=int, default=1_000, help="of updates, and a swap in the middle")
    parser.add_argument("--update-rate", type=float, default=60.0, help="calls a second of updates")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of Engine: '{\"lanes\": 1}'")
    parser.add_argument("--size", choices=("full", "small"), help="of the model: 25.7 M or 0.1 M parameters")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of the Beauty data")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--output", type=Path, help="raw results, JSON lines; appended")
    parser.add_argument("--plot", type=Path, help="PNG of P50 and P99 over the rate; needs matplotlib")
    parser.add_argument("--from", dest="earlier", type=Path, nargs="+", help="print raw results, measure nothing")
    parser.add_argument("--fast", action="store_true", help="a tiny model and random histories, seconds, no claim")
    options = parser.parse_args(arguments)
    tiny = set(options.test) <= {"updates", "delay", "http"}
    options.size = options.size or ("small" if tiny or options.fast else "full")
    options.catalogue = "random" if options.fast else "beauty"
    if options.contenders is None:
        options.contenders = (FAST_RATES if options.fast else RATES) if options.test == ["rates"] else ["engine-keys"]
    if options.fast:
        options.rates, options.seconds, options.least, options.bare = [20.0], 1.0, 20, 4
        options.http_count, options.delay_count, options.minute = 100, 30, 3.0
        options.calls, options.updates, options.update_rate = 100, 20, 50.0
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    lines: list[dict[str, Any]] = []
    if options.earlier:
        lines = [json.loads(line) for path in options.earlier for line in path.read_text().splitlines()]
    else:
        if options.catalogue == "beauty":
            is_there(options.data, fast=False)
        options.num_items = len(catalogue_rows(options))

        def sink(line: dict[str, Any]) -> None:
            line = {key: finite(value) for key, value in line.items()}
            lines.append(line)
            if options.output is not None:
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, **environment(torch.device("cpu"))}) + "\n")

        for test in options.test:
            TESTS[test](options, sink)
    print_results(lines)
    if options.plot is not None:
        plot(lines, options.plot)
    short = [{key: value for key, value in line.items() if key not in ("latencies", "metrics")} for line in lines]
    print_json_line("serving", torch.device("cpu"), {"results": short})


if __name__ == "__main__":
    main()
