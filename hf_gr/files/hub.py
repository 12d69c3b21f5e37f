# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders from and to the Hub. Knows file names, not their contents; `huggingface_hub` does the work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

WHERE = ("revision", "token", "cache_dir", "local_files_only", "subfolder")  # arguments of `from_pretrained`


class NoModelError(OSError, ValueError):
    """No model is there, or not all of its files: another try fails, too."""


@contextmanager
def naming_model(repo_or_dir: Any, argument: str) -> Iterator[None]:
    """If loading a model fails because nothing has that name, or files are missing, say so; the cause tells more."""
    try:
        yield
    except OSError as error:
        if not isinstance(repo_or_dir, (str, Path)):
            raise
        if Path(repo_or_dir).exists():
            if error.errno is not None:  # of the disk
                raise
            raise NoModelError(
                f"{argument}={str(repo_or_dir)!r} lacks a part of a model ({one_line(error)}), expected config.json "
                "and weights, or an adapter whose base model is where adapter_config.json says: save it again"
            ) from error
        from huggingface_hub import is_offline_mode, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

        with suppress(HFValidationError):  # no repository id: it cannot be cached
            if isinstance(try_to_load_from_cache(str(repo_or_dir), "config.json"), str):
                raise  # it was reached, and something else is wrong with it
        is_known = is_offline_mode() or isinstance(error.__cause__, RepositoryNotFoundError)
        raise (NoModelError if is_known else OSError)(  # a Hub that is down may answer later
            f"{argument}={str(repo_or_dir)!r} is neither a folder here nor reachable on the Hub, expected one of "
            "them: check the spelling, the connection, and for a private repository the token"
        ) from error


@dataclass(frozen=True)
class Source:
    """The location of a folder of files, on this machine or on the Hub, by arguments of `from_pretrained`."""

    repo_or_dir: str | Path
    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    subfolder: str = ""

    def __post_init__(self) -> None:
        name = str(self.repo_or_dir)
        if len(name) > 4095 or any(len(part) > 255 for part in Path(name).parts):  # Linux looks for no such file
            raise ValueError(
                f"{name[:40]!r}... has {len(name)} characters, expected a folder or a repository id: check the path"
            )

    @classmethod
    def of(cls, repo_or_dir: str | Path, arguments: Mapping[str, Any]) -> Source:
        """The source that arguments of transformers' `from_pretrained` name; None stands for a default."""
        return cls(repo_or_dir, **{name: arguments[name] for name in WHERE if arguments.get(name) is not None})

    @property
    def is_folder(self) -> bool:
        """Whether it is a local folder."""
        return Path(self.repo_or_dir).is_dir()

    def at(self, revision: str | None) -> Source:
        """The same at another revision; itself for None."""
        return self if revision is None else replace(self, revision=revision)

    def elsewhere(self, repo_or_dir: str | Path) -> Source:
        """Another folder or repository, with the same token, cache and connection."""
        return replace(self, repo_or_dir=repo_or_dir, revision=None, subfolder="")

    def resolve_folder(self, files: Sequence[str]) -> Path:
        """The local folder that holds `files`: the folder itself, or a snapshot of the repository.

        Raises:
            ValueError: neither a folder nor a repository id, or a repository that does not exist, is not accessible
                with this token, or lacks a file.
            ConnectionError: the Hub is down, or the connection broke, and the cache lacks a file.
        """
        name, path = str(self.repo_or_dir), Path(self.repo_or_dir)
        if self.is_folder:
            return path / self.subfolder
        if isinstance(self.repo_or_dir, Path) or path.exists():
            what = "a file" if path.exists() else "not there"
            raise ValueError(f"{name!r} is {what}, expected a folder that holds {' and '.join(files)}: check the path")
        source, paths = self, list[Path]()
        for file in files:
            with _explained(name, file):
                paths.append(source._download(file))
            source = source.at(commit_of(paths[-1]))  # all of one commit, even if somebody pushes meanwhile
        return paths[0].parent

    def find_files(self, files: Sequence[str], *, force_download: bool = False) -> list[Path | None]:
        """The path of each of `files`; None for those that do not exist, or, offline, are not in the cache.

        Raises:
            ValueError: as `resolve_folder`, except for a missing file.
            ConnectionError: as `resolve_folder`; unless the Hub has said before whether the file exists.
        """
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        if self.is_folder:
            paths = [Path(self.repo_or_dir, self.subfolder, file) for file in files]
            return [path if path.is_file() else None for path in paths]
        is_offline = self.local_files_only or huggingface_hub.is_offline_mode()
        source, found = self, list[Path | None]()
        for file in files:
            path = None
            if force_download or not source._is_known_to_be_missing(file):
                with _explained(str(self.repo_or_dir), file):
                    try:
                        path = source._download(file, force_download=force_download)
                    except LocalEntryNotFoundError:
                        if not is_offline:
                            raise  # the Hub may have the file
                    except EntryNotFoundError:
                        pass
            found.append(path)
            source = source if path is None else source.at(commit_of(path))
        return found

    def find_local(self, file: str) -> Path | None:
        """A file of the folder, or one that is cached; None if there is none."""
        path = Path(self.repo_or_dir, self.subfolder, file) if self.is_folder else self._cached(file)
        return Path(path) if isinstance(path, str | Path) and Path(path).is_file() else None

    def find_commit(self, file: str) -> str | None:
        """The commit of a cached file that was downloaded under this revision; None if it is not cached."""
        cached = self._cached(file)
        return commit_of(cached) if isinstance(cached, str) else None

    def _download(self, file: str, **options: Any) -> Path:
        import huggingface_hub

        path = huggingface_hub.hf_hub_download(
            str(self.repo_or_dir),
            file,
            subfolder=self.subfolder or None,
            revision=self.revision,
            token=self.token,
            cache_dir=self.cache_dir,
            local_files_only=self.local_files_only,
            **options,
        )
        return Path(path)

    def _cached(self, file: str) -> Any:
        """What the Hub's cache knows about a file: its path, that it does not exist, or nothing."""
        import huggingface_hub

        path = f"{self.subfolder}/{file}" if self.subfolder else file
        return huggingface_hub.try_to_load_from_cache(
            str(self.repo_or_dir), path, cache_dir=self.cache_dir, revision=self.revision
        )

    def _is_known_to_be_missing(self, file: str) -> bool:
        """Whether the Hub has said before that this commit has no such file; a branch may have it by now."""
        import huggingface_hub

        if self.revision is None or re.fullmatch("[0-9a-f]{40}", self.revision) is None:
            return False
        return self._cached(file) is huggingface_hub._CACHED_NO_EXIST


