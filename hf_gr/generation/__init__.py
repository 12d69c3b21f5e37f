# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The drop-in surface of transformers: configuration, mixin, auto class, logits processor.

The only package that knows transformers' internals; supports 5.17 to 5.23. Every name is resolved on first use,
so that models in Flax need no PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .auto import AutoModelForGenerativeRetrieval, enable
    from .configuration import GRGenerationConfig
    from .torch.logits_process import ConstraintLogitsProcessor
    from .torch.mixin import GRGenerationMixin

_HOMES = {
    "AutoModelForGenerativeRetrieval": "auto",
    "ConstraintLogitsProcessor": "torch.logits_process",
    "GRGenerationConfig": "configuration",
    "GRGenerationMixin": "torch.mixin",
    "enable": "auto",
}

__all__ = [
    "AutoModelForGenerativeRetrieval",
    "ConstraintLogitsProcessor",
    "GRGenerationConfig",
    "GRGenerationMixin",
    "enable",
]


def __getattr__(name: str) -> object:
    """Import a name's module on first access (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
