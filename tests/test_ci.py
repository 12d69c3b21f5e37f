# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `.ci/run` and `.ci/nightly` find by a mark or a guard, and would drop without a word if that went missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHAPED = ("beam", "decode", "drafters", "log_probs", "transition", "tree", "verifiers")


@pytest.mark.parametrize("name", [*SHAPED, *(f"flax_{name}" for name in SHAPED)])
def test_shapes_are_checked_where_an_engine_is_tested(name: str) -> None:
    file = ROOT / "tests" / f"test_{name}.py"
    if name.removeprefix("flax_") == name or file.is_file():  # some twins are tested with others
        assert re.search(r"^pytestmark.*mark\.shapes", file.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.py")), ids=lambda file: file.name)
def test_every_example_is_run_or_imported(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    others = (other.read_text(encoding="utf-8") for other in (ROOT / "examples").rglob("*.py") if other != file)
    is_imported = any(re.search(rf"^ *(from|import) (\w+\.)?{file.stem}\b", other, re.MULTILINE) for other in others)
    assert re.search(r"^if __name__ == ", text, re.MULTILINE) or is_imported
