# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache with room to grow against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import build, prompts
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch.caches import SlotLayer, copy_cache, keeps_all_keys, to_keep_all_keys, to_plain, with_slots

INDEX = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(3, 24, size=(300, 4)))


def states(number: int, *, rows: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some tokens; values may be of another width."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, number, 4, generator=made), torch.randn(rows, 3, number, 5, generator=made)


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("room", [0, 1, 7, 100])
def test_it_holds_what_transformers_layer_holds(room: int) -> None:
    rng = np.random.default_rng(room)
    ours, theirs = SlotLayer(room), DynamicLayer()
    for step in range(60):
        kind = rng.choice(["update", "update", "update", "crop", "select", "reorder", "repeat"]) if step else "update"
        rows = 2 if not step else len(theirs.keys)
        if kind == "update":
            new = states(int(rng.integers(1, 6)), rows=rows, seed=step)
            for one, other in zip(ours.update(*new), theirs.update(*new), strict=True):
                assert torch.equal(one, other)
        elif kind == "crop":
            number = int(rng.integers(0, 3))
            for layer in (ours, theirs):
                if layer.get_seq_length() > number:
                    layer.crop(-number)
        elif kind == "repeat":
            if rows <= 4:
                for layer in (ours, theirs):
                    layer.batch_repeat_interleave(2)
        else:
            which = torch.from_numpy(rng.integers(0, rows, rows if kind == "reorder" else int(rng.integers(1, 4))))
            for layer in (ours, theirs):
                (layer.reorder_cache if kind == "reorder" else layer.batch_select_indices)(which)
        assert_same(ours, theirs)


def test_keys_never_move_while_there_is_room() -> None:
    layer = SlotLayer(12)
    layer.update(*states(9))
    place = layer.keys.data_ptr(), layer.values.data_ptr()
    for _ in range(4):
        keys, _ = layer.update(*states(3))
        assert (layer.keys.data_ptr(), layer.values.data_ptr()) == place
    assert keys.shape[-2] == 21
    layer.update(*states(1))
    assert (layer.keys.data_ptr(), layer.values.data_ptr()) != place


def test_copies_share_a_prompt_and_nothing_else() -> None:
    cache = with_slots(DynamicCache(), 6)
    for number in range(2):
        cache.update(*states(5, seed=number), number)
    prompt = [layer.keys.clone() for layer in cache.layers]
    first, second = copy_cache(cache), to_keep_all_keys(cache, room=6)
    for step in range(3):
        first.update(*states(2, seed=10 + step), 0)
        second.update(*states(2, seed=20 + step), 0)
    assert first.layers[0].keys.data_ptr() == cache.layers[0].keys.data_ptr(), "the first one writes in place"
    assert second.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()
    for copied, seed in ((first, 10), (second, 20)):
        assert torch.equal(copied.layers[0].keys[..., :5, :], prompt[0])
        for step in range(3):
            assert torch.equal(
                copied.layers[0].keys[..., 5 + 2 * step : 7 + 2 * step, :], states(2, seed=seed + step)[0]
            )
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5]
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, prompt, strict=True))


def test_other_kinds_of_caches_stay_as_they_are() -> None:
    offloading = DynamicCache(offloading=True)
    assert with_slots(offloading, 6) is offloading
    sliding = DynamicCache(config=build("gemma3_text").config)
    kinds = [type(layer).__name__ for layer in with_slots(sliding, 6).layers]
    assert set(kinds) == {"DynamicSlidingWindowLayer", "SlotLayer"}
    assert with_slots(None, 6) is None


def test_the_answers_cache_is_transformers_own_and_can_be_continued() -> None:
    model, inputs = enable(build("qwen3")), prompts(2, 9)
    options = {"constraint_index": INDEX, "num_beams": 5, "num_return_sequences": 5, "return_dict_in_generate": True}
    out = model.generate(**inputs, **options)
    cache = out.past_key_values
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    assert keeps_all_keys(cache)
    assert cache.get_seq_length() == 9
    before = [layer.keys.clone() for layer in cache.layers]
    again = model.generate(**inputs, past_key_values=cache, **options)
    assert again.sequences.tolist() == out.sequences.tolist()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    plain = model(**inputs, use_cache=True).past_key_values
    token = torch.tensor([[5], [6]])
    ours, theirs = (model(token, past_key_values=one).logits for one in (cache, plain))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_prompts_keys_are_written_once(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer a layer, taken for the prompt and all beams; chunks of a prompt may need another one."""
    made: list[int] = []
    update = SlotLayer.update

    def counted(self: SlotLayer, *args: Any, **kwargs: Any) -> Any:
        before = self.buffers
        out = update(self, *args, **kwargs)
        made.append(int(self.buffers is not before))
        return out

    monkeypatch.setattr(SlotLayer, "update", counted)
    model, inputs = enable(build("qwen3")), prompts(2, 9)
    model.generate(**inputs, constraint_index=INDEX, num_beams=5, num_return_sequences=5, prefill_chunk_size=chunk)
    num_layers = model.config.num_hidden_layers
    assert len(made) == num_layers * (INDEX.max_length - 1 + (1 if chunk is None else 3))
    assert sum(made) == num_layers * (1 if chunk is None else 2)


def test_a_plain_cache_is_given_back_as_it_is() -> None:
    cache = DynamicCache()
    assert to_plain(cache) is cache
    assert to_plain(None) is None
