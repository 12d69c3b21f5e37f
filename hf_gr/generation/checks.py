# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of both backends, before any work, and what both read from a call. Knows NumPy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import numpy.typing as npt
from transformers.generation.configuration_utils import GenerationMode

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.sequences import is_integer, to_host
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING

from .configuration import GR_FIELDS, check_fields
from .models import fill_token, num_end_tokens, position_limit

# By draft head, the tries whose tokens are all among its codes.
_FITTING: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()

DEFAULT_BUDGET = 512  # nodes of a row besides its beams
LOGITS_AT_ONCE = 2**26  # of all nodes scored ahead, by default: 256 MB in fp32
LARGEST_DIVISOR = math.log(1e30)  # fp32 holds scores divided by it, or by its inverse
# Which transformers compares before we see them.
NUMBERS = "num_return_sequences max_new_tokens min_new_tokens min_length num_assistant_tokens temperature".split()
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse numbers that are texts: transformers compares them without a word of what they are."""
    for name in NUMBERS:
        if isinstance(given.get(name), str):
            raise ValueError(f"{name}={given[name]!r}, expected a number and not a text")


def refuse_without_catalogue(given: Mapping[str, Any]) -> None:
    """Refuse our options in a call without a catalogue: they mean nothing there."""
    check_fields(dict(given))
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ValueError(f"{', '.join(names)} given without constraint_index, expected both: pass constraint_index=")


def check_config(config: Any) -> None:
    """Refuse a prepared config with invalid values, or with a mode that takes no catalogue.

    Raises:
        ValueError: names the field, its value and what is expected.
    """
    check_fields({name: getattr(config, name, default) for name, default in GR_FIELDS.items()})
    for name in ("num_beams", "num_return_sequences"):
        value = getattr(config, name)
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name}={value!r}, expected an int, 1 or more")
    if config.top_k is not None and not is_integer(config.top_k):
        raise ValueError(f"top_k={config.top_k!r}, expected an integer: omit it for transformers' default")
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, Real) and not is_integer(token):
            raise ValueError(f"{name}={token!r}, expected a token id")
    penalty = config.length_penalty
    if config.num_beams > 1 and not (isinstance(penalty, Real) and math.isfinite(penalty)):
        raise ValueError(f"length_penalty={penalty!r}, expected a finite number: omit it for 1.0")
    mode = config.get_generation_mode(None)
    if mode not in MODES:
        expected = [str(supported.value) for supported in MODES]
        raise ValueError(f"generation mode {mode.value!r}, expected one of {expected}")


def check_tokens_of_catalogue(catalogue: Any, vocabulary: int, *, name: str) -> None:
    """Refuse a catalogue with tokens outside a model's vocabulary.

    Args:
        catalogue: the catalogue, or what is made of one: it knows its `max_token_id`.
        vocabulary: its number of tokens.
        name: the argument that holds the catalogue.
    """
    if catalogue.max_token_id >= vocabulary:
        raise ValueError(
            f"{name} has token {catalogue.max_token_id}, expected less than the vocabulary, {vocabulary}: "
            "is it another model's catalogue, or were the embeddings not resized?"
        )


def check_processor(index: Any, prompt_length: Any, attention_mask: Any) -> int | None:
    """Refuse wrong arguments of a constraint as a logits processor.

    Args:
        index: a catalogue, or a list of them.
        prompt_length: the prompt's length, or None.
        attention_mask: the prompt's mask (array or tensor), or None.

    Returns:
        The length as given, or the mask's: padding counts, since it is in `input_ids`. None if neither is given.
    """
    for one in index if isinstance(index, list | tuple) else [index]:
        if not isinstance(one, ConstraintIndex):
            raise ValueError(
                f"index is a {type(one).__name__}, expected a ConstraintIndex: ConstraintIndex.from_labels makes "
                "one of labels"
            )
    if prompt_length is not None and (not is_integer(prompt_length) or prompt_length < 0):
        raise ValueError(
            f"prompt_length={prompt_length!r}, expected 0 or more tokens, as inputs['input_ids'].shape[1] has them"
        )
    if attention_mask is None:
        return prompt_length
    shape = tuple(getattr(attention_mask, "shape", ()))
    if len(shape) != 2:
        raise ValueError(f"attention_mask has shape {list(shape)}, expected the prompt's, [prompts, length]")
    if prompt_length not in (None, shape[1]):
        raise ValueError(
            f"prompt_length={prompt_length} and attention_mask has {shape[1]} positions, expected one length: "
            "pass one of the two"
        )
    return shape[1]


def check_scores_of_rules(num_rows: int, num_prompts: int) -> None:
    """Refuse scores of a number of rows that the prompts of a processor do not divide."""
    if num_rows % num_prompts:
        raise ValueError(
            f"scores have {num_rows} rows for {num_prompts} rules, expected one path or more for each prompt"
        )


def check_codes(head: Any, catalogue: Snapshot) -> None:
    """Refuse a catalogue with tokens for which a draft head has no code, level by level.

    Raises:
        ValueError: another number of levels, or a token that is not in its level's codebook.
    """
    num_levels = head.config.num_levels
    if catalogue.max_length != num_levels:
        has_end = catalogue.eos_token_id is not None and catalogue.max_length == num_levels + 1
        raise ValueError(
            f"constraint_index has {catalogue.max_length} levels and the draft head {num_levels}, expected the same: "
            + ("its end token is a level: model.add_draft_head(index)" if has_end else "is it another catalogue's?")
        )
    seen = _FITTING.setdefault(head, WeakSet())
    if catalogue.trie in seen:
        return
    for level, tokens in enumerate(catalogue.trie.codebooks):
        codes = to_host(head.codebook(level))
        missing = np.setdiff1d(tokens, codes)
        if len(missing):
            raise ValueError(
                f"constraint_index has token {missing[0]} on level {level + 1}, expected one of the draft head's "
                f"{len(codes)} codes: is it another catalogue's head, or were codes added? Make one with "
                "model.add_draft_head(codebooks) of all codes"
            )
    seen.add(catalogue.trie)


def check_tokens_of_prompt(least: int, most: int, vocabulary: int | None) -> None:
    """Refuse prompts with tokens, from `least` to `most`, for which a model has no embedding."""
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        raise ValueError(
            f"the prompt has token {least if least < 0 else most}, expected 0 to less than {vocabulary}: "
            "is it another model's prompt, or a label such as -100?"
        )


def rooms_of(max_new_tokens: int | None, max_length: int | None, *, prompt_length: int) -> dict[str, int | None]:
    """By how a call gives a length, the new tokens that it leaves; `max_new_tokens` takes precedence."""
    for name, value in (("max_new_tokens", max_new_tokens), ("max_length", max_length)):
        if value is not None and not is_integer(value):
            raise ValueError(f"{name}={value!r}, expected an int: omit it, the catalogue gives the length")
    if max_new_tokens is None and max_length is not None:
        return {f"max_length={max_length}": max_length - prompt_length}
    return {f"max_new_tokens={max_new_tokens}": max_new_tokens}


def check_room(catalogue: Snapshot, rooms: Mapping[str, int | None]) -> None:
    """Refuse lengths too small for the longest sequence.

    Args:
        catalogue: the catalogue.
        rooms: by the argument that sets a length, the new tokens it leaves; None for no limit.
    """
    for name, room in rooms.items():
        if room is not None and room < catalogue.max_length:
            raise ValueError(
                f"{name} leaves {room} new tokens, expected at least {catalogue.max_length} for the longest sequence: "
                "omit the length, the catalogue gives it"
            )


def check_penalty(config: Any, catalogue: Snapshot, *, max_new_tokens: int | None) -> None:
    """Refuse a length penalty under which scores, divided by it, are no longer numbers of fp32."""
    longest = max(catalogue.max_length, (max_new_tokens or 0) if config.early_stopping == "never" else 0, 2)
    largest = LARGEST_DIVISOR / math.log(longest)
    if config.num_beams > 1 and abs(config.length_penalty) > largest:
        raise ValueError(
            f"length_penalty={config.length_penalty}, expected {-largest:.1f} to {largest:.1f} for sequences of up to "
            f"{longest} tokens: larger ones leave no score but 0"
        )


def check_room_for_placeholders(head: Any, config: Any, prompt_length: int) -> None:
    """Refuse a prompt after which a draft head's placeholders exceed the positions of a model's config."""
    num, limit = head.config.num_placeholders, position_limit(config)
    if limit is not None and prompt_length + num > limit:
        raise ValueError(
            f"the prompt has {prompt_length} tokens and the draft head's placeholders {num} more, expected at most "
            f"{limit} together, which is the model's max_position_embeddings: shorten the prompt"
        )


def check_some_tokens(num_rows: int, length: int) -> None:
    """Refuse a batch without prompts, and prompts without tokens."""
    if num_rows == 0:
        raise ValueError("the batch has 0 prompts, expected at least one: omit such a call")
    if length == 0:
        raise ValueError("the prompt has no token, expected at least one: begin it with bos_token_id")


def check_mask(mask: Any) -> None:
    """Refuse an attention mask (array or tensor) with entries other than 0 and 1: models read them differently."""
    strange = mask[(mask != 0) & (mask != 1)]
    if len(strange):
        raise ValueError(f"attention_mask has {strange[0].item()}, expected 0 at padding and 1 at all other tokens")


def check_padding(mask: npt.NDArray[Any]) -> None:
    """Refuse right-padded prompts, and prompts that are all padding, by their `[B, P]` mask."""
    padded = np.flatnonzero(mask[:, -1] == 0)
    if not len(padded):
        return
    row = int(padded[0])
    if not (mask[row] != 0).any():
        raise ValueError(f"prompt {row} is all padding, expected at least one token: begin it with bos_token_id")
    raise ValueError(
        f"prompt {row} ends with padding, expected padding on the left: set tokenizer.padding_side='left'"
    )


def forced_end(config: Any, catalogue: Snapshot, max_new_tokens: int) -> int | None:
    """The catalogue's end token, if the config forces it and the longest sequences reach that place; else None."""
    forced: Any = to_host(config.forced_eos_token_id)
    is_end = catalogue.eos_token_id is not None and catalogue.eos_token_id in np.ravel(forced)
    return catalogue.eos_token_id if is_end and max_new_tokens == catalogue.max_length else None


