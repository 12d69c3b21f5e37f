# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Facts in the configs of a model and of a call, each read in one place. Knows no framework and no weights."""

import re
from collections.abc import Mapping
from typing import Any

# Of a model's config: where it came from, and what the weights say themselves.
UNDECIDING = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"})


def start_token(*configs: Any) -> Any:
    """The first token of an encoder-decoder's sequences, by transformers' rule; None if no config names one."""
    start = first_of("decoder_start_token_id", {}, *configs)
    return first_of("bos_token_id", {}, *configs) if start is None else start


def special_tokens(*configs: Any) -> set[int]:
    """The tokens that configs name: padding, end, start, placeholders of images, ..."""
    fields = [item for config in configs for item in vars(config).items()]
    named = [value for name, value in fields if re.search(r"_token_(ids?|index)$", name)]
    values = [value if isinstance(value, list | tuple) else [value] for value in named]
    return {token for row in values for token in row if isinstance(token, int) and token >= 0}


def position_limit(config: Any, *, of_encoder: bool = False) -> int | None:
    """The most tokens that a model has positions for; None if its config sets no limit."""
    return getattr(config.get_text_config(decoder=not of_encoder), "max_position_embeddings", None)


def sees_later_tokens(text_config: Any) -> bool:
    """Whether the keys of a prompt's tokens depend on those after them."""
    is_causal = getattr(text_config, "is_causal", True)
    return not is_causal or bool(getattr(text_config, "use_bidirectional_attention", None))


def growing_angles(text_config: Any) -> dict[str, int]:
    """Rotary angles that depend on the number of tokens, by kind, and the most tokens for which they do not.

    In longer sequences `"longrope"` turns all tokens by other angles, `"dynamic"` those that are read from then on.
    """
    ropes, found = getattr(text_config, "rope_parameters", None) or {}, {}
    for rope in (ropes, *ropes.values()):
        kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
        if kind == "longrope":
            found[kind] = rope["original_max_position_embeddings"]
        elif kind == "dynamic":
            found[kind] = text_config.max_position_embeddings
    return found


def end_tokens(config: Any) -> list[int]:
    """The end tokens that a generation config names."""
    eos = config.eos_token_id
    if eos is None:
        return []
    return [int(token) for token in eos] if hasattr(eos, "__len__") and getattr(eos, "ndim", 1) else [int(eos)]


def inferred_padding(config: Any) -> int | None:
    """The token that is padding if no mask is given, as in transformers; None if no token certainly is."""
    eos = config.eos_token_id
    is_eos = config.pad_token_id in (eos if isinstance(eos, list) else [eos])
    return None if is_eos else config.pad_token_id


def fill_token(config: Any) -> int:
    """The token after the end of a sequence: the padding token, else the end token, else -1, which is no token."""
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    for token in (config.pad_token_id, *eos):
        if token is not None:
            return token
    return -1


def first_of(name: str, given: Mapping[str, Any], *configs: Any) -> Any:
    """A field from the call, else from the first config that sets it; None if none does."""
    value = given.get(name)
    for config in configs:
        value = getattr(config, name, None) if value is None else value
    return value
