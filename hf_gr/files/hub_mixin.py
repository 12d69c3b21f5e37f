# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The three methods of objects saved as a folder of files. Knows neither the files' format nor how the Hub works."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from .hub import Source, push_folder

Saved = TypeVar("Saved", bound="HubMixin")  # not `Self`, which beartype accepts only on whole classes


class Where(TypedDict, total=False):
    """The keyword arguments of `from_pretrained` that say where to load from; `Source` documents them."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    subfolder: str


class Upload(TypedDict, total=False):
    """The keyword arguments of `push_to_hub`; `push_folder` documents them."""

    private: bool | None
    token: str | bool | None
    revision: str | None
    commit_message: str
    create_pr: bool


class HubMixin:
    """`save_pretrained`, `from_pretrained` and `push_to_hub` of objects saved as a folder of files.

    A class provides `_save` and `_from_folder`. Signatures and docstrings of its methods spell out the keyword
    arguments of `Where` and `Upload`, and name the class's kind of object.

    Args:
        what: the kind of object, such as `"draft head"`; empty for a class that merely extends another one.
        files: the names of its files.
        saves: what saving does beyond writing them: a sentence for the docstring.
        refuses: what cannot be saved: the end of a sentence.
        returns: what loading gives: a sentence.
    """

    _what = ""
    _files: Sequence[str] = ()

    def __init_subclass__(
        cls,
        *,
        what: str = "",
        files: Sequence[str] = (),
        saves: str = "",
        refuses: str = "",
        returns: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        if what:
            cls._what, cls._files = what, files
            named = ", ".join(f"`{file}`" for file in files)
            told = textwrap.fill(saves, 110).replace("\n", "\n        ")
            words = {"class": cls.__name__, "module": cls.__module__, "what": what, "files": named, "saves": told}
            words |= {"refuses": refuses, "returns": returns}
            for name in ("save_pretrained", "from_pretrained", "push_to_hub"):
                setattr(cls, name, _spelled_out(inspect.getattr_static(cls, name), words))

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write {files} and, if there is none yet, a model card.

        {saves}
        An interrupted save leaves the previous {what} readable.

        Args:
            save_directory: a folder, created if necessary; that of a model makes a checkpoint that carries its {what}.

        Raises:
            ValueError: a file has the folder's name, or {refuses}.
            OSError: the disk is full or read-only; the previous {what} is still readable.
        """
        directory = Path(save_directory)
        self._save(directory, name=directory.resolve().name)

    @classmethod
    def from_pretrained(cls: type[Saved], repo_or_dir: str | Path, **where: Unpack[Where]) -> Saved:
        """Load a {what} from a folder or from a repository of the Hub.

        Args:
            repo_or_dir: a folder with the files, or a repository id such as `"me/recommender"`.
            **where: revision, token, cache and subfolder: see `hf_gr.files.hub.Source`.

        Returns:
            {returns}

        Raises:
            ValueError: a file that is missing, truncated, altered, of a newer format, or not safetensors (never
                unpickled); tensors that do not fit the config; a repository that does not exist, or not for this
                token.
            ConnectionError: the Hub is down, or the connection broke; nothing is kept of a file that broke off.
        """
        return cls._from_folder(Source(repo_or_dir, **where).resolve_folder(cls._files))

    def push_to_hub(self, repo_id: str, **upload: Unpack[Upload]) -> str:
        """Upload the {what} to a Hub repository, created if necessary; an existing model card is kept.

        Args:
            repo_id: the repository, such as `"me/recommender"`; without a user's name it is your own.
            **upload: visibility, token, revision and message: see `hf_gr.files.hub.push_folder`.

        Returns:
            The commit's URL. All files are one commit: if anything fails, the repository is unchanged, and pushing
            again uploads only what is missing.

        Raises:
            ValueError: it cannot be saved; no repository is created then.
            ConnectionError: a file could not be uploaded.
            huggingface_hub.errors.HTTPError: the Hub refuses, or is down.
        """
        return self._push(repo_id, upload)

    def _push(self, repo_id: str, upload: Upload, **options: Any) -> str:
        """Upload what `_save` writes with these options."""
        upload.setdefault("commit_message", f"Upload {self._what}")
        return push_folder(lambda folder, name: self._save(folder, name=name, **options), repo_id, **upload)

    def _save(self, directory: Path, *, name: str) -> None:
        """Save; the card tells users to load it by this name."""
        raise NotImplementedError

    @classmethod
    def _from_folder(cls: type[Saved], folder: Path) -> Saved:
        """Load the files of a folder."""
        raise NotImplementedError


def _spelled_out(method: Any, words: Mapping[str, str]) -> Any:
    """A method for one class, its words in the docstring and `**where` or `**upload` written out."""
    if isinstance(method, classmethod):
        return classmethod(_spelled_out(method.__func__, words))
    signature, text = inspect.signature(method), (method.__doc__ or "").format(**words)
    *own, last = signature.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        receiver = {"where": Source, "upload": push_folder}[last.name]
        given = _keywords_of(receiver, commit_message=f"Upload {words['what']}")
        place = next((at for at, each in enumerate(own) if each.kind is each.KEYWORD_ONLY), len(own))
        signature = signature.replace(parameters=[*own[:place], *given, *own[place:]])
        text = re.sub(rf" {{4}}\*\*{last.name}: .*", lambda _: _told_of(receiver, given), text)
    if signature.return_annotation == Saved.__name__:
        signature = signature.replace(return_annotation=words["class"])
    name = f"{words['class']}.{method.__name__}"

    @wraps(method)
    def made(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        return method(*args, **kwargs)

    facts: Any = made
    facts.__doc__, facts.__signature__, facts.__qualname__, facts.__module__ = text, signature, name, words["module"]
    annotations = {each.name: each.annotation for each in signature.parameters.values()}
    facts.__annotations__ = {each: kind for each, kind in annotations.items() if kind is not inspect.Parameter.empty}
    facts.__annotations__["return"] = method.__annotations__["return"]
    return made


def _keywords_of(receiver: Any, **defaults: str) -> list[inspect.Parameter]:
    """The parameters that `**where` or `**upload` stands for, as keywords, each with a default."""
    given = inspect.signature(receiver).parameters.values()
    return [
        each.replace(kind=each.KEYWORD_ONLY, default=defaults.get(each.name, each.default))
        for each in given
        if each.name not in ("repo_or_dir", "save", "repo_id")
    ]


def _told_of(receiver: Any, parameters: Sequence[inspect.Parameter]) -> str:
    """The entries of some parameters in a docstring, indented for a method's."""
    text = inspect.getdoc(receiver) or ""
    entries = (re.search(rf"^    {each.name}: .*(?:\n     .*)*", text, re.MULTILINE) for each in parameters)
    return "\n".join(entry[0] for entry in entries if entry is not None).replace("\n", "\n        ")
