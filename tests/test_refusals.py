# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls that `generate` refuses before any work, in one table: on both backends, unless only one has the argument."""

import functools
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import EOS, PAD, VOCABULARY, build, shared
from transformers import MaxLengthCriteria, StaticCache
from transformers.generation import NoRepeatNGramLogitsProcessor

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, ConstraintLogitsProcessor, SemanticIds, enable
from hf_gr.generation.flax.logits_process import FlaxConstraintLogitsProcessor

LENGTH = 3
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, LENGTH))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 3].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)
IDS = np.random.default_rng(1).integers(3, 24, size=(2, 6))
RELAXED = {"verification": "relaxed", "num_return_sequences": 3}
GROUPS = {"num_beam_groups": 2, "diversity_penalty": 0.5}

Refused = list[tuple[dict[str, Any], str]]


def tokens(ids: Any, **others: Any) -> dict[str, Any]:
    return {"input_ids": np.array(ids), "attention_mask": None, **others}


def mask(rows: Any) -> dict[str, Any]:
    return {"attention_mask": np.array(rows)}


# "small" and "other" stand for draft models; a `partial` makes what can be used once.
BOTH: Refused = [
    ({"max_new_tokens": 2}, "max_new_tokens=2 leaves 2 new tokens, expected at least 3 for the longest"),
    ({"max_length": 8}, "max_length=8 leaves 2 new tokens"),
    ({"max_length": "8"}, "max_length='8', expected an int"),
    ({"max_new_tokens": "2"}, "max_new_tokens='2', expected a number and not a text"),
    ({"max_new_tokens": 7.5}, "max_new_tokens=7.5, expected an int"),
    ({"num_return_sequences": "2"}, "num_return_sequences='2', expected a number and not a text"),
    ({"constraint_index": ConstraintIndex.from_sequences([[5, VOCABULARY]])}, "has token 64, expected less than"),
    ({"constraint_index": [[3, 4]]}, "constraint_index is a list"),
    ({"constraint_index": 7}, "constraint_index is a int"),
    ({"constraint_index": ""}, "constraint_index is '', expected"),
    ({"constraint_index": "no/such/folder/here"}, "is no folder here"),
    ({"constraint_index": SemanticIds([[0], [1]])}, r"is a SemanticIds, .*: pass ids.constraint_index\(\)"),
    ({"constraint_index": "x" * 300}, "has 300 characters, expected a folder or a repository id"),
    ({"constraint_index": [INDEX]}, "constraint_index has 1 entries, expected 2: one for each prompt"),
    ({"constraint_index": []}, "constraint_index has 0 entries, expected 2"),
    ({"constraint_index": [INDEX, RAGGED]}, r"constraint_index\[1\] is no view of the catalogue of constraint_index"),
    ({"exclude_items": [[1]]}, "exclude_items has 1 entries, expected 2: one for each prompt"),
    ({"exclude_items": partial(iter, [[1]])}, "exclude_items has 1 entries, expected 2: one for each prompt"),
    ({"exclude_items": np.array(3)}, "exclude_items is 3, expected a list of item ids for each request"),
    ({"exclude_items": [[1], ["ham"]]}, r"exclude_items\[1\]\[0\]='ham', expected integers"),
    ({"exclude_items": [1, 2]}, r"exclude_items\[0\] is 1, expected a list of item ids"),
    ({"exclude_items": 7}, "exclude_items is 7, expected a list of item ids for each request"),
    ({"generation_config": INDEX}, "generation_config is a ConstraintIndex.*: pass it as constraint_index="),
    ({"generation_config": {"num_beams": 2}}, "generation_config is a dict, expected a GenerationConfig"),
    (GROUPS, "generation mode|num_beam_groups"),
    ({"num_return_sequences": 5}, "num_return_sequences"),
    ({"num_beams": 0}, "num_beams=0, expected an int, 1 or more"),
    ({"num_beams": True}, "num_beams=True, expected an int"),
    ({"num_beams": np.float64(2)}, r"num_beams=np.float64\(2.0\), expected an int"),
    ({"length_penalty": None}, "length_penalty=None, expected a finite number"),
    ({"length_penalty": 300.0, "constraint_index": RAGGED}, "length_penalty=300.0, expected -49"),
    ({"pad_token_id": 1.5}, "pad_token_id=1.5, expected a token id"),
    ({"top_k": "8"}, "top_k='8', expected an int"),
    ({"stopping_criteria": 5}, "stopping_criteria.*, expected a list of functions"),
    ({"logits_processor": [5]}, r"logits_processor.*5.*, expected"),
    (tokens([[5, -100]] * 2), "the prompt has token -100, expected 0 to less than 64"),
    (tokens([[5, 64]] * 2), "the prompt has token 64, expected 0 to less than 64"),
    (tokens([5, 6]), r"the prompt is \[2\] of int64, expected integers \[batch, length\]"),
    (tokens(np.ones((2, 6), np.float32)), r"the prompt is \[2, 6\] of float32, expected integers"),
    (tokens(np.ones((2, 0), int)), "the prompt has no token"),
    (tokens(np.ones((0, 2), int)), "the batch has 0 prompts"),
    (mask(np.full((2, 6), 0.5)), "attention_mask has 0.5, expected 0 at padding and 1"),
    (mask(np.ones((1, 6))), r"attention_mask is \[1, 6\], expected \[2, 6\] as the prompt: a row for every prompt"),
    (mask(np.ones((2, 5))), r"attention_mask is \[2, 5\], expected \[2, 6\]"),
    (mask(np.ones((2, 1, 6, 6))), r"attention_mask is \[2, 1, 6, 6\]"),
    (mask([[1] * 6, [0] * 6]), "prompt 1 is all padding"),
    (mask([[1] * 6, [1] * 4 + [0] * 2]), "prompt 1 ends with padding, expected padding on the left"),
    (tokens([[5, 6], [7, PAD]], pad_token_id=PAD), "padding_side='left'"),
    # Exact search, beams by level, and values of items
    ({"exact": "yes"}, "exact='yes', expected True or False"),
    ({"exact": True, "num_beams": 1}, "num_beams=1 with exact=True, expected 2 or more"),
    ({"exact": True, "max_nodes": 1}, "max_nodes=1, expected at least 2"),
    ({"exact": True, "max_nodes": 0}, "max_nodes=0, expected a positive integer"),
    ({"max_nodes": 9}, "max_nodes=9 without exact=True"),
    ({"exact": True, "output_logits": True}, "output_logits=True with exact=True"),
    ({"exact": True, "stopping_criteria": [lambda ids, scores: ids[:, 0] > 0]}, "with exact=True, expected neither"),
    ({"exact": True, "verification": "relaxed"}, "with exact=True"),
    ({"num_beams": [3, 2], "num_return_sequences": 3}, r"num_beams=\[3, 2\], expected 2 beams or more on some level"),
    ({"num_beams": [0, 4]}, "num_beams has 0, expected 1 or more"),
    ({"num_beams": [4], "exact": True}, "num_beams is a list, expected a number with exact=True"),
    ({"item_bias": [1.0]}, "item_bias has 1 entries, expected 300"),
    ({"item_bias": {0: np.inf}}, "item_bias has inf, expected finite numbers"),
    ({"item_bias": ["a"] * 300}, "expected a number for each item"),
    ({"item_bias": {"ham": 1.0}}, r"item_bias\[0\]='ham', expected integers"),
    ({"item_bias": {0: 1.0}, "num_beams": 1}, "item_bias with num_beams=1"),
    ({"item_bias": {0: 1.0}, "do_sample": True}, "item_bias with num_beams=4 and do_sample=True"),
    ({"item_groups": {0: 1}}, "item_groups without max_per_group"),
    ({"max_per_group": 0}, "max_per_group=0, expected a positive integer"),
    ({"max_per_group": 2, "num_beams": 1}, "max_per_group with num_beams=1"),
    (
        {"max_per_group": 2, "item_groups": "category"},
        "item_groups='category', expected the path of a table: category does not say what it is",
    ),
    # Drafts
    ({"drafting": ["trie"]}, r"drafting=\['trie'\], expected one of"),
    ({"drafting": "magic"}, "drafting='magic', expected one of"),
    ({"drafting": "assistant"}, "drafting='assistant' without assistant_model, expected both"),
    ({"drafting": "head"}, "drafting='head' and the model has no draft head, expected one"),
    ({"drafting": "head", "verification": "strict"}, "drafting='head' and the model has no draft head"),
    ({"verification": "lax"}, "verification='lax', expected one of"),
    ({"verification": "catalogue"}, "verification='catalogue' with drafting=None, expected drafting='head'"),
    ({"verification": "catalogue", "drafting": "trie"}, "verification='catalogue' with drafting='trie'"),
    ({"verification": "relaxed", "do_sample": False}, "do_sample=False with verification='relaxed'"),
    ({"num_beams": 1, "do_sample": True, **RELAXED}, "num_return_sequences=3, expected at most num_beams=1"),
    ({"num_draft_beams": 8}, "num_draft_beams=8 without a draft model, expected both"),
    ({"num_draft_beams": 8, "drafting": "trie"}, "num_draft_beams=8 without a draft model, expected both"),
    ({"num_draft_beams": -1}, "num_draft_beams=-1, expected a positive integer"),
    ({"draft_token_budget": 8}, "draft_token_budget=8 without drafting"),
    ({"draft_token_budget": -1, "drafting": "trie"}, "draft_token_budget=-1, expected a positive integer"),
    ({"code_book": {"ham": 5}}, "code_book={'ham': 5}, expected tokens by item id, as index.code_book"),
    ({"draft_token_budget": True, "drafting": "trie"}, "draft_token_budget=True, expected a positive integer"),
    ({"assistant_model": "draft"}, "assistant_model is a str, expected a"),
    ({"assistant_model": "other"}, "assistant_model has a vocabulary of 50 tokens, expected the model"),
    ({"assistant_model": "small", "num_draft_beams": 3}, "num_draft_beams=3, expected at least num_beams=4"),
    (
        {"assistant_model": "small", "num_draft_beams": 2, "num_beams": 1, "num_return_sequences": 3}
        | {"do_sample": True},
        "num_draft_beams=2, expected at least num_return_sequences=3",
    ),
    ({"assistant_model": "small", "num_assistant_tokens": 0}, "num_assistant_tokens=0, expected 1 or more"),
    ({"assistant_model": "small", "num_assistant_tokens": 1.5}, "num_assistant_tokens=1.5, expected 1"),
    ({"assistant_model": "small", "drafting": "trie"}, "drafting='trie' with assistant_model"),
    ({"assistant_model": "small", "drafting": "head"}, "drafting='head' with assistant_model"),
    ({"assistant_model": "small", "verification": "catalogue"}, "verification='catalogue' with drafting=None"),
    ({"drafting": "auto", "verification": "catalogue"}, "verification='catalogue' with drafting='auto'"),
    ({"drafting": "auto", "num_draft_beams": 4}, "num_draft_beams=4 without a draft model"),
    ({"drafting": "auto", "assistant_model": "small", "num_draft_beams": 3}, "num_draft_beams=3, expected at least"),
    ({"drafting": "auto", "assistant_model": "other"}, "assistant_model has a vocabulary of 50 tokens"),
    ({"seed": 7.0}, "seed=7.0, expected an integer: pass seed=7"),
    ({"seed": [7]}, "seed has 1 entries, expected 2, one for each prompt"),
]
IN_LOOP = r"with constraint_index, expected none: .* logits_processor=\[ConstraintLogitsProcessor\(index\)\]"
TORCH: Refused = [
    ({"exact": True, "do_sample": True, "top_k": 5}, "TopK.* with exact=True"),
    ({"exact": True, "repetition_penalty": 1.5}, "RepetitionPenalty.* with exact=True"),
    ({"exact": True, "use_cache": False}, "exact is given, expected None in transformers' loop"),
    ({"num_beams": [4], "use_cache": False}, "widths is given, expected None in transformers' loop"),
    ({"max_per_group": 2, "use_cache": False}, "max_per_group is given, expected None in transformers' loop"),
    ({"stopping_criteria": [MaxLengthCriteria(8)]}, "stopping criterion of max_length=8 leaves 2"),
    ({"constraint_index": "."}, "not loaded from one"),
    ({"custom_generate": "me/loop"}, "custom_generate is given"),
    ({"streamer": 5}, "streamer is given, expected None: with constraint_index"),
    ({"constraint_index": None, "exclude_items": [[], []]}, "exclude_items given without constraint_index"),
    ({"constraint_index": None, "drafting": "trie"}, "drafting given without constraint_index"),
    ({"constraint_index": None, "seed": 0}, "seed given without constraint_index"),
    ({"constraint_index": None, "verification": "relaxed"}, "verification given without constraint_index"),
    ({"past_key_values": StaticCache(config=shared("qwen3").config, max_cache_len=32)}, "expected a DynamicCache"),
    ({"past_key_values": (), "drafting": "head"}, "past_key_values is a tuple, expected a DynamicCache"),
    ({"unknown_argument": 4}, "unknown_argument"),
    ({"exclude_item": [[1]]}, "model_kwargs.*'exclude_item'"),  # transformers' own
    ({"input_ids": [[5, 6]], "attention_mask": None}, r"the prompt is a list, expected a tensor \[batch, length\]"),
    ({"input_ids": torch.ones(2, 6).long().to_sparse()}, "the prompt is torch.sparse_coo, expected a dense tensor"),
    ({"inputs_embeds": torch.ones(2, 6, 32, device="meta")}, "the prompt is on the meta device, expected"),
    ({"attention_mask": torch.ones(2, 6, device="meta")}, "attention_mask is on the meta device, expected"),
    ({"exclude_items": torch.ones(2, 6, device="meta")}, "is on the meta device, expected"),
    ({"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn=5, expected a function"),
    ({"output_hidden_states": True}, f"output_hidden_states {IN_LOOP}"),
    ({"output_attentions": True}, f"output_attentions {IN_LOOP}"),
    ({"stop_strings": "a"}, f"stop_strings {IN_LOOP}"),
    ({"assistant_model": shared("t5")}, "assistant_model is a T5ForConditionalGeneration"),
    ({"assistant_model": "small", "guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"assistant_model": partial(lambda: build("llama").train())}, "assistant_model is in training mode"),
    ({"generator": 7}, "generator is int, expected a torch.Generator"),
    ({"seed": 7, "generator": torch.Generator()}, "seed and generator are given, expected one of them"),
    ({"seed": 7, "do_sample": True, "use_cache": False}, "seed is given, expected None in transformers' loop: use t"),
]
FLAX: Refused = [
    ({"exact": True, "do_sample": True, "top_p": 0.5}, "top_p with exact=True, expected neither"),
    ({"exact": True, "suppress_tokens": [5]}, "suppress_tokens with exact=True, expected neither"),
    ({"exact": True, "logits_processor": [lambda tokens, scores: scores]}, "logits_processor with exact=True"),
    ({"constraint_index": None}, "constraint_index=None, expected a catalogue.*backend='torch'"),
    ({"constraint_index": False, "max_new_tokens": 3}, "constraint_index=False, expected a catalogue"),
    ({"constraint_index": None, "constraint_indx": INDEX}, "constraint_index=None, expected a catalogue"),
    ({"draft_model": 5}, "draft_model is given"),
    ({"logits_processor": [ConstraintLogitsProcessor(INDEX)]}, "ConstraintLogitsProcessor.*pass constraint_index="),
    ({"logits_processor": partial(lambda: [FlaxConstraintLogitsProcessor(INDEX, 6)])}, "pass constraint_index= "),
    ({"logits_processor": len}, "logits_processor is a builtin_function_or_method, expected a list of functions"),
    ({"stopping_criteria": [[]]}, r"stopping_criteria has \[\], expected functions of JAX"),
    ({"logits_processor": [NoRepeatNGramLogitsProcessor(2)]}, "which is PyTorch's.*backend='torch'"),
    ({"repetition_penalty": 1.3}, "backend='torch', or pass repetition_penalty=1.0 and a function in JAX as"),
    ({"bad_words_ids": [[5]]}, r"bad_words_ids=\[\[5\]\], expected None: not supported in Flax"),
    ({"begin_suppress_tokens": ["5"]}, "begin_suppress_tokens=.*expected a list of token ids"),
    ({"separator": ";"}, "separator is given, expected None in Flax: an answer is one"),
    ({"streamer": len}, "streamer is given"),
    ({"inputs_embeds": np.zeros((1, 3, 4))}, "inputs_embeds is given"),
    ({"past_key_values": object()}, "past_key_values is given"),
    ({"generator": torch.Generator()}, "generator is given, expected None in Flax: pass seed="),
    ({"seed": 7, "key": 7, "do_sample": True}, "seed and key are given, expected one of them"),
    ({"key": "seed", "do_sample": True}, "key='seed', expected a seed"),
    ({"key": 2**70, "do_sample": True}, "expected a seed"),
    ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty=1.2, expected 1.0.*backend='torch'"),
    ({"token_healing": True}, "token_healing=True, expected False"),
    ({"typical_p": 0.5, "do_sample": True}, "typical_p=0.5"),
    ({"temperature": 0.0, "do_sample": True}, "temperature=0.0, expected more than 0"),
    ({"temperature": "hot", "do_sample": True}, "temperature='hot', expected a number and not a text"),
    ({"top_k": -1, "do_sample": True}, "top_k=-1, expected an integer"),
    ({"top_k": 2.5, "do_sample": True}, "top_k=2.5, expected an integer"),
    ({"top_p": -0.1, "do_sample": True}, "top_p=-0.1, expected 0 to 1"),
    ({"min_p": 1.5, "do_sample": True}, "min_p=1.5, expected 0 to 1"),
    ({"pad_token_id": 2**31}, f"pad_token_id={2**31}, expected at most {2**31 - 1}"),
    ({"pad_token_id": None, "eos_token_id": [2**31]}, f"eos_token_id={2**31}, expected at most"),
    ({"decoder_input_ids": [[1]] * 2}, "decoder_input_ids is given, expected None: the model is a decoder"),
    ({"drafting": "head", "verification": "last_level"}, "verification='last_level', expected another"),
    ({"input_ids": None, "attention_mask": None}, "inputs=None, expected prompts"),
    ({"inputs": [[1]]}, "inputs and input_ids are given"),
    ({"input_ids": [[5, 6], [7]]}, "ragged, expected"),
    ({"input_ids": [[5, 2**31 + 5]]}, f"has token {2**31 + 5}"),
    ({"input_ids": {"input_ids": [[5, 6]]}}, r"inputs is a dict, expected an array: call generate\(\*\*batch\)"),
    ({"attention_mask": [[1], [1, 1]]}, "attention_mask is ragged, expected"),
]
CALLS = [
    pytest.param(backend, *case, id=f"{backend} {number} {next(iter(case[0]))}")
    for cases, backends in ((BOTH, ("torch", "flax")), (TORCH, ("torch",)), (FLAX, ("flax",)))
    for number, case in enumerate(cases)
    for backend in backends
]
SIZES = {"model": {}, "small": {}, "other": {"vocab_size": 50}}


@cache
def model_of(name: str, backend: str, folder: Path) -> Any:
    model = enable(build("qwen3", config={"num_hidden_layers": 1, **SIZES[name]}))
    if backend == "torch":
        return model
    model.save_pretrained(folder / name)
    return AutoModelForGenerativeRetrieval.from_pretrained(folder / name, backend=backend)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("refusals")


@pytest.mark.parametrize(("backend", "kwargs", "message"), CALLS)
def test_bad_arguments_are_refused_before_any_work(
    backend: str, kwargs: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "flax":
        monkeypatch.setattr("hf_gr.generation.flax.mixin.decode_program", lambda *args: pytest.fail("work was done"))
    model = model_of("model", backend, folder)
    given = {
        "input_ids": IDS,
        "attention_mask": np.ones_like(IDS),
        "constraint_index": INDEX,
        "num_beams": 4,
        **kwargs,
    }
    given = {name: value() if isinstance(value, partial) else value for name, value in given.items()}
    if isinstance(name := given.get("assistant_model"), str) and name in SIZES:
        given["assistant_model"] = model_of(name, backend, folder)
    if backend == "torch":
        given = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in given.items()}
        forward = functools.wraps(type(model).forward)(lambda *args, **kwargs: pytest.fail("work was done"))
        monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ValueError, match=message):
        model.generate(**given)
