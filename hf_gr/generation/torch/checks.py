# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks before any work. Reads a call's arguments; changes none and decodes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import MaxLengthCriteria

from hf_gr.catalogue.sequences import to_host
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.checks import (
    check_config,
    check_padding,
    check_penalty,
    check_room,
    check_some_tokens,
    check_tokens_of_catalogue,
    check_tokens_of_prompt,
    rooms_of,
)

from .caches import check_cache
from .models import embeddings_of, output_size_of
from .prompts import Prompt


def check_call(
    model: Any,
    catalogue: Snapshot,  # of any row: the checked facts are the same for all
    config: Any,  # prepared
    prompt: Prompt,
    *,
    max_new_tokens: int | None,  # as given in the call itself
    max_length: int | None,  # likewise; `max_new_tokens` takes precedence
    functions: Mapping[str, Any],  # the user's own processors and criteria, by argument
    past_key_values: Any,  # the user's own
) -> None:
    """Refuse calls that cannot generate the catalogue's sequences, by a `ValueError` that names the fix."""
    check_config(config)
    _check_functions(functions)
    check_vocabulary(model, catalogue, name="constraint_index")
    _check_tokens(model, prompt)
    rooms = rooms_of(max_new_tokens, max_length, prompt_length=prompt.length)
    for criterion in functions["stopping_criteria"] or ():
        if isinstance(criterion, MaxLengthCriteria):
            name = f"stopping criterion of max_length={criterion.max_length}"
            rooms[name] = criterion.max_length - prompt.length
    check_penalty(config, catalogue, max_new_tokens=max_new_tokens)
    check_room(catalogue, rooms)
    _check_prompt(prompt)
    if prompt.inputs is not None and past_key_values is not None:
        check_cache(past_key_values, prompt.inputs.shape[0])


def check_vocabulary(model: Any, catalogue: Snapshot, *, name: str) -> None:
    """Refuse a catalogue with tokens outside the model's vocabulary; `name` is the argument that holds it."""
    check_tokens_of_catalogue(catalogue, output_size_of(model), name=name)


def check_generator(generator: Any, device: Any) -> None:
    """Refuse anything but a random number generator on the model's device."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator) or generator.device.type != device.type:
        found = generator.device if isinstance(generator, torch.Generator) else type(generator).__name__
        raise ValueError(f"generator is {found}, expected a torch.Generator: torch.Generator({str(device.type)!r})")


def _check_functions(functions: Mapping[str, Any]) -> None:
    """Refuse what cannot be called in the place of processors and criteria."""
    for name in ("logits_processor", "stopping_criteria"):
        given = functions[name]
        if given is not None and not (isinstance(given, Iterable) and all(callable(one) for one in given)):
            raise ValueError(f"{name}={given!r}, expected a list of functions: [MyProcessor()]")
    prefix_function = functions["prefix_allowed_tokens_fn"]
    if prefix_function is not None and not callable(prefix_function):
        raise ValueError(f"prefix_allowed_tokens_fn={prefix_function!r}, expected a function of (batch, tokens)")


def _check_tokens(model: Any, prompt: Prompt) -> None:
    """Refuse empty prompts, and tokens for which the model has no embedding."""
    if prompt.inputs is None:
        return
    check_some_tokens(len(prompt.inputs), prompt.length)
    if prompt.is_tokens:
        least, most = torch.stack(prompt.inputs.aminmax()).tolist()
        check_tokens_of_prompt(least, most, embeddings_of(model))


def _check_prompt(prompt: Prompt) -> None:
    """Refuse right-padded prompts, and prompts that are all padding."""
    if prompt.mask is not None and prompt.mask.shape[1] and not bool(prompt.mask[:, -1].all()):
        check_padding(to_host(prompt.mask))