def check_revision(repo_or_dir: str | Path, revision: str | None) -> None:
    """Refuse a revision of a folder, which has none."""
    if revision is not None and Path(repo_or_dir).is_dir():
        raise ValueError(
            f"revision={revision!r} with the folder {str(repo_or_dir)!r}, expected a repository: a folder has no "
            "revisions"
        )


def commit_of(path: str | Path) -> str | None:
    """The commit of a file in the Hub's cache, from its path; None for other files."""
    found = re.search(r"/snapshots/([0-9a-f]{40})/", Path(path).as_posix())
    return None if found is None else found[1]


@contextmanager
def _explained(name: str, file: str) -> Iterator[None]:
    """Turn the Hub's errors into ours, which say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(
            f"{name!r} is no folder here and no repository id, expected one of them: check the path"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if getattr(error.__cause__, "response", None) is not None:  # the Hub was asked, and answered
            raise _failure(name, file, error.__cause__) from error
        raise ValueError(
            f"{name!r} is no folder here, and {file} of such a repository is not in the cache, expected one of "
            "them: check the path, or download it with a connection and local_files_only=False"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise ValueError(
            f"{name!r} is no folder here, and the Hub gives no {file} for such a repository ({one_line(error)}): "
            "check the name, revision= and subfolder=, and token= if it is private"
        ) from error
    except errors.HTTPError as error:  # of httpx or httpx2, depending on the version of huggingface_hub
        raise _failure(name, file, error) from error


def _failure(name: str, file: str, error: BaseException | None) -> Exception:
    """The error for a Hub that answers without the file, or for a broken connection."""
    if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        return ValueError(
            f"the Hub refuses {file} of {name!r} ({one_line(error)}): check token=, which may be wrong, expired, or "
            "of a user without access to this repository"
        )
    return ConnectionError(
        f"{file} of {name!r} did not arrive ({one_line(error)}), and nothing of it is kept: try again later, or with "
        "local_files_only=True if it was downloaded before"
    )


def one_line(error: BaseException | None) -> str:
    """The message of the Hub's own library, on one line, without its advice on HTTP."""
    text = re.sub(r"For more information check: \S+", "", "" if error is None else str(error) or repr(error))
    return " ".join(text.split())
