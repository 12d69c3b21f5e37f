# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What is refused before any work. Reads a call's arguments; changes none and decodes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria

from hf_gr.catalogue.sequences import to_host
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
    inferred_padding,
)
from hf_gr.generation.configuration import BY_HEAD_ALONE

from .heads import hidden_size_of
from .layouts import base_model, check_cache, choose_layout
from .placeholders import can_take_back


@dataclass(frozen=True)
class Prompt:
    """The prompt of a call as its arguments give it.

    Attributes:
        inputs: `[B, P]` tokens, `[B, P, H]` embeddings, or an encoder's input; None if the model makes up its own.
        mask: the attention mask, given or to be inferred from padding; None for no padding.
        length: tokens in front of the generated ones, by which `max_length` counts.
        num_rows: B, the number of prompts.
    """

    inputs: Tensor | None
    mask: Tensor | None
    length: int
    num_rows: int


def describe_prompt(model: Any, inputs: Any, config: Any, model_kwargs: dict[str, Any]) -> Prompt:
    """Find the prompt among the arguments of a call, by the rules by which transformers will prepare it.

    Raises:
        ValueError: tokens or a mask of another rank, type or number of rows.
    """
    input_ids = inputs if inputs is not None else model_kwargs.get("input_ids")
    embeds = model_kwargs.get("inputs_embeds")
    prompt = embeds if embeds is not None else input_ids
    is_text = embeds is None and model.main_input_name == "input_ids"
    if prompt is not None and (not isinstance(prompt, Tensor) or (is_text and prompt.ndim != 2)):
        shape = list(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(f"the prompt is {shape}, expected a tensor [batch, length]: pad, stack and unsqueeze first")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (
        not isinstance(mask, Tensor) or mask.ndim != 2 or (prompt is not None and len(mask) != len(prompt))
    ):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask is {shape}, expected a tensor [batch, length] with a row for every prompt")
    if mask is not None:
        check_mask(mask)
    encoded, begun = model_kwargs.get("encoder_outputs"), model_kwargs.get("decoder_input_ids")
    batched = (prompt, None if encoded is None else encoded[0], mask, begun)
    num_rows = next((one.shape[0] for one in batched if one is not None), 1)
    if model.config.is_encoder_decoder:
        return Prompt(prompt, None, _decoder_prompt_length(model, config, begun), num_rows)
    if mask is None and is_text and prompt is not None and config.pad_token_id is not None:
        padding = inferred_padding(config)
        mask = None if padding is None else prompt != padding
    return Prompt(prompt, mask, 0 if prompt is None else prompt.shape[1], num_rows)


def check_call(
    model: Any,
    catalogue: Snapshot,
    config: Any,
    prompt: Prompt,
    *,
    max_new_tokens: int | None,
    max_length: int | None,
    stopping_criteria: Iterable[Any] | None,
    past_key_values: Any,
) -> None:
    """Refuse what cannot lead to the catalogue's sequences.

    Args:
        model: the model.
        catalogue: the catalogue of any row; what is checked is the same for all.
        config: the prepared generation config.
        prompt: the described prompt.
        max_new_tokens: as the call itself gives it.
        max_length: as the call itself gives it; `max_new_tokens` goes before.
        stopping_criteria: the user's own.
        past_key_values: the user's own.

    Raises:
        ValueError: names the argument, its value, what is expected, and the fix.
    """
    check_config(config)
    check_vocabulary(model, catalogue, name="constraint_index")
    _check_tokens(model, prompt)
    rooms = {f"max_new_tokens={max_new_tokens}": max_new_tokens}
    if max_new_tokens is None and max_length is not None:
        rooms[f"max_length={max_length}"] = max_length - prompt.length
    for criterion in stopping_criteria or ():
        if isinstance(criterion, MaxLengthCriteria):
            name = f"stopping criterion of max_length={criterion.max_length}"
            rooms[name] = criterion.max_length - prompt.length
    check_room(catalogue, rooms)
    _check_prompt(prompt)
    if prompt.inputs is not None and past_key_values is not None:
        check_cache(past_key_values, prompt.inputs.shape[0])


def check_vocabulary(model: Any, catalogue: Snapshot, *, name: str) -> None:
    """Refuse a catalogue with tokens that the model cannot write.

    Args:
        model: the model.
        catalogue: the catalogue.
        name: of the argument that it was given as.
    """
    head = model.get_output_embeddings()
    vocabulary = model.config.get_text_config(decoder=True).vocab_size if head is None else head.weight.shape[0]
    check_tokens_of_catalogue(catalogue, vocabulary, name=name)


def check_drafting(model: Any, assistant: Any, config: Any, prompt: Prompt, given: Mapping[str, Any]) -> None:
    """Refuse drafts that cannot be made.

    Args:
        model: the model.
        assistant: the draft model, or None.
        config: the prepared generation config.
        prompt: the described prompt.
        given: our fields as the call itself gives them.

    Raises:
        ValueError: names the argument, its value, what is expected, and the fix.
    """
    drafting, verification = config.drafting, config.verification
    if drafting == "head" and assistant is not None:
        raise ValueError(
            "drafting='head' with assistant_model, expected one of them, since both draft: leave one away, or pass "
            "drafting='assistant' and verification='strict' for the draft model"
        )
    if verification in BY_HEAD_ALONE and drafting != "head":
        raise ValueError(
            f"verification={verification!r} with drafting={drafting!r}, expected drafting='head': only a draft head "
            "decodes without the model"
        )
    if verification == "relaxed" and config.num_return_sequences > config.num_beams:
        raise ValueError(
            f"num_return_sequences={config.num_return_sequences}, expected at most num_beams={config.num_beams}: "
            "relaxed verification samples beams"
        )
    if assistant is None:
        if drafting == "assistant":
            raise ValueError("drafting='assistant' without assistant_model, expected both: pass assistant_model=")
        if given.get("num_draft_beams") is not None and verification in BY_HEAD_ALONE:
            raise ValueError(
                f"num_draft_beams={given['num_draft_beams']} with verification={verification!r}, expected None: the "
                "head's own num_beams are the answer; with verification='strict' it drafts"
            )
        if given.get("num_draft_beams") is not None and drafting != "head":
            raise ValueError(
                f"num_draft_beams={given['num_draft_beams']} without a draft model, expected both: "
                "pass assistant_model="
            )
        if given.get("draft_token_budget") is not None and drafting is None:
            raise ValueError(
                f"draft_token_budget={given['draft_token_budget']} without drafting, expected None: "
                "pass drafting='trie' or 'auto'"
            )
        return
    if given.get("drafting") == "trie":
        raise ValueError("drafting='trie' with assistant_model, expected one of them: drafting='assistant' uses both")
    if not hasattr(assistant, "get_output_embeddings"):
        raise ValueError(f"assistant_model is a {type(assistant).__name__}, expected a language model of transformers")
    if assistant.config.is_encoder_decoder != model.config.is_encoder_decoder:
        kinds = ["encoder-decoder" if one.config.is_encoder_decoder else "decoder" for one in (assistant, model)]
        raise ValueError(
            f"assistant_model is a {type(assistant).__name__}, {kinds[0]}, expected a model like the other, "
            f"{kinds[1]}: both must read the same prompt"
        )
    ours, theirs = (one.config.get_text_config(decoder=True).vocab_size for one in (model, assistant))
    if ours != theirs:
        raise ValueError(
            f"assistant_model has a vocabulary of {theirs} tokens, expected the model's, {ours}: "
            "both must be trained with one tokenizer, and resized alike"
        )
    if assistant.training:
        raise ValueError("assistant_model is in training mode, expected evaluation: assistant_model.eval()")
    if assistant.device != model.device:
        raise ValueError(
            f"assistant_model is on {assistant.device}, expected {model.device}: assistant_model.to(model.device)"
        )
    if prompt.inputs is None or prompt.inputs.ndim != 2 or prompt.inputs.is_floating_point():
        raise ValueError("the prompt is not given as input_ids, which assistant_model reads: pass input_ids=")
    if choose_layout(base_model(assistant)) is None:
        raise ValueError(
            f"assistant_model is a {type(assistant).__name__}, which takes neither the tree nor the batch layout, "
            "expected another: leave it away"
        )
    if config.guidance_scale not in (None, 1.0):
        raise ValueError(
            f"guidance_scale={config.guidance_scale} with assistant_model, expected None: its processor keeps state "
            "of the model's rows, and the draft model has others"
        )
    _check_draft_width(config)


def check_draft_head(
    model: Any, catalogue: Snapshot, config: Any, prompt: Prompt, model_kwargs: Mapping[str, Any]
) -> None:
    """Refuse a draft head that does not fit the model, the catalogue or the prompt.

    Args:
        model: the model.
        catalogue: the catalogue of any row.
        config: the prepared config, with our fields.
        prompt: the described prompt.
        model_kwargs: what else the call was given.

    Raises:
        ValueError: names the argument, its value, what is expected, and the fix.
    """
    head = getattr(model, "draft_head", None)
    if head is None:
        raise ValueError(
            "drafting='head' and the model has no draft head, expected one: load a checkpoint that has it, or make "
            "one by model.add_draft_head(...) and train it with hf_gr.training.DraftHeadTrainer"
        )
    text_config = model.config.get_text_config(decoder=True)
    sizes = head.config.hidden_size, hidden_size_of(model)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft head has hidden_size={sizes[0]}, expected the model's, {sizes[1]}: is it another model's head?"
        )
    check_codes(head, catalogue)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    unknown = [token for token in head.config.placeholder_token_ids if token >= vocabulary]
    if unknown:
        raise ValueError(
            f"the draft head has placeholder tokens {unknown}, expected less than {vocabulary}, which the model has "
            "embeddings for: model.add_draft_head(head) adds them"
        )
    check_room_for_placeholders(head, text_config, prompt.length)
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() and not can_take_back(cache):
        raise ValueError(
            "past_key_values has layers that drop keys (sliding windows), expected plain ones with drafting='head', "
            "whose placeholders are taken back: leave it away"
        )
    if config.guidance_scale not in (None, 1.0):
        raise ValueError(
            f"guidance_scale={config.guidance_scale} with drafting='head', expected None: its processor calls the "
            "model behind every path, and the head has paths of its own"
        )
    verification = config.verification
    if verification not in BY_HEAD_ALONE:
        _check_draft_width(config)
    else:
        asked = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
        asked += ["stop_strings"] if config.stop_strings is not None else []
        asked += ["streamer"] if model_kwargs.get("streamer") is not None else []
        if asked:
            raise ValueError(
                f"{', '.join(asked)} with drafting='head', expected none: the model is called once, for the prompt"
            )
    tries = [part.segment.trie for part in catalogue.parts]
    is_ragged = any(trie.num_sequences > trie.fanouts[-1].num_children for trie in tries)
    if verification in ("last_level", "none") and (is_ragged or len({trie.max_length for trie in tries}) > 1):
        raise ValueError(
            f"verification={verification!r} with sequences of several lengths, expected one length: "
            "verification='catalogue' takes any"
        )


