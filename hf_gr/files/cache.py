# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder. Does not know what is in it."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`$HF_GR_CACHE/name` if that variable is set, else `~/.cache/hf_gr/name`; not created."""
    return Path(os.environ.get("HF_GR_CACHE") or Path.home() / ".cache" / "hf_gr") / name
