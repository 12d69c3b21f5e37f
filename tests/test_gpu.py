# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: the CPU's results, nothing waits between the prefill and the result, and graphs answer as eager
decodes do, take turns, and give memory back.

The same as `test_pretend_cuda.py`, which also rehearses some of these tests, and `test_captured.py` ask on a CPU.
"""

import gc
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from cpu_graphs import capture
from families import EOS, FAMILIES, build, prompts

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import captured, mixin, prefill, sliced_head
from hf_gr.torch.graphs import CannotCapture, Captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCORE_TOL = 1e-3  # fp32 sums of 4 log-probabilities; TF32 is off, kernels add in another order
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 4))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences(
    sorted({(*row[: 2 + number % 3].tolist(), EOS) for number, row in enumerate(ROWS)}), eos_token_id=EOS
)
VIEWS = [INDEX.where(np.arange(len(INDEX)) % step == 0) for step in (2, 3)]
BEAMS = {"num_beams": 6, "num_return_sequences": 6}
STATIC = {"cache_implementation": "static"}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "_step_scores": False, "pad_token_id": 1}


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in inputs.items()}


def assert_same(found: Any, expected: Any) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    if "sequences_scores" in expected:
        scores, theirs = found.sequences_scores.cpu(), expected.sequences_scores.cpu()
        torch.testing.assert_close(scores, theirs, atol=SCORE_TOL, rtol=0)


@contextmanager
def never_waiting() -> Iterator[None]:
    """What waits for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_equals_cpu(family: str) -> None:
    model, inputs = enable(build(family)), prompts(3, 9, padded=True)
    options = {"constraint_index": INDEX, **BEAMS, **DETAILS}
    expected = model.generate(**inputs, **options)
    assert_same(model.cuda().generate(**on_gpu(inputs), **options), expected)


BIAS, GROUPS = np.random.default_rng(1).normal(size=len(INDEX)), {"max_per_group": 2}
EXACT: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "exact, few nodes": {"exact": True, "num_beams": 4, "max_nodes": 24},
    "exact, drafts": {"exact": True, "drafting": "trie"},
    "exact, values": {"exact": True, "item_bias": BIAS, **GROUPS},
    "exact, ragged": {"exact": True, "constraint_index": RAGGED, "length_penalty": -1.0, **GROUPS},
    "exact samples": {"exact": True, "do_sample": True, "top_k": 0, "seed": [3, 4, 5]},
    "samples": {"do_sample": True, "top_k": 0, "seed": [3, 4, 5]},
    "sampled beams": {"do_sample": True, "top_k": 0, "seed": [3, 4, 5], **BEAMS},
    "beams, values": {"item_bias": BIAS, **GROUPS, **BEAMS},
    "greedy": {"num_return_sequences": 1},
    "beams among legal tokens": {"renormalize_logits": True, **BEAMS},
    "widths": {"num_beams": [4, 8, 6, 6], "exclude_items": [[0, 1, 2], [5], []]},
}


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_cuda_proves_as_the_cpu(family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_head, "MOST", 1.0)
    monkeypatch.setattr(prefill, "OF_A_FORWARD_ELSEWHERE", 2)
    model, inputs = enable(build(family)), prompts(3, 9, padded=True)
    options = {"constraint_index": INDEX, "num_return_sequences": 6, **DETAILS} | options
    expected = model.generate(**inputs, **options)
    found = model.cuda().generate(**on_gpu(inputs), **options)
    assert_same(found, expected)
    assert expected.num_proven is None or found.num_proven.tolist() == expected.num_proven.tolist()


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
        with never_waiting():
            decoded.append(decode(scorer, *args))
        return decoded[-1]

    model, inputs = enable(build(family)).cuda(), on_gpu(prompts(2, 9, padded=True))
    options = {"constraint_index": INDEX, "pad_token_id": 1} | NEVER_WAITS[mode]
    expected = model.generate(**inputs, **options)  # moves the catalogue
    monkeypatch.setattr(mixin, "decode", guarded)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert decoded


