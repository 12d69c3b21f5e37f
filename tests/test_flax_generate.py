# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The surface in Flax: what `generate` takes, compiles and returns, against PyTorch on the same checkpoint."""

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from families import FAMILIES, LLAMA, PAD, VOCABULARY, prompts
from flax_pairs import BEAMS, INDEX, RAGGED, ROWS, check, pair, processors_of, to_numpy
from transformers import GPT2Config

from hf_gr import AutoModelForGenerativeRetrieval, GRGenerationConfig, enable
from hf_gr.flax.decode import decode_program
from hf_gr.flax.families import FAMILIES as IN_FLAX
from hf_gr.flax.model import FlaxModel
from hf_gr.generation.flax import mixin as flax
from hf_gr.generation.flax.call import Call
from hf_gr.generation.flax.loading import enable as enable_flax

LENGTH = 3
WHOLE = BEAMS | {"output_logits": True}  # one program for all tests that can have it
ITEMS: dict[str, Any] = {"constraint_index": RAGGED, **WHOLE}


def test_the_second_call_of_a_bucket_compiles_nothing() -> None:
    models, padded = pair("qwen3"), prompts(3, 9, padded=True)
    check(models, padded, **ITEMS)
    before = decode_program._cache_size()
    views = [RAGGED.where(list(range(20, 80))), RAGGED.where(list(range(200))), RAGGED, RAGGED.where([1, 2, 3])]
    check(models, prompts(4, 30, seed=1), **ITEMS)  # another length and batch, same buckets
    check(models, prompts(3, 12, seed=2), **ITEMS | {"constraint_index": views[0]}, length_penalty=0.3)
    first_length = RAGGED.where(list(range(0, 300, LENGTH)))  # outputs end with the longest sequence
    check(models, prompts(3, 12, seed=2), **ITEMS | {"constraint_index": first_length})
    changed = RAGGED.where(list(range(300)))
    changed.remove([4, 5])
    changed.add([[9, 9, 9], [10, 3, 3]], [1000, 1001])
    check(models, prompts(3, 12, seed=2), **ITEMS | {"constraint_index": changed}, pad_token_id=PAD)
    few = check(models, padded, **ITEMS | {"constraint_index": views[3]})  # fewer sequences than beams
    assert sorted(few.item_ids[:4]) == [[], [1], [2], [3]]
    assert few.item_ids == pickle.loads(pickle.dumps(few)).item_ids
    assert few.sequences_scores.tolist()[3] == -np.inf
    numbers = ITEMS | {"num_beams": np.int64(4)}
    for tokens in (padded["input_ids"].tolist(), padded["input_ids"], jnp.asarray(padded["input_ids"].numpy())):
        with jax.default_matmul_precision("highest"):
            found = models[1].generate(tokens, **numbers)  # the mask is inferred
        assert found.sequences.tolist() == models[0].generate(**padded, **ITEMS).sequences.tolist()
    assert decode_program._cache_size() == before
    excluded = [list(range(16)), [], [5]]
    check(models, prompts(3, 12), **ITEMS | {"constraint_index": views[:3]}, exclude_items=excluded)
    views = [*views[2:], views[0]]
    check(models, prompts(3, 12), **ITEMS | {"constraint_index": views}, exclude_items=[[], [1], []])
    assert decode_program._cache_size() == before + 1


QUICK = ("gemma3_text", "bart")  # windows in a decoder; an encoder-decoder with learned positions
FIELDS: dict[str, dict[str, Any]] = {"phi3": {"sliding_window": 3}, "gemma2": {"attn_logit_softcapping": 2.0}}


@pytest.mark.parametrize(
    "family",
    [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in sorted(IN_FLAX)],
)
def test_every_family_answers_as_in_pytorch(family: str) -> None:
    models = pair(family, layers=2, **FIELDS.get(family) or ({} if family in FAMILIES else LLAMA))
    how = {"constraint_index": RAGGED} if family in QUICK else {"constraint_index": INDEX, "drafting": "trie"}
    check(models, prompts(3, 9, padded=True), **how, **BEAMS)


