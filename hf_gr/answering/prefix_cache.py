# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys and values of prompts in blocks, cached for later prompts that begin alike. Knows no catalogue and no requests.

Cached tokens are a row's first ones. The model reads a batch from the first column that any row lacks; the columns
before it are passed as one cache, padded on the left like the batch. Nothing else about the call changes. Blocks of
equal prefixes are shared, as in vLLM (Kwon et al. 2023, section 4.2); the least recently used block is evicted first.

Axes: N layers, B batch, H heads, D their width.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

from hf_gr.generation.configuration import GR_FIELDS
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import first_of, growing_angles, sees_later_tokens
from hf_gr.generation.torch.caches import cache_of, keeps_all_keys
from hf_gr.generation.torch.models import TREE_FAMILIES, layer_types

BLOCK = 16  # tokens: computing fewer again costs less than joining their keys
# Arguments of `generate` that do not change a prompt's keys, in addition to the fields of a generation config.
HARMLESS = frozenset(
    "assistant_model constraint_index exclude_items generation_config generator logits_processor "
    "prefix_allowed_tokens_fn seed stopping_criteria synced_gpus".split()
)

Tokens = Sequence[int]
Planes = tuple[Tensor, Tensor]  # keys and values, `[N, H, tokens, D]`


@dataclass(frozen=True)
class Reuse:
    """What a batch reuses from the cache."""

    arguments: dict[str, Any] = field(default_factory=dict)  # of `generate`, without the prompts
    num_cached_tokens: int = 0  # of the prompts that need not be computed, padding not counted
    version: int = 0  # of the weights that the call will use


@dataclass(frozen=True)
class _Block:
    """Keys and values of some tokens, stored under the number of the block before and the tokens themselves."""

    number: int
    key: tuple[int, tuple[int, ...]]
    planes: Planes

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self.planes)


def prefix_cache(
    model: Any, options: Mapping[str, Any], *, num_bytes: int = 2**28, block: int = BLOCK
) -> PrefixCache | None:
    """See `PrefixCache`; None for 0 bytes, or (it says so) where prefixes are not known to be computed alike.

    `options` are those of all calls of `generate`.
    """
    if num_bytes <= 0:
        return None
    if (reason := _why_not(model, options)) is not None:
        say_once(f"{reason}: every prompt is computed from its first token on")
        return None
    return PrefixCache(model, num_bytes=num_bytes, block=block)


class PrefixCache:
    """The keys of a decoder's prompts, by their tokens from the first on, until its weights change.

    Serves several threads. Whether weights are still the same is read off their places in memory, their versions and
    the adapters in use (`load_state_dict`, optimisers, `.to(...)` and LoRA are noticed). Whoever writes to
    `parameter.data` in place calls `clear()`.

    Args:
        model: in evaluation mode, with `GRGenerationMixin`, and accepted by `prefix_cache`.
        num_bytes: of memory at most.
        block: tokens of a block; prefixes of fewer are not cached.
    """

    def __init__(self, model: Any, *, num_bytes: int = 2**28, block: int = BLOCK) -> None:
        self.model, self.capacity, self.block = model, num_bytes, block
        self.num_bytes = 0  # in use
        # The least recently used first. A block is used whenever one after it is, and after that: the first has none.
        self._blocks: OrderedDict[tuple[int, tuple[int, ...]], _Block] = OrderedDict()
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._version = 0
        self._weights = _state_of_weights(model)
        self._drops_keys = "sliding_attention" in layer_types(model.config.get_text_config(decoder=True))

    def num_missing(self, tokens: Tokens) -> int:
        """How many tokens of a prompt must be computed: at least the last one, for its scores."""
        with self._lock:
            return len(tokens) - self._num_useful(tokens, self._find(tokens))

    @torch.no_grad()
    def begin(self, batch: Sequence[Tokens]) -> Reuse:
        """The cached prefixes of a batch's prompts."""
        with self._lock:
            self._check_weights()
            version, found = self._version, [self._find(tokens) for tokens in batch]
            for path in found:
                self._use(path)
        useful = [self._num_useful(tokens, path) for tokens, path in zip(batch, found, strict=True)]
        num_read = max(len(tokens) - of_row for tokens, of_row in zip(batch, useful, strict=True))
        width = max(map(len, batch)) - num_read
        if width <= 0:
            # Sliding-window layers would drop keys; in layers that keep all, masks limit what each token sees.
            return Reuse({"past_key_values": DynamicCache()} if self._drops_keys else {}, version=version)
        used = [max(0, len(tokens) - num_read) for tokens in batch]
        planes = [[block.planes for block in path] for path in found]
        keys, values = (_joined([[one[kind] for one in row] for row in planes], used, width) for kind in (0, 1))
        return Reuse({"past_key_values": cache_of(zip(keys, values, strict=True))}, sum(used), version)

    @torch.no_grad()
    def keep(self, batch: Sequence[Tokens], reuse: Reuse, out: Any) -> None:
        """Cache a call's keys and values: `out` is the output of `generate` for the batch and `reuse` of `begin`."""
        past, width = out.past_key_values, max(len(tokens) for tokens in batch)
        if past is None or not keeps_all_keys(past) or past.get_seq_length() != width or not _is_uniform(past):
            say_once(f"{type(self.model).__name__} returns no plain keys of its prompts: none are cached")
            return
        first = past.layers[0]
        most = self.capacity // (len(past.layers) * (first.keys[0, :, 0].nbytes + first.values[0, :, 0].nbytes))
        with self._lock:
            self._check_weights()
        for row, tokens in enumerate(batch):
            stop = min(len(tokens), most) // self.block * self.block
            with self._lock:  # for each row: other threads need not wait for all of them
                if reuse.version != self._version:
                    return
                path = self._find(tokens[:stop])
                start = len(path) * self.block
                if start < stop:
                    at = slice(width - len(tokens) + start, width - len(tokens) + stop)
                    keys = torch.stack([layer.keys[row, :, at] for layer in past.layers])
                    values = torch.stack([layer.values[row, :, at] for layer in past.layers])
                    self._add(path, tokens[start:stop], (keys, values))
                self._use(path)
                while self.num_bytes > self.capacity:
                    self.num_bytes -= self._blocks.popitem(last=False)[1].num_bytes

    def clear(self) -> None:
        """Forget everything. Results of calls in flight are discarded."""
        with self._lock:
            self._forget()

    def _num_useful(self, tokens: Tokens, path: Sequence[_Block]) -> int:
        return min(len(path) * self.block, len(tokens) - 1)

    def _find(self, tokens: Tokens) -> list[_Block]:
        """The blocks that tokens begin with."""
        path: list[_Block] = []
        for start in range(0, len(tokens) - self.block + 1, self.block):
            block = self._blocks.get((path[-1].number if path else 0, tuple(tokens[start : start + self.block])))
            if block is None:
                break
            path.append(block)
        return path

    def _add(self, path: list[_Block], tokens: Tokens, planes: Planes) -> None:
        """Append blocks to a path; copies, none of which keeps the others alive."""
        for start in range(0, len(tokens), self.block):
            columns = slice(start, start + self.block)
            keys, values = (one[:, :, columns].clone() for one in planes)
            key = path[-1].number if path else 0, tuple(tokens[columns])
            self._blocks[key] = block = _Block(next(self._numbers), key, (keys, values))
            self.num_bytes += block.num_bytes
            path.append(block)
        if planes[0].is_cuda:  # other threads read them in streams of their own
            torch.cuda.current_stream(planes[0].device).synchronize()

    def _use(self, path: Sequence[_Block]) -> None:
        for block in reversed(path):
            self._blocks.move_to_end(block.key)

    def _check_weights(self) -> None:
        """Forget everything if the weights have changed; to be called with the lock."""
        if (found := _state_of_weights(self.model)) != self._weights:
            self._weights = found
            self._forget()

    def _forget(self) -> None:
        self._version += 1
        self._blocks.clear()
        self.num_bytes = 0


