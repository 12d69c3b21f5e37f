# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The catalogue: what may be generated. NumPy only; knows no framework, no model and no beams."""

from .index import ConstraintIndex
from .semantic_ids import SemanticIds

__all__ = ["ConstraintIndex", "SemanticIds"]