def test_samples_follow_the_seed_and_the_row_alone() -> None:
    torch_model, model, _ = pair("qwen3")
    inputs = to_numpy(prompts(4, 8, padded=True))
    options = {"do_sample": True, "temperature": 3.0, "top_k": 20, "top_p": 0.95, "num_return_sequences": 4}
    options["constraint_index"] = INDEX
    keys = (0, jax.random.key(0), jax.random.PRNGKey(0), np.int64(1), None, None)
    runs = [model.generate(**inputs, key=key, **options).tolist() for key in keys]
    assert all(INDEX.items(np.array(runs[0])[:, 8:]))
    assert runs[0] == runs[1] == runs[2] != runs[3]
    assert runs[4] != runs[5]
    before = decode_program._cache_size()
    model.generate(**inputs, **(options | {"temperature": 0.7, "top_p": 0.5}))
    assert decode_program._cache_size() == before
    three = {name: values[:3] for name, values in inputs.items()}
    assert model.generate(**three, key=0, **options).tolist() == runs[0][:12]
    twins = {name: np.repeat(value[-1:], 4, axis=0) for name, value in inputs.items()}
    out = np.asarray(model.generate(**twins, key=0, **options)).reshape(4, -1)
    assert len(np.unique(out, axis=0)) > 1  # rows draw for themselves
    for seed in (7, [7, 8, 2**63 - 1, -5]):
        ours = model.generate(**inputs, seed=seed, **options)
        assert ours.tolist() == torch_model.generate(**prompts(4, 8, padded=True), seed=seed, **options).tolist()


