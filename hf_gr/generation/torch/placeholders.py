# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts with placeholders behind them: the one prefill from which a draft head goes on. Knows no head's weights.

Axes: B batch, P prompt, L placeholders, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

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

    handle = _decoder_of(base_model(model)).register_forward_hook(catch)
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
        states of that token and of the placeholders, `[B, L + 1, H]`. No cache where it is a recurrent state, which
        cannot give the placeholders back.
    """
    kwargs = dict(model_kwargs)
    cache = kwargs.get("past_key_values")
    past = cache.get_seq_length() if cache is not None and _holds_keys(cache) else 0
    if cache is not None and not past and _holds_keys(cache):
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
    if cache is not None and past:
        if kwargs.get(mask) is None:  # by its length transformers tells which of the tokens are in the cache
            known = getattr(config, "_mask_length", input_ids.shape[1])
            kwargs[mask] = torch.ones((len(input_ids), known), dtype=torch.long, device=input_ids.device)
        if past == kwargs[mask].shape[1]:
            cache.crop(-1)  # the hidden state of the prompt's last token is not in there
    if kwargs.get(mask) is not None:
        kwargs[mask] = torch.nn.functional.pad(kwargs[mask], (0, size), value=1)
    if kwargs.get("position_ids") is not None:
        behind = kwargs["position_ids"][..., -1:] + torch.arange(1, size + 1, device=input_ids.device)
        kwargs["position_ids"] = torch.cat([kwargs["position_ids"], behind], dim=-1)
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):  # as transformers goes on with them
        if kwargs.get(name) is not None:
            kind = kwargs[name][:, -1:] if name == "token_type_ids" else torch.zeros_like(kwargs[name][:, -1:])
            kwargs[name] = torch.cat([kwargs[name], kind.expand(-1, size)], dim=1)
    if takes_argument(model, "logits_to_keep"):
        kwargs["logits_to_keep"] = size + 1
    if config.prefill_chunk_size is not None:
        num_read = longer.shape[1]
        if cache is not None and past and kwargs[mask].shape[1] == num_read:  # the prompt is given from its start
            num_read -= cache.get_seq_length()
        config = copy.copy(config)
        # transformers would cut an encoder's mask into the chunks of the decoder.
        config.prefill_chunk_size = (
            None if model.config.is_encoder_decoder else _chunk_size(config.prefill_chunk_size, num_read, size + 1)
        )
    with catch_hidden_states(model) as caught:
        outputs = model._prefill(longer, config, kwargs)
    if size:
        outputs.logits = outputs.logits[:, :-size]
        made = outputs.get("past_key_values")
        if made is not None and _holds_keys(made):
            made.crop(-size)
        elif made is not None:
            outputs["past_key_values"] = None
    return outputs, caught[-1][:, -size - 1 :]


def can_take_back(cache: Any) -> bool:
    """Whether a cache that is not empty can give the placeholders' keys back: none of its layers drops any."""
    return all(type(layer) is DynamicLayer for layer in _of_decoder(cache).layers)


def _holds_keys(cache: Any) -> bool:
    """Whether a cache is of keys and values alone; a recurrent state (Mamba, LFM2, Qwen3-Next) is something else."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return type(_of_decoder(cache)) is DynamicCache and all(
        type(layer) in kinds for layer in _of_decoder(cache).layers
    )


def _of_decoder(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _decoder_of(model: Any) -> Any:
    """The module whose result is the last hidden states."""
    decoder = model.get_decoder()
    # transformers takes the whole model of Llama 4 for its decoder, and the last layer of ModernBERT's.
    return model.model if decoder is model or decoder is model.get_output_embeddings() else decoder


def _chunk_size(wanted: int, num_tokens: int, num_last: int) -> int:
    """The least size from the wanted one on whose last chunk has what is read: outputs are those of that chunk."""
    return next(size for size in itertools.count(wanted) if (num_tokens - 1) % size >= num_last - 1)
