# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: captured decodes answer as eager ones do, wait for nothing, take turns, and give memory back.

The same as `test_captured.py` asks of a recorder on the CPU, of real graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import EOS, build, prompts

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import captured, mixin
from hf_gr.torch.graphs import GraphCache

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
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphCache]:
    def report(message: str) -> None:
        raise AssertionError(message)

    cache = GraphCache(report=report)
    monkeypatch.setattr(captured, "GRAPHS", cache)
    yield cache
    cache.clear()


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
def test_cuda_graphs_equal_eager(family: str, options: dict[str, Any], ragged: bool, cache: GraphCache) -> None:
    model = enable(build(family)).cuda()
    index = ConstraintIndex.from_sequences(ROWS, item_ids=IDS)
    if ragged:
        index = ConstraintIndex.from_sequences(
            [row[: 1 + number % 4].tolist() for number, row in enumerate(ROWS)], item_ids=IDS, eos_token_id=EOS
        )
    for length in (9, 9, 12, 5, 16, 30, 25):
        both(model, prompts(2, length, padded=True, seed=length), constraint_index=index, **options)
    assert cache.num_replays == 4
    for number in range(3):
        excluded = [IDS[number::7][:4], IDS[number::11][:4]]
        both(model, prompts(2, 9), constraint_index=index, exclude_items=excluded, **options)
        views = [index.where(IDS[: 100 + number]), index.where(IDS[50:])]
        both(model, prompts(2, 9), constraint_index=views, **options)
        index.remove([IDS[-1 - number]])
        both(model, prompts(2, 9), constraint_index=index, **options)


def test_cuda_graphs_of_a_head(cache: GraphCache) -> None:
    index, model = ConstraintIndex.from_sequences(ROWS), enable(build("qwen3"))
    model.add_draft_head(index)
    model.cuda()
    for length in (9, 12, 30):
        both(model, prompts(2, length), constraint_index=index, drafting="head", **BEAMS)
    assert cache.num_replays == 2


def test_cuda_graphs_are_never_waited_for(cache: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_captured = mixin.decode_captured

    def guarded(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode_captured(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model, index = enable(build("qwen3")).cuda(), ConstraintIndex.from_sequences(ROWS)
    for _ in range(2):
        both(model, prompts(2, 9), constraint_index=index, **BEAMS)
    monkeypatch.setattr(mixin, "decode_captured", guarded)
    both(model, prompts(2, 9), constraint_index=index, **BEAMS)
    assert cache.num_replays == 2


def test_threads_on_streams_of_their_own(cache: GraphCache) -> None:
    model, index = enable(build("qwen3")).cuda(), ConstraintIndex.from_sequences(ROWS)
    given = [prompts(2, 5 + number, seed=number) for number in range(20)]
    expected = [model.generate(**on_gpu(one), constraint_index=index, **DETAILS, **BEAMS).sequences for one in given]
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
    assert cache.num_replays > 200


def test_memory_is_bounded_and_given_back(cache: GraphCache) -> None:
    model, index = enable(build("qwen3")).cuda(), ConstraintIndex.from_sequences(ROWS)
    found = model.warm_up(index, batch_sizes=[1, 2], prompt_lengths=[16, 20, 24], num_beams=[4, 5])
    assert len(found) == 12
    print("bytes", [one.num_bytes for one in found], "seconds", [round(one.seconds, 3) for one in found])
    cache.limit = cache.num_bytes // 2
    model.warm_up(index, batch_sizes=3, prompt_lengths=16, num_beams=4)
    assert cache.num_bytes <= cache.limit
    both(model, prompts(3, 9), constraint_index=index, num_beams=4)
    cache.clear()
    torch.cuda.empty_cache()
    assert cache.num_bytes == 0


def test_a_model_that_cannot_be_captured_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(captured, "GRAPHS", GraphCache(report=told.append))
    model, index = enable(build("qwen3")).cuda(), ConstraintIndex.from_sequences(ROWS)
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: own(hidden) * float(hidden.isfinite().all())
    for _ in range(3):
        both(model, prompts(2, 9), constraint_index=index, **BEAMS)
    assert len(told) == 1
    assert torch.rand(2, device="cuda").shape == (2,)  # its generator is not left capturing
