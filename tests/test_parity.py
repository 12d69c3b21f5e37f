# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Ours against transformers' own `generate(prefix_allowed_tokens_fn=...)`: sequences, order, scores."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from families import ALIBI, DECODERS, ENCODER_DECODERS, EOS, FAMILIES, PAD, TRIED, build, limited, prompts, shared
from transformers import GenerationMixin

from hf_gr import ConstraintIndex, enable
from hf_gr.generation import messages
from hf_gr.generation.torch import layouts

SCORE_TOL = 1e-4  # fp32 sums of at most 6 log-probabilities, whose forwards differ in the order of additions
DETAILS = {"return_dict_in_generate": True, "output_scores": True}
GARBAGE = -1e8  # transformers' score of what is no sequence of the catalogue


@cache
def catalogue(*, ragged: bool, seed: int = 0) -> ConstraintIndex:
    """Some hundred sequences of 4 tokens, or of 1 to 5 with an end token, of which some are prefixes of others."""
    rng = np.random.default_rng(seed)
    if not ragged:
        return ConstraintIndex.from_sequences(rng.integers(3, 24, size=(400, 4)))
    rows = [rng.integers(3, 24, size=rng.integers(1, 6)).tolist() for _ in range(900)]
    return ConstraintIndex.from_sequences(rows, eos_token_id=EOS)


def allowed_by(index: ConstraintIndex, prompt_length: int) -> Callable[[int, torch.Tensor], list[int]]:
    """The catalogue as transformers' `prefix_allowed_tokens_fn`: a dictionary, which shares no code with ours."""
    allowed: dict[tuple[int, ...], set[int]] = {}
    for sequence in index:
        for length, token in enumerate(sequence):
            allowed.setdefault(tuple(sequence[:length]), set()).add(token)
    # transformers asks on behalf of finished beams, too, and refuses an empty answer.
    return lambda batch, tokens: sorted(allowed.get(tuple(tokens[prompt_length:].tolist()), {EOS}))


def both(model: Any, index: ConstraintIndex, inputs: dict[str, torch.Tensor], **kwargs: Any) -> tuple[Any, Any]:
    """Transformers' result and ours for the same arguments."""
    prompt_length = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    allowed = allowed_by(index, prompt_length)
    kwargs = {"pad_token_id": PAD, **DETAILS, **kwargs}
    kwargs["eos_token_id"] = index.eos_token_id
    theirs = GenerationMixin.generate(
        model, **inputs, prefix_allowed_tokens_fn=allowed, **{"max_new_tokens": index.max_length} | kwargs
    )
    ours = enable(model).generate(**inputs, constraint_index=index, **kwargs)
    return theirs, ours


def assert_same(theirs: Any, ours: Any, num_return_sequences: int) -> int:
    """Compare row by row and return how many requests could be compared.

    Where transformers ran out of legal beams it fills up with sequences that are none: there is no right answer then.
    """
    length = min(theirs.sequences.shape[1], ours.sequences.shape[1])
    if num_return_sequences == 1 and getattr(theirs, "sequences_scores", None) is None:
        torch.testing.assert_close(ours.sequences, theirs.sequences)
        return len(theirs.sequences)
    if not (theirs.sequences_scores < GARBAGE).any():
        assert ours.sequences.shape == theirs.sequences.shape
    compared = 0
    for first in range(0, len(theirs.sequences), num_return_sequences):
        rows = slice(first, first + num_return_sequences)
        if (theirs.sequences_scores[rows] < GARBAGE).any():
            continue
        compared += 1
        torch.testing.assert_close(ours.sequences_scores[rows], theirs.sequences_scores[rows], atol=SCORE_TOL, rtol=0)
        assert ours.sequences[rows, :length].tolist() == theirs.sequences[rows, :length].tolist()
        steps = theirs.beam_indices.shape[1]
        assert ours.beam_indices[rows, :steps].tolist() == theirs.beam_indices[rows].tolist()
    return compared


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search_equals_transformers(family: str, ragged: bool) -> None:
    model, index = shared(family), catalogue(ragged=ragged)
    compared = 0
    for batch_size, length, padded in ((1, 2, False), (3, 9, True)):  # shorter and longer than the windows
        inputs = prompts(batch_size, length, padded=padded, seed=batch_size)
        theirs, ours = both(model, index, inputs, num_beams=6, num_return_sequences=6)
        compared += assert_same(theirs, ours, 6)
    assert compared >= 3  # of 4 requests


