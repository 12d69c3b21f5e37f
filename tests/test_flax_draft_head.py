# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Draft heads in Flax: the files, the numbers and the answers of the PyTorch side."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from families import EOS, build, prompts
from test_draft_head import NUM_CODES, VARIANTS, new_head
from transformers import GenerationConfig

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable
from hf_gr.files import draft_head as head_files
from hf_gr.flax import draft_head
from hf_gr.flax.decode import decode_program
from hf_gr.flax.draft_head import DraftHead, HeadScorer
from hf_gr.flax.model import FlaxModel
from hf_gr.torch.draft_head import DraftHead as TorchHead

SCORE_TOL = 1e-4  # fp32 sums of at most 5 log-probabilities
ROWS = np.random.default_rng(0).integers(3, NUM_CODES, size=(200, 3))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 3].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)
BEAMS = {"num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True, "output_scores": True}
HEAD: dict[str, Any] = {"drafting": "head", **BEAMS}


@pytest.fixture(autouse=True)
def _highest_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def small(family: str) -> Any:
    """A model of one layer, since a head does not care."""
    layers = {"num_layers": 1} if family == "t5" else {"num_hidden_layers": 1}
    return enable(build(family, config=layers))


@cache
def pair(family: str, num_levels: int, variant: str, folder: Path) -> tuple[Any, Any]:
    """One checkpoint with a head on both sides."""
    model = small(family)
    model.add_draft_head(new_head(num_levels, **VARIANTS[variant]))
    path = folder / f"{family}-{num_levels}-{variant}"
    model.save_pretrained(path)
    return model, AutoModelForGenerativeRetrieval.from_pretrained(path, backend="flax")


def check(models: tuple[Any, Any], inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    """Both sides: equal sequences and scores."""
    given = {name: value.numpy() for name, value in inputs.items()}
    theirs, ours = models[0].generate(**inputs, **kwargs), models[1].generate(**given, **kwargs)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()
    np.testing.assert_allclose(ours.sequences_scores, theirs.sequences_scores, atol=SCORE_TOL, rtol=0)
    for mine, other in zip(ours.scores or (), theirs.scores or (), strict=True):
        alive = np.isfinite(other.numpy()).any(-1)
        np.testing.assert_allclose(np.asarray(mine)[alive], other.numpy()[alive], atol=SCORE_TOL, rtol=0)
    assert ours.speculation.target_forwards == 0
    assert not ours.speculation.drafted_nodes.any()
    return ours


def test_a_decoders_head_answers_as_on_the_other_side(folder: Path) -> None:
    models = pair("qwen3", 3, "rnn", folder)
    check(models, prompts(3, 9, padded=True), constraint_index=INDEX, **HEAD)
    before = decode_program._cache_size()
    views = [INDEX.where(list(range(80))), INDEX.where(list(range(50, 200))), INDEX]
    check(models, prompts(3, 12, seed=1), constraint_index=views[0], **HEAD)
    assert decode_program._cache_size() == before


def test_an_encoder_decoders_head_answers_ragged_catalogues_under_rules(folder: Path) -> None:
    views = [RAGGED.where(list(range(80))), RAGGED.where(list(range(50, 200)))]
    models = pair("t5", RAGGED.max_length, "NEZHA-3", folder)
    excluded = [list(range(20)), []]
    check(models, prompts(2, 9, padded=True), constraint_index=views, exclude_items=excluded, **HEAD)


@dataclass(frozen=True)
class GivenStates:
    """Stands for a model: its parameters are its hidden states."""

    def hidden_states(self, params: Any, prompt: Any, *, num_last: int) -> Any:
        assert num_last == params.shape[1]
        return params


def as_flax(head: TorchHead, folder: Path) -> DraftHead:
    head.save_pretrained(folder)
    return DraftHead.from_pretrained(folder)


def check_logits(variant: str, folder: Path) -> None:
    """A chain of tokens down the levels: the logits of both sides, over codes and over the vocabulary."""
    theirs = new_head(3, hidden_size=8, **VARIANTS[variant])
    ours = as_flax(theirs, folder)
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_the_same_logits(variant: str, tmp_path: Path) -> None:
    check_logits(variant, tmp_path)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("advance", lambda right, self, params, state, tokens, **kw: right(self, params, state, tokens * 0, **kw)),
        ("_logits", lambda right, self, *args, **kwargs: right(self, *args, **kwargs)[..., ::-1]),
    ],
)
def test_a_planted_error_is_seen(name: str, spoil: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(HeadScorer, name)
    monkeypatch.setattr(HeadScorer, name, lambda *args, **kwargs: spoil(right, *args, **kwargs))
    with pytest.raises(AssertionError):
        check_logits("rnn", tmp_path)


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


def test_a_checkpoint_goes_to_and_fro_with_its_head(folder: Path, tmp_path: Path) -> None:
    torch_model, model = pair("qwen3", 3, "rnn", folder)
    model.save_pretrained(tmp_path)
    assert "draft head" in (tmp_path / "README.md").read_text()
    back = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, backend="torch")
    assert back.draft_head.config == torch_model.draft_head.config == model.draft_head.config
    for name, tensor in torch_model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    (tmp_path / head_files.JSON_FILE).unlink()
    with pytest.raises(ValueError, match=r"has draft_head.safetensors and no draft_head_config.json"):
        FlaxModel.from_pretrained(tmp_path)
    (tmp_path / head_files.TENSORS_FILE).unlink()
    assert FlaxModel.from_pretrained(tmp_path).draft_head is None