@pytest.mark.parametrize("drafting", ["trie", "auto", "assistant"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_cuda_drafts_change_nothing(family: str, drafting: str) -> None:
    model, draft = enable(build(family)).cuda(), build("llama", seed=1).cuda()
    options = {**on_gpu(prompts(3, 9, padded=True)), "constraint_index": INDEX, **BEAMS, **DETAILS}
    drafted = {"drafting": drafting, "assistant_model": draft if drafting == "assistant" else None}
    assert_same(model.generate(**options, **drafted), model.generate(**options))


def test_cuda_samples_are_those_of_the_generator() -> None:
    model, draft = enable(build("qwen3")).cuda(), build("llama", seed=1).cuda()
    options = {**on_gpu(prompts(3, 9, padded=True)), "constraint_index": INDEX, "top_k": 0, **BEAMS}
    options |= {"assistant_model": draft, "verification": "relaxed", "do_sample": True}
    first, second = (
        model.generate(**options, generator=torch.Generator("cuda").manual_seed(3)).tolist() for _ in range(2)
    )
    assert first == second


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The replays from now on, none of which may wait."""
    replay, made = Captured.replay, []

    def guarded(self: Captured, inputs: Any) -> Any:
        made.append(self)
        with never_waiting():
            return replay(self, inputs)

    monkeypatch.setattr(Captured, "replay", guarded)
    return made


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    yield watched(monkeypatch)
    captured.PROGRAMS.clear()


def both(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    expected = model.generate(**on_gpu(inputs), **DETAILS, **options)
    assert_same(model.generate(**on_gpu(inputs), **DETAILS, **STATIC, **options), expected)


GRAPHS: dict[str, dict[str, Any]] = {
    "beams": BEAMS,
    "greedy": {},
    "sampled beams": {"do_sample": True, "seed": 3, **BEAMS},
    "samples": {"do_sample": True, "top_k": 0, "seed": 3, "num_return_sequences": 3},
}


@pytest.mark.parametrize("index", [INDEX, RAGGED], ids=["fixed", "ragged"])
@pytest.mark.parametrize("options", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2", "deepseek_v3"])
def test_cuda_graphs_equal_eager(family: str, options: Any, index: ConstraintIndex, replays: list[Any]) -> None:
    model, ids = enable(build(family)).cuda(), list(range(len(INDEX)))
    given = {"constraint_index": index, **options}
    if family == "deepseek_v3":  # in fp32 "grouped_mm" counts tokens on the host
        with pytest.raises(CannotCapture, match="batched_mm"):
            capture(model, on_gpu(prompts(2, 9)), **given)
        model.set_experts_implementation("batched_mm")
    capture(model, on_gpu(prompts(2, 9)), exclude_items=[ids[:4], ids[9:13]], **given)
    for length in (9, 12, 5, 16):
        both(model, prompts(2, length, padded=True, seed=length), **given)
    for number in range(3):
        both(model, prompts(2, 9), exclude_items=[ids[number::7][:4], ids[number::11][:4]], **given)
    assert len(replays) == 1 + 4 + 3


def test_cuda_graphs_of_a_head(replays: list[Any]) -> None:
    model = enable(build("qwen3"))
    model.add_draft_head(INDEX)
    options = {"constraint_index": INDEX, "drafting": "head", **BEAMS}
    capture(model.cuda(), on_gpu(prompts(2, 9)), **options)
    for length in (12, 30):
        both(model, prompts(2, length), **options)
    assert len(replays) == 3


def test_threads_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = enable(build("qwen3")).cuda(), {"constraint_index": INDEX, **BEAMS}
    given = [on_gpu(prompts(2, 5 + number, seed=number)) for number in range(20)]
    expected = [model.generate(**one, **options).tolist() for one in given]
    for one in (given[0], given[15], given[19]):
        capture(model, one, **options)
    problems: list[str] = []
    monkeypatch.setattr(captured, "say_once", problems.append)  # that a call was not replayed

    def work(first: int) -> list[Any]:
        with torch.cuda.stream(torch.cuda.Stream()):
            numbers = [number % 20 for number in range(first, first + 100)]
            return [model.generate(**given[number], **options, **STATIC).tolist() for number in numbers]

    with ThreadPoolExecutor(3) as pool:
        for first, found in enumerate(pool.map(work, range(3))):
            assert found == [expected[number % 20] for number in range(first, first + 100)]
    assert problems == []


def test_memory_is_given_back(replays: list[Any]) -> None:
    model = enable(build("qwen3")).cuda()
    before = torch.cuda.memory_allocated()
    assert len(model.warm_up(INDEX, batch_sizes=[1, 2], prompt_lengths=[16, 20, 24], num_beams=[4, 5])) == 12
    assert torch.cuda.memory_allocated() > before
    both(model, prompts(2, 9), constraint_index=INDEX, num_beams=4)
    replays.clear()
    captured.PROGRAMS.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() < before + 2**20


def test_a_model_that_cannot_be_captured_leaves_the_device_usable() -> None:
    model = enable(build("qwen3")).cuda()
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: own(hidden) * float(hidden.isfinite().all())
    with pytest.raises(CannotCapture):
        model.warm_up(INDEX, prompt_lengths=9, num_beams=4)
    both(model, prompts(2, 9), constraint_index=INDEX, **BEAMS)
    assert torch.rand(2, device="cuda").shape == (2,)  # its generator is not left capturing
