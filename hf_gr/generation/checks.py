# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of both backends, before any work, and what both read from a call. Knows NumPy alone."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from transformers.generation.configuration_utils import GenerationMode

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue import code_book as code_books
from hf_gr.catalogue.sequences import is_integer, to_host
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING

from .configuration import VERIFICATION, check_fields
from .defaults import NODES_AT_ONCE
from .messages import say_once
from .models import end_tokens, fill_token

# By the items of a catalogue, the code books that were compared with it.
_COMPARED: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()
# By draft head, the tries whose tokens are all among its codes.
_FITTING: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()

LARGEST_DIVISOR = math.log(1e30)  # fp32 holds scores divided by it, or by its inverse
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


def refuse_without_catalogue(given: Mapping[str, Any]) -> None:
    """Refuse our options in a call without a catalogue: they mean nothing there."""
    check_fields(given)
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ValueError(f"{', '.join(names)} given without constraint_index, expected both: pass constraint_index=")


def check_config(config: Any) -> None:
    """Refuse a prepared config with invalid values, or with a mode that takes no catalogue."""
    check_fields(vars(config))
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


def check_exact(config: Any, nodes_at_once: Any, given: Mapping[str, Any]) -> None:
    """Refuse options that `exact=True` does not go with; and `max_nodes` without it."""
    if not config.exact:
        if given.get("max_nodes") is not None:
            raise ValueError(f"max_nodes={config.max_nodes} without exact=True, expected both: pass exact=True")
        return
    if nodes_at_once is not None and (not is_integer(nodes_at_once) or nodes_at_once < 2):
        raise ValueError(
            f"num_beams={nodes_at_once!r} with exact=True, expected 2 or more prefixes for each forward: omit it for "
            f"{NODES_AT_ONCE}"
        )
    if config.verification != "strict":
        raise ValueError(f"verification={config.verification!r} with exact=True, expected 'strict': omit it")
    if config.output_logits:
        raise ValueError("output_logits=True with exact=True, expected False: there are no levels of beams; omit it")


def check_values(config: Any, *, has_bias: bool, has_groups: bool) -> None:
    """Refuse biases and groups of items where no best list is searched."""
    name = "item_bias" if has_bias else "max_per_group"
    if has_groups and not config.max_per_group:
        raise ValueError("item_groups without max_per_group, expected both: pass max_per_group=")
    if config.num_beams == 1 or (config.do_sample and not config.exact):
        raise ValueError(
            f"{name} with num_beams={config.num_beams} and do_sample={config.do_sample}, expected a search by beams "
            "or exact=True: pass num_beams=, without do_sample"
        )
    if config.verification not in ("strict", "catalogue"):
        raise ValueError(
            f"{name} with verification={config.verification!r}, expected 'strict' or 'catalogue': omit it"
        )


def not_with_exact(name: str) -> ValueError:
    """The error for what may raise or end scores."""
    return ValueError(
        f"{name} with exact=True, expected neither logits processors nor stopping criteria, after which a prefix may "
        "be less probable than an item below it: omit it"
    )


def read_widths(num_beams: Any, num_results: Any) -> tuple[int, ...]:
    """Check beams by level."""
    for width in num_beams:
        if not is_integer(width) or width < 1:
            raise ValueError(f"num_beams has {width!r}, expected 1 or more beams for each level")
    if not num_beams or max(num_beams) < 2 or num_beams[-1] < num_results:
        raise ValueError(
            f"num_beams={[*num_beams]}, expected 2 beams or more on some level, and on the last one "
            f"num_return_sequences={num_results} or more"
        )
    return tuple(map(int, num_beams))


def check_tokens_of_catalogue(catalogue: Any, vocabulary: int, *, name: str) -> None:
    """Refuse a catalogue, or anything else with tokens, that has some outside a vocabulary; `name` is the argument."""
    if catalogue.max_token_id >= vocabulary:
        raise ValueError(
            f"{name} has token {catalogue.max_token_id}, expected less than the vocabulary, {vocabulary}: "
            "is it another model's, or were the embeddings not resized?"
        )


def check_code_book(
    book: Mapping[str, str] | None, catalogue: Snapshot, *, whose: str = "the model", name: str = "constraint_index"
) -> None:
    """Refuse a catalogue, the argument `name`, in which items have other tokens than a model learned.

    What cannot be told is said once. Labels are checked by their tokenizer instead.
    """
    key = (whose, *(book or {}).items())
    if catalogue.tokenizer is not None or key in (compared := _COMPARED.setdefault(catalogue.items, set())):
        return
    if doubt := code_books.compare(book or {}, catalogue, whose=whose, argument=name):
        say_once(doubt)
    compared.add(key)