def _why_not(model: Any, options: Mapping[str, Any]) -> str | None:
    """Why a model's keys cannot be cached; None if they can."""
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} has an encoder, whose tokens see later ones"
    if config.model_type not in TREE_FAMILIES or "prepare_inputs_for_generation" in vars(model):  # PEFT's prompts
        return f"{name} is of no family with tested prefix caches (model_type={config.model_type!r})"
    if kinds := set(layer_types(config)) - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of {', '.join(sorted(kinds))}"
    if sees_later_tokens(config):
        return f"{name} computes other keys if later tokens are others (is_causal, use_bidirectional_attention)"
    if growing_angles(config):
        return f"{name} turns keys by angles that depend on the length of the prompt (rope_type)"
    others = options.keys() - {*HARMLESS, *vars(GenerationConfig()), *GR_FIELDS}
    if first_of("use_cache", options, options.get("generation_config")) is False:
        others |= {"use_cache"}
    return ", ".join(sorted(others)) or None


def _state_of_weights(model: Any) -> tuple[Any, ...]:
    """What tells whether weights are the same as before: where they are, their versions, and adapters in use."""
    weights = [(one.data_ptr(), one.dtype, 0 if one.is_inference() else one._version) for one in model.parameters()]
    adapters: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    layers = [module for module in model.modules() if isinstance(module, adapters)] if adapters else []
    return (
        *weights,
        *((tuple(one.active_adapters), one.disable_adapters, dict(getattr(one, "scaling", {}))) for one in layers),
    )


def _is_uniform(past: Any) -> bool:
    """Whether the keys of all layers, and the values, are of one shape, dtype and device."""
    kinds = {
        tuple((one.shape[1], one.shape[3], one.dtype, one.device) for one in (layer.keys, layer.values))
        for layer in past.layers
        if layer.is_initialized
    }
    return len(kinds) == 1 and all(layer.is_initialized for layer in past.layers)


def _joined(rows: Sequence[Sequence[Tensor]], used: Sequence[int], width: int) -> Tensor:
    """`[N, B, H, width, D]`: the first `used` tokens of each row, padded on the left."""
    like = next(part for parts in rows for part in parts)
    joined = like.new_zeros((len(like), len(rows), like.shape[1], width, like.shape[3]))
    for row, (parts, num_tokens) in enumerate(zip(rows, used, strict=True)):
        if num_tokens:
            joined[:, row, :, width - num_tokens :] = torch.cat(list(parts), dim=2)[:, :, :num_tokens]
        for part in parts if like.is_cuda else ():
            # The memory of blocks evicted meanwhile must not be reused before this stream has read them.
            part.record_stream(torch.cuda.current_stream(part.device))
    return joined
