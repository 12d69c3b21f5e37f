# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The surface in Flax: what `generate` takes, refuses and returns, against the PyTorch side on the same checkpoint."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import EOS, PAD, VOCABULARY, build, prompts

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import torch

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationConfig, enable
from hf_gr.flax.decode import decode_program
from hf_gr.flax.model import FlaxModel
from hf_gr.flax.transition import DeviceCatalogue
from hf_gr.generation import auto, flax
from hf_gr.generation.flax_outputs import FlaxGenerateOutput

SCORE_TOL = 1e-4  # fp32 sums of at most 4 log-probabilities
LENGTH = 3
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, LENGTH))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences(
    [row[: 1 + i % LENGTH].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS
)
# Deeper models are held to each other in test_flax_model.py: here programs are compiled by the dozen.
ONE_LAYER = {"t5": {"num_layers": 1}, "llama": {"num_hidden_layers": 1}, "qwen3": {"num_hidden_layers": 1}}
DETAILS = {"return_dict_in_generate": True, "output_scores": True}
BEAMS = {"num_beams": 4, "num_return_sequences": 4, **DETAILS}


@pytest.fixture(autouse=True)
def _highest_precision() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


@cache
def pair(family: str, folder: Path) -> tuple[Any, Any]:
    """One checkpoint on both sides."""
    model = enable(build(family, config=ONE_LAYER[family]))
    model.save_pretrained(folder / family)
    return model, AutoModelForGenerativeRetrieval.from_pretrained(folder / family, backend="flax")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flax")


def to_numpy(inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in inputs.items()}


def check(models: tuple[Any, Any], inputs: dict[str, torch.Tensor], **kwargs: Any) -> FlaxGenerateOutput:
    """Both sides: equal sequences, scores and fields."""
    theirs, ours = models[0].generate(**inputs, **kwargs), models[1].generate(**to_numpy(inputs), **kwargs)
    assert isinstance(ours.sequences, jax.Array)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()
    np.testing.assert_allclose(ours.sequences_scores, theirs.sequences_scores.numpy(), atol=SCORE_TOL, rtol=0)
    assert [step.shape for step in ours.scores] == [step.shape for step in theirs.scores]
    for mine, other in zip(ours.scores, theirs.scores, strict=True):
        alive = np.isfinite(other.numpy()).any(-1)
        np.testing.assert_allclose(np.asarray(mine)[alive], other.numpy()[alive], atol=SCORE_TOL, rtol=0)
    return ours


@pytest.mark.parametrize(("family", "index"), [("t5", INDEX), ("llama", RAGGED)], ids=["t5-fixed", "llama-ragged"])
def test_beams_equal_the_other_side(family: str, index: ConstraintIndex, folder: Path) -> None:
    check(pair(family, folder), prompts(3, 9, padded=True), constraint_index=index, **BEAMS)


@pytest.mark.parametrize("index", [pytest.param(INDEX, marks=pytest.mark.slow), RAGGED], ids=["fixed", "ragged"])
def test_the_second_call_of_a_bucket_compiles_nothing(index: ConstraintIndex, folder: Path) -> None:
    models = pair("qwen3", folder)
    check(models, prompts(3, 9, padded=True), constraint_index=index, **BEAMS)
    before = decode_program._cache_size()
    views = [index.where(list(range(20, 80))), index.where(list(range(200))), index, index.where([1, 2, 3])]
    check(models, prompts(4, 30, seed=1), constraint_index=index, **BEAMS)  # another length and batch, same buckets
    check(models, prompts(3, 12, seed=2), constraint_index=views[0], length_penalty=0.3, **BEAMS)
    changed = index.where(list(range(300)))
    changed.remove([4, 5])
    changed.add([[9, 9, 9], [10, 3, 3]], [1000, 1001])
    check(models, prompts(3, 12, seed=2), constraint_index=changed, pad_token_id=PAD, **BEAMS)
    assert decode_program._cache_size() == before
    excluded = [list(range(16)), [], [5]]
    check(models, prompts(3, 12), constraint_index=views[:3], exclude_items=excluded, **BEAMS)
    check(models, prompts(3, 12), constraint_index=[*views[2:], views[0]], exclude_items=[[], [1], []], **BEAMS)
    assert decode_program._cache_size() == before + 1


def test_greedy_and_renormalised_calls_equal_the_other_side(folder: Path) -> None:
    torch_model, model = pair("qwen3", folder)
    inputs = prompts(3, 9, padded=True)
    ours = model.generate(**to_numpy(inputs), constraint_index=RAGGED)
    assert ours.tolist() == torch_model.generate(**inputs, constraint_index=RAGGED).tolist()
    check((torch_model, model), inputs, constraint_index=INDEX, renormalize_logits=True, **(BEAMS | {"num_beams": 9}))


def test_fewer_sequences_than_beams_are_followed_by_padding(folder: Path) -> None:
    index = ConstraintIndex.from_sequences([[5, 9, 4], [5, 9, 6], [7, 8, 9]])
    out = check(pair("qwen3", folder), prompts(3, 6), constraint_index=index, **BEAMS)
    found = index.items(np.asarray(out.sequences)[:4, 6:])
    assert sorted(itertools.chain(*found)) == [0, 1, 2]
    assert found[3] == []
    assert out.sequences_scores.tolist()[3] == -np.inf


def test_samples_are_items_and_follow_the_key(folder: Path) -> None:
    _, model = pair("qwen3", folder)
    inputs = to_numpy(prompts(4, 8, padded=True))
    options = {"do_sample": True, "temperature": 3.0, "top_k": 20, "top_p": 0.95, "num_return_sequences": 4}
    runs = [
        model.generate(**inputs, constraint_index=INDEX, key=key, **options)
        for key in (0, jax.random.key(0), jax.random.PRNGKey(0), 1, None, None)
    ]
    assert all(INDEX.items(np.asarray(runs[0])[:, 8:]))
    assert runs[0].tolist() == runs[1].tolist() == runs[2].tolist() != runs[3].tolist()
    assert runs[4].tolist() != runs[5].tolist()
    before = decode_program._cache_size()
    model.generate(**inputs, constraint_index=INDEX, **(options | {"temperature": 0.7, "top_p": 0.5}))
    assert decode_program._cache_size() == before
    alone = model.generate(
        inputs["input_ids"][:3], attention_mask=inputs["attention_mask"][:3], constraint_index=INDEX, key=0, **options
    )
    assert alone.tolist() == runs[0][:12].tolist()


def test_inputs_may_be_lists_arrays_and_tensors_and_masks_are_inferred(folder: Path) -> None:
    _, model = pair("qwen3", folder)
    inputs = prompts(3, 9, padded=True)
    expected = model.generate(**to_numpy(inputs), constraint_index=INDEX, **BEAMS).sequences.tolist()
    for tokens in (inputs["input_ids"].tolist(), inputs["input_ids"], jnp.asarray(inputs["input_ids"].numpy())):
        assert model.generate(tokens, constraint_index=INDEX, **BEAMS).sequences.tolist() == expected


def test_a_decoder_prompt_may_lack_its_start_token(folder: Path) -> None:
    torch_model, model = pair("t5", folder)
    inputs = prompts(3, 9, padded=True)
    for start in ([[3]] * 3, [[PAD, 3]] * 3):
        theirs = torch_model.generate(
            **inputs, decoder_input_ids=torch.tensor(start), constraint_index=INDEX, num_beams=2
        )
        ours = model.generate(**to_numpy(inputs), decoder_input_ids=start, constraint_index=INDEX, num_beams=2)
        assert ours.tolist() == theirs.tolist()


def test_a_checkpoint_names_its_catalogue_and_its_defaults(tmp_path: Path) -> None:
    torch_model = enable(build("qwen3", config=ONE_LAYER["qwen3"]))
    torch_model.generation_config = GRGenerationConfig(
        constraint_index=".", num_beams=4, num_return_sequences=4, pad_token_id=PAD
    )
    torch_model.save_pretrained(tmp_path)
    INDEX.save_pretrained(tmp_path)
    model = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, backend="flax")
    assert isinstance(model.generation_config, GRGenerationConfig)
    inputs = prompts(3, 9, padded=True)
    theirs = torch_model.generate(**inputs, constraint_index=INDEX)
    assert model.generate(**to_numpy(inputs)).tolist() == theirs.tolist()
    given = GRGenerationConfig(constraint_index=str(tmp_path), num_return_sequences=1)
    assert model.generate(**to_numpy(inputs), generation_config=given).tolist() == theirs[::4].tolist()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"constraint_index": None}, "constraint_index=None, expected a ConstraintIndex.*backend='torch'"),
        ({"constraint_index": False}, "constraint_index=False"),
        ({"generation_config": INDEX}, "generation_config is a ConstraintIndex"),
        ({"logits_processor": [len]}, "logits_processor is given, expected None.*backend='torch'"),
        ({"stopping_criteria": [len]}, "stopping_criteria is given"),
        ({"streamer": len}, "streamer is given"),
        ({"inputs_embeds": np.zeros((1, 3, 4))}, "inputs_embeds is given"),
        ({"past_key_values": object()}, "past_key_values is given"),
        ({"assistant_model": object()}, "assistant_model is given"),
        ({"generator": torch.Generator()}, "generator is given, expected None in Flax: pass key="),
        ({"key": "seed", "do_sample": True}, "key='seed', expected a seed"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2, expected 1.0.*backend='torch'"),
        ({"bad_words_ids": [[3]]}, "bad_words_ids"),
        ({"drafting": "auto"}, "drafting='auto', expected None, 'trie' or 'head' in Flax.*drafting='trie'"),
        ({"drafting": "assistant"}, "drafting='assistant', expected None, 'trie' or 'head'.*backend='torch'"),
        ({"drafting": "trie", "verification": "relaxed"}, "verification='relaxed' with drafting='trie'"),
        ({"drafting": "head", "verification": "strict"}, "verification='strict' with drafting='head'"),
        ({"drafting": "head", "verification": "last_level"}, "verification='last_level' with drafting='head'"),
        ({"drafting": "head"}, "the model has no draft head"),
        ({"draft_token_budget": 5}, "draft_token_budget=5 without drafting"),
        ({"num_draft_beams": 5}, "num_draft_beams=5"),
        ({"drafting": "magic"}, "drafting='magic', expected one of"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p=0.5"),
        ({"num_beams": 0}, "num_beams=0, expected 1 or more"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "mode|num_beam_groups"),
        ({"max_new_tokens": 2}, "max_new_tokens=2 leaves 2 new tokens, expected at least 3"),
        ({"max_length": 5}, "max_length=5 leaves 2 new tokens"),
        ({"exclude_items": [[1], [2]]}, "exclude_items has 2 entries, expected 1"),
        ({"constraint_index": [INDEX, INDEX]}, "constraint_index has 2 entries, expected 1"),
        ({"constraint_index": ConstraintIndex.from_sequences([[1, 99]])}, "has token 99, expected less than"),
        ({"decoder_input_ids": [[1]]}, "decoder_input_ids is given, expected None: the model is a decoder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_refused_before_any_work(kwargs: dict[str, Any], message: str, folder: Path) -> None:
    _, model = pair("qwen3", folder)
    before = decode_program._cache_size()
    with pytest.raises(ValueError, match=message):
        model.generate([[5, 6, 7]], **{"constraint_index": INDEX, **kwargs})
    assert decode_program._cache_size() == before


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "inputs=None, expected prompts"),
        ({"inputs": [[1]], "input_ids": [[1]]}, "inputs and input_ids are given"),
        ({"inputs": [5, 6]}, r"\[2\] of int64, expected integers \[batch, length\]"),
        ({"inputs": [[5, 6], [7]]}, "ragged, expected"),
        ({"inputs": np.zeros((1, 3))}, "float64, expected integers"),
        ({"inputs": np.zeros((1, 0), int)}, "the prompt has no token"),
        ({"inputs": [[5, VOCABULARY]]}, f"has token {VOCABULARY}, expected 0 to less than {VOCABULARY}"),
        ({"inputs": [[5, 2**31 + 5]]}, f"has token {2**31 + 5}"),
        ({"inputs": [[-100, 5]]}, "has token -100"),
        ({"inputs": [[5, 6]], "attention_mask": [[1]]}, r"attention_mask is \[1, 1\], expected \[1, 2\]"),
        ({"inputs": [[5, 6]], "attention_mask": [[1, 0]]}, "prompt 0 ends with padding"),
        ({"inputs": [[5, 6], [PAD, PAD]]}, "prompt 1 is all padding"),
    ],
)
def test_bad_prompts_are_refused(kwargs: dict[str, Any], message: str, folder: Path) -> None:
    _, model = pair("qwen3", folder)
    with pytest.raises(ValueError, match=message):
        model.generate(**kwargs, constraint_index=INDEX)


