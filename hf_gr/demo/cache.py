# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the demo keeps its trained recommender. Knows no model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_gr.files.cache import cache_folder


def default_folder() -> Path:
    """`$HF_GR_CACHE/demo` if that variable is set, else `~/.cache/hf_gr/demo`."""
    return cache_folder("demo")


def cache_key(**what: Any) -> str:
    """A folder name that changes with everything that the trained model depends on."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
