# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which backend loads what, on a machine that pretends to have a TPU."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from families import LLAMA, build

from hf_gr import AutoModelForGenerativeRetrieval
from hf_gr.answering.torch_models import load_draft_model, load_model
from hf_gr.flax.model import FlaxModel
from hf_gr.generation import auto, messages
from hf_gr.generation.torch.mixin import GRGenerationMixin

load = AutoModelForGenerativeRetrieval.from_pretrained
TINY = LLAMA | {"num_hidden_layers": 1}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def tpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is installed on the machine, to be changed."""
    there = {"torch": object(), "jax": object(), "libtpu": object()}
    monkeypatch.setattr(auto, "find_spec", there.get)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(messages, "_SAID", set())
    return there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    build("llama", config=TINY).save_pretrained(folder / "llama")
    build("llama", config=TINY | {"rope_parameters": YARN}).save_pretrained(folder / "yarn")
    build("mamba").save_pretrained(folder / "mamba")
    return folder


@pytest.mark.parametrize(
    ("name", "options", "lack"),
    [
        ("mamba", {}, "config.model_type='mamba', expected one of .*gemma, "),
        ("yarn", {}, "config.rope_parameters has rope_type='yarn'"),
        ("llama", {"attn_implementation": "eager"}, "attn_implementation is given, .*: omit it, as Flax has one"),
    ],
)
def test_what_flax_lacks_is_loaded_by_pytorch_and_said_once(
    name: str, options: dict[str, Any], lack: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(load(folder / name, backend="torch", **options), GRGenerationMixin)
    assert "backend=" not in caplog.text
    for _ in range(2):
        assert isinstance(load(folder / name, **options), GRGenerationMixin)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "hf_gr.generation"]
    assert said.startswith("backend='auto' loads PyTorch, though JAX has a TPU")
    assert re.search(lack, said)
    with pytest.raises((NotImplementedError, ValueError), match=lack):
        load(folder / name, backend="flax", **options)


def test_backends_are_chosen_by_what_is_there(tpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert auto.choose_backend() == "flax"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "cpu")
        assert auto.choose_backend() == "torch"  # libtpu alone is no TPU
    del tpu["libtpu"]
    assert auto.choose_backend() == "torch"
    del tpu["torch"]
    assert auto.choose_backend() == "flax"


def test_what_is_pytorchs_alone_loads_pytorch_whatever_auto_means(folder: Path) -> None:
    """Tables of users are decoded by the PyTorch side."""
    options: dict[str, Any] = {"dtype": "auto", "device_map": None}
    model = load_model(folder / "llama", device="cpu", **options)
    assert isinstance(model, GRGenerationMixin)
    assert isinstance(load_draft_model(folder / "llama", model), GRGenerationMixin)
    with pytest.raises(ValueError, match="model is a FlaxModel, expected a transformers model.*backend='torch'"):
        load_model(load(folder / "llama"), device=None, **options)


def test_what_flax_has_is_loaded_by_flax(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(load(folder / "llama", device_map=None), FlaxModel)
    assert "backend=" not in caplog.text


def test_without_pytorch_both_remedies_are_named(folder: Path, tpu: dict[str, Any]) -> None:
    del tpu["torch"]
    for backend in ("auto", "flax"):
        with pytest.raises(NotImplementedError, match="'mamba', .* use backend='torch', which needs PyTorch: pip"):
            load(folder / "mamba", backend=backend)
        with pytest.raises(ValueError, match="device_map is given, .*pass mesh= to generate; or use .*pip install"):
            load(folder / "llama", device_map="auto", backend=backend)
    with pytest.raises(ImportError, match="backend='torch' needs PyTorch"):
        load(folder / "llama", backend="torch")


def test_without_the_extra_pytorch_is_loaded_and_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tpu: dict[str, Any]
) -> None:
    right, error = auto._backend, ImportError('hf_gr.flax needs flax: pip install "hf-gr[flax]"', name="flax")

    def backend(name: Any) -> Any:
        if name == "flax":
            raise error
        return right(name)

    monkeypatch.setattr(auto, "_backend", backend)
    assert isinstance(load(folder / "llama"), GRGenerationMixin)
    assert 'pip install "hf-gr[flax]"' in caplog.text
    del tpu["torch"]
    with pytest.raises(ImportError, match="needs flax"):
        load(folder / "llama")


def test_a_mistake_is_no_lack(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype='int8', expected 'auto' or one of"):
        load(folder / "llama", dtype="int8")
    with pytest.raises(ValueError, match="is not there, expected a folder"):
        load(folder / "nothing", local_files_only=True)
    with pytest.raises(ValueError, match="1 positional arguments"):
        load(folder / "llama", 3, backend="flax")
