# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`revision` and `device` of everything that loads a model by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pyarrow.parquet as pq
import pytest
import torch
from families import build
from hub_server import HubServer
from huggingface_hub import HfApi
from jobs_case import Case, write_users
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from hf_gr import AutoModelForGenerativeRetrieval, Engine, evaluate, recommend
from hf_gr.answering.torch_models import load_model
from hf_gr.commands import app as cli
from hf_gr.generation.torch.loading import _read_config

HISTORIES = [[100, 101], [102]]


def test_a_revision_is_of_the_model_and_its_catalogue(case: Case, hub: HubServer, tmp_path: Path) -> None:
    model, index = case.load()
    model.generation_config.constraint_index = "."
    options: dict[str, Any] = {"progress": False, "num_beams": 12}
    expected = recommend(model, HISTORIES, constraint_index=index, **options)
    model.push_to_hub("me/recommender")
    index.push_to_hub("me/recommender")
    HfApi().create_tag("me/recommender", tag="v1")
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(-3)
    index.remove(expected[0][:3])
    model.push_to_hub("me/recommender")
    index.push_to_hub("me/recommender")
    assert recommend("me/recommender", HISTORIES, revision="v1", **options) == expected
    assert recommend("me/recommender", HISTORIES, **options) != expected
    evaluated = {"sampled_users": 0, "cutoffs": [3], "target": "next", "history": "seen", **options}
    users = write_users(tmp_path / "u.parquet", [{"seen": HISTORIES[0], "next": expected[0][0]}])
    assert evaluate("me/recommender", users, revision="v1", **evaluated).results[0].metrics["recall@3"] == 1
    assert evaluate("me/recommender", users, **evaluated).results[0].metrics["recall@3"] == 0
    output = tmp_path / "recs.parquet"
    flags = ["--model", "me/recommender", "--revision", "v1", "--device", "cpu", "--num-beams", "12", "--history"]
    done = CliRunner().invoke(
        cli.build_app(), ["recommend", *flags, "seen", "--input", str(users), "--output", str(output)]
    )
    assert done.exit_code == 0, done.output
    assert pq.read_table(output).column("items").to_pylist() == expected[:1]
    for revision, same in (("v1", True), (None, False)):
        engine = Engine("me/recommender", revision=revision, device="cpu")
        assert engine.catalogue.edition.index.has_items(expected[0][:3]).all() == same


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_adapters_are_models_in_a_folder_and_on_the_hub(case: Case, hub: HubServer, tmp_path: Path) -> None:
    _, index = case.load()
    base = LlamaForCausalLM.from_pretrained(case.model)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(tmp_path / "lora")
    adapted.push_to_hub("me/lora")
    options: dict[str, Any] = {"constraint_index": index, "progress": False, "num_beams": 12}
    expected = recommend(tmp_path / "lora", HISTORIES, **options)
    assert recommend("me/lora", HISTORIES, **options) == expected
    assert expected != recommend(case.model, HISTORIES, **options)
    users = write_users(tmp_path / "u.parquet", [{"seen": HISTORIES[0], "next": expected[0][0]}])
    how = {"sampled_users": 0, "cutoffs": [3], "target": "next", "history": "seen", **options}
    for model in (tmp_path / "lora", "me/lora"):
        assert evaluate(model, users, **how).results[0].metrics["recall@3"] == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json, expected a saved model"):
        evaluate(tmp_path / "empty", users, **how)
    flags = ["--model", str(tmp_path / "lora"), "--index", str(case.index), "--input", str(users), "--history", "seen"]
    flags += ["--output", str(tmp_path / "r.parquet"), "--num-beams", "12", "--no-progress"]
    done = CliRunner().invoke(cli.build_app(), ["recommend", *flags])
    assert done.exit_code == 0, done.output
    assert pq.read_table(tmp_path / "r.parquet").column("items").to_pylist() == expected[:1]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_an_adapter_of_a_model_with_code_of_its_own_is_trusted_as_that_is(tmp_path: Path) -> None:
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "lora")
    (tmp_path / "base" / "own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        _read_config(tmp_path / "lora", {})
    assert type(_read_config(tmp_path / "lora", {"trust_remote_code": True})).__name__ == "OwnConfig"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", b'{"hf_gr": {"constr', r"generation_config.json is no JSON \(Unterminated"),
        ("generation_config.json", b'{"hf_gr": []}', r"hf_gr is \[\] in a generation config, expected an object"),
        ("model.safetensors", None, "model.safetensors is cut short or damaged"),
    ],
)
def test_damaged_files_of_a_checkpoint_are_named(file: str, content: Any, message: str, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:2000] if content is None else content)
    with pytest.raises(ValueError, match=message):
        AutoModelForGenerativeRetrieval.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device='gpu', expected one of this machine's, cpu"),
        ({"device": "meta:x"}, "device='meta:x', expected one of this machine's, cpu"),
        ({"device": "cuda:64"}, "device='cuda:64', expected one of this machine's, cpu"),
        ({"revision": "v1"}, "revision='v1' with the folder .*, expected a repository"),
        (
            {"device": "cpu", "processes": SimpleNamespace(count=2)},
            "device='cpu' with 2 processes, expected one of both",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_loading(case: Case, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(case.model, **options)


@pytest.mark.parametrize("option", [{"device": "cpu"}, {"revision": "v1"}, {"dtype": "float32"}])
def test_a_loaded_model_is_taken_as_it_is(case: Case, option: Any) -> None:
    model, index = case.load()
    with pytest.raises(ValueError, match=f"{next(iter(option))}= with a loaded model, expected none"):
        recommend(model, HISTORIES, constraint_index=index, **option)