def test_a_decoder_prompt_may_lack_its_start_token() -> None:
    torch_model, model, _ = pair("t5")
    inputs = prompts(3, 9, padded=True)
    options: dict[str, Any] = {"constraint_index": INDEX, "num_beams": 2, "max_length": 2 + LENGTH}
    # One start token is enough.
    for start in ([[3]] * 3, [[PAD, 3]] * 3, [[PAD, 3], [3, 4], [PAD, 5]]):
        theirs = torch_model.generate(**inputs, decoder_input_ids=torch.tensor(start), **options)
        assert model.generate(**to_numpy(inputs), decoder_input_ids=start, **options).tolist() == theirs.tolist()
    # transformers infers no padding of an encoder's prompt.
    theirs = torch_model.generate(inputs["input_ids"], decoder_input_ids=torch.tensor(start), **options)
    assert model.generate(inputs["input_ids"], decoder_input_ids=start, **options).tolist() == theirs.tolist()
    for token in (VOCABULARY, -1, 2**40):
        with pytest.raises(ValueError, match=f"decoder_start_token_id={token}, expected 0 to less than {VOCABULARY}"):
            model.generate(**to_numpy(inputs), constraint_index=INDEX, decoder_start_token_id=token)
    with pytest.raises(ValueError, match="prompt 1 is all padding"):
        model.generate([[5], [6]], attention_mask=[[1], [0]], constraint_index=INDEX)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans of calls, which decode nothing."""
    found: list[Any] = []
    monkeypatch.setattr(Call, "answer", lambda *args, **kwargs: None)
    monkeypatch.setattr(flax, "decode_program", lambda *args: found.append(args[4]))
    return found


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 3, "max_length": 10**30},  # what tokenizers call no limit
        {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"do_sample": True, "num_beams": 3, "top_p": 0.9, "min_p": 0.1, "eos_token_id": [2, 5, 6]},
        {"do_sample": True, "num_beams": 2, "temperature": 1.0, "top_p": 1.0},
    ],
    ids=str,
)
def test_warpers_are_planned_as_by_transformers(kwargs: dict[str, Any], plans: list[Any]) -> None:
    torch_model, model, _ = pair("qwen3")
    model.generate([[5, 6]], constraint_index=INDEX, **kwargs)
    config, _ = torch_model._prepare_generation_config(None, **kwargs)
    torch_model._prepare_special_tokens(config, device="cpu")
    theirs = torch_model._get_logits_processor(config)
    ours = processors_of(plans[0])
    assert [type(one) for one in ours] == [type(other) for other in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert vars(one) == pytest.approx(vars(other))


def test_a_budget_bounds_what_is_drafted(plans: list[Any]) -> None:
    _, model, _ = pair("qwen3")
    index = INDEX.where(list(range(len(ROWS))))
    for budget in (None, 64, 64, 20, 8):
        model.generate([[5, 6]], constraint_index=index, num_beams=4, drafting="trie", draft_token_budget=budget)
        if len(plans) == 2:
            index.add([[24, 3, 4], [24, 4, 4], [23, 24, 25]], [1000, 1001, 1002])
    # With the prompt all nodes are scored, those of the first token alone, of which there are 21, or none.
    drafters = [plan.drafter for plan in plans]
    assert [drafter.num_first for drafter in drafters] == [2, 1, 1, 0, 0]
    assert drafters[0].sizes[0] >= len(np.unique(ROWS[:, :1])) + len(np.unique(ROWS[:, :2], axis=0))
    assert drafters[1] == drafters[2]  # few additions need no other program
    assert [drafter.sizes for drafter in drafters[1:]] == [(22, 0, 0), (22, 0, 0), (0, 20, 0), (0, 8, 0)]


def test_a_checkpoint_names_its_catalogue_and_its_defaults(tmp_path: Path) -> None:
    torch_model = AutoModelForGenerativeRetrieval.from_pretrained(pair("qwen3")[2], backend="torch")
    own = GRGenerationConfig(constraint_index=".", num_beams=4, num_return_sequences=4, pad_token_id=PAD)
    torch_model.generation_config = own
    torch_model.save_pretrained(tmp_path)
    RAGGED.save_pretrained(tmp_path)
    model, inputs = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, backend="flax"), prompts(3, 9)
    out = model.generate(**to_numpy(inputs), return_dict_in_generate=True)
    assert out.sequences.tolist() == torch_model.generate(**inputs, constraint_index=RAGGED).tolist()
    # Scores are given where they are asked for.
    assert out.keys() == {"sequences", "beam_indices", "num_proven", "speculation"}
    other = RAGGED.where(list(range(50)))
    other.save_pretrained(tmp_path / "other")
    given = GRGenerationConfig(constraint_index=str(tmp_path / "other"), length_penalty=0.5)
    theirs = torch_model.generate(**inputs, constraint_index=other, length_penalty=0.5)
    assert model.generate(**to_numpy(inputs), generation_config=given).tolist() == theirs.tolist()


def test_what_a_caller_has_set_in_jax_changes_nothing() -> None:
    _, model, _ = pair("qwen3")
    call: dict[str, Any] = {
        "constraint_index": INDEX.where(list(range(50))),
        "num_beams": 3,
        "renormalize_logits": True,
    }
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        found = np.asarray(model.generate([[5, 6, 7]], **call))
    before = decode_program._cache_size()
    assert np.array_equal(model.generate([[5, 6, 7]], **call), found)
    assert decode_program._cache_size() == before
    with pytest.raises(ValueError, match="the prompt is traced, expected arrays: generate is one program already"):
        jax.jit(lambda tokens: model.generate(tokens, **call))(jnp.ones((1, 3), int))


def test_generated_tokens_count_towards_learned_positions(plans: list[Any]) -> None:
    """All but the last, which is not computed."""
    model = enable(FlaxModel(GPT2Config(vocab_size=24, n_embd=8, n_layer=1, n_head=2, n_positions=8)))
    model.generate([[5] * 6], constraint_index=INDEX)
    with pytest.raises(ValueError, match="sequences have 9 tokens, expected at most 8"):
        model.generate([[5] * 7], constraint_index=INDEX)
    assert len(plans) == 1


def test_enable_takes_models_of_flax_and_refuses_others() -> None:
    model = FlaxModel.from_pretrained(pair("qwen3")[2])
    assert not isinstance(model, flax.FlaxGenerationMixin)
    assert enable(model) is enable(model) is model
    assert isinstance(model, flax.FlaxGenerationMixin)
    assert type(model).__name__ == "FlaxModel"
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert np.array_equal(again(np.array([[5, 6, 7]])), model(np.array([[5, 6, 7]])))
    with pytest.raises(ValueError, match="model is a int, expected a FlaxModel"):
        enable_flax(3)
