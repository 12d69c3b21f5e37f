# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a call in Flax is refused for, before any work: what no backend takes, and what only PyTorch does.

Axes: B batch, P prompt, Q tokens that an encoder-decoder's sequences begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_gr.catalogue.sequences import is_integer, to_host
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.checks import (
    check_codes,
    check_config,
    check_mask,
    check_padding,
    check_room,
    check_room_for_placeholders,
    check_some_tokens,
    check_tokens_of_catalogue,
    check_tokens_of_prompt,
)
from hf_gr.generation.models import fill_token, inferred_padding, num_end_tokens, start_token

# By field of a generation config: the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1.0),
    "remove_invalid_values": (None, False),
    "exponential_decay_length_penalty": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "watermarking_config": (None,),
    "stop_strings": (None,),
    "max_time": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "token_healing": (None, False),
}
NEUTRAL_ENDS = {"min_length": (None, 0), "min_new_tokens": (None, 0)}  # where there is an end token
NEUTRAL_WARPERS = {  # where samples are drawn
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}
# By warper: which numbers transformers' own takes. A program would draw by others all the same.
WARPERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: value > 0, "more than 0: do_sample=False takes the best"),
    "top_k": (lambda value: is_integer(value) and value >= 0, "an integer, 1 or more, or 0 for all"),
    "top_p": (lambda value: value >= 0, "0 to 1"),
    "min_p": (lambda value: 0 <= value <= 1, "0 to 1"),
}
LARGEST = 2**31 - 1  # of JAX's 32-bit integers


@dataclass(frozen=True)
class HostPrompt:
    """The prompt of a call, in NumPy.

    Attributes:
        input_ids: `[B, P]`.
        mask: `[B, P]` booleans, true at real tokens.
        decoder_input_ids: `[B, Q]`, what an encoder-decoder's sequences begin with; None for a decoder.
    """

    input_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    decoder_input_ids: npt.NDArray[np.int32] | None = None

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.input_ids)

    @property
    def length(self) -> int:
        """Tokens in front of the generated ones, by which `max_length` counts."""
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
            ValueError: tokens or a mask of another rank, type or number of rows, tokens that the model does not have,
                padding where none may be.
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
            # Of an encoder's prompt transformers infers none.
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


def check_call(
    model: Any,
    catalogue: Snapshot,
    config: Any,
    prompt: HostPrompt,
    *,
    max_new_tokens: int | None,
    max_length: int | None,
) -> None:
    """Refuse what cannot lead to the catalogue's sequences, or what Flax has not.

    Args:
        model: the model.
        catalogue: the catalogue of any row; what is checked is the same for all.
        config: the prepared generation config.
        prompt: the prompt.
        max_new_tokens: as the call itself gives it.
        max_length: as the call itself gives it; `max_new_tokens` goes before.

    Raises:
        ValueError: names the argument, its value, what is expected, and the fix.
        NotImplementedError: longer sequences than a sliding window.
    """
    check_config(config)
    neutral = (
        NEUTRAL | (NEUTRAL_ENDS if num_end_tokens(config) else {}) | (NEUTRAL_WARPERS if config.do_sample else {})
    )
    for name, values in neutral.items():
        if (value := getattr(config, name, None)) not in values:
            raise ValueError(f"{name}={value!r}, expected {values[-1]!r}: Flax has no such thing; use backend='torch'")
    for name, (is_valid, expected) in WARPERS.items() if config.do_sample else ():
        value = getattr(config, name)
        if value is not None and not (isinstance(value, Real) and is_valid(value)):
            raise ValueError(f"{name}={value!r}, expected {expected}")
    if abs(fill := fill_token(config)) > LARGEST:
        name = "eos_token_id" if config.pad_token_id is None else "pad_token_id"
        raise ValueError(
            f"{name}={fill}, expected at most {LARGEST}, which is what JAX's 32-bit integers hold: set pad_token_id"
        )
    check_tokens_of_catalogue(catalogue, model.config.vocab_size, name="constraint_index")
    rooms = {f"max_new_tokens={max_new_tokens}": max_new_tokens}
    if max_new_tokens is None and max_length is not None:
        rooms[f"max_length={max_length}"] = max_length - prompt.length
    check_room(catalogue, rooms)
    model.spec.check_length(prompt.length + catalogue.max_length)


def check_drafting(config: Any, given: Mapping[str, Any]) -> None:
    """Refuse drafts and verifications that Flax has not.

    Args:
        config: the prepared config, with our fields.
        given: those of our fields that the call itself gives.

    Raises:
        ValueError: names the field, its value, what is expected, and the fix.
    """
    drafting, verification = config.drafting, config.verification
    if drafting not in (None, "trie", "head"):
        fix = "what pays is not measured in Flax; pass drafting='trie'" if drafting == "auto" else "none drafts there"
        raise ValueError(
            f"drafting={drafting!r}, expected None, 'trie' or 'head' in Flax: {fix}, or use backend='torch'"
        )
    expected = "catalogue" if drafting == "head" else "strict"
    if verification not in (None, expected):
        raise ValueError(
            f"verification={verification!r} with drafting={drafting!r}, expected {expected!r}: Flax has no other; "
            "leave it away, or use backend='torch'"
        )
    if given.get("num_draft_beams") is not None:
        raise ValueError(
            f"num_draft_beams={given['num_draft_beams']}, expected None in Flax, where no beams draft: leave it away"
        )
    if given.get("draft_token_budget") is not None and drafting is None:
        raise ValueError(
            f"draft_token_budget={given['draft_token_budget']} without drafting, expected None: pass drafting='trie'"
        )


def check_draft_head(model: Any, catalogue: Snapshot, prompt: HostPrompt) -> None:
    """Refuse a draft head that does not fit the catalogue or the prompt.

    Args:
        model: the model.
        catalogue: the catalogue of any row.
        prompt: the prompt.

    Raises:
        ValueError: names the argument, its value, what is expected, and the fix.
    """
    head = model.draft_head
    if head is None:
        raise ValueError(
            "drafting='head' and the model has no draft head, expected one: load a checkpoint that has it; heads are "
            "made and trained in PyTorch"
        )
    check_codes(head, catalogue)
    check_room_for_placeholders(head, model.config, prompt.length)


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that are neither Flax's nor fields of a generation config, unless they are None."""
    for name, value in arguments.items():
        if name == "generator" and value is not None:
            raise ValueError("generator is given, expected None in Flax: pass key=, a seed or a key of jax.random")
        if value is not None:
            raise ValueError(
                f"{name} is given, expected None: Flax has no such argument; leave it away, or use backend='torch'"
            )


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
    """What an encoder-decoder's sequences begin with; the start token is put in front where it is missing."""
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
        raise ValueError("decoder_start_token_id=None, expected a token, which sequences begin with: set it")
    if not 0 <= start < model.config.vocab_size:
        raise ValueError(
            f"decoder_start_token_id={start}, expected 0 to less than {model.config.vocab_size}: is it another "
            "model's generation config?"
        )
    return np.concatenate([np.full((num_rows, 1), start, np.int32), given], axis=1)