def check_generator(generator: Any, device: Any) -> None:
    """Refuse what is no generator of random numbers on the model's device."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator) or generator.device.type != device.type:
        found = generator.device if isinstance(generator, torch.Generator) else type(generator).__name__
        raise ValueError(f"generator is {found}, expected a torch.Generator: torch.Generator({str(device.type)!r})")


def _check_draft_width(config: Any) -> None:
    """Refuse searches of a draft model or head that could never be accepted, or go nowhere."""
    num_draft_beams, num_steps = config.num_draft_beams, config.num_assistant_tokens
    name = "num_beams" if config.num_beams >= config.num_return_sequences else "num_return_sequences"
    if num_draft_beams is not None and num_draft_beams < getattr(config, name):
        raise ValueError(
            f"num_draft_beams={num_draft_beams}, expected at least {name}={getattr(config, name)}: "
            "a step is accepted only if all beams are among those of the draft"
        )
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_assistant_tokens={num_steps!r}, expected 1 or more levels a draft")


def _check_tokens(model: Any, prompt: Prompt) -> None:
    """Refuse empty prompts, and tokens that the model has no embedding for."""
    if prompt.inputs is None:
        return
    check_some_tokens(len(prompt.inputs), prompt.length)
    if prompt.inputs.ndim != 2 or prompt.inputs.is_floating_point():
        return
    size = getattr(getattr(model.get_input_embeddings(), "weight", None), "shape", (None,))[0]
    least, most = (int(bound) for bound in prompt.inputs.aminmax())
    check_tokens_of_prompt(least, most, size)


def _check_prompt(prompt: Prompt) -> None:
    """Refuse right-padded prompts, and prompts that are nothing but padding."""
    if prompt.mask is not None and prompt.mask.shape[1] and not bool(prompt.mask[:, -1].all()):
        check_padding(to_host(prompt.mask))


def _decoder_prompt_length(model: Any, config: Any, decoder_input_ids: Tensor | None) -> int:
    """Tokens that a decoder starts with; transformers puts the start token in front where it is missing."""
    if decoder_input_ids is None:
        return 1
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    starts = start is None or bool((decoder_input_ids[:, 0] == start).any())
    return decoder_input_ids.shape[1] + (not starts)
