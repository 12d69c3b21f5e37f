# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompt of a call: found among its arguments, extended by placeholders, and computed once. Knows no beams.

Axes: B batch, P prompt, L placeholders, H hidden size, V vocabulary.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_gr.catalogue.sequences import check_is_dense
from hf_gr.generation import internals
from hf_gr.generation.call import Prompt, check_some_tokens, read_mask, read_tokens
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import start_token
from hf_gr.torch.ops import to_device

from .caches import check_cache, holds_keys
from .models import base_model, decoder_config, embeddings_of, takes_argument


def read_prompt(model: Any, inputs: Any, config: Any, model_kwargs: dict[str, Any]) -> Prompt:
    """Find the prompts among the arguments of a call by transformers' own rules, and check them."""
    is_encoder_decoder, reads_tokens = model.config.is_encoder_decoder, model.main_input_name == "input_ids"
    given = model_kwargs.get("inputs_embeds")
    is_embedded = given is not None
    if not is_embedded:
        given = inputs if inputs is not None else model_kwargs.get("input_ids")
    mask, begun = model_kwargs.get("attention_mask"), model_kwargs.get("decoder_input_ids")
    for name, value in (("the prompt", given), ("attention_mask", mask)):
        if value is not None and not isinstance(value, Tensor):
            what = type(value).__name__
            raise ValueError(f"{name} is a {what}, expected a tensor [batch, length]: pad, stack and unsqueeze first")
        if value is not None:
            check_is_dense(value, name)
    tokens, length = None, None
    if given is not None and not is_embedded and (reads_tokens or (given.ndim == 2 and not given.is_floating_point())):
        tokens = read_tokens(given, "the prompt", embeddings_of(model))
    if given is not None and (tokens is not None or is_embedded):
        check_some_tokens(*given.shape[:2])
        length = given.shape[1]
    encoded = model_kwargs.get("encoder_outputs")
    num_rows = None
    for one in (given, None if encoded is None else encoded[0], mask, begun):
        num_rows = one.shape[0] if num_rows is None and one is not None else num_rows
    host = read_mask(
        mask,
        config,
        tokens=tokens if reads_tokens else None,
        shape=(num_rows, length),
        is_encoder_decoder=is_encoder_decoder,
        may_be_longer=not is_encoder_decoder,
    )
    if given is not None and (cache := model_kwargs.get("past_key_values")) is not None:
        check_cache(cache, len(given))  # before the checks of drafts, which read it
    before = 0 if given is None else given.shape[1]
    if is_encoder_decoder:
        before = 1 if begun is None else begun.shape[1]
        if begun is not None and (start := start_token(config)) is not None:  # maybe one for each row
            has_start = (begun[:, 0] == torch.as_tensor(start, device=begun.device)).any()
            before += not bool(has_start)  # else transformers prepends it
    return Prompt(given, host, num_rows or 1, before, is_tokens=tokens is not None)


