# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Facts about a model of transformers in PyTorch, each read in one place. Knows no decoding.

Facts in its configs, for both backends, are in `hf_gr.generation.models`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import extract_model_from_parallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_gr.generation.internals import attention_of

# By model what its config was, and the one of its decoder.
_DECODERS: WeakKeyDictionary[Any, tuple[dict[str, Any], Any]] = WeakKeyDictionary()
# tests/test_parity.py compares each of them with transformers' own results.
TREE_FAMILIES = frozenset(
    "bart cohere2 deepseek_v3 falcon gemma2 gemma3_text gpt2 gpt_neox gptj llama mistral olmo2 opt phi3 qwen2 qwen3 "
    "qwen3_moe smollm3 t5".split()
)
MASKED = ("eager", "sdpa")  # attention that takes masks of four dimensions


def base_model(model: Any) -> Any:
    """The model of transformers inside wrappers for training (distributed, compiled) and adapters (PEFT)."""
    if isinstance(model, PreTrainedModel):
        return model
    inner: Any = extract_model_from_parallel(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def decoder_config(model: Any) -> Any:
    """The text config of a decoder; transformers copies that of an encoder-decoder at every look."""
    config = model.config
    if not config.is_encoder_decoder:
        return config.get_text_config(decoder=True)
    given, known = _DECODERS.get(model, ({}, None))
    if given != vars(config):
        known = config.get_text_config(decoder=True)
        _DECODERS[model] = {**vars(config)}, known
    return known


def takes_argument(model: Any, name: str) -> bool:
    """Whether a model's forward has an argument of this name."""
    return name in _arguments_of(type(model).forward)


@cache
def _arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def hidden_size_of(model: Any) -> int:
    """The width of the output embeddings' input, which for some models (OPT-350m) is not the config's hidden size."""
    outputs = model.get_output_embeddings()
    if outputs is None:
        raise ValueError(f"model is a {type(model).__name__}, expected one with a language-modelling head")
    return getattr(outputs, "in_features", decoder_config(model).hidden_size)


def output_size_of(model: Any) -> int:
    """V, the tokens that a model can write, which may be more than its config's vocabulary."""
    outputs = model.get_output_embeddings()
    weight = getattr(outputs, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():  # else packed, or none
        return weight.shape[0]
    return getattr(outputs, "out_features", decoder_config(model).vocab_size)


def embeddings_of(model: Any) -> int | None:
    """The tokens that a model can read; None if its embeddings are not a plain matrix."""
    return getattr(getattr(model.get_input_embeddings(), "weight", None), "shape", (None,))[0]


def layer_types(config: Any) -> list[str]:
    """The kind of every layer, by the rules by which transformers builds a cache."""
    if getattr(config, "layer_types", None) is not None:
        return list(config.layer_types)
    kind = "full_attention"
    if getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    return [kind] * config.num_hidden_layers


def mask_dtype(model: Any) -> torch.dtype | None:
    """The dtype of an additive mask, None if the attention takes a boolean one (eager adds whatever it gets)."""
    return None if attention_of(decoder_config(model)) == "sdpa" else model.dtype


def takes_masks(model: Any) -> bool:
    """Whether the attention takes masks of our own, `[B, 1, N, keys]`."""
    return attention_of(decoder_config(model)) in MASKED


def is_patched(model: Any) -> bool:
    """Whether a forward is not its class's own: compiled, or replaced by a user. Accelerate's hooks do not count."""
    for each in (model, base_model(model)):
        is_own = "forward" in vars(each) and not hasattr(each, "_hf_hook")
        if is_own or getattr(each, "_compiled_call_impl", None) is not None:
            return True
    return False


def is_sharded(model: Any) -> bool:
    """Whether weights are sharded: by FSDP, of either version, or as distributed tensors."""
    if not isinstance(model, torch.nn.Module):
        return False
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    is_wrapped = bool(names & {"FullyShardedDataParallel", "FSDPModule"})
    return is_wrapped or any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Within this context the model is in evaluation mode; afterwards every module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
