# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Hostile command lines of `hf-gr`: an exit code, an error that names an argument, no traceback, no escape sequences.

A line begins as a good one and gets odd values, names, repetitions and gaps. Everything is relative to a folder of its
own; nothing asks the Hub, and the demo does not train.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from jobs_case import make_case, make_users, write_users
from typer.testing import CliRunner

from hf_gr import ConstraintIndex
from hf_gr.commands import app as cli

pytestmark = pytest.mark.slow

TABLES = {
    "items.csv": "sequence,item_id\n5 7,ham\n5 8,jam\n",
    "items.tsv": "sequence\titem_id\n5 7\t1\n",
    "items.jsonl": '{"sequence": [5, 7], "item_id": 1}\n',
    "twice.csv": "sequence,sequence\n5 7,6\n",
    "recipe.json": '{"17": ["<a_0>", "<b_1>"], "23": ["<a_2>", "<b_0>"]}',
    "users.csv": "seen,next\n100 101,102\n103,104\n",
    "empty.csv": "",
    "odd\x1b[31m.csv": "\x1b[2J,seen\n1,2\n",
    "new.txt": "100\n103\n",
}
# As a user, a script or an attacker writes them.
VALUES = ["", " ", "a b", "\r", "\n", "a\tb", "9" * 25, "x" * 5000]
VALUES += "0 -1 1 2 3.5 nan inf 1e9 99999 0x10 ٣ x true None 5,10 5,,10 , 1,x -1,0 a=b = -- - -m --help [] {}".split()
VALUES += "' \" \\ %s [bold] [/] :smile: me/nowhere .. . é 寿司".split()
VALUES += ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\u202e", "\udcff"]
VALUES += "index model index/x gone/ rows.npy users.parquet built out.parquet m.json seen who item_id sequence".split()
VALUES += ["auto", *TABLES]
GENERATE = ["length_penalty", "num_beams", "max_new_tokens", "temperature", "do_sample", "nothing", "use_cache", "x.y"]
GOOD = [
    line.split()
    for line in (
        "index build items.csv -o built",
        "index build rows.npy --output built --eos-token-id 9",
        "index build recipe.json -o built --offset 3",
        "index show index",
        "index show index --json",
        "index check index --model model",
        "index push index me/catalogue",
        "recommend -m model --index index -i users.parquet -o out.parquet --history seen",
        "evaluate -m model --index index -i users.csv --history seen --num-beams 12",
        "demo --fast",
        "--version",
    )
]


def flags_of(arguments: list[str]) -> list[str]:
    """The options of the command that some arguments name."""
    from typer.main import get_command

    command: Any = get_command(cli.build_app())
    for name in arguments[:2]:
        command = getattr(command, "commands", {}).get(name, command)
    return [flag for parameter in command.params for flag in parameter.opts if flag.startswith("-")]


def hostile(rng: np.random.Generator) -> list[str]:
    """A good line with one to four changes after its command."""
    line = list(GOOD[int(rng.integers(len(GOOD)))])
    words = 2 if line[0] == "index" else 1
    flags = flags_of(line)

    def value() -> str:
        if rng.random() < 0.05:
            return f"{rng.choice(GENERATE)}={VALUES[int(rng.integers(len(VALUES)))]}"
        return VALUES[int(rng.integers(len(VALUES)))]

    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(min(words, len(line)), len(line) + 1))
        kind = rng.choice(["value", "flag", "flag", "flag", "more", "drop", "joined", "unknown", "command"])
        if kind == "value" and at < len(line):
            line[at] = value()
        elif kind == "flag":
            line[at:at] = [str(rng.choice(flags)), value()]
        elif kind == "more":
            line.insert(at, value())
        elif kind == "drop" and at < len(line):
            del line[at]
        elif kind == "joined":
            line.insert(at, f"{rng.choice(flags)}={value()}")
        elif kind == "unknown":
            line.insert(at, f"--{value()}")
        elif kind == "command" and rng.random() < 0.2:
            line[int(rng.integers(words))] = value()
    return line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the lines name."""
    given = tmp_path / "given"
    given.mkdir()
    case = make_case(given)
    write_users(given / "users.parquet", make_users(case, 3))
    for name, text in TABLES.items():
        (given / name).write_text(text)
    np.save(given / "rows.npy", np.array([[5, 7], [6, 8]]))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("hf_gr.demo.run.run_demo", lambda *_, **__: None)
    monkeypatch.setenv("TERM", "dumb")
    return given


def test_hostile_command_lines_are_answered(fuzz: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in fuzz:
        line = hostile(case.rng)
        above = folder.parent / f"case-{case.number}"  # a line may write to ".."
        work = shutil.copytree(folder, above / "work")  # and over its inputs
        monkeypatch.chdir(work)
        result = CliRunner().invoke(cli.build_app(), line)
        ConstraintIndex.from_pretrained(work / "index", verify=True)  # if built over: whole, all the same
        monkeypatch.chdir(folder)
        shutil.rmtree(above)
        fuzz.count(lines=1, **{f"exit_{result.exit_code}": 1})
        if isinstance(result.exception, Exception):
            raise AssertionError(f"a traceback for {line}") from result.exception
        assert result.exit_code in (0, 1, 2, 3), line
        assert not set("\x1b\x9b\x07\x08\r\ud800\udcff") & set(result.output), line
        assert "Traceback" not in result.output, line
        if result.exit_code in (1, 2):
            assert names_an_argument(result.stderr, line), f"{line}: {result.stderr}"
        if result.exit_code == 1 or (result.exit_code == 2 and "╯" not in result.stderr):  # 2 is also typer's
            assert re.match(r"hf-gr( \w+)+: .", result.stderr.splitlines()[-1]), f"{line}: {result.stderr}"


def names_an_argument(message: str, line: list[str]) -> bool:
    """Whether an error names an option, a place or a value of the command line."""
    lines = [row for row in message.splitlines() if not row.startswith(("Usage:", "Try '"))]
    text = re.sub(r"^(hf-gr( \w+)+|─+Error─+):", "", re.sub(r"[\s│╭╮╰╯]+", " ", " ".join(lines)).strip())
    if re.search(
        r"(?<!\w)--?[a-z]|'(INPUT|INDEX|REPO_ID)'|INPUT |Missing command|No such|extra argument|[a-z]_?[a-z]+=", text
    ):
        return True
    bare = re.sub(r"\s+", "", text)
    options = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in line if word.startswith("--")}
    written = [part for word in line for part in (word, *word.split("="))]
    if any(not part.strip() for part in written):  # spaces cannot be told from those of the text
        return True
    values = {re.sub(r"\s+", "", form) for part in written for form in (part, repr(part)[1:-1])}
    # A single letter counts as a word of its own alone.
    return any(
        part in bare if len(part) > 1 else bool(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text))
        for part in options | values
        if part
    )
