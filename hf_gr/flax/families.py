# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The architectures that Flax has: which config is read by whom. Knows no forward and no files."""

from __future__ import annotations

from typing import Any, TypeAlias

from .bart import BartSpec
from .gpt2 import GPT2Spec
from .spec import DecoderSpec
from .t5 import T5Spec

Spec: TypeAlias = DecoderSpec | T5Spec | BartSpec

# From a config's `model_type` to the class of transformers that loads such checkpoints, and to ours.
FAMILIES: dict[str, tuple[str, type[Spec]]] = {
    "bart": ("BartForConditionalGeneration", BartSpec),
    "gemma": ("GemmaForCausalLM", DecoderSpec),
    "gemma2": ("Gemma2ForCausalLM", DecoderSpec),
    "gemma3_text": ("Gemma3ForCausalLM", DecoderSpec),
    "gpt2": ("GPT2LMHeadModel", GPT2Spec),
    "llama": ("LlamaForCausalLM", DecoderSpec),
    "mistral": ("MistralForCausalLM", DecoderSpec),
    "olmo2": ("Olmo2ForCausalLM", DecoderSpec),
    "phi3": ("Phi3ForCausalLM", DecoderSpec),
    "qwen2": ("Qwen2ForCausalLM", DecoderSpec),
    "qwen3": ("Qwen3ForCausalLM", DecoderSpec),
    "qwen3_moe": ("Qwen3MoeForCausalLM", DecoderSpec),
    "t5": ("T5ForConditionalGeneration", T5Spec),
}


def to_spec(config: Any) -> Spec:
    """The static facts of the model that a transformers config describes.

    Raises:
        NotImplementedError: an architecture or a field that the Flax side does not have; it names the field.
    """
    check_family(getattr(config, "model_type", None))
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(
            "config.quantization_config is there, expected none: quantised checkpoints are not implemented in Flax; "
            "use backend='torch'"
        )
    if not getattr(config, "is_causal", True):  # makes any decoder of transformers see later tokens
        raise NotImplementedError(
            f"config.is_causal={config.is_causal!r}, expected True: only causal decoders are implemented in Flax; "
            "use backend='torch'"
        )
    return FAMILIES[config.model_type][1].from_config(config)


def check_family(model_type: str | None) -> None:
    """Refuse architectures that Flax does not have.

    Raises:
        NotImplementedError: such a one.
    """
    if model_type not in FAMILIES:
        raise NotImplementedError(
            f"config.model_type={model_type!r}, expected one of {', '.join(FAMILIES)}: other architectures are not "
            "implemented in Flax; use backend='torch'"
        )
