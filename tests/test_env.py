# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr env`: what it tells of a machine and a model, and what it keeps to itself; and completion in the shell."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import hf_gr
from hf_gr import enable
from hf_gr.commands import app as cli
from hf_gr.commands import env

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "pad_token_id": 0, "bos_token_id": 0}
ATTENTION = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def facts(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.build_app(), ["env", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_versions_extras_and_devices_are_told() -> None:
    told = facts()
    assert told["hf_gr"] == hf_gr.__version__
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["packages"]["torch"] == metadata.version("torch")
    assert told["packages"]["transformers"] == metadata.version("transformers")
    assert "hf-gr" not in told["packages"]
    assert told["extras"]["cli"] == []
    assert "dev" not in told["extras"]
    assert told["torch"]["threads"] == torch.get_num_threads()


def test_a_missing_or_old_package_of_an_extra_is_named_with_those_of_the_extras_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = {"typer": None, "rich": "13.0", "fastapi": "0.200"}
    monkeypatch.setattr(env, "_version", lambda name: version.get(name, "99"))
    assert env.environment()["extras"]["cli"] == ["rich>=13.7", "typer>=0.15"]
    assert env.environment()["extras"]["serve"] == ["rich>=13.7", "typer>=0.15"]
    assert env.environment()["extras"]["plot"] == []
    printed = CliRunner().invoke(cli.build_app(), ["env"]).stdout
    assert 'rich>=13.7, typer>=0.15 missing: pip install "hf-gr[serve]"' in " ".join(printed.split())


def test_a_checkout_that_is_not_installed_has_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "DISTRIBUTION", "hf-gr-of-nobody")
    told = env.environment()
    assert told["extras"] == told["packages"] == {}
    assert "unknown: hf-gr is not installed" in CliRunner().invoke(cli.build_app(), ["env"]).stdout


def test_tokens_and_folders_are_kept_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    flags = f"--xla_dump_to={tmp_path} --xla_dump_to='logs/my secret' --xla_cpu_max_isa=AVX2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    for output in (json.dumps(facts()), CliRunner().invoke(cli.build_app(), ["env"]).output):
        assert "hf_secret" not in output
        assert "logs" not in output
        assert "--xla_dump_to=... --xla_dump_to=... --xla_cpu_max_isa=AVX2" in output
        assert str(tmp_path) not in output
        assert str(Path.home()) not in output


@pytest.mark.parametrize(
    ("model", "takes_tree", "parts"),
    [
        (Qwen3ForCausalLM(Qwen3Config(**SMALL, **ATTENTION)), True, True),
        (
            T5ForConditionalGeneration(
                T5Config(
                    vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
                )
            ),
            True,
            False,
        ),
        (MambaForCausalLM(MambaConfig(**SMALL, state_size=4)), False, False),
    ],
    ids=["qwen3", "t5", "mamba"],
)
def test_a_models_layout_is_told(model: Any, takes_tree: bool, parts: bool, tmp_path: Path) -> None:
    enable(model).save_pretrained(tmp_path)
    told = facts("--model", str(tmp_path))["model"]
    assert (told["takes trees"], told["attends in parts"]) == (takes_tree, parts)
    assert told["class"] == type(model).__name__
    assert told["parameters"] == sum(weights.numel() for weights in model.parameters())
    assert (told["vocabulary"], told["catalogue"], told["draft head"]) == (50, False, None)
    assert told["decoded with"] in CliRunner().invoke(cli.build_app(), ["env", "-m", str(tmp_path)]).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--revision", "main"], "it belongs to --model, which is missing"),
        (["--device", "cpu"], "it belongs to --model, which is missing"),
        (["--model", "no such folder"], "is no folder here and no repository id"),
    ],
)
def test_wrong_options_are_refused_by_their_names(options: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.build_app(), ["env", *options], env={"COLUMNS": "200"})
    assert result.exit_code in (1, 2)
    assert options[0] in result.output
    assert message in result.output
    assert isinstance(result.exception, SystemExit)


def test_the_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(line: str) -> set[str]:
        words = line.split(" ")
        variables = {"_HF_GR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        return set(CliRunner().invoke(cli.build_app(), [], prog_name="hf-gr", env=variables).stdout.split())

    assert {"demo", "env", "evaluate", "index", "recommend", "serve"} <= complete("hf-gr ")
    assert complete("hf-gr e") == {"env", "evaluate"}
    assert "--model" in complete("hf-gr env --mo")
    assert "build" in complete("hf-gr index b")
