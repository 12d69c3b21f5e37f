# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`exact=True` in Flax against PyTorch's and brute force. `num_proven` of beams: `flax_pairs.check`, in every test."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import EOS, build, prompts
from flax_pairs import DETAILS, check, pair

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable
from hf_gr.flax import ops
from hf_gr.flax.best_first import best_first_program

ROWS = np.unique(np.random.default_rng(0).integers(3, 24, size=(300, 4)), axis=0)
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + n % 4].tolist() for n, row in enumerate(ROWS)], eos_token_id=EOS)
TEN = {"num_return_sequences": 10, "exact": True, "num_beams": 8, "max_nodes": 2400, **DETAILS}
INPUTS = prompts(3, 9, padded=True)


@pytest.mark.parametrize(
    ("family", "index", "kwargs"),
    [
        ("qwen3", INDEX, {}),
        ("qwen3", RAGGED, {}),
        ("qwen3", RAGGED, {"length_penalty": -1.0}),
        ("qwen3", RAGGED, {"length_penalty": 2.0}),
        ("qwen3", INDEX, {"max_nodes": 30}),  # which ends the search
        ("qwen3", INDEX, {"max_nodes": 90, "num_beams": 4, "num_return_sequences": 30}),  # and still fills a list
        ("qwen3", RAGGED, {"do_sample": True, "seed": 5, "temperature": 1.5}),
        ("mistral", RAGGED, {"max_nodes": 40, "num_beams": 3}),  # a window shorter than the prompt
        ("qwen3", RAGGED, {"drafting": "trie", "draft_token_budget": 150}),  # the first levels only
        ("t5", RAGGED, {"renormalize_logits": True, "drafting": "auto"}),
        pytest.param("bart", INDEX, {"forced_eos_token_id": EOS}, marks=pytest.mark.slow),
        pytest.param("gemma2", RAGGED, {"drafting": "trie", "draft_token_budget": 60}, marks=pytest.mark.slow),
    ],
)
def test_answers_proofs_and_counts_are_pytorchs(family: str, index: Any, kwargs: dict[str, Any]) -> None:
    models = pair(family, layers=2 if family in ("qwen3", "gemma2") else 1)
    rules = [index, index.where(range(0, 300, 3)), index]
    how = {"constraint_index": rules, "exclude_items": [[0, 9], [], list(range(50))], **TEN, **kwargs}
    found = check(models, INPUTS, **how)
    best = models[0].generate(**INPUTS, **how).speculation
    if not kwargs.get("drafting"):
        assert found.speculation.target_forwards == best.target_forwards
        assert found.speculation.num_nodes.tolist() == best.num_nodes.tolist()
    assert (found.num_proven < 10).any() == ("max_nodes" in kwargs)


def test_equal_items_stand_in_the_order_of_their_tokens_and_nothing_is_compiled_again(tmp_path: Path) -> None:
    model = enable(build("qwen3"))
    for weight in model.parameters():
        weight.data.zero_()
    model.save_pretrained(tmp_path)
    flat = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, backend="flax")
    pair("qwen3", layers=2)[1].generate(**{k: v.numpy() for k, v in INPUTS.items()}, constraint_index=INDEX, **TEN)
    before = best_first_program._cache_size()
    found = flat.generate(INPUTS["input_ids"].numpy(), constraint_index=INDEX, **TEN)
    assert found.sequences[:10, -4:].tolist() == ROWS[:10].tolist()
    assert found.num_proven.tolist() == [10, 10, 10]
    assert best_first_program._cache_size() == before


def test_a_slice_of_the_largest_sorts_nothing() -> None:
    """XLA would sort all candidates, which takes a hundred times as long, where the best that was cut is noted."""
    program = jax.jit(lambda keys: [part[:, 9:] for part in ops.topk(keys, 10)]).lower(jnp.zeros((2, 99))).compile()
    assert "TopK" in program.as_text()
    assert " sort(" not in program.as_text()


def test_a_draft_model_is_not_asked() -> None:
    model, other = pair("qwen3", layers=2)[1], pair("qwen3")[1]
    how = {"constraint_index": RAGGED, "draft_token_budget": 150, "input_ids": INPUTS["input_ids"].numpy(), **TEN}
    found, plain = (model.generate(**how, **more) for more in ({"assistant_model": other}, {"drafting": "trie"}))
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert found.speculation.drafted_nodes.tolist() == plain.speculation.drafted_nodes.tolist()
    assert found.speculation.draft_forwards == 0


def test_sequences_of_one_token_need_no_forward_but_the_prompts() -> None:
    index = ConstraintIndex.from_sequences([[token] for token in range(3, 12)])
    found = check(pair("qwen3", layers=2), INPUTS, constraint_index=index, **TEN)
    assert found.num_proven.tolist() == [9, 9, 9]
    assert found.speculation.target_forwards == 0
