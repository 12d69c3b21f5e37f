# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the demo keeps its trained recommender: complete folders only. Knows no model."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def default_folder() -> Path:
    """`$HF_GR_CACHE/demo` if that variable is set, else `~/.cache/hf_gr/demo`."""
    return Path(os.environ.get("HF_GR_CACHE") or Path.home() / ".cache" / "hf_gr") / "demo"


def cache_key(**what: Any) -> str:
    """A folder name that changes with everything that the trained model depends on."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `target` when the block ends without an error.

    An interrupted block leaves `target` as it was. Whoever reads `target` finds the old folder, the new one or none,
    and never half of one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as workspace:
        new, old = Path(workspace, "new"), Path(workspace, "old")
        new.mkdir()
        yield new
        if target.exists():
            target.rename(old)
        new.replace(target)
