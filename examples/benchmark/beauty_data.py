# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Amazon Beauty for the examples: semantic IDs of all items, and the histories of all users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "beauty"
FILES = ("items.tsv", "users.jsonl")


def is_there(data: Path, *, fast: bool) -> bool:
    """Whether the files are there; if not, a fast run says so and goes without, and any other ends the program."""
    missing = [name for name in FILES if not (data / name).is_file()]
    if missing:
        message = f"no {' and '.join(missing)} in {data}: pass the folder of the Beauty data with --data"
        if not fast:
            raise SystemExit(message)
        print(f"skipped: {message}")
    return not missing


def read_items(data: Path) -> tuple[list[int], np.ndarray]:
    """Item ids, and their `[N, L]` codes."""
    table = np.loadtxt(data / "items.tsv", dtype=np.int64, delimiter="\t", skiprows=1)
    return table[:, 0].tolist(), table[:, 1:]


def read_users(data: Path) -> list[dict[str, Any]]:
    """What each user bought: lists of items by period."""
    with (data / "users.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
