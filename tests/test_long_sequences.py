# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Models that read a longer sequence in another way: answers are transformers' on both sides of the limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, LLAMA, PAD, VOCABULARY, build

from hf_gr import ConstraintIndex, enable
from hf_gr.generation import messages

LIMIT = 12
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0], "partial_rotary_factor": 1.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": DECODERS["phi3"]
    | {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT, "max_position_embeddings": 48},
    "llama": LLAMA | {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT},
    "doge": LLAMA | {"keep_window_size": LIMIT},  # which a trial of a few tokens does not see
}
SCORE_TOL = 1e-4  # fp32 sums of 4 log-probabilities


@pytest.mark.parametrize("drafting", [None, "trie"])
@pytest.mark.parametrize("length", [LIMIT - 3, LIMIT - 2, LIMIT, LIMIT + 8])
@pytest.mark.parametrize("family", MODELS)
def test_answers_equal_transformers(
    family: str, length: int, drafting: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last of 4 tokens is not read: prompts of 9 stay within 12, those of 10 do not."""
    monkeypatch.setattr(messages, "_SAID", set())
    random = np.random.default_rng(length)
    index = ConstraintIndex.from_sequences(random.integers(4, VOCABULARY, (200, 4)))
    inputs = {"input_ids": torch.from_numpy(random.integers(4, VOCABULARY, (2, length)))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, :3] = 0
    options = {"num_beams": 8, "num_return_sequences": 8, "max_new_tokens": 4, "pad_token_id": PAD}
    options |= {"return_dict_in_generate": True, "output_scores": True}

    def legal(_: int, tokens: torch.Tensor) -> list[int]:
        return index.allowed_next_tokens(tokens[length:].tolist())

    # Dynamic angles stay as the longest sequence so far made them: each call has a model of its own.
    theirs, ours = (enable(build(family, config=MODELS[family])) for _ in range(2))
    expected = theirs.generate(**inputs, prefix_allowed_tokens_fn=legal, **options)
    found = ours.generate(**inputs, constraint_index=index, drafting=drafting, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=0)
    crosses = LIMIT - 3 < length and (family == "llama" or length <= LIMIT)
    assert ("decoding in transformers' own loop" in caplog.text) == (
        family == "doge" or (family == "phi3" and crosses)
    )
    assert ("rope_type='dynamic'" in caplog.text) == (family == "llama" and crosses and drafting is not None)
