# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beams folded into the query axis of cross-attention, so that an encoder's keys are stored and read once a request.

Inside `fold_beams`, a decoder runs one row a beam (`[B * K, T, H]`), while its cross-attention modules see `[B, K * T,
H]` against the keys of B rows. Hooks do it, which live as long as the forward: the model is left as it was. Knows no
beams' scores and no cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_gr.generation.internals import attention_of

from .models import MASKED

# The module's name in transformers' encoder-decoders (T5 and its kin; BART, Marian, Pegasus, M2M, Whisper, ...).
CROSS_ATTENTION_NAMES = ("EncDecAttention", "encoder_attn")


def foldable_modules(model: Any) -> list[nn.Module]:
    """The cross-attention modules of a model's decoder; none unless they take 4-D masks."""
    if attention_of(model.config) not in MASKED:
        return []
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in CROSS_ATTENTION_NAMES]


@contextmanager
def fold_beams(modules: list[nn.Module], batch_size: int) -> Iterator[None]:
    """Within this context, and in this thread, rows of several beams attend to an encoder of `batch_size` rows.

    Args:
        modules: take hidden states first, or by that name, and return theirs first.
        batch_size: B, the encoder's rows.
    """
    folding, handles = _Folding(batch_size, threading.get_ident()), []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(folding.fold, with_kwargs=True))
            handles.append(module.register_forward_hook(folding.unfold))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Folding:
    """A hook before a module and one after it, for one thread.

    Args:
        batch_size: B.
        thread: its number; hooks without one do nothing.
    """

    def __init__(self, batch_size: int, thread: int | None) -> None:
        self.batch_size = batch_size
        self.thread = thread
        # What each module saw last; between its two hooks no other module of the list runs.
        self.num_tokens = 0

    def __reduce__(self) -> Any:
        # Another thread may copy or save the model during this forward, which is not the copy's.
        return _Folding, (self.batch_size, None)

    def fold(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """The arguments of a module, with the rows of one request behind each other."""
        # Another thread that runs the same model meets these hooks, too, and may do so while they are being added or
        # removed: PyTorch then calls them without `kwargs`.
        if threading.get_ident() != self.thread:
            return None
        assert kwargs is not None
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.num_tokens = 0 if hidden.shape[0] == self.batch_size else hidden.shape[1]
        if not self.num_tokens:
            return None
        folded = hidden.reshape(self.batch_size, -1, hidden.shape[-1])
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": folded}
        return (folded, *args[1:]), kwargs

    def unfold(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """What the module returned, one row a beam."""
        if threading.get_ident() != self.thread or not self.num_tokens:
            return None
        return (output[0].reshape(-1, self.num_tokens, output[0].shape[-1]), *output[1:])
