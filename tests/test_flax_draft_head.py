# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Draft heads in Flax: the files and the numbers of the PyTorch side; test_flax_drafting.py has their answers."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from flax_pairs import SCORE_TOL, pair
from test_draft_head import NUM_CODES, VARIANTS, new_head

from hf_gr.files import draft_head as head_files
from hf_gr.flax import draft_head
from hf_gr.flax.draft_head import DraftHead, HeadScorer
from hf_gr.flax.model import FlaxModel
from hf_gr.torch.draft_head import DraftHead as TorchHead


@dataclass(frozen=True)
class GivenStates:
    """Stands for a model: its parameters are its hidden states."""

    def hidden_states(self, params: Any, prompt: Any, *, num_last: int) -> Any:
        assert num_last == params.shape[1]
        return params


def as_flax(head: TorchHead, folder: Path) -> DraftHead:
    head.save_pretrained(folder)
    return DraftHead.from_pretrained(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_the_same_logits(variant: str, tmp_path: Path) -> None:
    theirs = new_head(3, hidden_size=8, **VARIANTS[variant])
    ours = as_flax(theirs, tmp_path)
    assert ours.config == theirs.config
    rng = random.Random(variant)
    hidden = torch.randn(2, ours.config.num_placeholders + 1, 8, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[rng.randrange(NUM_CODES) for _ in range(3)] for _ in range(2)])
    with torch.no_grad():
        expected = theirs(hidden, tokens)

    @jax.jit
    def run(params: Any, tokens: Any) -> list[Any]:
        found = []
        for vocab_size in (None, 64):
            scorer = HeadScorer(ours.config, GivenStates(), vocab_size=vocab_size)
            prompt = draft_head.Prompt(tokens, tokens > -1)
            logits, cache = scorer.prefill(params, prompt)
            cache = cache.with_room(2)
            found.append([logits[:, : ours.config.codebook_sizes[0]] if vocab_size is None else logits])
            for level in range(1, 3):
                # Two nodes, of which the second continues.
                pair = jnp.stack([tokens[:, level - 1] * 0 + 1, tokens[:, level - 1]], axis=1)
                sees = jnp.zeros((2, 2, 4), dtype=bool).at[..., 1].set(level > 1)
                sees = sees.at[:, 0, 2].set(True).at[:, 1, 3].set(True)
                depths = jnp.full((2, 2), level)
                logits, states = scorer.score(params, cache, pair, depths, sees, jnp.ones((2, 1), jnp.int32))
                cache = cache.keep(states, depths, jnp.array([[0, 1]] * 2), jnp.ones((2, 2), bool))
                found[-1].append(logits[:, 0])
        return found

    narrow, wide = run({"model": jnp.asarray(hidden.numpy()), "head": ours.params}, jnp.asarray(tokens.numpy()))
    for level in range(3):
        codes = expected[level].numpy()
        np.testing.assert_allclose(narrow[level], codes, atol=SCORE_TOL, rtol=0)
        np.testing.assert_allclose(np.asarray(wide[level])[:, ours.codebook(level)], codes, atol=SCORE_TOL, rtol=0)
        assert np.isneginf(wide[level]).sum() == 2 * (64 - NUM_CODES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_those_of_the_other_side(dtype: torch.dtype, tmp_path: Path) -> None:
    head = new_head(3, hidden_size=8, transition="rnn").to(dtype)
    ours = as_flax(head, tmp_path / "torch")
    ours.save_pretrained(tmp_path / "flax")
    for name in (*head_files.FILES, "README.md"):
        theirs, mine = ((tmp_path / side / name).read_bytes() for side in ("torch", "flax"))
        assert mine == theirs.replace(b'"torch"', b'"flax"'), name
    back = TorchHead.from_pretrained(tmp_path / "flax")
    for name, tensor in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


def test_a_head_of_its_own_brings_its_placeholders(tmp_path: Path) -> None:
    torch_model, _, folder = pair("qwen3", head=3)
    torch_model.draft_head.save_pretrained(tmp_path)
    head, model = DraftHead.from_pretrained(tmp_path), FlaxModel.from_pretrained(folder)
    weight = model.model.embed_tokens.weight
    before = np.asarray(weight.get_raw_value())
    places = list(head.config.placeholder_token_ids)
    weight.set_raw_value(jnp.asarray(np.where(np.isin(np.arange(len(before)), places)[:, None], 0, before)))
    assert model.add_draft_head(head) is model.draft_head
    assert np.array_equal(weight.get_raw_value(), before)


def test_damaged_and_foreign_heads_are_refused(tmp_path: Path) -> None:
    """test_draft_head_storage.py has every kind of damage: both sides read files by the same functions."""
    head = as_flax(new_head(3, hidden_size=8), tmp_path)
    for other, message in ((head, "hidden_size=8, expected the model's, 32"), (7, "head is a int, expected hf_gr")):
        with pytest.raises(ValueError, match=message):
            pair("qwen3")[1].add_draft_head(other)
    with pytest.raises(ValueError, match="codebooks have"):
        DraftHead(head.config, [[1, 2]] * 3, arrays={})
    tensors = {name: tensor.numpy() for name, tensor in new_head(3).state_dict().items()}
    wrong = tensors | {"codebook_1": tensors["codebook_1"].astype(np.float32)}
    head_files.save(safetensors.numpy, tmp_path, new_head(3).config.to_dict(), wrong, card=None)
    with pytest.raises(ValueError, match="codebook_1 is float32 of shape"):
        DraftHead.from_pretrained(tmp_path)
