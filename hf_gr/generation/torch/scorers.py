# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The scorer of a model over prompts. Knows transformers' caches, masks and positions.

Axes: B batch, P prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_gr.generation import internals
from hf_gr.torch.scorers import Prefilled, TreeScorer, Unread
from hf_gr.torch.transfers import to_device
from hf_gr.torch.visibility import Visibility

from .attention import ARGUMENT, attend_in_parts
from .caches import cache_of, copy_cache, of_decoder, to_keep_all_keys, to_plain, with_slots
from .encoder_decoders import EncoderDecoder
from .models import decoder_config, layer_types, mask_dtype, takes_argument
from .prompts import catch_hidden_states, positions_of


class Prompts:
    """Prompts of a batch, computed when that is needed, and at most once: alone, or together with nodes after them.

    `run` is their forward alone, from which transformers' own next step would continue; nodes may be read in
    another one instead if it `takes_nodes`. A `tail` of tokens, no part of a prompt, is read after each for hidden
    states; `catch` is told them and the last token's if nodes are read with it. `room` is how many nodes' keys
    will follow, as far as that is known.
    """

    def __init__(
        self,
        input_ids: Int[Tensor, "batch prompt"],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
        *,
        takes_nodes: bool = False,
        tail: Sequence[int] = (),
        catch: Callable[[Tensor], None] | None = None,
        room: int = 0,
    ) -> None:
        self.input_ids = input_ids
        self.kwargs = kwargs
        self.run = run
        self.takes_nodes = takes_nodes
        self.tail = tail
        self.catch = catch
        self.room = room
        self.read_with_nodes: Callable[[], Any] | None = None  # gives their cache, if they were read so
        self._outputs: Any = None

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

    @property
    def mask(self) -> Tensor | None:
        """The mask of the decoder's real tokens; None if there is none."""
        return self.kwargs.get("decoder_attention_mask" if "encoder_outputs" in self.kwargs else "attention_mask")


def make_scorer(model: Any, prompts: Prompts, *, in_parts: bool = False) -> TreeScorer:
    """A scorer over prompts, which all scorers over them share; `in_parts` if attention to nodes can be ours."""
    if model.config.is_encoder_decoder:
        decoder = EncoderDecoder(model, prompts.kwargs)

        def prefill() -> Prefilled:
            decoder.cross = copy_cache(prompts.outputs.past_key_values.cross_attention_cache)
            return _prefilled(model, prompts)

        unread = _unread(model, prompts, decoder) if prompts.takes_nodes else None
        return TreeScorer(decoder, prefill, visibility=Visibility(None), unread=unread)
    if in_parts:
        attend_in_parts(model)
    return TreeScorer(
        model,
        lambda: _prefilled(model, prompts),
        visibility=Visibility(mask_dtype(model), ARGUMENT if in_parts else None),
        unread=_unread(model, prompts, model) if prompts.takes_nodes else None,
    )


def _prefilled(model: Any, prompts: Prompts) -> Prefilled:
    outputs = prompts.outputs
    logits, cache = outputs.logits[:, -1:].to(prompts.input_ids.device), of_decoder(outputs.past_key_values)
    length = cache.get_seq_length()
    if not model.config.is_encoder_decoder:
        _check_prefix(length, prompts.kwargs)
    mask = _prompt_mask(prompts, length)
    next_position = _next_position(model, prompts, length)
    return Prefilled(
        logits,
        to_keep_all_keys(cache, room=prompts.room),
        mask=mask,
        next_position=mask.sum(-1, keepdim=True) if next_position is None else next_position,
        windows=_windows(decoder_config(model), cache, length),
    )


def _unread(model: Any, prompts: Prompts, forward: Any) -> Unread:
    """Prompts that are read together with nodes by `forward`; positions are those of transformers' own first step."""
    input_ids, config = prompts.input_ids, decoder_config(model)
    mask, length = _prompt_mask(prompts, input_ids.shape[1]), input_ids.shape[1]
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
        of_model=Visibility(None if model.config.is_encoder_decoder else mask_dtype(model)).of_model,
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


def _next_position(model: Any, prompts: Prompts, length: int) -> Int[Tensor, "*batch 1"] | None:
    """`[..., B, 1]`, the position after the prompt, as the model wants it; None if it counts positions by itself.

    Some models count from 1 (PaliGemma), and only the arguments of transformers' own steps say so.
    """
    if model.config.is_encoder_decoder:  # which counts keys, padding included
        return torch.full((len(prompts.input_ids), 1), length, device=prompts.input_ids.device)
    token = torch.zeros((len(prompts.input_ids), 1), dtype=torch.long, device=prompts.input_ids.device)
    position = internals.next_inputs(model, token, prompts.outputs, prompts.kwargs)[0].get("position_ids")
    return None if position is None else position.to(token.device).expand(*position.shape[:-2], *token.shape)


def _prompt_mask(prompts: Prompts, length: int) -> Bool[Tensor, "batch keys"]:
    """Real tokens among the keys of the prompt."""
    if prompts.mask is None:
        return torch.ones((len(prompts.input_ids), length), dtype=torch.bool, device=prompts.input_ids.device)
    return prompts.mask.to(prompts.input_ids.device).bool()


def _check_prefix(prompt_length: int, model_kwargs: dict[str, Any]) -> None:
    """Refuse keys before the prompt that no argument accounts for: a learned prefix with positions of its own."""
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    known = next((known.shape[-1] for known in (mask, position_ids) if known is not None), prompt_length)
    if known != prompt_length:
        raise ValueError(
            f"the prompt has {prompt_length} keys for {known} tokens, expected one key a token: prefix, prompt and "
            "p-tuning are not supported on decoders; use ConstraintLogitsProcessor in transformers' own loop"
        )
