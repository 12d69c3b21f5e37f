# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What all fuzzers share: a budget of seconds, a seed, numbered cases, totals. Knows nothing of hf_gr.

    pytest tests/fuzz -m slow --fuzz-seconds 120                    # all of them, with a fresh seed, which is printed
    pytest tests/fuzz -m slow --fuzz-seed 7 --fuzz-case 31 -k TEST  # one case again

A case draws everything from its own generator, made from the seed, the test's name and the case's number: any case can
be repeated alone. An experiment of a given size is `--fuzz-cases N`.
"""

import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch


@dataclass(frozen=True)
class Case:
    """One case: its number and its own source of randomness."""

    number: int
    rng: np.random.Generator


@dataclass
class Fuzz:
    """The cases of one test, until its time is over; iterate over it."""

    name: str
    seed: int
    seconds: float
    num_cases: int | None
    only: int | None
    totals: Counter[str] = field(default_factory=Counter)
    case: Case | None = None

    def __iter__(self) -> Iterator[Case]:
        end = time.monotonic() + self.seconds
        number = self.only or 0
        while True:
            rng = np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), number])
            self.case = Case(number, rng)
            torch.manual_seed(int(rng.integers(2**63)))  # what a model samples, too
            yield self.case
            self.count(cases=1)
            number += 1
            if self.only is not None or (self.num_cases is not None and number >= self.num_cases):
                return
            if self.num_cases is None and time.monotonic() >= end:
                return

    def count(self, **more: int) -> None:
        """Add to the totals that are printed at the end of the run."""
        self.totals.update(more)


SEED = pytest.StashKey[int]()
MADE = pytest.StashKey[Fuzz]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz")
    group.addoption(
        "--fuzz-seconds", type=float, default=60.0, help="seconds for all fuzzers together, and one case each at least"
    )
    group.addoption("--fuzz-cases", type=int, default=None, help="cases of every fuzzer, whatever time they take")
    group.addoption("--fuzz-seed", type=int, default=None, help="seed of all cases; by default a fresh one")
    group.addoption("--fuzz-case", type=int, default=None, help="run only the case of this number")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist get the seed of the process that started them.
    given = config.getoption("--fuzz-seed", None)
    started = getattr(config, "workerinput", {}).get("fuzz_seed")
    config.stash[SEED] = next((seed for seed in (started, given) if seed is not None), int.from_bytes(os.urandom(4)))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fuzz_seed"] = node.config.stash[SEED]


def pytest_report_header(config: pytest.Config) -> str:
    return f"fuzz: --fuzz-seed {config.stash[SEED]}"


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    config = request.config
    fuzzers = [item for item in request.session.items if "fuzz" in getattr(item, "fixturenames", ())]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    made = Fuzz(
        name=request.node.name,
        seed=config.stash[SEED],
        seconds=config.getoption("--fuzz-seconds", 60.0) * workers / len(fuzzers),
        num_cases=config.getoption("--fuzz-cases", None),
        only=config.getoption("--fuzz-case", None),
    )
    request.node.stash[MADE] = made
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Totals go with the report; a failing case says how to repeat it."""
    made = item.stash.get(MADE, None)
    if made is not None and call.when == "call":
        item.user_properties.append(("fuzz", dict(made.totals)))
    report: Any = yield
    if report.failed and made is not None and made.case is not None:
        again = f"pytest {item.nodeid!r} -m slow --fuzz-seed {made.seed} --fuzz-case {made.case.number}"
        report.sections.append(("this case again", again))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    found = [(report.nodeid, dict(report.user_properties).get("fuzz")) for report in reports]
    totals = [(name, counted) for name, counted in found if counted]
    if not totals:
        return
    terminalreporter.section(f"fuzzed with --fuzz-seed {config.stash[SEED]}")
    for name, counted in totals:
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{number:,} {what}" for what, number in counted.items()))