def positions_of(mask: Int[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """The positions of tokens as in transformers: padding does not count."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def with_placeholders(
    tokens: Int[Tensor, "batch tokens"], placeholder_ids: tuple[int, ...]
) -> Int[Tensor, "batch tokens_and_placeholders"]:
    """Tokens followed by a draft head's placeholders, as in training and serving."""
    own = to_device(placeholder_ids, tokens.device)
    return torch.cat([tokens, own.expand(len(tokens), -1)], dim=1)


def prefill(
    model: Any, prompt: Tensor, inputs: Tensor | None, attention_mask: Tensor | None
) -> tuple[Any, dict[str, Any]]:
    """Compute prompts without transformers' `generate`: the outputs, and arguments from which a scorer continues."""
    mask = {} if attention_mask is None else {"attention_mask": attention_mask}
    kwargs: dict[str, Any] = {"use_cache": True, **mask}
    if model.config.is_encoder_decoder:
        kwargs["encoder_outputs"] = model.get_encoder()(input_ids=inputs, return_dict=True, **mask)
        return model(decoder_input_ids=prompt, return_dict=True, **kwargs), kwargs
    if takes_argument(model, "position_ids"):
        kwargs["position_ids"] = positions_of(torch.ones_like(prompt) if attention_mask is None else attention_mask)
    last = {"logits_to_keep": 1} if takes_argument(model, "logits_to_keep") else {}
    empty = DynamicCache(config=decoder_config(model))
    given = model.prepare_inputs_for_generation(prompt, past_key_values=empty, is_first_iteration=True, **kwargs)
    outputs = model(**given | last, return_dict=True)
    return outputs, kwargs


@contextmanager
def catch_hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """Last hidden states `[B, P, H]`, normalised, of the decoder's every forward in this context and thread."""
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
    """Compute a prompt and the placeholders after it in one prefill: outputs as without them, and hidden states.

    These are of the prompt's last token and of the placeholders, `[B, L + 1, H]`. There is no cache if it is a
    recurrent state, from which the placeholders cannot be removed. The arguments, prepared by transformers for the
    prompt alone, are not changed.
    """
    kwargs, size, device = dict(model_kwargs), len(placeholder_ids), input_ids.device
    cache = kwargs.get("past_key_values")
    past = cache.get_seq_length() if cache is not None and holds_keys(cache) else 0
    if cache is not None and not past and holds_keys(cache):
        # The placeholders' keys could not be removed from layers that drop keys; masks say how far each layer sees.
        plain = DynamicCache()
        kwargs["past_key_values"] = (
            EncoderDecoderCache(plain, DynamicCache()) if model.config.is_encoder_decoder else plain
        )
    longer = with_placeholders(input_ids, placeholder_ids)
    if kwargs.get("inputs_embeds") is not None and not model.config.is_encoder_decoder:
        embedded = model.get_input_embeddings()(longer[:, input_ids.shape[1] :]).to(kwargs["inputs_embeds"].dtype)
        kwargs["inputs_embeds"] = torch.cat([kwargs["inputs_embeds"], embedded], dim=1)
    mask = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    if cache is not None and past:
        if kwargs.get(mask) is None:  # its length tells transformers which tokens are in the cache
            known = internals.num_known_tokens(config, default=input_ids.shape[1])
            kwargs[mask] = torch.ones((len(input_ids), known), dtype=torch.long, device=device)
    if kwargs.get(mask) is not None:
        kwargs[mask] = torch.nn.functional.pad(kwargs[mask], (0, size), value=1)
    if kwargs.get("position_ids") is not None:
        after = kwargs["position_ids"][..., -1:] + torch.arange(1, size + 1, device=device)
        kwargs["position_ids"] = torch.cat([kwargs["position_ids"], after], dim=-1)
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):  # as transformers continues them
        if kwargs.get(name) is not None:
            kind = kwargs[name][:, -1:] if name == "token_type_ids" else torch.zeros_like(kwargs[name][:, -1:])
            kwargs[name] = torch.cat([kwargs[name], kind.expand(-1, size)], dim=1)
    if takes_argument(model, "logits_to_keep"):
        kwargs["logits_to_keep"] = size + 1
    if config.prefill_chunk_size is not None:  # the last chunk may not have all placeholders
        say_once("prefill_chunk_size is not used with a draft head: its prompts are computed at once")
        config = copy.copy(config)
        config.prefill_chunk_size = None
    with catch_hidden_states(model) as caught:
        outputs = internals.prefill(model, longer, config, kwargs)
    if size:
        outputs.logits = outputs.logits[:, :-size]
        made = outputs.get("past_key_values")
        if made is not None and holds_keys(made):
            made.crop(-size)
        elif made is not None:
            outputs["past_key_values"] = None
    return outputs, caught[-1][:, -size - 1 :]


def _decoder_of(model: Any) -> Any:
    """The module that returns the last hidden states."""
    decoder = model.get_decoder()
    # transformers takes the whole model of Llama 4 for its decoder, and the last layer of ModernBERT's.
    return model.model if decoder is model or decoder is model.get_output_embeddings() else decoder
