# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: README, the guides and pages of `.github` become pages of the site where they are.

Owns which file is which page, and where links then lead. Knows nothing of the API pages, which are in `docs/api`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
GUIDES = "examples/guides/"
# Files of the repository, and their names on the site.
PAGES = {
    "README.md": "index.md",
    ".github/CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
}
LINK = re.compile(r'(?P<before>\]\(|src="|href=")(?P<target>[^)#"\s]+)(?P<rest>#[^)"\s]*)?(?P<after>\)|")')


def site_files() -> dict[str, str]:
    """The repository's files that are pages or images of the site, with their names there."""
    guides = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / GUIDES).rglob("*")) if path.is_file()]
    return PAGES | {path: f"guides/{path.removeprefix(GUIDES)}" for path in guides}


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's own pages and images."""
    for path, name in site_files().items():
        if path.endswith(".md"):
            text = relink((ROOT / path).read_text(encoding="utf-8"), path, config["repo_url"])
            files.append(File.generated(config, name, content=text))
        else:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def relink(text: str, path: str, repo_url: str | None) -> str:
    """A page's text with links as they are on the site: to its pages, else to the repository, else none."""
    names = site_files()

    def replace(found: re.Match[str]) -> str:
        target = found["target"]
        if ":" in target:
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        outside = file.removeprefix("../../")  # of the tree of files, on GitHub: actions
        if file in names:
            at = posixpath.relpath(names[file], posixpath.dirname(names[path]) or ".")
        elif not repo_url:
            at = "#"
        else:
            at = f"{repo_url.rstrip('/')}/{outside if outside != file else f'blob/main/{file}'}"
        return f"{found['before']}{at}{found['rest'] or ''}{found['after']}"

    return LINK.sub(replace, text)