def missing_token(catalogue: Snapshot, fill: int) -> int:
    """The token that fills a row without a sequence: the fill token, or -1 if such a row would be an item.

    Such a row may be of any length, and `items` reads sequences that lack their end token, too.
    """
    if catalogue.trie.find([fill]) < 0:
        return fill  # as in most catalogues, and in a tenth of the time
    places = np.arange(catalogue.max_length)
    rows = np.where(places <= places[:, None], fill, PADDING)
    return -1 if (catalogue.trie.walk(rows, catalogue.eos_token_id)[0] >= 0).any() else fill


def options_of(config: Any, catalogue: Snapshot, *, max_new_tokens: int, forces_end: bool) -> dict[str, Any]:
    """What `core.plan.Options` holds of a prepared config, in numbers of the host."""
    fill, has_details = fill_token(config), bool(config.return_dict_in_generate)
    is_relaxed = getattr(config, "verification", None) == "relaxed"
    return {
        "num_beams": config.num_beams,
        "num_return_sequences": config.num_return_sequences,
        "num_kept": (1 if is_relaxed else max(2, 1 + num_end_tokens(config))) * config.num_beams,
        "do_sample": config.do_sample,
        "early_stopping": config.early_stopping,
        "forces_end": forces_end,
        "output_scores": has_details and bool(config.output_scores),
        "output_logits": has_details and bool(config.output_logits),
        "is_relaxed": is_relaxed,
        "length_penalty": config.length_penalty,
        "max_new_tokens": max_new_tokens,
        "fill_token_id": fill,
        "missing_token_id": missing_token(catalogue, fill),
    }