def test_enable_takes_models_of_flax_and_refuses_others(folder: Path) -> None:
    model = FlaxModel.from_pretrained(folder / "qwen3") if pair("qwen3", folder) else None
    assert not isinstance(model, flax.FlaxGenerationMixin)
    assert enable(model) is model
    assert enable(model) is model
    assert isinstance(model, flax.FlaxGenerationMixin)
    assert isinstance(model, FlaxModel)
    assert type(model).__name__ == "FlaxModel"
    with pytest.raises(ValueError, match="model is a int, expected a FlaxModel"):
        flax.enable(3)


def test_backends_are_chosen_by_what_is_there(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert auto.choose_backend() == "torch"
    there = {"torch": object(), "jax": object(), "libtpu": object()}
    monkeypatch.setattr(auto, "find_spec", there.get)
    assert auto.choose_backend() == "torch"  # libtpu alone is no TPU
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert auto.choose_backend() == "flax"
    del there["libtpu"]
    assert auto.choose_backend() == "torch"
    del there["torch"]
    assert auto.choose_backend() == "flax"
    for kwargs, message in (({"device_map": "cpu"}, "device_map is given"), ({"backend": "tf"}, "backend='tf'")):
        with pytest.raises(ValueError, match=message):
            AutoModelForGenerativeRetrieval.from_pretrained(folder, **{"backend": "flax", **kwargs})
    with pytest.raises(ValueError, match="1 positional arguments"):
        AutoModelForGenerativeRetrieval.from_pretrained(folder, 3, backend="flax")


def test_a_planted_error_is_seen(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Rows that fill the bucket, a mask that is lost, a catalogue of another call."""
    models = pair("qwen3", folder)
    right = flax._to_bucket
    monkeypatch.setattr(
        flax,
        "_to_bucket",
        lambda *args: jax.tree.map(lambda a: np.ones_like(a) if a.dtype == bool else a, right(*args)),
    )
    with pytest.raises(AssertionError):
        check(models, prompts(3, 9, padded=True), constraint_index=INDEX, **BEAMS)
    monkeypatch.setattr(flax, "_to_bucket", right)

    def everything(rules: Any, *args: Any, **kwargs: Any) -> DeviceCatalogue:
        return device_catalogue(flax.batch_rules(INDEX, None), *args, **kwargs)

    device_catalogue = flax.device_catalogue
    monkeypatch.setattr(flax, "device_catalogue", everything)
    with pytest.raises(AssertionError):
        check(models, prompts(3, 9), constraint_index=INDEX.where(list(range(20, 60))), **BEAMS)
