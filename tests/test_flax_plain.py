# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation without a catalogue in Flax: transformers' own `generate`, of the same checkpoint, is the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
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
from transformers import GenerationConfig, GPT2Config

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable
from hf_gr.flax import plain
from hf_gr.flax.model import FlaxModel
from hf_gr.flax.plain import plain_program
from hf_gr.generation.flax import plain as calls
from hf_gr.generation.flax.call import make_plan

SCORE_TOL = 1e-4  # fp32 sums of at most 16 log-probabilities
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ENDS = {"eos_token_id": [EOS, 5, 6, 45, 60, 62], "pad_token_id": PAD}  # so that paths end at several lengths
BEAMS = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 12, **ENDS, **DETAILS}
GREEDY = {"max_new_tokens": 12, **ENDS, **DETAILS}


@pytest.fixture(autouse=True)
def _highest_precision() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


@cache
def pair(family: str, folder: Path) -> tuple[Any, Any]:
    """One checkpoint on both sides."""
    model = enable(build(family, config={"num_layers" if family == "t5" else "num_hidden_layers": 1}))
    model.save_pretrained(folder / family)
    return model, AutoModelForGenerativeRetrieval.from_pretrained(folder / family, backend="flax")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flax")


def check(models: tuple[Any, Any], inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    """Both sides: equal tokens, beams, scores and fields of every step."""
    given = {name: value.numpy() for name, value in inputs.items()}
    theirs, ours = models[0].generate(**inputs, **kwargs), models[1].generate(**given, **kwargs)
    assert isinstance(ours.sequences, jax.Array)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.item_ids is None
    if kwargs.get("num_beams", 1) > 1:
        assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()
        np.testing.assert_allclose(ours.sequences_scores, theirs.sequences_scores.numpy(), atol=SCORE_TOL)
    for mine, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        np.testing.assert_allclose(np.stack(mine), torch.stack(other).numpy(), atol=SCORE_TOL)
    return ours


@pytest.mark.parametrize("family", ["qwen3", pytest.param("t5", marks=pytest.mark.slow)])
def test_beams_equal_transformers(family: str, folder: Path) -> None:
    models = pair(family, folder)
    found = check(models, prompts(3, 9, padded=True), **BEAMS)
    lengths = (np.asarray(found.beam_indices) >= 0).sum(-1)
    assert len(set(lengths.tolist())) > 1  # some end before others
    before = plain_program._cache_size()
    check(models, prompts(4, 20, seed=1), **(BEAMS | {"max_new_tokens": 15}))
    check(models, prompts(3, 9, padded=True), **(BEAMS | {"max_new_tokens": 1, "length_penalty": -0.5}))
    assert plain_program._cache_size() == before


@pytest.mark.parametrize("early_stopping", [pytest.param(True, marks=pytest.mark.slow), "never"])
def test_beams_stop_as_those_of_transformers_do(early_stopping: bool | str, folder: Path) -> None:
    models, inputs = pair("qwen3", folder), prompts(3, 9, padded=True)
    for penalty in (1.0, -1.0, 2.5):
        check(models, inputs, **BEAMS, early_stopping=early_stopping, length_penalty=penalty)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("t5", marks=pytest.mark.slow)])
def test_greedy_tokens_equal_transformers(family: str, folder: Path) -> None:
    models, inputs = pair(family, folder), prompts(3, 9, padded=True)
    found = check(models, inputs, **GREEDY)
    new = np.asarray(found.sequences)[:, -4:]
    before = plain_program._cache_size()
    check(models, inputs, **(GREEDY | {"pad_token_id": 3, "eos_token_id": [13, 17], "max_new_tokens": 16}))
    check(models, inputs, **(GREEDY | {"eos_token_id": new[:, 0].tolist()}))
    assert plain_program._cache_size() == before
    start = 1 if family == "t5" else 9
    alone = {name: value for name, value in (GREEDY | {"max_length": start + 7}).items() if name != "max_new_tokens"}
    check(models, inputs, **alone)
    assert plain_program._cache_size() == before


