# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Every script of `examples/` runs; those that users copy run alone."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
SCRIPTS = [
    path
    for path in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("benchmark/*.py")])
    if "\nif __name__ == " in path.read_text(encoding="utf-8")
]
OPTIONS = {"record.py": ["--list"]}  # of scripts that know no --fast but need some
MORE = [[FOLDER / "benchmark" / "generate.py", "--fast", "--backend", "flax"]]
# What a copy of one file does not have beside it.
BESIDE = {path.stem for folder in ("examples", "examples/benchmark", "tests") for path in (ROOT / folder).iterdir()}
GUARDED = {("hub", "hub_server")}  # imported after a look whether it is there


def command(path: Path) -> list[Path | str]:
    fast = ["--fast"] if '"--fast"' in path.read_text(encoding="utf-8") else []
    return [path, *OPTIONS.get(path.name, fast)]


@pytest.mark.script
@pytest.mark.parametrize(
    "given", [*map(command, SCRIPTS), *MORE], ids=lambda given: " ".join([given[0].stem, *given[1:]])
)
def test_every_script_runs(given: list[Path | str], tmp_path: Path) -> None:
    """An example is copied to an empty folder, in which it leaves nothing; lines of JSON can be read."""
    path, *options = given
    assert isinstance(path, Path)
    is_example = path in EXAMPLES
    script = shutil.copy(path, tmp_path) if is_example else path
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, script, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if is_example:
        assert [left.name for left in tmp_path.iterdir()] == [path.name]
    elif last := [line for line in done.stdout.splitlines() if line.startswith("{")][-1:]:
        assert json.loads(last[0])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_import_nothing_from_beside_them(path: Path) -> None:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    found = {name.partition(".")[0] for name in names} & {*BESIDE, ""}
    assert {name for name in found if (path.stem, name) not in GUARDED} == set()


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: file.name)
def test_every_example_is_run_or_imported(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    others = (other.read_text(encoding="utf-8") for other in FOLDER.rglob("*.py") if other != file)
    is_imported = any(re.search(rf"^ *(from|import) (\w+\.)?{file.stem}\b", other, re.MULTILINE) for other in others)
    assert re.search(r"^if __name__ == ", text, re.MULTILINE) or is_imported
