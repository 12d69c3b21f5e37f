# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Suppressed tokens and a user's functions, read from the config and the arguments of a call. Processes nothing."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from hf_gr.catalogue.sequences import is_integer
from hf_gr.flax.processors import Processors


def processors_of(
    config: Any, *, vocab_size: int, logits_processor: Any = None, stopping_criteria: Any = None
) -> Processors | None:
    """What a call does to scores besides its warpers; None for nothing."""
    functions = _read_functions(logits_processor, "logits_processor", "scores")
    criteria = _read_functions(stopping_criteria, "stopping_criteria", "booleans [rows]")
    always, first = (_read_tokens(config, name) for name in ("suppress_tokens", "begin_suppress_tokens"))
    # Tokens that are not of the vocabulary have no effect, as in transformers.
    suppressed = np.stack([np.isin(np.arange(vocab_size), tokens) for tokens in (always + first, always)])
    if not (suppressed.any() or functions or criteria):
        return None
    return Processors(suppressed if suppressed.any() else None, functions, criteria)


def _read_functions(given: Any, name: str, returned: str) -> tuple[Any, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name} is a {type(given).__name__}, expected a list of functions: pass {name}=[...]")
    for one in given:
        if type(one).__name__.endswith("ConstraintLogitsProcessor"):
            raise ValueError(
                f"{name} has a {type(one).__name__}, expected the catalogue itself: pass constraint_index= instead"
            )
        if type(one).__module__.partition(".")[0] == "transformers":
            raise ValueError(
                f"{name} has a {type(one).__name__}, which is PyTorch's, expected functions of JAX (tokens, scores) "
                f"-> {returned}: write it in JAX, or use backend='torch'"
            )
        if not callable(one) or not isinstance(one, Hashable):
            raise ValueError(f"{name} has {one!r}, expected functions of JAX (tokens, scores) -> {returned}")
    return tuple(given)


def _read_tokens(config: Any, name: str) -> list[int]:
    value = getattr(config, name)
    if value is None:
        return []
    if not isinstance(value, list | tuple | np.ndarray) or not all(map(is_integer, value)):
        raise ValueError(f"{name}={value!r}, expected a list of token ids")
    return [int(token) for token in value]
