# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The README is run: its Python blocks in their order, in one namespace, in an empty folder, with a Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    namespace: dict[str, Any] = {"__name__": "readme"}
    assert len(BLOCKS) >= 4
    for number, block in enumerate(BLOCKS):
        printed_before = capsys.readouterr().out
        exec(compile(block, f"README.md block {number}", "exec"), namespace)
        printed = capsys.readouterr().out
        assert printed_before == "" or number
        # A comment `# -> text` after a print says what it prints.
        expected = re.findall(r"^print\(.*# -> (.*)$", block, flags=re.MULTILINE)
        assert [line for line in printed.splitlines() if line in expected] == expected


def test_the_two_commands_are_there() -> None:
    assert 'pip install -c constraints.txt -e ".[demo]" && hf-gr demo' in README
    assert 'pip install -c constraints.txt -e ".[dev]" && pytest' in README


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
