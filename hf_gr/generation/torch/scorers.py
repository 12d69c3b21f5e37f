# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The scorer of a model over prompts. Knows transformers' caches, masks and positions."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_gr.generation import internals
from hf_gr.torch.ops import to_device
from hf_gr.torch.scorers import Prefilled, TreeScorer, Unread

from .attention import ARGUMENT, attend_in_parts
from .caches import cache_of, copy_cache, to_keep_all_keys, to_plain, with_slots
from .encoder_decoders import EncoderDecoder
from .models import decoder_config, layer_types, mask_dtype, takes_argument
from .prompts import catch_hidden_states, positions_of
from .sliced_head import SlicedHead


@dataclass(eq=False)
class Prompts:
    """Prompts of a batch, computed when that is needed, and at most once: alone, or together with nodes after them."""

    input_ids: Int[Tensor, "batch prompt"]
    kwargs: dict[str, Any]
    run: Callable[[], Any]  # their forward alone, from which transformers' own next step would continue
    takes_nodes: bool = False  # whether nodes may be read in another forward instead
    tail: Sequence[int] = ()  # tokens, no part of a prompt, that are read after each for hidden states
    catch: Callable[[Tensor], None] | None = None  # is told those and the last token's, if nodes are read with them
    room: int = 0  # how many nodes' keys will follow, as far as that is known
    read_with_nodes: Callable[[], Any] | None = None  # gives their cache, if they were read so
    _outputs: Any = field(default=None, init=False)

    @property
    def outputs(self) -> Any:
        """What the model returns for them alone; scorers do not change its cache."""
        if self._outputs is None:  # a cached_property of Python 3.11 computes for one object of a class at a time
            self._outputs = self.run()
        return self._outputs

    @property
    def cache(self) -> Any:
        """Their cache, for another call: a copy if nodes were read, else a view, which keeps the call's own alive."""
        return (
            to_plain(self.outputs.get("past_key_values")) if self.read_with_nodes is None else self.read_with_nodes()
        )

    def mask(self, length: int) -> Bool[Tensor, "batch keys"]:
        """Which of the keys, so many a prompt, are of the decoder's real tokens."""
        mask = self.kwargs.get("decoder_attention_mask" if "encoder_outputs" in self.kwargs else "attention_mask")
        device = self.input_ids.device
        if mask is None:
            return torch.ones((len(self.input_ids), length), dtype=torch.bool, device=device)
        return mask.to(device).bool()


def make_scorer(model: Any, prompts: Prompts, *, in_parts: bool = False, head: SlicedHead | None = None) -> TreeScorer:
    """A scorer over prompts, which all scorers over them share; `in_parts` if attention to nodes can be ours."""
    if model.config.is_encoder_decoder:
        forward, dtype = EncoderDecoder(model, prompts.kwargs), None
    else:
        forward, dtype = head or model, mask_dtype(model)
        if in_parts:
            attend_in_parts(model)
    return TreeScorer(
        forward,
        partial(_prefilled, model, prompts, forward),
        unread=_unread(model, prompts, forward) if prompts.takes_nodes else None,
        mask_dtype=dtype,
        argument=ARGUMENT if in_parts else None,
        columns=None if head is None else head.columns,
    )


def _prefilled(model: Any, prompts: Prompts, forward: Any) -> Prefilled:
    """Prompts that are read alone."""
    outputs, device = prompts.outputs, prompts.input_ids.device
    cache = outputs.past_key_values
    if model.config.is_encoder_decoder:
        forward.cross, cache = copy_cache(cache.cross_attention_cache), cache.self_attention_cache
    length = cache.get_seq_length()
    mask = prompts.mask(length)
    if model.config.is_encoder_decoder:  # which counts keys, padding included
        next_position = torch.full((len(mask), 1), length, device=device)
    else:
        known = prompts.kwargs.get("attention_mask")
        known = prompts.kwargs.get("position_ids") if known is None else known
        if known is not None and known.shape[-1] != length:  # keys of a learned prefix have positions of their own
            raise ValueError(
                f"the prompt has {length} keys for {known.shape[-1]} tokens, expected one key a token: prefix, prompt "
                "and p-tuning are not supported on decoders; use ConstraintLogitsProcessor in transformers' own loop"
            )
        # Some models count from 1 (PaliGemma), and only the arguments of transformers' own steps say so.
        token = torch.zeros((len(mask), 1), dtype=torch.long, device=device)
        position = internals.next_inputs(model, token, outputs, prompts.kwargs)[0].get("position_ids")
        if position is None:  # the model counts positions itself
            next_position = mask.sum(-1, keepdim=True)
        else:
            next_position = position.to(device).expand(*position.shape[:-2], *token.shape)
    logits = outputs.logits[:, -1:].to(device)
    return Prefilled(
        forward.of(logits) if isinstance(forward, SlicedHead) else logits,
        to_keep_all_keys(cache, room=prompts.room),
        mask=mask,
        next_position=next_position,
        windows=_windows(decoder_config(model), cache, length),
    )


