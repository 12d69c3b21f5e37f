# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr env`: what it tells of a machine, and what it keeps to itself; and completion in the shell."""

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_gr
from hf_gr.commands import app as cli


def facts(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.build_app(), ["env", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_versions_and_devices_are_told() -> None:
    told = facts()
    assert told["hf_gr"] == hf_gr.__version__
    assert told["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert told["packages"]["torch"] == metadata.version("torch")
    assert told["packages"]["transformers"] == metadata.version("transformers")
    assert f"cpu with {torch.get_num_threads()} threads" in told["torch"]
    assert all(isinstance(device, str) for device in told["jax"] or ())


def test_tokens_and_folders_are_kept_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for output in (json.dumps(facts()), CliRunner().invoke(cli.build_app(), ["env"]).output):
        assert "hf_secret" not in output
        assert str(tmp_path) not in output
        assert str(Path.home()) not in output


def test_the_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(line: str) -> set[str]:
        words = line.split(" ")
        variables = {"_HF_GR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        return set(CliRunner().invoke(cli.build_app(), [], prog_name="hf-gr", env=variables).stdout.split())

    assert {"demo", "env", "evaluate", "index", "recommend", "serve"} <= complete("hf-gr ")
    assert complete("hf-gr e") == {"env", "evaluate"}
    assert "--json" in complete("hf-gr env --js")
    assert "build" in complete("hf-gr index b")
