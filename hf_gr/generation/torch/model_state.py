# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model's forward depends on besides its arguments: where its weights are, its modes. Runs no forward.

A captured forward reads weights at the addresses that they had, and does what the modules did then. It may be replayed
as long as the state found here is the same one. New numbers at the same address are no new state: replays read them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MOST_STATES = 16  # of one model that are told apart, such as adapters that it switches between
PLAIN = frozenset([bool, int, float, str])
READ = frozenset([FunctionType, BuiltinFunctionType, MethodType, Tensor, list, tuple])  # see `_of_attribute`
# Of PEFT's layers, besides plain attributes: which adapters are active, or merged, and how strong each is.
ADAPTERS = ("_active_adapter", "merged_adapters", "scaling")
AUTOCASTS = ("cpu", "cuda")
# Hooks that only act when they are asked to, or on the prompt.
HARMLESS = frozenset(["hf_gr", "transformers"])

_TOKENS: WeakKeyDictionary[Any, OrderedDict[Hashable, object]] = WeakKeyDictionary()
_LOCK = threading.Lock()


@dataclass(frozen=True)
class ModelState:
    """The state of a model at one moment.

    Attributes:
        token: one object for equal states, another one for other states.
        modules: the model's, which a captured forward cannot outlive.
        obstacle: why it cannot be captured, in words that follow "with"; None if it can.
    """

    token: object
    modules: tuple[nn.Module, ...]
    obstacle: str | None


def state_of(model: nn.Module) -> ModelState:
    """The state of a model, by a walk over its modules: some 0.1 ms a layer of Qwen3."""
    modules: list[nn.Module] = []
    facts: list[Hashable] = [torch.get_float32_matmul_precision(), *_of_configs(model)]
    devices: set[torch.device] = set()
    kinds: set[type[nn.Module]] = set()
    obstacle = "training mode" if model.training else None
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        obstacle = obstacle or "forward hooks of all modules"
    stack, seen = [model], set()
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modules.append(module)
        own = module.__dict__
        kinds.add(type(module))
        facts.append(id(module))
        facts += [item for item in own.items() if type(item[1]) in PLAIN]
        facts += [(name, _of_attribute(value)) for name, value in own.items() if type(value) in READ]
        if "_active_adapter" in own:
            facts.append(repr([own.get(name) for name in ADAPTERS]))
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "_hf_hook" in own:
            obstacle = obstacle or _hook_of(own)
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                devices.add(tensor.device)
                facts.append((_address(tensor), tensor.dtype, tensor.shape, tensor.stride()))
        stack += (child for child in own["_modules"].values() if child is not None)
    if len(devices) > 1:
        obstacle = obstacle or "a model on several devices"
    elif any(device.type in AUTOCASTS and torch.is_autocast_enabled(device.type) for device in devices):
        obstacle = obstacle or "autocast"
    facts.append(
        frozenset(_reference(getattr(kind, "forward", None)) for kind in kinds)
    )  # of classes that may be patched
    return ModelState(_token(model, (*facts, *devices)), tuple(modules), obstacle)


def _of_attribute(value: Any) -> Hashable:
    """What is known of an attribute of one of the types in `READ`; nothing that would keep it."""
    if isinstance(value, Tensor):
        return _address(value), value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(value) if all(type(one) in PLAIN for one in value) else None
    return _reference(getattr(value, "__func__", value)), id(getattr(value, "__self__", None))


def _reference(function: Any) -> Hashable:
    """A function without keeping it: its identity would be another one's as soon as it is gone."""
    try:
        return ref(function)
    except TypeError:  # of a type that allows none
        return id(function)


def _token(model: nn.Module, facts: Hashable) -> object:
    with _LOCK:
        tokens = _TOKENS.setdefault(model, OrderedDict())
        if facts not in tokens and len(tokens) == MOST_STATES:
            tokens.popitem(last=False)
        token = tokens.setdefault(facts, object())
        tokens.move_to_end(facts)
        return token


def _of_configs(model: Any) -> list[Hashable]:
    """The plain values of a model's configs, such as its attention implementation."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    configs = {id(one): one for one in (config, config.get_text_config(decoder=True))}
    return [item for one in configs.values() for item in vars(one).items() if type(item[1]) in PLAIN]


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
