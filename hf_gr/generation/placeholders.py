# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts with placeholders behind them: the one prefill from which a draft head goes on. Knows no head's weights.

Axes: B batch, P prompt, L placeholders, H hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from .layouts import base_model, takes_argument


@contextmanager
def catch_hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """The decoder's last hidden states `[B, P, H]` of every forward within, behind its final normalisation.

    Args:
        model: of transformers, or wrapped for training; a forward of another thread is not seen.
    """
    caught: list[Tensor] = []
    own = threading.get_ident()

    def catch(module: Any, arguments: Any, output: Any) -> None:
        if threading.get_ident() == own:
            caught.append(output[0])

    handle = base_model(model).get_decoder().register_forward_hook(catch)
    try:
        yield caught
    finally:
        handle.remove()


def prefill_with_placeholders(
    model: Any, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any], *, placeholder_ids: tuple[int, ...]
) -> tuple[Any, Float[Tensor, "batch positions hidden"]]:
    """One prefill for a prompt and placeholders behind it.

    Args:
        model: the model.
        input_ids: the decoder's prompt, as transformers has prepared it.
        config: the prepared generation config.
        model_kwargs: the prepared arguments, of the prompt alone; left as they are.
        placeholder_ids: the placeholders; may be none.

    Returns:
        The outputs as if there were no placeholders (logits of the prompt's last token, its cache), and the hidden
        states of that token and of the placeholders, `[B, L + 1, H]`.
    """
    kwargs = dict(model_kwargs)
    cache = kwargs.get("past_key_values")
    if cache is not None and not cache.get_seq_length():
        # Layers that drop keys could not give the placeholders' back; masks tell how far each layer sees.
        plain = DynamicCache()
        kwargs["past_key_values"] = (
            EncoderDecoderCache(plain, DynamicCache()) if model.config.is_encoder_decoder else plain
        )
    size = len(placeholder_ids)
    placeholders = torch.tensor(placeholder_ids, dtype=torch.long, device=input_ids.device).expand(len(input_ids), -1)
    longer = torch.cat([input_ids, placeholders], dim=1)
    if kwargs.get("inputs_embeds") is not None and not model.config.is_encoder_decoder:
        embedded = model.get_input_embeddings()(placeholders).to(kwargs["inputs_embeds"].dtype)
        kwargs["inputs_embeds"] = torch.cat([kwargs["inputs_embeds"], embedded], dim=1)
    mask = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    if cache is not None and cache.get_seq_length():
        if kwargs.get(mask) is None:  # by its length transformers tells which of the tokens are in the cache
            known = getattr(config, "_mask_length", input_ids.shape[1])
            kwargs[mask] = torch.ones((len(input_ids), known), dtype=torch.long, device=input_ids.device)
        if cache.get_seq_length() == kwargs[mask].shape[1]:
            cache.crop(-1)  # the hidden state of the prompt's last token is not in there
    if kwargs.get(mask) is not None:
        kwargs[mask] = torch.nn.functional.pad(kwargs[mask], (0, size), value=1)
    if kwargs.get("position_ids") is not None:
        behind = kwargs["position_ids"][..., -1:] + torch.arange(1, size + 1, device=input_ids.device)
        kwargs["position_ids"] = torch.cat([kwargs["position_ids"], behind], dim=-1)
    if takes_argument(model, "logits_to_keep"):
        kwargs["logits_to_keep"] = size + 1
    with catch_hidden_states(model) as caught:
        outputs = model._prefill(longer, config, kwargs)
    if size:
        outputs.logits = outputs.logits[:, :-size]
        if outputs.get("past_key_values") is not None:
            outputs.past_key_values.crop(-size)
    return outputs, caught[-1][:, -size - 1 :]


def can_take_back(cache: Any) -> bool:
    """Whether a cache that is not empty can give the placeholders' keys back: none of its layers drops any."""
    inner = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return all(type(layer) is DynamicLayer for layer in inner.layers)
