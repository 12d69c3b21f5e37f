# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The constraint as a processor in JAX, against the one in PyTorch: any tokens and rules, in and outside of jit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from families import EOS
from jax import lax

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor
from hf_gr.generation.flax.logits_process import FlaxConstraintLogitsProcessor

VOCABULARY, PROMPT, ROWS, STEPS = 12, 2, 12, 4
LABELS = [[3], [3, 4], [3, 4, 5], [6, 3], [6, 7], [8, 4, 4]]
IDS = list("abcdef")
INDEX = ConstraintIndex.from_sequences(LABELS, item_ids=IDS, eos_token_id=EOS)
EVEN = ConstraintIndex.from_sequences([label for label in LABELS if len(label) == 2])
GROWN = ConstraintIndex.from_sequences(LABELS[:4], item_ids=IDS[:4], eos_token_id=EOS)
GROWN.add([[6, 7], [3, 4, 9], [10]], item_ids=["x", "y", "z"])
GROWN.remove(["b"])
NOTHING = INDEX.where([])
PER_PROMPT = [INDEX, INDEX.where(["a", "c"]), INDEX.where(["d"]), NOTHING]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ragged": (INDEX, {}),
    "even": (EVEN, {}),
    "grown": (GROWN, {}),
    "rules": (PER_PROMPT, {}),
    "excluded": (INDEX, {"exclude_items": [["a", "e"], [], ["f"], IDS]}),
}


def random_rows(seed: int, *, length: int = PROMPT + STEPS) -> np.ndarray:
    """Prefixes of labels with their ends, some with a wrong token."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(3, VOCABULARY, size=(ROWS, length))
    for row in rows[: ROWS * 3 // 4]:
        label = [*LABELS[draw.integers(len(LABELS))], EOS, EOS, EOS][:STEPS]
        row[PROMPT : PROMPT + len(label)] = label
    return rows


def random_scores(seed: int) -> np.ndarray:
    """Scores; other processors have forbidden some tokens, in one row all."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    scores[draw.random(scores.shape) < 0.3] = -np.inf
    scores[0] = -np.inf
    return scores


compiled: Any = jax.jit(lambda processor, *given: processor(*given))


@pytest.mark.parametrize("name", CASES)
def test_scores_are_pytorchs(name: str) -> None:
    index, options = CASES[name]
    theirs = ConstraintLogitsProcessor(index, PROMPT, **options)
    ours = FlaxConstraintLogitsProcessor(index, PROMPT, **options)
    for seed in range(4):
        rows, scores = random_rows(seed), random_scores(seed)
        for length in range(PROMPT, PROMPT + STEPS + 1):
            expected = theirs(torch.from_numpy(rows[:, :length]), torch.from_numpy(scores)).numpy()
            np.testing.assert_array_equal(compiled(ours, rows, scores, length), expected)
    if name == "rules":  # outside of jit every operation is compiled on its own
        tokens = rows[:, : PROMPT + 2]
        expected = theirs(torch.from_numpy(tokens), torch.from_numpy(scores)).numpy()
        np.testing.assert_array_equal(ours(jnp.asarray(tokens), jnp.asarray(scores)), expected)
    np.testing.assert_array_equal(compiled(ours, rows, scores, PROMPT - 1), scores)  # inside the prompt


def test_a_whole_loop_is_one_program_and_finds_items() -> None:
    processor = FlaxConstraintLogitsProcessor(PER_PROMPT[:3], PROMPT)

    @jax.jit
    def loop(processor: Any, logits: Any) -> Any:
        start = jnp.zeros((ROWS, PROMPT + STEPS), jnp.int32)

        def step(state: Any) -> Any:
            tokens, length = state
            masked = processor(tokens, logits[length - PROMPT], length)
            return tokens.at[:, length].set(masked.argmax(-1).astype(jnp.int32)), length + 1

        return lax.while_loop(lambda state: state[1] < PROMPT + STEPS, step, (start, PROMPT))[0]

    logits = np.random.default_rng(0).normal(size=(STEPS, ROWS, VOCABULARY)).astype(np.float32)
    found = np.asarray(loop(processor, logits))
    theirs, tokens = ConstraintLogitsProcessor(PER_PROMPT[:3], PROMPT), torch.zeros((ROWS, PROMPT), dtype=torch.long)
    for scores in logits:
        tokens = torch.cat([tokens, theirs(tokens, torch.from_numpy(scores)).argmax(-1, keepdim=True)], dim=1)
    assert found.tolist() == tokens.tolist()
    items = processor.items(found[:, PROMPT:])
    assert items == theirs.items(tokens[:, PROMPT:])
    assert all(items)
    assert all(item in ("a", "c") for row in items[4:8] for item in row)


def test_one_program_serves_views_and_changes() -> None:
    before = compiled._cache_size()
    rows, scores = random_rows(0), random_scores(0)
    for view in (INDEX.where(["a", "b"]), INDEX.where(["f"]), INDEX):
        compiled(FlaxConstraintLogitsProcessor(view, PROMPT), rows, scores, 3)
    assert compiled._cache_size() - before <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_has_a_finite_filling(dtype: str) -> None:
    rows, zeros = np.array([[1, 1, 9]]), torch.zeros(1, VOCABULARY, dtype=getattr(torch, dtype))
    found = compiled(FlaxConstraintLogitsProcessor(EVEN, PROMPT), rows, jnp.zeros((1, VOCABULARY), dtype), 3)
    assert found.dtype == dtype
    expected = ConstraintLogitsProcessor(EVEN, PROMPT)(torch.from_numpy(rows), zeros)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.float().numpy())


def made(index: Any = INDEX, *args: Any, **options: Any) -> Any:
    return FlaxConstraintLogitsProcessor(index, *args, **options)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: made(), "prompt_length=None, expected 0 or more tokens"),
        (lambda: made(INDEX, -1), "prompt_length=-1, expected"),
        (lambda: made(INDEX, 2, separator=[8]), "separator is given, expected None in Flax.*PyTorch"),
        (lambda: made(INDEX, 2)(np.ones((1, 1), int), np.ones((1, 12))), "have 1 tokens, expected prompt_length=2"),
        (lambda: made(INDEX, 2)(np.ones((1, 2), int), np.ones((1, 5))), "index has token 8, expected less than"),
        (lambda: made(INDEX, 2)(np.ones((1, 2), int), np.ones((1, 1, 12))), "call it once for every position"),
        (lambda: made(PER_PROMPT, 2)(np.ones((5, 2), int), np.ones((5, 12))), "5 rows for 4 rules"),
    ],
)
def test_bad_input_is_refused(refused: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused()
