# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained`, `from_pretrained` and `push_to_hub`: signatures as they were in 55573ba, and their help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

WHERE = (
    "revision: 'str | None' = None, token: 'str | bool | None' = None, cache_dir: 'str | Path | None' = None, "
    "local_files_only: 'bool' = False, subfolder: 'str' = ''"
)
SIZE = "max_shard_size: 'int | str' = '5GB'"
SAVE = "(self, save_directory: 'str | Path'{})"
LOAD = "(repo_or_dir: 'str | Path', *, {}{})"
PUSH = (
    "(self, repo_id: 'str', *, private: 'bool | None' = None, token: 'str | bool | None' = None, "
    "revision: 'str | None' = None, commit_message: 'str | None' = None, create_pr: 'bool' = False{})"
)
HEAD = (SAVE.format(""), LOAD.format(WHERE, ""), PUSH.format(""))
SIGNATURES = {
    "catalogue.index.ConstraintIndex": (
        SAVE.format(""),
        LOAD.format(WHERE, ", verify: 'bool | None' = None"),
        PUSH.format(""),
    ),
    "torch.draft_head.DraftHead": HEAD,
    "flax.draft_head.DraftHead": HEAD,
    "flax.model.FlaxModel": (
        SAVE.format(f", *, {SIZE}"),
        LOAD.format(WHERE, ", dtype: 'Any' = None"),
        PUSH.format(f", {SIZE}"),
    ),
}
METHODS = ("save_pretrained", "from_pretrained", "push_to_hub")
# What the help of one class says and that of others does not.
TOLD = {
    "catalogue.index.ConstraintIndex": ("", "mapped into memory", ""),
    "torch.draft_head.DraftHead": ("", "tensors that do not fit the config", ""),
    "flax.draft_head.DraftHead": ("", "never unpickled", ""),
    "flax.model.FlaxModel": ("max_shard_size: of a file", "dtype: what to convert parameters to", "max_shard_size"),
}


def class_of(name: str) -> Any:
    if name.startswith("flax"):
        pytest.importorskip("jax")
        pytest.importorskip("flax")
    module, _, class_name = name.rpartition(".")
    return getattr(import_module(f"hf_gr.{module}"), class_name)


def methods_of(name: str) -> list[Callable[..., Any]]:
    return [getattr(class_of(name), method) for method in METHODS]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_what_they_were(name: str) -> None:
    for method, signature in zip(methods_of(name), SIGNATURES[name], strict=True):
        assert str(inspect.signature(method)).startswith(f"{signature} -> ")


@pytest.mark.parametrize("name", SIGNATURES)
def test_help_tells_every_argument_and_what_is_special(name: str) -> None:
    for method, told in zip(methods_of(name), TOLD[name], strict=True):
        text = inspect.getdoc(method) or ""
        for argument in inspect.signature(method).parameters:
            assert argument == "self" or f"    {argument}: " in text, (method.__qualname__, argument)
        assert told in " ".join(text.split()), (method.__qualname__, told)


@pytest.mark.parametrize("name", SIGNATURES)
def test_unknown_arguments_are_refused(name: str) -> None:
    owner, (_, load, push) = class_of(name), methods_of(name)
    for argument in ("where", "force_download", "repo_id"):
        with pytest.raises(TypeError, match=argument):
            load("me/nothing", **{argument: None})
    for argument in ("upload", "save", "exist_ok"):
        with pytest.raises(TypeError, match=argument):
            push(owner.__new__(owner), "me/nothing", **{argument: None})
