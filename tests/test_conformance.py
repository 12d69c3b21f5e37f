# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The properties of transformers' own tester of generation (`GenerationTesterMixin`) with a catalogue, over every
family that our tests know, against `prefix_allowed_tokens_fn` on a twin that has never seen the mixin."""

import copy
import inspect
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from families import DETAILS, EOS, FAMILIES, PAD, TRIED, build, prompts
from test_parity import allowed_by
from test_parity import assert_same as assert_same_beams
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache

from hf_gr import ConstraintIndex, enable

pytestmark = [
    pytest.mark.slow,
    # Blenderbot's own default, of which transformers says that it does nothing without the encoder's tokens.
    pytest.mark.filterwarnings("ignore:Passing `encoder_no_repeat_ngram_size` requires:UserWarning"),
]


ALL = {**FAMILIES, **TRIED}
STATEFUL = {"lfm2", "mamba"}  # recurrent states, which know no positions
SCORE_TOL = 1e-4  # as in test_parity
STATE_TOL = 1e-3  # hidden states of a few layers with weights of 0.25
LENGTH = 9
SHORTER = {"sequence_bias": [[[EOS], 8.0]]}  # answers of all lengths
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several beams": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
}
families = pytest.mark.parametrize("family", ALL)


@cache
def pair(family: str) -> tuple[Any, Any]:
    """transformers' model, and one of the same weights with the mixin."""
    return build(family), enable(build(family))


@cache
def catalogue(*, ragged: bool) -> ConstraintIndex:
    """Sequences of 3 tokens, or of 1 to 3 and an end token; every node has 6 children, so that no beam dies.

    Where legal beams run out, transformers' own search goes on with illegal ones: nothing to compare with.
    """
    rng, rows = np.random.default_rng(0), []

    def grow(prefix: list[int]) -> None:
        if len(prefix) == 3 or (ragged and prefix and rng.random() < 0.5):
            rows.append(prefix)
        if len(prefix) < 3:
            for token in rng.choice(np.arange(3, 24), size=6, replace=False):
                grow([*prefix, int(token)])

    grow([])
    return ConstraintIndex.from_sequences(rows, eos_token_id=EOS if ragged else None)


def call(model: Any, **kwargs: Any) -> Any:
    if "encoder_outputs" in kwargs:  # which transformers repeats in place
        kwargs["encoder_outputs"] = copy.copy(kwargs["encoder_outputs"])
    torch.manual_seed(0)
    return model.generate(**kwargs)


def prompt_length(model: Any, kwargs: dict[str, Any]) -> int:
    """Tokens before the generated ones, as in the output."""
    if model.config.is_encoder_decoder:
        return kwargs["decoder_input_ids"].shape[1] if "decoder_input_ids" in kwargs else 1
    return kwargs["input_ids"].shape[1] if "input_ids" in kwargs else 0


def both(family: str, index: ConstraintIndex, **kwargs: Any) -> Any:
    """transformers' answer and ours."""
    plain, model = pair(family)
    length = prompt_length(model, kwargs)
    kwargs = {"eos_token_id": index.eos_token_id, **kwargs}
    theirs = call(
        plain, **{"max_new_tokens": index.max_length, **kwargs}, prefix_allowed_tokens_fn=allowed_by(index, length)
    )
    # Padding after the end token: transformers fills beams with `pad or eos`, the end token if padding is 0.
    sequences = theirs if isinstance(theirs, torch.Tensor) else theirs.sequences
    ended = torch.nn.functional.pad((sequences[:, length:] == EOS).long().cumsum(1), (length + 1, 0))
    sequences[ended[:, :-1].bool()] = kwargs.get("pad_token_id", plain.generation_config.pad_token_id)
    return theirs, call(model, **kwargs, constraint_index=index)


def assert_same(theirs: Any, ours: Any, num_return_sequences: int = 1) -> None:
    """Compare answers: the class, sequences, scores, and where beams came from."""
    if isinstance(theirs, torch.Tensor):
        assert ours.tolist() == theirs.tolist()
        return
    assert isinstance(ours, type(theirs))
    assert assert_same_beams(theirs, ours, num_return_sequences)


