# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a release says of itself is true: its version, its changelog, extras, supported versions and API reference.

`.ci/release` builds and tries the files themselves.
"""

import pydoc
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_gr

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
COMMANDS = sorted(path.stem for path in (ROOT / "hf_gr" / "commands").glob("*.py"))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def jobs(workflow: str) -> dict[str, Any]:
    return yaml.safe_load(read(f".github/workflows/{workflow}.yml"))["jobs"]


def extras_named_in(text: str) -> set[str]:
    return {extra for names in re.findall(r"hf-gr\[([\w,{}-]+)\]", text) for extra in names.split(",")}


def test_a_version_has_a_part_of_the_changelog_and_can_be_cited() -> None:
    numbers, _, rest = hf_gr.__version__.partition(".dev")
    assert re.fullmatch(r"\d+\.\d+\.\d+", numbers)
    assert re.fullmatch(r"\d*", rest)
    changes = read(".github/CHANGELOG.md")
    released = re.search(rf"^## \[{re.escape(hf_gr.__version__)}\] - (\d{{4}}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert "## [Unreleased]" in changes
    assert released or ".dev" in hf_gr.__version__
    cited = yaml.safe_load(read(".github/CITATION.cff"))
    if released:
        assert (cited["version"], cited["date-released"]) == (hf_gr.__version__, released[1])
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["license"] == PROJECT["license"]


def test_every_extra_named_in_a_message_or_page_exists() -> None:
    # `require` makes its message of the extra that it is given.
    required = re.findall(
        r"require\(\"[^\"]+\", \"(\w+)\"", "".join(read(f"hf_gr/commands/{name}.py") for name in COMMANDS)
    )
    folders = [ROOT / name for name in ("hf_gr", "examples", "model_cards", ".github", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".yml", ".txt")]
    named = extras_named_in("".join(path.read_text(encoding="utf-8") for path in [*files, ROOT / "README.md"]))
    assert {"cli", "demo"} <= set(required) <= EXTRAS
    assert {"tables", "serve", "flax"} <= named
    assert named - EXTRAS - {"{extra}", "{DISTRIBUTION}"} == set()
    assert extras_named_in('pip install "hf-gr[tables,nothing]"') - EXTRAS == {"nothing"}


def test_supported_versions_are_those_that_the_workflow_tests() -> None:
    tested = {str(job["python"]) for job in jobs("ci")["ci"]["strategy"]["matrix"]["include"]}
    assert tested == set(re.findall(r"Python :: (3\.\d+)'", str(PROJECT["classifiers"])))
    assert PROJECT["requires-python"] == f">={min(tested, key=lambda name: int(name[2:]))}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in tested
    transformers = {job.get("transformers") for job in jobs("ci")["ci"]["strategy"]["matrix"]["include"]}
    oldest = next(one.partition(">=")[2] for one in PROJECT["dependencies"] if one.startswith("transformers"))
    assert transformers == {None, f"{oldest}.0", "newest"}
    assert {jobs("ci")[name]["runs-on"] for name in ("ci", "macos")} == {"ubuntu-latest", "macos-latest"}


def test_a_release_is_tried_before_it_is_published_without_a_stored_token() -> None:
    release = jobs("release")
    assert any(step.get("run") == "bash .ci/release dist" for step in release["build"]["steps"])
    assert release["publish"]["needs"] == "build"
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in read(".github/workflows/release.yml")


def test_badges_say_what_is_declared() -> None:
    badges = re.findall(r"img\.shields\.io/badge/([^)\"]+)", read("README.md"))
    pythons = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["classifiers"]))
    said = {"python": "_|_".join(pythons), "license": PROJECT["license"].replace("-", "--")}
    assert {badge.partition("-")[0]: badge.partition("-")[2].rpartition("-")[0] for badge in badges} == said


def test_the_api_reference_has_every_public_name() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (GITHUB / "mkdocs" / "docs" / "api").glob("*.md"))
    assert [name for name in hf_gr.__all__ if f"::: hf_gr.{name}\n" not in pages] == []


@pytest.mark.parametrize("missing", ["pyarrow", "torch"])
def test_help_names_only_what_can_be_imported(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"recommend", "evaluate", "Engine", "ConstraintIndex", "__version__"} <= set(dir(hf_gr))
    assert "class ConstraintIndex" in pydoc.render_doc(hf_gr, renderer=pydoc.plaintext)
    monkeypatch.setitem(sys.modules, missing, None)
    # Models in Flax answer without PyTorch; tables need pyarrow.
    assert ({"recommend", "evaluate"} <= set(dir(hf_gr))) == (missing == "torch")
    assert ("Engine" in dir(hf_gr)) == (missing == "pyarrow")
    assert "ConstraintIndex" in dir(hf_gr)