def draft_budget(config: Any, *, batch_size: int, vocab_size: int) -> int:
    """Nodes besides its live beams that may be scored ahead, per row."""
    return config.draft_token_budget or max(min(DEFAULT_BUDGET, LOGITS_AT_ONCE // (batch_size * vocab_size)), 1)


def check_assistant(model: Any, assistant: Any) -> None:
    """Refuse a draft model that cannot read the prompts that the model reads."""
    name = type(assistant).__name__
    if assistant.config.is_encoder_decoder != model.config.is_encoder_decoder:
        kinds = ["encoder-decoder" if one.config.is_encoder_decoder else "decoder" for one in (assistant, model)]
        raise ValueError(
            f"assistant_model is a {name}, {kinds[0]}, expected {kinds[1]} like the model: both must read the same "
            "prompt"
        )
    ours, theirs = (one.config.get_text_config(decoder=True).vocab_size for one in (model, assistant))
    if ours != theirs:
        raise ValueError(
            f"assistant_model has a vocabulary of {theirs} tokens, expected the model's, {ours}: "
            "both must be trained with one tokenizer, and resized alike"
        )


def check_room_for_drafts(assistant: Any, catalogue: Snapshot, prompt_length: int, mask: Any) -> None:
    """Refuse prompts for which a draft model has no positions; rotary ones can be computed for any.

    Args:
        assistant: the draft model.
        catalogue: the catalogue of any row.
        prompt_length: tokens of the prompts that it reads, padding included.
        mask: of those (array or tensor); None for no padding.
    """
    if getattr(assistant.config.get_text_config(decoder=True), "rope_parameters", None) is not None:
        return
    is_encoder_decoder = assistant.config.is_encoder_decoder
    num_read = max(catalogue.max_length - 2, 0)  # the target alone reads tokens of the last level drafted
    num_tokens, limit = prompt_length, position_limit(assistant.config, of_encoder=is_encoder_decoder)
    if not is_encoder_decoder:  # where padding has no position
        num_tokens = num_read + (num_tokens if mask is None else int(mask.sum(-1).max()))
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"assistant_model has {limit} positions, expected {num_tokens} for this prompt and its drafts: shorten "
            "the prompt, or omit assistant_model"
        )


def check_draft_width(config: Any) -> None:
    """Refuse searches of a draft model or head that could never be accepted, or that draft no level."""
    num_draft_beams, num_steps = config.num_draft_beams, config.num_assistant_tokens
    name = "num_beams" if config.num_beams >= config.num_return_sequences else "num_return_sequences"
    if num_draft_beams is not None and num_draft_beams < getattr(config, name):
        raise ValueError(
            f"num_draft_beams={num_draft_beams}, expected at least {name}={getattr(config, name)}: "
            "a step is accepted only if all beams are among those of the draft"
        )
    if not is_integer(num_steps) or num_steps < 1:
        raise ValueError(f"num_assistant_tokens={num_steps!r}, expected 1 or more levels a draft")
