# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`model.warm_up`: captures decodes before the first request. Decodes by `generate` alone, on tokens of no meaning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from hf_gr.catalogue.sequences import is_integer
from hf_gr.generation.models import position_limit
from hf_gr.generation.named_catalogues import resolve_index

from .captured import capturing
from .layouts import ordinary_tokens


@dataclass(frozen=True)
class Capture:
    """A captured decode.

    Attributes:
        batch_size: prompts of a call that it answers.
        prompt_length: tokens of the longest of them; None if a draft head answers, whatever their length.
        num_beams: of the search.
        num_bytes: memory of its buffers and its graph; a CPU has no graph.
        seconds: that the capture took.
    """

    batch_size: int
    prompt_length: int | None
    num_beams: int
    num_bytes: int
    seconds: float


def warm_up(
    model: Any,
    index: Any,
    *,
    batch_sizes: int | Sequence[int],
    prompt_lengths: int | Sequence[int],
    num_beams: int | Sequence[int],
    options: dict[str, Any],
) -> list[Capture]:
    """Capture the decodes of calls to come; see `GRGenerationMixin.warm_up`."""
    sizes, lengths, widths = (
        _read(name, value)
        for name, value in (
            ("batch_sizes", batch_sizes),
            ("prompt_lengths", prompt_lengths),
            ("num_beams", num_beams),
        )
    )
    if (kind := options.pop("cache_implementation", "static")) != "static":
        raise ValueError(f"cache_implementation={kind!r}, expected 'static': others capture nothing")
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"warm_up of a {type(model).__name__}, an encoder-decoder, expected a decoder: only those are captured"
        )
    limit, levels = position_limit(model.config), _num_levels(model, index)
    if limit is not None and max(lengths) + levels > limit:
        raise ValueError(
            f"prompt_lengths has {max(lengths)}, expected at most {limit - levels}: the model has {limit} positions, "
            f"and the catalogue's sequences have {levels} tokens"
        )
    found: dict[Any, Capture] = {}
    for width, size, length in product(widths, sizes, sorted(lengths)):
        tokens = ordinary_tokens(model, size * length).view(size, length)
        call = options | {"attention_mask": torch.ones_like(tokens), "constraint_index": index, "num_beams": width}
        with capturing() as programs:
            model.generate(tokens, cache_implementation="static", **call)
        if not programs:
            raise ValueError(
                "warm_up of a call in transformers' own loop, expected a model that takes beams as a tree"
            )
        for program in programs:
            captured = program.captured
            found[program] = Capture(size, program.longest, width, captured.num_bytes, captured.seconds)
    return list(found.values())


def _read(name: str, value: Any) -> list[int]:
    values = list(value) if isinstance(value, Iterable) else [value]
    if not values or not all(is_integer(one) and one > 0 for one in values):
        raise ValueError(f"{name}={value!r}, expected a positive integer, or several of them")
    return [int(one) for one in values]


def _num_levels(model: Any, index: Any) -> int:
    """Tokens of the catalogue's longest sequence."""
    named = getattr(model.generation_config, "constraint_index", None) if index is None else index
    if named is None or named is False:
        raise ValueError("constraint_index is missing, expected a catalogue: pass warm_up(index, ...)")
    indexes = resolve_index(model, named, may_be_list=True)
    return max(one.max_length for one in (indexes if isinstance(indexes, list | tuple) else [indexes]))
