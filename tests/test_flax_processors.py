# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits processors and stopping criteria in Flax: transformers' own are the oracle, one by one and in whole calls."""

from __future__ import annotations

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
from transformers.generation import (
    ExponentialDecayLengthPenalty,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationConfig, enable
from hf_gr.flax import processors as ours
from hf_gr.flax.decode import decode_program
from hf_gr.generation.flax.processors import processors_of

SCORE_TOL = 1e-4  # fp32 sums of at most 4 log-probabilities
DETAILS = {"return_dict_in_generate": True, "output_scores": True}
BEAMS = {"num_beams": 4, "num_return_sequences": 4, **DETAILS}
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 3))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 3].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)
PADDING, PROMPT, NEW, ROOM, SIZE = 3, 8, 4, 9, 10  # of the paths below
ALL: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[10], [11, 12], [4, 5, 6]],
    "sequence_bias": [[[5, 6], -3.0], [[9], 2.0]],
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [20, 21],
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


@cache
def paths() -> tuple[np.ndarray, np.ndarray]:
    """Tokens of paths with padding in front, few different ones, and scores."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, size=(6, PROMPT + NEW))
    tokens[::2, :PADDING] = SIZE - 1
    return tokens, rng.normal(size=(6, SIZE)).astype(np.float32)


def mask_of(*tokens: int) -> np.ndarray:
    return np.isin(np.arange(SIZE), tokens)


PADDED = torch.tensor([PADDING, 0] * 3)
END = torch.tensor([1, 2])
BIASES = {(1,): -2.0, (0, 1): float("-inf"), (2, 3): 4.0, (2, 0, 1): 1.5, (1, 1, 1, 1): -8.0}
ONE_BY_ONE = {
    "repetition": (ours.Repetition(1.5), RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=PADDED)),
    **{f"no-{n}-gram": (ours.NoRepeat(n), NoRepeatNGramLogitsProcessor(n)) for n in (1, 2, 3, 13)},
    "biases": (ours.Biases.of(list(BIASES), list(BIASES.values())), SequenceBiasLogitsProcessor(BIASES)),
    "bad words": (ours.Biases.of([[3], [1, 0]], [-np.inf] * 2), NoBadWordsLogitsProcessor([[3], [1, 0]])),
    "suppressed": (ours.Forbidden(mask_of(0, 7), 0, ours.NEVER), SuppressTokensLogitsProcessor([0, 7])),
    "begin": (ours.Forbidden(mask_of(3), NEW, NEW + 1), SuppressTokensAtBeginLogitsProcessor([3], PROMPT + NEW)),
    "later": (ours.Forbidden(mask_of(3), 0, 1), SuppressTokensAtBeginLogitsProcessor([3], PROMPT)),
    "least": (ours.Forbidden(mask_of(1, 2), 0, NEW + 1), MinNewTokensLengthLogitsProcessor(PROMPT, NEW + 1, END)),
    "enough": (ours.Forbidden(mask_of(1, 2), 0, NEW), MinNewTokensLengthLogitsProcessor(PROMPT, NEW, END)),
    "decay": (ours.Decay(mask_of(1, 2), 1, 1.3), ExponentialDecayLengthPenalty((1, 1.3), END, PROMPT)),
    "no decay": (ours.Decay(mask_of(1, 2), 4, 1.3), ExponentialDecayLengthPenalty((4, 1.3), END, PROMPT)),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_processor_is_that_of_transformers(name: str) -> None:
    mine, theirs = ONE_BY_ONE[name]
    tokens, scores = paths()
    scores = scores.copy()
    scores[:, -2] = -np.inf  # what another processor forbids
    shown = np.concatenate([np.full((6, ROOM - NEW), -1), tokens], axis=1)
    shown[::2, ROOM - NEW : ROOM - NEW + PADDING] = -1
    found = ours.apply([mine], jnp.asarray(shown)[:, None], jnp.asarray(scores)[:, None], step=jnp.int32(NEW))
    expected = theirs(torch.tensor(tokens), torch.tensor(scores)).numpy()
    if name == "no-1-gram":  # padding is no token here, and one that the path has in transformers
        expected[::2, SIZE - 1] = scores[::2, SIZE - 1]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5)  # powers in fp32
    if name not in ("later", "enough", "no decay", "no-13-gram"):
        assert not np.array_equal(expected, scores)


def test_paths_end_with_their_last_token_wherever_the_loop_is() -> None:
    tokens, _ = paths()
    generated = jnp.asarray(tokens[:, PROMPT:].reshape(3, 2, NEW))
    knowing = ours.Processors(prompt=jnp.asarray(tokens[::2, :PROMPT]))
    expected = np.concatenate(
        [np.full((3, 2, ROOM - NEW), -1), np.repeat(tokens[::2, None, :PROMPT], 2, axis=1), generated], axis=-1
    )
    assert np.array_equal(knowing.paths(generated, room=ROOM), expected)


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
    ends = {} if index is INDEX else {"eos_token_id": EOS, "min_new_tokens": 2, "forced_eos_token_id": EOS}
    found = check(models, inputs, constraint_index=index, **ALL, **ends, **how)
    plain = models[0].generate(**inputs, constraint_index=index, **how)
    assert found.sequences.tolist() != plain.sequences.tolist()
    before = decode_program._cache_size()
    changed = ALL | {"repetition_penalty": 2.5, "suppress_tokens": [7], "bad_words_ids": [[13], [4, 3, 7, 8]]}
    check(models, inputs, constraint_index=index, **changed, **ends, **how)
    assert decode_program._cache_size() == before  # numbers and tokens are arguments


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
    return processors_of(config, vocab_size=VOCABULARY, prompt_length=1, **given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0, expected more than 0"),
        ({"repetition_penalty": "high"}, "repetition_penalty='high', expected more than 0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1, expected an integer"),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size=2.5, expected an integer"),
        ({"bad_words_ids": []}, r"bad_words_ids=\[\], expected a list of lists"),
        ({"bad_words_ids": [5]}, "bad_words_ids has 5, expected a list of token ids"),
        ({"bad_words_ids": [[]]}, r"bad_words_ids has \[\], expected"),
        ({"bad_words_ids": [["no"]]}, "bad_words_ids has"),
        ({"bad_words_ids": [[VOCABULARY]]}, f"bad_words_ids has token {VOCABULARY}, expected 0 to less than"),
        ({"sequence_bias": {}}, "sequence_bias=.*expected a list of pairs"),
        ({"sequence_bias": [[5, 1.0]]}, "sequence_bias has 5, expected a list of token ids"),
        ({"sequence_bias": [[[5], "much"]]}, "sequence_bias has"),
        ({"suppress_tokens": 5.0}, "suppress_tokens=5.0, expected a list of token ids"),
        ({"begin_suppress_tokens": ["5"]}, "begin_suppress_tokens=.*expected a list of token ids"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1, expected an integer, 0 or more"),
        ({"min_length": 2.5}, "min_length=2.5, expected an integer, 0 or more"),
        ({"exponential_decay_length_penalty": 1.5}, "exponential_decay_length_penalty=1.5, expected a pair"),
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
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 1, "min_new_tokens": None}
    assert read(**neutral, bad_words_ids=[[EOS]], logits_processor=[], stopping_criteria=()) is None
    assert read(eos_token_id=None, min_length=9, exponential_decay_length_penalty=(1, 1.1)) is None


def test_functions_that_return_something_else_are_refused() -> None:
    tokens, scores = (jnp.asarray(one) for one in paths())
    with pytest.raises(ValueError, match=r"logits_processor returned float32\[6\], expected scores of the shape"):
        ours.Own(lambda tokens, scores: scores[:, 0])(tokens, scores, 0)
    with pytest.raises(ValueError, match="logits_processor returned NoneType, expected"):
        ours.Own(lambda tokens, scores: None)(tokens, scores, 0)  # pyright: ignore
    for criterion in (lambda tokens, _: tokens[:, -1], lambda tokens, _: jnp.bool(True), lambda tokens, _: True):
        with pytest.raises(ValueError, match=r"stopping_criteria returned .*, expected booleans \[6\]"):
            ours.Processors(criteria=(criterion,)).ended(tokens[:, None])


@pytest.mark.parametrize("planted", ["Repetition", "NoRepeat", "Biases", "Forbidden", "Own"])
def test_a_planted_error_is_seen(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does nothing, or acts one token late, differs from transformers."""
    right = getattr(ours, planted).__call__
    names = {"Repetition": "repetition", "NoRepeat": "no-2-gram", "Biases": "biases", "Forbidden": "least"}
    late = planted in ("NoRepeat", "Biases")
    monkeypatch.setattr(
        getattr(ours, planted),
        "__call__",
        lambda self, tokens, scores, step: right(self, tokens[:, :-1], scores, step) if late else scores,
    )
    if planted == "Own":
        assert ours.Own(lambda tokens, scores: scores + 1)(*map(jnp.asarray, paths()), 0)[0, 0] == paths()[1][0, 0]
        return
    with pytest.raises(AssertionError):
        test_a_processor_is_that_of_transformers(names[planted])
