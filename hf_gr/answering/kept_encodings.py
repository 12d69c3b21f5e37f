# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""An encoder's output, kept for the same prompt. Knows no catalogue and no requests.

Every token of an encoder sees all others, so only whole prompts are known again.

Axes: B batch, P prompt, H hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from .kept import LEAST_TOKENS, Kept, Reuse, Tokens
from .torch_models import padded


class KeptEncodings(Kept):
    """The output `[P, H]` of an encoder for whole prompts."""

    def __init__(self, model: Any, *, num_bytes: int = 2**28, least_tokens: int = LEAST_TOKENS) -> None:
        super().__init__(model, num_bytes=num_bytes, least_tokens=least_tokens)
        self._states: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()  # the least recently used first
        self._size = 0

    @property
    def num_bytes(self) -> int:
        """See `Kept.num_bytes`."""
        return self._size

    def num_missing(self, tokens: Tokens) -> int:
        """See `Kept.num_missing`."""
        with self._lock:
            return 0 if tuple(tokens) in self._states else len(tokens)

    @torch.no_grad()
    def begin(self, batch: Sequence[Tokens]) -> Reuse:
        """See `Kept.begin`; prompts that are not known are computed here, if others are."""
        rows = [tuple(tokens) for tokens in batch]
        with self._lock:
            self._check_weights()
            version = self._version
            known = {tokens: self._states[tokens] for tokens in rows if tokens in self._states}
            for tokens in known:
                self._states.move_to_end(tokens)
        missing = list(dict.fromkeys(tokens for tokens in rows if tokens not in known))
        num_kept = sum(len(tokens) for tokens in rows if tokens in known)
        if missing:
            hidden = self.model.get_encoder()(**padded(self.model, missing), return_dict=True)[0]
            for tokens, states in zip(missing, hidden, strict=True):
                known[tokens] = states[: len(tokens)]
                self._add(tokens, known[tokens].clone(), version)
        width = max(map(len, rows))
        for states in known.values():
            if states.is_cuda:  # the memory of what is forgotten meanwhile must not be used again before
                states.record_stream(torch.cuda.current_stream(states.device))
        hidden = [torch.nn.functional.pad(known[tokens], (0, 0, 0, width - len(tokens))) for tokens in rows]
        return Reuse({"encoder_outputs": BaseModelOutput(last_hidden_state=torch.stack(hidden))}, num_kept)

    def keep(self, batch: Sequence[Tokens], reuse: Reuse, out: Any) -> None:
        """See `Kept.keep`; `begin` has kept it."""

    def _add(self, tokens: tuple[int, ...], states: Tensor, version: int) -> None:
        """Keep an output, unless it is too large, or the weights have changed since."""
        if states.is_cuda:  # other threads have streams of their own
            torch.cuda.current_stream(states.device).synchronize()
        with self._lock:
            self._check_weights()
            if version != self._version or states.nbytes > self.capacity or tokens in self._states:
                return
            self._states[tokens] = states
            self._size += states.nbytes
            while self._size > self.capacity:
                _, oldest = self._states.popitem(last=False)
                self._size -= oldest.nbytes

    def _forget(self) -> None:
        self._states.clear()
        self._size = 0
