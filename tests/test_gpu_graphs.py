# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: captured decodes answer as eager ones do, wait for nothing, take turns, and give memory back.

The same as `test_captured.py` asks of a recorder on the CPU, of real graphs.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cpu_graphs import capture
from families import EOS, build, prompts

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import captured, mixin
from hf_gr.torch.graphs import CannotCapture, Captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCORE_TOL = 1e-4  # fp32 sums of 4 log-probabilities, of keys that are added in another order
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 4))
IDS = list(range(len(ROWS)))
STATIC = {"cache_implementation": "static"}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "_step_scores": False}
BEAMS = {"num_beams": 6, "num_return_sequences": 6}
OPTIONS: dict[str, dict[str, Any]] = {
    "beams": BEAMS,
    "greedy": {},
    "sampled beams": {"do_sample": True, "seed": 3, **BEAMS},
    "samples": {"do_sample": True, "top_k": 0, "seed": 3, "num_return_sequences": 3},
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The replays so far."""
    replay, made = Captured.replay, []

    def counted(self: Captured, inputs: Any) -> Any:
        made.append(self)
        return replay(self, inputs)

    monkeypatch.setattr(Captured, "replay", counted)
    yield made
    captured.PROGRAMS.clear()


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in inputs.items()}


def both(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    expected = model.generate(**on_gpu(inputs), **DETAILS, **options)
    found = model.generate(**on_gpu(inputs), **DETAILS, **STATIC, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    if "sequences_scores" in expected:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=SCORE_TOL, rtol=0)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2", "deepseek_v3"])
def test_cuda_graphs_equal_eager(family: str, options: dict[str, Any], ragged: bool, replays: list[Any]) -> None:
    model = enable(build(family)).cuda()
    index = ConstraintIndex.from_sequences(ROWS, item_ids=IDS)
    if ragged:
        index = ConstraintIndex.from_sequences(
            [row[: 1 + number % 4].tolist() for number, row in enumerate(ROWS)], item_ids=IDS, eos_token_id=EOS
        )
    excluded = [IDS[:4], IDS[9:13]]
    capture(model, on_gpu(prompts(2, 9)), constraint_index=index, exclude_items=excluded, **options)
    for length in (9, 12, 5, 16):
        both(model, prompts(2, length, padded=True, seed=length), constraint_index=index, **options)
    for number in range(3):
        excluded = [IDS[number::7][:4], IDS[number::11][:4]]
        both(model, prompts(2, 9), constraint_index=index, exclude_items=excluded, **options)
    assert len(replays) == 1 + 4 + 3


def test_cuda_graphs_of_a_head(replays: list[Any]) -> None:
    index, model = ConstraintIndex.from_sequences(ROWS), enable(build("qwen3"))
    model.add_draft_head(index)
    model.cuda()
    capture(model, on_gpu(prompts(2, 9)), constraint_index=index, drafting="head", **BEAMS)
    for length in (12, 30):
        both(model, prompts(2, length), constraint_index=index, drafting="head", **BEAMS)
    assert len(replays) == 3


def test_cuda_graphs_are_never_waited_for(replays: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    decode_captured = mixin.decode_captured

    def guarded(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode_captured(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model, index = enable(build("qwen3")).cuda(), ConstraintIndex.from_sequences(ROWS)
    capture(model, on_gpu(prompts(2, 9)), constraint_index=index, **BEAMS)
    monkeypatch.setattr(mixin, "decode_captured", guarded)
    both(model, prompts(2, 9), constraint_index=index, **BEAMS)
    assert len(replays) == 2


def test_threads_on_streams_of_their_own(replays: list[Any]) -> None:
    model, index = enable(build("qwen3")).cuda(), ConstraintIndex.from_sequences(ROWS)
    given = [prompts(2, 5 + number, seed=number) for number in range(20)]
    expected = [model.generate(**on_gpu(one), constraint_index=index, **DETAILS, **BEAMS).sequences for one in given]
    capture(model, on_gpu(given[0]), constraint_index=index, **BEAMS)
    capture(model, on_gpu(given[19]), constraint_index=index, **BEAMS)
    problems: list[Exception] = []

    def work(first: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for number in range(first, first + 100):
                    out = model.generate(**on_gpu(given[number % 20]), constraint_index=index, **BEAMS, **STATIC)
                    assert out.tolist() == expected[number % 20].tolist()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(replays) > 200


def test_memory_is_given_back(replays: list[Any]) -> None:
    model, index = enable(build("qwen3")).cuda(), ConstraintIndex.from_sequences(ROWS)
    before = torch.cuda.memory_allocated()
    found = model.warm_up(index, batch_sizes=[1, 2], prompt_lengths=[16, 20, 24], num_beams=[4, 5])
    assert len(found) == 12
    print("bytes", [one.num_bytes for one in found], "seconds", [round(one.seconds, 3) for one in found])
    assert torch.cuda.memory_allocated() > before
    both(model, prompts(2, 9), constraint_index=index, num_beams=4)
    replays.clear()
    captured.PROGRAMS.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() < before + 2**20


def test_a_model_that_cannot_be_captured_leaves_the_device_usable() -> None:
    model, index = enable(build("qwen3")).cuda(), ConstraintIndex.from_sequences(ROWS)
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: own(hidden) * float(hidden.isfinite().all())
    with pytest.raises(CannotCapture):
        model.warm_up(index, prompt_lengths=9, num_beams=4)
    both(model, prompts(2, 9), constraint_index=index, **BEAMS)
    assert torch.rand(2, device="cuda").shape == (2,)  # its generator is not left capturing
