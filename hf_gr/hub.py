# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders from and to the Hub. Knows file names, not what is in them; `huggingface_hub` does the work."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


def resolve_folder(
    repo_or_dir: str | Path,
    files: Sequence[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
) -> Path:
    """The local folder that holds `files`: `repo_or_dir` itself if it is a folder, else a snapshot of that repository.

    Raises:
        ValueError: `repo_or_dir` is neither a folder nor a possible repository id.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    if Path(repo_or_dir).is_dir():
        return Path(repo_or_dir, subfolder)
    paths: list[Path] = []
    for name in files:
        try:
            path = hf_hub_download(
                str(repo_or_dir),
                name,
                subfolder=subfolder or None,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        except HFValidationError as error:
            raise ValueError(
                f"{str(repo_or_dir)!r} is no folder here and no repository id, expected one of them: check the path"
            ) from error
        paths.append(Path(path))
    return paths[0].parent


def push_folder(
    save: Callable[[str], None],
    repo_id: str,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
    create_pr: bool,
) -> str:
    """Create the repository if need be, upload what `save` writes into a folder, and return the commit's address.

    A model card that the repository already has is kept.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        kept = ["README.md"] if api.file_exists(repo_id, "README.md", revision=revision) else None
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            ignore_patterns=kept,
        )
    return commit.commit_url
