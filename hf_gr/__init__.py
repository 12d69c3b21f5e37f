# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""hf_gr: Hugging Face models as fast and correct generative recommenders.

Importing this package loads neither torch nor transformers nor jax; every public name is resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .catalogue import ConstraintIndex, SemanticIds
    from .classification.classify import classify
    from .files.draft_head_config import DraftHeadConfig
    from .generation.auto import AutoModelForGenerativeRetrieval, enable
    from .generation.configuration import GRGenerationConfig
    from .generation.torch.logits_process import ConstraintLogitsProcessor
    from .generation.torch.mixin import GRGenerationMixin
    from .offline.evaluation import evaluate
    from .offline.run import recommend
    from .serving.engine import Engine
    from .torch.draft_head import DraftHead

__version__ = "0.1.0.dev0"

_HOMES = {
    "AutoModelForGenerativeRetrieval": "generation.auto",
    "ConstraintIndex": "catalogue",
    "ConstraintLogitsProcessor": "generation.torch.logits_process",
    "DraftHead": "torch.draft_head",
    "DraftHeadConfig": "files.draft_head_config",
    "Engine": "serving.engine",
    "GRGenerationConfig": "generation.configuration",
    "GRGenerationMixin": "generation.torch.mixin",
    "SemanticIds": "catalogue",
    "classify": "classification.classify",
    "enable": "generation.auto",
    "evaluate": "offline.evaluation",
    "recommend": "offline.run",
}

__all__ = [
    "AutoModelForGenerativeRetrieval",
    "ConstraintIndex",
    "ConstraintLogitsProcessor",
    "DraftHead",
    "DraftHeadConfig",
    "Engine",
    "GRGenerationConfig",
    "GRGenerationMixin",
    "SemanticIds",
    "classify",
    "enable",
    "evaluate",
    "recommend",
]


def __getattr__(name: str) -> object:
    """Import a public name's module on first access (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    try:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        fix = "; in Flax it is hf_gr.flax.draft_head.DraftHead" if name == "DraftHead" else ""
        raise ImportError(f"hf_gr.{name} needs PyTorch: pip install torch{fix}", name="torch") from error


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
