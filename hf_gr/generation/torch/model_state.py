# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model's forward depends on besides its arguments: where its weights are, its modes. Runs no forward.

A captured forward reads weights at the addresses that they had, and does what the modules did then. It may be replayed
as long as the state found here is the same one. New numbers at the same address are no new state: replays read them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .models import decoder_config

PLAIN = frozenset([bool, int, float, str])
# Of PEFT's layers, besides plain attributes: which adapters are active, or merged, and how strong each is.
ADAPTERS = ("_active_adapter", "merged_adapters", "scaling")
# Hooks that only act when they are asked to, or on the prompt.
HARMLESS = frozenset(["hf_gr", "transformers"])


def state_of(model: Any) -> tuple[Hashable, str | None]:
    """The state of a model, and why it cannot be captured (after "with"), or None; 0.1 ms a layer of Qwen3."""
    obstacle = "training mode" if model.training else None
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        obstacle = obstacle or "forward hooks of all modules"
    config = vars(decoder_config(model))  # such as its attention implementation
    facts: list[Hashable] = [torch.get_float32_matmul_precision()]
    facts += (item for item in config.items() if type(item[1]) in PLAIN)
    devices: set[torch.device] = set()
    for module in model.modules():
        own = vars(module)
        facts += (type(module), *(item for item in own.items() if type(item[1]) in PLAIN))
        if "_active_adapter" in own:
            facts.append(repr([own.get(name) for name in ADAPTERS]))
        obstacle = obstacle or _hook_of(own)
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                devices.add(tensor.device)
                facts.append((_address(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()))
    if len(devices) > 1:
        obstacle = obstacle or "a model on several devices"
    elif any(device.type != "meta" and torch.is_autocast_enabled(device.type) for device in devices):
        obstacle = obstacle or "autocast"
    return tuple(facts), obstacle


def _hook_of(own: Mapping[str, Any]) -> str | None:
    """A module's hook that a replay would not run."""
    if "_hf_hook" in own:  # of accelerate: moves weights or inputs
        return "hooks of accelerate"
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    foreign = [hook for hook in hooks if str(getattr(hook, "__module__", "")).split(".")[0] not in HARMLESS]
    return "forward hooks" if foreign else None


def _address(tensor: Tensor) -> Hashable:
    """Where a tensor's numbers are; of a subclass that wraps others (quantised, distributed), where theirs are."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return id(tensor), *(_address(getattr(tensor, name)) for name in names)
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return id(tensor)
