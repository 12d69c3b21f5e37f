# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Draft models, draft heads and users' functions of real models: answers and counts are those of PyTorch.

Rows of a batch that come to different levels share a forward of the draft model here, and have one each in PyTorch.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from families import prompts
from flax_pairs import BEAMS, DETAILS, INDEX, RAGGED, check, pair
from transformers import LogitsProcessorList

from hf_gr import ConstraintIndex
from hf_gr.flax.decode import decode_program

SLOW = pytest.mark.slow
DEEP = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(3, 35, size=(600, 4)))
NARROW: dict[str, Any] = {"draft_token_budget": 1, "num_draft_beams": 32}
SAMPLES: dict[str, Any] = {"do_sample": True, "top_k": 5, "seed": 5}
RELAXED: dict[str, Any] = {"verification": "relaxed", "seed": 5, **NARROW}
OURS = ("assistant_model", "drafting", "verification", "num_draft_beams", "draft_token_budget")
COUNTS = ("target_forwards", "draft_forwards", "drafted_nodes", "accepted_nodes", "drafted_steps", "accepted_steps")


@pytest.mark.parametrize(
    ("family", "searches", "options"),
    [
        ("qwen3", "assistant", NARROW | {"constraint_index": INDEX}),
        ("t5", "head", NARROW | {"constraint_index": INDEX}),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                ("qwen3", "assistant", NARROW),
                ("t5", "assistant", NARROW),
                ("qwen3", "assistant", RELAXED),
                ("qwen3", "assistant", SAMPLES | NARROW),
                ("qwen3", "assistant", {"constraint_index": RAGGED, "num_draft_beams": 16}),
                ("qwen3", "head", NARROW),
                ("qwen3", "head", RELAXED),
            )
        ),
    ],
    ids=str,
)
def test_what_searches_ahead_changes_nothing_but_forwards(family: str, searches: str, options: dict[str, Any]) -> None:
    mine, options = {}, {"constraint_index": DEEP, **BEAMS, **options}
    index = options["constraint_index"]
    if searches == "head":
        models = pair(family, head=index.max_length)
        options = {"verification": "strict", **options, "drafting": "head"}
    else:
        models, drafts = pair(family, layers=2), pair(family, seed=1)
        mine, options["assistant_model"] = {"assistant_model": drafts[1]}, drafts[0]
    inputs = prompts(3, 7, padded=True)
    happened = check(models, inputs, mine, **options).speculation
    assert happened.drafted_nodes.any()
    if index is not RAGGED:
        theirs = models[0].generate(**inputs, **options).speculation
        for name in COUNTS:
            assert np.array_equal(getattr(happened, name), getattr(theirs, name)), name
    if options.get("verification") != "relaxed":  # lossless
        check(models, inputs, dict.fromkeys(OURS), **options)


def test_a_head_alone_answers_as_in_pytorch() -> None:
    models, head = pair("qwen3", head=3), {"drafting": "head", **BEAMS}
    happened = check(models, prompts(3, 9, padded=True), constraint_index=INDEX, **head).speculation
    assert happened.target_forwards == 0
    assert not happened.drafted_nodes.any()
    before = decode_program._cache_size()
    check(models, prompts(3, 12, seed=1), constraint_index=INDEX.where(list(range(80))), **head)
    assert decode_program._cache_size() == before


@pytest.mark.parametrize("scores", [pytest.param(True, marks=SLOW), False])  # False: over codes, not the vocabulary
def test_the_head_of_an_encoder_decoder_knows_rules_and_lengths(scores: bool) -> None:
    views = [RAGGED.where(list(range(80))), RAGGED.where(list(range(50, 200)))]
    options = {"constraint_index": views, "exclude_items": [list(range(20)), []], "drafting": "head", **BEAMS}
    theirs = pair("t5", head=4)[0].generate(**prompts(2, 9, padded=True), **options)
    ours = pair("t5", head=4)[1].generate(
        **{name: values.numpy() for name, values in prompts(2, 9, padded=True).items()},
        **options | {"output_scores": scores},
    )
    assert ours.sequences.tolist() == theirs.sequences.tolist()


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


@pytest.mark.parametrize(
    ("index", "how"), [(INDEX, BEAMS), pytest.param(RAGGED, DETAILS, marks=SLOW)], ids=["beams", "greedy"]
)
def test_functions_of_users_do_what_they_do_in_pytorch(index: ConstraintIndex, how: dict[str, Any]) -> None:
    models, mine = pair("qwen3"), {"logits_processor": [prefer(jnp)]}
    options = {"constraint_index": index, "stopping_criteria": [stop], **how}
    options["logits_processor"] = LogitsProcessorList([prefer(torch)])
    check(models, prompts(3, 9), mine, **options)
    before = decode_program._cache_size()
    check(models, prompts(4, 5), mine, **options)
    assert decode_program._cache_size() == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits_processor": [lambda tokens, scores: scores[:, 0]]}, r"float32\[1\], expected scores of the shape"),
        ({"logits_processor": [lambda tokens, scores: None]}, "NoneType, expected"),
        ({"stopping_criteria": [lambda tokens, _: tokens[:, -1]]}, r"int32\[\d+\], expected booleans \[\d+\], one"),
        ({"stopping_criteria": [lambda tokens, _: True]}, r"bool, expected booleans \[\d+\]"),
    ],
)
def test_functions_that_return_something_else_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} returned {message}"):
        pair("qwen3")[1].generate([[5, 6]], constraint_index=INDEX, num_beams=8, **given)