def _unread(model: Any, prompts: Prompts, forward: Any) -> Unread:
    """Prompts that are read together with nodes by `forward`; positions are those of transformers' own first step."""
    input_ids, config = prompts.input_ids, decoder_config(model)
    mask, length = prompts.mask(input_ids.shape[1]), input_ids.shape[1]
    positions = torch.arange(length, device=input_ids.device)[None]
    if not model.config.is_encoder_decoder:
        positions = _first_positions(model, prompts, mask)
    windows: dict[str | None, int | None] = {
        kind: config.sliding_window if kind == "sliding_attention" else None for kind in layer_types(config)
    }

    def read(num_last: int, **arguments: Any) -> tuple[Any, Any]:
        cache = with_slots(DynamicCache(), prompts.room)
        last = {"logits_to_keep": num_last} if takes_argument(model, "logits_to_keep") else {}
        with catch_hidden_states(model) if prompts.catch else nullcontext([]) as caught:
            outputs = forward(**arguments, **last, past_key_values=cache, use_cache=True, return_dict=True)
        if prompts.catch:
            prompts.catch(caught[-1][:, length - 1 : length + len(prompts.tail)])
        own, cross = copy_cache(cache), copy_cache(forward.cross) if model.config.is_encoder_decoder else None

        def of_prompt() -> Any:
            cropped = _cropped(own, length)
            return cropped if cross is None else EncoderDecoderCache(cropped, cross)

        prompts.read_with_nodes = of_prompt
        return outputs, cache

    return Unread(
        input_ids,
        positions.expand(*positions.shape[:-2], *input_ids.shape),
        mask,
        windows if len(windows) > 1 else {None: next(iter(windows.values()))},
        tail=to_device(prompts.tail, input_ids.device),
        read=read,
    )


def _first_positions(model: Any, prompts: Prompts, mask: Bool[Tensor, "batch prompt"]) -> Int[Tensor, "*batch prompt"]:
    """The positions of a prompt as the model's own first step has them."""
    kwargs: dict[str, Any] = {"attention_mask": mask.long(), "use_cache": True}
    if (own := prompts.kwargs.get("position_ids")) is not None:
        kwargs["position_ids"] = own.clone()  # some models count on in place
    given = model.prepare_inputs_for_generation(
        prompts.input_ids, past_key_values=DynamicCache(), is_first_iteration=True, **kwargs
    )
    positions = given.get("position_ids")
    return positions_of(mask.long()) if positions is None else positions


def _cropped(cache: Any, length: int) -> DynamicCache:
    """The first keys of a cache; copies, which do not keep the others alive."""
    return cache_of(
        (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()) if layer.is_initialized else None
        for layer in cache.layers
    )


def _windows(config: Any, cache: Any, prompt_length: int) -> dict[str | None, tuple[int | None, int]]:
    """How far each kind of layer sees, and how many of the prompt's keys its cache holds (`Prefilled.windows`)."""
    kinds: dict[str | None, tuple[int | None, int]] = {}
    for kind, layer in zip(layer_types(config), cache.layers, strict=False):
        if not layer.is_initialized:
            continue
        window = config.sliding_window if kind == "sliding_attention" else None
        kinds.setdefault(kind, (window, layer.keys.shape[-2] if window is not None else prompt_length))
    return kinds if len(kinds) > 1 else {None: next(iter(kinds.values()))}
