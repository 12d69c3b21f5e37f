# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""README and guides are run: the Python blocks of a page in their order, in one namespace, in an empty folder."""

import re
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
PAGES = [README, *GUIDES]
MOST_LINES = 120  # of README: what it does, for whom, one example, one table, and where the rest is

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run(blocks: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "guide"}
    for number, block in enumerate(blocks):
        capsys.readouterr()
        exec(compile(block, f"{name} block {number}", "exec"), namespace)
        printed = capsys.readouterr().out
        # A comment `# -> text` after a print says what it prints.
        expected = re.findall(r"^(?:print\(.*|\))  # -> (.*)$", block, flags=re.MULTILINE)
        assert [line for line in printed.splitlines() if line in expected] == expected, printed


@page_by_page
def test_python_blocks_run(
    page: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    run(blocks_of(page.read_text(encoding="utf-8")), page.name, capsys)


def test_the_readme_is_short_has_code_and_leads_to_every_guide() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert any("  # -> " in block for block in blocks_of(text))
    assert 'pip install -c constraints.txt -e ".[demo]" && hf-gr demo' in text
    assert 'pip install -c constraints.txt -e ".[dev]" && pytest' in text
    assert [page.name for page in GUIDES if f"](examples/guides/{page.name})" not in text] == []


@page_by_page
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"(?:\]\(|src=\")([^)#:\"]+)[)#\"]", page.read_text(encoding="utf-8"))
    assert targets
    on_github = [target for target in targets if target.startswith("../../actions/workflows/")]
    assert all((ROOT / ".github" / Path(*Path(one).parts[3:5])).is_file() for one in on_github)
    assert [target for target in targets if target not in on_github and not (page.parent / target).exists()] == []
