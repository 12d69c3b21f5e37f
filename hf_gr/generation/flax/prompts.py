# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompt of a call in Flax: read from its arguments, and brought to the shape of a compiled program.

Axes: B batch, P prompt, Q first tokens of an encoder-decoder's sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_gr.catalogue.buckets import bucket
from hf_gr.catalogue.sequences import to_host
from hf_gr.flax.buckets import padded
from hf_gr.flax.scorers import Prompt
from hf_gr.generation.checks import check_mask, check_padding, check_some_tokens, check_tokens_of_prompt
from hf_gr.generation.models import inferred_padding, start_token

SMALLEST_PROMPT, PROMPT_STEPS = 32, 2  # buckets of prompts: two a doubling


def prompt_bucket(length: int) -> int:
    """The tokens that a prompt is padded to: those of its program."""
    return bucket(length, least=SMALLEST_PROMPT, steps=PROMPT_STEPS)


@dataclass(frozen=True)
class HostPrompt:
    """The prompt of a call, in NumPy.

    Attributes:
        input_ids: `[B, P]`.
        mask: `[B, P]` booleans, true at real tokens.
        decoder_input_ids: `[B, Q]`, the first tokens of an encoder-decoder's sequences; None for a decoder.
    """

    input_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    decoder_input_ids: npt.NDArray[np.int32] | None = None
    is_tokens = True  # and never embeddings

    @property
    def inputs(self) -> npt.NDArray[np.int32]:
        """What the model, or its encoder, reads."""
        return self.input_ids

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.input_ids)

    @property
    def length(self) -> int:
        """Tokens before the generated ones, by which `max_length` counts."""
        begun = self.input_ids if self.decoder_input_ids is None else self.decoder_input_ids
        return begun.shape[1]

    @classmethod
    def read(
        cls,
        model: Any,
        config: Any,
        *,
        inputs: Any = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
    ) -> HostPrompt:
        """Read the arguments of a call, by transformers' rules.

        Raises:
            ValueError: tokens or a mask of the wrong rank, type or number of rows, tokens that the model does not
                have, or padding that is not allowed.
        """
        if inputs is not None and input_ids is not None:
            raise ValueError("inputs and input_ids are given, expected one of them: they are the same")
        name, given = ("inputs", inputs) if input_ids is None else ("input_ids", input_ids)
        if given is None:
            raise ValueError("inputs=None, expected prompts [batch, length]: pass input_ids=")
        if isinstance(given, Mapping):
            raise ValueError(f"{name} is a {type(given).__name__}, expected an array: call generate(**batch)")
        tokens = _read_tokens(given, "the prompt" if name == "inputs" else name, model.config.vocab_size)
        if attention_mask is None:
            # For an encoder's prompt transformers infers no mask.
            padding = None if model.is_encoder_decoder else inferred_padding(config)
            mask = np.ones(tokens.shape, bool) if padding is None else tokens != padding
        else:
            host = _to_array(attention_mask, "attention_mask")
            if host.shape != tokens.shape:
                raise ValueError(
                    f"attention_mask is {list(host.shape)}, expected {list(tokens.shape)} as the prompt: a row for "
                    "every prompt, an entry for every token"
                )
            check_mask(host)
            mask = host != 0
        if not model.is_encoder_decoder:
            if decoder_input_ids is not None:
                raise ValueError("decoder_input_ids is given, expected None: the model is a decoder")
            check_padding(mask)
            return cls(tokens, mask)
        empty = np.flatnonzero(~mask.any(-1))
        if len(empty):
            raise ValueError(f"prompt {empty[0]} is all padding, expected at least one token")
        return cls(tokens, mask, _read_start(model, config, decoder_input_ids, len(tokens)))

    def to_bucket(self, num_rows: int) -> Prompt:
        """The prompt in the shape of its bucket's program: padded, and with copies of the first row.

        A decoder's prompt is padded in front; an encoder's at its end, so that learned positions stay (BART).
        """
        order = np.arange(num_rows)
        order[self.num_rows :] = 0
        size = prompt_bucket(self.input_ids.shape[1])
        start = self.decoder_input_ids
        tokens, mask = (
            padded(array, size, axis=1, in_front=start is None)[order] for array in (self.input_ids, self.mask)
        )
        return Prompt(tokens, mask, None if start is None else start[order])


def _to_array(values: Any, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(to_host(values))
    except ValueError as error:
        raise ValueError(f"{name} is ragged, expected an array [batch, length]: pad it on the left") from error


def _read_tokens(tokens: Any, name: str, vocabulary: int) -> npt.NDArray[np.int32]:
    host = _to_array(tokens, name)
    if host.ndim != 2 or not np.issubdtype(host.dtype, np.integer):
        raise ValueError(
            f"{name} is {list(host.shape)} of {host.dtype}, expected integers [batch, length]: pad, stack and "
            "unsqueeze first"
        )
    check_some_tokens(*host.shape)
    check_tokens_of_prompt(int(host.min()), int(host.max()), vocabulary)
    return host.astype(np.int32)


def _read_start(model: Any, config: Any, decoder_input_ids: Any, num_rows: int) -> npt.NDArray[np.int32]:
    """The first tokens of an encoder-decoder's sequences; prepends the start token if it is missing."""
    start = start_token(config)
    if isinstance(start, list):
        raise ValueError(f"decoder_start_token_id={start}, expected one token for all rows in Flax")
    given = np.zeros((num_rows, 0), np.int32)
    if decoder_input_ids is not None:
        given = _read_tokens(decoder_input_ids, "decoder_input_ids", model.config.vocab_size)
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
