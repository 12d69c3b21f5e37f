# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The logits processors and stopping criteria of a call in Flax, from its config and arguments. Processes nothing.

Which there are, and in which order, is as in transformers' `GenerationMixin`; warpers are part of the plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_gr.catalogue.sequences import is_integer
from hf_gr.flax.processors import NEVER, Biases, Decay, Forbidden, NoRepeat, Own, Processors, Repetition
from hf_gr.generation.models import end_tokens


def processors_of(
    config: Any,
    *,
    vocab_size: int,
    prompt_length: int,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
) -> Processors | None:
    """What a call does to scores besides its warpers; None for nothing.

    Args:
        config: the prepared config.
        vocab_size: V.
        prompt_length: tokens before the generated ones, padding included.
        logits_processor: the user's functions.
        stopping_criteria: likewise.

    Raises:
        ValueError: names the argument, its value, what is expected, and the fix.
    """
    functions = _read_functions(logits_processor, "logits_processor", "scores")
    criteria = _read_functions(stopping_criteria, "stopping_criteria", "booleans [rows]")
    ends = end_tokens(config)

    def among(tokens: Iterable[int]) -> npt.NDArray[np.bool_]:
        return np.isin(np.arange(vocab_size), list(tokens))

    before: list[Any] = []
    if config.sequence_bias is not None:
        before.append(Biases.of(*_read_biases(config.sequence_bias, vocab_size)))
    if config.repetition_penalty not in (None, 1.0):
        before.append(Repetition(np.float32(_read_penalty(config.repetition_penalty))))
    if config.no_repeat_ngram_size not in (None, 0):
        before.append(NoRepeat(_read_size(config.no_repeat_ngram_size)))
    if config.bad_words_ids is not None:
        words = [
            word for word in _read_words(config.bad_words_ids, vocab_size) if list(word) not in [[e] for e in ends]
        ]
        before += [Biases.of(words, [-np.inf] * len(words))] if words else []
    least = _least_new_tokens(config, prompt_length) if ends else 0
    if least > 0:
        before.append(Forbidden(among(ends), np.int32(0), np.int32(least)))

    after: list[Any] = []
    if config.exponential_decay_length_penalty is not None and ends:
        start, factor = _read_decay(config.exponential_decay_length_penalty)
        after.append(Decay(among(ends), np.int32(start), np.float32(factor)))
    if config.suppress_tokens is not None:
        tokens = _read_tokens(config.suppress_tokens, "suppress_tokens")
        after.append(Forbidden(among(tokens), np.int32(0), np.int32(NEVER)))
    if config.begin_suppress_tokens is not None:
        tokens = _read_tokens(config.begin_suppress_tokens, "begin_suppress_tokens")
        after.append(Forbidden(among(tokens), np.int32(0), np.int32(1)))
    after += [Own(function) for function in functions]
    if not (before or after or criteria):
        return None
    return Processors(tuple(before), tuple(after), criteria)


def _least_new_tokens(config: Any, prompt_length: int) -> int:
    """Before which the end is forbidden; `min_new_tokens` takes precedence over `min_length`."""
    for name in ("min_length", "min_new_tokens"):
        value = getattr(config, name)
        if value is not None and not (is_integer(value) and value >= 0):
            raise ValueError(f"{name}={value!r}, expected an integer, 0 or more")
    if config.min_new_tokens is not None:
        return int(config.min_new_tokens)
    return int(config.min_length or 0) - prompt_length


def _read_functions(given: Any, name: str, returned: str) -> tuple[Any, ...]:
    """A user's functions."""
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
                f"-> {returned}: set the field of the generation config that makes it, or use backend='torch'"
            )
        if not callable(one) or not isinstance(one, Hashable):
            raise ValueError(f"{name} has {one!r}, expected functions of JAX (tokens, scores) -> {returned}")
    return tuple(given)


def _read_penalty(value: Any) -> float:
    if not isinstance(value, Real) or not value > 0:  # pyright: ignore
        raise ValueError(f"repetition_penalty={value!r}, expected more than 0, and 1.0 for none")
    return float(value)


def _read_size(value: Any) -> int:
    if not is_integer(value) or value < 0:
        raise ValueError(f"no_repeat_ngram_size={value!r}, expected an integer, 1 or more, or 0 for none")
    return int(value)


def _read_tokens(value: Any, name: str) -> list[int]:
    """One token, or several; those that are not of the vocabulary have no effect, as in transformers."""
    tokens = [value] if is_integer(value) else value
    if not isinstance(tokens, list | tuple | np.ndarray) or not all(map(is_integer, tokens)):
        raise ValueError(f"{name}={value!r}, expected a list of token ids")
    return [int(token) for token in tokens]


def _read_words(value: Any, vocab_size: int, *, name: str = "bad_words_ids") -> list[list[int]]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name}={value!r}, expected a list of lists of token ids, such as [[5], [6, 7]]")
    for word in value:
        if not isinstance(word, list | tuple) or not word or not all(map(is_integer, word)):
            raise ValueError(f"{name} has {word!r}, expected a list of token ids, such as [6, 7]")
        for token in word:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} has token {token}, expected 0 to less than the vocabulary, {vocab_size}")
    return [[int(token) for token in word] for word in value]


def _read_biases(value: Any, vocab_size: int) -> tuple[list[list[int]], list[float]]:
    pairs = list(value.items()) if isinstance(value, dict) else value
    expected = "expected a list of pairs such as [[[6, 7], -2.0]]"
    if not isinstance(pairs, list) or not pairs:
        raise ValueError(f"sequence_bias={value!r}, {expected}")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], Real):
            raise ValueError(f"sequence_bias has {pair!r}, {expected}")
    words = _read_words([pair[0] for pair in pairs], vocab_size, name="sequence_bias")
    biases = {tuple(word): float(pair[1]) for word, pair in zip(words, pairs, strict=True)}  # the last of equal ones
    return [list(word) for word in biases], list(biases.values())


def _read_decay(value: Any) -> tuple[int, float]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not is_integer(value[0]) or not isinstance(value[1], Real):
        raise ValueError(
            f"exponential_decay_length_penalty={value!r}, expected a pair (tokens without an effect, factor), such as "
            "(10, 1.05)"
        )
    return int(value[0]), float(value[1])
