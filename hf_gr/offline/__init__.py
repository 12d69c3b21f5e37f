# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Recommendations for a whole table of users, and how good they are. Needs pyarrow: `pip install "hf-gr[tables]"`."""

from __future__ import annotations

from .evaluate import evaluate
from .run import recommend

__all__ = ["evaluate", "recommend"]
