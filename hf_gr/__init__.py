# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""hf_gr: Hugging Face models as fast and correct generative recommenders.

Importing this package loads neither torch nor transformers nor jax; every public name is resolved on first use.

- What may be generated: `ConstraintIndex`, `SemanticIds`.
- Models: `AutoModelForGenerativeRetrieval`, `enable`, `GRGenerationMixin`, `GRGenerationConfig`; for any other loop of
  transformers `ConstraintLogitsProcessor`.
- Drafts: `DraftHead`, `DraftHeadConfig`; trainers in `hf_gr.training`.
- Tables of purchases: `train`; of users: `recommend`, `evaluate` (extra `tables`).
- Many users at once: `Engine`; servers in `hf_gr.serving` (extra `serve`).
- Texts to labels: `classify`.

`dir` and `help` show the names whose packages are installed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .catalogue import ConstraintIndex, SemanticIds
    from .classification.classify import classify
    from .files.draft_head_config import DraftHeadConfig
    from .generation.auto import AutoModelForGenerativeRetrieval, enable
    from .generation.configuration import GRGenerationConfig
    from .generation.torch.logits_process import ConstraintLogitsProcessor
    from .generation.torch.mixin import GRGenerationMixin
    from .jobs.evaluate import evaluate
    from .jobs.recommend import recommend
    from .purchases.train import train
    from .serving.engine import Engine
    from .torch.draft_head import DraftHead

__version__ = "0.1.0"

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
    "evaluate": "jobs.evaluate",
    "recommend": "jobs.recommend",
    "train": "purchases.train",
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
    "train",
]

# What a name needs in addition to NumPy and transformers: one may use Flax without PyTorch, or PyTorch without extras.
_NEEDS = {
    "ConstraintLogitsProcessor": ("torch",),
    "DraftHead": ("torch",),
    "Engine": ("torch",),
    "GRGenerationMixin": ("torch",),
    "evaluate": ("pyarrow",),
    "recommend": ("pyarrow",),
    "train": ("torch", "pyarrow"),
}

# What stands for a name of PyTorch's side in Flax.
_IN_FLAX = {
    "ConstraintLogitsProcessor": "hf_gr.generation.flax.logits_process.FlaxConstraintLogitsProcessor",
    "DraftHead": "hf_gr.flax.draft_head.DraftHead",
    "GRGenerationMixin": "hf_gr.generation.flax.mixin.FlaxGenerationMixin",
}


def __getattr__(name: str) -> object:
    """Import a public name's module on first access (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    try:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        fix = f"; in Flax it is {_IN_FLAX[name]}" if name in _IN_FLAX else ""
        raise ImportError(f"hf_gr.{name} needs PyTorch: pip install torch{fix}", name="torch") from error


def __dir__() -> list[str]:
    """The names that can be imported here: `help` imports all of them, and must not fail for an extra."""
    return sorted(["__version__", *(name for name in __all__ if all(map(find_spec, _NEEDS.get(name, ()))))])
