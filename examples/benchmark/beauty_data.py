# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Amazon Beauty for the examples: semantic IDs of all items, and the histories of all users."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

# $HF_GR_DATA holds the data sets that the package does not bring, each in a folder of its own.
DEFAULT_DATA = Path(os.environ.get("HF_GR_DATA") or "data") / "beauty"
FILES = ("items.tsv", "users.jsonl")
HOW_TO_GET_IT = (
    "They are the 5-core Beauty reviews of Amazon (jmcauley.ucsd.edu/data/amazon), coded by the RQ-VAE of LC-Rec "
    "(github.com/RUCAIBox/LC-Rec): items.tsv has a header, then an item id and its four codes a line; users.jsonl has "
    '{"user_id": 0, "train": [items, oldest first], "valid": [item], "test": [item]} a line'
)


def is_there(data: Path, *, fast: bool) -> bool:
    """Whether the files are there; if not, a fast run says so and goes without, and any other ends the program."""
    missing = [name for name in FILES if not (data / name).is_file()]
    if missing:
        message = (
            f"no {' and '.join(missing)} in {data}: pass the folder of the Beauty data with --data, or set "
            f"HF_GR_DATA to the folder that holds beauty/. {HOW_TO_GET_IT}"
        )
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
