# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Suppressed tokens, and a user's functions in Flax: whole calls in PyTorch are the oracle."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import EOS, VOCABULARY, build, prompts

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import torch
from transformers import LogitsProcessorList
from transformers.generation import NoRepeatNGramLogitsProcessor

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationConfig, enable
from hf_gr.flax import processors as ours
from hf_gr.flax.children import Children
from hf_gr.flax.decode import decode_program
from hf_gr.flax.scorers import Prompt
from hf_gr.generation.flax.processors import processors_of

SCORE_TOL = 1e-4  # fp32 sums of at most 4 log-probabilities
DETAILS = {"return_dict_in_generate": True, "output_scores": True}
BEAMS = {"num_beams": 4, "num_return_sequences": 4, **DETAILS}
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 3))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 3].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)
PADDING, PROMPT, NEW, ROOM = 3, 8, 4, 9  # of the paths below
SUPPRESSED: dict[str, Any] = {
    "suppress_tokens": [5, 6, 11],
    "begin_suppress_tokens": [12, 20, 21],
}


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


def knowing(**options: Any) -> Any:
    """Processors of three rows, whose prompts have padding in front."""
    tokens = jnp.arange(3 * PROMPT).reshape(3, PROMPT)
    return ours.Processors(**options).after(Prompt(tokens, jnp.broadcast_to(jnp.arange(PROMPT) >= PADDING, (3, 8))))


def test_paths_end_with_their_last_token_wherever_the_loop_is() -> None:
    seen = []

    def look(tokens: Any, scores: Any) -> Any:
        seen.append(tokens)
        return tokens[:, -1] > 0

    generated = jnp.arange(6 * NEW).reshape(3, 2, NEW) + 50
    knowing(criteria=(look,)).ended(generated, room=ROOM)
    prompts = np.where(np.arange(PROMPT) >= PADDING, np.arange(3 * PROMPT).reshape(3, PROMPT), -1)
    expected = np.concatenate(
        [np.full((3, 2, ROOM - NEW), -1), np.repeat(prompts[:, None], 2, axis=1), generated], axis=-1
    )
    assert np.array_equal(seen[0], expected.reshape(6, -1))


def check(models: tuple[Any, Any], inputs: dict[str, torch.Tensor], mine: Any = None, **kwargs: Any) -> Any:
    """Both sides, with what is theirs in `kwargs` and ours in `mine`: equal sequences, scores and steps."""
    given = {name: value.numpy() for name, value in inputs.items()}
    theirs, found = models[0].generate(**inputs, **kwargs), models[1].generate(**given, **(kwargs | (mine or {})))
    assert found.sequences.tolist() == theirs.sequences.tolist()
    if theirs.get("sequences_scores") is not None:
        np.testing.assert_allclose(found.sequences_scores, theirs.sequences_scores.numpy(), atol=SCORE_TOL)
    for level, scores in enumerate(theirs.scores):
        alive = np.isfinite(scores.numpy()).any(-1)
        np.testing.assert_allclose(np.asarray(found.scores[level])[alive], scores.numpy()[alive], atol=SCORE_TOL)
    return found


@pytest.mark.parametrize(
    ("family", "index", "how"),
    [
        ("qwen3", INDEX, BEAMS),
        pytest.param("qwen3", RAGGED, DETAILS, marks=pytest.mark.slow),
        pytest.param("t5", RAGGED, BEAMS | {"drafting": "trie"}, marks=pytest.mark.slow),
    ],
    ids=["beams", "greedy", "t5-drafted"],
)
def test_calls_with_a_catalogue_equal_the_other_side(
    family: str, index: ConstraintIndex, how: dict[str, Any], folder: Path
) -> None:
    models, inputs = pair(family, folder), prompts(3, 9, padded=True)
    ends = {} if index is INDEX else {"eos_token_id": EOS, "forced_eos_token_id": EOS}
    found = check(models, inputs, constraint_index=index, **SUPPRESSED, **ends, **how)
    plain = models[0].generate(**inputs, constraint_index=index, **how)
    assert found.sequences.tolist() != plain.sequences.tolist()
    before = decode_program._cache_size()
    check(models, inputs, constraint_index=index, suppress_tokens=[7, *range(14, 20)], **ends, **how)
    assert decode_program._cache_size() == before  # tokens are arguments
    with pytest.raises(AssertionError):  # a planted error
        check(models, inputs, {"begin_suppress_tokens": None}, constraint_index=index, **SUPPRESSED, **ends, **how)


def prefer(xp: Any) -> Any:
    """Scores by the last token, and by how many there are."""

    def processor(tokens: Any, scores: Any) -> Any:
        count = (tokens >= 0).sum(-1) if xp is jnp else xp.full((len(tokens),), tokens.shape[1])
        places = xp.arange(scores.shape[1])
        return scores + 3 * xp.cos(places[None] * (1 + tokens[:, -1:]) + count[:, None])

    return processor