def test_without_an_end_all_tokens_are_generated(folder: Path) -> None:
    models, inputs = pair("qwen3", folder), prompts(2, 5)
    with pytest.warns(UserWarning, match="default `max_length`"):
        theirs = models[0].generate(**inputs)
    with pytest.warns(UserWarning, match="no length is given: at most 20 tokens"):
        found = models[1].generate(inputs["input_ids"].numpy())
    assert found.tolist() == theirs.tolist()
    assert found.shape == (2, 25)


def test_processors_and_criteria_equal_transformers(folder: Path) -> None:
    models, inputs = pair("qwen3", folder), prompts(3, 9)

    def stop(tokens: Any, scores: Any) -> Any:
        return tokens[:, -1] % 5 == 0

    options = {
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[10], [11, 12]],
        "sequence_bias": [[[9], 2.0]],
        "suppress_tokens": [5, 6],
        "begin_suppress_tokens": [20, 21],
        "min_new_tokens": 5,
        "exponential_decay_length_penalty": (6, 1.3),
        "forced_eos_token_id": EOS,
    }
    plain_tokens = models[0].generate(**inputs, **BEAMS).sequences.tolist()
    found = check(models, inputs, **BEAMS, **options)
    assert found.sequences.tolist() != plain_tokens
    before = plain_program._cache_size()
    check(models, inputs, **BEAMS, **(options | {"repetition_penalty": 0.8, "min_new_tokens": 12}))
    assert plain_program._cache_size() == before
    given = {name: value.numpy() for name, value in inputs.items()}
    for how in ({"num_beams": 2, "max_new_tokens": 9}, {"max_new_tokens": 9}):  # no end: paths go on until all stop
        theirs = models[0].generate(**inputs, **how, stopping_criteria=[stop])
        assert models[1].generate(**given, **how, stopping_criteria=[stop]).tolist() == theirs.tolist()


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "num_return_sequences": 3, "top_p": 0.9, "temperature": 2.0},
        pytest.param({"num_return_sequences": 4}, marks=pytest.mark.slow),
    ],
    ids=["beams", "paths"],
)
def test_samples_are_those_of_a_catalogue_of_everything(how: dict[str, Any], folder: Path) -> None:
    """In PyTorch: the same noise, wherever all tokens are legal."""
    models, inputs = pair("qwen3", folder), prompts(3, 9, padded=True)
    given = {name: value.numpy() for name, value in inputs.items()}
    index = ConstraintIndex.from_sequences(np.array(list(itertools.product(range(VOCABULARY), repeat=2))))
    drawn = set()
    for seed in (7, [1, 2, 3]):
        options = {"do_sample": True, "top_k": 0, "seed": seed, **how}
        theirs = models[0].generate(**inputs, constraint_index=index, **options)
        found = models[1].generate(**given, max_new_tokens=2, return_dict_in_generate=True, **options)
        assert found.sequences.tolist() == theirs.tolist()
        assert found.seeds[:1] == [7 if seed == 7 else 1]
        drawn.add(str(theirs.tolist()))
    assert len(drawn) == 2


def test_samples_follow_softmax(folder: Path) -> None:
    """By their frequencies: of 4,096 samples of one token each."""
    _, model = pair("qwen3", folder)
    prompt = np.repeat(prompts(1, 5)["input_ids"].numpy(), 256, axis=0)
    options = {"do_sample": True, "temperature": 2.0, "top_k": 0, "num_return_sequences": 16}
    found = model.generate(prompt, max_new_tokens=1, seed=3, **options)
    expected = np.asarray(jax.nn.softmax(model(prompt[:1])[0, -1] / 2.0))
    counts = np.bincount(np.asarray(found)[:, -1], minlength=VOCABULARY)
    spread = np.sqrt(expected * (1 - expected) * len(found))
    assert len(found) == 4096
    assert (np.abs(counts - expected * len(found)) < 5 * spread + 1).all()


def test_the_only_sample_left_is_the_greedy_one(folder: Path) -> None:
    models, inputs = pair("qwen3", folder), prompts(3, 9, padded=True)
    check(models, inputs, **GREEDY, do_sample=True, top_k=1)


