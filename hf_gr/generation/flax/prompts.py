# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompt of a call in Flax: read from its arguments, and brought to the shape of a compiled program.

Refuses arguments and options that no backend accepts, or only PyTorch.
"""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from hf_gr.catalogue.sequences import is_integer
from hf_gr.core.widths import bucket
from hf_gr.flax import scorers
from hf_gr.flax.arrays import padded
from hf_gr.generation.call import Prompt, read_mask, read_tokens
from hf_gr.generation.models import fill_token, start_token

SMALLEST_PROMPT, PROMPT_STEPS = 32, 2  # buckets of prompts: two a doubling
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
FIXES = {
    "generator": "pass seed=, or key=, a key of jax.random",
    **dict.fromkeys(("separator", "max_labels"), "an answer is one label in Flax; use backend='torch'"),
}


def prompt_bucket(length: int) -> int:
    """The tokens that a prompt is padded to: those of its program."""
    return bucket(length, least=SMALLEST_PROMPT, steps=PROMPT_STEPS)


def read_prompt(model: Any, inputs: Any, config: Any, model_kwargs: dict[str, Any]) -> Prompt:
    """Find the prompts among the arguments of a call, and check them; refuses arguments that Flax does not have."""
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    input_ids, attention_mask, begun = (model_kwargs.pop(name, None) for name in names)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((inputs, input_ids, attention_mask, begun))):
        raise ValueError(
            "the prompt is traced, expected arrays: generate is one program already, call it outside of jit"
        )
    refuse_arguments(model_kwargs)
    check_options(config)
    if inputs is not None and input_ids is not None:
        raise ValueError("inputs and input_ids are given, expected one of them: they are the same")
    given = inputs if input_ids is None else input_ids
    if given is None:
        raise ValueError("inputs=None, expected prompts [batch, length]: pass input_ids=")
    if isinstance(given, Mapping):
        raise ValueError(f"inputs is a {type(given).__name__}, expected an array: call generate(**batch)")
    tokens = read_tokens(given, "the prompt", model.config.vocab_size).astype(np.int32)
    mask = read_mask(
        attention_mask, config, tokens=tokens, shape=tokens.shape, is_encoder_decoder=model.is_encoder_decoder
    )
    mask = np.ones(tokens.shape, bool) if mask is None else mask
    if not model.is_encoder_decoder:
        if begun is not None:
            raise ValueError("decoder_input_ids is given, expected None: the model is a decoder")
        return Prompt(tokens, mask, *tokens.shape)
    start = _read_start(model, config, begun, len(tokens))
    return Prompt(tokens, mask, *start.shape, start=start)


def to_bucket(tokens: Any, mask: Any, start: Any, num_rows: int) -> scorers.Prompt:
    """Prompts, with an encoder-decoder's first tokens, in the shape of their bucket's program.

    They are padded, and filled up with copies of the first row: a decoder's in front, an encoder's at their end, so
    that learned positions stay (BART).
    """
    order = np.arange(num_rows)
    order[len(tokens) :] = 0
    size = prompt_bucket(tokens.shape[1])
    tokens, mask = (padded(array, size, axis=1, in_front=start is None)[order] for array in (tokens, mask))
    return scorers.Prompt(tokens, mask, None if start is None else start[order])


def _read_start(model: Any, config: Any, decoder_input_ids: Any, num_rows: int) -> npt.NDArray[np.int32]:
    """The first tokens of an encoder-decoder's sequences; prepends the start token if it is missing."""
    start = start_token(config)
    if isinstance(start, list):
        raise ValueError(f"decoder_start_token_id={start}, expected one token for all rows in Flax")
    given = np.zeros((num_rows, 0), np.int32)
    if decoder_input_ids is not None:
        given = read_tokens(decoder_input_ids, "decoder_input_ids", model.config.vocab_size).astype(np.int32)
        if len(given) != num_rows:
            raise ValueError(f"decoder_input_ids has {len(given)} rows, expected {num_rows}: one for each prompt")
        if start is None or (given[:, 0] == start).any():
            return given
    if start is None:
        raise ValueError("decoder_start_token_id=None, expected the first token of all sequences: set it")
    if not 0 <= start < model.config.vocab_size:
        raise ValueError(
            f"decoder_start_token_id={start}, expected 0 to less than {model.config.vocab_size}: is it another "
            "model's generation config?"
        )
    return np.concatenate([np.full((num_rows, 1), start, np.int32), given], axis=1)


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


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that are neither Flax's nor fields of a generation config, unless None."""
    for name, value in arguments.items():
        if value is not None:
            fix = FIXES.get(name, "Flax has no such argument; omit it, or use backend='torch'")
            raise ValueError(f"{name} is given, expected None in Flax: {fix}")
