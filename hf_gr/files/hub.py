# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders from and to the Hub. Knows file names, not what is in them; `huggingface_hub` does the work."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        ConnectionError: the Hub is not working, or the connection broke, and the cache lacks a file.
    """
    name = str(repo_or_dir)
    if Path(repo_or_dir).is_dir():
        return Path(repo_or_dir, subfolder)
    if isinstance(repo_or_dir, Path) or Path(repo_or_dir).exists():
        what = "a file" if Path(repo_or_dir).exists() else "not there"
        raise ValueError(f"{name!r} is {what}, expected a folder that holds {' and '.join(files)}: check the path")
    import huggingface_hub

    paths: list[Path] = []
    for file in files:
        with _explained(name, file):
            path = huggingface_hub.hf_hub_download(
                name,
                file,
                subfolder=subfolder or None,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        paths.append(Path(path))
        revision = commit_of(path) or revision  # all of one commit, whatever is pushed meanwhile
    return paths[0].parent


def find_files(
    repo_or_dir: str | Path,
    files: Sequence[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
    force_download: bool = False,
) -> list[Path | None]:
    """Where each of `files` is, which need not be there; None for those that are not.

    Where the Hub is not to be asked, what is not in the cache is not there.

    Raises:
        ValueError: as `resolve_folder`, but for a file that is missing.
        ConnectionError: likewise. Whether a file is there is then unknown, unless the Hub told so before.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if Path(repo_or_dir).is_dir():
        paths = [Path(repo_or_dir, subfolder, file) for file in files]
        return [path if path.is_file() else None for path in paths]
    name = str(repo_or_dir)
    is_offline = local_files_only or huggingface_hub.is_offline_mode()
    found: list[Path | None] = []
    for file in files:
        path = None
        if force_download or not _is_known_to_be_missing(name, file, revision, cache_dir, subfolder):
            with _explained(name, file):
                try:
                    path = huggingface_hub.hf_hub_download(
                        name,
                        file,
                        subfolder=subfolder or None,
                        revision=revision,
                        token=token,
                        cache_dir=cache_dir,
                        local_files_only=local_files_only,
                        force_download=force_download,
                    )
                except LocalEntryNotFoundError:
                    if not is_offline:
                        raise  # the Hub may have it
                except EntryNotFoundError:
                    pass
        found.append(None if path is None else Path(path))
        revision = revision if path is None else commit_of(path) or revision
    return found


def find_commit(
    repo_id: str | Path,
    file: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    subfolder: str = "",
) -> str | None:
    """The commit that a file in the cache was downloaded from under this revision; None for one that is not there."""
    import huggingface_hub

    path = f"{subfolder}/{file}" if subfolder else file
    cached = huggingface_hub.try_to_load_from_cache(str(repo_id), path, cache_dir=cache_dir, revision=revision)
    return commit_of(cached) if isinstance(cached, str) else None


def commit_of(path: str | Path) -> str | None:
    """The commit of a file in the Hub's cache, which its path tells; None for other files."""
    found = re.search(r"/snapshots/([0-9a-f]{40})/", Path(path).as_posix())
    return None if found is None else found[1]


def _is_known_to_be_missing(
    name: str, file: str, revision: str | None, cache_dir: str | Path | None, subfolder: str
) -> bool:
    """Whether the Hub has told before that this commit has no such file; a branch may have it by now."""
    import huggingface_hub

    if revision is None or re.fullmatch("[0-9a-f]{40}", revision) is None:
        return False
    path = f"{subfolder}/{file}" if subfolder else file
    known = huggingface_hub.try_to_load_from_cache(name, path, cache_dir=cache_dir, revision=revision)
    return known is huggingface_hub._CACHED_NO_EXIST


@contextmanager
def _explained(name: str, file: str) -> Iterator[None]:
    """The Hub's errors as ours, which say what to do.

    Raises:
        ValueError: what is asked for does not exist, or not for this token.
        ConnectionError: the Hub is not working, or the connection broke.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise ValueError(
            f"{name!r} is no folder here and no repository id, expected one of them: check the path"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if getattr(error.__cause__, "response", None) is not None:  # the Hub was asked, and answered
            raise _failure(name, file, error.__cause__) from error
        raise ValueError(
            f"{name!r} is no folder here, and {file} of such a repository is not in the cache, expected one of "
            "them: check the path, or download it with a connection and local_files_only=False"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        raise ValueError(
            f"{name!r} is no folder here, and the Hub gives no {file} for such a repository ({_line(error)}): "
            "check the name, revision= and subfolder=, and token= if it is private"
        ) from error
    except HTTPError as error:  # httpx's or httpx2's, as the Hub's version has it
        raise _failure(name, file, error) from error


def _failure(name: str, file: str, error: BaseException | None) -> Exception:
    """The error for what the Hub answers instead of a file, or for a connection that broke."""
    if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        return ValueError(
            f"the Hub refuses {file} of {name!r} ({_line(error)}): check token=, which may be wrong, expired, or of "
            "somebody who may not read this repository"
        )
    return ConnectionError(
        f"{file} of {name!r} did not arrive ({_line(error)}), and nothing of it is kept: try again later, or with "
        "local_files_only=True if it was downloaded before"
    )


def _line(error: BaseException | None) -> str:
    """What the Hub's own library says, on one line, without its advice on HTTP."""
    text = re.sub(r"For more information check: \S+", "", "" if error is None else str(error) or repr(error))
    return " ".join(text.split())


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

    A model card that the repository already has is kept. All files are one commit: until it is made, the repository is
    as before.

    Raises:
        ConnectionError: a large file could not be uploaded.
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
        if revision is not None and not create_pr and not revision.startswith("refs/"):  # as of a pull request
            api.create_branch(full_id, branch=revision, exist_ok=True)
        kept = ["README.md"] if api.file_exists(full_id, "README.md", revision=revision) else None
        try:
            commit = api.upload_folder(
                repo_id=full_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                create_pr=create_pr,
                ignore_patterns=kept,
            )
        except RuntimeError as error:  # of a large file; its cause says more
            raise ConnectionError(
                f"{full_id} is as before, as a file did not get there ({_line(error)} {_line(error.__cause__)}): push "
                "again, which uploads only what is not there yet"
            ) from error
    return commit.commit_url
