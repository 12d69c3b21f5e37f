# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: the CPU's results, and no synchronisation between the prefill and the result.

What `test_pretend_cuda.py` asks of the pretend device, which also rehearses these tests; `test_gpu_graphs.py` asks the
same of captured decodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import EOS, FAMILIES, build, prompts

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import mixin
from hf_gr.torch import decode as decoding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCORE_TOL = 1e-3  # fp32 sums of 4 log-probabilities; TF32 is off, kernels add in another order
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 4))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences(
    sorted({(*row[: 2 + number % 3].tolist(), EOS) for number, row in enumerate(ROWS)}), eos_token_id=EOS
)
VIEWS = [INDEX.where(np.arange(len(INDEX)) % step == 0) for step in (2, 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_equals_cpu(family: str) -> None:
    model, inputs = enable(build(family)), prompts(3, 9, padded=True)
    options = {"constraint_index": INDEX, "num_beams": 6, "num_return_sequences": 6}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**inputs, **options)
    out = model.cuda().generate(**{name: value.cuda() for name, value in inputs.items()}, **options)
    torch.testing.assert_close(out.sequences_scores.cpu(), expected.sequences_scores, atol=SCORE_TOL, rtol=0)
    assert out.sequences.tolist() == expected.sequences.tolist()


# Of every call after the first: that one moves the catalogue.
NEVER_WAITS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 8},
    "greedy": {},
    "sampled beams": {"num_beams": 8, "do_sample": True, "top_k": 0, "seed": 3},
    "samples": {"do_sample": True, "top_k": 0, "seed": [3, 4], "num_return_sequences": 3},
    "exclusions": {"num_beams": 8, "exclude_items": [[0, 1, 2], [5]]},
    "rules": {"num_beams": 8, "constraint_index": VIEWS},
    "ragged, synced": {"num_beams": 8, "constraint_index": RAGGED, "synced_gpus": True},
}


@pytest.mark.parametrize("mode", NEVER_WAITS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_cuda_is_never_waited_for(family: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of the prefill to the result; in the prefill, transformers looks at its masks."""
    decode, decoded = mixin.decode, []

    def guarded(scorer: Any, *args: Any) -> Any:
        prefilled = scorer.begin()
        scorer.begin = lambda levels=(): prefilled
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoded.append(decode(scorer, *args))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return decoded[-1]

    model = enable(build(family)).cuda()
    inputs = {name: value.cuda() for name, value in prompts(2, 9, padded=True).items()}
    options = {"constraint_index": INDEX, "pad_token_id": 1} | NEVER_WAITS[mode]
    expected = model.generate(**inputs, **options)  # moves the catalogue
    monkeypatch.setattr(mixin, "decode", guarded)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert decoded


def test_cuda_a_planted_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = decoding.child_scores

    def waits(*args: Any) -> Any:
        found = scores(*args)
        return found if found.max().item() < torch.inf else -found

    monkeypatch.setattr(decoding, "child_scores", waits)
    with pytest.raises(RuntimeError, match="wait|synchroniz"):
        test_cuda_is_never_waited_for("qwen3", "beams", monkeypatch)


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


@pytest.mark.parametrize("num_beams", [1, 6])
def test_cuda_samples_are_the_cpus(num_beams: int) -> None:
    """A prompt's samples depend on its seed, not on the device, as far as scores do not."""
    model, inputs = enable(build("qwen3")), prompts(3, 9, padded=True)
    options = {"constraint_index": INDEX, "num_beams": num_beams, "num_return_sequences": num_beams, "top_k": 0}
    options |= {"do_sample": True, "seed": [3, 4, 5]}
    expected = model.generate(**inputs, **options).tolist()
    inputs = {name: value.cuda() for name, value in inputs.items()}
    assert model.cuda().generate(**inputs, **options).tolist() == expected


def test_cuda_samples_are_those_of_the_generator() -> None:
    model, draft = enable(build("qwen3")).cuda(), build("llama", seed=1).cuda()
    inputs = {name: value.cuda() for name, value in prompts(3, 9, padded=True).items()}
    options = {"constraint_index": INDEX, "num_beams": 6, "num_return_sequences": 6, "top_k": 0}
    options |= {"assistant_model": draft, "verification": "relaxed", "do_sample": True}
    first, second = (
        model.generate(**inputs, **options, generator=torch.Generator("cuda").manual_seed(3)) for _ in range(2)
    )
    assert first.tolist() == second.tolist()
