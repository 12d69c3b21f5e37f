# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of a batch are computed without padding, and shared tokens once: the answers and keys of one forward."""

from typing import Any

import numpy as np
import pytest
import torch
from families import EOS, PAD, build

from hf_gr import ConstraintIndex, enable
from hf_gr.generation import internals
from hf_gr.generation.torch import prefill

ROWS = np.unique(np.random.default_rng(0).integers(3, 24, size=(80, 3)), axis=0)
INDEX = ConstraintIndex.from_sequences(ROWS)
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "_step_scores": False, "pad_token_id": PAD}
BEAMS: dict[str, Any] = {"num_beams": 5, "num_return_sequences": 5}
TOKENS = np.random.default_rng(1).integers(3, 64, size=100)
# By batch its prompts, and how many tokens are computed for them.
BATCHES: dict[str, tuple[list[Any], int]] = {
    "one is long": ([TOKENS[:40], TOKENS[40:44], TOKENS[50:53], TOKENS[60:64]], 40 + 3 * 4),
    "many lengths": ([TOKENS[n : 2 * n] for n in (30, 29, 15, 16, 3)], 2 * 30 + 2 * 16 + 3),
    "equal ones": ([TOKENS[:20], TOKENS[:20], TOKENS[9:29], TOKENS[:20]], 2 * 20),
    "one beginning": ([np.r_[TOKENS[:30], TOKENS[30 + n : 40]] for n in (4, 0, 2, 4, 9)], 30 + 2 * 10 + 2 * 6),
}


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    tokens = torch.tensor(np.stack([np.pad(row, (width - len(row), 0), constant_values=PAD) for row in rows]))
    return {"input_ids": tokens, "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every forward of prompts."""
    made: list[int] = []
    own = internals.prefill

    def counted(model: Any, tokens: Any, config: Any, kwargs: dict[str, Any]) -> Any:
        made.append(len(tokens) * (tokens.shape[1] - kwargs["past_key_values"].get_seq_length()))
        return own(model, tokens, config, kwargs)

    monkeypatch.setattr(internals, "prefill", counted)
    monkeypatch.setitem(prefill.OF_A_FORWARD, "cpu", 5)
    return made


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "deepseek_v3", "falcon", "opt", "llama"])
def test_parts_of_a_batch_are_the_batch(
    family: str, batch: str, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (rows, number) = enable(build(family)), BATCHES[batch]
    given = {**padded(rows), "constraint_index": INDEX, "exclude_items": [[k] for k in range(len(rows))], **DETAILS}
    for options in (BEAMS, {"do_sample": True, "top_k": 0, "seed": 3, "num_return_sequences": 4}):
        computed.clear()
        found = model.generate(**given, **options)
        assert sum(computed) == number
        with monkeypatch.context() as patch:
            patch.setitem(prefill.OF_A_FORWARD, "cpu", 10**6)
            computed.clear()
            expected = model.generate(**given, **options)
        assert len(computed) == 1
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert found.get("seeds") == expected.get("seeds")
        if "sequences_scores" in expected:
            torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=0)
        real = given["attention_mask"][:, None, :, None]
        for one, other in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(one.keys * real, other.keys * real, atol=1e-5, rtol=0)
            torch.testing.assert_close(one.values * real, other.values * real, atol=1e-5, rtol=0)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LEFT_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "a window": ("gemma2", {}),
    "angles that grow": ("llama", {"config": {"max_position_embeddings": 32, "rope_parameters": DYNAMIC}}),
    "attention to later tokens": ("llama", {"config": {"is_causal": False}}),
    "hooks": ("qwen3", {"hook": lambda module, given, made: None}),
    "chunks": ("qwen3", {"prefill_chunk_size": 8}),
    "positions of a user's": ("qwen3", {"position_ids": torch.arange(7, 47).expand(4, -1)}),
    "processes in step": ("qwen3", {"synced_gpus": True}),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_one_forward(case: str, computed: list[int]) -> None:
    (family, options), (rows, _) = LEFT_ALONE[case], BATCHES["one is long"]
    options = {**options}
    model = enable(build(family, config=options.pop("config", {})))
    if "hook" in options:
        model.model.layers[0].register_forward_hook(options.pop("hook"))
    model.generate(**padded(rows), constraint_index=INDEX, **BEAMS, **options)
    assert computed == [4 * 40]


def test_a_later_call_continues_from_parts(computed: list[int]) -> None:
    model, (rows, _) = enable(build("qwen3")), BATCHES["one is long"]
    given = padded(rows)
    first = model.generate(**given, constraint_index=INDEX, **BEAMS, **DETAILS)
    longer = [np.r_[row, [EOS, 7]] for row in rows]
    again = padded(longer)
    known = model.generate(**again, past_key_values=first.past_key_values, constraint_index=INDEX, **BEAMS, **DETAILS)
    anew = model.generate(**again, constraint_index=INDEX, **BEAMS, **DETAILS)
    assert known.sequences.tolist() == anew.sequences.tolist()
    torch.testing.assert_close(known.sequences_scores, anew.sequences_scores, atol=1e-5, rtol=0)
