# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Draft models and verified draft heads of real models: answers are those of PyTorch, and so are the counts of a row.

Rows of a batch that come to different levels share a forward of the draft model here, and have one each in PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax")
pytest.importorskip("flax")

from families import build
from test_draft_head import new_head
from transformers import BartConfig, GPT2Config

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable
from hf_gr.generation.call import Prompt
from hf_gr.generation.configuration import set_fields
from hf_gr.generation.flax.call import Call
from hf_gr.generation.flax.drafts import AssistantDraft

SCORE_TOL = 1e-4
ROWS = np.unique(np.random.default_rng(0).integers(3, 35, size=(600, 4)), axis=0)
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 2 + number % 3] for number, row in enumerate(ROWS)], eos_token_id=2)
BEAMS = {"num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True, "output_scores": True}
COUNTS = ("drafted_nodes", "accepted_nodes", "drafted_steps", "accepted_steps")


def on_both_sides(family: str, layers: int, seed: int, folder: Path, *, head: bool = False) -> tuple[Any, Any]:
    model = enable(build(family, seed=seed, config={"num_layers" if family == "t5" else "num_hidden_layers": layers}))
    if head:
        model.add_draft_head(new_head(4))
    model.save_pretrained(folder / f"{family}-{layers}-{seed}")
    return model, AutoModelForGenerativeRetrieval.from_pretrained(folder / f"{family}-{layers}-{seed}", backend="flax")


def check(
    models: tuple[Any, Any], drafts: tuple[Any, Any] = (None, None), *, is_lossless: bool = True, **kw: Any
) -> Any:
    prompts = np.random.default_rng(1).integers(3, 35, size=(3, 7))
    mask = np.ones_like(prompts)
    mask[0, :3] = 0
    given: dict[str, Any] = {"constraint_index": INDEX, "seed": 5, **BEAMS, **kw}
    theirs = models[0].generate(
        torch.from_numpy(prompts), attention_mask=torch.from_numpy(mask), assistant_model=drafts[0], **given
    )
    ours = models[1].generate(prompts, attention_mask=mask, assistant_model=drafts[1], **given)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    np.testing.assert_allclose(ours.sequences_scores, theirs.sequences_scores.numpy(), atol=SCORE_TOL)
    if is_lossless:
        plain = models[1].generate(prompts, attention_mask=mask, **{**given, **dict.fromkeys(DRAFTS)})
        assert ours.sequences.tolist() == plain.sequences.tolist()
    return ours.speculation, theirs.speculation


DRAFTS = ("drafting", "verification", "num_draft_beams", "draft_token_budget")


def same_counts(ours: Any, theirs: Any) -> None:
    assert (ours.target_forwards, ours.draft_forwards) == (theirs.target_forwards, theirs.draft_forwards)
    for name in COUNTS:
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"draft_token_budget": 1, "num_draft_beams": 32}),
        pytest.param("qwen3", {"do_sample": True, "top_k": 5, "draft_token_budget": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"constraint_index": RAGGED, "num_draft_beams": 16}, marks=pytest.mark.slow),
        ("t5", {"draft_token_budget": 1, "num_draft_beams": 32}),
    ],
)
def test_a_draft_model_changes_nothing_but_forwards(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    models, drafts = on_both_sides(family, 2, 0, tmp_path), on_both_sides(family, 1, 1, tmp_path)
    happened = check(models, drafts, **options)
    if "constraint_index" not in options:
        same_counts(*happened)
    assert happened[0].drafted_nodes.any()


def test_relaxed_samples_are_those_of_the_other_side(tmp_path: Path) -> None:
    models, drafts = on_both_sides("qwen3", 2, 0, tmp_path), on_both_sides("qwen3", 1, 1, tmp_path)
    options = {"verification": "relaxed", "draft_token_budget": 1, "num_draft_beams": 12}
    same_counts(*check(models, drafts, is_lossless=False, **options))


@pytest.mark.parametrize(
    ("family", "verification"),
    [("qwen3", "strict"), pytest.param("qwen3", "relaxed", marks=pytest.mark.slow), ("t5", "strict")],
)
def test_a_draft_head_is_verified(family: str, verification: str, tmp_path: Path) -> None:
    models = on_both_sides(family, 1, 0, tmp_path, head=True)
    options = {"drafting": "head", "verification": verification, "num_draft_beams": 24, "draft_token_budget": 1}
    same_counts(*check(models, is_lossless=verification == "strict", **options))


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_prompts_longer_than_the_positions_of_a_draft_model_are_refused(family: str) -> None:
    from hf_gr.flax.model import FlaxModel

    def made(limit: int) -> Any:
        if family == "gpt2":
            return FlaxModel(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=1, n_positions=limit))
        whats, parts = ("layers", "ffn_dim", "attention_heads"), ("encoder", "decoder")
        sizes: dict[str, Any] = {f"{part}_{what}": 1 for part in parts for what in whats}
        return FlaxModel(BartConfig(vocab_size=40, d_model=8, max_position_embeddings=limit, **sizes))

    # A decoder has 7 tokens behind 2 of padding, and reads all of a sequence but its last two; an encoder has 9.
    model, tokens = enable(made(32)), np.full((1, 9), 5, np.int32)
    mask = np.arange(9)[None] >= (2 if family == "gpt2" else 0)
    prompt = Prompt(tokens, mask, *tokens.shape)
    config, _ = Call.prepare_config(model, None, {"num_beams": 4})
    set_fields(config, {})
    AssistantDraft(model, config, made(9)).check(prompt, INDEX.snapshot, {}, {})
    with pytest.raises(ValueError, match="assistant_model has 8 positions, expected 9 for this prompt"):
        AssistantDraft(model, config, made(8)).check(prompt, INDEX.snapshot, {}, {})
