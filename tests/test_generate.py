# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The surface: what `generate` takes, refuses and returns, and how models get it."""

import copy
import functools
import io
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from families import DETAILS, EOS, PAD, VOCABULARY, build, prompts, shared
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    SynthIDTextWatermarkingConfig,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)
from transformers.generation.configuration_utils import GenerationMode

from hf_gr import (
    AutoModelForGenerativeRetrieval,
    ConstraintIndex,
    ConstraintLogitsProcessor,
    GRGenerationConfig,
    GRGenerationMixin,
    enable,
)
from hf_gr.generation import messages
from hf_gr.generation.torch import layouts, mixin
from hf_gr.generation.torch.caches import of_decoder
from hf_gr.generation.torch.encoder_decoders import _positions

SCORE_TOL = 1e-4  # fp32 sums of at most 5 log-probabilities
SMALL = [[5, 9, 4], [5, 9, 6], [5, 3, 3], [7, 8, 9], [7, 8, 10]]
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 4))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 4].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)
WIDE = {"num_beams": 5, "num_return_sequences": 5}
LOOP = {"use_cache": False}  # decodes in transformers' own loop


def enabled(family: str = "qwen3") -> Any:
    return enable(shared(family))


def generated(out: Any, inputs: dict[str, Any]) -> torch.Tensor:
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    return sequences[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("family", ["qwen3", "bloom", "t5"])
@pytest.mark.parametrize("padding", [PAD, None])
def test_fewer_sequences_than_beams_are_followed_by_padding(family: str, padding: int | None) -> None:
    """Which sequences, and in which order: fuzz/test_generation.py."""
    model = enable(build(family, config={"pad_token_id": padding}))
    rows = SMALL if padding is None else [row[: 1 + i % 3] for i, row in enumerate(SMALL)]
    index = ConstraintIndex.from_sequences(rows, eos_token_id=None if padding is None else EOS)
    options = {"num_beams": 9, "num_return_sequences": 9, "length_penalty": 2.0}
    out = model.generate(**prompts(2, 6), constraint_index=index, **options, **DETAILS)
    answers = out.sequences[:, 1 if model.config.is_encoder_decoder else 6 :]
    is_missing = out.sequences_scores == -torch.inf
    assert is_missing.tolist() == ([False] * 5 + [True] * 4) * 2
    assert (answers[is_missing] == (-1 if padding is None else padding)).all()
    assert [bool(items) for items in index.items(answers)] == (~is_missing).tolist()


@pytest.mark.parametrize("how", [{}, LOOP], ids=str)
def test_without_an_end_there_is_no_item(how: dict[str, Any]) -> None:
    """transformers marks by -1e9 what never ended, even if padding looks like its end."""
    inputs, options = prompts(3, 7), {"num_beams": 24, "num_return_sequences": 18, **DETAILS}
    options |= {"early_stopping": "never", "suppress_tokens": [EOS], "length_penalty": 2.0, "pad_token_id": EOS}
    out = enabled().generate(**inputs, constraint_index=RAGGED, **options, **how)
    assert (out.sequences_scores == -torch.inf).all()
    assert (generated(out, inputs) == EOS).all()


@pytest.mark.parametrize("how", [{}, LOOP], ids=str)
@pytest.mark.parametrize(
    ("rows", "end", "excluded", "expected"),
    [
        ([[PAD, PAD], [5, 7]], None, [0], [[], [1]]),
        ([[PAD, PAD], [5, 7]], None, [0, 1], [[], []]),
        ([[PAD], [5, 7]], EOS, [0], [[], [1]]),
        ([[PAD, PAD], [5, PAD], [5, 6]], None, [], [[0], [1], [2]]),
    ],
)
def test_a_missing_row_spells_no_item(rows: Any, end: int | None, excluded: Any, expected: Any, how: Any) -> None:
    """Where padding is a code: a row of it would be an item, or, cut to one token, one that lacks its end token."""
    inputs, index = prompts(1, 5), ConstraintIndex.from_sequences(rows, eos_token_id=end)
    options = {"num_beams": 4, "num_return_sequences": 4, "pad_token_id": PAD, "exclude_items": [excluded], **how}
    out = enabled().generate(**inputs, constraint_index=index, **options)
    assert sorted(index.items(generated(out, inputs))) == [[]] * (4 - len(expected)) + expected


@pytest.mark.parametrize("how", [{}, LOOP], ids=str)
def test_scores_are_given_as_asked_for(how: dict[str, Any]) -> None:
    model, common = enabled(), {**prompts(1, 5), "constraint_index": INDEX, "num_beams": 4, **how}
    state = torch.get_rng_state()
    plain = model.generate(**common)
    bare = model.generate(**common, return_dict_in_generate=True)
    scored = model.generate(**common, **DETAILS)
    assert plain.tolist() == bare.sequences.tolist() == scored.sequences.tolist()
    assert bare.get("scores") is bare.get("sequences_scores") is bare.get("logits") is None
    assert [tuple(step.shape) for step in scored.scores] == [(4, VOCABULARY)] * 4
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn


def test_without_a_catalogue_it_is_transformers_generate() -> None:
    model, inputs = enabled(), prompts(2, 5)
    sampled = {"do_sample": True, "num_return_sequences": 3}
    for kwargs in ({"num_beams": 1}, {"num_beams": 3, "num_return_sequences": 2}, sampled):
        torch.manual_seed(0)
        theirs = GenerationMixin.generate(model, **inputs, max_new_tokens=6, **kwargs)
        torch.manual_seed(0)
        assert model.generate(**inputs, max_new_tokens=6, **kwargs).tolist() == theirs.tolist()


def legal_after(length: int, end: list[int] | None = None) -> dict[str, Any]:
    """transformers' own arguments for the catalogue."""

    def legal(_: int, tokens: torch.Tensor) -> Any:
        return INDEX.allowed_next_tokens(tokens[length:].tolist()) or end

    return {"max_new_tokens": 4, "prefix_allowed_tokens_fn": legal}


@pytest.mark.parametrize("num_beams", [1, 5])
def test_a_users_logits_processor_sees_the_constraint_applied(num_beams: int) -> None:
    model, token, seen = enabled(), int(ROWS[17, 1]), []
    common = {**prompts(2, 5), "num_beams": num_beams, "num_return_sequences": num_beams}

    def favour(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(tokens.shape), int(scores.isfinite().sum(-1).max())))
        return scores.index_add(1, torch.tensor([token]), torch.full((len(scores), 1), 50.0))

    ours = model.generate(**common, constraint_index=INDEX, logits_processor=[favour])
    theirs = GenerationMixin.generate(model, **common, **legal_after(5), logits_processor=[favour])
    assert ours.tolist() == theirs.tolist()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_users_stopping_criterion_ends_sequences_as_in_transformers(num_beams: int) -> None:
    model, common = enabled(), {**prompts(2, 5), "num_beams": num_beams, "pad_token_id": PAD}
    token = int(model.generate(**common, constraint_index=INDEX)[0, 6])
    common |= {"stopping_criteria": [lambda tokens, scores, **kwargs: tokens[:, -1] == token]}
    if num_beams == 1:  # transformers fills finished greedy rows only if there is an end token
        common["eos_token_id"] = EOS
    out = model.generate(**common, constraint_index=INDEX)
    assert token in out[0].tolist()
    assert out.tolist() == GenerationMixin.generate(model, **common, **legal_after(5, [EOS])).tolist()


