# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Brings our attention into transformers' models, whatever they were loaded with. Knows no prompts and no beams.

Forwards of tree nodes carry an argument, which transformers' models pass on to their attention function. Each
registered function is wrapped once, under its own name: calls with that argument go to `hf_gr.torch.tree_attention`,
all others to the function itself. So prompts use the attention that the user chose (FlashAttention included), and
other threads and models are not affected. "eager" is not registered but each model's own function: it uses masks.

Source: xGR, section 5.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_gr.generation.internals import attention_of, hands_on_arguments
from hf_gr.torch.tree_attention import TreeAttention, tree_attention

from .models import decoder_config

ARGUMENT = "hf_gr_tree"
# Features that our attention lacks: learned sinks, biases by position, pruned heads.
FOREIGN = frozenset(["s_aux", "position_bias", "head_mask"])

_LOCK = threading.Lock()


def may_attend_in_parts(model: Any) -> bool:
    """Whether a model's attention functions are registered ones that get arguments of a forward."""
    config = decoder_config(model)
    return hands_on_arguments(model) and attention_of(config) in AttentionInterface()


def attend_in_parts(model: Any) -> None:
    """Have the model's attention function answer forwards of tree nodes by ours; for what `may_attend_in_parts`."""
    name = attention_of(decoder_config(model))
    with _LOCK:
        if not hasattr(plain := AttentionInterface()[name], ARGUMENT):
            AttentionInterface.register(name, _wrapped(plain, takes_softcap=name != "sdpa"))
        # A user's own function may stand before the registered one.
        if not hasattr(plain := ALL_ATTENTION_FUNCTIONS[name], ARGUMENT):
            ALL_ATTENTION_FUNCTIONS[name] = _wrapped(plain, takes_softcap=name != "sdpa")


def _wrapped(plain: Callable[..., Any], *, takes_softcap: bool = True) -> Callable[..., Any]:
    """The function, unless it is given a tree; transformers' "sdpa" ignores a softcap, or refuses it."""

    @wraps(plain)
    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        tree: TreeAttention | None = kwargs.pop(ARGUMENT, None)
        if tree is None:
            return plain(module, query, key, value, attention_mask, *args, **kwargs)
        foreign = [name for name in FOREIGN if kwargs.get(name) is not None]
        if args or foreign or kwargs.get("dropout"):
            raise TypeError(
                f"attention over a tree is given {foreign or 'dropout'}, expected none of it: call model.eval(), or "
                "load the model with attn_implementation='eager'"
            )
        scale = kwargs.get("scaling")
        if torch.is_autocast_enabled(query.device.type):  # which casts the arguments of sdpa, too
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (states.to(dtype) for states in (query, key, value))
        answered = tree_attention(
            query,
            key,
            value,
            tree.to(query.device),
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap") if takes_softcap else None,
        )
        return answered, None

    setattr(attention, ARGUMENT, plain)
    return attention
