# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' caches of keys and values: kinds, copies, checks, and one with room to grow. Knows no model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from hf_gr.generation.messages import say_once


@dataclass
class Buffers:
    """Memory for the keys and values of a layer, of which the first tokens are `used`."""

    keys: Float[Tensor, "batch heads capacity width"]
    values: Float[Tensor, "batch heads capacity value_width"]
    used: int = 0


class SlotLayer(DynamicLayer):
    """Keys and values with spare room after them: new ones are written in place, and existing ones never move.

    A copy of the layer (`copy_cache`) shares its buffers. The first of them to append writes in place; another one
    then moves to buffers of its own. More room is added when it is needed.
    """

    def __init__(self, room: int, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.room = room
        self.buffers: Buffers | None = None
        if keys is not None and values is not None:  # which are copied when others come
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys, values

    @classmethod
    def of_buffers(cls, keys: Tensor, values: Tensor, *, used: int) -> SlotLayer:
        """A layer whose first keys are in place already."""
        layer = cls(keys.shape[-2] - used)
        layer.lazy_initialization(keys, values)
        layer.buffers = Buffers(keys, values, used)
        layer.keys, layer.values = keys[..., :used, :], values[..., :used, :]
        return layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in transformers; the keys and values that it returns are views of the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start = self.get_seq_length()
        end, buffers = start + key_states.shape[-2], self.buffers
        is_full = buffers is None or buffers.used != start or end > buffers.keys.shape[-2]
        # Selecting or repeating rows makes tensors elsewhere.
        if buffers is None or is_full or buffers.keys.data_ptr() != self.keys.data_ptr():
            # Prompts that come in chunks, and long sequences, fill the room several times.
            capacity = end + (self.room if start == 0 else max(self.room, end // 4))
            keys = key_states.new_empty((*key_states.shape[:-2], capacity, key_states.shape[-1]))
            values = value_states.new_empty((*value_states.shape[:-2], capacity, value_states.shape[-1]))
            buffers = self.buffers = Buffers(keys, values)
            if start:
                buffers.keys[..., :start, :] = self.keys
                buffers.values[..., :start, :] = self.values
        buffers.keys[..., start:end, :] = key_states
        buffers.values[..., start:end, :] = value_states
        buffers.used = end
        self.keys, self.values = buffers.keys[..., :end, :], buffers.values[..., :end, :]
        return (key_states, value_states) if start == 0 else (self.keys, self.values)


# Layers of plain keys and values. The second kind drops keys that its window has passed.
KEYS = (DynamicLayer, DynamicSlidingWindowLayer, SlotLayer)


def of_decoder(cache: Any) -> Any:
    """The cache of the decoder's own tokens."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def holds_keys(cache: Any) -> bool:
    """Whether a cache holds only keys and values, no recurrent state (Mamba, LFM2, Qwen3-Next)."""
    own = of_decoder(cache)
    return type(own) is DynamicCache and all(type(layer) in KEYS for layer in own.layers)


def keeps_all_keys(cache: Any) -> bool:
    """Whether no layer drops any key or keeps anything else, so that the last tokens can be removed."""
    return all(type(layer) in (DynamicLayer, SlotLayer) for layer in of_decoder(cache).layers)


def copy_cache(cache: Any) -> Any:
    """A cache of the same tensors, copied where layers write in place: changing it leaves the original."""
    twin = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        twin.self_attention_cache = copy_cache(cache.self_attention_cache)
        twin.cross_attention_cache = copy_cache(cache.cross_attention_cache)
        twin.is_updated = dict(cache.is_updated)
        return twin
    twin.layers = [copy.copy(layer) if type(layer) in KEYS else copy.deepcopy(layer) for layer in cache.layers]
    return twin


def continued(cache: Any, *, num_given: int, num_known: int) -> Any:
    """A copy of a user's cache, from which a prompt continues; None if the prompt has to be computed again.

    A cache of the whole prompt loses its last token, which is read again for its logits. `num_known` counts the
    tokens given and those before them that only the mask knows. A cache of more tokens is a `ValueError`; so is
    one of fewer, where the prompt is only its rest, and one that cannot tell.
    """
    own, is_whole = of_decoder(cache), num_given == num_known
    if own.layers and not any(hasattr(layer, "keys") for layer in own.layers):
        raise ValueError("past_key_values holds only recurrent states, expected keys and values: omit it")
    held, most = own.get_seq_length(), num_known if is_whole else num_known - num_given
    if held > most:
        raise ValueError(
            f"past_key_values holds {held} tokens, expected at most {most}, the prompt's: is it another prompt's, or "
            "that of a prompt and its answer?"
        )
    if held < most and not is_whole:
        raise ValueError(
            f"past_key_values holds {held} tokens and the prompt {num_given}, expected the {num_known} of "
            "attention_mask together: give the tokens in between, too"
        )
    twin = copy_cache(cache)
    if held < most or not is_whole:
        return twin
    slides = [layer for layer in own.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    has_dropped = any(layer.get_seq_length() >= layer.sliding_window for layer in slides)  # what a window has passed
    if has_dropped or not all(type(layer) in KEYS for layer in own.layers):
        say_once(
            "past_key_values holds the whole prompt, and its windows or recurrent states cannot go back by a token: "
            "computing the prompt again"
        )
        return None
    of_decoder(twin).crop(-1)
    return twin


def with_slots(cache: Any, room: int) -> Any:
    """The same cache, maybe empty, with room after the keys of layers that keep all; other kinds are unchanged."""
    if type(cache) is not DynamicCache or cache.offloading or not room:
        return cache
    twin: Any = copy.copy(cache)
    twin.layers = []
    for layer in cache.layers:
        twin.layers.append(SlotLayer(room, layer.keys, layer.values) if type(layer) is DynamicLayer else layer)
    if cache.layer_class_to_replicate is DynamicLayer:
        twin.layer_class_to_replicate = partial(SlotLayer, room)
    return twin


def to_keep_all_keys(cache: Any, *, room: int) -> DynamicCache:
    """The same keys in layers that drop none, with room after them: masks limit what a sliding layer sees."""
    if not room:
        return cache_of((layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers)
    kept: Any = DynamicCache()
    for layer in cache.layers:
        assert type(layer) in KEYS, layer
        kept.layers.append(copy.copy(layer) if type(layer) is SlotLayer else SlotLayer(room, layer.keys, layer.values))
    return kept


def to_plain(cache: Any) -> Any:
    """The same keys in transformers' own layers, whose tensors are never written to."""
    if cache is None or not any(type(layer) is SlotLayer for layer in of_decoder(cache).layers):
        return cache
    twin = copy.copy(cache)
    twin.layers = [
        _filled(DynamicLayer(), layer.keys, layer.values) if type(layer) is SlotLayer else layer
        for layer in cache.layers
    ]
    twin.layer_class_to_replicate = DynamicLayer if cache.layer_class_to_replicate is not None else None
    return twin


def cache_of(layers: Iterable[tuple[Tensor, Tensor] | None]) -> DynamicCache:
    """A cache of the keys and values of every layer; None for a layer that has none (it reads another layer's)."""
    cache = DynamicCache()
    cache.layers.extend(_filled(DynamicLayer(), *(states or (None, None))) for states in layers)
    return cache


def _filled(layer: Any, keys: Tensor | None, values: Tensor | None) -> Any:
    """A new layer with keys and values, if there are any."""
    if keys is not None:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return layer


def check_cache(cache: Any, batch_size: int) -> None:
    """Refuse a user's `past_key_values` that cannot be shared by the beams of a request."""
    own = of_decoder(cache)
    if not isinstance(own, DynamicCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, expected a DynamicCache: beams append keys to the prompt's"
        )
    for layer in own.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.numel() and keys.shape[0] != batch_size:
            raise ValueError(
                f"past_key_values holds {keys.shape[0]} rows, expected {batch_size}: "
                "prefill every prompt once, not once a beam"
            )