# The positions of FSMT, LED, M2M-100 and NLLB-MoE cannot be told, MVP checks the mask's size, MPT and GPT-Neo count
# keys, and UMT5 has a bias in every layer; LFM2 and Mamba have states that no tree shares.
FOUND = {
    True: ["blenderbot", "gpt_bigcode", "marian", "mbart", "pegasus", "stablelm", "xglm"],
    False: ["fsmt", "gpt_neo", "led", "lfm2", "m2m_100", "mamba", "mpt", "mvp", "nllb-moe", "umt5"],
}


@pytest.mark.parametrize(("family", "takes"), [(family, takes) for takes in FOUND for family in FOUND[takes]])
def test_families_that_are_tried_first_equal_transformers(family: str, takes: bool) -> None:
    model = shared(family)
    assert layouts.takes_tree(model) == takes
    inputs = prompts(2, 8, padded=True)
    theirs, ours = both(model, catalogue(ragged=True), inputs, num_beams=5, num_return_sequences=5)
    assert assert_same(theirs, ours, 5) == 2


def test_listed_families_are_the_tested_ones() -> None:
    assert sorted(TRIED) == sorted(family for families in FOUND.values() for family in families)
    assert set(DECODERS) | set(ENCODER_DECODERS) == layouts.TREE_FAMILIES
    assert not any(layouts.takes_tree(shared(family)) for family in ALIBI)


@pytest.mark.parametrize(("family", "ragged"), [("qwen3", True), ("bloom", True), ("t5", False)])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"length_penalty": 0.0},
        {"length_penalty": -1.0},
        {"length_penalty": 2.0, "early_stopping": "never"},
        {"length_penalty": 0.5, "early_stopping": True},
        {"num_return_sequences": 2},
        {"num_beams": 1, "num_return_sequences": 1},
        {"num_beams": 20, "num_return_sequences": 20},
        {"renormalize_logits": True},
        {"repetition_penalty": 1.7},
        {"bad_words_ids": [[5], [7, 9]], "no_repeat_ngram_size": 2},
        {"min_new_tokens": 3},
        {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 0.6},
        {"max_new_tokens": 12, "early_stopping": "never"},
        {"eos_token_id": [2, 50, 51]},
    ],
    ids=str,
)
def test_options_equal_transformers(family: str, ragged: bool, kwargs: dict[str, Any]) -> None:
    # transformers raises after the end of a catalogue without an end token.
    model, index = shared(family), catalogue(ragged=ragged or "max_new_tokens" in kwargs)
    kwargs = {"num_beams": 6, "num_return_sequences": 6, **kwargs}
    theirs, ours = both(model, index, prompts(4, 9, padded=True, seed=7), **kwargs)
    assert assert_same(theirs, ours, kwargs["num_return_sequences"]) >= 1  # of 4 requests


@pytest.mark.parametrize("family", ["qwen3", "bart"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"repetition_penalty": 1.7, "suppress_tokens": [7]},
        {"renormalize_logits": True},
        {"max_new_tokens": 12, "early_stopping": "never"},
        {"num_beams": 1, "num_return_sequences": 1},
    ],
    ids=str,
)
def test_a_forced_end_equals_transformers(family: str, kwargs: dict[str, Any]) -> None:
    """It makes sequences of the greatest length more likely, and decides what beams of BART's kin return."""
    model, index, inputs = shared(family), catalogue(ragged=True), prompts(3, 9, padded=True)
    kwargs = {"num_beams": 6, "num_return_sequences": 6, "length_penalty": 2.0, **kwargs}
    theirs, ours = both(model, index, inputs, forced_eos_token_id=EOS, **kwargs)
    assert assert_same(theirs, ours, kwargs["num_return_sequences"]) >= 1
    forced = {"constraint_index": index, "pad_token_id": PAD, "forced_eos_token_id": EOS, **kwargs}
    assert model.generate(**inputs, use_cache=False, **forced).tolist() == ours.sequences.tolist()
    if kwargs["num_beams"] > 1:
        _, free = both(model, index, inputs, **kwargs)
        has_no_effect = "max_new_tokens" in kwargs or "renormalize_logits" in kwargs
        assert torch.equal(free.sequences_scores, ours.sequences_scores) == has_no_effect


