# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a call in Flax, before any work: what no backend accepts, and what only PyTorch does."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from hf_gr.catalogue.sequences import is_integer
from hf_gr.generation.models import fill_token

# By field of a generation config: the value, other than None, that has no effect.
NEUTRAL: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "remove_invalid_values": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "token_healing": False,
    **dict.fromkeys(("watermarking_config", "stop_strings", "max_time", "prompt_lookup_num_tokens")),
}
NEUTRAL_SCORES: dict[str, Any] = {  # of what a function in JAX can do, too
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "exponential_decay_length_penalty")),
}
# If samples are drawn:
NEUTRAL_WARPERS = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
# By warper: the numbers that transformers' own accepts. A program would draw with any others, too.
WARPERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: value > 0, "more than 0: do_sample=False takes the best"),
    "top_k": (lambda value: is_integer(value) and value >= 0, "an integer, 1 or more, or 0 for all"),
    "top_p": (lambda value: value >= 0, "0 to 1"),
    "min_p": (lambda value: 0 <= value <= 1, "0 to 1"),
}
LARGEST = 2**31 - 1  # of JAX's 32-bit integers


def check_options(config: Any) -> None:
    """Refuse options that Flax does not support."""
    for name, neutral in (NEUTRAL | NEUTRAL_SCORES | (NEUTRAL_WARPERS if config.do_sample else {})).items():
        if (value := getattr(config, name, None)) not in (None, neutral):
            in_jax = f", or pass {name}={neutral!r} and a function in JAX as logits_processor=[...]"
            fix = in_jax if name in NEUTRAL_SCORES else ""
            raise ValueError(
                f"{name}={value!r}, expected {neutral!r}: not supported in Flax; use backend='torch'{fix}"
            )
    for name, (is_valid, expected) in WARPERS.items() if config.do_sample else ():
        value = getattr(config, name)
        if value is not None and not (isinstance(value, Real) and is_valid(value)):
            raise ValueError(f"{name}={value!r}, expected {expected}")
    if abs(fill := fill_token(config)) > LARGEST:
        name = "eos_token_id" if config.pad_token_id is None else "pad_token_id"
        raise ValueError(
            f"{name}={fill}, expected at most {LARGEST}, which is what JAX's 32-bit integers hold: set pad_token_id"
        )


FIXES = {
    "generator": "pass seed=, or key=, a key of jax.random",
    **dict.fromkeys(("separator", "max_labels"), "an answer is one label in Flax; use backend='torch'"),
}


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that are neither Flax's nor fields of a generation config, unless None."""
    for name, value in arguments.items():
        if value is not None:
            fix = FIXES.get(name, "Flax has no such argument; omit it, or use backend='torch'")
            raise ValueError(f"{name} is given, expected None in Flax: {fix}")
