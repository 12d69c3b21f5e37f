# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Data that the tests read where it is at hand: in the folder that the environment variable HF_GR_DATA names."""

import os
from pathlib import Path

import pytest

BEAUTY = Path(os.environ.get("HF_GR_DATA") or "data").resolve() / "beauty"
needs_beauty = pytest.mark.skipif(
    not all((BEAUTY / name).is_file() for name in ("items.tsv", "users.jsonl")),
    reason=f"no items.tsv and users.jsonl in {BEAUTY}: set HF_GR_DATA to the folder that holds beauty/ "
    "(examples/benchmark/beauty_data.py says how to get the files)",
)
