# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders as `TreeScorer` calls a model: tokens, their positions, and a mask of what each of them sees.

Such decoders count positions by the keys of the cache, where the nodes of a level stand side by side. T5 adds a bias
by distance to its attention: the mask gets the wanted bias, less that of the cache. BART's kin look positions up in
`embed_positions`: a hook gives it those of the nodes. An encoder's keys are computed once a request.

Axes: B batch, N nodes, S keys of the decoder, H heads.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_gr.generation.internals import relative_buckets
from hf_gr.torch.tree import to_additive

from .models import mask_dtype


def takes_positions(model: Any) -> bool:
    """Whether the nodes' positions can be brought into a model's decoder."""
    return _position_table(model) is not None or len(_biased_attention(model)) == 1  # UMT5 has one in every layer


class EncoderDecoder:
    """A model that `takes_positions` with the encoder's outputs of some prompts; serves one scorer."""

    def __init__(self, model: Any, kwargs: dict[str, Any]) -> None:
        self.model = model
        self.table = _position_table(model)
        self.attention: Any = None if self.table is not None else _biased_attention(model)[0]
        self.dtype = mask_dtype(model)
        self.encoded, self.mask = kwargs["encoder_outputs"], kwargs.get("attention_mask")
        if self.mask is not None:  # as it is used: transformers would look at one of two dimensions, and wait
            seen = self.mask[:, None, None].bool()
            self.mask = seen if self.dtype is None else to_additive(seen, self.dtype)
        self.cross = DynamicCache()  # the encoder's keys, once they are computed
        self.positions: Any = None  # [B, S] of the keys

    def __call__(
        self,
        *,
        input_ids: Int[Tensor, "batch nodes"],
        position_ids: Int[Tensor, "batch nodes"],
        attention_mask: Bool[Tensor, "batch 1 nodes keys"],
        past_key_values: DynamicCache,
        **kwargs: Any,
    ) -> Any:
        """The model's forward of nodes, which appends their keys."""
        mask: Tensor = attention_mask
        if self.attention is not None:
            bias = self._bias(position_ids, past_key_values.get_seq_length())
            mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        elif self.dtype is not None:
            mask = to_additive(mask, self.dtype)
        with nullcontext() if self.table is None else _positions(self.table, position_ids):
            return self.model(
                encoder_outputs=self.encoded,
                attention_mask=self.mask,
                decoder_input_ids=input_ids,
                decoder_attention_mask=mask,
                past_key_values=EncoderDecoderCache(past_key_values, self.cross),
                **kwargs,
            )

    def _bias(self, positions: Int[Tensor, "batch nodes"], num_past: int) -> Float[Tensor, "batch heads nodes keys"]:
        """The correction to the bias that the model computes from places in the cache."""
        (batch_size, num_nodes), device = positions.shape, positions.device
        attention: Any = self.attention
        places = torch.arange(num_past + num_nodes, device=device)
        before = places[:num_past].expand(batch_size, -1) if self.positions is None else self.positions
        self.positions = torch.cat([before, positions], dim=1)
        by_distance = attention.relative_attention_bias(relative_buckets(attention, -places)).T.to(device)  # [H, S]
        wanted = (positions[..., None] - self.positions[:, None]).clamp(min=0)
        computed = (places[num_past:, None] - places).clamp(min=0)
        return (by_distance[:, wanted].transpose(0, 1) - by_distance[:, computed]).to(self.model.dtype)


def _biased_attention(model: Any) -> list[Any]:
    """The attention whose bias by distance all layers of a decoder share; several if not, none without a bias."""
    return [one for one in model.get_decoder().modules() if getattr(one, "has_relative_attention_bias", False)]


def _position_table(model: Any) -> nn.Module | None:
    """The module that looks the positions of a decoder up; None if there is none that can be told them."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    return table if table is not None and "position_ids" in signature(table.forward).parameters else None


@contextmanager
def _positions(table: nn.Module, positions: Int[Tensor, "batch nodes"]) -> Iterator[None]:
    """Within this context, and in this thread, a table looks these positions up."""
    lookup = _Lookup(positions, threading.get_ident())
    handles = [
        table.register_forward_pre_hook(lookup.before, with_kwargs=True),
        table.register_forward_hook(lookup.after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Lookup:
    """A hook before a table and one after it, for one thread; hooks without a thread do nothing."""

    def __init__(self, positions: Tensor | None, thread: int | None) -> None:
        self.positions = positions
        self.thread = thread

    def __reduce__(self) -> Any:
        # Another thread may copy or save the model during this forward, which is not the copy's.
        return _Lookup, (None, None)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """The arguments of the table, as one long row: some tables add a batch of their own."""
        # Other threads meet these hooks, too; while they are added or removed PyTorch calls them without `kwargs`.
        if threading.get_ident() != self.thread:
            return None
        assert self.positions is not None
        return args, {**(kwargs or {}), "position_ids": self.positions.flatten()}

    def after(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """What the table returned, by batch and node."""
        if threading.get_ident() != self.thread:
            return None
        assert self.positions is not None
        return output.reshape(*self.positions.shape, -1)
