# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The three methods of objects saved as a folder of files. Does not know the files' format.

`huggingface_hub.ModelHubMixin` is not used: it reads and writes a `config.json`, which in the folder of a model is the
model's, and knows no `subfolder` and no `verify`.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from .hub import Source, one_line

Saved = TypeVar("Saved", bound="HubMixin")  # not `Self`, which beartype accepts only on whole classes


class HubMixin:
    """`save_pretrained`, `from_pretrained` and `push_to_hub` of objects saved as a folder of files.

    A class provides `_save` and `_from_folder`.

    Args:
        what: the kind of object, such as `"draft head"`; empty for a class that merely extends another one.
        files: the names of its files.
    """

    _what = ""
    _files: Sequence[str] = ()

    def __init_subclass__(cls, *, what: str = "", files: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if what:
            cls._what, cls._files = what, files

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the files of this object and, if there is none yet, a model card.

        An interrupted save leaves the previous files readable.

        Args:
            save_directory: a folder, created if necessary; that of a model makes a checkpoint that carries it.

        Raises:
            ValueError: a file has the folder's name, or there is nothing that can be saved, such as a catalogue
                without items.
            OSError: the disk is full or read-only; the previous files are still readable.
        """
        directory = Path(save_directory)
        self._save(directory, name=directory.resolve().name)

    @classmethod
    def from_pretrained(
        cls: type[Saved],
        repo_or_dir: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
    ) -> Saved:
        """Load it from a folder or from a repository of the Hub.

        Args:
            repo_or_dir: a folder with the files, or a repository id such as `"me/recommender"`.
            revision: branch, tag or commit of the repository.
            token: access token of the Hub, or True for the stored one.
            cache_dir: where downloads are kept; the Hub's own cache by default.
            local_files_only: use only what is cached.
            subfolder: folder inside `repo_or_dir`.

        Raises:
            ValueError: a file that is missing, truncated, altered, of a newer format, or not safetensors (never
                unpickled); tensors that do not fit the config; a repository that does not exist, or not for this
                token.
            ConnectionError: the Hub is down, or the connection broke; nothing is kept of a file that broke off.
        """
        source = Source(repo_or_dir, revision, token, cache_dir, local_files_only, subfolder)
        return cls._from_folder(source.resolve_folder(cls._files))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        **saving: Any,
    ) -> str:
        """Upload it to a Hub repository, created if necessary; an existing model card is kept.

        Args:
            repo_id: the repository, such as `"me/recommender"`; without a user's name it is your own.
            private: create a private repository; an existing one keeps its visibility.
            token: access token of the Hub; by default the stored one.
            revision: branch to push to, created if necessary, or a pull request such as `"refs/pr/1"`.
            commit_message: of the commit; by default it says what is uploaded.
            create_pr: open a pull request instead.
            saving: other arguments of `save_pretrained`: `max_shard_size` of a `FlaxModel`.

        Returns:
            The commit's URL. All files are one commit: if anything fails, the repository is unchanged, and pushing
            again uploads only what is missing.

        Raises:
            ValueError: it cannot be saved; no repository is created then.
            ConnectionError: a file could not be uploaded.
            huggingface_hub.errors.HTTPError: the Hub refuses, or is down.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            self._save(folder, name=repo_id, **saving)  # first: if it cannot be saved, no repository is created
            api, full_id = HfApi(token=token), repo_id
            try:
                full_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                if full_id != repo_id:  # the Hub prepended the user's name
                    (folder / "README.md").unlink()
                    self._save(folder, name=full_id, **saving)
                if revision is not None and not create_pr and not revision.startswith("refs/"):  # as of a pull request
                    api.create_branch(full_id, branch=revision, exist_ok=True)
                kept = ["README.md"] if api.file_exists(full_id, "README.md", revision=revision) else None
                commit = api.upload_folder(
                    repo_id=full_id,
                    folder_path=folder,
                    revision=revision,
                    commit_message=commit_message or f"Upload {self._what}",
                    create_pr=create_pr,
                    ignore_patterns=kept,
                )
            except OfflineModeIsEnabled as error:
                raise ConnectionError(f"the Hub did not take {full_id}: unset HF_HUB_OFFLINE, which is on") from error
            except RuntimeError as error:  # for a large file; its cause says more
                raise ConnectionError(
                    f"{full_id} is unchanged: a file was not uploaded ({one_line(error)} "
                    f"{one_line(error.__cause__)}): push again, which uploads only what is missing"
                ) from error
            except HTTPError as error:
                if hasattr(error, "response"):  # the Hub's own refusal
                    raise
                raise ConnectionError(
                    f"the Hub did not take {full_id} ({one_line(error)}): check the connection"
                ) from error
        return commit.commit_url

    def _save(self, directory: Path, *, name: str) -> None:
        """Save; the card tells users to load it by this name."""
        raise NotImplementedError

    @classmethod
    def _from_folder(cls: type[Saved], folder: Path) -> Saved:
        """Load the files of a folder."""
        raise NotImplementedError
