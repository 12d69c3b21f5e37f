# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The drop-in surface of transformers: configuration, mixin, auto class, logits processor, and `classify`.

The only package that knows transformers' internals; supported are 5.17 to 5.23.
"""

from .auto import AutoModelForGenerativeRetrieval, enable
from .classification import classify
from .configuration import GRGenerationConfig
from .logits_process import ConstraintLogitsProcessor
from .mixin import GRGenerationMixin

__all__ = [
    "AutoModelForGenerativeRetrieval",
    "ConstraintLogitsProcessor",
    "GRGenerationConfig",
    "GRGenerationMixin",
    "classify",
    "enable",
]