def test_padding_follows_the_end_even_if_it_is_token_0() -> None:
    """transformers' beams take 0 for "no padding token" and fill with the end token; `items` reads both."""
    index, inputs = catalogue(ragged=True), prompts(2, 9)
    theirs, ours = both(shared("qwen3"), index, inputs, num_beams=6, num_return_sequences=6, pad_token_id=0)
    after = (ours.sequences[:, 9:] == EOS).cumsum(1).roll(1, 1) > 0
    after[:, 0] = False
    assert after.any()
    assert (ours.sequences[:, 9:][after] == 0).all()
    assert ours.sequences[:, 9:][~after].tolist() == theirs.sequences[:, 9:][~after].tolist()
    assert index.items(theirs.sequences[:, 9:]) == index.items(ours.sequences[:, 9:])


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_step_scores_logits_and_transition_scores_equal_transformers(family: str) -> None:
    model, index = shared(family), catalogue(ragged=False)
    theirs, ours = both(model, index, prompts(2, 9), num_beams=4, num_return_sequences=4, output_logits=True)
    for step in range(index.max_length):
        # Only the first of the equal beams counts at the first step.
        torch.testing.assert_close(ours.scores[step], theirs.scores[step], atol=SCORE_TOL, rtol=0)
        torch.testing.assert_close(ours.logits[step], theirs.logits[step], atol=SCORE_TOL, rtol=1e-4)
    mine = model.compute_transition_scores(ours.sequences, ours.scores, ours.beam_indices)
    other = model.compute_transition_scores(theirs.sequences, theirs.scores, theirs.beam_indices)
    torch.testing.assert_close(mine, other, atol=SCORE_TOL, rtol=0)
    torch.testing.assert_close(mine.sum(1) / index.max_length, ours.sequences_scores, atol=SCORE_TOL, rtol=0)


@pytest.mark.parametrize("num_beams", [1, 5])
def test_transition_scores_of_a_model_without_a_token_to_fill_with(num_beams: int) -> None:
    """Its shorter sequences are filled with -1, which is no place among the scores."""
    model = enable(build("qwen3", config={"pad_token_id": None}))
    index = ConstraintIndex.from_sequences([[5], [6], [7, 8, 9], [10, 8], [5, 7]], eos_token_id=EOS)
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "output_scores": True}
    out = model.generate(**prompts(4, 9), constraint_index=index, return_dict_in_generate=True, **options)
    scores = model.compute_transition_scores(out.sequences, out.scores, getattr(out, "beam_indices", None))
    filling = out.sequences[:, 9:] < 0
    assert filling.any()
    assert (scores[filling] == 0).all()
    assert torch.isfinite(scores).all()
    if num_beams > 1:
        lengths = (~filling).sum(1)
        torch.testing.assert_close(scores.sum(1) / lengths, out.sequences_scores, atol=SCORE_TOL, rtol=0)


@pytest.mark.parametrize("family", [*DECODERS, "bloom", "bart", "t5"])
def test_eager_attention_equals_transformers(family: str) -> None:
    model = build(family, attn_implementation="eager")
    inputs = prompts(3, 9, padded=True)
    theirs, ours = both(model, catalogue(ragged=False), inputs, num_beams=5, num_return_sequences=5)
    assert assert_same(theirs, ours, 5) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_half_precision_scores_are_those_of_the_sequences(family: str, attention: str, dtype: torch.dtype) -> None:
    # Near ties may fall either way in half precision; the best score and every returned score may not.
    model = build(family, attn_implementation=attention).to(dtype)
    theirs, ours = both(model, catalogue(ragged=False), prompts(2, 9), num_beams=8, num_return_sequences=8)
    tolerance = 0.15 if dtype is torch.bfloat16 else 0.02  # a few units in the last place of logits around 10
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=tolerance, rtol=0)
    assert ours.sequences_scores.dtype == torch.float32


LIMIT = 12
LIMITED = limited(LIMIT)


@pytest.mark.parametrize("drafting", [None, "trie"])
@pytest.mark.parametrize("length", [LIMIT - 3, LIMIT - 2, LIMIT, LIMIT + 8])
@pytest.mark.parametrize("family", LIMITED)
def test_longer_sequences_equal_transformers(
    family: str, length: int, drafting: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last of 4 tokens is not read: prompts of 9 stay within 12, those of 10 do not."""
    monkeypatch.setattr(messages, "_SAID", set())
    index, options = catalogue(ragged=False), {**prompts(2, length, padded=True), "num_beams": 8}
    options |= {"num_return_sequences": 8, "pad_token_id": PAD, **DETAILS}
    # Dynamic angles stay as the longest sequence so far made them: each call has a model of its own.
    plain, model = (build(family, config=LIMITED[family]) for _ in range(2))
    theirs = plain.generate(**options, max_new_tokens=4, prefix_allowed_tokens_fn=allowed_by(index, length))
    ours = enable(model).generate(**options, constraint_index=index, drafting=drafting)
    assert assert_same(theirs, ours, 8) == 2
    crosses = LIMIT - 3 < length and (family == "llama" or length <= LIMIT)
    in_their_loop = family == "doge" or (family == "phi3" and crosses)
    assert ("decoding in transformers' own loop" in caplog.text) == in_their_loop
    assert ("rope_type='dynamic'" in caplog.text) == (family == "llama" and crosses and drafting is not None)
