# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Print sections of RESULTS.md again: their commands stand there, their output is replaced.

A block of RESULTS.md begins with the command that printed it, after `$`. This program runs the commands of some
sections in the root of the repository and writes what they print in the place of what is there. Text around the
blocks stays. Lines of JSON go to `results.jsonl`, one for each command; in their place stands one line that says where
and when the command ran.

To change an experiment, change its command in RESULTS.md; to add one, add a section with a block of one line,
`$ command`.

    python examples/benchmark/record.py --list
    python examples/benchmark/record.py "One step" Labels
    python examples/benchmark/record.py --all      # hours: also what trains models
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = FOLDER / "RESULTS.md"
LINES = FOLDER / "results.jsonl"
FENCE, PROMPT, JSON = "```", "$ ", '{"benchmark"'


@dataclass
class Run:
    """A command of RESULTS.md, and the lines that stand below it."""

    section: str
    command: str
    output: list[str] = field(default_factory=list)


def read(text: str) -> list[str | Run]:
    """The parts of RESULTS.md in order: lines as they are, and runs. `write` is the inverse.

    Example:
        >>> write(read("## A\\n```\\n$ a\\n1\\n$ b\\n```\\n")) == "## A\\n```\\n$ a\\n1\\n$ b\\n```\\n"
        True
    """
    parts: list[str | Run] = []
    section, is_block = "", False
    for line in text.splitlines():
        run = parts[-1] if parts and is_block else None
        if line.startswith(FENCE):
            is_block = not is_block
            parts.append(line)
        elif is_block and line.startswith(PROMPT):
            parts.append(Run(section, line.removeprefix(PROMPT)))
        elif isinstance(run, Run):
            run.output.append(line)
        else:
            if line.startswith("## ") and not is_block:
                section = line.removeprefix("## ")
            parts.append(line)
    return parts


def write(parts: Sequence[str | Run]) -> str:
    """The text of RESULTS.md."""
    lines: list[str] = []
    for part in parts:
        lines += [PROMPT + part.command, *part.output] if isinstance(part, Run) else [part]
    return "\n".join(lines) + "\n"


def runs_of(parts: Sequence[str | Run], sections: Sequence[str] | None = None) -> list[Run]:
    """The runs of some sections, or of all."""
    runs = [part for part in parts if isinstance(part, Run)]
    return [run for run in runs if sections is None or run.section in sections]


def origin(result: dict[str, Any]) -> str:
    """Where a result is from, on one line."""
    versions, hardware = result["versions"], result["hardware"]
    return ", ".join(
        [
            f"commit {result['commit']}",
            *([result["date"]] if "date" in result else []),
            *(f"{name} {number}" for name, number in versions.items()),
            *([] if hardware["device"] == "cpu" else [hardware["device"]]),
            f"{hardware['cpu']}, {hardware['threads']} of {hardware['cpus']} CPUs",
            f"load {' '.join(map(str, hardware['load']))}",
        ]
    )


def printed_by(command: str) -> Iterator[str]:
    """What a command prints, line by line, while it runs.

    Raises:
        SystemExit: it failed; RESULTS.md stays as it is.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip("\n")
    if process.returncode:
        raise SystemExit(f"{command!r} ended with {process.returncode}: RESULTS.md still has what it printed before")


def record(run: Run) -> list[str]:
    """Run its command; returns the lines of JSON."""
    output, found = [], []
    for line in printed_by(run.command):
        print(line[:200], flush=True)
        if line.startswith(JSON):
            result = json.loads(line)
            found.append(json.dumps({"section": run.section, "command": run.command} | result))
            line = origin(result)
        output.append(line)
    run.output = output
    return found


def keep(found: Sequence[str], commands: set[str]) -> None:
    """Put lines into `results.jsonl` in the place of those of the same commands; drop those of no command."""
    new = {json.loads(line)["command"] for line in found}
    old = LINES.read_text(encoding="utf-8").splitlines() if LINES.exists() else []
    kept = [line for line in old if json.loads(line)["command"] in commands - new]
    LINES.write_text("".join(f"{line}\n" for line in sorted([*kept, *found])), encoding="utf-8")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="headings of RESULTS.md")
    parser.add_argument("--all", action="store_true", help="every section")
    parser.add_argument("--list", action="store_true", help="print sections and commands, and run nothing")
    options = parser.parse_args(arguments)
    known = list(dict.fromkeys(run.section for run in runs_of(read(RESULTS.read_text(encoding="utf-8")))))
    for section in options.sections:
        if section not in known:
            close = get_close_matches(section, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; --list prints them"
            parser.error(f"section {section!r}, expected a heading of RESULTS.md that has a command{hint}")
    if not (options.sections or options.all or options.list):
        parser.error("no section, expected headings of RESULTS.md, or --all; --list prints them")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    chosen = options.sections or None
    for run in runs_of(read(RESULTS.read_text(encoding="utf-8")), chosen):
        if options.list:
            print(f"{run.section}: {run.command}")
            continue
        print(f"{PROMPT}{run.command}", flush=True)
        found = record(run)
        # Read again: a run takes minutes, and someone may have edited the text meanwhile.
        parts = read(RESULTS.read_text(encoding="utf-8"))
        given = (run.section, run.command)
        same = [at for at, part in enumerate(parts) if isinstance(part, Run) and (part.section, part.command) == given]
        if not same:
            raise SystemExit(f"{run.command!r} is no longer in section {run.section!r} of RESULTS.md")
        parts[same[0]] = run
        RESULTS.write_text(re.sub(r"\n{3,}", "\n\n", write(parts)), encoding="utf-8")
        keep(found, {other.command for other in runs_of(parts)})


if __name__ == "__main__":
    main()
