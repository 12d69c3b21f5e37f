# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a captured decode may not outlive or ignore besides weights: attributes, patched forwards, hooks, the model."""

from __future__ import annotations

import gc
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from cpu_graphs import CpuGraphs, poison_buffers
from families import build, prompts
from torch.nn.modules.module import register_module_forward_hook

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import captured
from hf_gr.torch.graphs import GraphCache

DETAILS = {"return_dict_in_generate": True, "output_scores": True, "_step_scores": False}
BEAMS = {"num_beams": 6, "num_return_sequences": 6}
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 4))


def new_index() -> ConstraintIndex:
    return ConstraintIndex.from_sequences(ROWS)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> GraphCache:
    """An empty cache of graphs on the CPU."""
    backend = CpuGraphs()
    cache = GraphCache(backend=lambda device: backend)
    monkeypatch.setattr(captured, "GRAPHS", cache)
    return cache


def both(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    """The eager answer and the captured one, from poisoned buffers."""
    expected = model.generate(**inputs, **DETAILS, **options)
    poison_buffers(captured.GRAPHS)
    found = model.generate(**inputs, **DETAILS, cache_implementation="static", **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)


class Doubled(torch.nn.Module):
    """Does `scale[0] * factor * inner(x)`; the test changes each of these."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = [1.0]
        self.factor = torch.tensor(1.0)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) * self.scale[0] * self.factor


def test_what_modules_do_besides_their_weights(cache: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9)
    layer = model.model.layers[0].mlp = Doubled(model.model.layers[0].mlp).eval()

    def scores() -> torch.Tensor:
        for _ in range(3):
            both(model, inputs, constraint_index=index, **BEAMS)
        return model.generate(**inputs, constraint_index=index, **DETAILS, **BEAMS).sequences_scores

    def patched(scale: float) -> Any:
        return MethodType(lambda self, states: self.inner(states) * scale, layer)

    answers = [scores()]
    layer.scale = [3.0]
    answers.append(scores())
    layer.factor = torch.tensor(-2.0)
    answers.append(scores())
    for scale in (4.0, -5.0, 0.5):  # each method may be where the one before it was
        layer.__dict__.pop("forward", None)
        layer.forward = patched(scale)  # pyright: ignore
        answers.append(scores())
    del layer.forward
    forward = Doubled.forward
    monkeypatch.setattr(Doubled, "forward", lambda self, states: forward(self, states) * 7.0)
    answers.append(scores())
    assert all(not torch.equal(one, two) for one, two in zip(answers, answers[1:], strict=False))
    assert cache.num_captures == len(answers)


def test_hooks_of_all_modules_are_run(cache: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(captured, "say_once", said.append)
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9)
    both(model, inputs, constraint_index=index, **BEAMS)
    both(model, inputs, constraint_index=index, **BEAMS)
    handle = register_module_forward_hook(
        lambda module, given, made: made * 3 if isinstance(module, torch.nn.Embedding) else None
    )
    try:
        both(model, inputs, constraint_index=index, **BEAMS)
    finally:
        handle.remove()
    assert any("forward hooks of all modules" in message for message in said)


def test_memory_of_a_deleted_model_comes_back(cache: GraphCache) -> None:
    model, index = enable(build("qwen3")), new_index()
    model.warm_up(index, prompt_lengths=9, **BEAMS)
    assert cache.num_bytes
    del model
    gc.collect()
    assert cache.num_bytes == 0
