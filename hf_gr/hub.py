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
        ValueError: `repo_or_dir` is neither a folder nor a repository id, or a repository that does not exist, is not
            to be had with this token, or lacks a file.
    """
    import huggingface_hub
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = str(repo_or_dir)
    if Path(repo_or_dir).is_dir():
        return Path(repo_or_dir, subfolder)
    if isinstance(repo_or_dir, Path) or Path(repo_or_dir).exists():
        what = "a file" if Path(repo_or_dir).exists() else "not there"
        raise ValueError(f"{name!r} is {what}, expected a folder that holds {' and '.join(files)}: check the path")
    paths: list[Path] = []
    for file in files:
        try:
            path = huggingface_hub.hf_hub_download(
                name,
                file,
                subfolder=subfolder or None,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        except HFValidationError as error:
            raise ValueError(
                f"{name!r} is no folder here and no repository id, expected one of them: check the path"
            ) from error
        except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            raise ValueError(
                f"{name!r} is no folder here, and {file} of such a repository is not in the cache, expected one of "
                "them: check the path, or download it with a connection and local_files_only=False"
            ) from error
        except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
            raise ValueError(
                f"{name!r} is no folder here, and the Hub gives no {file} for such a repository ({error}): "
                "check the name, revision= and subfolder=, and token= if it is private"
            ) from error
        paths.append(Path(path))
    return paths[0].parent


def push_folder(
    save: Callable[[Path, str], None],
    repo_id: str,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
    create_pr: bool,
) -> str:
    """Create the repository if need be, upload what `save(folder, repo_id)` writes, and return the commit's address.

    A model card that the repository already has is kept.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save(folder, repo_id)  # first of all: what cannot be saved makes no repository
        api = HfApi(token=token)
        full_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if full_id != repo_id:  # the Hub put the user's name before it
            (folder / "README.md").unlink()
            save(folder, full_id)
        if revision is not None and not create_pr:
            api.create_branch(full_id, branch=revision, exist_ok=True)
        kept = ["README.md"] if api.file_exists(full_id, "README.md", revision=revision) else None
        commit = api.upload_folder(
            repo_id=full_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            ignore_patterns=kept,
        )
    return commit.commit_url