def check_processor(index: Any, prompt_length: Any, attention_mask: Any) -> int | None:
    """Refuse wrong arguments of a constraint as a logits processor; returns the prompt's length, if it is known.

    Padding counts, since it is in `input_ids`.
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
    """Refuse a catalogue with tokens for which a draft head has no code, level by level."""
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
    if head.config.code_book:
        check_code_book(dict(head.config.code_book), catalogue, whose="the draft head")
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


def check_lengths(
    config: Any,
    catalogue: Snapshot,
    max_new_tokens: Any,  # as given in the call itself; it takes precedence
    max_length: Any,  # likewise
    *,
    prompt_length: int,
    others: Mapping[str, int],  # by what else sets a limit, the length of prompt and answer
) -> int | None:
    """Refuse lengths too small for the longest sequence, and penalties too large for it.

    Returns the new tokens that the call leaves room for; None without a limit.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("max_length", max_length)):
        if value is not None and not is_integer(value):
            raise ValueError(f"{name}={value!r}, expected an int: omit it, the catalogue gives the length")
    room, name = max_new_tokens, f"max_new_tokens={max_new_tokens}"
    if room is None and max_length is not None:
        room, name = max_length - prompt_length, f"max_length={max_length}"
    longest = max(catalogue.max_length, (max_new_tokens or 0) if config.early_stopping == "never" else 0, 2)
    largest = LARGEST_DIVISOR / math.log(longest)
    if config.num_beams > 1 and abs(config.length_penalty) > largest:
        raise ValueError(
            f"length_penalty={config.length_penalty}, expected {-largest:.1f} to {largest:.1f} for sequences of up to "
            f"{longest} tokens: larger ones leave no score but 0"
        )
    lengths = others if room is None else {name: room + prompt_length, **others}
    for limit, length in lengths.items():
        if length - prompt_length < catalogue.max_length:
            raise ValueError(
                f"{limit} leaves {length - prompt_length} new tokens, expected at least {catalogue.max_length} for "
                "the longest sequence: omit the length, the catalogue gives it"
            )
    return room


def missing_token(catalogue: Snapshot, fill: int) -> int:
    """The token that fills a row without a sequence: the fill token, or -1 if such a row would be an item.

    Such a row may be of any length, and `items` reads sequences that lack their end token, too.
    """
    trie = catalogue.trie
    first_tokens = trie.tokens[trie.level_starts[1] : trie.level_starts[2]]
    if not (first_tokens == fill - trie.token_bases[0]).any():
        return fill  # as in most catalogues, and in a tenth of the time
    places = np.arange(catalogue.max_length)
    rows = np.where(places <= places[:, None], fill, PADDING)
    return -1 if (trie.walk(rows, catalogue.eos_token_id)[0] >= 0).any() else fill


def options_of(config: Any, catalogue: Snapshot, *, step_scores: bool = True) -> dict[str, Any]:
    """What `core.plan.Options` holds of a prepared config; without `step_scores` no level's scores are kept."""
    fill, has_details, num_beams = fill_token(config), bool(config.return_dict_in_generate), config.num_beams
    verification = VERIFICATION[getattr(config, "verification", None) or "strict"]
    is_relaxed = verification.samples
    is_ragged, is_checked = any(catalogue.trie.has_leaves[:-1]), not verification.unchecked_levels(2)
    is_sum = not (config.do_sample or config.renormalize_logits) and num_beams > 1
    return {
        "num_beams": num_beams,
        # Some of all that the beams find may not fit beside others.
        "num_return_sequences": config.num_return_sequences if config.exact or not config.max_per_group else num_beams,
        "max_per_group": config.max_per_group,
        "widths": config.widths,
        "num_kept": (1 if is_relaxed else max(2, 1 + len(end_tokens(config)))) * num_beams,
        "do_sample": config.do_sample,
        "early_stopping": config.early_stopping,
        "forces_end": config.forced_eos_token_id is not None,
        "output_scores": step_scores and has_details and not config.exact and bool(config.output_scores),
        "output_logits": has_details and bool(config.output_logits),
        "is_relaxed": is_relaxed,
        "certifies": is_sum and is_checked and not (is_ragged and config.length_penalty < 0),
        "length_penalty": config.length_penalty,
        "max_nodes": config.max_nodes if config.exact else 0,
        "max_new_tokens": config.max_new_tokens,
        "fill_token_id": fill,
        "missing_token_id": missing_token(catalogue, fill),
    }
