# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Recommendations for a whole table of users, and how good they are. Needs pyarrow: `pip install "hf-gr[tables]"`.

Every name is resolved on first use: the commands read `settings`, where all options are stated, without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .evaluation import evaluate
    from .run import recommend

_HOMES = {"evaluate": "evaluation", "recommend": "run"}

__all__ = ["evaluate", "recommend"]


def __getattr__(name: str) -> object:
    """Import a name's module when the name is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