def test_a_head_of_its_own_brings_its_placeholders(folder: Path, tmp_path: Path) -> None:
    torch_model, _ = pair("qwen3", 3, "rnn", folder)
    torch_model.draft_head.save_pretrained(tmp_path)
    head = DraftHead.from_pretrained(tmp_path)
    model = FlaxModel.from_pretrained(folder / "qwen3-3-rnn")
    weight = model.model.embed_tokens.weight
    before = np.asarray(weight.get_raw_value())
    places = list(head.config.placeholder_token_ids)
    weight.set_raw_value(jnp.asarray(np.where(np.isin(np.arange(len(before)), places)[:, None], 0, before)))
    assert model.add_draft_head(head) is model.draft_head
    assert np.array_equal(weight.get_raw_value(), before)


def test_damaged_and_foreign_heads_are_refused(folder: Path, tmp_path: Path) -> None:
    _, model = pair("qwen3", 3, "rnn", folder)
    new_head(3, hidden_size=8).save_pretrained(tmp_path)
    head = DraftHead.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="hidden_size=8, expected the model's, 32"):
        model.add_draft_head(head)
    with pytest.raises(ValueError, match=r"head is a DraftHead|head is a GenerationConfig"):
        model.add_draft_head(GenerationConfig())
    path = tmp_path / head_files.TENSORS_FILE
    path.write_bytes(path.read_bytes()[:-8] + b"\0" * 4 + b"\1" * 4)
    with pytest.raises(ValueError, match="altered|digest|damaged"):
        DraftHead.from_pretrained(tmp_path)
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="is no safetensors file"):
        DraftHead.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="codebooks have"):
        DraftHead(head.config, [[1, 2]] * 3, arrays={})
    tensors = {name: tensor.numpy() for name, tensor in new_head(3).state_dict().items()}
    for name, kind in (("codebook_1", np.float32), ("logit_heads.0.weight", np.int64)):
        changed = tensors | {name: tensors[name].astype(kind)}
        head_files.save(safetensors.numpy, tmp_path, new_head(3).config.to_dict(), changed, card=None)
        with pytest.raises(ValueError, match=f"{name} is {np.dtype(kind)} of shape"):
            DraftHead.from_pretrained(tmp_path)
    changed = tensors | {"logit_heads.0.weight": tensors["logit_heads.0.weight"] * np.nan}
    head_files.save(safetensors.numpy, tmp_path, new_head(3).config.to_dict(), changed, card=None)
    with pytest.raises(ValueError, match="logit_heads.0.weight has NaN or infinity"):
        DraftHead.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"verification": "last_level"}, "verification='last_level', expected another one in Flax.*'torch'"),
        ({"verification": "none"}, "verification='none', expected another one in Flax"),
        ({"constraint_index": ConstraintIndex.from_sequences([[3, 4]])}, "has 2 levels and the draft head 3"),
        ({"constraint_index": ConstraintIndex.from_sequences([[3, 60, 4]])}, "has token 60 on level 2"),
        ({"input_ids": np.full((1, 126), 5)}, "126 tokens and the draft head's placeholders 3 more"),
    ],
    ids=str,
)
def test_what_a_head_cannot_is_refused(kwargs: dict[str, Any], message: str, folder: Path) -> None:
    _, model = pair("qwen3", 3, "rnn", folder)
    with pytest.raises(ValueError, match=message):
        model.generate(**{"input_ids": [[5, 6, 7]], "constraint_index": INDEX, "drafting": "head", **kwargs})
