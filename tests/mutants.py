#!/usr/bin/env python
# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Planted errors: the suite must be red for each of mutants.txt. Run every night, and before and after tests are cut.

    python tests/mutants.py                 # all of them, two at a time
    python tests/mutants.py losses serving  # those with one of the words in their area, name or tests
    python tests/mutants.py --check         # only whether each still finds its place

An error is a text that stands once in the package, and is replaced by another one in a copy. One that is not there, or
stands twice, fails by its name: point it at what the code says now. So does one whose tests cannot be collected.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.txt")
TIMEOUT = 300  # seconds for the tests of one


@dataclass(frozen=True)
class Mutant:
    """An error, and the files of tests that must be red for it, perhaps with `-k`."""

    area: str
    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    folder: str = ""  # of the package

    @property
    def label(self) -> str:
        """What it is called in reports."""
        return f"{self.area}: {self.name}"

    def place(self, package: Path) -> Path:
        """The file that has the text, once."""
        texts = {path: path.read_text(encoding="utf-8") for path in sorted((package / self.folder).rglob("*.py"))}
        found = [path for path, text in texts.items() for _ in range(text.count(self.old))]
        if len(found) != 1:
            there = ", ".join(str(path.relative_to(package)) for path in found) or "no file"
            raise LookupError(
                f"{self.label}: the text is in {there}, expected once in hf_gr/{self.folder}: {self.old}"
            )
        return found[0]

    @contextmanager
    def planted(self, package: Path) -> Iterator[None]:
        """The package with the error, compiled anew: a change of one second is none to Python's cache."""
        path = self.place(package)
        text = path.read_text(encoding="utf-8")
        cached = Path(cache_from_source(str(path)))
        try:
            path.write_text(text.replace(self.old, self.new), encoding="utf-8")
            cached.unlink(missing_ok=True)
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            cached.unlink(missing_ok=True)


def read() -> list[Mutant]:
    """Those of mutants.txt."""
    _, *parts = LIST.read_text(encoding="utf-8").split("\n== ")
    found = []
    for part in parts:
        area, *lines = part.strip().splitlines()
        for head, old, new in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
            assert old.startswith("- "), f"{area}: {head}, {old}, {new}"
            assert new.startswith("+ "), f"{area}: {head}, {old}, {new}"
            name, tests, *folder = (field.strip() for field in head.split(" | "))
            found.append(Mutant(area, name, old[2:], new[2:], tuple(tests.split()), *folder))
    return found


def run(mutant: Mutant, checkout: Path) -> str:
    """What is wrong: nothing, if the tests are red."""
    try:
        with mutant.planted(checkout / "hf_gr"):
            files = [f"tests/{one}" if one.endswith(".py") else one for one in mutant.tests]
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *files]
            how = {"cwd": checkout, "env": {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}}
            done = subprocess.run(command, **how, capture_output=True, text=True, timeout=TIMEOUT)
    except (LookupError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == pytest.ExitCode.TESTS_FAILED:
        return ""
    why = "is not caught" if done.returncode == 0 else f"cannot be tried (pytest ends with {done.returncode})"
    return f"{mutant.label}: {why} by {' '.join(mutant.tests)}\n{done.stdout[-1500:] if done.returncode else ''}"


@contextmanager
def checkouts(number: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of what git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in range(number):
            for name in filter(None, listed.stdout.split("\0")):
                if (ROOT / name).is_file():
                    (path := Path(folder, str(copy), name)).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, path)
            free.put(Path(folder, str(copy)))
        yield free


def failures(mutants: Sequence[Mutant], *, at_once: int = 2) -> list[str]:
    """What is not caught, and why."""
    with checkouts(at_once) as free, ThreadPoolExecutor(at_once) as pool:

        def tried(mutant: Mutant) -> str:
            checkout, start = free.get(), time.perf_counter()
            try:
                problem = run(mutant, checkout)
            finally:
                free.put(checkout)
            print(
                f"{'FAILED' if problem else 'caught'} {time.perf_counter() - start:5.0f} s  {mutant.label}", flush=True
            )
            return problem

        return [problem for problem in pool.map(tried, mutants) if problem]


def missing(mutants: Sequence[Mutant]) -> list[str]:
    """Those whose place or tests are gone."""
    found = []
    for mutant in mutants:
        try:
            mutant.place(ROOT / "hf_gr")
        except LookupError as error:
            found.append(str(error))
        files = [name for name in mutant.tests if name.endswith(".py")]
        found += [f"{mutant.label}: no {name}" for name in files if not (ROOT / "tests" / name).exists()]
    return found


def main() -> None:
    """Run those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of areas, names or files of tests; none for all errors")
    parser.add_argument("--check", action="store_true", help="only look for the places")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default: 2)")
    given = parser.parse_args()
    texts = {mutant: f"{mutant.label} {' '.join(mutant.tests)}".lower() for mutant in read()}
    words = [word.lower() for word in given.words] or [""]
    chosen = [mutant for mutant, text in texts.items() if any(word in text for word in words)]
    found = missing(chosen) if given.check else failures(chosen, at_once=given.jobs)
    what = "found" if given.check else "caught"
    print(*found, f"{len(chosen) - len(found)} of {len(chosen)} errors {what}", sep="\n")
    sys.exit(bool(found) or not chosen)


if __name__ == "__main__":
    main()
