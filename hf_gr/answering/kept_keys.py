# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys and values of prompts, kept for later prompts that begin alike. Knows no catalogue and no requests.

A row's first tokens may be known and its last ones not, so a batch is read from the column on where every row has
unknown tokens: the columns before are one cache, padded on the left as the batch is. Nothing else about the call
changes.

Axes: B batch, P prompt, N planes (the keys or the values of one layer each), H heads, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_gr.generation.messages import say_once
from hf_gr.generation.torch.caches import cache_of, keeps_all_keys
from hf_gr.generation.torch.models import layer_types

from .kept import LEAST_TOKENS, Kept, Reuse, Tokens
from .prefixes import PrefixTree

Place = tuple[int, int]  # a group of planes, and one of them
Planes = tuple[Tensor, ...]  # `[N, H, tokens, D]`, one for each shape, dtype and device that layers have


class KeptKeys(Kept):
    """The keys of a decoder's prompts, by their tokens from the first on."""

    def __init__(self, model: Any, *, num_bytes: int = 2**28, least_tokens: int = LEAST_TOKENS) -> None:
        super().__init__(model, num_bytes=num_bytes, least_tokens=least_tokens)
        self._tree: PrefixTree[Planes] = PrefixTree(capacity=num_bytes, size=_num_bytes, cut=_cut)
        self._places: list[tuple[Place, Place] | None] | None = None  # of each layer's keys and values
        self._drops_keys = "sliding_attention" in layer_types(model.config.get_text_config(decoder=True))

    @property
    def num_bytes(self) -> int:
        """See `Kept.num_bytes`."""
        return self._tree.size

    def num_missing(self, tokens: Tokens) -> int:
        """See `Kept.num_missing`; the last token is always computed, for its scores."""
        with self._lock:
            return len(tokens) - self._useful(tokens, self._tree.num_known(tokens))

    @torch.no_grad()
    def begin(self, batch: Sequence[Tokens]) -> Reuse:
        """See `Kept.begin`."""
        lengths = [len(tokens) for tokens in batch]
        with self._lock:
            self._check_weights()
            version, places = self._version, self._places
            found = [self._tree.find(tokens) for tokens in batch]
        known = [self._useful(tokens, length) for tokens, (length, _) in zip(batch, found, strict=True)]
        num_read = max(length - of_row for length, of_row in zip(lengths, known, strict=True))
        num_columns = max(lengths) - num_read
        if num_columns <= 0 or places is None:
            # Layers of windows would drop keys; in layers that keep them all, masks say how far each one sees.
            return Reuse({"past_key_values": DynamicCache()} if self._drops_keys else {}, version=version)
        used = [max(0, length - num_read) for length in lengths]
        joined = _joined([parts for _, parts in found], used, num_columns)
        layers = ([joined[group][one] for group, one in at] if at is not None else None for at in places)
        cache = cache_of((layer[0], layer[1]) if layer is not None else None for layer in layers)
        return Reuse({"past_key_values": cache}, sum(used), version)

    @torch.no_grad()
    def keep(self, batch: Sequence[Tokens], reuse: Reuse, out: Any) -> None:
        """See `Kept.keep`."""
        cache, width = out.past_key_values, max(len(tokens) for tokens in batch)
        if cache is None or not keeps_all_keys(cache) or cache.get_seq_length() != width:
            say_once(f"{type(self.model).__name__} returns no plain keys of its prompts: none are kept")
            return
        groups, places = _grouped(cache)
        most = self.capacity // sum(one[0, :, 0].nbytes for group in groups for one in group)
        with self._lock:
            self._check_weights()
        for row, tokens in enumerate(batch):
            with self._lock:  # for each row: other threads need not wait for all of them
                if reuse.version != self._version:
                    return
                self._places = places
                self._tree.add(tokens[:most], partial(_copied, groups, row, width - len(tokens), most))

    def _useful(self, tokens: Tokens, num_known: int) -> int:
        useful = min(num_known, len(tokens) - 1)
        return useful if useful >= self.least_tokens else 0

    def _forget(self) -> None:
        self._tree.clear()
        self._places = None


def _grouped(cache: Any) -> tuple[list[list[Tensor]], list[tuple[Place, Place] | None]]:
    """The keys and values of all layers by shape, dtype and device, and the places of each layer's two."""
    groups: dict[Any, list[Tensor]] = {}

    def put(states: Tensor) -> Place:
        kind = states.shape[1], states.shape[3], states.dtype, states.device
        group = groups.setdefault(kind, [])
        group.append(states)
        return list(groups).index(kind), len(group) - 1

    places = [(put(layer.keys), put(layer.values)) if layer.is_initialized else None for layer in cache.layers]
    return list(groups.values()), places


def _copied(groups: Sequence[Sequence[Tensor]], row: int, first: int, stop: int, start: int) -> Planes:
    """The planes of a row's tokens from `start` to before `stop`; `first` is the column of its first token."""
    columns = slice(first + start, first + stop)
    return _settled(tuple(torch.stack([states[row, :, columns] for states in group]) for group in groups))


def _cut(planes: Planes, start: int, stop: int) -> Planes:
    """Some tokens of planes; a copy, which does not keep the others alive."""
    return _settled(tuple(one[:, :, start:stop].clone() for one in planes))


def _settled(planes: Planes) -> Planes:
    """The same planes, once they are written: other threads read them in streams of their own."""
    for device in {one.device for one in planes if one.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return planes


def _num_bytes(planes: Planes) -> int:
    return sum(one.nbytes for one in planes)


def _joined(rows: Sequence[Sequence[Planes]], used: Sequence[int], width: int) -> list[Tensor]:
    """`[N, B, H, width, D]` of every group: the first `used` tokens of each row, padded on the left."""
    like = next(planes for parts in rows for planes in parts)
    joined = [one.new_zeros((len(one), len(rows), one.shape[1], width, one.shape[3])) for one in like]
    for row, (parts, num_tokens) in enumerate(zip(rows, used, strict=True)):
        at = width - num_tokens
        for planes in parts:
            if at == width:
                break
            stop = min(width, at + planes[0].shape[2])
            for ours, theirs in zip(joined, planes, strict=True):
                ours[:, row, :, at:stop] = theirs[:, :, : stop - at]
                if theirs.is_cuda:  # the memory of what is forgotten meanwhile must not be used again before
                    theirs.record_stream(torch.cuda.current_stream(theirs.device))
            at = stop
    return joined