def stop(tokens: Any, scores: Any) -> Any:
    """After a token that three divides."""
    assert scores is None
    return tokens[:, -1] % 3 == 0


OWN = prefer(jnp)


@pytest.mark.parametrize(
    ("index", "how"),
    [(INDEX, BEAMS), pytest.param(RAGGED, DETAILS, marks=pytest.mark.slow)],
    ids=["beams", "greedy"],
)
def test_functions_of_the_users_equal_the_other_side(
    index: ConstraintIndex, how: dict[str, Any], folder: Path
) -> None:
    models, inputs = pair("qwen3", folder), prompts(3, 9)
    plain = models[0].generate(**inputs, constraint_index=index, **how)
    criteria = {"stopping_criteria": [stop]}
    theirs = {"logits_processor": LogitsProcessorList([prefer(torch)]), **criteria}
    found = check(models, inputs, {"logits_processor": [OWN]}, constraint_index=index, **theirs, **how)
    assert found.sequences.tolist() != plain.sequences.tolist()
    before = decode_program._cache_size()
    check(models, prompts(4, 5), {"logits_processor": [OWN]}, constraint_index=index, **theirs, **how)
    assert decode_program._cache_size() == before
    theirs["logits_processor"] = LogitsProcessorList([lambda tokens, scores: prefer(torch)(tokens + 1, scores)])
    with pytest.raises(AssertionError):  # a planted error
        check(models, inputs, {"logits_processor": [OWN]}, constraint_index=index, **theirs, **how)


def read(**fields: Any) -> Any:
    """The processors of a config, or what is wrong with it."""
    given = {name: fields.pop(name) for name in ("logits_processor", "stopping_criteria") if name in fields}
    config = GRGenerationConfig(eos_token_id=EOS)
    for name, value in fields.items():  # the constructor checks some itself
        setattr(config, name, value)
    return processors_of(config, vocab_size=VOCABULARY, **given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suppress_tokens": 5.0}, "suppress_tokens=5.0, expected a list of token ids"),
        ({"begin_suppress_tokens": ["5"]}, "begin_suppress_tokens=.*expected a list of token ids"),
        ({"logits_processor": OWN}, "logits_processor is a function, expected a list of functions: pass"),
        ({"logits_processor": [3]}, "logits_processor has 3, expected functions of JAX"),
        ({"stopping_criteria": [[]]}, r"stopping_criteria has \[\], expected functions of JAX"),
        (
            {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])},
            "logits_processor has a NoRepeatNGramLogitsProcessor, which is PyTorch's.*backend='torch'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_no_processor_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**fields)


def test_what_has_no_effect_makes_no_processor() -> None:
    assert read(suppress_tokens=[], begin_suppress_tokens=[-1, VOCABULARY], logits_processor=[]) is None
    assert read(stopping_criteria=()) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5]]},
        {"sequence_bias": [[[5], 1.0]]},
        {"min_new_tokens": 2},
        {"min_length": 12},
        {"exponential_decay_length_penalty": (1, 1.1)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_processors_are_refused_and_the_fix_is_named(fields: dict[str, Any], folder: Path) -> None:
    _, model = pair("qwen3", folder)
    name, value = next(iter(fields.items()))
    fix = f"use backend='torch', or pass {name}=.* and a function in JAX as logits_processor="
    with pytest.raises(
        ValueError, match=f"{name}={re.escape(repr(value))}, expected .*: not supported in Flax; {fix}"
    ):
        model.generate([[5, 6, 7]], constraint_index=INDEX, **fields)


def test_functions_that_return_something_else_are_refused() -> None:
    legal = Children(jnp.zeros((3, 2, 4), jnp.int32), jnp.zeros((3, 2), jnp.int32))
    given = (jnp.zeros((3, 2, 4)), legal, jnp.zeros((3, 2, NEW), jnp.int32))
    size = {"vocab_size": 10, "room": ROOM}
    with pytest.raises(ValueError, match=r"logits_processor returned float32\[6\], expected scores of the shape"):
        knowing(functions=(lambda tokens, scores: scores[:, 0],)).scores(*given, **size)
    with pytest.raises(ValueError, match="logits_processor returned NoneType, expected"):
        knowing(functions=(lambda tokens, scores: None,)).scores(*given, **size)
    for criterion in (lambda tokens, _: tokens[:, -1], lambda tokens, _: jnp.bool(True), lambda tokens, _: True):
        with pytest.raises(ValueError, match=r"stopping_criteria returned .*, expected booleans \[6\]"):
            knowing(criteria=(criterion,)).ended(given[2], room=ROOM)
