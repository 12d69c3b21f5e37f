# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beams folded into the query axis of cross-attention, so that an encoder's keys are stored and read once a request.

Inside `fold_beams`, a decoder runs one row a beam (`[B * K, T, H]`), while its cross-attention modules see `[B, K * T,
H]` against the keys of B rows. Hooks do it; no model code is needed. Knows no beams' scores and no cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn

from hf_gr.generation.internals import attention_of

# The module's name in transformers' encoder-decoders (T5 and its kin; BART, Marian, Pegasus, M2M, Whisper, ...).
CROSS_ATTENTION_NAMES = ("EncDecAttention", "encoder_attn")
FOLDING_IMPLEMENTATIONS = ("eager", "sdpa")


class _Active(threading.local):
    """Whether this thread is inside `fold_beams`: another thread may run the same model."""

    depth = 0
    tokens = 0  # of each row, folded by the module that is running; 0 if none


_ACTIVE = _Active()
_HOOKED: WeakSet[nn.Module] = WeakSet()
_HOOKING = threading.Lock()


def foldable_modules(model: Any, num_layers: int) -> list[nn.Module]:
    """The cross-attention modules of `num_layers` decoder layers; none unless all are known and take 4-D masks."""
    modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] in CROSS_ATTENTION_NAMES]
    takes_masks = attention_of(model.config) in FOLDING_IMPLEMENTATIONS
    return modules if takes_masks and len(modules) == num_layers else []


@contextmanager
def fold_beams(modules: list[nn.Module]) -> Iterator[None]:
    """Within this context, and in this thread, steps of B * K rows attend to an encoder of B rows.

    A module gets its hooks once and keeps them; outside the context they do nothing.
    """
    with _HOOKING:
        for module in modules:
            if module not in _HOOKED:
                module.register_forward_pre_hook(_fold, with_kwargs=True)
                module.register_forward_hook(_unfold, with_kwargs=True)
                _HOOKED.add(module)
    _ACTIVE.depth += bool(modules)
    try:
        yield
    finally:
        _ACTIVE.depth -= bool(modules)


def _fold(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    batch_size = kwargs["key_value_states"].shape[0]
    _ACTIVE.tokens = 0
    if not _ACTIVE.depth or hidden.shape[0] == batch_size:
        return None
    _ACTIVE.tokens = hidden.shape[1]
    folded = hidden.reshape(batch_size, -1, hidden.shape[-1])
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": folded}
    return (folded, *args[1:]), kwargs


def _unfold(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if not _ACTIVE.depth or not _ACTIVE.tokens:
        return None
    return (output[0].reshape(-1, _ACTIVE.tokens, output[0].shape[-1]), *output[1:])
