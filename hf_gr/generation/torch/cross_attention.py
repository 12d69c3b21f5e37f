# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beams folded into the query axis of cross-attention, so that an encoder's keys are stored and read once a request.

Inside `fold_beams`, a decoder runs one row a beam (`[B * K, T, H]`), while its cross-attention modules see `[B, K * T,
H]` against the keys of B rows. Hooks do it, which live as long as the forward: the model is left as it was. Knows no
beams' scores and no cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_gr.generation.internals import attention_of

# The module's name in transformers' encoder-decoders (T5 and its kin; BART, Marian, Pegasus, M2M, Whisper, ...).
CROSS_ATTENTION_NAMES = ("EncDecAttention", "encoder_attn")
FOLDING_IMPLEMENTATIONS = ("eager", "sdpa")


def foldable_modules(model: Any) -> list[nn.Module]:
    """The cross-attention modules of a model's decoder; none unless they take 4-D masks."""
    if attention_of(model.config) not in FOLDING_IMPLEMENTATIONS:
        return []
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in CROSS_ATTENTION_NAMES]


@contextmanager
def fold_beams(modules: list[nn.Module], batch_size: int) -> Iterator[None]:
    """Within this context, and in this thread, rows of several beams attend to an encoder of `batch_size` rows.

    Args:
        modules: take hidden states first, or by that name, and return theirs first.
        batch_size: B, the encoder's rows.
    """
    fold, unfold = _hooks(batch_size)
    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(fold, with_kwargs=True))
            handles.append(module.register_forward_hook(unfold))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(batch_size: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A hook before a module and one after it."""
    own = threading.get_ident()
    # What each module saw last; between its two hooks no other module of the list runs.
    num_tokens = 0

    def fold(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        # Another thread that runs the same model meets these hooks, too, and may do so while they are being added or
        # removed: PyTorch then calls them without `kwargs`.
        nonlocal num_tokens
        if threading.get_ident() != own:
            return None
        assert kwargs is not None
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        num_tokens = 0 if hidden.shape[0] == batch_size else hidden.shape[1]
        if not num_tokens:
            return None
        folded = hidden.reshape(batch_size, -1, hidden.shape[-1])
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": folded}
        return (folded, *args[1:]), kwargs

    def unfold(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if threading.get_ident() != own or not num_tokens:
            return None
        return (output[0].reshape(-1, num_tokens, output[0].shape[-1]), *output[1:])

    return fold, unfold
