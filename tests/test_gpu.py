# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: the CPU's results, and no synchronisation between the prefill and the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, build, prompts

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import mixin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCORE_TOL = 1e-3  # fp32 sums of 4 log-probabilities; TF32 is off, kernels add in another order
INDEX = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(3, 24, size=(300, 4)))


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_equals_cpu(family: str) -> None:
    model, inputs = enable(build(family)), prompts(3, 9, padded=True)
    options = {"constraint_index": INDEX, "num_beams": 6, "num_return_sequences": 6}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**inputs, **options)
    out = model.cuda().generate(**{name: value.cuda() for name, value in inputs.items()}, **options)
    torch.testing.assert_close(out.sequences_scores.cpu(), expected.sequences_scores, atol=SCORE_TOL, rtol=0)
    assert out.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("num_beams", [1, 8])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_cuda_is_never_waited_for(family: str, num_beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = mixin.decode

    def guarded(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model = enable(build(family)).cuda()
    inputs = {name: value.cuda() for name, value in prompts(2, 9, padded=True).items()}
    model.generate(**inputs, constraint_index=INDEX, num_beams=num_beams)  # moves the catalogue
    monkeypatch.setattr(mixin, "decode", guarded)
    model.generate(**inputs, constraint_index=INDEX, num_beams=num_beams)


@pytest.mark.parametrize("drafting", ["trie", "auto", "assistant"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_cuda_drafts_change_nothing(family: str, drafting: str) -> None:
    model, draft = enable(build(family)).cuda(), build("llama", seed=1).cuda()
    inputs = {name: value.cuda() for name, value in prompts(3, 9, padded=True).items()}
    options = {"constraint_index": INDEX, "num_beams": 6, "num_return_sequences": 6}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**inputs, **options)
    out = model.generate(
        **inputs, **options, drafting=drafting, assistant_model=draft if drafting == "assistant" else None
    )
    torch.testing.assert_close(out.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=0)
    assert out.sequences.tolist() == expected.sequences.tolist()


def test_cuda_samples_are_those_of_the_generator() -> None:
    model, draft = enable(build("qwen3")).cuda(), build("llama", seed=1).cuda()
    inputs = {name: value.cuda() for name, value in prompts(3, 9, padded=True).items()}
    options = {"constraint_index": INDEX, "num_beams": 6, "num_return_sequences": 6, "top_k": 0}
    options |= {"assistant_model": draft, "verification": "relaxed", "do_sample": True}
    first, second = (
        model.generate(**inputs, **options, generator=torch.Generator("cuda").manual_seed(3)) for _ in range(2)
    )
    assert first.tolist() == second.tolist()
