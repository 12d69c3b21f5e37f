# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the Flax side over a Hub: to it, from it, and everything of one commit."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families import EOS, PAD, build
from hub_server import HubServer
from test_draft_head import new_head

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationConfig, enable
from hf_gr.files.hub import Source
from hf_gr.flax import checkpoint
from hf_gr.flax.draft_head import DraftHead
from hf_gr.flax.model import FlaxModel

INDEX = ConstraintIndex.from_sequences([[5, 9], [5, 6], [7, 8]], item_ids=["ham", "jam", "yam"])
OTHER = ConstraintIndex.from_sequences([[3, 4]], item_ids=["clam"])


def load(**kwargs: Any) -> Any:
    return AutoModelForGenerativeRetrieval.from_pretrained("me/model", backend="flax", **kwargs)


def push(seed: int, index: ConstraintIndex, num_beams: int, **kwargs: Any) -> FlaxModel:
    model = build("qwen3", seed=seed, config={"num_hidden_layers": 1, "eos_token_id": EOS})
    model.generation_config = GRGenerationConfig(
        constraint_index=".", num_beams=num_beams, num_return_sequences=num_beams, pad_token_id=PAD
    )
    model.save_pretrained("checkpoint")
    ours = FlaxModel.from_pretrained("checkpoint")
    index.push_to_hub("me/model", **{name: value for name, value in kwargs.items() if name == "revision"})
    ours.push_to_hub("me/model", **kwargs)
    return ours


def weight(model: Any) -> np.ndarray:
    return np.asarray(model.model.embed_tokens.weight[...])


@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_a_checkpoint_goes_there_and_comes_back_by_revision(hub: HubServer, max_shard_size: str) -> None:
    first = push(0, INDEX, 3, max_shard_size=max_shard_size)
    commit = hub.commit("me/model")
    assert ("model.safetensors.index.json" in hub.files("me/model")) == (max_shard_size == "10KB")
    second = push(1, OTHER, 1)
    assert not np.array_equal(weight(first), weight(second))
    assert np.array_equal(weight(load()), weight(second))
    old = load(revision=commit)
    assert np.array_equal(weight(old), weight(first))
    assert old.generation_config.num_beams == 3
    theirs = AutoModelForGenerativeRetrieval.from_pretrained("me/model", backend="torch", revision=commit)
    assert np.array_equal(theirs.model.embed_tokens.weight.detach().numpy(), weight(first))


def test_all_is_of_one_commit_whatever_is_pushed_meanwhile(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = push(0, INDEX, 3)
    right = checkpoint.check_family
    done: list[bool] = []

    def push_between(family: str | None) -> None:
        """Called when the config is there, and nothing else."""
        right(family)
        if not done:
            done.append(True)
            push(1, OTHER, 1)

    monkeypatch.setattr(checkpoint, "check_family", push_between)
    model = load()
    assert done
    assert np.array_equal(weight(model), weight(first))
    assert model.generation_config.num_beams == 3
    found = model.generate([[5, 6, 7]])
    assert sorted(INDEX.items(np.asarray(found)[:, 3:])) == [["ham"], ["jam"], ["yam"]]


def test_what_is_no_checkpoint_of_flax_is_refused_before_its_weights_are_there(hub: HubServer) -> None:
    INDEX.push_to_hub("me/model")
    with pytest.raises(ValueError, match=r"'me/model' .* gives no .*config\.json"):
        load()
    build("mamba").push_to_hub("me/model")
    with pytest.raises(NotImplementedError, match="config.model_type='mamba'"):
        load()
    assert not hub.asked("GET", "model.safetensors")


def test_every_argument_says_where_a_checkpoint_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(checkpoint, "find", asked)
    where = {"revision": "v1", "token": "secret", "cache_dir": "there", "local_files_only": True, "subfolder": "part"}
    with pytest.raises(InterruptedError):
        FlaxModel.from_pretrained("me/model", **where)
    asked.assert_called_once_with(Source("me/model", **where))


def test_a_draft_head_goes_with_its_checkpoint(hub: HubServer) -> None:
    """Trained in PyTorch, pushed from Flax, and loaded on both sides, with the answers of its own catalogue."""
    theirs = enable(build("qwen3", config={"num_hidden_layers": 1}))
    theirs.add_draft_head(new_head(2))
    theirs.save_pretrained("checkpoint")
    FlaxModel.from_pretrained("checkpoint").push_to_hub("me/model")
    assert {"draft_head.safetensors", "draft_head_config.json"} <= set(hub.files("me/model"))
    assert b'AutoModelForGenerativeRetrieval.from_pretrained("me/model")' in hub.files("me/model")["README.md"]
    options = {"num_beams": 3, "num_return_sequences": 3, "drafting": "head", "constraint_index": INDEX}
    expected = theirs.generate(torch.tensor([[5, 6, 7]]), **options)
    loaded = AutoModelForGenerativeRetrieval.from_pretrained("me/model", backend="torch")
    assert load().generate([[5, 6, 7]], **options).tolist() == expected.tolist()
    assert loaded.generate(torch.tensor([[5, 6, 7]]), **options).tolist() == expected.tolist()
    head = DraftHead.from_pretrained("me/model")
    head.push_to_hub("me/head")
    assert {"draft_head.safetensors", "draft_head_config.json", "README.md"} <= set(hub.files("me/head"))
    again = load()
    again.draft_head = None
    again.add_draft_head(DraftHead.from_pretrained("me/head"))
    assert again.generate([[5, 6, 7]], **options).tolist() == expected.tolist()
