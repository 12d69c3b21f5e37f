# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model has computed of prompts, kept for later ones: what its two kinds have in common; and when it is used.

Knows neither caches nor requests, and no framework.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transformers import GenerationConfig

from hf_gr.generation.configuration import GR_FIELDS
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import first_of

# Reading fewer known tokens again costs less than joining their keys, or than the drafts that a prefill takes along.
LEAST_TOKENS = 16
# Arguments of `generate` that the keys of a prompt do not depend on, besides the fields of a generation config.
HARMLESS = frozenset(
    "assistant_model constraint_index exclude_items generation_config generator logits_processor "
    "prefix_allowed_tokens_fn seed stopping_criteria synced_gpus".split()
)

Tokens = Sequence[int]


@dataclass(frozen=True)
class Reuse:
    """What a batch takes over.

    Attributes:
        arguments: of `generate`, besides the prompts.
        num_kept_tokens: of the prompts that need not be computed, padding not counted.
        version: of the weights that the call will use.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    num_kept_tokens: int = 0
    version: int = 0


class Kept:
    """What a model has computed of prompts, until its weights change. Serves several threads.

    Whether weights are still the same is read off their places in memory, their versions and the adapters in use
    (`load_state_dict`, optimisers, `.to(...)` and LoRA are noticed). Whoever writes to `parameter.data` in place calls
    `clear()`.

    Args:
        model: in evaluation mode.
        num_bytes: of memory at most; the least recently used is forgotten first.
        least_tokens: what is known of fewer tokens of a prompt is not used.
    """

    def __init__(self, model: Any, *, num_bytes: int = 2**28, least_tokens: int = LEAST_TOKENS) -> None:
        self.model = model
        self.capacity = num_bytes
        self.least_tokens = least_tokens
        self._lock = threading.Lock()
        self._version = 0
        self._weights = _state_of_weights(model)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        raise NotImplementedError

    def num_missing(self, tokens: Tokens) -> int:
        """The tokens of a prompt that have to be computed."""
        raise NotImplementedError

    def begin(self, batch: Sequence[Tokens]) -> Reuse:
        """What is known of the prompts of a batch."""
        raise NotImplementedError

    def keep(self, batch: Sequence[Tokens], reuse: Reuse, out: Any) -> None:
        """Keep what a call has computed.

        Args:
            batch: the prompts, padded to the longest.
            reuse: from `begin`.
            out: what `generate` returned.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Forget everything; what calls that are under way bring is not kept."""
        with self._lock:
            self._version += 1
            self._forget()

    def _forget(self) -> None:
        raise NotImplementedError

    def _check_weights(self) -> None:
        """Forget everything if the weights have changed; to be called with the lock."""
        if (found := _state_of_weights(self.model)) != self._weights:
            self._weights = found
            self._version += 1
            self._forget()


def fits_options(options: Mapping[str, Any]) -> bool:
    """Whether calls with these options of `generate` may use and give what is kept; said once, if not."""
    config = options.get("generation_config")
    names = [name for name in options if name not in HARMLESS and name not in _fields()]
    names += ["use_cache"] if first_of("use_cache", options, config) is False else []
    if names:
        say_once(f"{', '.join(names)}: every prompt is computed from its first token on")
    return not names


@cache
def _fields() -> frozenset[str]:
    """The fields of a generation config."""
    return frozenset({*vars(GenerationConfig()), *GR_FIELDS})


def _state_of_weights(model: Any) -> tuple[Any, ...]:
    """What tells whether weights are the same as before: where they are, their versions, and adapters in use."""
    weights = [(one.data_ptr(), one.dtype, 0 if one.is_inference() else one._version) for one in model.parameters()]
    adapters: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    layers = [module for module in model.modules() if isinstance(module, adapters)] if adapters else []
    return (
        *weights,
        *((tuple(one.active_adapters), one.disable_adapters, dict(getattr(one, "scaling", {}))) for one in layers),
    )
