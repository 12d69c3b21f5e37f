# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' caches of keys and values: kinds, copies and checks. Knows no model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from hf_gr.generation.messages import say_once

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


def continued(cache: Any, *, num_given: int, num_known: int) -> Any:
    """A copy of a user's cache, from which a prompt continues; None if the prompt has to be computed again.

    A cache of the whole prompt loses its last token, which is read again for its logits.

    Args:
        cache: of the prompt's first tokens.
        num_given: the prompt's tokens, as given in the call.
        num_known: those and the ones before them that only the mask knows.

    Raises:
        ValueError: a cache of more tokens or, where the prompt is only its rest, fewer; one that cannot tell.
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
    if not all(type(layer) in KEYS and not _has_dropped_keys(layer) for layer in own.layers):
        say_once(
            "past_key_values holds the whole prompt, and its windows or recurrent states cannot go back by a token: "
            "computing the prompt again"
        )
        return None
    of_decoder(twin).crop(-1)
    return twin


def _has_dropped_keys(layer: Any) -> bool:
    """Whether a layer's window has passed some of its keys."""
    return isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window


def to_keep_all_keys(cache: Any) -> DynamicCache:
    """The same keys in layers that drop none: masks limit what a sliding layer sees."""
    assert all(type(layer) in KEYS for layer in cache.layers), cache.layers
    return cache_of((layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers)


def cache_of(layers: Iterable[tuple[Tensor, Tensor] | None]) -> DynamicCache:
    """A cache of the keys and values of every layer; None for a layer that has none (it reads another layer's)."""
    cache = DynamicCache()
    for states in layers:
        layer = DynamicLayer()
        if states is not None:
            layer.lazy_initialization(*states)
            layer.keys, layer.values = states
        cache.layers.append(layer)
    return cache


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