def test_a_checkpoints_verification_changes_nothing() -> None:
    config = GenerationConfig(num_beams=2, num_return_sequences=1)
    config.verification = "relaxed"  # pyright: ignore[reportAttributeAccessIssue]
    plan = make_plan(config, None, 4)
    assert (plan.is_relaxed, plan.num_kept) == (False, 4)
    config.num_beams = 1
    assert not make_plan(config, None, 4).is_beam_search


def test_a_checkpoints_config_is_followed_and_false_switches_its_catalogue_off(folder: Path) -> None:
    torch_model, model = pair("t5", folder)
    inputs = prompts(2, 6)
    config = GenerationConfig(max_new_tokens=3, num_beams=2, pad_token_id=0, eos_token_id=[EOS, 9], do_sample=False)
    given = {name: value.numpy() for name, value in inputs.items()}
    theirs = torch_model.generate(**inputs, generation_config=config, decoder_input_ids=torch.tensor([[1, 4], [1, 5]]))
    start = [[1, 4], [1, 5]]
    ours = model.generate(**given, generation_config=config, decoder_input_ids=start, constraint_index=False)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens` must be greater than 0"),
        ({"max_new_tokens": -2}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5, expected an int"),
        ({"max_length": 3}, "max_length=3 leaves 0 new tokens after a prompt of 3"),
        ({"max_new_token": 3}, "max_new_token is given, expected None"),
        ({"num_beam": 3}, "num_beam is given"),
        ({"drafting": "trie"}, "drafting given without constraint_index"),
        ({"exclude_items": [[1]]}, "exclude_items given without constraint_index"),
        ({"assistant_model": object()}, "assistant_model given without constraint_index"),
        ({"streamer": object()}, "streamer is given, expected None"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "mode|penalty_alpha"),
        ({"prompt_lookup_num_tokens": 3}, "mode|prompt_lookup_num_tokens"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p=0.5, expected 1.0: not supported in Flax"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0.0"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0, expected 1.0: not supported in Flax"),
        ({"max_time": 2.0}, "max_time=2.0, expected None"),
        ({"stop_strings": ["."]}, "stop_strings"),
        ({"num_beams": 0}, "num_beams=0, expected an int, 1 or more"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
        ({"seed": 1, "key": 1, "do_sample": True}, "seed and key are given"),
        ({"inputs": np.zeros((1, 0), int)}, "the prompt has no token"),
        ({"inputs": [[5, 6]], "attention_mask": [[1, 0]]}, "prompt 0 ends with padding"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_refused_before_any_work(
    kwargs: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair("qwen3", folder)
    monkeypatch.setattr(calls, "plain_program", lambda *args: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=message):
        model.generate(**{"inputs": [[5, 6, 7]], **kwargs})


def test_positions_bound_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token is not read."""
    sizes = {"vocab_size": 24, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = enable(FlaxModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)))
    monkeypatch.setattr(calls, "plain_program", lambda *args: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises((ValueError, NotImplementedError), match="n_positions|max_position_embeddings|positions"):
        model.generate([[5] * 6], max_new_tokens=4)
    with pytest.raises(InterruptedError):
        model.generate([[5] * 6], max_new_tokens=3)


@pytest.mark.parametrize("planted", ["ancestors", pytest.param("ends", marks=pytest.mark.slow)])
def test_a_planted_error_is_seen(planted: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Beams that see the tokens of others, and paths that only their length ends."""
    right = {name: getattr(plain, name) for name in ("_score", "_ended")}

    def see_the_first(scorer: Any, params: Any, state: Any, plan: Any) -> Any:
        beams = replace(state.beams, beam_indices=jnp.zeros_like(state.beams.beam_indices))
        return right["_score"](scorer, params, replace(state, beams=beams), plan)

    def end_nothing(kept: Any, step: Any, plan: Any) -> Any:
        return right["_ended"](kept, step, replace(plan, ends=plan.ends & False))

    name, wrong = {"ancestors": ("_score", see_the_first), "ends": ("_ended", end_nothing)}[planted]
    monkeypatch.setattr(plain, name, wrong)
    returned = {"num_return_sequences": 1 if planted == "ends" else 2}  # no other test has such a program
    with pytest.raises(AssertionError):
        check(pair("qwen3", folder), prompts(3, 9), **(BEAMS | returned))
