# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Hostile arguments of `generate`: an answer made of items, or an error that says what to change, before any work.

What transformers' own `generate` refuses as well may be refused by an error of another type.
"""

import traceback
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from families import EOS, PAD, build, prompts
from transformers import DynamicCache, GenerationConfig

from hf_gr import ConstraintIndex, GRGenerationConfig, enable

pytestmark = pytest.mark.slow

ROWS = np.random.default_rng(0).integers(3, 24, size=(60, 3))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 3].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)
NAMED = ConstraintIndex.from_sequences(ROWS, item_ids=[f"item {i}" for i in range(60)])
PROMPT = prompts(2, 6, padded=True)
NUMBERS = (0, -1, 1, 2.5, float("nan"), float("inf"), "8", "x", None, True, [], [3], np.int64(4), np.float32(2), 10**6)
COUNTS = NUMBERS[:-1]  # a million paths are a fair wish, and take 20 GB
# By argument: values of every kind that a caller might mean, or not.
HOSTILE: dict[str, tuple[Any, ...]] = {
    "num_beams": COUNTS,
    "num_return_sequences": COUNTS,
    "max_new_tokens": NUMBERS,
    "max_length": NUMBERS,
    "min_new_tokens": (0, 1, 2, -1, 99, "x"),
    "length_penalty": (*NUMBERS, -float("inf"), 1e300, -1e300),
    "early_stopping": ("sometimes", "never", True, False, None, 7),
    "do_sample": (True, False, None, "yes", 2),
    "temperature": NUMBERS,
    "top_k": NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "repetition_penalty": NUMBERS,
    "renormalize_logits": (True, False, None, "yes"),
    "pad_token_id": (0, PAD, 5, -1, -100, 10**6, "x", 1.5, [1], None, torch.tensor(1)),
    "eos_token_id": (0, EOS, [EOS, 5], -1, 10**6, "x", 1.5, [], [2, "x"], None, torch.tensor([2])),
    "suppress_tokens": ([], [5], [10**6], [-1], ["x"], list(range(64)), 5),
    "bad_words_ids": ([[5]], [[]], [], [[10**6]], [["x"]], 5, [list(range(3, 9))]),
    "forced_eos_token_id": (0, EOS, 5, "x", [2, 3], 10**6),
    "constraint_index": (INDEX, RAGGED, NAMED, 5, "", "nowhere/to-be-found", [], [INDEX], [INDEX, RAGGED], {"a": 1})
    + ([INDEX] * 3, [INDEX, None], [INDEX.where([1]), INDEX.where([])], ROWS, True, INDEX.where([])),
    "exclude_items": (5, [], [[1]], [[1], [2]], [[1], ["a"]], [[None], []], [[1.5], []], "abc", [[10**30], []])
    + ([[[1]], []], [[*range(60)]] * 2, [{1, 2}, (3,)], [np.arange(5), torch.arange(3)], [[-1], []], [5, 6]),
    "drafting": ("trie", "auto", "head", "assistant", "tire", 5, True, ["trie"]),
    "verification": ("strict", "relaxed", "catalogue", "none", "last_level", "lax", 3),
    "draft_token_budget": NUMBERS,
    "num_draft_beams": COUNTS,
    "num_assistant_tokens": NUMBERS,
    "assistant_model": (5, "gpt2", None, object()),
    "generator": (5, "seed", torch.Generator().manual_seed(0), np.random.default_rng(0)),
    "logits_processor": (5, [], [5], [lambda ids, scores: scores], [lambda ids, scores: scores * float("nan")])
    + ([lambda ids, scores: scores[:, :5]], [lambda ids, scores: None], [lambda ids, scores: scores - float("inf")]),
    "stopping_criteria": (5, [], [5], [lambda ids, scores: torch.ones(len(ids), dtype=torch.bool)]),
    "prefix_allowed_tokens_fn": (5, lambda batch, ids: [5, 6, 7], lambda batch, ids: [], lambda batch, ids: [10**6]),
    "attention_mask": (None, torch.zeros(2, 6), torch.ones(2, 5), torch.ones(3, 6), torch.ones(2, 6, 1), "x")
    + ([[1] * 6] * 2, torch.ones(2, 6) * 2, torch.full((2, 6), float("nan")), PROMPT["attention_mask"].flip(1))
    + (torch.ones(2, 7).bool(),),
    "input_ids": (torch.zeros(1, 0).long(), torch.zeros(0, 4).long(), torch.ones(2, 6), torch.full((2, 6), 64), None)
    + ([[5]], torch.full((2, 6), -1), torch.ones(2, 3, 6).long(), torch.full((2, 6), 2**62), torch.ones(6).long())
    + ("text",),
    "inputs_embeds": (torch.ones(2, 6, 32), torch.ones(2, 6, 31), torch.ones(2, 6), 5),
    "past_key_values": (5, (), "x", DynamicCache(), [None]),
    "generation_config": (5, "x", {}, GenerationConfig(), GRGenerationConfig(num_beams=3), INDEX),
    "use_cache": (True, False, None, "x"),
    "cache_implementation": ("static", "dynamic", "quantized", "x", 5),
    "prefill_chunk_size": NUMBERS,
    "stop_strings": ("a", ["a"], 5),
    "output_scores": (True, False, "x"),
    "output_hidden_states": (True, False),
    "return_dict_in_generate": (True, False, "x"),
    "num_beam_groups": (2,),
    "penalty_alpha": (0.5,),
    "guidance_scale": (1.5, 0),
    "prompt_lookup_num_tokens": (3, -1),
    "synced_gpus": (True, "x"),
    "streamer": (5, None),
    "tokenizer": (5, None),
    "no_such_option": (1,),
}
STATEFUL = ("generator", "past_key_values")  # each case has its own
OURS = "constraint_index exclude_items drafting verification draft_token_budget num_draft_beams generator".split()


def outcome(model: Any, given: dict[str, Any]) -> tuple[Any, Exception | None]:
    """The answer, or the error."""
    try:
        return model.generate(**given), None
    except Exception as error:
        return None, error


def check_answer(out: Any, given: dict[str, Any], model: Any) -> None:
    """Every row is an item or padding, and no score is a number that is none."""
    index = given["constraint_index"]
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    prompt = given["input_ids"]
    length = 1 if model.config.is_encoder_decoder or prompt is None else prompt.shape[1]
    if index is False or not isinstance(index, ConstraintIndex | list):
        return
    rows = sequences[:, length:]
    each = index if isinstance(index, list) else [index]
    for view, some in zip(each, rows.chunk(len(each)), strict=True):
        for row, items in zip(some.tolist(), view.items(some), strict=True):
            is_free = given.get("stopping_criteria") or given.get("verification") in ("none", "last_level")
            assert items or len(set(row)) == 1 or is_free, f"{row} is neither an item nor padding"
    scores = getattr(out, "sequences_scores", None)
    assert scores is None or not scores.isnan().any(), scores


def test_hostile_arguments_are_refused_or_answered_with_items(fuzz: Any) -> None:
    models = {family: enable(build(family)) for family in ("qwen3", "t5", "bloom")}
    names = sorted(HOSTILE)
    for case in fuzz:
        model = models[str(case.rng.choice(sorted(models)))]
        chosen = case.rng.choice(names, size=int(case.rng.choice([1, 1, 2, 3])), replace=False)
        hostile = {str(name): HOSTILE[name][int(case.rng.integers(len(HOSTILE[name])))] for name in chosen}
        hostile |= {name: deepcopy(hostile[name]) for name in STATEFUL if name in hostile}
        base = {"constraint_index": INDEX, "num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
        given = {**PROMPT, **base, **hostile}
        out, error = outcome(model, given)
        what = f"{type(model).__name__}.generate(**{hostile})"
        if error is None:
            try:
                check_answer(out, given, model)
            except Exception as wrong:
                wrong.add_note(what)
                raise
            fuzz.count(answered=1)
        elif isinstance(error, ValueError | ImportError):
            assert str(error).strip(), what
            fuzz.count(refused=1)
        else:
            theirs = {name: value for name, value in given.items() if name not in OURS}
            _, same = outcome(model, {**theirs, "constraint_index": False})
            assert same is not None, f"{what}\n{''.join(traceback.format_exception(error))}"
            fuzz.count(refused_by_transformers_too=1)
