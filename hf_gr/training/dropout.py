# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout for decoders that have none of their own, while they train. Knows no data.

Llama, Qwen3 and others drop attention weights only. Here the embeddings are dropped, and what each attention and each
feed-forward block adds, as in Vaswani et al., Attention is all you need, section 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# What transformers' decoders call the two blocks of a layer.
ATTENTION, FEED_FORWARD = ("self_attn", "attn", "attention"), ("mlp",)


def blocks_of(model: Any) -> list[Any]:
    """The attention and the feed-forward block of every layer.

    Raises:
        ValueError: a layer does not have one of each, by these names.
    """
    layers = [
        layer
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and not model.config.is_encoder_decoder
        for layer in module
        if any(hasattr(layer, name) for name in (*ATTENTION, *FEED_FORWARD))
    ]
    found = [
        [getattr(layer, name) for name, _ in layer.named_children() if name in kind]
        for layer in layers
        for kind in (ATTENTION, FEED_FORWARD)
    ]
    if not found or any(len(blocks) != 1 for blocks in found):
        raise ValueError(
            f"dropout= for a {type(model).__name__}, expected 0: its layers do not consist of one attention block "
            f"({', '.join(ATTENTION)}) and one feed-forward block ({', '.join(FEED_FORWARD)}); many such models have "
            "dropout in their config"
        )
    return [block for blocks in found for block in blocks]


@contextmanager
def dropped(model: Any, share: float) -> Iterator[None]:
    """Zero a share of what the embeddings and the blocks give, while the model is in training mode."""

    def drop(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # attention: its weights follow
            return (drop(module, inputs, output[0]), *output[1:])
        return torch.nn.functional.dropout(output, share, training=module.training)

    blocks = [model.get_input_embeddings(), *blocks_of(model)] if share else []
    hooks = [block.register_forward_hook(drop) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
