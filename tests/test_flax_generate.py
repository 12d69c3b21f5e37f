# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The surface in Flax: what `generate` takes, refuses and returns, against the PyTorch side on the same checkpoint."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from families import EOS, PAD, VOCABULARY, build, prompts

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import torch
from flax_warpers import processors_of
from transformers import GPT2Config

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationConfig, enable
from hf_gr.flax.decode import decode_program
from hf_gr.flax.model import FlaxModel
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.transition import DeviceCatalogue
from hf_gr.generation import auto
from hf_gr.generation.flax import mixin as flax
from hf_gr.generation.flax.call import Call, make_plan
from hf_gr.generation.flax.drafts import Draft, HeadDraft
from hf_gr.generation.flax.loading import enable as enable_flax
from hf_gr.generation.flax.outputs import FlaxGenerateOutput
from hf_gr.generation.models import fill_token
from hf_gr.generation.named_catalogues import batch_rules
from hf_gr.generation.torch import mixin
from hf_gr.generation.torch.logits_process import OfLiving
from hf_gr.torch.decode import DecodePlan as TorchPlan

SCORE_TOL = 1e-4  # fp32 sums of at most 4 log-probabilities
LENGTH = 3
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, LENGTH))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences(
    [row[: 1 + i % LENGTH].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS
)
LIVE = ConstraintIndex.from_sequences(ROWS[:200])
LIVE.add(ROWS[200:], range(200, 300))
LIVE.remove(range(0, 300, 7))
# Deeper models are held to each other in test_flax_model.py: here programs are compiled by the dozen.
ONE_LAYER = {"t5": {"num_layers": 1}, "llama": {"num_hidden_layers": 1}, "qwen3": {"num_hidden_layers": 1}}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
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
    assert ours.item_ids == theirs.item_ids
    np.testing.assert_allclose(ours.sequences_scores, theirs.sequences_scores.numpy(), atol=SCORE_TOL, rtol=0)
    assert [step.shape for step in ours.scores] == [step.shape for step in theirs.scores]
    for level, scores in enumerate(theirs.scores):
        alive = np.isfinite(scores.numpy()).any(-1)
        for mine, other in ((ours.scores[level], scores), (ours.logits[level], theirs.logits[level])):
            np.testing.assert_allclose(np.asarray(mine)[alive], other.numpy()[alive], atol=SCORE_TOL, rtol=0)
    return ours


@pytest.mark.parametrize("index", [pytest.param(INDEX, marks=pytest.mark.slow), RAGGED], ids=["fixed", "ragged"])
def test_the_second_call_of_a_bucket_compiles_nothing(index: ConstraintIndex, folder: Path) -> None:
    models = pair("qwen3", folder)
    check(models, prompts(3, 9, padded=True), constraint_index=index, **BEAMS)
    before = decode_program._cache_size()
    views = [index.where(list(range(20, 80))), index.where(list(range(200))), index, index.where([1, 2, 3])]
    check(models, prompts(4, 30, seed=1), constraint_index=index, **BEAMS)  # another length and batch, same buckets
    check(models, prompts(3, 12, seed=2), constraint_index=views[0], length_penalty=0.3, **BEAMS)
    first_length = index.where(list(range(0, 300, LENGTH)))  # of ragged ones: outputs end with the longest
    check(models, prompts(3, 12, seed=2), constraint_index=first_length, **BEAMS)
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
    index = INDEX.where([1, 2, 3])
    out = check(pair("qwen3", folder), prompts(3, 6), constraint_index=index, **BEAMS)
    found = index.items(np.asarray(out.sequences)[:4, 6:])
    assert sorted(itertools.chain(*found)) == [1, 2, 3]
    assert found[3] == []
    assert out.item_ids[:4] == pickle.loads(pickle.dumps(out)).item_ids[:4] == found
    assert out.sequences_scores.tolist()[3] == -np.inf


def test_samples_are_items_and_follow_the_seed(folder: Path) -> None:
    torch_model, model = pair("qwen3", folder)
    inputs = to_numpy(prompts(4, 8, padded=True))
    options = {"do_sample": True, "temperature": 3.0, "top_k": 20, "top_p": 0.95, "num_return_sequences": 4}
    runs = [
        model.generate(**inputs, constraint_index=INDEX, key=key, **options)
        for key in (0, jax.random.key(0), jax.random.PRNGKey(0), np.int64(1), None, None)
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
    twins = {name: np.repeat(value[-1:], 4, axis=0) for name, value in inputs.items()}
    out = np.asarray(model.generate(**twins, constraint_index=INDEX, key=0, **options)).reshape(4, -1)
    assert len(np.unique(out, axis=0)) > 1  # rows draw for themselves
    for seed in (7, [7, 8, 2**63 - 1, -5]):
        ours = model.generate(**inputs, constraint_index=INDEX, seed=seed, **options)
        theirs = torch_model.generate(**prompts(4, 8, padded=True), constraint_index=INDEX, seed=seed, **options)
        assert ours.tolist() == theirs.tolist() != runs[0].tolist()


@pytest.mark.slow
def test_one_seed_gives_the_samples_of_the_other_side(folder: Path) -> None:
    """Of a catalogue with additions and exclusions; `test_backends.py` draws from others."""
    inputs = prompts(3, 9, padded=True)
    options = {"constraint_index": LIVE, "exclude_items": [[1, 250], [], [3]], "do_sample": True, "temperature": 2.0}
    options |= {"top_k": 0, "min_p": 0.01, "num_return_sequences": 4, "return_dict_in_generate": True}
    torch_model, model = pair("qwen3", folder)
    drawn = set()
    for seed in (7, [7, 8, 2**63 - 1], np.array([-1, 0, 1])):
        theirs = torch_model.generate(**inputs, **options, seed=seed)
        ours = model.generate(**to_numpy(inputs), **options, seed=seed)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        assert ours.seeds == theirs.seeds
        drawn.add(str(ours.sequences.tolist()))
    assert len(drawn) == 3


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
    # One start token is enough; and transformers infers no padding of an encoder's prompt.
    start, length = [[PAD, 3], [3, 4], [PAD, 5]], 2 + LENGTH
    options = {"constraint_index": INDEX, "num_beams": 2, "max_length": length}
    theirs = torch_model.generate(inputs["input_ids"], decoder_input_ids=torch.tensor(start), **options)
    ours = model.generate(inputs["input_ids"], decoder_input_ids=start, **options)
    assert ours.tolist() == theirs.tolist()
    for token in (VOCABULARY, -1, 2**40):
        with pytest.raises(ValueError, match=f"decoder_start_token_id={token}, expected 0 to less than {VOCABULARY}"):
            model.generate(**to_numpy(inputs), constraint_index=INDEX, decoder_start_token_id=token)
    with pytest.raises(ValueError, match="prompt 1 is all padding"):
        model.generate([[5], [6]], attention_mask=[[1], [0]], constraint_index=INDEX)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"pad_token_id": 7, "output_scores": True},
        {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True, "length_penalty": -0.5, **DETAILS},
        {"num_beams": 3, "early_stopping": "never", "max_new_tokens": 9, "eos_token_id": [EOS, 5, 6]},
        {"num_beams": 3, "max_length": 10**30},  # what tokenizers call no limit
        {"num_beams": 3, "max_length": 20, "pad_token_id": None, "eos_token_id": EOS, "renormalize_logits": True},
        {"num_beams": 3, "pad_token_id": 5, "constraint_index": ConstraintIndex.from_sequences([[5, 5], [6, 7]])},
        {"num_beams": 3, "forced_eos_token_id": [EOS, 7], "constraint_index": RAGGED},
        {"num_beams": 3, "forced_eos_token_id": EOS, "constraint_index": RAGGED, "max_new_tokens": 9},
        {"num_beams": 3, "forced_eos_token_id": EOS},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"do_sample": True, "num_beams": 3, "top_p": 0.9, "min_p": 0.1, "eos_token_id": [EOS, 5, 6]},
        {"do_sample": True, "num_beams": 2, "temperature": 1.0, "top_p": 1.0},
    ],
    ids=str,
)
def test_both_sides_plan_the_same(kwargs: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field by field, as plans are handed over: nothing is decoded, or compiled."""
    plans: list[Any] = []

    def stop(*args: Any) -> None:
        plans.extend(arg for arg in args if isinstance(arg, (DecodePlan, TorchPlan)))
        raise InterruptedError

    monkeypatch.setattr(mixin, "decode", stop)
    monkeypatch.setattr(flax, "decode_program", stop)
    for model, tokens in zip(pair("qwen3", folder), (torch.tensor([[5, 6]]), [[5, 6]]), strict=True):
        with pytest.raises(InterruptedError):
            model.generate(tokens, **{"constraint_index": INDEX, **kwargs})
    theirs, ours = plans
    names = {field.name for field in fields(ours)} & {field.name for field in fields(theirs)}
    names -= {"exit_early", "processors"}  # the warpers of one side are among the processors of the other
    assert ours.processors is None
    assert len(names) >= 11
    for name in names:
        expected = getattr(theirs, name)
        expected = min(expected, 2**31 - 1) if name == "max_new_tokens" else expected
        assert getattr(ours, name) == pytest.approx(expected), name
    mine, others = processors_of(ours), list(itertools.chain(*(theirs.processors or ())))
    assert [type(processor) for processor in mine] == [type(processor) for processor in others]
    for one, other in zip(mine, others, strict=True):
        if isinstance(one, OfLiving):
            one, other = one.inner, other.inner
            assert type(one) is type(other)
        assert vars(one) == pytest.approx(vars(other))


def test_a_budget_bounds_what_is_drafted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("qwen3", folder)
    drafters: list[Any] = []
    monkeypatch.setattr(Call, "answer", lambda *args, **kwargs: None)
    monkeypatch.setattr(flax, "decode_program", lambda *args: drafters.append(args[4].drafter))
    index = INDEX.where(list(range(len(ROWS))))
    for budget in (None, 64, 64, 20, 8):
        model.generate([[5, 6]], constraint_index=index, num_beams=4, drafting="trie", draft_token_budget=budget)
        if len(drafters) == 2:
            index.add([[24, 3, 4], [24, 4, 4], [23, 24, 25]], [1000, 1001, 1002])
    # With the prompt all nodes are scored, those of the first token alone, of which there are 21, or none.
    assert [drafter and drafter.num_first for drafter in drafters] == [2, 1, 1, 0, 0]
    assert drafters[0].sizes[0] >= len(np.unique(ROWS[:, :1])) + len(np.unique(ROWS[:, :2], axis=0))
    assert drafters[1] == drafters[2]  # few additions need no other program
    assert drafters[1].sizes == (22, 0, 0)
    assert drafters[3].sizes == (0, 20, 0)
    assert drafters[4].sizes == (0, 8, 0)


@pytest.mark.parametrize("output", ["output_scores", "output_logits", None])
def test_a_head_scores_the_vocabulary_where_that_is_put_out(output: str | None) -> None:
    config = GRGenerationConfig(drafting="head", length_penalty=1.0, num_beams=2, num_return_sequences=2)
    config.verification = "catalogue"
    config.return_dict_in_generate = True
    if output is not None:
        setattr(config, output, True)
    head = SimpleNamespace(config=None, params_on=lambda devices: None)
    model = SimpleNamespace(
        draft_head=head, scorer=None, params_on=head.params_on, spec=SimpleNamespace(vocab_size=VOCABULARY)
    )
    config.max_new_tokens = LENGTH
    scorer, _ = HeadDraft(model, config).scorer(make_plan(config, INDEX.snapshot), None)
    assert scorer.vocab_size == (None if output is None else VOCABULARY)


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
    out = model.generate(**to_numpy(inputs), return_dict_in_generate=True)
    assert out.sequences.tolist() == theirs.tolist()
    assert out.keys() == {"sequences", "beam_indices", "speculation"}  # scores are given where they are asked for
    other = ConstraintIndex.from_sequences(26 - ROWS)
    other.save_pretrained(tmp_path / "other")
    theirs = torch_model.generate(**inputs, constraint_index=other, num_return_sequences=1)
    given = GRGenerationConfig(constraint_index=str(tmp_path / "other"), num_return_sequences=1)
    assert model.generate(**to_numpy(inputs), generation_config=given).tolist() == theirs.tolist()


def test_a_call_that_is_traced_is_refused(folder: Path) -> None:
    _, model = pair("qwen3", folder)
    with pytest.raises(ValueError, match="the prompt is traced, expected arrays: generate is one program already"):
        jax.jit(lambda tokens: model.generate(tokens, constraint_index=INDEX))(jnp.ones((1, 3), int))


def test_what_a_caller_has_set_in_jax_changes_nothing(folder: Path) -> None:
    """Before and after the program is made."""
    _, model = pair("qwen3", folder)
    call: dict[str, Any] = {
        "constraint_index": INDEX.where(list(range(50))),
        "num_beams": 3,
        "renormalize_logits": True,
    }
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard("disallow"),
    ):
        found = np.asarray(model.generate([[5, 6, 7]], **call))
    before = decode_program._cache_size()
    assert np.array_equal(model.generate([[5, 6, 7]], **call), found)
    assert decode_program._cache_size() == before


def test_generated_tokens_count_towards_learned_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last, which is not computed."""
    config = GPT2Config(vocab_size=24, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    model = enable(FlaxModel(config))
    monkeypatch.setattr(flax, "decode_program", lambda *args: pytest.fail("work was done"))
    with pytest.raises(ValueError, match="sequences have 9 tokens, expected at most 8"):
        model.generate([[5] * 7], constraint_index=INDEX)
    monkeypatch.setattr(flax, "decode_program", lambda *args: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        model.generate([[5] * 6], constraint_index=INDEX)


def test_a_checkpoint_may_say_what_flax_does_not_need() -> None:
    config: Any = GRGenerationConfig(num_draft_beams=8, draft_token_budget=9, verification="strict")
    Draft(None, config).check(None, INDEX.snapshot, {}, {})
    assert fill_token(GRGenerationConfig(eos_token_id=[])) == -1


def test_enable_takes_models_of_flax_and_refuses_others(folder: Path) -> None:
    model = FlaxModel.from_pretrained(folder / "qwen3") if pair("qwen3", folder) else None
    assert not isinstance(model, flax.FlaxGenerationMixin)
    assert enable(model) is model
    assert enable(model) is model
    assert isinstance(model, flax.FlaxGenerationMixin)
    assert isinstance(model, FlaxModel)
    assert type(model).__name__ == "FlaxModel"
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    tokens = np.array([[5, 6, 7]])
    assert np.array_equal(again(tokens), model(tokens))
    loaded = AutoModelForGenerativeRetrieval.from_pretrained(
        folder / "qwen3", backend="flax", dtype="auto", device_map=None
    )
    assert type(loaded) is type(model)
    with pytest.raises(ValueError, match="model is a int, expected a FlaxModel"):
        enable_flax(3)


def test_numbers_of_numpy_are_taken_as_pytorch_takes_them(folder: Path) -> None:
    _, model = pair("qwen3", folder)
    given = {**to_numpy(prompts(3, 9, padded=True)), "constraint_index": INDEX, **BEAMS}
    plain = model.generate(**given).sequences.tolist()
    before = decode_program._cache_size()
    assert model.generate(**(given | {"num_beams": np.int64(4)})).sequences.tolist() == plain
    assert decode_program._cache_size() == before


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
    with pytest.raises(ImportError, match="backend='torch' needs PyTorch: pip install torch"):
        AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="torch")


def test_what_is_pytorchs_alone_loads_pytorch_whatever_auto_means(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a TPU, too: tables of users are decoded by the PyTorch side."""
    pytest.importorskip("pyarrow")
    from hf_gr.answering.torch_models import load_draft_model, load_model

    torch_model, model = pair("qwen3", folder)
    monkeypatch.setattr(auto, "choose_backend", lambda: "flax")
    options: dict[str, Any] = {"dtype": "auto", "device_map": None, "device": "cpu"}
    assert isinstance(load_model(folder / "qwen3", **options), mixin.GRGenerationMixin)
    assert isinstance(load_draft_model(folder / "qwen3", torch_model), mixin.GRGenerationMixin)
    with pytest.raises(ValueError, match="model is a FlaxModel, expected a transformers model.*backend='torch'"):
        load_model(model, **options | {"device": None})


def test_a_planted_error_is_seen(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Rows that fill the bucket, a mask that is lost, a catalogue of another call."""
    models = pair("qwen3", folder)
    right = flax.to_bucket
    monkeypatch.setattr(
        flax,
        "to_bucket",
        lambda *args: jax.tree.map(lambda a: np.ones_like(a) if a.dtype == bool else a, right(*args)),
    )
    with pytest.raises(AssertionError):
        check(models, prompts(3, 9, padded=True), constraint_index=INDEX, **BEAMS)
    monkeypatch.setattr(flax, "to_bucket", right)

    def everything(rules: Any, *args: Any, **kwargs: Any) -> DeviceCatalogue:
        return device_catalogue(batch_rules(INDEX, None), *args, **kwargs)

    device_catalogue = flax.device_catalogue
    monkeypatch.setattr(flax, "device_catalogue", everything)
    with pytest.raises(AssertionError):
        check(models, prompts(3, 9), constraint_index=INDEX.where(list(range(20, 60))), **BEAMS)
