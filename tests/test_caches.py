# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache with room to grow against transformers' own."""

from typing import Any

import numpy as np
import pytest
import torch
from families import build, prompts
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import caches
from hf_gr.generation.torch.caches import Buffers, SlotLayer, copy_cache, to_keep_all_keys, with_slots

INDEX = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(3, 24, size=(300, 4)))


def states(number: int, *, rows: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some tokens; values may be of another width."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, number, 4, generator=made), torch.randn(rows, 3, number, 5, generator=made)


@pytest.mark.parametrize("room", [0, 7])
def test_it_holds_what_transformers_layer_holds(room: int) -> None:
    rng = np.random.default_rng(room)
    ours, theirs = SlotLayer(room), DynamicLayer()
    for step in range(60):
        rows = 2 if not step else len(theirs.keys)
        kind = rng.choice(["update", "update", "update", "crop", "select", "reorder", "repeat"]) if step else "update"
        new = states(int(rng.integers(1, 6)), rows=rows, seed=step)
        which = torch.from_numpy(rng.integers(0, rows, rows if kind == "reorder" else int(rng.integers(1, 4))))
        for layer in (ours, theirs):
            if kind == "update":
                layer.update(*new)
            elif kind == "crop" and layer.get_seq_length() > 2:
                layer.crop(-2)
            elif kind == "repeat" and rows <= 4:
                layer.batch_repeat_interleave(2)
            elif kind == "select":
                layer.batch_select_indices(which)
            elif kind == "reorder":
                layer.reorder_cache(which)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_copies_share_a_prompt_and_nothing_else() -> None:
    cache = with_slots(DynamicCache(), 6)
    cache.update(*states(5), 0)
    prompt = cache.layers[0].keys.clone()
    copies = copy_cache(cache), to_keep_all_keys(cache, room=6)
    for step in range(3):
        for number, one in enumerate(copies):
            one.update(*states(2, seed=10 * number + step), 0)
    for number, one in enumerate(copies):
        expected = [prompt, *(states(2, seed=10 * number + step)[0] for step in range(3))]
        assert torch.equal(one.layers[0].keys, torch.cat(expected, dim=-2))
    assert copies[0].layers[0].keys.data_ptr() == cache.layers[0].keys.data_ptr(), "the first one writes in place"
    assert torch.equal(cache.layers[0].keys, prompt)


def test_other_kinds_of_caches_stay_as_they_are() -> None:
    offloading = DynamicCache(offloading=True)
    assert with_slots(offloading, 6) is offloading
    sliding = DynamicCache(config=build("gemma3_text").config)
    kinds = [type(layer).__name__ for layer in with_slots(sliding, 6).layers]
    assert set(kinds) == {"DynamicSlidingWindowLayer", "SlotLayer"}


@pytest.mark.parametrize(("chunk", "num_buffers"), [(None, 1), (4, 2)])
def test_the_prompts_keys_are_written_once(
    chunk: int | None, num_buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer a layer, taken for the prompt and all beams; chunks of a prompt may need another one."""
    made: list[Any] = []
    monkeypatch.setattr(caches, "Buffers", lambda *states: made.append(Buffers(*states)) or made[-1])
    model, inputs = enable(build("qwen3")), prompts(2, 9)
    model.generate(**inputs, constraint_index=INDEX, num_beams=5, num_return_sequences=5, prefill_chunk_size=chunk)
    assert len(made) == num_buffers * model.config.num_hidden_layers