@families
@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize("mode", MODES)
def test_our_own_outputs(family: str, mode: str, ragged: bool) -> None:
    """Scores and logits of our loop, whose cache is the prompt's."""
    index, (_, model) = catalogue(ragged=ragged), pair(family)
    options = {**prompts(2, LENGTH, padded=True), **MODES[mode], **DETAILS, **SHORTER}
    options |= {"output_logits": True, "use_cache": True}
    theirs, ours = both(family, index, **options)
    assert_same(theirs, ours, options.get("num_return_sequences", 1))
    assert {*ours} - {"speculation"} == {*theirs}
    shapes = {tuple(step.shape) for step in (*ours.scores, *ours.logits)}
    assert shapes == {tuple(step.shape) for step in (*theirs.scores, *theirs.logits)}
    cache = ours.past_key_values
    if isinstance(cache, (DynamicCache, EncoderDecoderCache)) and ours.speculation is not None:
        assert cache.get_seq_length() == prompt_length(model, options)
        assert all(len(layer.keys) == 2 for layer in getattr(cache, "self_attention_cache", cache).layers)
    if not ragged:
        for out in (theirs, ours):  # at the first step all beams are equal, and only the first one counts
            out.scores = (out.scores[0][:: options.get("num_beams", 1)], *out.scores[1:])
        torch.testing.assert_close(ours.scores, theirs.scores, atol=SCORE_TOL, rtol=SCORE_TOL)
        torch.testing.assert_close(ours.logits, theirs.logits, atol=STATE_TOL, rtol=STATE_TOL)


@torch.no_grad()
def given(model: Any, kind: str) -> dict[str, Any] | None:
    """The prompts of a call in another form; None for what a model does not take."""
    inputs, is_both = prompts(2, LENGTH, padded=True), model.config.is_encoder_decoder
    ids, mask = inputs.values()
    takes = inspect.signature(type(model).forward).parameters.keys()
    prepares = inspect.signature(model.prepare_inputs_for_generation).parameters.keys()
    is_plain_decoder = not is_both and model.config.model_type not in STATEFUL
    embeds = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
    takes_embeds = (is_both or "inputs_embeds" in prepares) and model.config.model_type != "fsmt"
    if kind == "padding":
        pad = torch.nn.functional.pad
        return {"input_ids": pad(ids, (32, 0), value=PAD), "attention_mask": pad(mask, (32, 0))}
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    encoded = model.get_encoder()(**inputs) if is_both else None
    start = torch.tensor([[model.generation_config.decoder_start_token_id, 7]] * 2) if is_both else None
    forms: dict[str, tuple[bool, Any]] = {
        "positions": (is_plain_decoder and "position_ids" in takes, {"position_ids": positions}),
        "embeddings": (takes_embeds, {"input_ids": None, **embeds}),
        "embeddings and tokens": (takes_embeds and not is_both, embeds),
        "an encoder's outputs": (is_both, {"input_ids": None, "encoder_outputs": encoded}),
        "first tokens": (is_both, {"decoder_input_ids": start}),
        "chunks": (is_plain_decoder, {"prefill_chunk_size": 4}),
        "all logits": ("logits_to_keep" in takes, {"logits_to_keep": 0}),
    }
    is_taken, changes = forms[kind]
    return {name: value for name, value in {**inputs, **changes}.items() if value is not None} if is_taken else None


KINDS = ["padding", "positions", "embeddings", "embeddings and tokens"]
KINDS += ["an encoder's outputs", "first tokens", "chunks", "all logits"]


@families
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_prompts_in_other_forms(family: str, kind: str, num_beams: int) -> None:
    options = given(pair(family)[0], kind)
    if options is None:
        pytest.skip("the model does not take it")
    options |= {"num_beams": num_beams, "num_return_sequences": num_beams, **DETAILS}
    assert_same(*both(family, catalogue(ragged=False), **options), num_beams)


@pytest.mark.parametrize("family", ["bloom", "qwen3", "t5"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_compiled_forwards(family: str) -> None:
    inputs, index = prompts(2, LENGTH), catalogue(ragged=False)
    torch.compiler.reset()
    model = enable(build(family))
    beams = {"num_beams": 3, "num_return_sequences": 3, **DETAILS}
    expected = call(model, **inputs, **beams, constraint_index=index)
    asked = {**beams, "compile_config": CompileConfig(backend="eager"), "cache_implementation": "static"}
    assert call(model, **inputs, **asked, constraint_index=index).sequences.tolist() == expected.sequences.tolist()
    others = [prompts(2, LENGTH + more) for more in (3, 1)]  # whose sizes are traced as unknown ones
    cases = [(inputs, expected)] * 2
    cases += [(given, call(model, **given, **beams, constraint_index=index)) for given in others]
    model.forward = torch.compile(model.forward, backend="aot_eager")
    for given, expected in cases:
        found = call(model, **given, **beams, constraint_index=index)
        assert found.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=0)
    torch.compiler.reset()
