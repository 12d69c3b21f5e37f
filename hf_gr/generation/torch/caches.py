# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' caches of keys and values: kinds, copies and checks. Knows no model."""

from __future__ import annotations

import copy
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

# Layers of plain keys and values. The second kind drops keys that its window has passed.
KEYS = (DynamicLayer, DynamicSlidingWindowLayer)


def of_decoder(cache: Any) -> Any:
    """The cache of the decoder's own tokens."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def holds_keys(cache: Any) -> bool:
    """Whether a cache holds only keys and values, no recurrent state (Mamba, LFM2, Qwen3-Next)."""
    own = of_decoder(cache)
    return type(own) is DynamicCache and all(type(layer) in KEYS for layer in own.layers)


def keeps_all_keys(cache: Any) -> bool:
    """Whether no layer drops any key or keeps anything else, so that the last tokens can be removed."""
    return all(type(layer) is DynamicLayer for layer in of_decoder(cache).layers)


def copy_cache(cache: Any) -> Any:
    """A cache of the same tensors: appending to it, repeating or reordering it does not change the original.

    Layers that write in place are copied with their tensors.
    """
    twin = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        twin.self_attention_cache = copy_cache(cache.self_attention_cache)
        twin.cross_attention_cache = copy_cache(cache.cross_attention_cache)
        twin.is_updated = dict(cache.is_updated)
        return twin
    twin.layers = [copy.copy(layer) if type(layer) in KEYS else copy.deepcopy(layer) for layer in cache.layers]
    return twin


def to_keep_all_keys(cache: Any) -> DynamicCache:
    """The same keys in layers that drop none: masks limit what a sliding layer sees."""
    plain = DynamicCache()
    for layer in cache.layers:
        assert type(layer) in KEYS, type(layer)
        twin = DynamicLayer()
        if layer.is_initialized:
            twin.lazy_initialization(layer.keys, layer.values)
            twin.keys, twin.values = layer.keys, layer.values
        plain.layers.append(twin)
    return plain


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
