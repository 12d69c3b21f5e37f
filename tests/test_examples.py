# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples run where they are copied to, and `train_draft_model.py` does what it says."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hf_gr

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What a copy of one file does not have beside it.
BESIDE = {path.stem for folder in ("examples", "examples/benchmark", "tests") for path in (ROOT / folder).iterdir()}
GUARDED = {("hub", "hub_server")}  # imported after a look whether it is there


def imported(text: str) -> set[str]:
    """The top names of what a script imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return {name.partition(".")[0] for name in names}


def not_in_a_copy(text: str) -> set[str]:
    return {name for name in imported(text) if name in BESIDE or not name}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_import_nothing_from_beside_them(path: Path) -> None:
    found = not_in_a_copy(path.read_text(encoding="utf-8"))
    assert {name for name in found if (path.stem, name) not in GUARDED} == set()


def test_an_import_from_beside_is_seen() -> None:
    assert not_in_a_copy("def f():\n    from benchmark.report import print_table") == {"benchmark"}
    assert not_in_a_copy("from . import smollm2") == {""}
    assert not_in_a_copy("import numpy, hf_gr.training") == set()


def test_a_copy_runs_in_an_empty_folder(tmp_path: Path) -> None:
    copy = shutil.copy(ROOT / "examples" / "train_draft_model.py", tmp_path)
    done = subprocess.run(
        [sys.executable, copy, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert "--interactions" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_copies_are_fast(path: Path, tmp_path: Path) -> None:
    copy = shutil.copy(path, tmp_path)
    fast = ["--fast"] if '"--fast"' in path.read_text(encoding="utf-8") else []
    done = subprocess.run(
        [sys.executable, copy, *fast], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == [Path(copy).name]  # nothing is left behind


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


# A draft model on a user's own data


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("pyarrow")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return import_module("train_draft_model")


def test_a_draft_is_trained_for_a_new_target_and_for_one_that_is_there(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = script.make_up(tmp_path / "purchases.csv", np.random.default_rng(0))
    few = ["--base-steps", "5", "--steps", "3", "--users", "3", "--max-items", "4", "--prompts", "20"]
    few += ["--num-beams", "3", "--num-codes", "8", "--hidden-size", "16"]
    script.main(["--interactions", str(rows), *few, "--output", str(tmp_path / "one")])
    # The target and its catalogue are used as they are; an item that it does not have is omitted.
    rows.write_text(rows.read_text() + "u1,soap,9\nu1,i1,10\n")
    target = tmp_path / "one" / "target"
    before = (target / "model.safetensors").read_bytes()
    script.main(
        ["--interactions", str(rows), *few, "--model", str(target), "--output", str(tmp_path / "two"), "--loss", "sft"]
    )
    printed = capsys.readouterr().out
    assert "1 of 121 items are not in the catalogue, such as 'soap': omitted" in printed
    assert (target / "model.safetensors").read_bytes() == before
    results = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    for result in results:
        assert list(result["rows"]) == [
            "no draft",
            "catalogue alone",
            "draft before alignment",
            "draft, aligned",
            "both",
        ]
        assert all(row["same"] == 1 for row in result["rows"].values())
    # What is saved drafts for the target.
    model = hf_gr.AutoModelForGenerativeRetrieval.from_pretrained(target)
    draft = hf_gr.AutoModelForGenerativeRetrieval.from_pretrained(tmp_path / "one")
    how = {"drafting": "assistant", "assistant_model": draft, "draft_token_budget": 1, "num_beams": 3}
    out = model.generate(model.dummy_inputs["input_ids"][:1] % 8, return_dict_in_generate=True, **how)
    assert out.speculation.draft_forwards > 0


def test_data_that_does_not_fit_is_refused(script: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("user,item\na,1\na,2\nb,1\nb,2\n")
    with pytest.raises(SystemExit, match="no user has 3 items"):
        script.main(["--interactions", str(rows), "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="no column 'who'"):
        script.main(["--interactions", str(rows), "--columns", "who", "item", "--output", str(tmp_path / "out")])
    rows.write_text("user,item\na,1\na,\n")
    with pytest.raises(SystemExit, match="item='item' is empty in row 1"):
        script.main(["--interactions", str(rows), "--output", str(tmp_path / "out")])
    for wrong in (["--steps", "0"], ["--columns", "user"]):
        with pytest.raises(SystemExit, match="2"):
            script.parse(["--interactions", str(rows), *wrong])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_train_a_draft() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(ROOT / "examples" / "train_draft_model.py"), "--fast"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment() | {"OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "number of processes: 2" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert all(row["same"] == 1 for row in result["rows"].values())