def test_a_users_prefix_function_narrows_the_catalogue() -> None:
    model, inputs = enabled(), prompts(1, 5)
    allowed = [int(token) for token in np.unique(ROWS)][::2]
    narrow = ConstraintIndex.from_sequences([row for row in ROWS if set(row.tolist()) <= set(allowed)])
    common = {**inputs, "num_beams": 4, "num_return_sequences": 4, **DETAILS}
    out = model.generate(**common, constraint_index=INDEX, prefix_allowed_tokens_fn=lambda *_: allowed)
    expected = model.generate(**common, constraint_index=narrow)
    best = out.sequences_scores.isfinite()
    assert best.any()
    assert all(row in narrow for row in generated(out, inputs)[best].tolist())
    torch.testing.assert_close(out.sequences_scores[0], expected.sequences_scores[0], atol=SCORE_TOL, rtol=0)


@pytest.mark.parametrize(("family", "cut"), [("qwen3", 8), ("gemma3_text", 4), ("mistral", 5)])
def test_a_prefilled_prompt_is_used_and_left_as_it_is(family: str, cut: int) -> None:
    model, inputs = enabled(family), prompts(2, 9, padded=True)
    cache = DynamicCache(config=model.config)
    head = {name: value[:, :cut] for name, value in inputs.items()}
    positions = (head["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**head, position_ids=positions, past_key_values=cache, use_cache=True)
    before = [layer.keys.clone() for layer in cache.layers]
    common = {**inputs, "constraint_index": INDEX, **WIDE, **DETAILS}
    expected = model.generate(**common)
    assistant = {"assistant_model": shared("llama"), "draft_token_budget": 1}
    for draft in ({}, {"drafting": "trie"}, assistant):
        out = model.generate(**common, past_key_values=cache, **draft)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert out.past_key_values.get_seq_length() == 9
        torch.testing.assert_close(out.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=0)
    assert cache.get_seq_length() == cut
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


@pytest.mark.parametrize("family", ["mistral", "t5", "bart"])
@pytest.mark.parametrize("width", [WIDE, {}], ids=str)
def test_a_returned_cache_serves_the_same_prompt_again(family: str, width: dict[str, int]) -> None:
    model, ways = enabled(family), ({}, {"drafting": "trie"})
    for padded, how in itertools.product((False, True), ways):
        common = {**prompts(2, 9, padded=padded), "constraint_index": INDEX, **width, **DETAILS}
        expected = model.generate(**common, **how)
        cache, held = expected.past_key_values, 1 if model.config.is_encoder_decoder else 9
        if how:
            keys = of_decoder(cache).layers[0].keys
            assert expected.speculation.drafted_steps.any()
            assert keys.untyped_storage().nbytes() == keys.nbytes, "keys of nodes are kept in memory"
        for extra in ways:
            out = model.generate(**common, past_key_values=cache, **extra)
            assert out.sequences.tolist() == expected.sequences.tolist()
            if width:
                torch.testing.assert_close(out.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=0)
            assert cache.get_seq_length() == held


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_gradient_checkpointing_in_training_mode_changes_nothing(
    family: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    model = enable(build(family, config={"dropout_rate": 0.0} if family == "t5" else None))
    common = {**prompts(2, 9, padded=True), "constraint_index": INDEX, "pad_token_id": PAD, **DETAILS}
    wide = {"num_beams": 4, "num_return_sequences": 4}
    model.add_draft_head(INDEX)
    ways = [{}, wide, wide | {"drafting": "trie"}]
    ways += [wide | {"drafting": "head"}, wide | {"drafting": "head", "verification": "strict"}]
    expected = [model.generate(**common, **way).sequences.tolist() for way in ways]
    model.gradient_checkpointing_enable()
    assert model.generate(**common, **ways[0]).sequences.tolist() == expected[0]
    assert "training mode" not in caplog.text
    model.train()
    for way, sequences in zip(ways, expected, strict=True):
        assert model.generate(**common, **way).sequences.tolist() == sequences
    assert model.training
    assert "no cache (use_cache=False, or gradient checkpointing in training mode): decoding in" in caplog.text
    with pytest.raises(ValueError, match=r"past_key_values is given in training mode .* call model.eval\(\)"):
        model.generate(**common, past_key_values=DynamicCache())


def test_what_a_config_rules_out_takes_no_tree() -> None:
    """Other families are in test_parity.py; trying them keeps the mode of every module."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    fields = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "is_decoder": True, **sizes}
    assert not layouts.takes_tree(build("falcon", config={"alibi": True}))
    # A level may have more beams than this model has positions.
    assert not layouts.takes_tree(build("big_bird", config=fields | {"attention_type": "original_full"}))
    tried = build("mbart").train()
    tried.get_input_embeddings().eval()  # frozen by its owner
    assert layouts.takes_tree(tried)
    assert (tried.training, tried.get_input_embeddings().training) == (True, False)


def test_an_unknown_family_that_breaks_the_tree_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "TREE_FAMILIES", frozenset())
    model = build("qwen3")
    assert layouts.takes_tree(model)
    ignores_positions = build("qwen3")
    forward = ignores_positions.forward

    def count_keys(input_ids=None, position_ids=None, past_key_values=None, **kwargs):  # noqa: ANN202
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        positions = torch.arange(past, past + input_ids.shape[1])[None]
        return forward(input_ids=input_ids, position_ids=positions, past_key_values=past_key_values, **kwargs)

    ignores_positions.forward = count_keys
    assert not layouts.takes_tree(ignores_positions)


@pytest.mark.parametrize("family", ["t5", "bart", "fsmt"])
def test_a_call_leaves_nothing_in_the_model(family: str) -> None:
    model, inputs = enable(build(family)), prompts(2, 7)
    plain = {**inputs, "decoder_input_ids": inputs["input_ids"]}
    with torch.no_grad():
        before = model(**plain).logits
        model.generate(**inputs, constraint_index=INDEX, num_beams=4)  # tries layouts
        assert torch.equal(model(**plain).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_positions_of_nodes_are_one_threads_own() -> None:
    """Other threads compute, copy and save the model during a forward of nodes."""
    model, inputs, file = enable(build("bart")), prompts(6, 7), io.BytesIO()
    plain = {**inputs, "decoder_input_ids": inputs["input_ids"]}
    table, positions = model.get_decoder().embed_positions, torch.zeros_like(inputs["input_ids"])
    with torch.no_grad():
        before = model(**plain).logits
        with _positions(table, positions), ThreadPoolExecutor(1) as other:
            after = other.submit(torch.no_grad()(lambda: model(**plain).logits)).result()
            assert not torch.equal(model(**plain).logits, before)
            twin = copy.deepcopy(model)
            torch.save(model, file)
        assert torch.equal(after, before)
        file.seek(0)
        for one in (twin, torch.load(file, weights_only=False)):
            assert torch.equal(one(**plain).logits, before)


def test_without_a_cache_it_goes_through_the_processor(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    model, common = enable(build("qwen3")), {**prompts(1, 6), "constraint_index": INDEX, "num_beams": 3}
    for _ in range(2):
        model.generate(**common, **LOOP)
    assert len([record for record in caplog.records if record.name == "hf_gr.generation"]) == 1
    model.generation_config.use_cache = False  # of its training
    monkeypatch.setattr(mixin, "generate_by_processor", None)
    model.generate(**common)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3", {"max_length": 20}),
        ("qwen3", {"max_new_tokens": 2}),
        ("qwen3", {"output_hidden_states": True}),
        ("bart", {"forced_eos_token_id": 2, "forced_bos_token_id": 0}),  # which the catalogue lacks
    ],
)
def test_what_a_checkpoint_sets_for_text_does_not_matter(family: str, fields: dict[str, Any]) -> None:
    model, common = enable(build(family)), {**prompts(1, 30), "constraint_index": INDEX, "num_beams": 3}
    expected = model.generate(**common)
    model.generation_config.update(**fields)
    assert torch.equal(model.generate(**common), expected)


def test_an_explicit_none_switches_off_what_the_checkpoint_sets() -> None:
    model, inputs = enable(build("qwen3")), prompts(1, 5)
    model.generation_config.update(do_sample=True, top_k=1)
    torch.manual_seed(0)
    options = {"constraint_index": INDEX, "num_return_sequences": 20, "temperature": 5.0}
    rows = model.generate(**inputs, **options, top_k=None)
    assert len(set(map(tuple, rows.tolist()))) > 1
    assert len(set(map(tuple, model.generate(**inputs, **options).tolist()))) == 1


@pytest.mark.parametrize("kind", ["fixed", "end", "ragged"])
@pytest.mark.parametrize("width", [{"num_beams": 7, "num_return_sequences": 7}, {"num_beams": 2}, {}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 9},
        {"max_length": 20, "early_stopping": "never"},
        {"length_penalty": 8.0},
        {"length_penalty": -8.0},
        {"length_penalty": 8.0, "early_stopping": True},
        {"renormalize_logits": True, "suppress_tokens": [3, 8]},
        {"bad_words_ids": [[9], [3]]},
        {"pad_token_id": 0, "max_new_tokens": 9},
        {"min_new_tokens": 3},
    ],
    ids=str,
)
def test_transformers_loop_answers_as_ours(kind: str, width: dict, options: dict) -> None:
    rows = [row[: 1 + i % 3] for i, row in enumerate(SMALL)] if kind == "ragged" else SMALL
    index = ConstraintIndex.from_sequences(rows, eos_token_id=None if kind == "fixed" else EOS)
    common = {**prompts(2, 6, padded=True), "constraint_index": index, "pad_token_id": PAD, **DETAILS}
    ours, theirs = (enabled().generate(**{**common, **width, **options, **loop}) for loop in ({}, LOOP))
    assert theirs.sequences.tolist() == ours.sequences.tolist()
    if width:
        torch.testing.assert_close(theirs.sequences_scores, ours.sequences_scores, atol=SCORE_TOL, rtol=SCORE_TOL)
        assert theirs.beam_indices.tolist() == ours.beam_indices.tolist()


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 0.5}], ids=["beams", "samples"])
def test_items_whose_end_is_forbidden_are_no_answers_of_transformers_loop(how: dict) -> None:
    index = ConstraintIndex.from_sequences([[5], [6]], eos_token_id=2)
    inputs = prompts(2, 5)
    options = {"num_beams": 4, "num_return_sequences": 4, "suppress_tokens": [2], "pad_token_id": PAD, **LOOP}
    out = enabled().generate(**inputs, constraint_index=index, exclude_items=[[0, 1], [0]], **options, **how)
    assert index.items(generated(out, inputs)) == [[]] * 8


PATHS = {"num_beams": 1, "do_sample": True, "num_return_sequences": 5}


@pytest.mark.parametrize(
    ("stops", "level", "do_sample"), [(False, 0, True), (False, 2, False), (True, 1, False), (True, 2, True)]
)
def test_scores_that_are_no_numbers_end_paths(stops: bool, level: int, do_sample: bool) -> None:
    inputs, length = prompts(2, 7), 7 + level
    index = ConstraintIndex.from_sequences([[3, 4, 5], [3, 5, 4], [6, 7, 8], [6, 7, 9]])

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * torch.nan if ids.shape[1] == length else scores

    def stop(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.full((len(ids),), stops and ids.shape[1] > length)

    options = {"num_beams": 3, "num_return_sequences": 3, "do_sample": do_sample, **DETAILS}
    out = enabled().generate(
        **inputs, constraint_index=index, logits_processor=[spoil], stopping_criteria=[stop], **options
    )
    assert out.sequences_scores.isneginf().all()
    assert index.items(generated(out, inputs)) == [[]] * 6


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1},
        {**PATHS, "drafting": "trie"},
        {**PATHS, **LOOP},
        {**WIDE, "verification": "relaxed", "assistant": True},
        {**WIDE, "do_sample": True, "eta_cutoff": 0.2},
        {**WIDE, "do_sample": True, "top_h": 0.5},
        {**WIDE, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)},
        {**WIDE, "do_sample": True, **LOOP},
    ],
    ids=str,
)
def test_dead_paths_stay_dead_when_scores_are_renormalised(options: dict[str, Any]) -> None:
    index = ConstraintIndex.from_sequences([[3, 4, 5], [3, 5, 4], [6, 7, 8], [6, 7, 9]])
    inputs, options = prompts(2, 7, padded=True), dict(options)
    options |= {"assistant_model": shared("qwen3")} if options.pop("assistant", False) else {}
    settings = {"renormalize_logits": True, "suppress_tokens": [4, 5, 9], **DETAILS}
    torch.manual_seed(0)
    out = enabled().generate(**inputs, constraint_index=index, **settings, **options)
    items = index.items(generated(out, inputs))
    assert set(map(tuple, items)) <= {(2,), ()}
    if options["num_beams"] > 1:
        assert not out.sequences_scores.isnan().any()
    if options["num_beams"] > 1 and "top_h" not in options:  # which may drop the item's tokens
        assert items == [[2], [], [], [], []] * 2


@pytest.mark.parametrize(
    ("living", "how"),
    [
        ([0], {"do_sample": True, "temperature": 0.7}),
        ([1], {"do_sample": True, "renormalize_logits": True}),
        ([0, 1], {"renormalize_logits": True, "early_stopping": True}),
    ],
    ids=str,
)
def test_the_processor_path_loses_no_item(living: list[int], how: dict[str, Any]) -> None:
    index = ConstraintIndex.from_sequences([[3], [4, 5, 6]], eos_token_id=EOS)
    options = {"num_beams": 3, "num_return_sequences": 3, **LOOP, **how}
    for seed in range(3):
        inputs = prompts(2, 6, seed=seed)
        out = enabled().generate(**inputs, constraint_index=index.where(living), **options)
        expected = [[]] * (3 - len(living)) + [[item] for item in living]
        assert [sorted(index.items(rows)) for rows in generated(out, inputs).view(2, 3, -1)] == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_filling_score_is_low_and_survives_a_temperature(dtype: torch.dtype) -> None:
    index = ConstraintIndex.from_sequences([[3], [4, 5]], eos_token_id=EOS)
    tokens = torch.tensor([[9, 3, EOS]])
    scores = ConstraintLogitsProcessor(index, prompt_length=1)(tokens, torch.zeros(1, 10, dtype=dtype))
    assert (scores / 0.1).isfinite().sum() == 1
    assert scores.max() < -4000


def test_encoder_outputs_count_as_prompts() -> None:
    model, inputs = enabled("t5"), prompts(2, 6)
    encoded = model.get_encoder()(**inputs)
    excluded = [INDEX.item_ids[:100], INDEX.item_ids[100:]]
    options = {"constraint_index": [INDEX, INDEX], "exclude_items": excluded, "num_beams": 3}
    out = model.generate(encoder_outputs=encoded, attention_mask=inputs["attention_mask"], **options)
    assert out.tolist() == model.generate(**inputs, **options).tolist()
    assert model.generate(encoder_outputs=encoded, **options).tolist() == out.tolist()


def test_the_processor_path_leaves_a_prefilled_prompt_as_it_is() -> None:
    model, inputs = enabled("bloom"), prompts(2, 6)
    cache = DynamicCache(config=model.config)
    model(inputs["input_ids"][:, :4], past_key_values=cache)
    common = {**inputs, "constraint_index": INDEX, "past_key_values": cache}
    assert model.generate(**common).tolist() == model.generate(**inputs, constraint_index=INDEX).tolist()
    assert cache.get_seq_length() == 4
    with pytest.raises(ValueError, match="past_key_values is given for several paths"):
        model.generate(**common, num_beams=3)


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_threads_share_a_model(family: str) -> None:
    jobs = [{**prompts(2, 5 + length, seed=length), "constraint_index": INDEX, **WIDE} for length in range(6)]
    jobs += [{**prompts(2, 9), "max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD}]
    calls = [functools.partial(enabled(family).generate, **job) for job in jobs]
    expected = [call().tolist() for call in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda call: call().tolist(), calls)) == expected
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.filterwarnings("ignore:.*torch:DeprecationWarning", "ignore:.*deprecated:UserWarning")
@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_a_quantised_models_weights_are_no_tensors(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixin, "generate_by_processor", None)
    plain, inputs = enabled(family), prompts(2, 6)
    model = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=torch.qint8)
    common = {**inputs, "num_beams": 4, "num_return_sequences": 4, **DETAILS}
    out, exact = (one.generate(**common, constraint_index=INDEX) for one in (model, plain))
    assert all(INDEX.items(out.sequences[:, -4:]))
    # 8 bits for weights and activations alike; one scale for all activations of a forward, here the same tokens'.
    torch.testing.assert_close(out.sequences_scores, exact.sequences_scores, atol=0.5, rtol=0)
    rows = model.generate(**common, logits_processor=[ConstraintLogitsProcessor(INDEX)], max_new_tokens=4)
    assert rows.sequences.equal(out.sequences)
    torch.testing.assert_close(rows.sequences_scores, out.sequences_scores)


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_models_come_with_it_and_are_saved_as_ordinary_ones(family: str, tmp_path: Path) -> None:
    """A checkpoint names its catalogue; where nobody enabled it, `constraint_index=` must not be taken in silence."""
    enable(build(family)).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == [type(build(family)).__name__]
    INDEX.save_pretrained(tmp_path)
    model, inputs = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path), prompts(2, 6)
    assert isinstance(model, GRGenerationMixin)
    assert isinstance(model, type(build(family)))
    assert isinstance(model.generation_config, GRGenerationConfig)
    expected = model.generate(**inputs, constraint_index=INDEX, num_beams=4).tolist()
    assert enabled(family).generate(**inputs, constraint_index=INDEX, num_beams=4).tolist() == expected

    model.generation_config.update(constraint_index=".", drafting="trie", num_beams=4)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["hf_gr"] == {"constraint_index": ".", "drafting": "trie"}
    assert GenerationConfig.from_pretrained(tmp_path).num_beams == 4
    plain = (AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM).from_pretrained(tmp_path)
    assert plain.generate(**inputs, max_new_tokens=2, min_new_tokens=2).shape[1] == (3 if family == "t5" else 8)
    for option in ({"constraint_index": INDEX}, {"drafting": "trie"}):
        with pytest.raises(ValueError, match="model_kwargs"):
            plain.generate(**inputs, max_new_tokens=2, **option)
    for again in (AutoModelForGenerativeRetrieval.from_pretrained(tmp_path), enable(plain)):
        config = again.generation_config
        assert (config.constraint_index, config.drafting, config.verification) == (".", "trie", None)
        assert again.generate(**inputs).tolist() == expected
    # Files of before 0.1.0 have the fields among transformers' own.
    (tmp_path / "generation_config.json").write_text(json.dumps({"constraint_index": ".", "num_beams": 3}))
    old = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path).generation_config
    assert (old.constraint_index, old.num_beams) == (".", 3)


def test_an_index_may_be_named(tmp_path: Path) -> None:
    INDEX.save_pretrained(tmp_path)
    model, common, name = enable(build("qwen3")), {**prompts(1, 5), "num_beams": 4}, str(tmp_path)
    expected = model.generate(**common, constraint_index=INDEX).tolist()
    free = model.generate(**common, max_new_tokens=7).tolist()
    assert model.generate(**common, constraint_index=name).tolist() == expected
    config = GRGenerationConfig(constraint_index=name, num_beams=np.int64(4), exact=np.bool_(False))
    assert '"hf_gr": {\n    "constraint_index"' in config.to_json_string()
    assert model.generate(**common, generation_config=config).tolist() == expected
    assert model.generate(**common, generation_config=config, constraint_index=RAGGED).tolist() != expected
    model.generation_config.constraint_index = name
    assert model.generate(**common).tolist() == expected
    assert model.generate(**common, constraint_index=False, max_new_tokens=7).tolist() == free
    ConstraintIndex.from_sequences([[5, 6]]).save_pretrained(tmp_path)
    assert model.generate(**common)[0, 5:].tolist() == [5, 6]  # read again when it changes


def test_a_class_of_ones_own_takes_the_mixin() -> None:
    class Recommender(GRGenerationMixin, T5ForConditionalGeneration):
        pass

    model = Recommender(build("t5").config).eval()
    assert INDEX.items(model.generate(**prompts(1, 5), constraint_index=INDEX, num_beams=3)[:, 1:])[0]
    assert enable(model) is model
    assert type(model) is Recommender


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # inside PEFT
def test_a_peft_model_is_enabled_inside() -> None:
    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, common = peft.get_peft_model(build("qwen3"), lora).eval(), {"constraint_index": INDEX, **WIDE}
    assert enable(model) is model
    inputs = prompts(2, 6, padded=True)
    out = model.generate(**inputs, **common)
    assert all(INDEX.items(generated(out, inputs)))
    merged = enable(copy.deepcopy(model).merge_and_unload())
    assert merged.generate(**inputs, **common).tolist() == out.tolist()
    assert enabled().generate(**inputs, **common).tolist() != out.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *[(functools.partial(enable, one), "expected a transformers model") for one in (None, torch.nn.Linear(2, 2))],
        (lambda: AutoModelForGenerativeRetrieval.from_pretrained("x", backend="tensorflow"), "backend='tensorflow'"),  # pyright: ignore
        (AutoModelForGenerativeRetrieval, "from_pretrained"),
        *[
            (functools.partial(GRGenerationConfig, **wrong), next(iter(wrong)))
            for wrong in ({"drafting": "magic"}, {"verification": "lax"}, {"num_draft_beams": 0}, {"hf_gr": []})
        ],
        (lambda: GRGenerationConfig(constraint_index=INDEX), "constraint_index"),
    ],
)
def test_what_makes_no_model_or_config_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("how", [{}, LOOP], ids=str)
def test_first_tokens_of_a_decoder_may_lack_the_start_token(how: dict[str, Any]) -> None:
    common = {**prompts(2, 6), "constraint_index": INDEX, "num_beams": 3, **how}
    one = enabled("t5").generate(**common, decoder_input_ids=torch.tensor([[5]] * 2), decoder_start_token_id=[PAD] * 2)
    other = enabled("t5").generate(**common, decoder_input_ids=torch.tensor([[PAD, 5]] * 2), max_length=6)
    assert one.tolist() == other.tolist()
    assert one[0, :2].tolist() == [PAD, 5]
    assert INDEX.items(one[:, 2:])[0]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_processes_that_share_a_model_run_equally_many_forwards(
    is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers `synced_gpus` is by default True under FSDP and ZeRO-3."""
    utils = sys.modules[GenerationMixin.__module__]
    monkeypatch.setattr(utils, "is_deepspeed_zero3_enabled", lambda: is_sharded)
    monkeypatch.setattr(utils, "_get_torch_distributed_world_size", lambda: 2, raising=False)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    index = ConstraintIndex.from_sequences([[5], [6, 7, 8, 9]], eos_token_id=EOS)

    def num_forwards(synced_gpus: bool | None) -> int:
        how = {"constraint_index": index, "exclude_items": [[1]] * 2, "synced_gpus": synced_gpus, **DETAILS}
        return enabled().generate(**prompts(2, 5), **how).speculation.target_forwards

    assert num_forwards(False) < num_forwards(True)
    assert num_forwards(None) == num_forwards(is_sharded)


def test_a_streamer_is_refused_and_its_reader_does_not_wait_for_ever() -> None:
    class Tokenizer:
        def decode(self, tokens: Any, **options: Any) -> str:
            return ""

    streamer: Any = TextIteratorStreamer(Tokenizer(), timeout=30)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="ConstraintLogitsProcessor"):
        enabled().generate(**prompts(1, 5), constraint_index=INDEX, num_beams=1, streamer=streamer)
    assert "".join(streamer) == ""


def test_what_only_a_model_or_a_place_tells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = enabled(), prompts(2, 5)
    with pytest.raises(ValueError, match="7 positional arguments are given with constraint_index, expected 6 at most"):
        model.generate(inputs["input_ids"], *[None] * 5, shared("llama"), constraint_index=INDEX)
    monkeypatch.setattr(model, "_supported_generation_modes", [GenerationMode.GREEDY_SEARCH], raising=False)
    with pytest.raises(ValueError, match="only supports"):
        model.generate(**inputs, constraint_index=INDEX, num_beams=3)
    # But padding that is the end token, too, may be a prompt's last token.
    inputs["input_ids"][:, -1] = PAD
    model.generate(inputs["input_ids"], constraint_index=INDEX, pad_token_id=PAD, eos_token_id=PAD)


@pytest.mark.parametrize(
    ("family", "wrong", "message"),
    [
        ("t5", {"attention_mask": torch.ones(2, 5)}, r"attention_mask is \[2, 5\], expected \[2, 6\]"),
        ("t5", {"attention_mask": torch.ones(2, 7)}, r"attention_mask is \[2, 7\], expected \[2, 6\]"),
        ("qwen3", {"logits_processor": [lambda tokens, scores: scores[:, :5]]}, r"processor returned \[2, 5\]"),
        ("qwen3", {"logits_processor": [lambda tokens, scores: None]}, "logits_processor returned None"),
    ],
    ids=lambda given: given if isinstance(given, str) else next(iter(given)),
)
def test_what_only_a_family_or_a_forward_tells_is_refused(family: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        enabled(family).generate(**(prompts(2, 6) | wrong), constraint_index=INDEX)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # inside PEFT
def test_a_learned_prefix_is_refused() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(build("qwen3"), config)
    with pytest.raises(ValueError, match="has a PREFIX_TUNING adapter, expected one of weights such as LoRA"):
        enable(model)
    late = peft.get_peft_model(enable(build("qwen3")), config)
    with pytest.raises(ValueError, match="keys for 6 tokens"):
        late.generate(**prompts(2, 6), constraint_index=INDEX, num_beams=3)


def _generates_itself(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    assert enabled().generate(**prompts(1, 4), max_new_tokens=2, num_beams=2).shape[1] <= 6
    return scores


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 2},  # of loops for one path, as the next two
        {"penalty_alpha": 0.5},
        {"assistant_early_exit": 1},
        {"prefill_chunk_size": 8},
        {"num_beams": np.int64(3), "num_return_sequences": np.int64(2)},
        {"logits_processor": [_generates_itself]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_changes_no_beam_search(options: dict[str, Any]) -> None:
    common = {**prompts(2, 20), "constraint_index": INDEX, "num_beams": 3, "num_return_sequences": 2}
    assert enabled().generate(**(common | options)).tolist() == enabled().generate(**common).tolist()
