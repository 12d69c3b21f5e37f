# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""RESULTS.md: its commands print it, and the README quotes no figure that it does not have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "examples" / "benchmark"
RESULT = {
    "benchmark": "one",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "commit": "0123456789ab",
    "hardware": {"device": "cpu", "cpu": "AMD EPYC", "cpus": 2, "threads": 1, "load": [1.0, 1.5, 2.0]},
}
BEFORE = """# Results

## First

Prose with `$ no command`.

```
$ {one}
old
$ echo second
older
```

Prose after it.

## Second

```
$ echo third
```
"""


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("record")


@pytest.fixture
def results(record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small RESULTS.md whose first command prints a table and a line of JSON."""
    script = tmp_path / "one.py"
    script.write_text(f"print('a  b')\nprint({json.dumps(RESULT)!r})\n", encoding="utf-8")
    file = tmp_path / "RESULTS.md"
    file.write_text(BEFORE.format(one=f"{sys.executable} {script}"), encoding="utf-8")
    monkeypatch.setattr(record, "RESULTS", file)
    monkeypatch.setattr(record, "LINES", tmp_path / "results.jsonl")
    return file


def test_record_replaces_the_output_of_a_section_and_nothing_else(record: Any, results: Path) -> None:
    before = results.read_text(encoding="utf-8")
    record.main(["First"])
    origin = "commit 0123456789ab, python 3.11.7, torch 2.13.0, AMD EPYC, 1 of 2 CPUs, load 1.0 1.5 2.0"
    assert results.read_text(encoding="utf-8") == before.replace("old\n", f"a  b\n{origin}\n").replace(
        "older\n", "second\n"
    )
    (line,) = (results.parent / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line).items() >= (RESULT | {"section": "First"}).items()
    again = results.read_text(encoding="utf-8")
    record.main(["--all"])  # the same lines of JSON are replaced, not repeated
    assert results.read_text(encoding="utf-8") == again.replace("$ echo third\n", "$ echo third\nthird\n")
    assert len((results.parent / "results.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_record_drops_the_json_of_commands_that_are_gone(record: Any, results: Path) -> None:
    lines = results.parent / "results.jsonl"
    lines.write_text(json.dumps({"command": "gone"}) + "\n" + json.dumps({"command": "echo third"}) + "\n")
    record.main(["First"])
    commands = [json.loads(line)["command"] for line in lines.read_text(encoding="utf-8").splitlines()]
    assert commands == ["echo third", f"{sys.executable} {results.parent / 'one.py'}"]


def test_record_keeps_what_is_there_if_a_command_fails(record: Any, results: Path) -> None:
    results.write_text(results.read_text(encoding="utf-8").replace("echo third", "echo third; exit 3"))
    before = results.read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="'echo third; exit 3' ended with 3"):
        record.main(["Second"])
    assert results.read_text(encoding="utf-8") == before


def test_record_names_a_section_that_is_not_there(
    record: Any, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        record.main(["Secnd"])
    assert "did you mean 'Second'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        record.main([])
    assert "--list" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- what is committed


@pytest.mark.script("benchmark/record.py")
def test_the_commands_of_results_are_listed() -> None:
    listed = subprocess.run(
        [sys.executable, str(BENCHMARKS / "record.py"), "--list"], capture_output=True, text=True, check=True
    )
    assert "Time: python examples/benchmark/generate.py" in listed.stdout


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_results_is_read_and_written_as_it_is(record: Any) -> None:
    text = text_of("examples/benchmark/RESULTS.md")
    assert record.write(record.read(text)) == text


def test_every_command_of_results_runs_a_script_that_is_there(record: Any) -> None:
    runs = record.runs_of(record.read(text_of("examples/benchmark/RESULTS.md")))
    assert runs
    for run in runs:
        (script,) = re.findall(r"\S+\.py\b", run.command)
        assert (ROOT / script).is_file(), run.command
        assert run.output, f"{run.command!r} printed nothing: record.py {run.section!r}"


def rows_of(text: str, header: str) -> list[list[str]]:
    """The cells of a table of Markdown."""
    lines = text[text.index(header) :].splitlines()[2:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


def figures(text: str) -> Iterator[float]:
    """Every number of a text."""
    for found in re.findall(NUMBER, text):
        yield float(found.replace(",", ""))


def is_quoted_from(figure: str, printed: list[float]) -> bool:
    """Whether a printed number, rounded as the figure is, gives the figure.

    Example:
        >>> is_quoted_from("41.6", [41.5636]), is_quoted_from("41.7", [41.5636])
        (True, False)
    """
    decimals = len(figure.partition(".")[2])
    return any(f"{number:.{decimals}f}" == figure.replace(",", "") for number in printed)


def outputs_of(record: Any, command: str) -> list[str]:
    """What a command of RESULTS.md printed."""
    runs = record.runs_of(record.read(text_of("examples/benchmark/RESULTS.md")))
    named = [run.output for run in runs if run.command == command]
    assert len(named) == 1, f"{command!r} is {len(named)} times in RESULTS.md"
    return named[0]


def test_the_timing_table_of_the_readme_is_in_results(record: Any) -> None:
    readme = text_of("README.md")
    (command,) = re.findall(r"answers were compared \(`([^`]+)`\)", readme)
    output = outputs_of(record, command)
    rows = rows_of(readme, "| batch, prompt, beams | transformers, constrained |")
    assert rows
    for name, *cells in rows:
        printed = [number for line in output if line.startswith(f"{name} ") for number in figures(line[len(name) :])]
        for cell in cells:
            figure = cell.removesuffix(" s")
            assert is_quoted_from(figure, printed), f"README quotes {figure} for {name}, RESULTS.md has {printed}"


QUOTING = ["README.md", *(f"examples/guides/{path.name}" for path in sorted((ROOT / "examples/guides").glob("*.md")))]
COMMAND = re.compile(r"\(`((?:OMP_NUM_THREADS=1 )?python examples/[^`]+)`")
FIGURE = re.compile(r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)(?: ?(%|ms|s|times|MB|GB|MiB|GiB|bytes)(?!\w))?")
Figure = tuple[str, str]  # as it is written, with its unit
CLOSE = 10  # lines that the figures of a row of a table may come from


@dataclass
class Quote:
    """What a page quotes of a command: the figures of the prose around it, and of the cells of a table right below."""

    command: str
    prose: list[Figure]
    rows: list[list[list[Figure]]]


def quotes(text: str) -> Iterator[Quote]:
    """Commands in parentheses with what they are to have printed."""
    blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n")
    for block, below in zip(blocks, [*blocks[1:], ""], strict=True):
        for command in COMMAND.findall(block):
            prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", block)
            kept = [found for found in FIGURE.findall(prose) if found[1] or "." in found[0]]
            lines = below.splitlines()[2:] if below.startswith("|") else []
            rows = [[FIGURE.findall(cell) for cell in line.strip("|").split("|")[1:]] for line in lines]
            yield Quote(" ".join(command.split()), kept, rows)


def could_print(figure: Figure, line: str) -> list[int]:
    """Where a line has a number that gives the figure: as it is, in seconds for ms, as a share for %.

    Example:
        >>> could_print(("20", "%"), "20% of 20, and 0.204"), could_print(("20", "ms"), "20 of 0.0201 s")
        ([0, 15], [0, 6])
    """
    value, unit = figure
    places = []
    for found in re.finditer(NUMBER, line):
        number = float(found[0].replace(",", ""))
        if unit == "%":
            fits = [number] if line[found.end() : found.end() + 1] == "%" else [100 * number] * (number < 2)
        else:
            fits = [number, *([1000 * number] if unit == "ms" else [])]
        if is_quoted_from(value, fits):
            places.append(found.start())
    return places


def are_in_order(wanted: list[Figure], line: str) -> bool:
    """Whether one line has all figures, from left to right."""
    after = -1
    for figure in wanted:
        after = min((place for place in could_print(figure, line) if place > after), default=-1)
        if after < 0:
            return False
    return True


def missing(quote: Quote, output: list[str]) -> Iterator[str]:
    """What is quoted of a command that its output does not have.

    A row of a table is a cell for a line that has its figures in their order, or comes from lines close to each other.
    """
    for figure in quote.prose:
        if not any(could_print(figure, line) for line in output):
            yield " ".join(figure)
    for row in quote.rows:
        cells = [cell for cell in row if cell]
        line_a_cell = all(any(are_in_order(cell, line) for line in output) for cell in cells)
        if line_a_cell and all(len(cell) > 1 for cell in cells):
            continue
        every = [figure for cell in cells for figure in cell]
        windows = (output[start : start + CLOSE] for start in range(len(output)))
        if not any(all(any(could_print(one, line) for line in lines) for one in every) for lines in windows):
            yield f"the row {' | '.join(', '.join(value for value, _ in cell) for cell in row)}"


@pytest.mark.parametrize("page", [page for page in QUOTING if [*quotes(text_of(page))]])
def test_figures_that_name_their_command_are_in_results(page: str, record: Any) -> None:
    for quote in quotes(text_of(page)):
        found = [*missing(quote, outputs_of(record, quote.command))]
        assert not found, f"{page} quotes {'; '.join(found)}, which {quote.command!r} has not printed"


def test_quotes_are_found_with_their_tables() -> None:
    text = """It takes 1.5 s and 20% of 3 calls (`python examples/a.py
--b 1`), 4 ms.

| 7 | 8 |
|---|---|
| 9 | 10 ms, 0.5 |
"""
    (quote,) = quotes(text)
    assert quote.command == "python examples/a.py --b 1"
    assert quote.prose == [("1.5", "s"), ("20", "%"), ("4", "ms")]
    assert quote.rows == [[[("10", "ms"), ("0.5", "")]]]


def test_a_wrong_quote_would_be_seen() -> None:
    output = ["a  1.50  2.50  20%", *[""] * CLOSE, "b  3.50  4.50  0.0301"]

    def wrong(prose: list[Figure], *row: list[Figure]) -> list[str]:
        return [*missing(Quote("", prose, [[*row]] if row else []), output)]

    assert could_print(("20", "%"), "20% of 20, and 0.204") == [0, 15]
    assert (
        wrong([("20", "%"), ("30", "ms"), ("1.5", "")], [("1.5", ""), ("2.5", "")], [("3.50", ""), ("4.50", "")]) == []
    )
    assert wrong([("21", "%"), ("31", "ms")]) == ["21 %", "31 ms"]
    assert wrong([], [("2.5", ""), ("1.5", "")], [("3.5", ""), ("4.5", "")])  # not in their order
    assert wrong([], [("1.5", "")], [("3.5", "")])  # far apart
    assert wrong([], [("1.5", "")], [("2.5", "")]) == []


def test_a_wrong_figure_would_be_seen() -> None:
    assert is_quoted_from("0.131", [0.1314])
    assert not is_quoted_from("0.132", [0.1314])
    assert is_quoted_from("1,144", [1144.2])
    assert list(figures("1,144.5 of V2 at 3e7")) == [1144.5, 3e7]
